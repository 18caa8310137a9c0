"""The images of items, read from the image root of their gallery."""

import hashlib
import io
from dataclasses import dataclass, field
from pathlib import Path

from embedder.errors import (
    GalleryCorruptError,
    ImageError,
    ImageTooManyBytesError,
    ItemNotFoundError,
    SourceError,
)
from embedder.preprocess import decode
from indexer.ingest.sources import ANY_SIZE, read_image
from indexer.types import Item

_MEDIA_TYPES = {kind: f"image/{kind.lower()}" for kind in ("JPEG", "PNG", "WEBP", "GIF", "AVIF")}
_JPEG_QUALITY = 90


@dataclass(frozen=True, slots=True)
class ItemImage:
    """The image of an item in a format that browsers show."""

    data: bytes = field(repr=False)
    media_type: str


def item_image(root: Path, item: Item) -> ItemImage:
    """The indexed bytes of an item; BMP, TIFF and HEIC become JPEG.

    Raises: ItemNotFoundError if it has no image, or the file is gone, was changed after it was
        indexed, or lies outside `root`; GalleryCorruptError if it cannot be read.
    """
    data = item_bytes(root, item)
    if is_shown(item.format):
        return shown(data, item.format)
    try:
        return ItemImage(_as_jpeg(data), "image/jpeg")
    except ImageError as error:
        raise _unreadable(item, error) from error


def item_bytes(root: Path, item: Item) -> bytes:
    """The indexed bytes of an item as they are. Raises: as `item_image`."""
    if not item.path:
        raise ItemNotFoundError(f"Item {item.key!r} was stored as a vector, without an image.")
    try:
        return source_bytes(root, item)
    except (SourceError, ImageTooManyBytesError) as error:
        raise ItemNotFoundError(
            f"The image of item {item.key!r} is not what was indexed: the file is gone or was "
            "changed. Put it back below the image root, or add it again."
        ) from error
    except OSError as error:
        raise _unreadable(item, error) from error


def is_shown(kind: str) -> bool:
    """Whether browsers show files of this format; BMP, TIFF and HEIC must become JPEG."""
    return kind in _MEDIA_TYPES


def shown(data: bytes, kind: str) -> ItemImage:
    """A file of a format that browsers show."""
    return ItemImage(data, _MEDIA_TYPES[kind])


def source_bytes(root: Path, item: Item) -> bytes:
    """The file of an item as it was indexed.

    Raises: SourceError or ImageTooManyBytesError if it is gone, was changed or lies outside `root`;
        OSError.
    """
    data = read_image(root, item.path, ANY_SIZE.max_bytes)
    if hashlib.sha256(data).hexdigest() != item.sha256:
        raise SourceError(f"{item.path} was changed after it was indexed. Add it again.")
    return data


def _unreadable(item: Item, error: Exception) -> GalleryCorruptError:
    return GalleryCorruptError(
        f"The image {item.path} cannot be read: {error}. Check the permissions, the disk and "
        "the limit of open files (`ulimit -n`)."
    )


def _as_jpeg(data: bytes) -> bytes:
    buffer = io.BytesIO()
    decode(data, ANY_SIZE).save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return buffer.getvalue()
