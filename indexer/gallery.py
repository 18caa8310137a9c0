"""A published gallery, opened for searching."""

import contextlib
import hashlib
import io
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from embedder.errors import (
    BundleMismatchError,
    GalleryCorruptError,
    ImageError,
    ImageTooManyBytesError,
    InvalidParameterError,
    ItemNotFoundError,
    SourceError,
)
from embedder.preprocess import decode
from embedder.types import Embeddings, Hit, ItemId
from indexer.catalog import Catalog, Item
from indexer.engine import VectorStore
from indexer.images import ANY_SIZE, read_image
from indexer.layout import SHORT, GalleryFolder, hold
from indexer.manifest import GalleryManifest
from indexer.version import open_version, read_manifest

_MEDIA_TYPES = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp", "GIF": "image/gif"}
_JPEG_QUALITY = 90


@dataclass(frozen=True, slots=True)
class ItemImage:
    """The image of an item in a format that browsers show."""

    data: bytes = field(repr=False)
    media_type: str


class Gallery:
    """One version of a gallery: checked when opened, unchanged from then on, thread safe."""

    def __init__(
        self, manifest: GalleryManifest, catalog: Catalog, store: VectorStore, image_root: Path
    ) -> None:
        self.manifest = manifest
        self._image_root = image_root
        self._catalog = catalog
        self._store = store
        self._open_files = contextlib.ExitStack()
        self._open_files.callback(catalog.close)
        self._close = weakref.finalize(self, self._open_files.close)

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        expected_bundle_id: str | None = None,
        image_root: Path | None = None,
        verify_hashes: bool = True,
    ) -> "Gallery":
        """Open the current version of the gallery in folder `path`.

        `image_root` replaces the recorded folder of the images. Without `verify_hashes` the files
        have to be trusted.

        Raises: GalleryNotFoundError, GalleryCorruptError, BundleMismatchError.
        """
        try:
            version = GalleryFolder(path).current()
            with contextlib.ExitStack() as held:
                held.callback(os.close, hold(version))
                manifest = read_manifest(version)
                _check_bundle(Path(path), manifest, expected_bundle_id)
                root = image_root or Path(manifest.source_root)
                gallery = cls(manifest, *open_version(version, manifest, verify_hashes), root)
                gallery._open_files.push(held.pop_all())
        except OSError as error:
            raise GalleryCorruptError(
                f"The gallery {path} cannot be read: {error}. Check its permissions and the disk."
            ) from error
        return gallery

    @property
    def name(self) -> str:
        """The name in addresses."""
        return self.manifest.name

    @property
    def version(self) -> str:
        """sha256 (hex) over everything in this version."""
        return self.manifest.version

    @property
    def bundle_id(self) -> str:
        """The bundle that made the vectors."""
        return self.manifest.bundle_id

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self.manifest.dim

    @property
    def size(self) -> int:
        """Number of items."""
        return self.manifest.size

    @property
    def created_at(self) -> str:
        """When this version was built: ISO 8601, UTC."""
        return self.manifest.created_at

    @property
    def image_root(self) -> Path:
        """The folder that the images are read from; it may be missing."""
        return self._image_root

    def search(
        self, queries: Embeddings, k: int, min_score: float | None = None
    ) -> list[list[Hit]]:
        """The `k` best items of each query (Q, D): best first, equal scores by id. Thread safe.

        `k` may exceed the size; with `min_score` there may be fewer hits.

        Raises: InvalidParameterError, GalleryCorruptError.
        """
        lowest = -1.0 if min_score is None else min_score
        if not -1.0 <= lowest <= 1.0:
            raise InvalidParameterError(
                f"min_score = {min_score} is outside -1..1, the range of a cosine similarity. "
                "Choose a value inside, or leave it out."
            )
        scores, ids = self._store.search(queries, k)
        kept = scores >= lowest
        items = self._known_items(np.unique(ids[kept]).tolist())
        return [
            [_hit(items[number], score) for number, score in zip(*row, strict=True)]
            for row in (
                (ids[q][kept[q]].tolist(), scores[q][kept[q]].tolist()) for q in range(len(ids))
            )
        ]

    def image(self, item_id: ItemId) -> ItemImage:
        """The indexed bytes of an item, read from the image root; BMP and TIFF become JPEG.

        Raises: ItemNotFoundError for an unknown number, or if the file is gone, was changed after
            the build or lies outside the image root; GalleryCorruptError if it cannot be read.
        """
        item = self.item(item_id)
        try:
            data = self.source_bytes(item)
            if item.format in _MEDIA_TYPES:
                return ItemImage(data, _MEDIA_TYPES[item.format])
            return ItemImage(_as_jpeg(data), "image/jpeg")
        except (SourceError, ImageTooManyBytesError) as error:
            raise ItemNotFoundError(
                f"The image of item {item_id} of gallery {self.name} is not what was indexed: "
                "the file is gone or was changed. Put it back below the image root, or build the "
                "gallery again."
            ) from error
        except (OSError, ImageError) as error:
            raise GalleryCorruptError(
                f"The image {item.path} of gallery {self.name} cannot be read: {error}. Check the "
                "permissions, the disk and the limit of open files (`ulimit -n`)."
            ) from error

    def item(self, item_id: ItemId) -> Item:
        """What the catalogue knows about an item. Raises: ItemNotFoundError."""
        fits_sqlite = 0 <= item_id < 2**63
        found = self._catalog.get([item_id]) if fits_sqlite else {}
        if item_id not in found:
            raise ItemNotFoundError(
                f"Gallery {self.name} has no item {item_id}. Take the number from the answer of a "
                f"search in version {self.version[:SHORT]}."
            )
        return found[item_id]

    def source_bytes(self, item: Item) -> bytes:
        """The file of an item as it was indexed.

        Raises: SourceError or ImageTooManyBytesError if it is gone, was changed or lies outside the
            image root; OSError.
        """
        data = read_image(self.image_root, item.path, ANY_SIZE.max_bytes)
        if hashlib.sha256(data).hexdigest() != item.sha256:
            raise SourceError(f"{item.path} was changed after the build. Build the gallery again.")
        return data

    def items(self) -> Iterator[Item]:
        """Every item in the order of its number."""
        return self._catalog.items()

    def vectors(self, ids: Sequence[ItemId]) -> Embeddings:
        """The stored vectors (N, D) of known items."""
        return self._store.vectors(np.asarray(ids, dtype=np.int64))

    def close(self) -> None:
        """Let go of the files; the gallery cannot be used afterwards."""
        self._close()

    def _known_items(self, ids: Sequence[ItemId]) -> Mapping[ItemId, Item]:
        items = self._catalog.get(ids)
        missing = [number for number in ids if number not in items]
        if missing:
            raise GalleryCorruptError(
                f"Item {missing[0]} of gallery {self.name} is in the index but not in the "
                "catalogue. Build the gallery again."
            )
        return items


def _hit(item: Item, score: float) -> Hit:
    return Hit(item.id, item.key, score, item.attributes)


def _check_bundle(path: Path, manifest: GalleryManifest, expected_id: str | None) -> None:
    if expected_id is not None and manifest.bundle_id != expected_id:
        raise BundleMismatchError(
            f"Gallery {manifest.name} was made with bundle {manifest.bundle_id[:SHORT]}, but the "
            f"bundle in use is {expected_id[:SHORT]}: their vectors cannot be compared. Build it "
            f"again from the {manifest.source} with `kinlens-index build ... --bundle BUNDLE --out "
            f"{path}`, or use the bundle that it was made with."
        )


def _as_jpeg(data: bytes) -> bytes:
    buffer = io.BytesIO()
    decode(data, ANY_SIZE).save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return buffer.getvalue()
