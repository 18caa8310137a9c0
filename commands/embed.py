"""kinlens-index embed: embed a large source on several machines, before a gallery is built."""

from pathlib import Path
from typing import Annotated

import typer

from kinlens.commands.console import (
    exit_with_skipped,
    failure_lines,
    print_report,
)
from kinlens.commands.options import BatchOption, DeviceOption, JsonOption
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.manifest import Engine, Precision
from kinlens.embedder.programs.console import command
from kinlens.embedder.programs.progress import progress_bar
from kinlens.indexer.ingest.embed import refuse_unreadable
from kinlens.indexer.ingest.parts import (
    SHARD_SIZE,
    Part,
    SourceAt,
    begun_shards,
    check_ray,
    embed_missing,
)

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
    json: JsonOption = False,
) -> None:
    """Embed images into Parquet files: on this machine, in parts on several, or on Ray.

    To resume an interrupted run, run the same command again; existing files are kept, and so is the
    list of images that the first run made. Then build a gallery: kinlens-index build --vectors OUT.
    The exit status is 0 if all files of the part exist, 3 if they exist but lack images that cannot
    be read, 1 after an error. Only repeat the command after 1.
    """
    if ray is not None:
        if part != "1/1":
            raise typer.BadParameter("--ray runs all parts. Omit --part.")
        check_ray(ray)
    given, own = _source(source, root), Part.parse(part)
    # One thread, because each core has its own image.
    session = SessionSettings(device, 1, precision=precision, engine=engine)
    shards = begun_shards(given, bundle, session, out, shard_size)
    embedded, due = 0, shards.manifest.images_in(own.missing(shards))
    with progress_bar(due, "Embedding", "images", shown=True) as advance:
        for count in embed_missing(shards, own, bundle, session, ray, batch_size):
            embedded += count
            advance(count)
    manifest, missing = shards.manifest, shards.missing()
    failures = tuple(shards.failures())
    report = {
        "images": manifest.images,
        "embedded": embedded,
        "items": manifest.images - manifest.images_in(missing) - len(failures),
        "shards": manifest.shards,
        "missing": len(missing),
        "failures": failures,
        "bundle_id": manifest.bundle_id,
    }
    if not missing:
        refuse_unreadable(manifest.source, manifest.images, failures)
    text = (
        f"{out}: {report['items']:,} vectors of {manifest.images:,} images in {manifest.shards:,} "
        f"files ({embedded:,} images now). "
    )
    text += (
        f"{len(missing):,} files are missing: run the other parts."
        if missing
        else f"Build a gallery: kinlens-index build --vectors {out} --out GALLERY"
    )
    skipped = (*manifest.faults, *failures)
    lines = failure_lines(skipped, manifest.images, "(--json lists all of them)")
    print_report(report, json, *manifest.omitted, text, *lines)
    faults = manifest.faults if own.number == 1 else ()
    exit_with_skipped((*faults, *shards.failures(own.shards(shards))))


def _source(text: str, root: str | None) -> SourceAt:
    if root is not None and not text.lower().endswith(".csv"):
        raise typer.BadParameter("--root is only for a CSV list. Omit it if SOURCE is a folder.")
    return SourceAt.of(text, root)
