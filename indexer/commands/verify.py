"""kinlens-index verify: check that a gallery is complete and finds its items."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kinlens.embedder.types import SHORT
from kinlens.indexer.checks.verify import (
    VerifyReport,
    VerifySettings,
    sample_size,
    size_of,
    verify_gallery,
)
from kinlens.indexer.commands import options
from kinlens.indexer.commands.console import SHOWN, errors_shown, print_report, progress
from kinlens.indexer.commands.options import (
    DeviceOption,
    EngineOption,
    FallbackOption,
    GalleryArgument,
    ImageRootOption,
    JsonOption,
    PrecisionOption,
    RecallOption,
)

app = typer.Typer()


@app.command(
    epilog="Example: kinlens-index verify galleries/shop --bundle bundles/shop --sample 500"
)
def verify(
    gallery: GalleryArgument,
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
    device: DeviceOption = "cpu",
    allow_cpu_fallback: FallbackOption = False,
    precision: PrecisionOption = "fp32",
    engine: EngineOption = "auto",
    json: JsonOption = False,
) -> None:
    """Check files, items and recall; exits with status 1 if a check fails.

    All hashes and the catalogue are checked, each checked item must find itself, and searches must
    find the true neighbours. Without --bundle the stored vectors are the queries, so a vector
    stored for the wrong item is not detected. Without --queries recall is measured with stored
    vectors; pass vectors of your users' queries to measure the recall that they get.
    """
    with errors_shown():
        embedder = (
            options.open_embedder(bundle, device, allow_cpu_fallback, precision, engine)
            if bundle
            else None
        )
        vectors = None if queries is None else options.read_vectors(queries)
        settings = VerifySettings(sample, image_root, vectors, target_recall)
        with progress(sample_size(size_of(gallery), sample), "Searching") as advance:
            report = verify_gallery(gallery, embedder, settings, advance)
        print_report(report, json, *_lines(report))
    if not report.is_good:
        raise typer.Exit(1)


def _lines(report: VerifyReport) -> Iterator[str]:
    for problem in report.problems[:SHOWN]:
        yield f"{problem.key}: {problem.reason}"
    yield (
        f"Gallery {report.name}, version {report.version[:SHORT]}: files are intact, "
        f"{report.checked - len(report.problems):,} of {report.checked:,} checked items "
        f"({report.size:,} in all) find themselves."
    )
    if report.recall is not None:
        yield (
            f"recall@10 {report.recall:.4f} of {report.recall_queries:,} queries, "
            f"target {report.target_recall} (index {report.index or 'none'})."
        )
