"""kinlens-index sync: make a gallery equal to a folder or list, each night."""

from pathlib import Path
from typing import Annotated

import typer

from kinlens.commands import stores
from kinlens.commands.console import exit_with_skipped
from kinlens.commands.options import (
    BatchOptions,
    ImageRootOption,
    ModelOptions,
    NoCompactOption,
    StoreArgument,
)
from kinlens.embedder.programs.console import Printed, command, refuse
from kinlens.indexer.ingest.sync import source_of
from kinlens.library.stores import bundle_of

app = typer.Typer()


@command(app, "kinlens-index sync galleries/shop shop/images --bundle bundles/shop --dry-run")
def sync(
    gallery: StoreArgument,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Folder or address of images in the image root, or a CSV list with paths relative "
            "to it.",
        ),
    ],
    model: ModelOptions,
    batches: BatchOptions,
    csv: Annotated[
        Path | None, typer.Option(help="CSV list, as for build; its paths are relative to SOURCE.")
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Model bundle of the gallery; by default the one that built it."),
    ] = None,
    max_removed: Annotated[
        str, typer.Option(help="Refuse to remove more items than this part, or this number.")
    ] = "10%",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")
    ] = False,
    uploads: Annotated[
        bool,
        typer.Option("--uploads", help="Also remove items without a file, such as uploaded ones."),
    ] = False,
    checksum: Annotated[
        bool, typer.Option("--checksum", help="Read every file, not only those with a new date.")
    ] = False,
    image_root: ImageRootOption = None,
    no_compact: NoCompactOption = False,
) -> Printed:
    """Make a gallery equal to a folder or list: add, update, rename and remove items.

    Exits with 0 if the gallery is in step, 1 if nothing or not all was done, 3 if all was done but
    some images cannot be read; their items stay. To complete an interrupted run, repeat it.
    """
    with stores.gallery_at(
        gallery,
        image_root=image_root,
        open_bundle=lambda store: model.open(bundle or bundle_of(store)),
    ) as opened:
        found = source_of(opened.store, source, csv)
        report = opened.sync(
            found,
            max_removed=max_removed,
            uploads=uploads,
            checksum=checksum,
            dry_run=dry_run,
            check=False,
            upkeep=False,
            **batches.choice,
        )
        yield report, *found.omitted.lines(), f"Gallery {gallery}: {report}"
        if report.refused:
            refuse(report.refused)
        if not dry_run:
            stores.compact_if_due(opened.store, no_compact)
    exit_with_skipped(report.failures)
