"""The catalogue of a gallery: items and attributes in a SQLite file with a write-ahead log, and
vectors in a separate file. Each reader sees one state and never waits; writers take turns.
"""

import contextlib
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from kinlens.embedder.durable import crash_point
from kinlens.embedder.errors import GalleryCorruptError, GalleryError, GalleryWriteError
from kinlens.embedder.types import ItemId
from kinlens.indexer.catalog.earlier import convert, define_views
from kinlens.indexer.catalog.read import CatalogView, Row
from kinlens.indexer.catalog.schema import (
    BUSY_S,
    FIRST_STATE,
    INDEXES,
    NEW_FILE,
    SQLITE_ERRORS,
    TABLES,
    VERSION,
    State,
    check_schema,
    error_code,
    read_error,
    seal,
    write_error,
)
from kinlens.indexer.catalog.vectors import VECTORS, VectorFile
from kinlens.indexer.catalog.write import CatalogWriter
from kinlens.indexer.types import RESTORE, VectorType

_CACHE_KIB = 8192
_KEEP_LOG_BYTES = 64 * 1024 * 1024
_Idle = deque[sqlite3.Connection]
P = ParamSpec("P")
T = TypeVar("T")

_LARGE_BYTES = 64 * 2**20
_MAX_FREE = 0.1  # share of unused pages above which a large file is vacuumed
_MAX_ATTEMPTS = 8  # to open vectors that a compaction may delete before they are opened
_UNWRITABLE = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
_LOG_INDEX_BYTES = 32 * 1024
_ERASED_ROWS = 4096  # rows of removed items deleted in one transaction
_CHECKPOINT_S = 1.0  # how long a write waits for searches to end before it truncates a long log


class Catalog:
    """An open catalogue. Thread safe; any number of processes may have it open."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        """Use `open`, which also checks the file."""
        self.path = path
        self._log = path.with_name(f"{path.name}-wal")  # contains the latest changes
        self._log_index = path.with_name(f"{path.name}-shm")
        self._vectors = path.parent / VECTORS
        self._writable = writable
        self._unchanged: tuple[int, ...] | None = None
        self._is_disk_full = False
        self._idle: _Idle = deque()
        self._has_views = False  # or else the file is of an earlier version
        self._file: VectorFile | None = None
        self._closed = False
        self._log_limit = _KEEP_LOG_BYTES

    @classmethod
    def create(cls, path: Path, dim: int, type_: VectorType = "fp32") -> None:
        """Create an empty catalogue and its file of vectors of length `dim`.

        Raises: GalleryWriteError, OSError.
        """
        file = VectorFile.create(path.parent / VECTORS / os.urandom(4).hex(), dim, type_)
        try:
            connection = sqlite3.connect(path, isolation_level=None)
            with contextlib.closing(connection):
                # One transaction: each one is synced to the disk.
                tables = ";".join((TABLES, *INDEXES))
                connection.executescript(f"{NEW_FILE}BEGIN;{VERSION}{tables}")
                connection.execute(FIRST_STATE, (dim, file.name))
                seal(connection)
                connection.execute("COMMIT")
                connection.execute("PRAGMA journal_mode = WAL")
        except SQLITE_ERRORS as error:
            raise write_error(path, error) from error

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> "Catalog":
        """Open a catalogue and check its schema. `CatalogView.check` verifies the whole file.

        In a folder without write permission or on a full disk, a file without a log is read without
        locks, and reopened after another process changed it. Reads during such a change may raise
        GalleryCorruptError.

        Raises: GalleryCorruptError; GalleryError if it cannot be read.
        """
        if not path.is_file():
            raise GalleryCorruptError(f"{path} is missing. {RESTORE}")
        catalog = cls(path, writable=writable)
        try:
            catalog._check()
        except BaseException:
            catalog.close()
            raise
        return catalog

    @contextlib.contextmanager
    def reading(self) -> Iterator[CatalogView]:
        """A view of one state, for the duration of a `with` block.

        Raises: GalleryCorruptError; GalleryError if the file cannot be read.
        """
        connection, idle = self._acquire()
        try:
            view = self._begin(connection)
            try:
                yield view
            finally:
                del view.connection  # using the view after its block must fail
        except SQLITE_ERRORS as error:
            raise read_error(self.path, error) from error
        finally:
            self._finish(connection, idle)

    def state(self) -> State:
        """The current state, in half the time of `reading`.

        Raises: GalleryCorruptError; GalleryError if the file cannot be read.
        """
        return self._one(CatalogView.state)

    def rows(self, ids: Sequence[ItemId], seq: int) -> dict[ItemId, Row] | None:
        """`CatalogView.rows` without a transaction.

        Raises: GalleryCorruptError; GalleryError if the file cannot be read.
        """
        return self._one(CatalogView.rows, ids, seq)

    def _one(
        self, read: Callable[Concatenate[CatalogView, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a read of a single statement, which needs no transaction."""
        if not self._has_views:
            with self.reading() as view:
                return read(view, *args, **kwargs)
        connection, idle = self._acquire()
        try:
            return read(CatalogView(connection), *args, **kwargs)
        except SQLITE_ERRORS as error:
            raise read_error(self.path, error) from error
        finally:
            self._release(connection, idle)

    @contextlib.contextmanager
    def writing(self) -> Iterator[CatalogWriter]:
        """A writer whose changes are committed to disk when the `with` block ends.

        If the block raises, nothing is changed. Writers take turns and wait up to 30 s.

        Raises: GalleryWriteError if nothing could be written; GalleryCorruptError.
        """
        connection, idle = self._acquire()
        try:
            writer = self._begin_writing(connection)
            yield writer
            if writer.has_written:
                writer.file.sync()
            connection.execute("COMMIT")
            self._shorten_log(connection)
        except SQLITE_ERRORS as error:
            raise write_error(self.path, error) from error
        except OSError as error:
            raise GalleryWriteError(
                f"Nothing was written to {self._vectors}: {error.strerror or error}. "
                "Free space on the disk, check its limits and health, and try again."
            ) from error
        finally:
            self._finish(connection, idle)

    def _begin_writing(self, connection: sqlite3.Connection) -> CatalogWriter:
        """Begin the transaction of a writer. Raises: GalleryCorruptError, OSError."""
        connection.execute("BEGIN IMMEDIATE")
        view = CatalogView(connection)
        self._open_vectors(view)  # needs no retry: no compaction can commit during a write
        if self._define_views(connection):
            assert view.file is not None
            return CatalogWriter(connection, view.file, view.state())
        file = convert(view, self._vectors)
        connection.execute("COMMIT")
        del file  # until now, it kept a compaction from deleting the vectors
        return self._begin_writing(connection)

    def _begin(self, connection: sqlite3.Connection) -> CatalogView:
        """A view in a new transaction. Retries if a compaction has just deleted the vectors."""
        for _ in range(_MAX_ATTEMPTS):
            view = CatalogView(connection)
            connection.execute("BEGIN")
            self._define_views(connection)
            try:
                self._open_vectors(view)
                return view
            except FileNotFoundError:
                connection.execute("ROLLBACK")
        raise GalleryCorruptError(
            f"The vectors of {self.path.name} are missing in {self._vectors}. {RESTORE}"
        )

    def _define_views(self, connection: sqlite3.Connection) -> bool:
        """Define the views of a file of an earlier version, until the end of the transaction.

        Returns whether the file has its own. Raises: sqlite3.Error.
        """
        self._has_views = self._has_views or define_views(connection)
        return self._has_views

    def _open_vectors(self, view: CatalogView) -> None:
        """Open the file of vectors of a view. Raises: FileNotFoundError, GalleryCorruptError."""
        state = view.state()
        if state.vectors is not None:
            view.file = VectorFile.open(self._vectors / state.vectors, state.dim)
            if not (self._writable or self._closed):
                self._file = view.file  # keep it open; not in a writer, which may be idle for long

    def erase(self, kept: tuple[float, float] = (0.0, 0.0)) -> None:
        """Erase the items that were removed up to the write of the segment, in batches between
        which other writers have their turn. A later call continues one that was interrupted.

        kept: items removed after the first and until the second of these Unix times stay
            restorable.

        Raises: the errors of `writing`.
        """
        with self.reading() as view:
            ids = view.erasable(kept)
        for start in range(0, len(ids), _ERASED_ROWS):
            began = time.perf_counter()
            with self.writing() as writer:
                writer.erase(ids[start : start + _ERASED_ROWS])
            crash_point("erase: after a batch")
            time.sleep(time.perf_counter() - began)  # a writer looks for its turn now and then

    def shrink(self) -> None:
        """Vacuum the file: unused pages still contain removed items, or vectors of an old version.

        A large file is vacuumed only if it has many unused pages, since writes have to wait.

        Raises: GalleryError.
        """
        connection, idle = self._acquire()
        try:
            [(free,)] = connection.execute("PRAGMA freelist_count").fetchall()
            [(pages,)] = connection.execute("PRAGMA page_count").fetchall()
            [(page_size,)] = connection.execute("PRAGMA page_size").fetchall()
            is_large = pages * page_size > _LARGE_BYTES
            if not is_large or free > _MAX_FREE * pages:
                connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except SQLITE_ERRORS as error:
            raise write_error(self.path, error) from error
        finally:
            self._finish(connection, idle)

    def close(self) -> None:
        """Close the idle connections; running blocks close theirs when they end."""
        self._closed = True
        self._file = None
        while self._idle:
            self._idle.pop().close()

    def _acquire(self) -> tuple[sqlite3.Connection, _Idle]:
        """A connection for exclusive use, and the pool to return it to.

        Raises: GalleryError, GalleryCorruptError.
        """
        if self._closed:
            raise GalleryError(f"{self.path} is closed. Open the gallery again.")
        if self._unchanged is not None and self._unchanged != self._stamp():
            self._read_without_locks()
        idle = self._idle
        try:
            return idle.pop(), idle
        except IndexError:
            return self._connected(), idle

    def _finish(self, connection: sqlite3.Connection, idle: _Idle) -> None:
        """Roll back an open transaction and release the connection."""
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            connection.close()
            return
        self._release(connection, idle)

    def _release(self, connection: sqlite3.Connection, idle: _Idle) -> None:
        if idle is not self._idle:  # opened before the file changed
            connection.close()
            return
        idle.append(connection)
        if self._closed:
            self.close()

    def _connected(self) -> sqlite3.Connection:
        mode = "rw" if self._writable else "ro"
        is_immutable = self._unchanged is not None and not self._has_log()
        uri = f"{self.path.resolve().as_uri()}?mode={mode}{'&immutable=1' * is_immutable}"
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(
                uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            connection.execute(f"PRAGMA cache_size = {-_CACHE_KIB}")
            if self._writable:
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("PRAGMA secure_delete = FAST")
                connection.execute(f"PRAGMA journal_size_limit = {_KEEP_LOG_BYTES}")
        except SQLITE_ERRORS as error:
            if connection is not None:
                connection.close()
            raise read_error(self.path, error) from error
        return connection

    def _shorten_log(self, connection: sqlite3.Connection) -> None:
        """Truncate a long log. SQLite does not do this while there is always a running search."""
        size = _bytes(self._log)
        if size <= self._log_limit:
            return
        is_busy = 1
        # If this fails, the committed changes stay in the log.
        with contextlib.suppress(sqlite3.Error):
            connection.execute(f"PRAGMA busy_timeout = {_CHECKPOINT_S * 1000:.0f}")
            [(is_busy, _, _)] = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000:.0f}")
        # Raise the limit, so that one long search does not delay every write.
        self._log_limit = _KEEP_LOG_BYTES + (size if is_busy else 0)

    def _check(self) -> None:
        try:
            with self.reading() as view:
                check_schema(self.path, view.connection)
                view.state()
        except GalleryError as error:
            cause = error.__cause__
            if self._writable or self._unchanged or not isinstance(cause, sqlite3.Error):
                raise
            self._is_disk_full = cause.sqlite_errorcode == sqlite3.SQLITE_IOERR_SHMSIZE
            if self._has_log() or not (self._is_disk_full or error_code(cause) in _UNWRITABLE):
                raise
            self._read_without_locks()
            self._check()

    def _has_log(self) -> bool:
        """Whether the log has changes. On a disk that was full, also whether a writer may add some:
        each connection with locks has a whole index of the log.
        """
        return _bytes(self._log) > 0 or (
            self._is_disk_full and _bytes(self._log_index) >= _LOG_INDEX_BYTES
        )

    def _stamp(self) -> tuple[int, ...]:
        """Times, inodes and sizes of the file and its log: they differ after a change."""
        found = [_bytes(self._log_index)]
        for file in (self.path, self._log):
            with contextlib.suppress(OSError):
                status = file.stat()
                found += [status.st_mtime_ns, status.st_ino, status.st_size]
        return tuple(found)

    def _read_without_locks(self) -> None:
        is_over = self._is_disk_full and self._has_log()
        self._unchanged = None if is_over else self._stamp()
        before, self._idle = self._idle, deque()
        while before:
            before.pop().close()


@contextlib.contextmanager
def catalog_view(path: Path) -> Iterator[CatalogView]:
    """One state of the catalogue at `path`; the file is closed when the `with` block ends.

    Raises: GalleryCorruptError; GalleryError if it cannot be read.
    """
    with contextlib.closing(Catalog.open(path)) as catalog, catalog.reading() as view:
        yield view


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
