"""kinlens-index update, remove, unremove, attributes: change the items of a gallery."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from kinlens.commands import stores
from kinlens.commands.options import NoCompactOption, StoreArgument, WhereOption
from kinlens.embedder.programs.console import Printed, command
from kinlens.embedder.sources.tables import PRODUCT
from kinlens.indexer.filters.tree import Exists
from kinlens.indexer.ingest.assignments import assigned, hints
from kinlens.indexer.ingest.products import changes_by_key
from kinlens.indexer.ingest.sources import csv_changes
from kinlens.indexer.ingest.tables import listed_keys
from kinlens.library.stores import note
from kinlens.values import AttributeType, AttributeValue

app = typer.Typer()

_SHOWN = 10

Action = Literal["drop", "retype"]
Change = Mapping[str, AttributeValue | None]
KeysArgument = Annotated[list[str] | None, typer.Argument(metavar="KEY", help="Keys of items.")]


@command(app, "kinlens-index update galleries/shop A17 --set price=12.5 --unset sale")
def update(
    gallery: StoreArgument,
    keys: KeysArgument = None,
    assign: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Value to set. New attributes: NAME:number=VALUE or NAME:text[]=A|B.",
        ),
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Attribute to remove.")
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(help="CSV list: column key or product, and the attributes to set."),
    ] = None,
    product: Annotated[
        list[str] | None,
        typer.Option(metavar="PRODUCT", help="Value of the attribute product; repeatable."),
    ] = None,
    where: WhereOption = None,
) -> Printed:
    """Change attributes of items, by key, by product or by filter, without embedding their images.

    All changes are made or none, except with --where, which commits 10,000 items at a time. A value
    has the type of the attribute in the gallery. A new attribute is text, unless it is written as
    NAME:number or NAME:boolean. NAME:text[]=S|M|L sets several values.
    """
    if csv and (keys or product or assign or unset or where):
        raise typer.BadParameter("Pass --csv, or keys with --set and --unset, not both.")
    if (keys or product) and where:
        raise typer.BadParameter("Pass keys or --product, or --where, not both.")
    if not csv and not ((keys or product or where) and (assign or unset)):
        raise typer.BadParameter(
            "Pass keys, --product or --where with --set or --unset, or a list with --csv."
        )
    if keys and product:
        raise typer.BadParameter("Pass keys or --product, not both.")
    with stores.gallery_at(gallery) as opened:
        schema = opened.schema()
        values = assigned(assign or (), unset or (), schema)
        if where:
            named = opened.count(where)
            changed = opened.patch_where(where, values)
        else:
            column, changes = (PRODUCT if product else "key"), dict[str, Change]()
            if csv:
                column, changes = csv_changes(csv, schema)
            else:
                changes = dict.fromkeys(product or keys or (), values)
            if column == PRODUCT:
                changes = changes_by_key(opened.store, changes)
            named, changed = len(changes), opened.patch(changes)
        report = {"named": named, "changed": changed}
        yield report, f"{changed:,} of {named:,} items changed."
        for hint in hints(values, assign if changed else None, schema):
            note(hint)
        stores.compact_if_due(opened.store, False)


@command(app, "kinlens-index remove galleries/shop --where 'sale = true' --dry-run")
def remove(
    gallery: StoreArgument,
    keys: KeysArgument = None,
    where: WhereOption = None,
    keys_from: Annotated[Path | None, typer.Option(help="Text file with one key per line.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the items without removing them.")
    ] = False,
    no_compact: NoCompactOption = False,
) -> Printed:
    """Remove items by key or by filter, without confirmation; try --dry-run first.

    `unremove` can restore them for at least one day, until the next automatic compaction. The
    command `compact` erases them at once.
    """
    if sum(map(bool, (keys, where, keys_from))) != 1:
        raise typer.BadParameter("Pass exactly one of: keys, --where, --keys-from.")
    with stores.gallery_at(gallery) as opened:
        unknown: list[str] = []
        if where:
            count = opened.count(where) if dry_run else opened.remove_where(where)
        else:
            chosen = list(dict.fromkeys(keys or listed_keys(keys_from or Path())))
            known = opened.store.stored(chosen)
            unknown = [key for key in chosen if key not in known]
            count = len(known) if dry_run else opened.remove(chosen)
        verb = "would be removed" if dry_run else "removed"
        text = f"{count:,} items {verb}; {opened.size:,} items in the gallery."
        yield {"removed": count, "dry_run": dry_run, "unknown": unknown}, text
        if unknown:
            note(f"Not in the gallery: {_some(unknown)}")
        if not dry_run:
            stores.compact_if_due(opened.store, no_compact)


@command(app, "kinlens-index unremove galleries/shop A17 B2")
def unremove(
    gallery: StoreArgument,
    keys: KeysArgument = None,
    keys_from: Annotated[Path | None, typer.Option(help="Text file with one key per line.")] = None,
) -> Printed:
    """Restore removed items, for at least a day after their removal or until `compact`.

    They get new item ids. Keys that belong to a new item are skipped.
    """
    if bool(keys) == bool(keys_from):
        raise typer.BadParameter("Pass either keys or --keys-from.")
    with stores.gallery_at(gallery, lack="does not keep removed items") as opened:
        chosen = list(dict.fromkeys(keys or listed_keys(keys_from or Path())))
        back = {item.key for item in opened.restore(chosen)}
        left = [key for key in chosen if key not in back]
        text = f"{len(back):,} items restored; {opened.size:,} items in the gallery."
        yield {"restored": len(back), "left": left}, text
        if left:
            note(f"Not restored: {_some(left)}")


@command(app, "kinlens-index attributes galleries/shop retype price number")
def attributes(
    gallery: StoreArgument,
    action: Annotated[
        Action | None, typer.Argument(metavar="[drop|retype]", help="Change to make.")
    ] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Attribute.")] = None,
    kind: Annotated[
        AttributeType | None,
        typer.Argument(metavar="[text|number|boolean]", help="New type, for retype."),
    ] = None,
) -> Printed:
    """List the attributes with their types and numbers of items, or change one of them.

    drop removes an attribute from every item, 10,000 at a time. retype converts every value as a
    cell of a CSV list would be read, or changes nothing and names a value that cannot be converted;
    other writers wait meanwhile.
    """
    if (action is None) != (name is None) or (action == "retype") != (kind is not None):
        raise typer.BadParameter(
            "Pass only the gallery, or drop NAME, or retype NAME text|number|boolean."
        )
    lack = "keeps attributes as they are" if name else ""
    with stores.gallery_at(gallery, lack=lack) as opened:
        if name is None:
            rows = [
                {"name": each, "type": type_, "items": opened.count(Exists(each))}
                for each, type_ in opened.schema().items()
            ]
            lines = [f"{row['name']}  {row['type']}  {row['items']:,} items" for row in rows]
            yield rows, *(lines or ["The items have no attributes."])
            return
        if kind is None:
            items = opened.drop_attribute(name)
            text = f"{items:,} items had the attribute {name}."
        else:
            items = opened.retype_attribute(name, kind)
            text = f"{items:,} values of {name} converted."
        stores.compact_if_due(opened.store, False)
        yield {"name": name, "items": items}, text


def _some(keys: Sequence[str]) -> str:
    more = len(keys) - _SHOWN
    return ", ".join(keys[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
