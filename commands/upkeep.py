"""kinlens-index compact, calibrate, plan, stats, verify: maintenance of galleries and plans."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from kinlens.commands.options import (
    GalleryArgument,
    ImageRootOption,
    IndexOptions,
    ModelOptions,
    RecallOption,
    StoreArgument,
    VectorTypeOption,
)
from kinlens.embedder.programs.console import Printed, command
from kinlens.indexer.checks.stats import stats_lines, stats_of
from kinlens.indexer.gallery import Gallery
from kinlens.library import quality, stores, upkeep

app = typer.Typer()


@command(app, "kinlens-index compact galleries/shop --index hnsw")
def compact(
    gallery: GalleryArgument,
    index: IndexOptions,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Rebuild the index even if nothing has changed.")
    ] = False,
) -> Printed:
    """Write added items to the index and erase removed ones, while the gallery is in use.

    Erased items cannot be restored. Index type, recall target and device are kept, unless an option
    changes them.
    """
    with contextlib.closing(Gallery.open(gallery)) as opened:
        report = upkeep.compact(
            opened, rebuild=rebuild, warn=stores.note, shown=True, **index.choice
        )
    yield report


@command(app, "kinlens-index calibrate galleries/shop --product sku")
def calibrate(
    gallery: GalleryArgument,
    product: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Attribute that names the product; by default product, else class."
        ),
    ] = None,
) -> Printed:
    """Fit the probability that a hit is right, by searching for items of the gallery.

    Commands that change a gallery, and the service, do this when a fifth of the items has changed.
    `golden run` fits a more accurate curve.
    """
    with contextlib.closing(Gallery.open(gallery)) as opened:
        found = quality.calibrate(opened, product, shown=True)
    yield found.without_queries()


@command(app, "kinlens-index plan 1000000 128 --memory-mb 1200")
def plan(
    n: Annotated[int, typer.Argument(metavar="N", help="Number of vectors.")],
    dim: Annotated[int, typer.Argument(metavar="DIM", help="Dimension of a vector.")],
    index: IndexOptions,
    vector_type: VectorTypeOption = "fp32",
    everything: Annotated[bool, typer.Option("--all", help="Compare all index types.")] = False,
) -> Printed:
    """Show the index type for N vectors and its cost, without building it."""
    if everything:
        report = upkeep.compare_plans(n, dim, vector_type=vector_type, **index.choice)
        yield report
    else:
        chosen = upkeep.plan(n, dim, vector_type=vector_type, **index.choice)
        yield upkeep.Plans.of(chosen), *chosen.lines()


@command(app, "kinlens-index stats galleries/shop --json")
def stats(gallery: StoreArgument) -> Printed:
    """Show facts about a gallery: size, index, disk and attributes."""
    with stores.opened(gallery) as store:
        facts = stats_of(store)
    yield facts, *stats_lines(facts)


@command(app, "kinlens-index verify galleries/shop --bundle bundles/shop --sample 500")
def verify(
    gallery: GalleryArgument,
    model: ModelOptions,
    bundle: Annotated[
        Path | None, typer.Option(help="Embed the images again with this bundle and compare.")
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(
            min=1, help="Items to check; by default all up to 10,000, 1,000 of larger galleries."
        ),
    ] = None,
    image_root: ImageRootOption = None,
    queries: Annotated[
        Path | None, typer.Option(help="Vectors to measure recall with: .npy, (Q, D).")
    ] = None,
    target_recall: RecallOption = None,
) -> Printed:
    """Check files, items and recall; exits with status 1 if a check fails.

    All hashes and the catalogue are checked, each checked item must find itself, and searches must
    find the true neighbours. Without --bundle the stored vectors are the queries, so a vector
    stored for the wrong item is not detected. Without --queries recall is measured with stored
    vectors; pass vectors of your users' queries to measure the recall that they get.
    """
    report = upkeep.verify(
        gallery,
        model.open(bundle) if bundle else None,
        sample=sample,
        image_root=image_root,
        queries=queries,
        target_recall=target_recall,
        shown=True,
    )
    yield report
    if not report.is_good:
        raise typer.Exit(1)
