"""The tables of a catalogue, and what makes a SQLite file one."""

import sqlite3
from pathlib import Path

from embedder.errors import GalleryCorruptError
from indexer.catalog.checksums import row_checksum

SCHEMA_VERSION = 2
RESTORE = "Restore a backup: kinlens-index restore"

# secure_delete: what is removed is overwritten, where that costs no further write.
NEW_FILE = f"""
PRAGMA page_size = 16384;
PRAGMA secure_delete = FAST;
PRAGMA user_version = {SCHEMA_VERSION};
"""

# items.added_seq: the write that added the item; changed_seq: the last one that changed it, so it
# is never lower. items.attributes repeats the table `attributes` as JSON, to read an item in one
# step. An attribute name has one kind for ever; booleans are stored as one byte.
# Checksums (see catalog_checksums): crc, of its row; state.names, of all rows of `names`;
# state.numbers, the sum of the numbers of all items; names.total, over its part of `attributes`.
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
    crc INTEGER NOT NULL
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
    crc INTEGER NOT NULL
) STRICT;
CREATE TABLE vectors (
    id INTEGER PRIMARY KEY,
    crc INTEGER NOT NULL,
    vector BLOB NOT NULL
) STRICT;
CREATE TABLE names (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    total INTEGER NOT NULL
) STRICT;
CREATE TABLE attributes (
    name INTEGER NOT NULL,
    value ANY NOT NULL,
    item INTEGER NOT NULL,
    PRIMARY KEY (name, value, item)
) STRICT, WITHOUT ROWID;
CREATE TABLE tombstones (
    seq INTEGER NOT NULL,
    id INTEGER NOT NULL,
    PRIMARY KEY (seq, id)
) STRICT, WITHOUT ROWID;
"""
INDEXES = """
CREATE UNIQUE INDEX items_by_key ON items (key);
CREATE INDEX items_by_content ON items (sha256);
CREATE INDEX items_by_change ON items (changed_seq, added_seq);
"""
NAMES = "SELECT id, name, kind, total FROM names ORDER BY id"
STATE = "SELECT seq, size, segment, segment_seq, dim, numbers, names, crc FROM state WHERE only = 1"
FIRST_STATE = "INSERT INTO state VALUES (1, ?, ?, ?, NULL, 0, ?, 0, 0)"


def seal(connection: sqlite3.Connection) -> None:
    """Bring the checksums of `names` and `state` up to date. Raises: sqlite3.Error."""
    names = row_checksum(connection.execute(NAMES).fetchall())
    [row] = connection.execute(STATE).fetchall()
    crc = row_checksum((*row[:-2], names))
    connection.execute("UPDATE state SET names = ?, crc = ?", (names, crc))


def check_schema(path: Path, connection: sqlite3.Connection) -> None:
    """Raises: GalleryCorruptError for a file of another schema, by both numbers; sqlite3.Error."""
    [(version,)] = connection.execute("PRAGMA user_version").fetchall()
    if version == SCHEMA_VERSION:
        return
    if version == 1:
        cure = "Bring it over: kinlens-index import OLD --out NEW."
    elif version > SCHEMA_VERSION:
        cure = "Install a newer version of Kinlens."
    else:
        cure = f"It is not a catalogue. {RESTORE}."
    raise GalleryCorruptError(
        f"{path} has schema {version}, this version reads {SCHEMA_VERSION}. {cure}"
    )
