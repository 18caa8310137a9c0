"""What SQLite says, as errors of the gallery: cause and cure."""

import sqlite3
from pathlib import Path

from embedder.errors import (
    GalleryCorruptError,
    GalleryError,
    GalleryWriteError,
)
from indexer.catalog.schema import RESTORE

BUSY_S = 30.0
_DAMAGED = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_TOOBIG,
}
_WRITE_CURES = {
    sqlite3.SQLITE_FULL: "The disk is full: free some space and try again",
    sqlite3.SQLITE_IOERR: "Free space on the disk, check its limits and health, and try again",
    sqlite3.SQLITE_READONLY: "Give this user the right to write in its folder",
    sqlite3.SQLITE_CANTOPEN: "Give this user the right to write in its folder",
    sqlite3.SQLITE_BUSY: f"Another process has been writing for {BUSY_S:g} s: try again later",
}


def error_code(error: sqlite3.Error) -> int:
    """The primary result code of SQLite; 0 where the error is not from SQLite itself."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def damaged(connection: sqlite3.Connection, what: str) -> GalleryCorruptError:
    """The error to raise for rows that do not fit together."""
    path = connection.execute("PRAGMA database_list").fetchall()[0][2]
    return GalleryCorruptError(f"{path} is damaged: {what}. {RESTORE}.")


def read_error(path: Path, error: sqlite3.Error) -> GalleryError:
    """The error to raise for one met while reading the catalogue `path`."""
    if _is_damage(error):
        return GalleryCorruptError(f"{path} is damaged: {error}. {RESTORE}.")
    return GalleryError(
        f"{path} cannot be read: {error}. Check its permissions, the disk and the limit of open "
        "files (`ulimit -n`)."
    )


def write_error(path: Path, error: sqlite3.Error) -> GalleryError:
    """The error to raise for one met while writing the catalogue `path`."""
    code = error_code(error)
    if _is_damage(error):
        return GalleryCorruptError(f"{path} is damaged: {error}. {RESTORE}.")
    cure = _WRITE_CURES.get(code, "Check the disk and try again")
    return GalleryWriteError(f"Nothing was written to {path}: {error}. {cure}.")


def _is_damage(error: sqlite3.Error) -> bool:
    # Text that is no UTF-8 has no code: Python itself says so.
    is_text = isinstance(error, sqlite3.OperationalError) and not error_code(error)
    return is_text or error_code(error) in _DAMAGED
