"""The images of items, read from the image root of their gallery: a folder or an address."""

import hashlib
import io
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from kinlens.embedder.errors import (
    GalleryCorruptError,
    ImageError,
    ImageMissingError,
    ImageTooManyBytesError,
    ItemNotFoundError,
    SourceError,
)
from kinlens.embedder.preprocess import ImageLimits, decode
from kinlens.embedder.sources.names import NOT_UTF8, printable
from kinlens.indexer.addresses import FileState
from kinlens.indexer.addresses import ImageAddress as ImageAddress
from kinlens.indexer.addresses import ImageRoot as ImageRoot
from kinlens.indexer.addresses import files_at as files_at
from kinlens.indexer.addresses import image_root_of as image_root_of
from kinlens.indexer.entries import Item

ANY_SIZE = ImageLimits(max_bytes=2**30, max_megapixels=178.0, max_side_px=2**20)
"""Limits for images that an embedder has already accepted, under its own limits."""

MAX_REMOTE_BYTES = 64 * 2**20
"""The most bytes of an image at an address, where others may replace it by a file of any size."""

_MEDIA_TYPES = {kind: f"image/{kind.lower()}" for kind in ("JPEG", "PNG", "WEBP", "GIF", "AVIF")}
_JPEG_QUALITY = 90


@dataclass(frozen=True, slots=True)
class ItemImage:
    """The image of an item in a format that browsers show."""

    data: bytes = field(repr=False)
    media_type: str


def item_image(root: ImageRoot, item: Item) -> ItemImage:
    """The image of an item as it was indexed; BMP, TIFF and HEIC are converted to JPEG.

    Raises: ItemNotFoundError if it has no image; ImageMissingError if the file was removed, was
        changed after it was indexed, or is outside `root`; GalleryCorruptError if it cannot be
        read; UnreachableError if its store does not answer.
    """
    data = item_bytes(root, item)
    if is_shown(item.format):
        return shown(data, item.format)
    try:
        return ItemImage(_as_jpeg(data), "image/jpeg")
    except ImageError as error:
        raise _unreadable(item, error) from error


def item_bytes(root: ImageRoot, item: Item) -> bytes:
    """The bytes of the image file of an item, as indexed. Raises: the errors of `item_image`."""
    if not item.path:
        raise ItemNotFoundError(f"Item {item.key!r} was stored as a vector, without an image.")
    try:
        return source_bytes(root, item)
    except (SourceError, ImageTooManyBytesError) as error:
        raise ImageMissingError(
            f"The image file of item {item.key!r} was removed or changed after it was indexed. "
            "Restore the file below the image root, or add the image again."
        ) from error
    except OSError as error:
        raise _unreadable(item, error) from error


def is_shown(kind: str) -> bool:
    """Whether browsers show files of this format. They do not show BMP, TIFF and HEIC."""
    return kind in _MEDIA_TYPES


def shown(data: bytes, kind: str) -> ItemImage:
    """Wrap a file in a format that browsers show."""
    return ItemImage(data, _MEDIA_TYPES[kind])


def source_bytes(root: ImageRoot, item: Item) -> bytes:
    """Read the image file of an item and verify its hash.

    Raises: SourceError or ImageTooManyBytesError if it was removed or changed, or is outside
        `root`; UnreachableError; OSError.
    """
    data = read_image(root, item.path, ANY_SIZE.max_bytes)
    if hashlib.sha256(data).hexdigest() != item.sha256:
        raise SourceError(f"{item.path} was changed after it was indexed. Add it again.")
    return data


def inside(root: Path, path: str) -> Path:
    """Resolve `path`, relative to `root`, following links.

    Raises: SourceError if the result is outside `root`.
    """
    real = Path(os.path.realpath(root / path))
    if not real.is_relative_to(os.path.realpath(root)):
        raise SourceError(
            f"{path} leads out of {root}. Copy the file into the folder, or use a root that "
            "contains both."
        )
    return real


def read_image(root: ImageRoot, path: str, max_bytes: int) -> bytes:
    """Read one image of a source, of at most `max_bytes` bytes.

    Raises: SourceError if it is missing, not a regular file or outside `root`;
        ImageTooManyBytesError; UnreachableError if a store does not answer; OSError.
    """
    if isinstance(root, ImageAddress):
        return root.read(path, min(max_bytes, MAX_REMOTE_BYTES))
    if path != printable(path):
        raise SourceError(f"{NOT_UTF8}.")
    file = inside(root, path)
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(
                f"{path} below {root} is not a regular file. Replace it by an image file."
            )
        if status.st_size > max_bytes:
            raise ImageTooManyBytesError(
                f"The image has {status.st_size:,} bytes; the limit is {max_bytes:,}. Resize or "
                "compress it."
            )
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(
            f"{path} is missing below {root}. Restore it, or remove it from the list."
        ) from error


def state_of(root: ImageRoot, path: str) -> FileState:
    """The state of an image file. Raises: SourceError if it is missing or outside; OSError."""
    if isinstance(root, ImageAddress):
        return root.state(path)
    try:
        return FileState.of_file(inside(root, path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(f"{path} is missing below {root}.") from error


def _unreadable(item: Item, error: Exception) -> GalleryCorruptError:
    return GalleryCorruptError(
        f"The image {item.path} cannot be read: {error}. Check the permissions, the disk and "
        "the limit of open files (`ulimit -n`)."
    )


def _as_jpeg(data: bytes) -> bytes:
    buffer = io.BytesIO()
    decode(data, ANY_SIZE).save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return buffer.getvalue()
