"""Pictures that were uploaded: in the folder of their gallery, or where services on Milvus share
them. A picture is whole and there for good before the catalogue names it, and goes when no item of
the gallery shows it any more.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import structlog

from kinlens.embedder.durable import exclusive, make_folder, sync, write_whole
from kinlens.embedder.errors import (
    EngineUnavailableError,
    GalleryBusyError,
    GalleryCorruptError,
    GalleryWriteError,
    ItemNotFoundError,
    KinlensError,
)
from kinlens.indexer.gallery import contents_held, current_generation, pictures_folder
from kinlens.service.concurrency import DaemonThreads

T = TypeVar("T")
P = ParamSpec("P")

_LOCK, _COPIED = "LOCK", "COPIED"
_STAGE = ".stage-"
_SHARD = 2  # hex digits
_SHA256 = re.compile("[0-9a-f]{64}")
_SWEEP_S = 3600.0
_AT_ONCE = 16


class UploadFolder:
    """The uploaded pictures of one gallery: GALLERY/pictures/<ab>/<sha256>, beside its generations.

    Thread safe, also between processes; every call may block.
    """

    def __init__(self, gallery: Path) -> None:
        self._gallery = gallery
        self.root = pictures_folder(gallery)

    def has(self, sha256: str) -> bool:
        """Whether there is a file of this content."""
        return self._path(sha256).is_file()

    def read(self, sha256: str) -> bytes:
        """The content with this sha256. Raises: ItemNotFoundError, GalleryCorruptError."""
        try:
            return _intact(sha256, self._path(sha256).read_bytes())
        except FileNotFoundError as error:
            raise _missing() from error
        except OSError as error:
            raise GalleryCorruptError(f"An uploaded picture cannot be read: {error}.") from error

    @contextlib.contextmanager
    def storing(self, contents: Mapping[str, bytes]) -> Iterator[None]:
        """Keep these for good, by sha256; nothing is discarded until the block, which names them
        in the catalogue, ends.

        Raises: GalleryBusyError if the gallery is not there now; GalleryWriteError.
        """
        with self._locked(_LOCK, fcntl.LOCK_SH):
            if current_generation(self._gallery) is None:
                raise self._absence()
            with self._disk_errors_explained():
                for sha256, data in contents.items():
                    self._write(self._path(sha256), data)
            yield

    @contextlib.contextmanager
    def copying_from(self, other: "UploadFolder") -> Iterator[None]:
        """The gallery of `other` is copied into this one: no picture of either goes until the block
        ends. Raises: GalleryWriteError.
        """
        with contextlib.ExitStack() as held:
            held.enter_context(self._locked(_COPIED, fcntl.LOCK_SH))
            if other.root.is_dir():
                with contextlib.suppress(GalleryWriteError):  # then nobody removes anything there
                    held.enter_context(other._locked(_COPIED, fcntl.LOCK_SH))
            yield

    @contextlib.contextmanager
    def removal_paused(self) -> Iterator[None]:
        """No picture is removed until the block ends: what shows them is being copied.

        Raises: GalleryWriteError.
        """
        with self._locked(_COPIED, fcntl.LOCK_SH):
            yield

    def files(self) -> Iterator[Path]:
        """Every picture, and nothing that a write has not finished."""
        for shard in _shards(self.root):
            yield from (shard / name for name in sorted(_contents(shard)))

    def write(self, sha256: str, data: bytes) -> None:
        """Put a picture in place of one that is missing or damaged. Raises: GalleryWriteError."""
        with self._disk_errors_explained():
            try:
                self.read(sha256)
            except KinlensError:
                make_folder(self._path(sha256).parent, "upload")
                write_whole(self._path(sha256), data, "upload")

    def import_from(self, root: Path) -> None:
        """Link the pictures below `root`, a folder as this one; on another disk they are copied.

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

    def discard(self, sha256s: Iterable[str]) -> None:
        """Remove those of these contents that no item of the gallery shows.

        What cannot go now, since the gallery is being copied or cannot be read, goes with `sweep`.
        """
        known = {sha256 for sha256 in sha256s if self.has(sha256)}
        if known:
            self._clear(lambda: known)

    def sweep(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Remove every picture that no item shows, and what interrupted writes left; it may stop
        half way when `is_over`.
        """
        for shard in _shards(self.root):
            if is_over() or not self._clear(partial(_swept, shard)):
                return

    @contextlib.contextmanager
    def deleting(self) -> Iterator[None]:
        """Nothing is added until the block ends, in which the gallery is deleted.

        Raises: GalleryBusyError if it is not there; GalleryWriteError.
        """
        with self._locked(_LOCK, fcntl.LOCK_EX):
            yield

    def _clear(self, list_contents: Callable[[], Collection[str]]) -> bool:
        """Remove those of the contents that no item shows; False if that cannot be told now."""
        try:
            with (
                self._locked(_LOCK, fcntl.LOCK_EX),
                self._locked(_COPIED, fcntl.LOCK_EX | fcntl.LOCK_NB),
            ):
                contents = sorted(list_contents())
                for sha256 in set(contents) - contents_held(self._gallery, contents):
                    self._path(sha256).unlink(missing_ok=True)
        except BlockingIOError:
            return False
        except (KinlensError, OSError) as error:
            _warn_of_what_stays(self._gallery.name, error)
            return False
        return True

    def _write(self, path: Path, data: bytes) -> None:
        make_folder(path.parent, "upload")
        if path.is_file():
            sync(path.parent, "upload")  # another thread may be about to
        else:
            write_whole(path, data, "upload")

    def _link(self, file: Path) -> None:
        try:
            os.link(file, self._path(file.name))
        except FileExistsError:
            pass
        except OSError:  # of another disk, or of one without links
            write_whole(self._path(file.name), file.read_bytes(), "upload")

    @contextlib.contextmanager
    def _locked(self, name: str, kind: int) -> Iterator[None]:
        """Raises: BlockingIOError if it is not to wait."""
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
                f"The pictures in {self.root} cannot be changed: {error.strerror or error}. Check "
                "the free space, the permissions of that folder and the limit of open files "
                "(`ulimit -n`)."
            ) from error

    def _absence(self) -> GalleryBusyError:
        return GalleryBusyError(
            f"The gallery {self._gallery.name} is not there at this moment; nothing was stored. "
            "Try again in a second."
        )

    def _path(self, sha256: str) -> Path:
        assert _SHA256.fullmatch(sha256), "not a sha256"
        return self.root / _name(sha256)


def _name(sha256: str) -> str:
    return f"{sha256[:_SHARD]}/{sha256}"


def _shards(root: Path) -> list[Path]:
    """The folders of a folder of pictures; none if it is not there."""
    return sorted(path for path in root.glob("?" * _SHARD) if path.is_dir())


def _swept(shard: Path) -> list[str]:
    """The contents of a folder that nobody writes into; half-written ones go."""
    for stage in shard.glob(f"{_STAGE}*"):
        stage.unlink(missing_ok=True)
    return _contents(shard)


def _contents(shard: Path) -> list[str]:
    return [file.name for file in shard.iterdir() if _SHA256.fullmatch(file.name)]


def _intact(sha256: str, data: bytes) -> bytes:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise GalleryCorruptError(
            f"The picture {sha256} is damaged. Put its items again with their image."
        )
    return data


def _missing() -> ItemNotFoundError:
    return ItemNotFoundError(
        "The picture of this item is not kept here; it was stored as a vector, or the item is "
        "gone. Put the item again with its image."
    )


def _warn_of_what_stays(place: str, error: Exception) -> None:
    structlog.get_logger().warning(
        "pictures stay for now", place=place, error=type(error).__name__, detail=str(error)
    )


class Sweeper:
    """Looks once an hour for pictures that no item shows: of writes that were cut short, and of
    items that were removed without the service; and does what else is to `tidy`. It has a thread of
    its own, in one process of all that share the folder `state`.
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
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin with a sweep as soon as no other process does them."""
        threading.Thread(target=self._run, name="sweep", daemon=True).start()

    def stop(self) -> None:
        """End after the folder that is being looked at; a disk that hangs is left."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                make_folder(self._state, "sweep")
                with exclusive(self._state / ".sweep.lock", wait=True):
                    self._sweep_every_hour()
            except OSError as error:
                _warn_of_what_stays(self._state.name, error)
                self._stopped.wait(_SWEEP_S)

    def _sweep_every_hour(self) -> None:
        while not self._stopped.is_set():
            for gallery in self._list_galleries():
                UploadFolder(gallery).sweep(self._stopped.is_set)
            for tidy in self._tidy:
                try:
                    tidy()
                except KinlensError as error:  # the next sweep finds it again
                    structlog.get_logger().warning(
                        "tidying failed", error=type(error).__name__, detail=str(error)
                    )
            self._stopped.wait(_SWEEP_S)


class SharedUploads:
    """Uploaded pictures of a gallery on Milvus: files ADDRESS/<ab>/<sha256>, in a folder or
    anywhere that fsspec reaches, which any number of services change without a lock among them.
    Each request for a file blocks for at most `limit_s`. Thread safe.

    Who removes a picture asks once more afterwards and puts it back if it is shown by then; who
    puts an item looks once more for its picture. Of two that do so at once, the later one notices.
    """

    def __init__(self, address: str, limit_s: float) -> None:
        """Raises: EngineUnavailableError if the address is unknown or needs a package."""
        self._address = address
        self._limit_s = limit_s
        self._files = _files_at(address)
        self._threads = DaemonThreads("picture files", _AT_ONCE)

    def read(self, sha256: str) -> bytes:
        """The content with this sha256.

        Raises: ItemNotFoundError, GalleryCorruptError, EngineUnavailableError.
        """
        try:
            return _intact(sha256, self._call("read", self._files.read, sha256))
        except FileNotFoundError as error:
            raise _missing() from error

    @contextlib.contextmanager
    def storing(self, contents: Mapping[str, bytes]) -> Iterator[None]:
        """Keep these, by sha256, before and after the block that names them in the catalogue.

        Raises: GalleryWriteError, EngineUnavailableError.
        """
        self._complete(contents)
        yield
        self._complete(contents)

    def discard(self, sha256s: Iterable[str], held: Callable[[list[str]], Collection[str]]) -> None:
        """Remove those of these contents that no item shows; `held` says which ones some item has
        now. What cannot go now stays.
        """
        try:
            contents = list(set(sha256s))
            for sha256 in set(contents) - set(held(contents)):
                with contextlib.suppress(ItemNotFoundError, FileNotFoundError):
                    data = self.read(sha256)
                    self._call("removed", self._files.remove, sha256)
                    if held([sha256]):
                        self._write(sha256, data)
        except KinlensError as error:
            _warn_of_what_stays(self._address, error)

    def _complete(self, contents: Mapping[str, bytes]) -> None:
        for sha256, data in contents.items():
            if not self._call("looked at", self._files.has, sha256):
                self._write(sha256, data)

    def _write(self, sha256: str, data: bytes) -> None:
        try:
            self._call("written", self._files.write, sha256, data)
        except EngineUnavailableError as error:
            raise GalleryWriteError(str(error)) from error

    def _call(self, what: str, work: Callable[P, T], *given: P.args, **options: P.kwargs) -> T:
        """In a thread of its own, since not every client of a store gives up by itself."""
        call = self._threads.submit(lambda: work(*given, **options))
        try:
            return call.result(self._limit_s)
        except FileNotFoundError:
            raise
        except FutureTimeoutError:
            call.cancel()
            raise self._failure(
                what, f"that took longer than {self._limit_s:g} s, which is the limit"
            ) from None
        except Exception as error:
            # Each client of a store has errors of its own.
            raise self._failure(what, f"{type(error).__name__}: {error}") from error

    def _failure(self, what: str, reason: str) -> EngineUnavailableError:
        return EngineUnavailableError(
            f"A picture at {self._address} cannot be {what}: {reason:.500}. Check that the address "
            "is right, and that this service may read and write there."
        )


class _Store:
    """Files by sha256 in a file system of fsspec; what is read or removed may be missing."""

    def __init__(self, files: Any, root: str) -> None:
        self._files = files
        self._root = root.rstrip("/")

    def has(self, sha256: str) -> bool:
        return bool(self._files.isfile(f"{self._root}/{_name(sha256)}"))

    def read(self, sha256: str) -> bytes:
        return bytes(self._files.cat_file(f"{self._root}/{_name(sha256)}"))

    def write(self, sha256: str, data: bytes) -> None:
        path = f"{self._root}/{_name(sha256)}"
        if "file" in self._files.protocol:
            # An object store writes in one step, but fsspec writes a local file in place.
            make_folder(Path(path).parent, "upload")
            write_whole(Path(path), data, "upload")
        else:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, data)

    def remove(self, sha256: str) -> None:
        self._files.rm_file(f"{self._root}/{_name(sha256)}")


def _files_at(address: str) -> _Store:
    try:
        import fsspec

        # Listings of others would hide what they write meanwhile.
        files, root = fsspec.url_to_fs(address, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise EngineUnavailableError(
            f"Pictures at {address} cannot be reached: {error}. Check the address, and install "
            "what it needs: pip install 'kinlens[milvus]', and a package such as s3fs for s3://."
        ) from error
    return _Store(files, str(root))
