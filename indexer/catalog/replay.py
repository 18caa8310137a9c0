"""Changes of a catalogue on their way to a copy of it: parts of SQLite, written here and applied.

A part holds whole rows, so it may be applied more than once, and to a copy that knows some of them.
"""

import contextlib
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kinlens.embedder.errors import GalleryCorruptError
from kinlens.embedder.types import ItemId
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.schema import NAMES, RESTORE, seal
from kinlens.indexer.catalog.vectors import VectorFile
from kinlens.indexer.catalog.write import CatalogWriter
from kinlens.indexer.types import Ids, Progress

NameRows = tuple[tuple[int, str, str, int], ...]
"""The rows of `names`."""

_AT_ONCE = 4096
_PART = """
PRAGMA user_version = 1;
CREATE TABLE items (
    id INTEGER PRIMARY KEY, key TEXT, path TEXT, sha256 BLOB, format TEXT, attributes TEXT,
    added_seq INTEGER, changed_seq INTEGER, crc INTEGER, vector_crc INTEGER, vector BLOB
) STRICT;
CREATE TABLE tombstones (seq INTEGER, id INTEGER) STRICT;
"""
_SOME = "id IN (SELECT value FROM json_each(?))"
_ROWS = """
SELECT items.id, key, path, sha256, format, attributes, added_seq, changed_seq, items.crc,
    vectors.crc
FROM items JOIN vectors ON vectors.id = items.id
WHERE items.id IN (SELECT value FROM json_each(?)) ORDER BY items.id
"""
_TOMBSTONES = "SELECT seq, id FROM tombstones WHERE seq > ? ORDER BY seq, id"
_INTO_PART = "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_ITEM = "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_VECTOR = "INSERT INTO vectors VALUES (?, ?, NULL)"
_KNOWN = f"SELECT count(*), coalesce(sum(id), 0) FROM items WHERE {_SOME}"  # noqa: S608
_GROW = "UPDATE state SET size = size + ?, numbers = numbers + ?"


def write_part(
    path: Path, view: CatalogView, ids: Ids, since: int, with_tombstones: bool, on_item: Progress
) -> None:
    """Write items (N,) into the new file `path`: those added after the write `since` with their
    vectors, as they are stored; and, if asked for, the tombstones after that write.

    Raises: GalleryCorruptError, sqlite3.Error.
    """
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as part:
        part.executescript(_PART)
        part.execute("PRAGMA synchronous = OFF")  # a hash is made of it afterwards
        part.execute("BEGIN")
        if with_tombstones:
            gone = view.connection.execute(_TOMBSTONES, (since,))
            part.executemany("INSERT INTO tombstones VALUES (?, ?)", gone)
        for start in range(0, len(ids), _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            part.executemany(_INTO_PART, _rows(view, some, since))
            on_item(len(some))
        part.execute("COMMIT")


def name_rows(view: CatalogView) -> NameRows:
    """The rows of `names`."""
    return tuple(view.connection.execute(NAMES).fetchall())


def live_bits(view: CatalogView) -> bytes:
    """A bit for each item id up to the highest one, compressed."""
    ids = view.live_ids()
    bits = np.zeros(int(ids.max(initial=-1)) + 1, np.bool_)
    bits[ids] = True
    return zlib.compress(np.packbits(bits, bitorder="little").tobytes())


def remove_dead(writer: CatalogWriter, bits: bytes, seq: int) -> None:
    """Remove the items that `live_bits` does not have, as of the write `seq`."""
    live = np.unpackbits(np.frombuffer(zlib.decompress(bits), np.uint8), bitorder="little")
    ids = writer.live_ids()
    is_live = np.zeros(len(ids), np.bool_)
    known = ids < len(live)
    is_live[known] = live[ids[known]].astype(np.bool_)
    _bury(writer, [(seq, number) for number in ids[~is_live].tolist()])


def remove_buried(writer: CatalogWriter, path: Path) -> None:
    """Remove the items whose tombstones are in the part `path`."""
    with _opened(path) as part:
        _bury(writer, part.execute("SELECT seq, id FROM tombstones").fetchall())


def apply_part(writer: CatalogWriter, path: Path) -> None:
    """Write the items of the part `path`, in place of what is known of them.

    Raises: OSError, sqlite3.Error.
    """
    with _opened(path) as part:
        cursor = part.execute("SELECT * FROM items ORDER BY id")
        while rows := cursor.fetchmany(_AT_ONCE):
            _put(writer, rows)
    seal(writer.connection)


def finish(
    writer: CatalogWriter, seq: int, size: int, numbers: int, last_given: ItemId, names: NameRows
) -> None:
    """End with the state of the original: its write `seq`, and what it counts.

    Raises: GalleryCorruptError if other items are here.
    """
    connection = writer.connection
    found = connection.execute("SELECT size, numbers FROM state").fetchone()
    if found != (size, numbers):
        raise GalleryCorruptError(
            f"The copy would have {found[0]:,} items, and the original has {size:,}. Stop what "
            "serves the copy, delete its folder and start again."
        )
    connection.execute("DELETE FROM names")
    connection.executemany("INSERT INTO names VALUES (?, ?, ?, ?)", names)
    connection.execute("DELETE FROM sqlite_sequence WHERE name = 'items'")
    connection.execute("INSERT INTO sqlite_sequence VALUES ('items', ?)", (last_given,))
    connection.execute("UPDATE state SET seq = ?", (seq,))
    if writer.file is not None:
        writer.file.lengthen(last_given)
    writer.has_written = True
    seal(connection)


def _rows(view: CatalogView, ids: Ids, since: int) -> Iterator[tuple[Any, ...]]:
    rows = view.connection.execute(_ROWS, (str(ids.tolist()),)).fetchall()
    if len(rows) != len(ids) or view.file is None:
        raise GalleryCorruptError(
            f"The catalogue lists items that have no row or no vector. {RESTORE}."
        )
    added = np.array([row[6] > since for row in rows], np.bool_)
    places = view.file.rows_of(ids[added])
    vectors = iter(view.file.rows(int(places.max(initial=-1)) + 1)[places])
    for row, is_added in zip(rows, added, strict=True):
        yield (*row, next(vectors).tobytes() if is_added else None)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as part:
        yield part


def _bury(writer: CatalogWriter, tombstones: Sequence[tuple[int, ItemId]]) -> None:
    for start in range(0, len(tombstones), _AT_ONCE):
        some = tombstones[start : start + _AT_ONCE]
        _remove(writer, [number for _, number in some])
        writer.connection.executemany("INSERT OR IGNORE INTO tombstones VALUES (?, ?)", some)
    seal(writer.connection)


def _put(writer: CatalogWriter, rows: Sequence[tuple[Any, ...]]) -> None:
    connection, file = writer.connection, writer.file
    assert isinstance(file, VectorFile)
    _remove(writer, [row[0] for row in rows])
    connection.executemany(_ITEM, [row[:9] for row in rows])
    connection.executemany(_VECTOR, [(row[0], row[9]) for row in rows])
    connection.execute(_GROW, (len(rows), sum(row[0] for row in rows)))
    added = [row for row in rows if row[10] is not None]
    if added:
        data = b"".join(row[10] for row in added)
        vectors = np.frombuffer(data, file.dtype).reshape(len(added), file.dim)
        ids = np.array([row[0] for row in added], np.int64)
        # The file may be younger than this part, and lack items that a later part removes.
        has_row = file.numbers.rows_of(ids) >= 0
        file.write(ids[has_row], vectors[has_row])


def _remove(writer: CatalogWriter, ids: Sequence[ItemId]) -> None:
    connection, listed = writer.connection, str(list(ids))
    count, total = connection.execute(_KNOWN, (listed,)).fetchone()
    if count:
        connection.execute(f"DELETE FROM items WHERE {_SOME}", (listed,))  # noqa: S608
        connection.execute(f"DELETE FROM vectors WHERE {_SOME}", (listed,))  # noqa: S608
        connection.execute(_GROW, (-count, -total))
