"""Connections to a catalogue: each thread its own, closed when the thread ends."""

import sqlite3
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

from embedder.errors import GalleryError
from indexer.catalog.errors import BUSY_S, read_error

_CACHE_KIB = 8192
KEEP_LOG_BYTES = 64 * 1024 * 1024


Stamp = tuple[int, ...]
"""What a change of a file changes."""


class Connections:
    """Lends connections to threads. A thread that holds one and asks again gets another one."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        self._path = path
        self._writable = writable
        self._unwritable: Stamp | None = None
        self._threads = threading.local()
        self._lock = threading.Lock()
        self._closers: set[weakref.finalize[Any, Idle]] = set()
        self._closed = False

    def idle(self) -> "Idle":
        """The idle connections of this thread. Raises: GalleryError after `close`."""
        if self._unwritable is not None and self._unwritable != _stamp(self._path):
            self.expect_unwritable()
        try:
            found: Idle = self._threads.idle
        except AttributeError:
            found = self._new_idle()
        return found

    @property
    def stamp(self) -> Stamp | None:
        """What `is_stale` compares with; to be taken before the connection."""
        return self._unwritable

    def is_stale(self, stamp: Stamp | None, error: BaseException | None = None) -> bool:
        """Whether what was read since `stamp`, or failed, may be of several states."""
        if stamp is None or stamp == _stamp(self._path):
            return False
        # Where there was a log SQLite keeps the states apart, but the log may be gone.
        return not _has_log(stamp) or isinstance(error, sqlite3.Error)

    def close(self) -> None:
        """Close every connection: now if it is idle, else when it is given back."""
        self._closed = True
        self._drop()

    def expect_unwritable(self) -> None:
        """The folder cannot be written: while there is no log, read without locks, and look at the
        file again as soon as somebody who can write has changed it.
        """
        self._unwritable = _stamp(self._path)
        self._drop()

    def connect(self) -> sqlite3.Connection:
        """A new connection, set up. Raises: GalleryError, GalleryCorruptError."""
        mode = "rw" if self._writable else "ro"
        stamp = self._unwritable
        immutable = "" if stamp is None or _has_log(stamp) else "&immutable=1"
        uri = f"{self._path.resolve().as_uri()}?mode={mode}{immutable}"
        try:
            connection = sqlite3.connect(
                uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            connection.execute(f"PRAGMA cache_size = {-_CACHE_KIB}")
            if self._writable:
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("PRAGMA secure_delete = FAST")
                connection.execute(f"PRAGMA journal_size_limit = {KEEP_LOG_BYTES}")
        except sqlite3.Error as error:
            raise read_error(self._path, error) from error
        return connection

    def _new_idle(self) -> "Idle":
        found = Idle(self)
        with self._lock:
            if self._closed:
                raise GalleryError(f"{self._path} is closed. Open the gallery again.")
            self._closers = {known for known in self._closers if known.alive} | {found.closer}
        self._threads.idle = found
        return found

    def _drop(self) -> None:
        with self._lock:
            for closer in self._closers:
                closer()
            self._closers.clear()
        self._threads = threading.local()


class Idle:
    """The connections of one thread that nobody uses at the moment."""

    __slots__ = ("__weakref__", "_all", "_connections", "closer")

    def __init__(self, connections: Connections) -> None:
        self._all = connections
        self._connections: deque[sqlite3.Connection] = deque()
        self.closer = weakref.finalize(self, _close_all, self._connections)

    def take(self) -> sqlite3.Connection:
        """A connection. Raises: GalleryError, GalleryCorruptError."""
        try:
            return self._connections.pop()
        except IndexError:
            return self._all.connect()

    def give_back(self, connection: sqlite3.Connection) -> None:
        """Keep the connection for the next time, or close it if the others are closed."""
        self._connections.append(connection)
        if not self.closer.alive:
            _close_all(self._connections)


def _close_all(connections: deque[sqlite3.Connection]) -> None:
    while connections:
        connections.pop().close()


def log_bytes(path: Path) -> int:
    """The length of the write-ahead log of this catalogue, where changes stand at first."""
    try:
        return _log(path).stat().st_size
    except OSError:
        return 0


def _log(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _has_log(stamp: Stamp) -> bool:
    return stamp[-1] > 0


def _stamp(path: Path) -> Stamp:
    found: list[int] = []
    for file in (path, _log(path)):
        try:
            status = file.stat()
            found += [status.st_mtime_ns, status.st_ino, status.st_size]
        except OSError:
            found += [0, 0, 0]
    return tuple(found)
