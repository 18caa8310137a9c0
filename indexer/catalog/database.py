"""The catalogue of a gallery: its items, their attributes and vectors. One SQLite file with a
write-ahead log: readers see one state each and are never kept waiting, writers take turns.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from embedder.errors import GalleryCorruptError, GalleryError, GalleryWriteError
from indexer.catalog.connections import KEEP_LOG_BYTES, Connections, Stamp, log_bytes
from indexer.catalog.errors import BUSY_S, StaleReadError, error_code, read_error, write_error
from indexer.catalog.read import CatalogView, State
from indexer.catalog.schema import (
    FIRST_STATE,
    INDEXES,
    NEW_FILE,
    RESTORE,
    TABLES,
    check_schema,
    seal,
)
from indexer.catalog.write import CatalogWriter

__all__ = ["Catalog", "CatalogView", "CatalogWriter", "StaleReadError", "State"]

_CHECKPOINT_S = 1.0  # how long a write that finds the log long waits for searches to end


class Catalog:
    """An open catalogue; thread safe, and any number of processes may have it open."""

    def __init__(self, path: Path, connections: Connections) -> None:
        self.path = path
        self._connections = connections
        self._checked: set[int] = set()
        self._log_limit = KEEP_LOG_BYTES

    @classmethod
    def create(cls, path: Path, dim: int) -> None:
        """Make the new, empty file for vectors of length `dim`. Raises: GalleryWriteError."""
        if path.exists():
            raise GalleryWriteError(f"{path} is there already. Choose another folder.")
        try:
            connection = sqlite3.connect(path, isolation_level=None)
            with contextlib.closing(connection):
                connection.executescript(NEW_FILE)
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("BEGIN IMMEDIATE")
                for statement in (TABLES + INDEXES).split(";"):
                    connection.execute(statement)
                connection.execute(FIRST_STATE, (dim, 0, 0, 0))
                seal(connection)
                connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise write_error(path, error) from error

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> "Catalog":
        """Open the file and check that it is a catalogue; `CatalogView.check` looks at all of it.

        Raises: GalleryCorruptError; GalleryError if it cannot be read.
        """
        if not path.is_file():
            raise GalleryCorruptError(f"{path} is missing. {RESTORE}.")
        connections = Connections(path, writable=writable)
        catalog = cls(path, connections)
        try:
            catalog._check(may_be_unwritable=not writable)
        except BaseException:
            connections.close()
            raise
        return catalog

    def reading(self) -> AbstractContextManager[CatalogView]:
        """A view of one state, for the length of the block.

        Raises: GalleryCorruptError; GalleryError if the file cannot be read; at the end of the
            block, StaleReadError if it was changed while this user could not lock it.
        """
        return _Reading(self.path, self._connections, self._checked)

    def state(self) -> State:
        """Where the catalogue stands: half the time of a view, for those who read nothing else.

        Raises: as `reading`.
        """
        idle, stamp = self._connections.idle(), self._connections.stamp
        connection = idle.take()
        try:
            state = CatalogView(connection, self._checked).state()
        except (sqlite3.Error, GalleryError) as error:
            raise _explained(self.path, self._connections, stamp, error) from error
        finally:
            idle.give_back(connection)
        if self._connections.is_stale(stamp):
            raise StaleReadError(self.path)
        return state

    @contextlib.contextmanager
    def writing(self) -> Iterator[CatalogWriter]:
        """Changes that come true together, on disk, when the block ends, or not at all if it
        raises. Writers take turns, and wait 30 s at most.

        Raises: GalleryWriteError if they could not be written, GalleryCorruptError.
        """
        idle = self._connections.idle()
        connection = idle.take()
        try:
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield CatalogWriter(connection, self._checked)
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            self._shorten_log(connection)
        except sqlite3.Error as error:
            raise write_error(self.path, error) from error
        finally:
            idle.give_back(connection)

    def close(self) -> None:
        """Close the connections of all threads; blocks that still run close theirs at their end."""
        self._connections.close()

    def _shorten_log(self, connection: sqlite3.Connection) -> None:
        """Where some search is always under way, SQLite alone never comes to the log's end."""
        size = log_bytes(self.path)
        if size <= self._log_limit:
            return
        is_busy = 1
        # What was committed stays in the log if this fails.
        with contextlib.suppress(sqlite3.Error):
            connection.execute(f"PRAGMA busy_timeout = {_CHECKPOINT_S * 1000:.0f}")
            [(is_busy, _, _)] = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000:.0f}")
        # One long search is not to keep every write waiting.
        self._log_limit = KEEP_LOG_BYTES + (size if is_busy else 0)

    def _check(self, *, may_be_unwritable: bool) -> None:
        try:
            with self.reading() as view:
                check_schema(self.path, view._connection)
                view.state()
        except GalleryError as error:
            if not may_be_unwritable or not _is_unwritable(self.path, error):
                raise
            self._connections.expect_unwritable()
            self._check(may_be_unwritable=False)


class _Reading:
    """Entered at every search, so a class: a generator costs twice as much."""

    __slots__ = ("_checked", "_connection", "_connections", "_idle", "_path", "_stamp", "_view")

    def __init__(self, path: Path, connections: Connections, checked: set[int]) -> None:
        self._path = path
        self._connections = connections
        self._checked = checked

    def __enter__(self) -> CatalogView:
        self._idle = self._connections.idle()
        self._stamp = self._connections.stamp
        self._connection = self._idle.take()
        try:
            self._connection.execute("BEGIN")
        except sqlite3.Error as error:
            self._idle.give_back(self._connection)
            raise read_error(self._path, error) from error
        self._view = CatalogView(self._connection, self._checked)
        return self._view

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("COMMIT")
        except sqlite3.Error as second:
            raise read_error(self._path, second) from second
        finally:
            # A view that outlives its block must fail, not read another state.
            del self._view._connection
            self._idle.give_back(self._connection)
        if error is None:
            if self._connections.is_stale(self._stamp):
                raise StaleReadError(self._path)
        elif isinstance(error, Exception):
            better = _explained(self._path, self._connections, self._stamp, error)
            if better is not error:
                raise better from error


def _explained(
    path: Path, connections: Connections, stamp: Stamp | None, error: Exception
) -> Exception:
    """The error to raise for one met while reading: itself, unless it is torn or SQLite's."""
    if connections.is_stale(stamp, error):
        return StaleReadError(path)
    return read_error(path, error) if isinstance(error, sqlite3.Error) else error


def _is_unwritable(path: Path, error: GalleryError) -> bool:
    """Whether SQLite could not make its log beside the file, and no log is needed to read it."""
    cause = error.__cause__
    return (
        isinstance(cause, sqlite3.Error)
        and error_code(cause) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
        and not log_bytes(path)
    )
