"""The attributes of a gallery as columns, for filters, facets, groups and sorting.

A row of a column is a row of the file of vectors. A column has a code for each row: the number of
its value in a dictionary, from 1 on; 0 means no value. Codes are in chunks of `CHUNK` rows. Columns
are immutable: a change copies the chunks that differ and shares all others with the earlier state.

columns/<name of the file of vectors>.bin is a checkpoint of the columns, which is memory-mapped. It
contains arrays, aligned to 64 bytes, a directory in JSON, its length and its CRC in 8 bytes each.
The catalogue is the truth: a missing or damaged checkpoint is built again from it.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.durable import rename, staged, sync
from kinlens.embedder.errors import GalleryCorruptError
from kinlens.indexer.bits import Bits, count_of
from kinlens.indexer.catalog.vectors import RowIds
from kinlens.indexer.columns.chunks import CHUNK, NOTHING, Chunk, Codes, is_repeated, starts_of
from kinlens.indexer.columns.values import (
    Values,
    are_at,
    from_arrays,
    merged_values,
    packed,
    places_of,
    to_arrays,
)
from kinlens.indexer.types import REBUILD, RESTORE, Ids
from kinlens.values import AttributeType, AttributeValue, Scalar, values_in

COLUMN_BYTES = 40
"""Bytes per item with five attributes."""

MIN_LATER = 4096
"""Values that are always kept unsorted next to the sorted ones; of many, also one in 16."""

_ALIGNED = 64
_LOOKUP_RATIO = 16  # fewer than one row in 16 are looked up one by one
_MAX_COUNTS = 2**18  # codes up to which a change updates counts instead of counting all rows
_VERIFIED_BELOW = 64 * 2**20  # bytes of a file whose checksum is verified

Attributes = Mapping[str, AttributeValue]


class Chosen:
    """A selection of the rows below `size`."""

    def __init__(self, bits: Bits, size: int) -> None:
        self.bits = bits
        self.size = size

    @cached_property
    def flags(self) -> NDArray[np.bool_]:
        """Mask (size,) of the selected rows."""
        return np.unpackbits(self.bits, count=self.size, bitorder="little").view(np.bool_)

    @cached_property
    def rows(self) -> Ids:
        """The selected rows, ascending."""
        return np.flatnonzero(self.flags)

    @cached_property
    def count(self) -> int:
        """Number of selected rows."""
        return count_of(self.bits, self.size)


class Dictionary:
    """The distinct values of a column. Only grows, so all states of a column share it. Thread safe.

    values: the first values (V,), ascending, with the codes 1 to V.
    later: values with the codes from V + 1 on, in the order in which they were added.
    """

    def __init__(self, type_: AttributeType, values: Values) -> None:
        self.type = type_
        self.values = values
        self.later: list[Scalar] = []
        self._codes: dict[Scalar, int] = {}  # of the later values
        self._sorted: tuple[list[Scalar], Ids] = [], np.empty(0, np.int64)
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self.values) + len(self.later)

    def value(self, code: int) -> Scalar:
        """The value with this code."""
        first = len(self.values)
        return self.values[code - 1] if code <= first else self.later[code - 1 - first]

    def codes_of(self, values: Sequence[Scalar]) -> Codes:
        """The codes of these values (N,); new values are added."""
        different = list(dict.fromkeys(values))
        places, is_first = places_of(different, self.values, self.type)
        codes = dict(zip(different, (places + 1).tolist(), strict=True))
        with self._lock:
            for index in np.flatnonzero(~is_first).tolist():
                value = different[index]
                code = self._codes.get(value)
                if code is None:
                    self.later.append(value)
                    code = self._codes[value] = len(self)
                codes[value] = code
        return np.fromiter(map(codes.__getitem__, values), np.uint32, len(values))

    def have(self, codes: Codes, values: Sequence[Scalar]) -> NDArray[np.bool_]:
        """Whether each of these codes (N,) is that of the value; much faster than `codes_of`."""
        found, is_later = np.zeros(len(codes), np.bool_), codes > len(self.values)
        for index in np.flatnonzero(is_later).tolist():
            found[index] = self._codes.get(values[index]) == codes[index]
        first = np.flatnonzero(~is_later & (codes > 0))
        wanted = [values[index] for index in first.tolist()]
        found[first] = are_at(codes[first].astype(np.int64) - 1, wanted, self.values, self.type)
        return found

    def sorted_later(self) -> tuple[list[Scalar], Ids]:
        """The later values, ascending, and their codes."""
        with self._lock:
            if len(self._sorted[0]) < len(self.later):
                first = len(self.values) + 1
                known = (self._sorted[1] - first).tolist()  # already in order: little is left to do
                order = sorted(
                    [*known, *range(len(known), len(self.later))], key=self.later.__getitem__
                )
                self._sorted = [self.later[n] for n in order], np.array(order, np.int64) + first
            return self._sorted


class Column:
    """One attribute of one state.

    dictionary: the distinct values; the first `codes` of them belong to this state.
    """

    def __init__(self, dictionary: Dictionary, chunks: Sequence[Chunk]) -> None:
        self.dictionary = dictionary
        self.codes = len(dictionary)
        self.chunks = chunks

    @classmethod
    def of(
        cls, dictionary: Dictionary, rows: NDArray[np.integer], codes: Codes, size: int
    ) -> "Column":
        """A column of `size` rows from entries (E,) with a row, ascending, and a code each."""
        chunks = []
        for start, first, end in starts_of(rows, size):
            own = (rows[first:end] - start).astype(np.uint32)
            chunks.append(Chunk.of(own, codes[first:end], min(CHUNK, size - start)))
        return cls(dictionary, chunks)

    @property
    def type(self) -> AttributeType:
        """The type of its values."""
        return self.dictionary.type

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """The number of rows (codes,) with each value, including rows of removed items."""
        return self._count([chunk.codes for chunk in self.chunks])

    @cached_property
    def present(self) -> int:
        """The number of rows with any value."""
        return sum(chunk.present for chunk in self.chunks)

    def chunk(self, index: int) -> Chunk:
        """The chunk with this index, which may be one after the last."""
        return self.chunks[index] if index < len(self.chunks) else NOTHING

    def entries(self) -> tuple[Ids, Codes]:
        """The row and the code of each value (E,), rows ascending."""
        rows, codes = [np.empty(0, np.int64)], [np.empty(0, np.uint8)]
        for index, chunk in enumerate(self.chunks):
            own, some = chunk.entries()
            rows.append(own.astype(np.int64) + index * CHUNK)
            codes.append(some)
        return np.concatenate(rows), np.concatenate(codes)

    def counted(self, chosen: Chosen) -> tuple[NDArray[np.int64], int]:
        """The number of chosen rows with each value (codes,), and with any value."""
        if _LOOKUP_RATIO * chosen.count < chosen.size:
            parts = [chunk.at(rows) for chunk, rows in self._chunks_of(chosen.rows)]
        else:
            parts = [
                chunk.among(chosen.flags[index * CHUNK : (index + 1) * CHUNK])
                for index, chunk in enumerate(self.chunks)
            ]
        return self._count([codes for codes, _ in parts]), sum(present for _, present in parts)

    def _chunks_of(self, rows: Ids) -> Iterator[tuple[Chunk, Ids]]:
        """The chunks of these rows, ascending, and the rows counted within each chunk."""
        for start, first, end in starts_of(rows, len(self.chunks) * CHUNK):
            if first < end:
                yield self.chunks[start // CHUNK], rows[first:end] - start

    def _count(self, parts: Sequence[Codes]) -> NDArray[np.int64]:
        """How often each code (codes,) except 0 occurs in the parts."""
        found = np.zeros(self.codes + 1, np.int64)
        if self.codes > CHUNK and parts:  # one pass over the counts instead of one per part
            parts = [np.concatenate(parts)]
        for part in parts:
            if part.dtype == np.uint8 and len(part) == CHUNK and not CHUNK % 2:
                # Counting pairs of codes takes half as long.
                pairs = np.bincount(part.view(np.uint16), minlength=2**16).reshape(2**8, 2**8)
                counts = np.trim_zeros(pairs.sum(axis=0) + pairs.sum(axis=1), "b")
            else:
                counts = np.bincount(part)
            if len(counts) > len(found):
                raise GalleryCorruptError(f"A column of the index has unknown values. {REBUILD}")
            found[: len(counts)] += counts
        return found[1:]

    def values_at(self, rows: Ids) -> list[list[Scalar]]:
        """The values of each of these rows (N,), ascending rows."""
        found: list[list[Scalar]] = []
        for chunk, own in self._chunks_of(rows):
            for one, stop in zip(*(a.tolist() for a in chunk.ranges(own)), strict=True):
                codes = chunk.codes[one:stop].tolist()
                found.append([self.dictionary.value(code) for code in codes if code])
        return found + [[] for _ in rows[len(found) :]]  # rows after the last chunk

    def in_order(self) -> Ids:
        """The codes (codes,), ascending by their values."""
        first = np.arange(1, len(self.dictionary.values) + 1)
        values, codes = self.later()
        places, _ = places_of(values, self.dictionary.values, self.type)
        return np.insert(first, places, codes)

    def later(self) -> tuple[list[Any], Ids]:
        """The later values of this state, ascending, and their codes."""
        values, codes = self.dictionary.sorted_later()
        if len(self.dictionary.values) + len(values) == self.codes:
            return values, codes
        is_own = codes <= self.codes  # a later state has added more
        return [v for v, own in zip(values, is_own.tolist(), strict=True) if own], codes[is_own]

    def changed(self, touched: Ids, rows: Ids, values: Sequence[Scalar], size: int) -> "Column":
        """This column, now of `size` rows, with new values of the `touched` rows, ascending.

        rows: the row (E,), ascending, of each of the `values`.
        """
        if not is_repeated(rows):
            touched, rows, values = self._different(touched, rows, values)
        if not len(touched) and size <= len(self.chunks) * CHUNK:
            return self
        codes = self.dictionary.codes_of(values)
        alone = None  # the code of each touched row if none has several
        if not is_repeated(rows):
            alone = np.zeros(len(touched), np.uint32)
            alone[np.searchsorted(touched, rows)] = codes
        chunks = [*self.chunks]
        chunks += [NOTHING] * (-(-size // CHUNK) - len(chunks))
        before: list[Codes] = [codes[:0]]
        entries = [slice(first, end) for _, first, end in starts_of(rows, size)]
        for index, (start, first, end) in enumerate(starts_of(touched, size)):
            if first == end:
                continue
            chunk, length = chunks[index], min(CHUNK, size - start)
            some = touched[first:end] - start
            if chunk.rows is None and alone is not None:
                chunks[index], replaced = chunk.put(some, alone[first:end], length)
            else:
                own = entries[index]
                given = (rows[own] - start).astype(np.uint32)
                chunks[index], replaced = chunk.changed(some, given, codes[own], length)
            before.append(replaced)
        later = Column(self.dictionary, chunks)
        if "counts" in self.__dict__ and later.codes <= _MAX_COUNTS:
            later.counts = later._count([codes]) - later._count([np.concatenate(before)])
            later.counts[: self.codes] += self.counts
        return later

    def _different(
        self, touched: Ids, rows: Ids, values: Sequence[Scalar]
    ) -> tuple[Ids, Ids, Sequence[Scalar]]:
        """The arguments of `changed` without rows that stay as they are: most attributes of a
        changed item do.
        """
        before = np.zeros(len(touched), np.uint32)  # 0 also after the last chunk
        parts = [chunk.single(own) for chunk, own in self._chunks_of(touched)]
        known = np.concatenate([before[:0], *parts])
        before[: len(known)] = known
        given, is_same = np.searchsorted(touched, rows), before == 0
        is_same[given] = self.dictionary.have(before[given], values)
        kept = np.flatnonzero(~is_same[given])
        return touched[~is_same], rows[kept], [values[index] for index in kept.tolist()]

    def merged(self, *, at_least: int = 1) -> "Column":
        """This column with all values sorted, without unused ones, if that many are not."""
        base = self.dictionary.values
        if self.codes - len(base) < at_least:
            return self
        order = self.in_order()
        order = order[self.counts[order - 1] > 0]
        is_new = order > len(base)
        new = packed([self.dictionary.value(code) for code in order[is_new].tolist()], self.type)
        values = merged_values(base, order[~is_new] - 1, new, is_new, self.type)
        table = np.zeros(self.codes + 1, np.min_scalar_type(len(order)))
        table[order] = np.arange(1, len(order) + 1)
        chunks = [Chunk(table[chunk.codes], chunk.rows) for chunk in self.chunks]
        found = Column(Dictionary(self.type, values), chunks)
        found.counts = self.counts[order - 1]
        return found


@dataclass(frozen=True)
class Columns:
    """The attributes of all items of one state.

    space: the name of the file of vectors whose rows these are; None in an earlier version.
    row_ids: the item id of each row.
    seq: the write after which these are the attributes.
    size: number of rows.
    changes: number of changed items since the checkpoint.
    """

    space: str | None
    row_ids: RowIds
    seq: int
    size: int
    columns: Mapping[str, Column]
    changes: int = 0

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.size // CHUNK)

    def get(self, name: str) -> Column | None:
        """The column of an attribute; None if no item has it."""
        return self.columns.get(name)

    def changed(
        self,
        ids: Ids,
        attributes: Sequence[Attributes],
        types: Mapping[str, AttributeType],
        seq: int,
        size: int,
    ) -> "Columns":
        """These columns after the write `seq`, which has `size` rows.

        ids: the items (N,) that were added or changed since, ascending.
        attributes: all of their attributes now.
        types: the types of all attributes. A column of another type is dropped: an attribute that
            no item has may change its type.
        """
        known = {name: own for name, own in self.columns.items() if types.get(name) == own.type}
        touched = self.row_ids.rows_of(ids)
        if touched.min(initial=0) < 0:
            raise GalleryCorruptError(f"Item {ids[touched < 0][0]} has no vector. {RESTORE}")
        for name in {*known, *(name for own in attributes for name in own)} if len(ids) else ():
            before = known.get(name) or Column(Dictionary(types[name], packed([], types[name])), [])
            rows, values = _entries(touched, [own.get(name) for own in attributes])
            column = before.changed(touched, rows, values, size)
            most = max(MIN_LATER, len(column.dictionary.values) // 16)
            known[name] = column.merged(at_least=most)
        return replace(self, seq=seq, size=size, columns=known, changes=self.changes + len(ids))

    def moved(self, space: str, row_ids: RowIds, size: int) -> "Columns":
        """These columns in the rows of another file of vectors, without items that it omits."""
        target = row_ids.rows_of(self.row_ids.of(np.arange(self.size)))
        columns = {}
        for name, column in self.columns.items():
            rows, codes = column.entries()
            found = target[rows]
            is_kept = found >= 0
            left = Column.of(column.dictionary, found[is_kept], codes[is_kept], size)
            columns[name] = left.merged(at_least=0)  # erases the values of erased items
        return replace(self, space=space, row_ids=row_ids, size=size, columns=columns)

    @classmethod
    def open(cls, path: Path, space: str, row_ids: RowIds) -> "Columns":
        """Open and memory-map a checkpoint. Raises: FileNotFoundError, GalleryCorruptError."""
        try:
            data: NDArray[np.uint8] = np.asarray(np.memmap(path, np.uint8, "r"))
            length, crc = data[-16:].view("<u8").tolist()
            text, arrays = data[-16 - length : -16].tobytes(), data[: -16 - length]
            directory = json.loads(text)
            is_whole = zlib.crc32(text) == crc
            if len(data) < _VERIFIED_BELOW:
                is_whole &= zlib.crc32(arrays.data) == directory["crc"]
            if not is_whole:
                raise ValueError("it does not fit its checksum")
            seq, size, listed = directory["seq"], directory["size"], directory["columns"]
            columns = {name: _read(arrays, entry, size) for name, entry in listed.items()}
        except FileNotFoundError:
            raise
        except (OSError, KeyError, ValueError, TypeError, IndexError) as error:
            raise GalleryCorruptError(f"{path} is damaged: {error}. {REBUILD}") from error
        return cls(space, row_ids, seq, size, columns)

    def write(self, folder: Path) -> None:
        """Write a checkpoint into `folder`, which replaces the last one. Raises: OSError."""
        with staged(folder) as stage:
            new = stage / "columns"
            with new.open("xb") as file:
                directory: dict[str, Any] = {"seq": self.seq, "size": self.size, "columns": {}}
                crc = 0

                def append(data: bytes | memoryview) -> None:
                    nonlocal crc
                    crc = zlib.crc32(data, crc)
                    file.write(data)

                for name, column in self.columns.items():
                    entry: dict[str, Any] = {"kind": column.type, "arrays": {}}
                    for key, array in _arrays(column, self.size).items():
                        append(bytes(-file.tell() % _ALIGNED))
                        entry["arrays"][key] = array.dtype.str, file.tell(), len(array)
                        append(np.ascontiguousarray(array).data.cast("B"))
                    directory["columns"][name] = entry
                text = json.dumps({**directory, "crc": crc}).encode()
                file.write(text)
                file.write(len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(8, "little"))
            new.chmod(0o644)  # another user may serve the gallery
            sync(new, "columns")
            rename(new, folder / f"{self.space}.bin", "columns")


def _arrays(column: Column, size: int) -> dict[str, NDArray[Any]]:
    """The arrays of a column with sorted values on disk. `rows` are omitted if it is dense."""
    has_unused = not column.counts.all()  # such as values of erased items
    column = column.merged(at_least=0 if has_unused else 1)
    rows, codes = column.entries()
    whole = Chunk.of(rows.astype(np.uint32), codes, size)
    found = {**to_arrays(column.dictionary.values), "counts": column.counts, "codes": whole.codes}
    return found if whole.rows is None else {**found, "rows": whole.rows}


def _read(data: NDArray[np.uint8], entry: Mapping[str, Any], size: int) -> Column:
    """The column of `size` rows of an entry of a directory. Raises: KeyError, ValueError."""
    arrays = {name: _array(data, *own) for name, own in entry["arrays"].items()}
    rows, counts, codes = arrays.pop("rows", None), arrays.pop("counts"), arrays.pop("codes")
    dictionary = Dictionary(entry["kind"], from_arrays(arrays))
    is_known = not len(codes) or int(codes.max()) <= len(dictionary)
    fit = len(codes) == (size if rows is None else len(rows)) and is_known
    if rows is not None and len(rows):
        fit &= int(rows[-1]) < size
    if not fit or len(counts) != len(dictionary):
        raise ValueError("its arrays do not fit together")
    if rows is not None:
        column = Column.of(dictionary, rows, codes, size)
    else:
        chunks = [Chunk(codes[start : start + CHUNK]) for start in range(0, size, CHUNK)]
        column = Column(dictionary, chunks)
    column.counts = counts.astype(np.int64)
    return column


def _array(data: NDArray[np.uint8], dtype: str, start: int, count: int) -> NDArray[Any]:
    end = start + count * np.dtype(dtype).itemsize
    if not 0 <= start <= end <= len(data):
        raise ValueError(f"an array ends at {end:,} of {len(data):,} bytes")
    return data[start:end].view(dtype)


def _entries(rows: Ids, values: Sequence[AttributeValue | None]) -> tuple[Ids, Sequence[Scalar]]:
    """The row and the value of each entry (E,) of rows (N,) with a value, several or None."""
    if {type(None), tuple}.isdisjoint(map(type, values)):
        return rows, cast(Sequence[Scalar], values)
    found_rows: list[int] = []
    found: list[Scalar] = []
    for row, value in zip(rows.tolist(), values, strict=True):
        different = dict.fromkeys(values_in(value))
        found_rows += [row] * len(different)
        found += different
    return np.array(found_rows, np.int64), found
