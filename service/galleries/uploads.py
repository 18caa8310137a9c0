"""Uploaded images: the sweep of those in folders of galleries, and those of galleries on Milvus.

An image is complete and durable before the catalogue refers to it, and is deleted once no item of
the gallery uses it: in a folder by an hourly sweep, in a shared store by the write.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import structlog

from kinlens.embedder.durable import exclusive, make_folder, write_whole
from kinlens.embedder.errors import (
    EngineUnavailableError,
    GalleryWriteError,
    ItemNotFoundError,
    KinlensError,
)
from kinlens.indexer.images import files_at
from kinlens.indexer.uploads import UploadFolder, intact, missing_upload, upload_name
from kinlens.service.concurrency import DaemonThreads

T = TypeVar("T")
P = ParamSpec("P")

_SWEEP_S = 3600.0
_HANGS_S = 600.0  # after which the next gallery is swept
_AT_ONCE = 16


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
            return intact(sha256, self._call("read", self._files.cat_file, self._path(sha256)))
        except FileNotFoundError as error:
            raise missing_upload() from error

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
        return f"{self._root}/{upload_name(sha256)}"

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
