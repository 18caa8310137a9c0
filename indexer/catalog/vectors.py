"""The vectors of a generation: a file of rows in the order of item ids.

vectors/<name>/
  rows.f32       float32 (D,) per row; written once and synced before its item is committed
  rows.f16       float16 instead, if the gallery was created with half precision
  numbers.npy    int64 (B + 2,): the item ids of the first B rows, ascending; the highest id that
                 was assigned when they were written; the checksum of all of these

Rows of removed items stay until a compaction rewrites the file. Searches read the rows through a
memory map. The checksum of each row is in the catalogue.
"""

import contextlib
import mmap
import os
import shutil
import threading
import weakref
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from kinlens.embedder.durable import lock_folder, sync
from kinlens.embedder.errors import GalleryCorruptError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.types import RESTORE, Ids, Progress, StoredRows, VectorType

VECTORS = "vectors"
"""The folder of a generation that contains the files of vectors."""

ROWS: dict[VectorType, str] = {"fp32": "rows.f32", "fp16": "rows.f16"}
"""The name of the file of rows, by vector type."""

NUMBERS = "numbers.npy"
SAME_VECTOR: Mapping[VectorType, float] = {"fp32": 1e-5, "fp16": 2.0**-11}
"""Vectors are equal if no component differs by more: two calls of a model differ by rounding."""

_COPY_ROWS = 4096  # rows copied at a time
_NO_IDS: Ids = np.empty(0, np.int64)
_DTYPES = {"fp32": np.float32, "fp16": np.float16}


@dataclass(frozen=True, slots=True)
class RowIds:
    """Maps rows to item ids: the first B rows have the ids `base` (B,), ascending.

    Later rows have the ids `last` + 1, `last` + 2 and so on, without gaps.
    """

    base: Ids
    last: int

    def of(self, rows: Ids) -> Ids:
        """The item id of each row."""
        later: Ids = rows + (self.last + 1 - len(self.base))
        if not len(self.base):
            return later
        clipped = np.minimum(rows, len(self.base) - 1)
        return np.where(rows < len(self.base), self.base[clipped], later)

    def rows_of(self, ids: Ids) -> Ids:
        """The row of each item id; -1 for ids without a row."""
        later = ids + (len(self.base) - self.last - 1)
        return np.where(ids > self.last, later, find_sorted(ids, self.base))

    def rows_up_to(self, item_id: int) -> int:
        """Number of rows with ids up to and including `item_id`."""
        if item_id > self.last:
            return len(self.base) + item_id - self.last
        return int(np.searchsorted(self.base, item_id, "right"))


class VectorFile:
    """The open file of vectors of a generation. A lock keeps it on disk while it is open.

    Thread safe. Only the process with the write lock of the gallery may call `write` and `sync`.

    last: the highest item id assigned when the file was written.
    dtype: the NumPy type of its rows.
    """

    def __init__(self, folder: Path, dim: int) -> None:
        """Use `open`, which shares open files."""
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(os.close, lock_folder(folder))
            self.folder = folder
            self.dim = dim
            self.row_ids, self.last = _read_ids(folder / NUMBERS)
            self.type: VectorType = "fp16" if (folder / ROWS["fp16"]).is_file() else "fp32"
            self.dtype = np.dtype(_DTYPES[self.type])
            self.path = folder / ROWS[self.type]
            self._descriptor = os.open(self.path, os.O_RDONLY)
            cleanup.callback(os.close, self._descriptor)
            self._mapped: StoredRows = np.empty((0, dim), self.dtype)
            self._mapping = threading.Lock()
            weakref.finalize(self, cleanup.pop_all().close)

    @classmethod
    def open(cls, folder: Path, dim: int) -> "VectorFile":
        """Open the file in `folder`. Within a process, an open file is shared.

        Raises: FileNotFoundError if it has been removed; GalleryCorruptError.
        """
        with _sharing:
            file = _shared.get(folder)
            if file is None:
                file = _shared[folder] = cls(folder, dim)
            return file

    @classmethod
    def create(cls, folder: Path, dim: int, type_: VectorType = "fp32") -> "VectorFile":
        """Create an empty file in a new folder. Raises: OSError."""
        folder.mkdir(parents=True)
        return cls.rewrite(folder, dim, _NO_IDS, 0, (), type_)

    @classmethod
    def rewrite(
        cls,
        folder: Path,
        dim: int,
        ids: Ids,
        last: int,
        batches: Iterable[tuple[Ids, Embeddings]],
        type_: VectorType = "fp32",
    ) -> "VectorFile":
        """Write a new file into an empty folder, with only the rows of the given items.

        ids: item ids (N,), ascending.
        last: the highest item id ever assigned.
        batches: ids and vectors of the items, in the same order.

        Nothing is synced.

        Raises: GalleryCorruptError if the batches contain other items; OSError.
        """
        start = 0
        with (folder / ROWS[type_]).open("xb") as file:
            for found, vectors in batches:
                if not np.array_equal(ids[start : start + len(found)], found):
                    break
                file.write(np.ascontiguousarray(vectors, _DTYPES[type_]).data)
                start += len(found)
        if start < len(ids):
            raise GalleryCorruptError(
                f"The catalogue lists {len(ids):,} items, but the vectors differ from the list "
                f"from position {start:,} on. {RESTORE}"
            )
        numbers = np.append(ids, last)
        with (folder / NUMBERS).open("xb") as file:
            npy.write_array(file, np.append(numbers, zlib.crc32(numbers.data)), version=(1, 0))
        return cls.open(folder, dim)

    @property
    def name(self) -> str:
        """The name of the file in the catalogue."""
        return self.folder.name

    def rows(self, count: int) -> StoredRows:
        """The first `count` rows (count, D), memory-mapped. Raises: GalleryCorruptError."""
        mapped = self._mapped
        if count > len(mapped):
            with self._mapping:
                mapped = self._mapped = self._map(count)
        return mapped[:count]

    def read(self, ids: Ids) -> Embeddings:
        """The vectors (N, D) of these items. Raises: GalleryCorruptError."""
        rows = self.rows_of(ids)
        return np.asarray(self.rows(int(rows.max(initial=-1)) + 1)[rows], np.float32)

    def rounded(self, vectors: Embeddings) -> Embeddings:
        """Vectors (N, D) rounded to the precision of the file."""
        return np.asarray(np.asarray(vectors, self.dtype), np.float32)

    def rows_of(self, ids: Ids) -> Ids:
        """The row of each of these items. Raises: GalleryCorruptError for one without a row."""
        rows = self.row_ids.rows_of(ids)
        if rows.min(initial=0) < 0:
            raise GalleryCorruptError(
                f"{self.path} has no vector of item {ids[rows < 0][0]}. {RESTORE}"
            )
        return rows

    def write(self, ids: Ids, vectors: Embeddings) -> None:
        """Write the vectors (N, D) of items without syncing; rows of committed items must not be
        overwritten. Raises: OSError.
        """
        rows = self.row_ids.rows_of(ids)
        data = np.ascontiguousarray(vectors, self.dtype)
        ends = np.append(np.flatnonzero(np.diff(rows) != 1) + 1, len(rows)).tolist()
        start = 0
        with self.path.open("r+b", buffering=0) as file:
            for end in ends if len(rows) else []:
                file.seek(int(rows[start]) * self._row_bytes)
                rest = data[start:end].data.cast("B")
                while rest:
                    rest = rest[file.write(rest) :]
                start = end

    def lengthen(self, last_given: int) -> None:
        """Extend the file to have a row for each id up to `last_given`, including removed items."""
        size = self.bytes_of(self.row_ids.rows_up_to(last_given))
        if self.path.stat().st_size < size:
            os.truncate(self.path, size)

    def sync(self) -> None:
        """Sync the written rows to disk. Raises: OSError."""
        sync(self.path, "write")

    def copy_to(self, folder: Path, last_given: int, on_progress: Progress) -> None:
        """Copy the rows of items up to the id `last_given` into a new folder, without syncing.

        Raises: OSError, GalleryCorruptError.
        """
        folder.mkdir(parents=True)
        shutil.copyfile(self.folder / NUMBERS, folder / NUMBERS)
        on_progress((folder / NUMBERS).stat().st_size)
        rows = self.rows(self.row_ids.rows_up_to(last_given))
        with (folder / ROWS[self.type]).open("xb") as file:
            for start in range(0, len(rows), _COPY_ROWS):
                on_progress(file.write(rows[start : start + _COPY_ROWS].data))

    def bytes_of(self, rows: int) -> int:
        """The size in bytes of this number of rows."""
        return rows * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.dtype.itemsize * self.dim

    def _map(self, count: int) -> StoredRows:
        # Reading a mapping beyond the end of the file would kill the process with SIGBUS.
        found = os.fstat(self._descriptor).st_size // self._row_bytes
        if found < count:
            raise GalleryCorruptError(
                f"{self.path} has {found:,} vectors, the catalogue counts {count:,}: the file was "
                f"truncated. {RESTORE}"
            )
        data = mmap.mmap(self._descriptor, found * self._row_bytes, access=mmap.ACCESS_READ)
        return np.frombuffer(data, self.dtype).reshape(found, self.dim)


_shared: "weakref.WeakValueDictionary[Path, VectorFile]" = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def _read_ids(path: Path) -> tuple[RowIds, int]:
    """The ids in a file, and the highest assigned id.

    Raises: FileNotFoundError, GalleryCorruptError.
    """
    try:
        found = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise GalleryCorruptError(f"{path} is not an array: {error}. {RESTORE}") from error
    is_whole = found.dtype == np.int64 and found.ndim == 1 and len(found) > 1
    if not is_whole or zlib.crc32(found[:-1].data) != found[-1]:
        raise GalleryCorruptError(f"{path} does not fit its checksum. {RESTORE}")
    base, last = found[:-2], int(found[-2])
    if len(base) == last:  # no gaps, so rows can be computed without a lookup
        return RowIds(_NO_IDS, 0), last
    return RowIds(base, last), last


def are_equal(
    some: Embeddings, others: Embeddings, vector_type: VectorType = "fp16"
) -> NDArray[np.bool_]:
    """Whether each vector (N, D) equals the one of `others` (N, D) in its row, up to rounding."""
    equal: NDArray[np.bool_] = (np.abs(some - others) <= SAME_VECTOR[vector_type]).all(axis=-1)
    return equal


def find_sorted(ids: Ids, known: Ids) -> Ids:
    """The position of each id in the ascending array `known`; -1 for ids that are not in it."""
    if not len(known):
        return np.full(ids.shape, -1, np.int64)
    positions = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return np.where(known[positions] == ids, positions, -1)
