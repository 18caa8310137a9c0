"""Images that stay in an object store: read within a time limit, and cached on the disk.

request ─► copy on the disk, by sha256 ─► is the store away? ─► read ─► check sha256 ─► copy
"""

import contextlib
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

from kinlens.embedder.errors import EngineUnavailableError, KinlensError, UnreachableError
from kinlens.indexer.entries import Item
from kinlens.indexer.images import ImageAddress, item_bytes
from kinlens.service.concurrency import DaemonThreads, begin_in_thread
from kinlens.service.galleries.locations import Opened

T = TypeVar("T")

_AT_ONCE = 16
_PAUSE_S = 5.0  # until a store that is away is asked again
_WATCH_S = 30.0  # without a read, until it is asked whether it answers
_SAMPLE = 20  # items, of which one has a path
_SCAN_PART, _FULL_PART, _KEPT_PART = 16, 7 / 8, 3 / 4


class DiskCache:
    """Files by their sha256, of at most `max_bytes` together. Those that were not used for longest
    are removed. Several processes may share the folder. A copy that cannot be written is omitted.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._unseen: float = math.inf  # bytes that were written since the folder was scanned
        self._lock = threading.Lock()

    def get(self, sha256: str) -> bytes | None:
        """The content with this sha256, if there is a copy."""
        path = self._path(sha256)
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == sha256:
                os.utime(path)
                return data
            path.unlink()  # copies are not synced, so a power loss may have damaged it
        return None

    def put(self, sha256: str, data: bytes) -> None:
        """Keep a copy, and remove others if there are too many bytes."""
        if len(data) > self._max_bytes // _SCAN_PART:
            return
        path = self._path(sha256)
        part = path.with_name(f"{sha256}.{os.urandom(4).hex()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            part.replace(path)
            with self._lock:
                self._unseen += len(data)
                if self._unseen > self._max_bytes / _SCAN_PART:
                    self._unseen = 0
                    self._evict()
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            log = structlog.get_logger()
            log.warning("image not cached", folder=str(self._folder), detail=str(error))

    def _evict(self) -> None:
        files = []
        for path in self._folder.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):  # another process removes files, too
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= _FULL_PART * self._max_bytes:
            return
        for _, size, path in sorted(files):
            if total <= _KEPT_PART * self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _path(self, sha256: str) -> Path:
        return self._folder / sha256[:2] / sha256


class ImageStores:
    """Reads images at addresses, each read within `limit_s`. Thread safe.

    A store that does not answer is away for some seconds: reads of it are refused at once, so a
    page of results does not wait for each image, and images of other galleries do not wait at all.
    """

    def __init__(self, cache: DiskCache | None, limit_s: float) -> None:
        self._cache = cache
        self._limit_s = limit_s
        self._stores: dict[ImageAddress, _Store] = {}

    def read(self, root: ImageAddress, item: Item) -> bytes:
        """The image of an item, as indexed.

        Raises: ItemNotFoundError if it was removed or changed, or is outside of the address;
            UnreachableError.
        """
        cached = None if self._cache is None else self._cache.get(item.sha256)
        if cached is not None:
            return cached
        data = self._store(root).call(lambda: item_bytes(root, item))
        if self._cache is not None:
            self._cache.put(item.sha256, data)
        return data

    def watch(self, gallery: Opened) -> None:
        """Ask the store of a gallery whether it answers, in a thread of its own, if that is due."""
        root = gallery.image_root
        if isinstance(root, ImageAddress) and self._store(root).is_due():
            path = _some_path(gallery)
            begin_in_thread(lambda: self._store(root).probe(path))

    def check(self, gallery: Opened) -> str | None:
        """Ask the store of a gallery now; why its images cannot be read, or None if they can."""
        root = gallery.image_root
        if not isinstance(root, ImageAddress):
            return None
        self._store(root).probe(_some_path(gallery))
        return self.fault(root)

    def fault(self, root: ImageAddress) -> str | None:
        """Why the images of a store cannot be read now, without its address; None if they can."""
        return self._store(root).fault

    def close(self) -> None:
        """Cancel queued reads; hanging ones end with the process."""
        for store in self._stores.values():
            store.threads.close()

    def _store(self, root: ImageAddress) -> "_Store":
        return self._stores.get(root) or self._stores.setdefault(root, _Store(root, self._limit_s))


def _some_path(gallery: Opened) -> str:
    """The path of an image; "" if there is none among the first items."""
    return next((item.path for item in gallery.page(0, _SAMPLE).items if item.path), "")


class _Store:
    """An object store, and whether it answers."""

    def __init__(self, root: ImageAddress, limit_s: float) -> None:
        self.fault: str | None = None
        self._root = root
        self._limit_s = limit_s
        self.threads = DaemonThreads("image store", _AT_ONCE, limit_s)
        self._retry_at = -math.inf
        self._asked_at = -math.inf
        self._answered_at = -math.inf

    def is_due(self) -> bool:
        """Whether the store was not asked for a while; the caller asks it now."""
        now = time.monotonic()
        if now - self._asked_at < (_WATCH_S if self.fault is None else _PAUSE_S):
            return False
        self._asked_at = now
        return True

    def call(self, work: Callable[[], T]) -> T:
        """The result of `work`, which reads from the store. While the store is away, one call in
        `_PAUSE_S` seconds asks it again.

        Raises: UnreachableError; any error of `work`.
        """
        now = time.monotonic()
        if self.fault is not None:
            if now < self._retry_at:
                raise UnreachableError(f"The images at {self._root} cannot be read: {self.fault}.")
            self._retry_at = now + _PAUSE_S
        self._asked_at = now
        try:
            result = self.threads.call(work, self._limit_s)
        except TimeoutError:
            self._set(f"no answer within {self._limit_s:g} s")
            raise UnreachableError(
                f"The images at {self._root} cannot be read: {self.fault}."
            ) from None
        except EngineUnavailableError as error:
            # It may refuse one image and show the others, and its refusals take no time.
            if not isinstance(error.__cause__, PermissionError):
                self._set(f"failed with {type(error.__cause__ or error).__name__}", error)
            raise
        except KinlensError:  # the image is missing or was changed
            self._set(None)
            raise
        self._set(None)
        return result

    def probe(self, path: str) -> None:
        """Ask the store for an image, also while it is away."""
        self._retry_at = -math.inf
        try:
            self.call(lambda: self._root.probe(path))
        except EngineUnavailableError as error:
            is_answering = time.monotonic() - self._answered_at < _WATCH_S
            if isinstance(error.__cause__, PermissionError) and not is_answering:
                self._set("access is refused", error)

    def _set(self, fault: str | None, error: Exception | None = None) -> None:
        now = time.monotonic()
        if fault is not None:
            self._retry_at = now + _PAUSE_S
        else:
            self._answered_at = now
        if (fault is None) != (self.fault is None):
            log, detail = structlog.get_logger(), str(error or fault or "")
            if fault is not None:
                log.error("image store is away", address=str(self._root), detail=detail)
            else:
                log.info("image store answers again", address=str(self._root))
        self.fault = fault
