"""Galleries in the caller's process, without a service: open, create, build and compare them."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Unpack, get_args

from pydantic import BaseModel, Field

from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import (
    GalleryConflictError,
    GalleryError,
    GalleryNotFoundError,
    InvalidParameterError,
    KinlensError,
)
from kinlens.embedder.programs.progress import progress_bar
from kinlens.embedder.session import Embedder, OnnxEmbedder
from kinlens.indexer.addresses import ImageRoot
from kinlens.indexer.folder.layout import CURRENT
from kinlens.indexer.folder.manifest import name_of
from kinlens.indexer.galleries import current_generation
from kinlens.indexer.gallery import Gallery as Folder
from kinlens.indexer.index.plan import IndexChoice, IndexSettings
from kinlens.indexer.ingest.build import BuildReport, BuildSettings, build_gallery
from kinlens.indexer.ingest.embed import (
    EmbedSettings,
    Failure,
    failure_lines,
    refuse_unreadable,
)
from kinlens.indexer.ingest.parts import (
    SHARD_SIZE,
    Part,
    SourceAt,
    begun_shards,
    check_ray,
    embed_missing,
)
from kinlens.indexer.ingest.products import PRODUCTS
from kinlens.indexer.ingest.sources import Source
from kinlens.indexer.types import MILVUS, OTHER_MODEL, VectorType, checked_name
from kinlens.library.additions import warn_of
from kinlens.library.bundles import Device, check_choice, check_folder, load_bundle
from kinlens.library.gallery import Gallery as Gallery
from kinlens.library.images import about, source_of
from kinlens.library.stores import Store, fit_probabilities, folder_of, open_store
from kinlens.quality import compare as comparison
from kinlens.reports import Report

Model = OnnxEmbedder | Path | str


def open_gallery(
    path: Path | str,
    bundle: Model | None = None,
    *,
    device: Device = "cpu",
    image_root: str | None = None,
) -> Gallery:
    """Open a gallery for searches and changes; close it with `close()`, or use `with`.

    Args:
        path: a folder that `build` or `kinlens-index build` wrote, or milvus://HOST:PORT/NAME.
        bundle: the model for queries, or its folder; by default the bundle that built the gallery,
            which the first image opens. A gallery that was built with another one is refused. One
            that was built with `--dims 64` is searched with vectors of `bundle.first(64)`.
        device: "cuda" searches on an NVIDIA GPU and needs `kinlens[gpu]`.
        image_root: the folder or address of the images, if they were moved.

    Returns:
        A gallery. `search` takes an image, words or vectors.

    Raises:
        GalleryNotFoundError: the folder holds no gallery.
        GalleryCorruptError: a file of the gallery is missing or damaged.
        BundleMismatchError: the gallery was built with another bundle.

    Examples:
        >>> gallery = kinlens.open_gallery("galleries/shop", bundle)
        >>> [hits] = gallery.search(bundle.embed_files(["photo.jpg"]), k=3)
        >>> [hit.key for hit in hits]
        ['photo.jpg', 'second.jpg', 'third.jpg']
    """
    check_choice("device", device, get_args(Device))
    if not str(path).startswith(MILVUS):
        path = check_folder(path, GalleryNotFoundError, CURRENT)
    embedder = None if bundle is None else _model(bundle)
    expected = None if embedder is None else embedder.bundle_id
    store = open_store(path, bundle_id=expected, image_root=image_root, device=device)
    return _wrapped(store, embedder)


def create_gallery(
    path: Path | str,
    *,
    dim: int | None = None,
    bundle: Model | None = None,
    model: str = "vectors",
    name: str | None = None,
    vector_type: VectorType = "fp32",
    image_root: Path | str = "",
) -> Gallery:
    """Create an empty gallery, for vectors of any model or for images of a bundle.

    Args:
        path: a new folder. A gallery that is there already is not replaced.
        dim: length of the vectors of a model without a bundle, and then `model` names it.
        bundle: the model for images, or its folder.
        name: of the gallery in URLs; by default that of the folder.
        vector_type: number format of stored vectors; "fp16" halves the disk and cache use.
        image_root: the folder of images that will be added with `add`.

    Raises:
        GalleryConflictError: the folder has a gallery.
        GalleryError: the folder has other files.
        InvalidParameterError: neither `dim` nor a bundle is given, or a name that cannot be used.

    Examples:
        >>> gallery = kinlens.create_gallery("galleries/clip", dim=512, model="clip-vit-b32")
        >>> report = gallery.put_many(["shoes/1", "shoes/2"], vectors)
        >>> [hits] = gallery.search(vectors[:1], k=2)
    """
    if (dim is None) == (bundle is None):
        raise InvalidParameterError(
            "Pass dim, the length of the vectors of your own model, or bundle, the model for "
            "images; not both."
        )
    if dim is not None and dim < 1:
        raise InvalidParameterError(f"dim = {dim} must be 1 or more.")
    check_choice("vector_type", vector_type, get_args(VectorType))
    path = check_folder(path, GalleryNotFoundError)
    if current_generation(path) is not None:
        raise GalleryConflictError(
            f"{path} has a gallery already. Open it with open_gallery, or pass another folder."
        )
    embedder: Embedder | None = None if bundle is None else _model(bundle)
    root = "" if image_root == "" else str(Path(image_root).resolve())
    store = Folder.create(
        path,
        name=checked_name(name or name_of(Path(path))),
        bundle_id=f"{OTHER_MODEL}{model}" if embedder is None else embedder.bundle_id,
        dim=dim or (0 if embedder is None else embedder.dim),
        precision="fp32" if embedder is None else embedder.mode.precision,
        vector_type=vector_type,
        source="Python",
        source_root=root,
    )
    return _wrapped(store, embedder)


def build(
    images: Any,
    bundle: Model,
    *,
    out: Path | str,
    name: str | None = None,
    csv: Path | str | None = None,
    split: Path | str | None = None,
    root: ImageRoot | str | None = None,
    dims: int | None = None,
    vector_type: VectorType = "fp32",
    batch_size: int = 32,
    workers: int = 0,
    shown: bool | None = None,
    **index: Unpack[IndexChoice],
) -> Gallery:
    """Build a gallery from images, which stay where they are, and open it.

    To resume an interrupted build, make the same call. Images that cannot be read are skipped with
    a warning, and listed in `gallery.report.failures`. Vectors of equal images are taken from the
    gallery that is replaced.

    Args:
        images: a folder, an address such as s3://shop/photos, a CSV list, any number of paths, or a
            DataFrame or table of Arrow with the columns key, path and attributes, as in lists.
        bundle: the model, or its folder.
        out: the folder of the gallery; its content is replaced.
        name: of the gallery in URLs; by default that of the folder.
        csv, split: a list whose paths are relative to `images`.
        root: the image root; by default the folder of the images or list.
        dims: keep the first numbers of each vector, of a model trained for it.
        vector_type: number format of stored vectors; "fp16" halves the disk and cache use.
        batch_size, workers: the images embedded at a time, and the threads; 0: one per core.
        index: `index="hnsw"`, `memory_mb`, `target_recall` and `index_device`, as for `plan`.
        shown: whether progress bars are shown; None: in terminals and notebooks.

    Raises:
        SourceError: no image can be read, or a path leads out of the root.
        BundleError: the bundle is missing or damaged.
        GalleryError: `out` has other files or cannot be written.

    Examples:
        >>> gallery = kinlens.build("photos/", "bundles/shop", out="galleries/shop")
        >>> gallery.size
        356
    """
    check_choice("vector_type", vector_type, get_args(VectorType))
    out = check_folder(out, GalleryError)
    source = source_of(images, csv=csv, split=split, root=root)
    embedder = _model(bundle)
    made = BuildSettings(
        name,
        EmbedSettings(batch_size, workers),
        IndexSettings().changed(**index),
        vector_type,
        embedder.bundle.path,
        dims,
    )
    gallery, report = build_source(source, embedder, out, made, shown)
    warn_of(gallery.warn, report.failures, report.found)
    fit_probabilities(gallery.store)
    return gallery


def build_source(
    source: Source,
    embedder: Embedder,
    out: Path | str,
    settings: BuildSettings,
    shown: bool | None = None,
) -> tuple[Gallery, BuildReport]:
    """Build a gallery with progress bars and open it, as `build` and `kinlens-index build` do."""
    with progress_bar(source.count, "Embedding", "images", shown) as advance:
        indexed = advance.then("Indexing", source.count)
        report = build_gallery(source, embedder, out, settings, advance, indexed)
    gallery = _wrapped(Folder.open(out, verify_hashes=False), embedder)
    gallery.report, gallery.shown = report, shown
    return gallery, report


class EmbedReport(Report, BaseModel, frozen=True):
    """What is stored of a source with `images`, of which this call has `embedded` some.

    Attributes:
        items: number of vectors in `shards` files, of which `missing` do not exist yet.
        failures: images that cannot be read, in all files.
        skipped: those in the files of this part, and files that should be images.
        omitted: other files of the source, a line for each kind.
        out: the folder or address of the files.
    """

    images: int
    embedded: int
    items: int
    shards: int
    missing: int
    failures: tuple[Failure, ...]
    bundle_id: str
    faults: tuple[Failure, ...] = Field(exclude=True)
    skipped: tuple[Failure, ...] = Field(exclude=True)
    omitted: tuple[str, ...] = Field(exclude=True)
    out: str = Field(exclude=True)

    def lines(self) -> Iterator[str]:
        """What was done, what to do next, and the first failures."""
        yield from self.omitted
        yield (
            f"{self.out}: {self.items:,} vectors of {self.images:,} images in {self.shards:,} "
            f"files ({self.embedded:,} images now). "
            + (
                f"{self.missing:,} files are missing: run the other parts."
                if self.missing
                else f"Build a gallery: kinlens-index build --vectors {self.out} --out GALLERY"
            )
        )
        yield from failure_lines((*self.faults, *self.failures), self.images)


def embed(
    source: SourceAt,
    part: Part,
    bundle: Path,
    session: SessionSettings,
    out: str,
    *,
    ray: str | None = None,
    batch_size: int = 32,
    shard_size: int = SHARD_SIZE,
    shown: bool | None = None,
) -> EmbedReport:
    """Embed a part of a source into files at `out`, or all of it on the Ray cluster at `ray`.

    To resume an interrupted part, make the same call. `build_source` builds a gallery of the files.

    Raises: the errors of `begun_shards` and `embed_missing`; SourceError if no image can be read.
    """
    if ray is not None:
        check_ray(ray)
    shards = begun_shards(source, bundle, session, out, shard_size)
    embedded, due = 0, shards.manifest.images_in(part.missing(shards))
    with progress_bar(due, "Embedding", "images", shown) as advance:
        for count in embed_missing(shards, part, bundle, session, ray, batch_size):
            embedded += count
            advance(count)
    manifest, missing = shards.manifest, shards.missing()
    failures = tuple(shards.failures())
    if not missing:
        refuse_unreadable(manifest.source, manifest.images, failures)
    faults = manifest.faults if part.number == 1 else ()
    return EmbedReport(
        images=manifest.images,
        embedded=embedded,
        items=manifest.images - manifest.images_in(missing) - len(failures),
        shards=manifest.shards,
        missing=len(missing),
        failures=failures,
        bundle_id=manifest.bundle_id,
        faults=manifest.faults,
        skipped=(*faults, *shards.failures(part.shards(shards))),
        omitted=manifest.omitted,
        out=out,
    )


def compare(
    a: Gallery | Folder,
    b: Gallery | Folder,
    queries: Collection[str] | None = None,
    *,
    attribute: str | None = None,
    k: int = 10,
    sample: int = 1000,
) -> comparison.Comparison:
    """Search two galleries of the same items, by different models, for neighbours of these items.

    A hit is right if it has the value of the query's `attribute`. The query itself does not count.

    Args:
        a, b: the galleries; `b` is judged against `a`.
        queries: keys of the items to search for; None for up to `sample` that both have.
        attribute: names the product; None for `product`, else `class`.
        k: the number of hits that are compared.

    Returns:
        A report: recall of both, the interval of the change, and how many hits are the same.

    Raises: InvalidParameterError for an attribute that `a` does not have, or if the galleries have
        none of the items in common.

    Examples:
        >>> report = kinlens.compare(gallery, rebuilt)
        >>> report.new.recall_at_1 >= report.old.recall_at_1
        True
    """
    lack = "is searched and changed only"
    for one in (a, b):
        if not isinstance(one, Folder | Gallery):
            raise InvalidParameterError(
                f"{about(one)} is not a gallery. Open it with kinlens.open_gallery."
            )
    old, new = (one if isinstance(one, Folder) else folder_of(one.store, lack) for one in (a, b))
    known = old.schema()
    if attribute is None:
        attribute = next((name for name in PRODUCTS if name in known), PRODUCTS[-1])
    if attribute not in known:
        raise InvalidParameterError(
            f"attribute = {attribute!r}: gallery {old.name} has "
            f"{', '.join(known) or 'no attributes'}. Name the one that distinguishes products."
        )
    if isinstance(queries, str):
        raise InvalidParameterError(f"queries = {queries!r:.80} must be a list of keys.")
    report = comparison.compare(old, new, attribute, k, sample, queries)
    if not report.queries:
        raise InvalidParameterError(
            f"Galleries {old.name} and {new.name} have none of these items in common. Compare "
            "galleries with the same keys."
        )
    return report


def _wrapped(store: Store, embedder: Embedder | None) -> Gallery:
    try:
        return Gallery(store, embedder)
    except KinlensError:
        store.close()
        raise


def _model(bundle: Any) -> Any:
    """The model in a folder, or one that is open. Raises: InvalidParameterError, BundleError."""
    if isinstance(bundle, str | os.PathLike):
        return load_bundle(os.fspath(bundle))
    if not hasattr(bundle, "bundle_id"):
        raise InvalidParameterError(
            f"bundle = {about(bundle)} must be the folder of a bundle, or what load_bundle returns."
        )
    return bundle
