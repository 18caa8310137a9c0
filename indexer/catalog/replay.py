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
from numpy.typing import NDArray

from kinlens.embedder.errors import GalleryCorruptError
from kinlens.embedder.types import ItemId
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.schema import NAMES
from kinlens.indexer.catalog.vectors import VectorFile, find_sorted
from kinlens.indexer.catalog.write import CatalogWriter
from kinlens.indexer.types import RESTORE, Ids, Progress

NameRows = tuple[tuple[int, str, str, int], ...]
"""The rows of `names`."""

_BATCH = 4096
_PART = """
PRAGMA user_version = 1;
CREATE TABLE items (
    id INTEGER PRIMARY KEY, key TEXT, path TEXT, sha256 BLOB, format TEXT, attributes TEXT,
    added_seq INTEGER, changed_seq INTEGER, crc INTEGER, vector_crc INTEGER, vector BLOB
) STRICT;
"""
_SOME = "id IN (SELECT value FROM json_each(?))"
_ROWS = """
SELECT items.id, key, path, sha256, format, attributes, added_seq, changed_seq, items.crc,
    vectors.crc
FROM items JOIN vectors ON vectors.id = items.id
WHERE items.id IN (SELECT value FROM json_each(?)) ORDER BY items.id
"""
_INTO_PART = "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_REMOVED = "SELECT seq, id FROM removed WHERE seq > ? ORDER BY seq, id"
_MARK = "INSERT OR IGNORE INTO items VALUES (?2, '', '', x'', '', '{}', ?1, ?1, 0, ?1, NULL)"
_ITEM = "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL)"
_VECTOR = "INSERT INTO vectors VALUES (?, ?, NULL)"
_KNOWN = f"SELECT count(*), coalesce(sum(id), 0) FROM living WHERE {_SOME}"  # noqa: S608


def part_of(view: CatalogView, ids: Ids, since: int, on_item: Progress) -> bytes:
    """The file of a part with the items `ids` (N,).

    Items added after the write `since` are written with their stored vectors.

    Raises: GalleryCorruptError, sqlite3.Error.
    """
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as part:
        part.executescript(f"{_PART} BEGIN;")
        for start in range(0, len(ids), _BATCH):
            some = ids[start : start + _BATCH]
            part.executemany(_INTO_PART, _rows(view, some, since))
            on_item(len(some))
        part.execute("COMMIT")
        return part.serialize()


def packed_ids(ids: Ids) -> bytes:
    """Numbers in a short form if most are the successor of the one before."""
    return zlib.compress(np.diff(ids, prepend=0).astype("<i8").tobytes())


def unpacked_ids(data: bytes) -> Ids:
    """The numbers of `packed_ids`."""
    return np.cumsum(np.frombuffer(zlib.decompress(data), "<i8"), dtype=np.int64)


def name_rows(view: CatalogView) -> NameRows:
    """The rows of `names`."""
    return tuple(view.connection.execute(NAMES).fetchall())


def tombstones(view: CatalogView, since: int) -> Ids:
    """The writes after `since` that removed items, and the ids of these items (2, N).

    `since` must not be before `segment_seq`: compactions erase earlier tombstones.
    """
    rows = view.connection.execute(_REMOVED, (since,)).fetchall()
    return np.array(rows, np.int64).reshape(-1, 2).T


class Removed:
    """The items that a snapshot does not have any more.

    tombstones: the writes that removed items, and the ids of these items (2, N).
    live: all items of a segment and later ones, ascending, and the highest id that was assigned up
        to then; None if the tombstones have all that were removed since the last change of the
        copy.
    """

    def __init__(self, tombstones: Ids, live: Ids | None) -> None:
        self._tombstones = tombstones
        self._live = live

    def are(self, ids: Ids) -> NDArray[np.bool_]:
        """Whether each of these items (N,) was removed."""
        buried: NDArray[np.bool_] = np.isin(ids, self._tombstones[1])
        return buried | self._are_forgotten(ids)

    def remove(self, writer: CatalogWriter, segment_seq: int) -> None:
        """Remove them from a copy; those without a tombstone as of the write `segment_seq`."""
        forgotten = np.empty(0, np.int64)
        if self._live is not None:
            ids = writer.live_ids()
            forgotten = ids[self._are_forgotten(ids)]
        rows = [
            *self._tombstones.T.tolist(),
            *([segment_seq, item_id] for item_id in forgotten.tolist()),
        ]
        for start in range(0, len(rows), _BATCH):
            some = rows[start : start + _BATCH]
            _delete(writer, [item_id for _, item_id in some])
            writer.connection.executemany(_MARK, some)  # for searches in the index

    def _are_forgotten(self, ids: Ids) -> NDArray[np.bool_]:
        if self._live is None:
            return np.zeros(len(ids), np.bool_)
        forgotten: NDArray[np.bool_] = find_sorted(ids, self._live[:-1]) < 0
        forgotten &= ids <= self._live[-1]
        return forgotten


def apply_part(writer: CatalogWriter, path: Path, removed: Removed) -> None:
    """Write the items of the part `path` that are not `removed`, in place of existing rows.

    Raises: OSError, sqlite3.Error.
    """
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as part:
        cursor = part.execute("SELECT * FROM items ORDER BY id")
        while rows := cursor.fetchmany(_BATCH):
            skipped = removed.are(np.array([row[0] for row in rows], np.int64))
            _replace(writer, [row for row, skip in zip(rows, skipped, strict=True) if not skip])


def finish(
    writer: CatalogWriter, seq: int, size: int, numbers: int, last_given: ItemId, names: NameRows
) -> None:
    """Set the counters of the original: its write `seq`, `last_given` id and attribute names.

    Raises: GalleryCorruptError if the number or the sum of the item ids differs.
    """
    connection, found = writer.connection, writer.state()
    if (found.size, found.numbers) != (size, numbers):
        raise GalleryCorruptError(
            f"The copy would have {found.size:,} items, but the original has {size:,}. Stop the "
            "service of the copy, delete its folder and start again."
        )
    connection.execute("DELETE FROM names")
    connection.executemany("INSERT INTO names VALUES (?, ?, ?, ?)", names)
    connection.execute("DELETE FROM sqlite_sequence WHERE name = 'items'")
    connection.execute("INSERT INTO sqlite_sequence VALUES ('items', ?)", (last_given,))
    writer.file.lengthen(last_given)
    writer.has_written = True
    writer.seal(seq=seq, has_new_names=True)


def _rows(view: CatalogView, ids: Ids, since: int) -> Iterator[tuple[Any, ...]]:
    rows = view.connection.execute(_ROWS, (str(ids.tolist()),)).fetchall()
    if len(rows) != len(ids) or view.file is None:
        raise GalleryCorruptError(
            f"The catalogue lists items that have no row or no vector. {RESTORE}"
        )
    added = np.array([row[6] > since for row in rows], np.bool_)
    positions = view.file.rows_of(ids[added])
    vectors = iter(view.file.rows(int(positions.max(initial=-1)) + 1)[positions])
    for row, is_added in zip(rows, added, strict=True):
        yield (*row, next(vectors).tobytes() if is_added else None)


def _replace(writer: CatalogWriter, rows: Sequence[tuple[Any, ...]]) -> None:
    connection, file = writer.connection, writer.file
    assert isinstance(file, VectorFile)
    _delete(writer, [row[0] for row in rows])
    connection.executemany(_ITEM, [row[:9] for row in rows])
    connection.executemany(_VECTOR, [(row[0], row[9]) for row in rows])
    writer.grow(len(rows), sum(row[0] for row in rows))
    added = [row for row in rows if row[10] is not None]
    if added:
        data = b"".join(row[10] for row in added)
        vectors = np.frombuffer(data, file.dtype).reshape(len(added), file.dim)
        file.write(np.array([row[0] for row in added], np.int64), vectors)


def _delete(writer: CatalogWriter, ids: Sequence[ItemId]) -> None:
    """Delete these items, as far as they are there."""
    connection, listed = writer.connection, str(list(ids))
    count, total = connection.execute(_KNOWN, (listed,)).fetchone()
    connection.execute(f"DELETE FROM items WHERE removed_seq IS NULL AND {_SOME}", (listed,))  # noqa: S608
    connection.execute(f"DELETE FROM vectors WHERE {_SOME}", (listed,))  # noqa: S608
    writer.grow(-count, -total)
