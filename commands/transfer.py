"""kinlens-index export, import, backup, restore, publish: copy galleries."""

import contextlib
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer

from kinlens.commands import stores
from kinlens.commands.console import err, print_report, progress
from kinlens.commands.options import (
    GalleryArgument,
    ImageRootOption,
    Index,
    IndexDeviceOption,
    IndexOptions,
    JsonOption,
    MemoryOption,
    RecallOption,
    StoreArgument,
    VectorTypeOption,
)
from kinlens.embedder.errors import GalleryError, InvalidParameterError
from kinlens.indexer.exchange.milvus_index import MilvusIndex
from kinlens.indexer.exchange.milvus_load import import_to_milvus
from kinlens.indexer.exchange.parquet import export_gallery
from kinlens.indexer.exchange.publish import publish as publish_snapshot
from kinlens.indexer.galleries import copy_bytes
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.index_types import IndexKind
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.ingest.build import ImportReport, import_gallery
from kinlens.indexer.ingest.foreign import Tables
from kinlens.indexer.live.backup import restore_backup, write_backup
from kinlens.indexer.types import MILVUS, GalleryExport, Progress, milvus_address, seconds_of
from kinlens.quality.golden import GoldenSet

app = typer.Typer()

_IMAGE_RETRY_S = 600.0


@app.command(epilog="Example: kinlens-index export galleries/shop --out shop.parquet")
def export(
    gallery: StoreArgument,
    file: Annotated[Path, typer.Option("--out", help="Parquet file to write.")],
    json: JsonOption = False,
) -> None:
    """Write all items with vectors and attributes to a Parquet file."""
    with stores.opened(gallery) as store:
        with progress(store.size, "Exporting") as advance:
            count = export_gallery(store, file, stores.facts_of(store), advance)
        print_report({"file": str(file), "items": count}, json, f"{count:,} items in {file}.")


@app.command(
    "import", epilog="Example: kinlens-index import shop.parquet --out galleries/shop --index hnsw"
)
def import_(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="File of `export`, vectors of `embed`, another gallery, or your own "
            "vectors: Parquet, Arrow, .npy.",
        ),
    ],
    gallery: Annotated[
        str,
        typer.Option("--out", help="Folder of the new gallery, or milvus://HOST:PORT/NAME."),
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the gallery in URLs; by default that of SOURCE.")
    ] = None,
    index: Annotated[
        Literal["auto", IndexKind, MilvusIndex] | None,
        typer.Option(
            help="Index type; auto picks one that fits the memory. ivf-flat, ivf-rabitq and "
            "diskann are for Milvus, ivf-pq for a folder."
        ),
    ] = None,
    memory_mb: MemoryOption = None,
    target_recall: RecallOption = None,
    device: IndexDeviceOption = None,
    vector_type: VectorTypeOption = "fp32",
    bundle: Annotated[
        Path | None, typer.Option(help="The bundle that computed your own vectors.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model of your own vectors, without a bundle.")
    ] = None,
    key_column: Annotated[
        str | None, typer.Option(help="Column of the keys, such as key, id, sku.")
    ] = None,
    vector_column: Annotated[str | None, typer.Option(help="Column of the vectors.")] = None,
    columns: Annotated[
        str | None,
        typer.Option(help="Columns to store as attributes: colour,price; by default all others."),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Text file with one key per line, for a .npy file.")
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(help="CSV list for a .npy file: column key and attributes, row by row."),
    ] = None,
    image_root: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder or address of the images in the columns path and sha256."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Import a gallery from an exported file, vectors, or a gallery in another engine.

    An existing gallery is replaced. To resume an interrupted import, run the same command again.
    """
    if not gallery.startswith(MILVUS):
        _refuse_index_of_milvus(index)
    else:
        halved = None if vector_type == "fp32" else vector_type
        _refuse_options_of_folders(
            {
                "--memory-mb": memory_mb,
                "--target-recall": target_recall,
                "--index-device": device,
                "--vector-type": halved,
            }
        )
    chosen = None if columns is None else [name.strip() for name in columns.split(",") if name]
    tables = partial(
        Tables,
        key_column=key_column,
        vector_column=vector_column,
        columns=chosen,
        keys=keys,
        csv=csv,
    )
    with stores.content_of(sources, tables, bundle, model, image_root) as dump:
        with progress(dump.count, "Importing") as advance:
            if gallery.startswith(MILVUS):
                report = _imported_into(gallery, dump, index or "auto", advance)
            else:
                given = IndexOptions(cast(Index | None, index), memory_mb, target_recall, device)
                settings = given.over(IndexSettings())
                indexed = advance.then("Indexing", dump.count)
                report = import_gallery(
                    dump, gallery, name, settings, advance, vector_type, indexed
                )
        text = f"Gallery {gallery} ({report.name}): {report.items:,} items imported."
        print_report(report, json, text)
        if not gallery.startswith(MILVUS):
            stores.calibrate(gallery)


@app.command(epilog="Example: kinlens-index backup galleries/shop --out backups/shop-1")
def backup(
    gallery: GalleryArgument,
    folder: Annotated[Path, typer.Option("--out", help="New folder for the backup.")],
    json: JsonOption = False,
) -> None:
    """Write a consistent copy of a gallery, while it is in use."""
    GoldenSet(gallery).check()
    with progress(copy_bytes(gallery), "Copying", "bytes") as advance:
        report = write_backup(gallery, folder, advance)
    size = f"{report.items:,} items, {report.bytes / 1e6:,.1f} MB"
    print_report(report, json, f"Backup {folder} of {report.name}: {size}.")


@app.command(epilog="Example: kinlens-index restore backups/shop-1 --out galleries/shop --replace")
def restore(
    source: Annotated[Path, typer.Argument(metavar="BACKUP", help="Folder of the backup.")],
    gallery: Annotated[Path, typer.Option("--out", help="Folder of the gallery.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an existing gallery.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Restore a gallery from a backup, after checking all its files."""
    GoldenSet(source).check()
    with progress(copy_bytes(source), "Copying", "bytes") as advance:
        manifest = restore_backup(source, gallery, replace=replace, on_progress=advance)
    report = {"name": manifest.name, "generation": manifest.generation}
    print_report(report, json, f"Gallery {gallery} ({manifest.name}) restored from {source}.")


@app.command(
    epilog="Example: kinlens-index publish galleries/shop s3://shop/gallery --pictures --every 5s"
)
def publish(
    gallery: GalleryArgument,
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            help="Folder, or fsspec address such as s3://shop/gallery.",
        ),
    ],
    with_images: Annotated[
        bool, typer.Option("--pictures", help="Also upload the images of the items.")
    ] = False,
    image_root: ImageRootOption = None,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Replace the folder that published here before."),
    ] = False,
    every: Annotated[
        str | None,
        typer.Option(help="Publish changes at this interval until Ctrl-C: 5s, 2m."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Publish a snapshot of a gallery, for services on other hosts.

    Only changes since the last snapshot are uploaded. The gallery stays in use. Services load the
    snapshots with kinlens-serve --gallery NAME=ADDRESS.
    """
    interval_s = None if every is None else _seconds(every)
    with contextlib.closing(Gallery.open(gallery, load_index=False)) as opened:
        size = opened.size
    with progress(size, "Publishing") as advance:
        report = publish_snapshot(
            gallery,
            address,
            with_images=with_images,
            image_root=image_root,
            take_over=take_over,
            on_progress=advance,
        )
    print_report(report, json)
    checked_at = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        while interval_s is not None:
            time.sleep(interval_s)
            # Retry images that could not be read before.
            is_due = with_images and time.monotonic() - checked_at > _IMAGE_RETRY_S
            checked_at = time.monotonic() if is_due else checked_at
            try:
                report = publish_snapshot(
                    gallery, address, with_images=is_due, image_root=image_root
                )
            except GalleryError as error:  # the next interval tries again
                err.print(str(error), soft_wrap=True)
                continue
            if report.uploaded_bytes:
                print_report(report, json)


def _refuse_index_of_milvus(index: str | None) -> None:
    """Raises: InvalidParameterError."""
    kinds = get_args(IndexKind)
    if index in get_args(MilvusIndex) and index not in kinds:
        raise InvalidParameterError(
            f"--index {index} is only for Milvus: for a gallery in a folder choose auto, "
            f"{', '.join(kinds)}."
        )


def _refuse_options_of_folders(given: Mapping[str, object]) -> None:
    """Raises: InvalidParameterError."""
    for option, value in given.items():
        if value is not None:
            raise InvalidParameterError(
                f"{option} is only for a gallery in a folder: omit it, and choose the index on "
                "Milvus with --index (ivf-rabitq and diskann need less memory)."
            )


def _imported_into(
    address: str, dump: GalleryExport, index: str, on_progress: Progress
) -> ImportReport:
    uri, name = milvus_address(address)
    token = stores.milvus_token()
    with contextlib.closing(
        import_to_milvus(dump, uri, name, token=token, index=index, on_progress=on_progress)
    ) as store:
        err.print(store.index_text(), soft_wrap=True)
        return ImportReport(
            name=store.name,
            bundle_id=store.bundle_id,
            dim=store.dim,
            items=store.size,
            generation=store.generation,
        )


def _seconds(text: str) -> float:
    seconds = seconds_of(text)
    if seconds is None or not 0.1 <= seconds <= 86_400:
        raise InvalidParameterError(
            f"every = {text!r:.40} is not a time from 0.1 s to one day. Use a value such as 5s or "
            "2m."
        )
    return seconds
