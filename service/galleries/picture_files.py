"""Uploaded pictures of a gallery on Milvus: files in a folder, or anywhere that fsspec reaches."""

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog

from embedder.durable import make_folder, write_whole
from embedder.errors import (
    EngineUnavailableError,
    GalleryCorruptError,
    GalleryWriteError,
    ItemNotFoundError,
    KinlensError,
)
from service.concurrency import DaemonThreads

T = TypeVar("T")
_AT_ONCE = 16
_SHARD = 2  # hex digits, as in the folder of a gallery


class _Files(Protocol):
    """Where files lie, by names relative to it; what is read or removed may be missing."""

    def has(self, name: str) -> bool: ...
    def read(self, name: str) -> bytes: ...
    def write(self, name: str, data: bytes) -> None: ...
    def remove(self, name: str) -> None: ...


class PictureFiles:
    """Files ADDRESS/<ab>/<sha256>; each call blocks for at most `limit_s`. Thread safe, and any
    number of services may share them.
    """

    def __init__(self, address: str, limit_s: float) -> None:
        """Raises: EngineUnavailableError if the address is unknown or needs a package."""
        self.address = address
        self._limit_s = limit_s
        self._files = _files_at(address)
        self._threads = DaemonThreads("picture files", _AT_ONCE)

    def has(self, sha256: str) -> bool:
        """Whether there is a file of this content."""
        return self._call("looked at", lambda: self._files.has(_name(sha256)))

    def read(self, sha256: str) -> bytes:
        """The content with this sha256. Raises: ItemNotFoundError, GalleryCorruptError."""
        try:
            data = self._call("read", lambda: self._files.read(_name(sha256)))
        except FileNotFoundError as error:
            raise ItemNotFoundError(
                "The picture of this item is not kept here; it was stored as a vector, or the item "
                "is gone. Put the item again with its image."
            ) from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise GalleryCorruptError(
                f"The picture {sha256} is damaged. Put its items again with their image."
            )
        return data

    def write(self, sha256: str, data: bytes) -> None:
        """Keep `data` for good. Raises: GalleryWriteError."""
        try:
            self._call("written", lambda: self._files.write(_name(sha256), data))
        except EngineUnavailableError as error:
            raise GalleryWriteError(str(error)) from error

    def remove(self, sha256: str) -> None:
        """Remove the file of this content, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self._call("removed", lambda: self._files.remove(_name(sha256)))

    def _call(self, what: str, work: Callable[[], T]) -> T:
        """In a thread of its own, since not every client of a store gives up by itself."""
        call = self._threads.submit(work)
        try:
            return call.result(self._limit_s)
        except FileNotFoundError:
            raise
        except FutureTimeoutError as error:
            call.cancel()
            reason = f"that took longer than {self._limit_s:g} s, which is the limit"
            raise self._failure(what, reason) from error
        except Exception as error:
            # Each client of a store has errors of its own.
            raise self._failure(what, f"{type(error).__name__}: {error}") from error

    def _failure(self, what: str, reason: str) -> EngineUnavailableError:
        return EngineUnavailableError(
            f"A picture at {self.address} cannot be {what}: {reason:.500}. Check that the address "
            "is right, and that this service may read and write there."
        )


class SharedPictures:
    """The uploaded pictures of a gallery that several services change, without a lock among them.

    `held` says which contents some item has now. A picture is there before an item shows it. Who
    removes one asks once more afterwards and puts it back if it is shown by then; who puts an item
    looks once more for its picture. Of two that do so at once, the later one notices.
    """

    def __init__(self, files: PictureFiles, held: Callable[[list[str]], Collection[str]]) -> None:
        self._files = files
        self._held = held
        self._saved: dict[str, bytes] = {}

    def has(self, sha256: str) -> bool:
        """Whether there is a file of this content."""
        return self._files.has(sha256)

    def read(self, sha256: str) -> bytes:
        """The content with this sha256. Raises: ItemNotFoundError, GalleryError."""
        return self._files.read(sha256)

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """What is saved in the block is named in it. Raises: GalleryWriteError."""
        yield
        for sha256, data in self._saved.items():
            if not self._files.has(sha256):
                self._files.write(sha256, data)
        self._saved.clear()

    def save(self, data: bytes) -> None:
        """Keep `data` for good. Raises: GalleryWriteError."""
        sha256 = hashlib.sha256(data).hexdigest()
        if not self._files.has(sha256):
            self._files.write(sha256, data)
        self._saved[sha256] = data

    def discard(self, sha256s: Iterable[str]) -> None:
        """Remove those of these contents that no item shows; what cannot go now stays."""
        try:
            contents = list(set(sha256s))
            for sha256 in set(contents) - set(self._held(contents)):
                with contextlib.suppress(ItemNotFoundError):
                    self._discard(sha256)
        except KinlensError as error:
            structlog.get_logger().warning("pictures stay", detail=str(error))

    def _discard(self, sha256: str) -> None:
        data = self._files.read(sha256)
        self._files.remove(sha256)
        if self._held([sha256]):
            self._files.write(sha256, data)


class _Folder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def has(self, name: str) -> bool:
        return (self._root / name).is_file()

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        path = self._root / name
        make_folder(path.parent, "picture")
        write_whole(path, data, "picture")

    def remove(self, name: str) -> None:
        (self._root / name).unlink()


class _Store:
    """A file system of fsspec; to write a file there is one step, as in every object store."""

    def __init__(self, files: Any, root: str) -> None:
        self._files = files
        self._root = root.rstrip("/")

    def has(self, name: str) -> bool:
        return bool(self._files.isfile(self._path(name)))

    def read(self, name: str) -> bytes:
        return bytes(self._files.cat_file(self._path(name)))

    def write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(path, data)

    def remove(self, name: str) -> None:
        self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _files_at(address: str) -> _Files:
    scheme, separator, path = address.partition("://")
    if not separator or scheme == "file":
        return _Folder(Path(path if separator else address))
    try:
        import fsspec
    except ImportError as error:
        raise EngineUnavailableError(
            f"Pictures at {address} need fsspec, which is not installed. Install it: pip install "
            "'kinlens[fsspec]', and what the address needs, such as s3fs."
        ) from error
    try:
        # Listings of others would hide what they write meanwhile.
        files, root = fsspec.url_to_fs(address, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise EngineUnavailableError(
            f"Pictures at {address} cannot be reached: {error}. Check the address, and install "
            "what it needs, such as s3fs for s3://."
        ) from error
    return _Store(files, str(root))


def _name(sha256: str) -> str:
    return f"{sha256[:_SHARD]}/{sha256}"
