"""Uploaded images, stored in the folder of their gallery or, for Milvus, at a shared address.

An image is complete and durable before the catalogue refers to it, and is deleted once no item of
the gallery uses it: in a folder by an hourly sweep, in a shared store by the write.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import structlog

from kinlens.embedder.durable import exclusive, make_folder, sweep, sync, write_whole
from kinlens.embedder.errors import (
    EngineUnavailableError,
    GalleryBusyError,
    GalleryCorruptError,
    GalleryWriteError,
    ImageMissingError,
    ItemNotFoundError,
    KinlensError,
)
from kinlens.indexer.galleries import current_generation, stored_contents, uploads_folder
from kinlens.indexer.images import files_at
from kinlens.service.concurrency import DaemonThreads

T = TypeVar("T")
P = ParamSpec("P")

_LOCK, _COPIED = "LOCK", "COPIED"
_SHARD = 2  # hex digits
_SHA256 = re.compile("[0-9a-f]{64}")
_SWEEP_S = 3600.0
_HANGS_S = 600.0  # after which the next gallery is swept
_AT_ONCE = 16


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
            return _intact(sha256, self._path(sha256).read_bytes())
        except FileNotFoundError as error:
            raise _missing() from error
        except OSError as error:
            raise GalleryCorruptError(f"An uploaded image cannot be read: {error}.") from error

    @contextlib.contextmanager
    def storing(self, contents: Mapping[str, bytes]) -> Iterator[None]:
        """Store these images by sha256. Nothing is removed until the end of the block, which adds
        the items to the catalogue.

        Raises: GalleryBusyError if the gallery does not exist now; GalleryWriteError.
        """
        with self._locked(_LOCK, fcntl.LOCK_SH):
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
        with contextlib.ExitStack() as lock:
            with contextlib.suppress(GalleryBusyError, GalleryWriteError):
                lock.enter_context(self._locked(_COPIED, fcntl.LOCK_SH))
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
            _warn_not_removed(self._gallery.name, error)

    @contextlib.contextmanager
    def deleting(self) -> Iterator[None]:
        """While the block deletes the gallery, no image is added.

        Raises: GalleryBusyError if the gallery does not exist; GalleryWriteError.
        """
        with self._locked(_LOCK, fcntl.LOCK_EX):
            yield

    def _clear(self, shard: Path) -> bool:
        """Remove the images of a subfolder that no item uses, and unfinished writes; False while
        the gallery is copied.
        """
        try:
            with (
                self._locked(_LOCK, fcntl.LOCK_EX),
                self._locked(_COPIED, fcntl.LOCK_EX | fcntl.LOCK_NB),
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
    def _locked(self, name: str, kind: int) -> Iterator[None]:
        """Hold a file lock of this `kind`. Raises: BlockingIOError if LOCK_NB is set and it is
        taken.
        """
        with self._disk_errors_explained():
            if not self.root.is_dir():
                self.root.mkdir(exist_ok=True)
                sync(self._gallery, "upload")
            descriptor = os.open(self.root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, kind)
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
        return self.root / _name(sha256)


def _name(sha256: str) -> str:
    return f"{sha256[:_SHARD]}/{sha256}"


def _shards(root: Path) -> list[Path]:
    """The subfolders of an upload folder; empty if it does not exist."""
    return sorted(path for path in root.glob("?" * _SHARD) if path.is_dir())


def _contents(shard: Path) -> list[str]:
    return [file.name for file in shard.iterdir() if _SHA256.fullmatch(file.name)]


def _intact(sha256: str, data: bytes) -> bytes:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise GalleryCorruptError(
            f"The image {sha256} is damaged. Put its items again with their image."
        )
    return data


def _missing() -> ImageMissingError:
    return ImageMissingError(
        "The image of this item is not stored here: it has been removed. Put the item again with "
        "its image."
    )


def _warn_not_removed(location: str, error: Exception) -> None:
    structlog.get_logger().warning(
        "images not removed", location=location, error=type(error).__name__, detail=str(error)
    )


class Sweeper:
    """Removes once an hour the images that no item uses, then calls each of `tidy`.

    Of all processes that share the folder `state` one sweeps, in threads of its own: a gallery that
    hangs keeps one.
    """

    def __init__(
        self,
        state: Path,
        list_galleries: Callable[[], Iterable[Path]],
        tidy: Iterable[Callable[[], None]] = (),
    ) -> None:
        self._state = state
        self._list_galleries = list_galleries
        self._tidy = tuple(tidy)
        self._threads = DaemonThreads("sweep", 1, _HANGS_S / 2)
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start to sweep as soon as no other process does."""
        threading.Thread(target=self._run, name="sweep", daemon=True).start()

    def stop(self) -> None:
        """Stop after the current folder, without waiting for a disk that hangs."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                make_folder(self._state, "sweep")
                with exclusive(self._state / ".sweep.lock", wait=True):
                    self._sweep_every_hour()
            except OSError as error:
                _warn_not_removed(self._state.name, error)
                self._stopped.wait(_SWEEP_S)

    def _sweep_every_hour(self) -> None:
        while not self._stopped.is_set():
            for tidy in self._tidy:  # first, as a gallery may hang
                try:
                    tidy()
                except Exception as error:  # the next sweep tries again
                    structlog.get_logger().warning(
                        "tidying failed", error=type(error).__name__, detail=str(error)
                    )
            for gallery in self._list_galleries():
                work = partial(UploadFolder(gallery).sweep, self._stopped.is_set)
                sweeping = self._threads.submit(work, subject=str(gallery))
                wait([sweeping], _HANGS_S)
                sweeping.cancel()  # if the last one of this gallery still hangs
            self._stopped.wait(_SWEEP_S)


class SharedUploads:
    """Uploaded images of a gallery on Milvus: files ADDRESS/<ab>/<sha256> in any file system of
    fsspec. Any number of services change them without a shared lock. Each file operation blocks
    for at most `limit_s`. Thread safe.

    A service that removes an image checks afterwards whether an item uses it, and then restores it.
    A service that puts an item checks afterwards whether its image still exists. If both happen at
    once, the later one notices.
    """

    def __init__(self, address: str, limit_s: float) -> None:
        """Raises: EngineUnavailableError if the address is unknown or needs a package."""
        self._address = address
        self._limit_s = limit_s
        # A cached listing would hide what other services have written since.
        self._files, self._root = files_at(address, use_listings_cache=False)
        self._threads = DaemonThreads("upload files", _AT_ONCE)

    def read(self, sha256: str) -> bytes:
        """The content with this sha256.

        Raises: ImageMissingError, GalleryCorruptError, EngineUnavailableError.
        """
        try:
            return _intact(sha256, self._call("read", self._files.cat_file, self._path(sha256)))
        except FileNotFoundError as error:
            raise _missing() from error

    @contextlib.contextmanager
    def storing(self, contents: Mapping[str, bytes]) -> Iterator[None]:
        """Store these images by sha256, and check them again after the block, which adds the items
        to the catalogue.

        Raises: GalleryWriteError, EngineUnavailableError.
        """
        self._complete(contents)
        yield
        self._complete(contents)

    def discard(
        self, sha256s: Iterable[str], in_use: Callable[[list[str]], Collection[str]]
    ) -> None:
        """Remove the given images that no item uses; `in_use` returns those that some item uses
        now. If a removal fails, the remaining images are kept.
        """
        try:
            contents = list(set(sha256s))
            for sha256 in set(contents) - set(in_use(contents)):
                with contextlib.suppress(ItemNotFoundError, FileNotFoundError):
                    data = self.read(sha256)
                    self._call("removed", self._files.rm_file, self._path(sha256))
                    if in_use([sha256]):
                        self._write(sha256, data)
        except KinlensError as error:
            _warn_not_removed(self._address, error)

    def _complete(self, contents: Mapping[str, bytes]) -> None:
        for sha256, data in contents.items():
            if not self._call("looked up", self._files.isfile, self._path(sha256)):
                self._write(sha256, data)

    def _write(self, sha256: str, data: bytes) -> None:
        self._call("written", self._write_file, self._path(sha256), data)

    def _write_file(self, path: str, data: bytes) -> None:
        if "file" in self._files.protocol:
            # An object store writes atomically, but fsspec writes a local file in place.
            make_folder(Path(path).parent, "upload")
            write_whole(Path(path), data, "upload")
        else:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, data)

    def _path(self, sha256: str) -> str:
        return f"{self._root}/{_name(sha256)}"

    def _call(self, what: str, work: Callable[P, T], *given: P.args, **options: P.kwargs) -> T:
        """Run `work` in another thread, since not every store client has a timeout of its own."""
        try:
            return self._threads.call(lambda: work(*given, **options), self._limit_s)
        except FileNotFoundError:
            raise
        except TimeoutError:
            raise self._failure(
                what, f"that took longer than {self._limit_s:g} s, which is the limit"
            ) from None
        except Exception as error:
            # Each store client raises its own kinds of errors.
            raise self._failure(what, f"{type(error).__name__}: {error}") from error

    def _failure(self, what: str, reason: str) -> KinlensError:
        kind = GalleryWriteError if what == "written" else EngineUnavailableError
        return kind(
            f"An image at {self._address} cannot be {what}: {reason:.500}. Check that the address "
            "is right, and that this service may read and write there."
        )
