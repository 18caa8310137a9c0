"""kinlens-index golden add, list, remove, run, runs, and guarantee: measure a gallery with labelled
queries.
"""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from kinlens.commands.options import CropOption, GalleryArgument, ModelOptions
from kinlens.embedder.programs.console import Printed, command, refuse
from kinlens.golden import GoldenQueries
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.assignments import label_of
from kinlens.library import quality
from kinlens.quality.guarantee import ACCEPT, HIGHEST, LEVEL, LOWEST

app = typer.Typer(no_args_is_help=True)
guarantees = typer.Typer()


@command(app, "kinlens-index golden add galleries/shop --query photo.jpg --keys A17,A18")
def add(
    gallery: GalleryArgument,
    query: Annotated[
        Path | None, typer.Option(help="Query image, such as a photo of a customer.")
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(help="Keys of the right items, with commas; quote a key with a comma."),
    ] = None,
    attribute: Annotated[
        str | None,
        typer.Option(metavar="NAME=VALUE", help="All items with this attribute value are right."),
    ] = None,
    no_match: Annotated[
        bool, typer.Option("--no-match", help="No item of the gallery is right.")
    ] = False,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Words, alone or added to the image. Repeat to join.", metavar="WORDS"),
    ] = None,
    crop: CropOption = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            help="CSV list: columns image, text and crop as in the options, and keys or an "
            "attribute. Empty cells mean no match."
        ),
    ] = None,
) -> Printed:
    """Add a query with its right items; an existing query gets the new label.

    Paths in a list are relative to its folder. All queries of a list are added, or none.
    """
    if bool(query or text) == bool(csv):
        raise typer.BadParameter("Pass either --query or --text with its label, or --csv.")
    if bool(keys) + bool(attribute) + no_match != bool(query or text):
        raise typer.BadParameter(
            "Pass one of --keys, --attribute and --no-match with --query or --text, and none with "
            "--csv."
        )
    if crop and not query:
        raise typer.BadParameter("--crop needs --query.")
    with contextlib.closing(Gallery.open(gallery, load_index=False)) as store:
        if csv:
            added = quality.add_golden_list(store, csv)
        else:
            split = quality.split_keys(keys) if keys else None
            name, value = label_of(attribute, store.schema()) if attribute else (None, None)
            one = quality.add_golden(
                store,
                query,
                keys=split,
                attribute=name,
                value=value,
                crop=crop,
                texts=text or (),
            )
            added = GoldenQueries(queries=[one])
    count = len(quality.golden(gallery).queries)
    yield added, f"{len(added.queries):,} queries labelled; {count:,} in all."


@command(app, "kinlens-index golden list galleries/shop", name="list")
def list_(gallery: GalleryArgument) -> Printed:
    """Show the queries and their labels. Exits with 1 if there are none."""
    found = quality.golden(gallery)
    yield found
    if not found.queries:
        refuse(f"The golden set of {gallery} is empty. Add queries: kinlens-index golden add.")


@command(app, "kinlens-index golden remove galleries/shop 0f3a91c2b7de")
def remove(
    gallery: GalleryArgument,
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="Ids from `golden list`.")],
) -> Printed:
    """Remove queries and their images. Reports of earlier runs are kept."""
    count = quality.remove_golden(gallery, *ids)
    left = quality.golden(gallery)
    yield left, f"{count:,} queries removed; {len(left.queries):,} in all."


@command(app, "kinlens-index golden run galleries/shop --bundle bundles/shop")
def run(
    gallery: GalleryArgument,
    bundle: Annotated[Path, typer.Option(help="Model bundle that the gallery was built with.")],
    model: ModelOptions,
    min_score: Annotated[
        float | None,
        typer.Option(
            min=-1,
            max=1,
            help="Minimum score of a match; by default the threshold for 1 % false matches.",
        ),
    ] = None,
    worst: Annotated[
        int, typer.Option(min=0, max=1000, help="Number of worst queries to show.")
    ] = 10,
) -> Printed:
    """Search with every query, measure recall and store the report."""
    embedder = model.open(bundle)
    opened = Gallery.open(gallery, expected_bundle_id=embedder.bundle_id)
    with contextlib.closing(opened) as store:
        report = quality.evaluate(store, embedder, min_score=min_score, worst=worst, shown=True)
    yield report


@command(app, "kinlens-index golden runs galleries/shop --json")
def runs(gallery: GalleryArgument) -> Printed:
    """Show the reports of earlier runs, newest first. Exits with 1 if there are none."""
    found = quality.golden_runs(gallery)
    yield found
    if not found.runs:
        refuse(f"The golden set of {gallery} was not run yet. Run it: kinlens-index golden run.")


@command(guarantees, "kinlens-index guarantee galleries/shop --bundle bundles/shop --by category")
def guarantee(
    gallery: GalleryArgument,
    model: ModelOptions,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Judge the golden set again with this bundle of the gallery."),
    ] = None,
    from_items: Annotated[
        bool,
        typer.Option(
            "--from-items",
            help="Judge items of the gallery instead: you state that queries are like them.",
        ),
    ] = False,
    level: Annotated[
        float, typer.Option(min=LOWEST, max=HIGHEST, help="Share of queries whose set is right.")
    ] = LEVEL,
    accept: Annotated[
        float,
        typer.Option(min=LOWEST, max=HIGHEST, help="Share of accepted queries that are right."),
    ] = ACCEPT,
    confidence: Annotated[
        float | None,
        typer.Option(min=LOWEST, max=HIGHEST, help="How sure --accept is; by default 0.95."),
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="NAME", help="Attribute to report each value of.")
    ] = None,
    separate: Annotated[
        bool, typer.Option("--separate", help="A limit for each value of --by with enough labels.")
    ] = False,
) -> Printed:
    """Show what answers guarantee: sets of products, and decisions without a person.

    It reads what the last `golden run` stored. With --bundle or --from-items it judges the labelled
    queries again, and the service uses the result: --confidence, --by and --separate are then kept,
    also by later runs.
    """
    embedder = None if bundle is None else model.open(bundle)
    expected = None if embedder is None else embedder.bundle_id
    with contextlib.closing(Gallery.open(gallery, expected_bundle_id=expected)) as store:
        report = quality.guarantee(
            store,
            embedder,
            level=level,
            accept=accept,
            confidence=confidence,
            by=by,
            separate=separate,
            from_items=from_items,
            shown=True,
        )
    yield report
