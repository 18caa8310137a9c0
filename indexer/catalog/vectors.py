"""The vectors of a generation: one file of rows, which grows in the order of item numbers.

vectors/<name>/
  rows.f32       float32 (D,) a row; a row is written once, and synced before its item is committed
  rows.f16       float16 in its place, where the gallery was made so
  numbers.npy    int64 (B + 2,): the item numbers of the first B rows, ascending, then the highest
                 number that had been given when they were written, and the checksum of all these

A row of a removed item stays until the file is rewritten, by a compaction. Rows are mapped into
memory: searches read them where they are. The checksum of each is in the catalogue.
"""

import contextlib
import mmap
import os
import shutil
import threading
import weakref
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from kinlens.embedder.durable import hold, sync
from kinlens.embedder.errors import GalleryCorruptError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.types import Ids, Progress, StoredRows, VectorType, places_of

VECTORS = "vectors"
"""The folder of a generation in which they are."""

ROWS: dict[VectorType, str] = {"fp32": "rows.f32", "fp16": "rows.f16"}
"""The name of the file of rows, by their type."""

NUMBERS = "numbers.npy"
_RESTORE = "Restore a backup: kinlens-index restore."
_COPIED = 4096  # rows at a time
_NO_IDS: Ids = np.empty(0, np.int64)
_DTYPES = {"fp32": np.float32, "fp16": np.float16}


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """Which item each row is of: the first rows are of the items `base` (B,), ascending, the others
    of the numbers above `last`, one after the other.
    """

    base: Ids
    last: int

    def of(self, rows: Ids) -> Ids:
        """The number of the item of each row."""
        later: Ids = rows + (self.last + 1 - len(self.base))
        if not len(self.base):
            return later
        places = np.minimum(rows, len(self.base) - 1)
        return np.where(rows < len(self.base), self.base[places], later)

    def rows_of(self, ids: Ids) -> Ids:
        """The row of each item; -1 for one that has none."""
        later = ids + (len(self.base) - self.last - 1)
        return np.where(ids > self.last, later, places_of(ids, self.base))

    def rows_up_to(self, number: int) -> int:
        """How many rows the items have whose numbers are at most this."""
        if number > self.last:
            return len(self.base) + number - self.last
        return int(np.searchsorted(self.base, number, "right"))


class VectorFile:
    """The open vectors of a generation, which stay on the disk meanwhile. Thread safe; `write` and
    `sync` are for the one process that changes the gallery.

    `last` is the highest number that had been given when it was written; `dtype` that of its rows.
    """

    def __init__(self, folder: Path, dim: int) -> None:
        """See `open`."""
        with contextlib.ExitStack() as held:
            held.callback(os.close, hold(folder))
            self.folder = folder
            self.dim = dim
            self.numbers, self.last = _numbers(folder / NUMBERS)
            self.type: VectorType = "fp16" if (folder / ROWS["fp16"]).is_file() else "fp32"
            self.dtype = np.dtype(_DTYPES[self.type])
            self.path = folder / ROWS[self.type]
            self._descriptor = os.open(self.path, os.O_RDONLY)
            held.callback(os.close, self._descriptor)
            self._mapped: StoredRows = np.empty((0, dim), self.dtype)
            self._mapping = threading.Lock()
            weakref.finalize(self, held.pop_all().close)

    @classmethod
    def open(cls, folder: Path, dim: int) -> "VectorFile":
        """That in `folder`; all who have it open in a process share it.

        Raises: FileNotFoundError if it is gone; GalleryCorruptError.
        """
        with _sharing:
            file = _shared.get(folder)
            if file is None:
                file = _shared[folder] = cls(folder, dim)
            return file

    @classmethod
    def create(cls, folder: Path, dim: int, type_: VectorType = "fp32") -> "VectorFile":
        """A new, empty file in the new folder. Raises: OSError."""
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
        """A new file in the empty folder with these items (N,), ascending, and no other rows.

        `batches` gives them with their vectors, in this order; `last` is the highest number that
        was ever given. Nothing is synced.

        Raises: GalleryCorruptError if the batches have other items; OSError.
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
                f"The catalogue lists {len(ids):,} items, but their vectors do not follow the list "
                f"from item {start:,} on. {_RESTORE}"
            )
        numbers = np.append(ids, last)
        with (folder / NUMBERS).open("xb") as file:
            npy.write_array(file, np.append(numbers, zlib.crc32(numbers.data)), version=(1, 0))
        return cls.open(folder, dim)

    @property
    def name(self) -> str:
        """Under which the catalogue knows it."""
        return self.folder.name

    def rows(self, count: int) -> StoredRows:
        """The first `count` rows (count, D), mapped. Raises: GalleryCorruptError."""
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
        """Vectors (N, D) as they will be read."""
        return np.asarray(np.asarray(vectors, self.dtype), np.float32)

    def rows_of(self, ids: Ids) -> Ids:
        """The row of each of these items. Raises: GalleryCorruptError for one without a row."""
        rows = self.numbers.rows_of(ids)
        if rows.min(initial=0) < 0:
            raise GalleryCorruptError(
                f"{self.path} has no vector of item {ids[rows < 0][0]}. {_RESTORE}"
            )
        return rows

    def write(self, ids: Ids, vectors: Embeddings) -> None:
        """Put the vectors (N, D) of items into their rows, unsynced; no item that was committed may
        have one of these rows. Raises: OSError.
        """
        rows = self.numbers.rows_of(ids)
        data = np.ascontiguousarray(vectors, self.dtype)
        ends = np.append(np.flatnonzero(np.diff(rows) != 1) + 1, len(rows)).tolist()
        start = 0
        with self.path.open("r+b", buffering=0) as file:
            for end in ends if len(rows) else []:
                file.seek(int(rows[start]) * self._row_bytes)
                left = data[start:end].data.cast("B")
                while left:
                    left = left[file.write(left) :]
                start = end

    def lengthen(self, last_given: int) -> None:
        """Have rows for all numbers up to this, also for those of items that came and went."""
        size = self.bytes_of(self.numbers.rows_up_to(last_given))
        if self.path.stat().st_size < size:
            os.truncate(self.path, size)

    def sync(self) -> None:
        """Bring what was written to the disk. Raises: OSError."""
        sync(self.path, "write")

    def copy_to(self, folder: Path, last_given: int, on_progress: Progress) -> None:
        """Copy the rows of all items up to a number into the new folder, unsynced. Raises: OSError,
        GalleryCorruptError.
        """
        folder.mkdir(parents=True)
        shutil.copyfile(self.folder / NUMBERS, folder / NUMBERS)
        on_progress((folder / NUMBERS).stat().st_size)
        rows = self.rows(self.numbers.rows_up_to(last_given))
        with (folder / ROWS[self.type]).open("xb") as file:
            for start in range(0, len(rows), _COPIED):
                on_progress(file.write(rows[start : start + _COPIED].data))

    def bytes_of(self, rows: int) -> int:
        """The length of the file up to so many rows."""
        return rows * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.dtype.itemsize * self.dim

    def _map(self, count: int) -> StoredRows:
        # To map more than there is would kill the process with SIGBUS.
        found = os.fstat(self._descriptor).st_size // self._row_bytes
        if found < count:
            raise GalleryCorruptError(
                f"{self.path} has {found:,} vectors, the catalogue counts {count:,}: the file was "
                f"truncated. {_RESTORE}"
            )
        data = mmap.mmap(self._descriptor, found * self._row_bytes, access=mmap.ACCESS_READ)
        return np.frombuffer(data, self.dtype).reshape(found, self.dim)


_shared: "weakref.WeakValueDictionary[Path, VectorFile]" = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def _numbers(path: Path) -> tuple[RowNumbers, int]:
    """What the file says, and its last number. Raises: FileNotFoundError, GalleryCorruptError."""
    try:
        found = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise GalleryCorruptError(f"{path} is not an array: {error}. {_RESTORE}") from error
    is_whole = found.dtype == np.int64 and found.ndim == 1 and len(found) > 1
    if not is_whole or zlib.crc32(found[:-1].data) != found[-1]:
        raise GalleryCorruptError(f"{path} does not fit its checksum. {_RESTORE}")
    base, last = found[:-2], int(found[-2])
    if len(base) == last:  # none is left out, so nothing need be looked up
        return RowNumbers(_NO_IDS, 0), last
    return RowNumbers(base, last), last
