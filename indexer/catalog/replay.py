"""Replication of a catalogue: writes changes into SQLite files ("parts"), applies them to a copy.

A part contains whole rows, so applying it is idempotent, also on a copy that has some of them.
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

_BATCH = 4096
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
    """Write the items `ids` (N,) into the new file `path`.

    Items added after the write `since` are written with their stored vectors. With
    `with_tombstones`, the tombstones after that write are included.

    Raises: GalleryCorruptError, sqlite3.Error.
    """
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as part:
        part.executescript(_PART)
        part.execute("PRAGMA synchronous = OFF")  # the file is hashed afterwards
        part.execute("BEGIN")
        if with_tombstones:
            tombstones = view.connection.execute(_TOMBSTONES, (since,))
            part.executemany("INSERT INTO tombstones VALUES (?, ?)", tombstones)
        for start in range(0, len(ids), _BATCH):
            some = ids[start : start + _BATCH]
            part.executemany(_INTO_PART, _rows(view, some, since))
            on_item(len(some))
        part.execute("COMMIT")


def name_rows(view: CatalogView) -> NameRows:
    """The rows of `names`."""
    return tuple(view.connection.execute(NAMES).fetchall())


def live_bits(view: CatalogView) -> bytes:
    """A compressed bitmap of the live item ids, up to the highest one."""
    ids = view.live_ids()
    bits = np.zeros(int(ids.max(initial=-1)) + 1, np.bool_)
    bits[ids] = True
    return zlib.compress(np.packbits(bits, bitorder="little").tobytes())


def remove_dead(writer: CatalogWriter, bits: bytes, seq: int) -> None:
    """Remove the items that are not in the bitmap of `live_bits`, as of the write `seq`."""
    live = np.unpackbits(np.frombuffer(zlib.decompress(bits), np.uint8), bitorder="little")
    ids = writer.live_ids()
    is_live = np.zeros(len(ids), np.bool_)
    known = ids < len(live)
    is_live[known] = live[ids[known]].astype(np.bool_)
    _add_tombstones(writer, [(seq, item_id) for item_id in ids[~is_live].tolist()])


def remove_buried(writer: CatalogWriter, path: Path) -> None:
    """Remove the items whose tombstones are in the part `path`."""
    with _opened(path) as part:
        _add_tombstones(writer, part.execute("SELECT seq, id FROM tombstones").fetchall())


def apply_part(writer: CatalogWriter, path: Path) -> None:
    """Write the items of the part `path`; existing rows of these items are replaced.

    Raises: OSError, sqlite3.Error.
    """
    with _opened(path) as part:
        cursor = part.execute("SELECT * FROM items ORDER BY id")
        while rows := cursor.fetchmany(_BATCH):
            _replace(writer, rows)
    seal(writer.connection)


def finish(
    writer: CatalogWriter, seq: int, size: int, numbers: int, last_given: ItemId, names: NameRows
) -> None:
    """Set the counters of the original: its write `seq`, `last_given` id and attribute names.

    Raises: GalleryCorruptError if the number or the sum of the item ids differs.
    """
    connection = writer.connection
    found = connection.execute("SELECT size, numbers FROM state").fetchone()
    if found != (size, numbers):
        raise GalleryCorruptError(
            f"The copy would have {found[0]:,} items, but the original has {size:,}. Stop the "
            "service of the copy, delete its folder and start again."
        )
    connection.execute("DELETE FROM names")
    connection.executemany("INSERT INTO names VALUES (?, ?, ?, ?)", names)
    connection.execute("DELETE FROM sqlite_sequence WHERE name = 'items'")
    connection.execute("INSERT INTO sqlite_sequence VALUES ('items', ?)", (last_given,))
    connection.execute("UPDATE state SET seq = ?", (seq,))
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
    positions = view.file.rows_of(ids[added])
    vectors = iter(view.file.rows(int(positions.max(initial=-1)) + 1)[positions])
    for row, is_added in zip(rows, added, strict=True):
        yield (*row, next(vectors).tobytes() if is_added else None)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as part:
        yield part


def _add_tombstones(writer: CatalogWriter, tombstones: Sequence[tuple[int, ItemId]]) -> None:
    for start in range(0, len(tombstones), _BATCH):
        some = tombstones[start : start + _BATCH]
        _remove(writer, [item_id for _, item_id in some])
        writer.connection.executemany("INSERT OR IGNORE INTO tombstones VALUES (?, ?)", some)
    seal(writer.connection)


def _replace(writer: CatalogWriter, rows: Sequence[tuple[Any, ...]]) -> None:
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
        # The file may be newer than this part and have no rows for items that a later part removes.
        has_row = file.row_ids.rows_of(ids) >= 0
        file.write(ids[has_row], vectors[has_row])


def _remove(writer: CatalogWriter, ids: Sequence[ItemId]) -> None:
    connection, listed = writer.connection, str(list(ids))
    count, total = connection.execute(_KNOWN, (listed,)).fetchone()
    if count:
        connection.execute(f"DELETE FROM items WHERE {_SOME}", (listed,))  # noqa: S608
        connection.execute(f"DELETE FROM vectors WHERE {_SOME}", (listed,))  # noqa: S608
        connection.execute(_GROW, (-count, -total))
