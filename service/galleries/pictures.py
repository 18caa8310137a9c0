"""Pictures: those that were uploaded, in the folder of their gallery; those made for the screen;
and those that the page offers to search with.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog

from embedder.durable import exclusive, make_folder, sync, write_whole
from embedder.errors import (
    DeadlineExceededError,
    GalleryBusyError,
    GalleryCorruptError,
    GalleryWriteError,
    ImageCostError,
    ImageError,
    ItemNotFoundError,
    KinlensError,
    OverloadedError,
    SourceError,
)
from embedder.preprocess import MAX_SIDE_PX, ImageLimits
from indexer.gallery import contents_held, current_generation, pictures_folder
from indexer.ingest.sources import ANY_SIZE
from service.concurrency import SingleFlight
from service.search.cache import LruCache
from service.search.lanes import Lanes

SIDES_PX = (160, 320, 640)
"""Longest sides of the small pictures that can be asked for."""

MAX_SAMPLES = 48

_LOCK, _COPIED = "LOCK", "COPIED"
_STAGE = ".stage-"
_SHARD = 2  # hex digits
_SHA256 = re.compile("[0-9a-f]{64}")
_SWEEP_S = 3600.0
_KEPT_BYTES = 64 * 2**20
_KEPT = 10_000
_PAUSE_S = 30.0
_SAMPLE_TYPES = {
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
    ".gif": "image/gif",
}


class PictureFolder:
    """The uploaded pictures of one gallery: GALLERY/pictures/<ab>/<sha256>, beside its generations.

    A picture is whole and on the disk before the catalogue names it, and goes when no item of the
    gallery shows it any more. Thread safe, also between processes; every call may block.
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
            data = self._path(sha256).read_bytes()
        except FileNotFoundError as error:
            raise ItemNotFoundError(
                "The picture of this item is not kept here; it was stored as a vector, or the item "
                "is gone. Put the item again with its image."
            ) from error
        except OSError as error:
            raise GalleryCorruptError(f"An uploaded picture cannot be read: {error}.") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise GalleryCorruptError(
                f"The picture {sha256} is damaged. Put its items again with their image."
            )
        return data

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """Nothing is discarded until the block ends: what is saved in it is named in it.

        Raises: GalleryBusyError if the gallery is not there now; GalleryWriteError.
        """
        with self._locked(_LOCK, fcntl.LOCK_SH):
            if current_generation(self._gallery) is None:
                raise self._absence()
            yield

    def save(self, data: bytes) -> None:
        """Keep `data` for good. Raises: GalleryWriteError."""
        path = self._path(hashlib.sha256(data).hexdigest())
        with self._disk_errors_explained():
            make_folder(path.parent, "picture")
            if path.is_file():
                sync(path.parent, "picture")  # another thread may be about to
            else:
                write_whole(path, data, "picture")

    @contextlib.contextmanager
    def receiving(self, other: "PictureFolder") -> Iterator[None]:
        """The gallery of `other` is copied into this one: no picture of either goes until the block
        ends. Raises: GalleryWriteError.
        """
        with contextlib.ExitStack() as held:
            held.enter_context(self._locked(_COPIED, fcntl.LOCK_SH))
            if other.root.is_dir():
                with contextlib.suppress(GalleryWriteError):  # then nobody removes anything there
                    held.enter_context(other._locked(_COPIED, fcntl.LOCK_SH))
            yield

    def take_in(
        self, root: Path, choose: Callable[[list[str]], Collection[str]] = lambda names: names
    ) -> None:
        """Link the pictures below `root`, which is laid out like this; of those of a folder in it
        the ones that `choose` gives. On another disk they are copied. Raises: GalleryWriteError.
        """
        with self._disk_errors_explained():
            for shard in _shards(root):
                chosen = [name for name in choose(_contents(shard)) if not self.has(name)]
                for name in chosen:
                    make_folder(self.root / shard.name, "picture")
                    self._link(shard / name)
                if chosen:
                    sync(self.root / shard.name, "picture")

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
    def deleted(self) -> Iterator[None]:
        """Nothing is added until the block ends, in which the gallery is deleted.

        Raises: GalleryWriteError.
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
            structlog.get_logger().warning(
                "pictures stay for now",
                gallery=self._gallery.name,
                error=type(error).__name__,
                detail=str(error),
            )
            return False
        return True

    def _link(self, file: Path) -> None:
        try:
            os.link(file, self._path(file.name))
        except FileExistsError:
            pass
        except OSError:  # of another disk, or of one without links
            write_whole(self._path(file.name), file.read_bytes(), "picture")

    @contextlib.contextmanager
    def _locked(self, name: str, kind: int) -> Iterator[None]:
        """Raises: BlockingIOError if it is not to wait."""
        with self._disk_errors_explained():
            if not self.root.is_dir():
                self.root.mkdir(exist_ok=True)
                sync(self._gallery, "picture")
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
        return self.root / sha256[:_SHARD] / sha256


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


class Sweeper:
    """Looks now and then for pictures that no item shows: of writes that were cut short, and of
    items that were removed without the service. It has a thread of its own, in one process of all
    that share the folder `state`.
    """

    def __init__(self, state: Path, list_galleries: Callable[[], Iterable[Path]]) -> None:
        self._state = state
        self._list_galleries = list_galleries
        self._is_chosen = False
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin with a sweep as soon as no other process does them."""
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End after the folder that is being looked at; a disk that hangs is left."""
        self._stopped.set()
        if self._is_chosen:
            self._thread.join(1.0)

    def _run(self) -> None:
        with self._failures_told():
            make_folder(self._state, "sweep")
            with exclusive(self._state / ".sweep.lock", wait=True):
                self._is_chosen = True
                while not self._stopped.is_set():
                    with self._failures_told():
                        for gallery in self._list_galleries():
                            PictureFolder(gallery).sweep(self._stopped.is_set)
                    self._stopped.wait(_SWEEP_S)

    @contextlib.contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except (KinlensError, OSError) as error:
            structlog.get_logger().warning("no sweep of pictures", error=type(error).__name__)


class Renditions:
    """Makes and keeps them; belongs to the thread of the event loop.

    At most `at_once` are made at the same time, so that searches find decoding processes free.
    """

    def __init__(
        self, lanes: Lanes, limits: ImageLimits, at_once: int, waiting: int, limit_s: float
    ) -> None:
        """`limits` are those of uploads; bytes do not count, since the file is here already."""
        self._lanes = lanes
        self._limits = replace(limits, max_bytes=ANY_SIZE.max_bytes)
        self._places = asyncio.Semaphore(at_once)
        self._most = at_once + waiting
        self._under_way = 0
        self._limit_s = limit_s
        self._kept = LruCache(_KEPT, _KEPT_BYTES)
        self._costly: dict[str, float] = {}
        self._flights: SingleFlight[bytes] = SingleFlight()

    async def get(
        self, key: str, read: Callable[[], Awaitable[bytes]], side_px: int | None = None
    ) -> bytes:
        """The picture `key` as a JPEG, from what `read` gives; `side_px` None: MAX_SIDE_PX.

        Raises: ItemNotFoundError if it cannot be shown, OverloadedError, DeadlineExceededError;
            what `read` raises.
        """
        side_px = side_px or MAX_SIDE_PX
        key = f"{key}-{side_px}"
        if (kept := self._kept.get(key)) is not None:
            return kept
        if self._is_costly(key):
            raise _too_costly()
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._flights.run(key, lambda: self._make(key, read, side_px))
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"Making the picture took longer than {self._limit_s:g} s, which is the limit. "
                "Try again in a second."
            ) from error

    def _is_costly(self, key: str) -> bool:
        """Whether it was given up a moment ago: nobody can keep the processes busy with it."""
        now = time.monotonic()
        self._costly = {one: until for one, until in self._costly.items() if until > now}
        return key in self._costly

    async def _make(self, key: str, read: Callable[[], Awaitable[bytes]], side_px: int) -> bytes:
        if self._under_way >= self._most:
            raise OverloadedError(
                f"{self._under_way} pictures are being made, which is the limit. "
                "Try again in a second."
            )
        self._under_way += 1
        try:
            async with self._places:
                data = await read()
                made = await self._lanes.render(data, self._limits, side_px)
        except ImageCostError as error:
            self._costly[key] = time.monotonic() + _PAUSE_S
            raise _too_costly() from error
        except ImageError as error:
            raise ItemNotFoundError(f"The picture of this item cannot be shown: {error}") from error
        finally:
            self._under_way -= 1
        self._kept.set(key, made)
        return made


def _too_costly() -> DeadlineExceededError:
    return DeadlineExceededError(
        "Making the picture took more time or memory than an image may take. Try again in a "
        "minute, or put a smaller image in its place."
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture; `name` is that of its file, without the suffix."""

    name: str
    path: Path

    @property
    def media_type(self) -> str:
        """By the suffix of the file."""
        return _SAMPLE_TYPES[self.path.suffix.lower()]


class Samples:
    """The first `MAX_SAMPLES` pictures of a folder by name; they are asked for by number.

    Raises: SourceError if the folder cannot be read.
    """

    def __init__(self, folder: Path | None) -> None:
        try:
            paths = [] if folder is None else sorted(folder.iterdir())
        except OSError as error:
            raise SourceError(
                f"The folder of samples {folder} cannot be read: {error.strerror}. Name a "
                "folder of pictures with --samples or KINLENS_SAMPLES."
            ) from error
        known = [path for path in paths if path.suffix.lower() in _SAMPLE_TYPES and path.is_file()]
        self._samples = [Sample(path.stem, path) for path in known[:MAX_SAMPLES]]

    def all(self) -> list[Sample]:
        """Every sample; empty without a folder."""
        return list(self._samples)

    def get(self, number: int) -> Sample:
        """A sample by its number. Raises: ItemNotFoundError."""
        if not 0 <= number < len(self._samples):
            raise ItemNotFoundError(
                f"There is no sample {number}; there are {len(self._samples)}. GET /samples lists "
                "them."
            )
        return self._samples[number]

    def read(self, number: int) -> bytes:
        """The bytes of a sample. Raises: ItemNotFoundError, also if its file is gone."""
        sample = self.get(number)
        try:
            return sample.path.read_bytes()
        except OSError as error:
            raise ItemNotFoundError(
                f"The file of sample {number} ({sample.name}) cannot be read any more. Restart the "
                "service to look at its folder again."
            ) from error
