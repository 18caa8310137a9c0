"""kinlens-index embed: embed a large source on several machines, before a gallery is built."""

from pathlib import Path
from typing import Annotated

import typer

from kinlens.commands.console import exit_with_skipped
from kinlens.commands.options import BatchOption, DeviceOption
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.manifest import Engine, Precision
from kinlens.embedder.programs.console import Printed, command
from kinlens.indexer.ingest.parts import SHARD_SIZE, Part, SourceAt
from kinlens.library import galleries

app = typer.Typer()


@command(
    app,
    "kinlens-index embed s3://shop/images --bundle bundles/shop --out s3://shop/vectors "
    "--part 3/16",
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
    part: Annotated[
        str, typer.Option(metavar="K/N", help="Make part K of N, with one call on each machine.")
    ] = "1/1",
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run all parts on this Ray cluster, or auto."),
    ] = None,
    device: DeviceOption = "cpu",
    precision: Annotated[Precision, typer.Option(help="Numeric precision of the model.")] = "fp32",
    engine: Annotated[Engine, typer.Option(help="Library that runs the model.")] = "onnxruntime",
    batch_size: BatchOption = 32,
    shard_size: Annotated[
        int, typer.Option(min=1, max=100_000, help="Images per file of vectors.")
    ] = SHARD_SIZE,
) -> Printed:
    """Embed images into Parquet files: on this machine, in parts on several, or on Ray.

    To resume an interrupted run, run the same command again; existing files are kept, and so is the
    list of images that the first run made. Then build a gallery: kinlens-index build --vectors OUT.
    The exit status is 0 if all files of the part exist, 3 if they exist but lack images that cannot
    be read, 1 after an error. Only repeat the command after 1.
    """
    if ray is not None and part != "1/1":
        raise typer.BadParameter("--ray runs all parts. Omit --part.")
    if root is not None and not source.lower().endswith(".csv"):
        raise typer.BadParameter("--root is only for a CSV list. Omit it if SOURCE is a folder.")
    report = galleries.embed(
        SourceAt.of(source, root),
        Part.parse(part),
        bundle,
        # One thread, because each core has its own image.
        SessionSettings(device, 1, precision=precision, engine=engine),
        out,
        ray=ray,
        batch_size=batch_size,
        shard_size=shard_size,
        shown=True,
    )
    yield report
    exit_with_skipped(report.skipped)
