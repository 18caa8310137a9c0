"""The catalogue of a gallery: its items and their attributes, in one SQLite file with a write-ahead
log, and their vectors, in a file of their own. Readers see one state each and are never kept
waiting, writers take turns.
"""

import contextlib
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from kinlens.embedder.errors import GalleryCorruptError, GalleryError, GalleryWriteError
from kinlens.embedder.types import ItemId
from kinlens.indexer.catalog.read import CatalogView, Row, State
from kinlens.indexer.catalog.schema import (
    BUSY_S,
    FIRST_STATE,
    INDEXES,
    NEW_FILE,
    REMOVED,
    RESTORE,
    SQLITE_ERRORS,
    TABLES,
    check_schema,
    error_code,
    read_error,
    seal,
    write_error,
)
from kinlens.indexer.catalog.vectors import VECTORS, VectorFile
from kinlens.indexer.catalog.write import CatalogWriter
from kinlens.indexer.types import VectorType

_CACHE_KIB = 8192
_KEEP_LOG_BYTES = 64 * 1024 * 1024
_Idle = deque[sqlite3.Connection]
P = ParamSpec("P")
T = TypeVar("T")

_LARGE_BYTES = 64 * 2**20
_MOST_FREE = 0.1  # part of the pages of a large file
_PATIENCE = 8  # times that vectors which are gone are looked up anew
_CHECKPOINT_S = 1.0  # how long a write that finds the log long waits for searches to end


class Catalog:
    """An open catalogue; thread safe, and any number of processes may have it open."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        """Of a file that `open` has looked at, or will."""
        self.path = path
        self._writable = writable
        self._unchanged: _Stamp | None = None
        self._idle: _Idle = deque()
        self._file: VectorFile | None = None
        self._closed = False
        self._log_limit = _KEEP_LOG_BYTES

    @classmethod
    def create(cls, path: Path, dim: int, type_: VectorType = "fp32") -> None:
        """Make the new, empty file for vectors of length `dim`, and that for the vectors.

        Raises: GalleryWriteError, OSError.
        """
        file = VectorFile.create(path.parent / VECTORS / os.urandom(4).hex(), dim, type_)
        try:
            connection = sqlite3.connect(path, isolation_level=None)
            with contextlib.closing(connection):
                connection.executescript("".join((NEW_FILE, TABLES, INDEXES, *REMOVED)))
                connection.execute(FIRST_STATE, (dim, file.name))
                seal(connection)
                connection.execute("PRAGMA journal_mode = WAL")
        except SQLITE_ERRORS as error:
            raise write_error(path, error) from error

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> "Catalog":
        """Open the file and check that it is a catalogue; `CatalogView.check` looks at all of it.

        A file in a folder that this user cannot write is read without locks while it has no log,
        and opened again when somebody has changed it: what is read in that moment may be refused
        as damaged.

        Raises: GalleryCorruptError; GalleryError if it cannot be read.
        """
        if not path.is_file():
            raise GalleryCorruptError(f"{path} is missing. {RESTORE}.")
        catalog = cls(path, writable=writable)
        try:
            catalog._check()
        except BaseException:
            catalog.close()
            raise
        return catalog

    @contextlib.contextmanager
    def reading(self) -> Iterator[CatalogView]:
        """A view of one state, for the length of the block.

        Raises: GalleryCorruptError; GalleryError if the file cannot be read.
        """
        connection, idle = self._take()
        view = CatalogView(connection)
        try:
            self._begin(view)
            yield view
        except SQLITE_ERRORS as error:
            raise read_error(self.path, error) from error
        finally:
            del view.connection  # a view that outlives its block must fail
            self._end(connection, idle)

    def state(self) -> State:
        """Where the catalogue stands: half the time of a view, for those who read nothing else.

        Raises: as `reading`.
        """
        return self._one(CatalogView.state)

    def rows(self, ids: Sequence[ItemId], seq: int) -> dict[ItemId, Row] | None:
        """As that of a view, without one. Raises: as `reading`."""
        return self._one(CatalogView.rows, ids, seq)

    def _one(
        self, read: Callable[Concatenate[CatalogView, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What one statement reads, which needs no transaction."""
        connection, idle = self._take()
        try:
            return read(CatalogView(connection), *args, **kwargs)
        except SQLITE_ERRORS as error:
            raise read_error(self.path, error) from error
        finally:
            self._give_back(connection, idle)

    @contextlib.contextmanager
    def writing(self) -> Iterator[CatalogWriter]:
        """Changes that come true together, on disk, when the block ends, or not at all if it
        raises. Writers take turns, and wait 30 s at most.

        Raises: GalleryWriteError if they could not be written, GalleryCorruptError.
        """
        connection, idle = self._take()
        try:
            connection.execute("BEGIN IMMEDIATE")
            writer = CatalogWriter(connection)
            self._open_vectors(writer)  # no compaction removes them while this writes
            yield writer
            if writer.has_written and writer.file is not None:
                writer.file.sync()
            connection.execute("COMMIT")
            self._shorten_log(connection)
        except SQLITE_ERRORS as error:
            raise write_error(self.path, error) from error
        except OSError as error:
            raise GalleryWriteError(
                f"Nothing was written to {self.path.parent / VECTORS}: {error.strerror or error}. "
                "Free space on the disk, check its limits and health, and try again."
            ) from error
        finally:
            self._end(connection, idle)

    def _begin(self, view: CatalogView) -> None:
        """Begin the transaction of a view; it may meet vectors that a compaction removes."""
        for _ in range(_PATIENCE):
            view.connection.execute("BEGIN")
            try:
                return self._open_vectors(view)
            except FileNotFoundError:
                view.connection.execute("ROLLBACK")
        raise GalleryCorruptError(
            f"{self.path.parent / VECTORS} lacks the vectors of {self.path.name}. {RESTORE}."
        )

    def _open_vectors(self, view: CatalogView) -> None:
        """Give a view its file of vectors. Raises: FileNotFoundError, GalleryCorruptError."""
        name = view.file_name
        if name is None:
            return
        view.file = VectorFile.open(self.path.parent / VECTORS / name, view.dim)
        if not (self._writable or self._closed):
            self._file = view.file  # kept open; a writer may be idle while it is replaced

    def shrink(self) -> None:
        """Give back unused pages, in which what was removed can still be read, and from an earlier
        version all vectors; of a large file only if there are many, since writes wait meanwhile.

        Raises: GalleryError.
        """
        connection, idle = self._take()
        try:
            [(free,)] = connection.execute("PRAGMA freelist_count").fetchall()
            [(pages,)] = connection.execute("PRAGMA page_count").fetchall()
            [(page_size,)] = connection.execute("PRAGMA page_size").fetchall()
            is_large = pages * page_size > _LARGE_BYTES
            if not is_large or free > _MOST_FREE * pages:
                connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except SQLITE_ERRORS as error:
            raise write_error(self.path, error) from error
        finally:
            self._end(connection, idle)

    def close(self) -> None:
        """Close the idle connections; blocks that still run close theirs at their end."""
        self._closed = True
        self._file = None
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> tuple[sqlite3.Connection, _Idle]:
        """A connection that nobody else uses, and where it belongs.

        Raises: GalleryError, GalleryCorruptError.
        """
        if self._closed:
            raise GalleryError(f"{self.path} is closed. Open the gallery again.")
        if self._unchanged is not None and self._unchanged != _stamp(self.path):
            self._read_without_locks()
        idle = self._idle
        try:
            return idle.pop(), idle
        except IndexError:
            return self._connected(), idle

    def _end(self, connection: sqlite3.Connection, idle: _Idle) -> None:
        """Leave what was begun and not committed, and give the connection back."""
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            connection.close()
            return
        self._give_back(connection, idle)

    def _give_back(self, connection: sqlite3.Connection, idle: _Idle) -> None:
        if idle is not self._idle:  # it reads a file that has changed since
            connection.close()
            return
        idle.append(connection)
        if self._closed:
            self.close()

    def _connected(self) -> sqlite3.Connection:
        mode = "rw" if self._writable else "ro"
        is_immutable = self._unchanged is not None and not _log_bytes(self.path)
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
        """Where some search is always under way, SQLite alone never comes to the log's end."""
        size = _log_bytes(self.path)
        if size <= self._log_limit:
            return
        is_busy = 1
        # What was committed stays in the log if this fails.
        with contextlib.suppress(sqlite3.Error):
            connection.execute(f"PRAGMA busy_timeout = {_CHECKPOINT_S * 1000:.0f}")
            [(is_busy, _, _)] = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000:.0f}")
        # One long search is not to keep every write waiting.
        self._log_limit = _KEEP_LOG_BYTES + (size if is_busy else 0)

    def _check(self) -> None:
        try:
            with self.reading() as view:
                check_schema(self.path, view.connection)
                view.state()
        except GalleryError as error:
            if self._writable or self._unchanged or not _is_unwritable(self.path, error):
                raise
            self._read_without_locks()
            self._check()

    def _read_without_locks(self) -> None:
        self._unchanged = _stamp(self.path)
        before, self._idle = self._idle, deque()
        while before:
            before.pop().close()


@contextlib.contextmanager
def catalog_view(path: Path) -> Iterator[CatalogView]:
    """One state of the catalogue at `path`, opened for this look alone.

    Raises: as `Catalog.open` and `Catalog.reading`.
    """
    with contextlib.closing(Catalog.open(path)) as catalog, catalog.reading() as view:
        yield view


_Stamp = tuple[int, ...]


def _stamp(path: Path) -> _Stamp:
    """What a change of the catalogue changes."""
    found: list[int] = []
    for file in (path, _log(path)):
        with contextlib.suppress(OSError):
            status = file.stat()
            found += [status.st_mtime_ns, status.st_ino, status.st_size]
    return tuple(found)


def _log(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _log_bytes(path: Path) -> int:
    """The length of the write-ahead log, where changes stand at first."""
    try:
        return _log(path).stat().st_size
    except OSError:
        return 0


def _is_unwritable(path: Path, error: GalleryError) -> bool:
    """Whether SQLite could not make its log beside the file, and no log is needed to read it."""
    cause = error.__cause__
    return (
        isinstance(cause, sqlite3.Error)
        and error_code(cause) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
        and not _log_bytes(path)
    )
