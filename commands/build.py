"""kinlens-index build, add, sync: put image files into a gallery."""

from pathlib import Path
from typing import Annotated

import typer

from kinlens.commands import stores
from kinlens.commands.console import exit_with_skipped
from kinlens.commands.options import (
    BatchOptions,
    ImageRootOption,
    IndexOptions,
    ModelOptions,
    NoCompactOption,
    StoreArgument,
    VectorTypeOption,
)
from kinlens.embedder.engines.models import place_of
from kinlens.embedder.programs.console import Printed, command, refuse
from kinlens.indexer.folder.layout import GalleryFolder
from kinlens.indexer.folder.manifest import REPORT, name_of
from kinlens.indexer.index.plan import IndexSettings, plan_index
from kinlens.indexer.ingest.build import BuildSettings
from kinlens.indexer.ingest.embed import EmbedSettings, failure_lines
from kinlens.indexer.ingest.shards import VectorShards
from kinlens.indexer.ingest.sync import source_of as source_to_sync
from kinlens.indexer.types import VectorType
from kinlens.library.bundles import bundle_folder
from kinlens.library.galleries import build_source
from kinlens.library.images import source_of
from kinlens.library.stores import bundle_of, fit_probabilities, note
from kinlens.library.upkeep import import_gallery

app = typer.Typer()

ImagesArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="IMAGES",
        help="Folder or address (s3://shop/photos) of images; paths in a list are relative to it.",
    ),
]
CsvOption = Annotated[
    Path | None,
    typer.Option(help="CSV list: columns key, path and attributes, such as colour,price:number."),
]
SplitOption = Annotated[
    Path | None, typer.Option(help="Dataset split file: lines of relative/path.jpg, class, ...")
]


@command(app, "kinlens-index build shop/images --bundle bundles/shop --out galleries/shop")
def build(
    out: Annotated[Path, typer.Option(help="Folder of the gallery; its content is replaced.")],
    index: IndexOptions,
    model: ModelOptions,
    batches: BatchOptions,
    bundle: Annotated[
        Path | None, typer.Option(help="Model bundle that embeds the images.")
    ] = None,
    images: ImagesArgument = None,
    vectors: Annotated[
        str | None,
        typer.Option(help="Folder or address of vectors from `embed`, in place of images."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the gallery in URLs; by default that of the folder.")
    ] = None,
    csv: CsvOption = None,
    split: SplitOption = None,
    root: Annotated[str | None, typer.Option(metavar="DIR", help="Same as IMAGES.")] = None,
    vector_type: VectorTypeOption = "fp32",
    dims: Annotated[
        int | None,
        typer.Option(
            min=1, help="Keep the first numbers of each vector, of a model trained for it."
        ),
    ] = None,
) -> Printed:
    """Build a gallery from a folder, an address, a CSV list, a dataset split, or `embed` vectors.

    Images at an address of fsspec, such as s3://shop/photos, stay there and are not copied.
    Vectors of equal images are taken from the gallery that is replaced. To resume an interrupted
    build, run the same command again. Unreadable images are skipped and listed in report.json, and
    the exit status is 3.
    """
    if images and root:
        raise typer.BadParameter("Pass IMAGES or --root, not both: they mean the same.")
    images, settings = images or root, IndexSettings().changed(**index.choice)
    if vectors is not None:
        if images or csv or split:
            raise typer.BadParameter("Pass --vectors or images, not both.")
        if dims:
            raise typer.BadParameter("--dims needs images and a bundle; --vectors are kept whole.")
        yield from _build_of_vectors(vectors, bundle, out, name or name_of(out), index, vector_type)
        return
    if bundle is None:
        raise typer.BadParameter("Pass the model with --bundle, or pass --vectors.")
    source = source_of(_place(images, csv, split), csv=csv, split=split)
    folder = Path(bundle_folder(bundle))
    embedder = model.open(folder)
    dim = embedder.first(dims or embedder.dim).dim
    plan = plan_index(source.count, dim, settings, vector_type)
    place = place_of(embedder.provider, embedder.mode, embedder.precision_reason)
    found = f"Found {source.count:,} images in the {source.description}."
    text = f"{found} Dimension {dim}, model {place}."
    yield None, text, *source.omitted.lines(), *plan.lines()
    made = BuildSettings(name, EmbedSettings(**batches.choice), settings, vector_type, folder, dims)
    gallery, report = build_source(source, embedder, out, made, shown=True)
    text = (
        f"Gallery {out}, generation {report.generation}: {report.indexed:,} items "
        f"({report.embedded:,} embedded, {report.reused:,} reused, "
        f"{report.duplicates:,} copies) in {report.elapsed_s:.1f} s, "
        f"{report.images_per_s:.1f} images/s."
    ) + report.carried_text
    file = GalleryFolder(out).current() / REPORT
    yield report, text, *failure_lines(report.failures, report.found, f"in {file}")
    with gallery:
        fit_probabilities(gallery.store, note)
    exit_with_skipped(report.failures)


@command(app, "kinlens-index add galleries/shop shop/images/new --bundle bundles/shop")
def add(
    gallery: StoreArgument,
    bundle: Annotated[Path, typer.Option(help="Model bundle that the gallery was built with.")],
    model: ModelOptions,
    batches: BatchOptions,
    images: ImagesArgument = None,
    csv: CsvOption = None,
    split: SplitOption = None,
    image_root: ImageRootOption = None,
    no_compact: NoCompactOption = False,
) -> Printed:
    """Add images to a gallery, or update changed ones, while the gallery is in use.

    All paths are relative to the gallery's image root, so IMAGES must be below it. Unchanged images
    are skipped, and content that the gallery already has is not embedded again. To resume an
    interrupted run, run the same command again. If images were skipped, the exit status is 3.
    `sync` also removes what is gone.
    """
    place = _place(images, csv, split)
    opened = stores.gallery_at(gallery, model.open(bundle), image_root=image_root)
    with opened:
        source = opened.source(place, csv=csv, split=split)
        report = opened.add(source, **batches.choice, upkeep=False)
        yield report, *source.omitted.lines(), f"Gallery {gallery}: {report}"
        stores.compact_if_due(opened.store, no_compact)
    exit_with_skipped(report.failures)


def _build_of_vectors(
    vectors: str,
    bundle: Path | None,
    out: Path,
    name: str,
    index: IndexOptions,
    vector_type: VectorType,
) -> Printed:
    """Build from the vectors of `embed`."""
    shards = VectorShards(vectors)
    found = shards.manifest.images  # which refuses a folder without vectors of `embed`
    report = import_gallery(
        vectors, out, name=name, bundle=bundle, vector_type=vector_type, shown=True, **index.choice
    )
    text = f"Gallery {out}, generation {report.generation}: {report.items:,} items."
    text += report.carried_text
    skipped = tuple(shards.failures())
    yield report, text, *failure_lines(skipped, found, f"in {vectors}/parts")
    exit_with_skipped(skipped)


def _place(images: str | None, csv: Path | None, split: Path | None) -> str | None:
    """Check that there are images, from one source. Raises: BadParameter."""
    if csv and split:
        raise typer.BadParameter("Pass --csv or --split, not both.")
    if not (images or csv or split):
        raise typer.BadParameter("Pass the folder IMAGES, or a list with --csv or --split.")
    return images


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
        found = source_to_sync(opened.store, source, csv)
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
