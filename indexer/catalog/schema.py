"""The SQLite schema of a catalogue, its checksums and its errors.

Each row has a checksum. SQLite only detects damage to the structure of its pages, so a flipped bit
could otherwise become a wrong vector or attribute.
"""

import sqlite3
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kinlens.embedder.errors import GalleryCorruptError, GalleryError, GalleryWriteError
from kinlens.embedder.types import ItemId
from kinlens.indexer.types import RESTORE

SCHEMA_VERSION = 7
EARLIER = (2, 5, 6)
"""Versions of releases, which `indexer.catalog.earlier` reads and converts."""

# secure_delete: overwrite removed data where that needs no additional write.
NEW_FILE = """
PRAGMA page_size = 4096;
PRAGMA secure_delete = FAST;
"""
VERSION = f"PRAGMA user_version = {SCHEMA_VERSION};"

# items.added_seq     the write that added the item
# items.changed_seq   the last write that changed it; never below added_seq
# items.attributes    JSON; the type of an attribute name never changes
# items.removed_seq   the write that removed or replaced it; NULL if it is there
# items.removed_at    the Unix time of its removal, while `restore` can bring it back. NULL for
#                     replaced and restored items: another item has their key
# crc                 checksum of the row
# state.names         checksum of all rows of `names`
# state.numbers       sum of the ids of all items that are there
# state.vectors       name of the file of vectors; the table `vectors` has their checksums
# names.total         unused
#
# After a compaction, `Catalog.erase` deletes the rows of removed items. Searches know them until
# then: they are in the index.
TABLES = """
CREATE TABLE state (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    dim INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    size INTEGER NOT NULL,
    segment TEXT,
    segment_seq INTEGER NOT NULL,
    numbers INTEGER NOT NULL,
    names INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    vectors TEXT
) STRICT;
CREATE TABLE items (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL,
    path TEXT NOT NULL,
    sha256 BLOB NOT NULL,
    format TEXT NOT NULL,
    attributes TEXT NOT NULL,
    added_seq INTEGER NOT NULL,
    changed_seq INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    removed_seq INTEGER,
    removed_at INTEGER
) STRICT;
CREATE TABLE vectors (
    id INTEGER PRIMARY KEY,
    crc INTEGER NOT NULL,
    vector BLOB
) STRICT;
CREATE TABLE names (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    total INTEGER NOT NULL
) STRICT;
"""
# Each index contains every column that its queries read, or SQLite would read the rows as well.
INDEXES = (
    "CREATE UNIQUE INDEX items_by_key ON items (key) WHERE removed_seq IS NULL",
    "CREATE INDEX items_by_content ON items (sha256, removed_seq) WHERE removed_seq IS NULL",
    "CREATE INDEX items_by_change ON items (changed_seq, added_seq, removed_seq)"
    " WHERE removed_seq IS NULL",
    "CREATE INDEX living_by_id ON items (id, removed_seq) WHERE removed_seq IS NULL",
    "CREATE INDEX removed_by_seq ON items (removed_seq) WHERE removed_seq IS NOT NULL",
    "CREATE INDEX removed_by_time ON items (removed_at) WHERE removed_at IS NOT NULL",
    "CREATE INDEX removed_by_key ON items (key) WHERE removed_at IS NOT NULL",
    "CREATE INDEX removed_by_content ON items (sha256) WHERE removed_at IS NOT NULL",
    """CREATE VIEW living AS
    SELECT id, key, path, sha256, format, attributes, added_seq, changed_seq, crc
    FROM items WHERE removed_seq IS NULL""",
    """CREATE VIEW removed AS
    SELECT id, key, path, sha256, format, attributes, crc, removed_seq AS seq, removed_at AS at
    FROM items WHERE removed_seq IS NOT NULL""",
)
NAMES = "SELECT id, name, kind, total FROM names ORDER BY id"
FIRST_STATE = "INSERT INTO state VALUES (1, ?, 0, 0, NULL, 0, 0, 0, 0, ?)"
_STATE = "SELECT * FROM state WHERE only = 1"  # the last column came with version 6

BUSY_S = 30.0
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_WRITE_CURES = {
    sqlite3.SQLITE_FULL: "The disk is full: free some space and try again",
    sqlite3.SQLITE_IOERR: "Free space on the disk, check its limits and health, and try again",
    sqlite3.SQLITE_READONLY: "Give this user the right to write in its folder",
    sqlite3.SQLITE_CANTOPEN: "Give this user the right to write in its folder",
    sqlite3.SQLITE_BUSY: f"Another process has been writing for {BUSY_S:g} s: try again later",
}


Base = tuple[str | None, int, str | None]
"""The name of a segment, the `seq` of the state that it was built from, and the file of vectors."""


class State(NamedTuple):
    """The state of a catalogue: the row of `state`.

    seq: number of writes so far.
    size: number of items.
    segment, segment_seq: the segment, and the write whose items it contains.
    dim: length of a vector.
    vectors: the name of the file of vectors; None if the catalogue of an earlier version has them.
    """

    seq: int
    size: int
    segment: str | None
    segment_seq: int
    dim: int
    numbers: int
    names: int
    vectors: str | None
    crc: int

    @property
    def checksum(self) -> int:
        """The expected value of `crc`."""
        return row_checksum(self[:7] if self.vectors is None else self[:8])

    @property
    def base(self) -> Base:
        """The segment and its `seq`; the catalogue does not list earlier removals."""
        return self.segment, self.segment_seq, self.vectors

    def is_before(self, other: "State") -> bool:
        """Whether `other` follows this state by a write or a compaction."""
        return self.seq < other.seq or self.segment_seq < other.segment_seq


def read_state(connection: sqlite3.Connection) -> State | None:
    """The row of `state`; None if there is none. Raises: sqlite3.Error."""
    row: tuple[Any, ...] | None = connection.execute(_STATE).fetchone()
    if row is None:
        return None
    _, dim, seq, size, segment, segment_seq, numbers, names, crc, *rest = row
    vectors = rest[0] if rest else None
    return State(seq, size, segment, segment_seq, dim, numbers, names, vectors, crc)


SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""The errors of SQLite; UnicodeDecodeError if its message quotes damaged text."""


def seal(connection: sqlite3.Connection) -> None:
    """Update the checksums of `names` and `state`. Raises: sqlite3.Error."""
    names = row_checksum(connection.execute(NAMES).fetchall())
    row = read_state(connection)
    if row is not None:
        crc = row._replace(names=names).checksum
        connection.execute("UPDATE state SET names = ?, crc = ?", (names, crc))


def schema_version(connection: sqlite3.Connection) -> int:
    """The schema version of a file. Raises: sqlite3.Error."""
    [(version,)] = connection.execute("PRAGMA user_version").fetchall()
    return int(version)


def check_schema(path: Path, connection: sqlite3.Connection) -> None:
    """Check the schema version. Raises: GalleryCorruptError naming both versions; sqlite3.Error."""
    version = schema_version(connection)
    if version in (SCHEMA_VERSION, *EARLIER):
        return
    if version > SCHEMA_VERSION:
        cure = "Install a newer version of Kinlens."
    elif version > 0:
        cure = "Rebuild the gallery from its images: kinlens-index build."
    else:
        cure = f"It is not a catalogue. {RESTORE}"
    raise GalleryCorruptError(
        f"{path} has schema {version}, this version reads {SCHEMA_VERSION}. {cure}"
    )


def row_checksum(row: Sequence[Any]) -> int:
    """The checksum of a short row, or of several."""
    return zlib.crc32(repr(row).encode("utf-8", "surrogatepass"))


def item_checksum(
    item_id: ItemId, key: str, path: str, sha256: bytes, format_: str, attributes: str
) -> int:
    """The checksum of a row of `items`; `attributes` is JSON."""
    [checksum] = item_checksums([(item_id, key, path, sha256, format_, attributes)])
    return checksum


def item_checksums(rows: Sequence[Sequence[Any]]) -> list[int]:
    """The checksum of each row that begins with the arguments of `item_checksum`.

    Raises: TypeError if a damaged sha256 is not bytes.
    """
    return [
        zlib.crc32(
            f"{item_id}\0{key}\0{path}\0{format_}\0{attributes}".encode(), zlib.crc32(sha256)
        )
        for item_id, key, path, sha256, format_, attributes, *_ in rows
    ]


def vector_checksum(item_id: ItemId, vector: bytes) -> int:
    """The checksum of a row of `vectors`. It includes the id, so that rows cannot be swapped."""
    return zlib.crc32(vector, item_id)


def error_code(error: Exception) -> int:
    """The primary result code of SQLite; 0 if the error does not come from SQLite."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def damaged(connection: sqlite3.Connection, reason: str) -> GalleryCorruptError:
    """The error for inconsistent or damaged rows."""
    path = connection.execute("PRAGMA database_list").fetchall()[0][2]
    return GalleryCorruptError(f"{path} is damaged: {reason}. {RESTORE}")


def read_error(path: Path, error: Exception) -> GalleryError:
    """Translate an error of SQLite while reading the catalogue `path`."""
    if _is_damage(error):
        return GalleryCorruptError(f"{path} is damaged: {error}. {RESTORE}")
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_IOERR_SHMSIZE:
        return GalleryError(
            f"{path} cannot be opened: there is no space for its log. Free space on the disk and "
            "try again."
        )
    return GalleryError(
        f"{path} cannot be read: {error}. Check its permissions, the disk and the limit of open "
        "files (`ulimit -n`)."
    )


def write_error(path: Path, error: Exception) -> GalleryError:
    """Translate an error of SQLite while writing the catalogue `path`."""
    code = error_code(error)
    if _is_damage(error):
        return GalleryCorruptError(f"{path} is damaged: {error}. {RESTORE}")
    cure = _WRITE_CURES.get(code, "Check the disk and try again")
    return GalleryWriteError(f"Nothing was written to {path}: {error}. {cure}.")


def _is_damage(error: Exception) -> bool:
    # Invalid UTF-8 has no result code: Python's decoder raises it.
    is_text = isinstance(error, UnicodeDecodeError)
    is_text |= isinstance(error, sqlite3.OperationalError) and not error_code(error)
    return is_text or error_code(error) in _DAMAGED
