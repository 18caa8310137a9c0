"""The attribute columns of a generation: read from their checkpoint, or from the catalogue."""

import contextlib
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from kinlens.embedder.errors import GalleryCorruptError
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.vectors import RowIds
from kinlens.indexer.columns.columns import Columns
from kinlens.indexer.index.segment import COLUMNS as OF_SEGMENT
from kinlens.indexer.index.segment import SEGMENTS, read_manifest

COLUMNS = "columns"
"""The folder of a generation that contains the checkpoint."""

_BATCH = 65_536  # items whose attributes are read at a time
_MANY = 10_000  # items whose attributes take about 0.1 s to read


def load_columns(generation: Path, view: CatalogView, *, from_scratch: bool = False) -> Columns:
    """The columns of the state of `view`.

    from_scratch: read the catalogue even if there is a checkpoint.
    """
    columns = None if from_scratch else _stored(generation, view)
    if columns is not None:
        return advanced(columns, view)
    seq, last = view.state().seq, view.last_given()
    row_ids = RowIds(view.live_ids(), last) if view.file is None else view.file.row_ids
    columns = Columns(view.file_name, row_ids, seq, row_ids.rows_up_to(last), {})
    types = view.schema()
    for ids, attributes in view.attributes(_BATCH):
        columns = columns.changed(ids, attributes, types, seq, columns.size)
    if columns.size >= _MANY:
        with contextlib.suppress(OSError):  # a read-only folder
            store_columns(generation, columns)
            return replace(columns, changes=0)
    return columns


def advanced(columns: Columns, view: CatalogView) -> Columns:
    """The columns of a later state in the same rows."""
    seq = view.state().seq
    if columns.seq == seq:
        return columns
    found = view.attributes_since(columns.seq)
    ids = np.array([item_id for item_id, _ in found], np.int64)
    size = columns.row_ids.rows_up_to(view.last_given())
    return columns.changed(ids, [own for _, own in found], view.schema(), seq, size)


def are_before(columns: Columns | None, view: CatalogView) -> bool:
    """Whether these are columns of an earlier state in the same rows."""
    if columns is None or columns.space != view.file_name:
        return False
    return columns.seq <= view.state().seq


def store_columns(generation: Path, columns: Columns) -> None:
    """Write a checkpoint. Raises: OSError."""
    if columns.space is not None:
        (generation / COLUMNS).mkdir(exist_ok=True)
        columns.write(generation / COLUMNS)


def collect_columns(generation: Path, vectors: Path) -> None:
    """Delete checkpoints of files of vectors that no longer exist. Raises: OSError."""
    if (generation / COLUMNS).is_dir():
        for path in (generation / COLUMNS).glob("*.bin"):
            if not (vectors / path.stem).is_dir():
                path.unlink(missing_ok=True)


def _stored(generation: Path, view: CatalogView) -> Columns | None:
    """The newest stored columns of a state up to that of `view`."""
    if view.file is None:
        return None
    found = []
    name, row_ids = view.file.name, view.file.row_ids
    state = view.state()
    try:
        found.append(Columns.open(generation / COLUMNS / f"{name}.bin", name, row_ids))
    except FileNotFoundError:
        pass
    except GalleryCorruptError as error:
        logging.getLogger(__name__).warning("%s It is read from the catalogue instead.", error)
    if not found and state.segment is not None:
        folder = generation / SEGMENTS / state.segment
        with contextlib.suppress(FileNotFoundError, GalleryCorruptError):
            manifest = read_manifest(folder)
            if manifest.vectors == name:
                released = manifest.seq, manifest.size
                found.append(Columns.open(folder / OF_SEGMENT, name, row_ids, released))
    return next((columns for columns in found if are_before(columns, view)), None)
