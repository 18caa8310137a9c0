"""Catalogues of earlier versions: they are read by views, and the first write converts them.

vectors      up to version 5 with the vectors
removed      of versions 5 and 6: the items that can be restored, some of 6 without their vectors
tombstones   the ids of the items that were removed or replaced since the last compaction
"""

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kinlens.embedder.durable import make_folder, rename, staged, sync_tree
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.schema import EARLIER, INDEXES, VERSION, schema_version, seal
from kinlens.indexer.catalog.vectors import RowIds, VectorFile
from kinlens.indexer.types import StoredRows

_REPLACED = "'', '', x'', '', '{}'"  # columns of an item of which only the id was kept
_LIVING = """
CREATE TEMP VIEW living AS
SELECT id, key, path, sha256, format, attributes, added_seq, changed_seq, crc FROM main.items
"""
_ONLY_REPLACED = f"""
CREATE TEMP VIEW removed (id, key, path, sha256, format, attributes, crc, seq, at) AS
SELECT id, {_REPLACED}, 0, seq, NULL FROM main.tombstones
"""  # noqa: S608 (a constant)
_REMOVED = f"""
CREATE TEMP VIEW removed AS
SELECT id, key, path, sha256, format, attributes, crc, seq, at FROM main.removed
UNION ALL SELECT id, {_REPLACED}, 0, seq, NULL FROM main.tombstones
WHERE id NOT IN (SELECT id FROM main.removed)
"""  # noqa: S608
_CONVERT = (
    "DROP VIEW temp.living",
    "DROP VIEW temp.removed",
    """CREATE TABLE IF NOT EXISTS removed (
    id, key, path, sha256, format, attributes, crc, seq, at, vector_crc, vector)""",
    "ALTER TABLE items ADD COLUMN removed_seq INTEGER",
    "ALTER TABLE items ADD COLUMN removed_at INTEGER",
    "DROP INDEX items_by_key",
    "DROP INDEX items_by_content",
    "DROP INDEX items_by_change",
    """INSERT INTO items
    SELECT id, key, path, sha256, format, attributes, seq, seq, crc, seq, at FROM removed""",
    f"""INSERT OR IGNORE INTO items
    SELECT id, {_REPLACED}, seq, seq, 0, seq, NULL FROM tombstones""",  # noqa: S608
    "INSERT INTO vectors SELECT id, vector_crc, nullif(vector, x'') FROM removed",
    "DROP TABLE removed",
    "DROP TABLE tombstones",
    "DROP TABLE IF EXISTS attributes",  # unused
    *INDEXES,
    VERSION,
)
_TAKE_OUT_VECTORS = (
    "ALTER TABLE state ADD COLUMN vectors TEXT",
    "CREATE TABLE checksums (id INTEGER PRIMARY KEY, crc INTEGER NOT NULL, vector BLOB) STRICT",
    "INSERT INTO checksums SELECT id, crc, NULL FROM vectors",
    "DROP TABLE vectors",
    "ALTER TABLE checksums RENAME TO vectors",
)
_COPIED = "SELECT id, crc, vector FROM vectors WHERE vector IS NOT NULL LIMIT 4096"


@dataclass(frozen=True, slots=True)
class VectorsInMemory:
    """The vectors of a catalogue that contains them, as rows (N, D) by ascending id."""

    row_ids: RowIds
    vectors: StoredRows

    def rows(self, count: int) -> StoredRows:
        """The first `count` rows (count, D)."""
        return self.vectors[:count]


StoredVectors = VectorFile | VectorsInMemory


def row_ids_of(view: CatalogView) -> RowIds:
    """The rows of the items of a view."""
    if view.file is not None:
        return view.file.row_ids
    return RowIds(view.live_ids(), view.last_given())


def vectors_in_memory(view: CatalogView) -> VectorsInMemory:
    """Read the vectors of a catalogue that contains them, N * D * 4 bytes."""
    row_ids, start = row_ids_of(view), 0
    vectors = np.empty((len(row_ids.base), view.dim), np.float32)
    for ids, part in view.vectors_of(row_ids.base):
        vectors[start : start + len(ids)] = part
        start += len(ids)
    return VectorsInMemory(row_ids, vectors)


def define_views(connection: sqlite3.Connection) -> bool:
    """Define the views `living` and `removed` of an earlier version, until the transaction ends.

    Returns whether the file has these views itself. Raises: sqlite3.Error.
    """
    version = schema_version(connection)
    if version not in EARLIER:
        return True
    connection.execute(_LIVING)
    connection.execute(_ONLY_REPLACED if version == EARLIER[0] else _REMOVED)
    return False


def convert(view: CatalogView, folder: Path) -> VectorFile:
    """Convert the tables of a view; `folder` has the files of vectors. Returns that of the view.

    Raises: GalleryCorruptError, OSError, sqlite3.Error.
    """
    for statement in _CONVERT:
        view.connection.execute(statement)
    if view.file is None:
        return _move_vectors(view, folder)
    _return_vectors(view, view.file)
    return view.file


def _move_vectors(view: CatalogView, folder: Path) -> VectorFile:
    """Move the vectors of the catalogue into a separate file."""
    make_folder(folder, "vectors")
    with staged(folder) as stage:
        ids = np.union1d(view.live_ids(), view.removed_ids())
        VectorFile.rewrite(stage, view.dim, ids, view.last_given(), view.vectors_of(ids))
        sync_tree(stage, "vectors")
        name = os.urandom(4).hex()
        rename(stage, folder / name, "vectors")
        for statement in _TAKE_OUT_VECTORS:
            view.connection.execute(statement)
        view.connection.execute("UPDATE state SET vectors = ?", (name,))
        seal(view.connection)
        return VectorFile.open(folder / name, view.dim)


def _return_vectors(view: CatalogView, file: VectorFile) -> None:
    """Write removed vectors, which were moved to the catalogue, to their rows of the file.

    Items without a row cannot be restored any more: a compaction had rewritten the file.
    """
    while rows := view.connection.execute(_COPIED).fetchall():
        ids, vectors = view.verified(rows)
        has_row = file.row_ids.rows_of(ids) >= 0
        file.write(ids[has_row], vectors[has_row])
        lost = [(item_id,) for item_id in ids[~has_row].tolist()]
        view.connection.executemany("UPDATE items SET removed_at = NULL WHERE id = ?", lost)
        view.connection.executemany(
            "UPDATE vectors SET vector = NULL WHERE id = ?", [(row[0],) for row in rows]
        )
    file.sync()
