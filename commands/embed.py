"""kinlens-index embed: embed a large source on a cluster, before a gallery is built."""

from pathlib import Path
from typing import Annotated

import typer

from kinlens.commands.console import (
    errors_shown,
    exit_with_skipped,
    failure_lines,
    print_report,
    progress,
)
from kinlens.commands.options import BatchOption, DeviceOption, JsonOption
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.manifest import Engine, Precision
from kinlens.indexer.exchange.objects import REMOTE
from kinlens.indexer.ingest.cluster import SHARD_SIZE, embed_on_cluster, remote_source
from kinlens.indexer.ingest.embed import faults_of
from kinlens.indexer.ingest.sources import Source, csv_source, folder_source

app = typer.Typer()


@app.command(
    epilog="Example: kinlens-index embed s3://shop/images --bundle bundles/shop --out "
    "s3://shop/vectors --ray auto"
)
def embed(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="Folder, CSV list, or fsspec address such as s3://shop/a."
        ),
    ],
    bundle: Annotated[Path, typer.Option(help="Model bundle that embeds the images.")],
    out: Annotated[str, typer.Option(help="Folder or fsspec address for the vectors.")],
    root: Annotated[
        str | None,
        typer.Option(
            help="Folder or address that the paths of a list are relative to; by default the "
            "folder of the list."
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Ray cluster, or auto; by default this machine only."),
    ] = None,
    device: DeviceOption = "cpu",
    precision: Annotated[Precision, typer.Option(help="Numeric precision of the model.")] = "fp32",
    engine: Annotated[Engine, typer.Option(help="Library that runs the model.")] = "onnxruntime",
    batch_size: BatchOption = 32,
    shard_size: Annotated[
        int, typer.Option(min=1, max=100_000, help="Images per file of vectors.")
    ] = SHARD_SIZE,
    json: JsonOption = False,
) -> None:
    """Embed images into Parquet files, on all cores of this machine or on a Ray cluster.

    To resume an interrupted run, run the same command again; existing files are kept. Then build a
    gallery: kinlens-index build --vectors OUT.
    """
    with errors_shown():
        given = _source(source, root)
        # One thread, because there is one actor per core.
        session = SessionSettings(device, 1, precision=precision, engine=engine)
        with progress(given.count, "Embedding", "images") as advance:
            report = embed_on_cluster(
                given,
                bundle,
                session,
                out,
                ray_address=ray,
                batch_size=batch_size,
                shard_size=shard_size,
                on_progress=advance,
            )
        text = (
            f"{out}: {report.items:,} vectors of {report.images:,} images in {report.shards:,} "
            f"files ({report.embedded:,} images now). Build a gallery: kinlens-index build "
            f"--vectors {out} --out GALLERY"
        )
        skipped = (*faults_of(given), *report.failures)
        failures = failure_lines(skipped, report.images, "(--json lists all of them)")
        print_report(report, json, *given.omitted.lines(), text, *failures)
        exit_with_skipped(skipped)


def _source(text: str, root: str | None) -> Source:
    csv = Path(text) if text.lower().endswith(".csv") else None
    if csv is None and root is not None:
        raise typer.BadParameter("--root is only for a CSV list. Omit it if SOURCE is a folder.")
    if csv is not None and root is not None and REMOTE in root:
        return remote_source(root, csv)
    if csv is not None:
        return csv_source(csv, root)
    return remote_source(text) if REMOTE in text else folder_source(text)
