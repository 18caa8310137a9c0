"""Images that were uploaded for the items of a gallery, stored in its folder.

An image is complete and durable before the catalogue refers to it, and is deleted by a sweep once
no item uses it.
"""

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kinlens.embedder.durable import lock, make_folder, sweep, sync, write_whole
from kinlens.embedder.errors import (
    GalleryBusyError,
    GalleryCorruptError,
    GalleryWriteError,
    ImageMissingError,
)
from kinlens.indexer.galleries import current_generation, stored_contents, uploads_folder

_LOCK, _COPIED = "LOCK", "COPIED"
_SHARD = 2  # hex digits
_SHA256 = re.compile("[0-9a-f]{64}")


class UploadFolder:
    """The uploaded images of one gallery: GALLERY/pictures/<ab>/<sha256>, next to its generations.

    Safe for use by several threads and processes; every call may block.
    """

    def __init__(self, gallery: Path) -> None:
        self._gallery = gallery
        self.root = uploads_folder(gallery)

    def has(self, sha256: str) -> bool:
        """Whether a file with this content is stored."""
        return self._path(sha256).is_file()

    def read(self, sha256: str) -> bytes:
        """The content with this sha256. Raises: ImageMissingError, GalleryCorruptError."""
        try:
            return intact(sha256, self._path(sha256).read_bytes())
        except FileNotFoundError as error:
            raise missing_upload() from error
        except OSError as error:
            raise GalleryCorruptError(f"An uploaded image cannot be read: {error}.") from error

    @contextlib.contextmanager
    def storing(self, contents: Mapping[str, bytes]) -> Iterator[None]:
        """Store these images by sha256. Nothing is removed until the end of the block, which adds
        the items to the catalogue.

        Raises: GalleryBusyError if the gallery does not exist now; GalleryWriteError.
        """
        with self._locked(_LOCK, alone=False):
            if current_generation(self._gallery) is None:
                raise self._absence()
            with self._disk_errors_explained():
                for sha256, data in contents.items():
                    self._write(self._path(sha256), data)
            yield

    @contextlib.contextmanager
    def removal_paused(self) -> Iterator[None]:
        """While the block copies the gallery, no image is removed. A read-only folder has no lock,
        since nothing is removed there.
        """
        with contextlib.ExitStack() as paused:
            with contextlib.suppress(GalleryBusyError, GalleryWriteError):
                paused.enter_context(self._locked(_COPIED, alone=False))
            yield

    def files(self) -> Iterator[Path]:
        """Every image, without unfinished writes."""
        for shard in _shards(self.root):
            yield from (shard / name for name in sorted(_contents(shard)))

    def import_from(self, root: Path) -> None:
        """Hard-link the images of another upload folder `root`, or copy them from another disk.

        Raises: GalleryWriteError.
        """
        with self._disk_errors_explained():
            for shard in _shards(root):
                chosen = [name for name in _contents(shard) if not self.has(name)]
                for name in chosen:
                    make_folder(self.root / shard.name, "upload")
                    self._link(shard / name)
                if chosen:
                    sync(self.root / shard.name, "upload")

    def sweep(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Remove every image that no item uses, and leftovers of interrupted writes. It stops early
        when `is_over` returns true, and at the first failure, which is logged.
        """
        try:
            for shard in _shards(self.root):
                if is_over() or not self._clear(shard):
                    return
        except Exception as error:  # whatever is wrong with this gallery, others are swept
            logging.getLogger(__name__).warning(
                "images of %s are not removed: %r", self._gallery.name, error
            )

    @contextlib.contextmanager
    def deleting(self) -> Iterator[None]:
        """While the block deletes the gallery, no image is added.

        Raises: GalleryBusyError if the gallery does not exist; GalleryWriteError.
        """
        with self._locked(_LOCK, alone=True):
            yield

    def _clear(self, shard: Path) -> bool:
        """Remove the images of a subfolder that no item uses, and unfinished writes; False while
        the gallery is copied.
        """
        try:
            with (
                self._locked(_LOCK, alone=True),
                self._locked(_COPIED, alone=True, wait=False),
            ):
                sweep(shard)
                contents = sorted(_contents(shard))
                for sha256 in set(contents) - stored_contents(self._gallery, contents):
                    self._path(sha256).unlink(missing_ok=True)
        except BlockingIOError:
            return False
        return True

    def _write(self, path: Path, data: bytes) -> None:
        make_folder(path.parent, "upload")
        if path.is_file():
            sync(path.parent, "upload")  # the thread that wrote it may not have synced it yet
        else:
            write_whole(path, data, "upload")

    def _link(self, file: Path) -> None:
        try:
            os.link(file, self._path(file.name))
        except FileExistsError:
            pass
        except OSError:  # another disk, or a file system without links
            write_whole(self._path(file.name), file.read_bytes(), "upload")

    @contextlib.contextmanager
    def _locked(self, name: str, *, alone: bool, wait: bool = True) -> Iterator[None]:
        """Hold a file lock. Raises: BlockingIOError if it is taken, without `wait`."""
        with self._disk_errors_explained():
            if not self.root.is_dir():
                self.root.mkdir(exist_ok=True)
                sync(self._gallery, "upload")
            descriptor = os.open(self.root / name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not lock(descriptor, alone=alone, wait=wait):
                raise BlockingIOError(f"{name} of {self._gallery} is locked")
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _disk_errors_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._gallery.is_dir():
                raise self._absence() from error
            raise GalleryWriteError(
                f"The images in {self.root} cannot be changed: {error.strerror or error}. Check "
                "the free space, the permissions of that folder and the limit of open files "
                "(`ulimit -n`)."
            ) from error

    def _absence(self) -> GalleryBusyError:
        return GalleryBusyError(
            "The gallery does not exist at the moment; nothing was stored. Try again in a second."
        )

    def _path(self, sha256: str) -> Path:
        assert _SHA256.fullmatch(sha256), "not a sha256"
        return self.root / upload_name(sha256)


def upload_name(sha256: str) -> str:
    """The path of an image below the folder or address of uploads."""
    return f"{sha256[:_SHARD]}/{sha256}"


def _shards(root: Path) -> list[Path]:
    """The subfolders of an upload folder; empty if it does not exist."""
    return sorted(path for path in root.glob("?" * _SHARD) if path.is_dir())


def _contents(shard: Path) -> list[str]:
    return [file.name for file in shard.iterdir() if _SHA256.fullmatch(file.name)]


def intact(sha256: str, data: bytes) -> bytes:
    """Check the bytes of an image and return them. Raises: GalleryCorruptError."""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise GalleryCorruptError(
            f"The image {sha256} is damaged. Put its items again with their image."
        )
    return data


def missing_upload() -> ImageMissingError:
    """The error for an uploaded image that is not stored."""
    return ImageMissingError(
        "The image of this item is not stored here: it has been removed. Put the item again with "
        "its image."
    )
