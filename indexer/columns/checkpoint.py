"""The attribute columns of a generation: read from their checkpoint, or from the catalogue."""

import contextlib
import logging
from pathlib import Path

import numpy as np

from kinlens.embedder.durable import sweep
from kinlens.embedder.errors import GalleryCorruptError
from kinlens.indexer.catalog.earlier import StoredVectors, row_ids_of
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.vectors import VECTORS, VectorFile
from kinlens.indexer.columns.columns import Columns

COLUMNS = "columns"
"""The folder of a generation that contains the checkpoint."""

_BATCH = 65_536  # items whose attributes are read at a time

MANY = 10_000
"""Items whose attributes take about 0.1 s to read from the catalogue."""


def load_columns(generation: Path, view: CatalogView, *, from_scratch: bool = False) -> Columns:
    """The columns of the state of `view`.

    from_scratch: read the catalogue even if there is a checkpoint.
    """
    columns = None if from_scratch else stored_columns(generation, view)
    if columns is not None:
        return _advanced(columns, view)
    seq, last = view.state().seq, view.last_given()
    row_ids = row_ids_of(view)
    columns = Columns(_space_of(view), row_ids, seq, row_ids.rows_up_to(last), {})
    types = view.schema()
    for ids, attributes in view.attributes(_BATCH):
        columns = columns.changed(ids, attributes, types, seq, columns.size)
    return columns


def stored_columns(generation: Path, view: CatalogView) -> Columns | None:
    """The checkpoint, if it is of this or of an earlier state in the same rows."""
    if view.file is None:
        return None
    path = generation / COLUMNS / f"{view.file.name}.bin"
    try:
        columns = Columns.open(path, view.file.name, view.file.row_ids)
    except FileNotFoundError:
        return None
    except GalleryCorruptError as error:
        logging.getLogger(__name__).warning("%s It is read from the catalogue instead.", error)
        return None
    return columns if _are_before(columns, view) else None


def columns_at(
    generation: Path,
    view: CatalogView,
    *known: Columns | None,
    file: StoredVectors | None = None,
) -> Columns:
    """The columns of the state of `view`, from the first of the `known` ones that are of this or
    of an earlier state in the same rows. If there are none, they are loaded, and stored if that
    took long.

    file: the vectors whose rows the columns have; by default those of `view`. A compaction may
        have rewritten them since.
    """
    if isinstance(file, VectorFile):
        view = CatalogView(view.connection, file)
    columns = next((one for one in known if one is not None and _are_before(one, view)), None)
    if columns is not None:
        return _advanced(columns, view)
    columns = load_columns(generation, view)
    if columns.changes >= MANY:
        with contextlib.suppress(OSError):  # a read-only folder
            stored = store_columns(generation, columns)
            # Another process may have stored those of a later state.
            return stored if stored.seq == columns.seq else columns
    return columns


def _are_before(columns: Columns, view: CatalogView) -> bool:
    return columns.space == _space_of(view) and columns.seq <= view.state().seq


def _space_of(view: CatalogView) -> str | None:
    return None if view.file is None else view.file.name


def _advanced(columns: Columns, view: CatalogView) -> Columns:
    seq = view.state().seq
    if columns.seq == seq:
        return columns
    found = view.attributes_since(columns.seq)
    ids = np.array([item_id for item_id, _ in found], np.int64)
    size = columns.row_ids.rows_up_to(view.last_given())
    return columns.changed(ids, [own for _, own in found], view.schema(), seq, size)


def store_columns(generation: Path, columns: Columns) -> Columns:
    """Write a checkpoint; returns the columns as they are in it. Raises: OSError."""
    if columns.space is None:  # a gallery of an earlier version
        return columns
    folder = generation / COLUMNS
    folder.mkdir(exist_ok=True)
    columns.write(folder)
    return Columns.open(folder / f"{columns.space}.bin", columns.space, columns.row_ids)


def copy_columns(generation: Path, target: Path, view: CatalogView) -> None:
    """Copy the checkpoint for the state of `view`, if there is one. Raises: OSError."""
    columns = stored_columns(generation, view)
    if columns is not None:
        store_columns(target, columns)


def collect_columns(generation: Path) -> None:
    """Delete checkpoints of files of vectors that no longer exist, and parts of unfinished ones."""
    folder = generation / COLUMNS
    with contextlib.suppress(OSError):
        sweep(folder)
        for path in folder.glob("*.bin"):
            if not (generation / VECTORS / path.stem).is_dir():
                path.unlink(missing_ok=True)
