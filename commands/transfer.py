"""kinlens-index export, import, backup, restore, publish: copy galleries."""

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kinlens.commands.options import (
    GalleryArgument,
    ImageRootOption,
    IndexDeviceOption,
    MemoryOption,
    RecallOption,
    StoreArgument,
    VectorTypeOption,
)
from kinlens.embedder.programs.console import Printed, command
from kinlens.indexer.exchange.milvus_index import MilvusIndex
from kinlens.indexer.index.index_types import IndexKind
from kinlens.library import stores, upkeep

app = typer.Typer()


@command(app, "kinlens-index export galleries/shop --out shop.parquet")
def export(
    gallery: StoreArgument,
    file: Annotated[Path, typer.Option("--out", help="Parquet file to write.")],
) -> Printed:
    """Write all items with vectors and attributes to a Parquet file."""
    with stores.opened(gallery) as store:
        count = upkeep.export(store, file, shown=True)
    yield {"file": str(file), "items": count}, f"{count:,} items in {file}."


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name]


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """How to read vectors, and which gallery to make of them."""

    name: Annotated[
        str | None, typer.Option(help="Name of the gallery in URLs; by default that of SOURCE.")
    ] = None
    index: Annotated[
        Literal["auto", IndexKind, MilvusIndex] | None,
        typer.Option(
            help="Index type; auto picks one that fits the memory. ivf-flat, ivf-rabitq and "
            "diskann are for Milvus, ivf-pq for a folder."
        ),
    ] = None
    memory_mb: MemoryOption = None
    target_recall: RecallOption = None
    index_device: IndexDeviceOption = None
    vector_type: VectorTypeOption = "fp32"
    bundle: Annotated[
        Path | None, typer.Option(help="The bundle that computed your own vectors.")
    ] = None
    model: Annotated[
        str | None, typer.Option(help="Name of the model of your own vectors, without a bundle.")
    ] = None
    key_column: Annotated[
        str | None, typer.Option(help="Column of the keys, such as key, id, sku.")
    ] = None
    vector_column: Annotated[str | None, typer.Option(help="Column of the vectors.")] = None
    columns: Annotated[
        Any,
        typer.Option(
            parser=_names,
            metavar="<str>",
            help="Columns to store as attributes: colour,price; by default all others.",
        ),
    ] = None
    keys: Annotated[
        Path | None, typer.Option(help="Text file with one key per line, for a .npy file.")
    ] = None
    csv: Annotated[
        Path | None,
        typer.Option(help="CSV list for a .npy file: column key and attributes, row by row."),
    ] = None
    image_root: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder or address of the images in the columns path and sha256."
        ),
    ] = None


@command(app, "kinlens-index import shop.parquet --out galleries/shop --index hnsw", name="import")
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
    options: ImportOptions,
) -> Printed:
    """Import a gallery from an exported file, vectors, or a gallery in another engine.

    An existing gallery is replaced. To resume an interrupted import, run the same command again.
    """
    report = upkeep.import_gallery(sources, gallery, shown=True, **asdict(options))
    yield report, f"Gallery {gallery} ({report.name}): {report.items:,} items imported."


@command(app, "kinlens-index backup galleries/shop --out backups/shop-1")
def backup(
    gallery: GalleryArgument,
    folder: Annotated[Path, typer.Option("--out", help="New folder for the backup.")],
) -> Printed:
    """Write a consistent copy of a gallery, while it is in use."""
    report = upkeep.backup(gallery, folder, shown=True)
    size = f"{report.items:,} items, {report.bytes / 1e6:,.1f} MB"
    yield report, f"Backup {folder} of {report.name}: {size}."


@command(app, "kinlens-index restore backups/shop-1 --out galleries/shop --replace")
def restore(
    source: Annotated[Path, typer.Argument(metavar="BACKUP", help="Folder of the backup.")],
    gallery: Annotated[Path, typer.Option("--out", help="Folder of the gallery.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an existing gallery.")
    ] = False,
) -> Printed:
    """Restore a gallery from a backup, after checking all its files."""
    manifest = upkeep.restore_gallery(source, gallery, replace=replace, shown=True)
    report = {"name": manifest.name, "generation": manifest.generation}
    yield report, f"Gallery {gallery} ({manifest.name}) restored from {source}."


@command(app, "kinlens-index publish galleries/shop s3://shop/gallery --pictures --every 5s")
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
) -> Printed:
    """Publish a snapshot of a gallery, for services on other hosts.

    Only changes since the last snapshot are uploaded. The gallery stays in use. Services load the
    snapshots with kinlens-serve --gallery NAME=ADDRESS.
    """
    reports = upkeep.publish_changes(
        gallery,
        address,
        every=every,
        images=with_images,
        image_root=image_root,
        take_over=take_over,
        shown=True,
    )
    yield next(reports)
    with contextlib.suppress(KeyboardInterrupt):  # how `--every` ends
        yield from reports
