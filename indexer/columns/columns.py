"""The attributes of a segment as columns, for filters, facets, groups and sorting.

A column has the distinct values of one attribute, ascending, and for each row (position of the
segment) the code of its value. At 10 million rows, a column with few values takes 10 MB, and a
condition on it about 10 ms.

The memory-mapped file contains arrays, aligned to 64 bytes, then a directory in JSON, then the
length of the directory in 8 bytes.
"""

import json
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.durable import FileFacts, HashedFile
from kinlens.embedder.errors import GalleryCorruptError
from kinlens.indexer.attributes import Schema
from kinlens.indexer.bits import Bits, count_of, empty_bits, packed_bits, positions_in
from kinlens.indexer.columns.values import Values, from_arrays, joined, packed, spliced, to_arrays
from kinlens.indexer.types import Ids
from kinlens.values import AttributeType, AttributeValue, Scalar

COLUMN_BYTES = 40
"""Bytes per item with five attributes."""

_ALIGNED = 64
_SPARSE = 8  # a column is sparse if fewer than one row in 8 has the attribute
_LOOKUP_RATIO = 16  # fewer than one row in 16 are looked up one by one
_MAX_COMPARED_SPANS = 4  # up to this number of spans, comparing is faster than a lookup table
CHUNK = 2**18  # rows or codes processed at a time, so that intermediate arrays stay in the cache
MERGED_AT_ONCE = 500_000  # values that are Python objects at the same time during a merge
_CURE = "Rebuild it from the catalogue: kinlens-index compact GALLERY --rebuild."

Attributes = Mapping[str, AttributeValue]
Codes = NDArray[np.unsignedinteger[Any]]
Span = tuple[int, int]
"""A range of codes: the first, and the one after the last."""


class Chosen:
    """A selection of rows of a segment of `size` rows."""

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


@dataclass(frozen=True, slots=True)
class Column:
    """One attribute of a segment.

    values: the distinct values (V,), ascending.
    counts: the number of rows (V,) with each value.
    present: the number of rows with any value.
    codes: index of a value + 1; 0 means no value. A dense column has one code per row.
    rows: None for a dense column. A sparse column has the row of each code, ascending; a row with
        several values occurs once for each.
    """

    type: AttributeType
    values: Values
    counts: NDArray[np.integer[Any]]
    present: int
    codes: Codes
    rows: NDArray[np.uint32] | None

    def having(self, spans: Sequence[Span], size: int, *, others: bool = False) -> Bits:
        """Bitmap of the rows with a value in one of these spans of codes.

        others: rows with a value outside the spans instead; in a dense column also rows without a
            value.
        """
        find = _finder(spans, len(self.values), others)
        if self.rows is None:
            parts = [packed_bits(find(codes)) for (codes,) in _parts(self.codes)]
            return np.concatenate([np.empty(0, np.uint8), *parts])
        flags = np.zeros(size, np.bool_)
        for codes, rows in _parts(self.codes, self.rows):
            # Indexing with a boolean mask takes three times as long.
            flags[rows.take(np.flatnonzero(find(codes)))] = True
        return packed_bits(flags)

    def counted(self, chosen: Chosen) -> tuple[NDArray[np.int64], int]:
        """The number of chosen rows with each value (V,), and with any value."""
        if self.rows is None:
            if _LOOKUP_RATIO * chosen.count < chosen.size or len(self.values) > CHUNK:
                found = self._counts([self.codes.take(chosen.rows)])
            else:  # set the codes of all other rows to 0
                parts = (codes * flags for codes, flags in _parts(self.codes, chosen.flags))
                found = self._counts(parts)
            return found[1:], int(found[1:].sum())
        if _LOOKUP_RATIO * chosen.count < len(self.rows):
            starts, ends = self._ranges(chosen.rows)
            lengths = ends - starts
            shifts = starts - (np.cumsum(lengths) - lengths)
            positions = np.repeat(shifts, lengths) + np.arange(int(lengths.sum()))
            return self._counts([self.codes.take(positions)])[1:], int(np.count_nonzero(lengths))
        present, last = 0, np.uint32(2**32 - 1)
        sparse = []
        for codes, rows in _parts(self.codes, self.rows):
            is_chosen = chosen.flags.take(rows)
            present += int(np.count_nonzero(is_chosen & (np.diff(rows, prepend=last) != 0)))
            sparse.append(codes * is_chosen)
            last = rows[-1]
        return self._counts(sparse)[1:], present

    def _counts(self, parts: Iterable[Codes]) -> NDArray[np.int64]:
        """How often each code (V + 1,) occurs in the parts."""
        found = np.zeros(len(self.values) + 1, np.int64)
        for part in parts:
            if part.dtype == np.uint8 and len(part) == CHUNK:
                # Counting pairs of codes takes half as long.
                pairs = np.bincount(part.view(np.uint16), minlength=2**16).reshape(2**8, 2**8)
                counts = np.trim_zeros(pairs.sum(axis=0) + pairs.sum(axis=1), "b")
            else:
                counts = np.bincount(part)
            if len(counts) > len(found):
                raise GalleryCorruptError(f"A column of the index has unknown values. {_CURE}")
            found[: len(counts)] += counts
        return found

    def _ranges(self, rows: Ids) -> tuple[Ids, Ids]:
        """The start and end of the codes of each of these rows (N,)."""
        if self.rows is None:
            return rows, rows + 1
        # Convert these rows, or searchsorted would convert all of `self.rows`.
        own = rows.astype(self.rows.dtype)
        return np.searchsorted(self.rows, own, "left"), np.searchsorted(self.rows, own, "right")

    def first(
        self, chosen: Chosen, count: int, descending: bool
    ) -> tuple[Ids, NDArray[np.int64], Bits, int]:
        """At least `count` chosen rows with the lowest values, or the highest if `descending`.

        Many rows may share the last code that is needed, so these are returned as a bitmap. Returns
        the rows with better codes, their codes, the bitmap and the last code; 0 if it is not
        needed.
        """
        size, end = chosen.size, len(self.values) + 1
        counts = self.counts if chosen.count == size else self.counted(chosen)[0]
        cumulative = np.cumsum(counts[::-1] if descending else counts, dtype=np.int64)
        wanted = count
        while True:
            step = int(np.searchsorted(cumulative, wanted))  # number of better codes
            code = 0 if step == len(cumulative) else (end - 1 - step if descending else 1 + step)
            span = (end - step, end) if descending else (1, 1 + step)
            better = self.having([span], size) & chosen.bits
            found = count_of(better, size)
            equal = empty_bits(size)
            if code:
                equal = self.having([(code, code + 1)], size) & chosen.bits & ~better
            if not code or found + count_of(equal, size) >= count:
                rows = positions_in(better, size)
                return rows, self._ends_at(rows, descending), equal, code
            wanted *= 2  # rows with several values are counted more than once

    def _ends_at(self, rows: Ids, highest: bool) -> NDArray[np.int64]:
        """The lowest or highest code of each of these rows (N,); each must have a value."""
        starts, ends = self._ranges(rows)
        found = self.codes[starts].astype(np.int64)
        chosen = np.maximum if highest else np.minimum
        for step in range(1, int((ends - starts).max(initial=0))):
            has_step = starts + step < ends
            found[has_step] = chosen(found[has_step], self.codes[starts[has_step] + step])
        return found

    def values_at(self, rows: Ids) -> list[list[Scalar]]:
        """The values of each of these rows (N,)."""
        starts, ends = self._ranges(rows)
        return [
            [self.values[code - 1] for code in self.codes[start:end].tolist() if code]
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]


class Columns:
    """The columns of a segment of `size` rows, by attribute. Loaded lazily. Thread safe."""

    def __init__(self, size: int, columns: Mapping[str, Column]) -> None:
        self.size = size
        self._columns = dict(columns)

    @classmethod
    def open(cls, path: Path, size: int) -> "Columns":
        """Open and memory-map the file of a segment. Raises: GalleryCorruptError."""
        return _Mapped(path, size)

    @property
    def names(self) -> Sequence[str]:
        """The attributes that some row has."""
        return [*self._columns]

    def get(self, name: str) -> Column | None:
        """The column of an attribute; None if no row has it."""
        return self._columns.get(name)

    def of_types(self, types: Schema) -> "Columns":
        """These columns without attributes that have other types by now; no item has their values.

        types: the types of the attributes.
        """
        columns = {name: column for name in self.names if (column := self.get(name)) is not None}
        if all(types.get(name, column.type) == column.type for name, column in columns.items()):
            return self
        fit = {name: column for name, column in columns.items() if types.get(name) == column.type}
        return Columns(self.size, fit)


class _Mapped(Columns):
    def __init__(self, path: Path, size: int) -> None:
        super().__init__(size, {})
        self._path = path
        self._lock = threading.Lock()
        try:
            self._data: NDArray[np.uint8] = np.asarray(np.memmap(path, np.uint8, "r"))
            length = int(self._data[-8:].view("<u8")[0])
            directory = json.loads(self._data[-8 - length : -8].tobytes())
            self._directory: dict[str, dict[str, Any]] = dict(directory)
        except (OSError, ValueError, TypeError) as error:
            raise self._damaged(error) from error

    @property
    def names(self) -> Sequence[str]:
        return [*self._directory]

    def get(self, name: str) -> Column | None:
        with self._lock:
            if name not in self._columns and name in self._directory:
                self._columns[name] = self._read(self._directory[name])
            return self._columns.get(name)

    def _read(self, entry: Mapping[str, Any]) -> Column:
        try:
            arrays = {name: self._array(*own) for name, own in entry["arrays"].items()}
            rows = arrays.pop("rows", None)
            counts, codes = arrays.pop("counts"), arrays.pop("codes")
            values = from_arrays(arrays)
            column = Column(entry["kind"], values, counts, int(entry["present"]), codes, rows)
        except (KeyError, ValueError, TypeError) as error:
            raise self._damaged(error) from error
        fit = len(codes) == (self.size if rows is None else len(rows))
        if rows is not None and len(rows):
            fit &= int(rows[-1]) < self.size
        if not fit or len(counts) != len(values):
            raise self._damaged("its arrays do not fit together")
        return column

    def _array(self, dtype: str, start: int, count: int) -> NDArray[Any]:
        end = start + count * np.dtype(dtype).itemsize
        if not 0 <= start <= end <= len(self._data):
            raise ValueError(f"an array ends at {end:,} of {len(self._data):,} bytes")
        return self._data[start:end].view(dtype)

    def _damaged(self, reason: object) -> GalleryCorruptError:
        return GalleryCorruptError(f"{self._path} is damaged: {reason}. {_CURE}")


def write_columns(path: Path, columns: Iterable[tuple[str, Column]]) -> FileFacts:
    """Write columns, one at a time, into the new file `path`, unsynced. Raises: OSError."""
    directory: dict[str, Any] = {}
    with HashedFile(path) as file:
        for name, column in columns:
            own = {"codes": column.codes, "counts": column.counts, **to_arrays(column.values)}
            if column.rows is not None:
                own["rows"] = column.rows
            positions = {key: _append(file, array) for key, array in own.items()}
            directory[name] = {"kind": column.type, "present": column.present, "arrays": positions}
        text = json.dumps(directory).encode()
        file.write(text)
        file.write(len(text).to_bytes(8, "little"))
    return file.facts


def _append(file: HashedFile, array: NDArray[Any]) -> tuple[str, int, int]:
    file.write(bytes(-file.facts.bytes % _ALIGNED))
    start = file.facts.bytes
    file.write(np.ascontiguousarray(array))
    return array.dtype.str, start, len(array)


class ColumnsBuilder:
    """Builds the columns of a segment of `size` rows from batches of attributes.

    Stores the distinct values of each batch and a code for each value of a row: about 40 bytes per
    item with five attributes, and 30 more for each unique text.
    """

    def __init__(self, size: int, types: Mapping[str, AttributeType]) -> None:
        self._size = size
        self._types = types
        self._batches: dict[str, list[_Batch]] = {}

    def add(self, rows: Sequence[int], attributes: Sequence[Attributes]) -> None:
        """Add the attributes of these rows. Each row may be added only once."""
        found: dict[str, tuple[list[int], list[Scalar]]] = {}
        for row, own in zip(rows, attributes, strict=True):
            for name, value in own.items():
                if name not in found:
                    found[name] = [], []
                if isinstance(value, tuple):
                    different = dict.fromkeys(value)
                    found[name][0].extend([row] * len(different))
                    found[name][1].extend(different)
                else:
                    found[name][0].append(row)
                    found[name][1].append(value)
        for name, (positions, values) in found.items():
            batch = _Batch.of(positions, values, self._types[name])
            self._batches.setdefault(name, []).append(batch)

    def columns(
        self, previous: Columns | None = None, moved: Ids | None = None
    ) -> Iterator[tuple[str, Column]]:
        """Yield the columns by name, built one at a time. Consumes the builder.

        previous: existing columns whose rows are included.
        moved: the new row of each row of `previous`; -1 to omit it, as required for rows that were
            added to the builder.
        """
        names = {*self._batches} if previous is None else {*self._batches, *previous.names}
        for name in sorted(names & self._types.keys()):  # a name may have been deleted
            batches, type_ = self._batches.pop(name, []), self._types[name]
            old = None if previous is None else previous.get(name)
            if old is not None and old.type != type_:  # deleted, then added with another type
                old = None
            if old is None and not batches:
                continue
            if old is None or moved is None:
                yield name, _column(batches, type_, self._size)
            elif (column := _updated(old, moved, batches, self._size)).present:
                yield name, column


@dataclass(frozen=True, slots=True)
class _Batch:
    """The values of some rows; `codes` are indices into `values`."""

    rows: NDArray[np.uint32]
    codes: Codes
    values: Values

    @classmethod
    def of(cls, rows: Sequence[int], values: Sequence[Any], type_: AttributeType) -> "_Batch":
        different = sorted(set(values))
        positions = dict(zip(different, range(len(different)), strict=True))
        codes = np.fromiter(map(positions.__getitem__, values), np.uint32, len(values))
        codes = codes.astype(np.min_scalar_type(len(different)))
        return cls(np.array(rows, np.uint32), codes, packed(different, type_))


def _column(batches: Sequence[_Batch], type_: AttributeType, size: int) -> Column:
    return _from_entries(type_, *_entries(batches, type_), size)


def _entries(
    batches: Sequence[_Batch], type_: AttributeType
) -> tuple[Values, NDArray[np.uint32], Codes]:
    """The distinct values of all batches, and the row and code of each entry (E,)."""
    values, positions = _merged([batch.values for batch in batches], type_)
    dtype = np.min_scalar_type(len(values))
    none = np.empty(0, np.uint32)
    rows = np.concatenate([none, *(batch.rows for batch in batches)])
    codes = [
        (own.astype(np.uint32) + 1)[batch.codes].astype(dtype)
        for own, batch in zip(positions, batches, strict=True)
    ]
    return values, rows, np.concatenate([none.astype(dtype), *codes])


def _updated(old: Column, moved: Ids, batches: Sequence[_Batch], size: int) -> Column:
    """Merge the moved rows of an old column with new rows.

    Does not iterate over the old values, since a column may have millions.
    """
    rows, codes = old.rows, old.codes
    if rows is None:
        rows = np.flatnonzero(codes).astype(np.uint32)
        codes = codes[rows]
    found = moved[rows]
    is_kept = found >= 0
    if not is_kept.all():
        found, codes = found[is_kept], codes[is_kept]
    used = np.bincount(codes, minlength=len(old.values) + 1)[1:] > 0
    new, new_rows, new_codes = _entries(batches, old.type)
    positions = np.array([bisect_left(old.values, value) for value in new], np.int64)
    is_known = np.array(
        [
            position < len(old.values) and old.values[position] == value
            for position, value in zip(positions.tolist(), new, strict=True)
        ],
        np.bool_,
    )
    used[positions[is_known]] = True
    inserted = positions[~is_known]
    others = packed(
        [v for v, known in zip(new, is_known.tolist(), strict=True) if not known], old.type
    )
    values = spliced(old.values, used, inserted, others, old.type)
    dtype = np.min_scalar_type(len(values))
    # New index of a value: number of kept values and of inserted values before it.
    kept = np.concatenate([[0], np.cumsum(used)])
    of_old = kept[:-1] + np.searchsorted(inserted, np.arange(len(used)), "right")
    of_new = np.empty(len(new), np.int64)
    of_new[~is_known] = kept[inserted] + np.arange(len(inserted))
    of_new[is_known] = of_old[positions[is_known]]
    all_codes = np.concatenate(
        [
            np.concatenate([[0], of_old + 1]).astype(dtype)[codes],
            np.concatenate([[0], of_new + 1]).astype(dtype)[new_codes],
        ]
    )
    return _from_entries(
        old.type, values, np.concatenate([found.astype(np.uint32), new_rows]), all_codes, size
    )


def _from_entries(
    type_: AttributeType, values: Values, rows: NDArray[np.uint32], codes: Codes, size: int
) -> Column:
    """Build a column from entries (E,) with a row and a code each."""
    counts = np.bincount(codes, minlength=len(values) + 1)[1:]
    counts = counts.astype(np.min_scalar_type(int(counts.max(initial=0))))
    flags = np.zeros(size, np.bool_)
    flags[rows] = True
    present = int(np.count_nonzero(flags))
    if present < len(rows) or _SPARSE * len(rows) < size:
        order = np.argsort(rows, kind="stable")
        return Column(type_, values, counts, present, codes[order], rows[order])
    dense = np.zeros(size, codes.dtype)
    dense[rows] = codes
    return Column(type_, values, counts, len(rows), dense, None)


def _merged(
    parts: Sequence[Values], type_: AttributeType
) -> tuple[Values, list[NDArray[np.uint32]]]:
    """The distinct values of all parts, ascending, and the new index of each value of each part.

    Merges a range of values at a time, to limit the number of Python objects.
    """
    positions: list[Codes] = [np.empty(len(part), np.uint32) for part in parts]
    merged: list[Values] = []
    starts, count = [0] * len(parts), 0
    for pivot in (*_pivots(parts), None):
        ends = [
            len(part) if pivot is None else bisect_left(part, pivot, start)
            for part, start in zip(parts, starts, strict=True)
        ]
        some = [part[start:end] for part, start, end in zip(parts, starts, ends, strict=True)]
        different: list[Any] = sorted({value for own in some for value in own})
        index_of = dict(zip(different, range(count, count + len(different)), strict=True))
        for own, position, start, end in zip(some, positions, starts, ends, strict=True):
            position[start:end] = np.fromiter(map(index_of.__getitem__, own), np.uint32, len(own))
        merged.append(packed(different, type_))
        starts, count = ends, count + len(different)
    return joined(merged, type_), positions


def _pivots(parts: Sequence[Values]) -> Sequence[Any]:
    """Ascending values that split the parts into ranges of about `MERGED_AT_ONCE` values."""
    pieces = -(-sum(map(len, parts)) // MERGED_AT_ONCE)
    if pieces <= 1:
        return []
    drawn: list[Any] = sorted(
        part[index]
        for part in parts
        for index in np.linspace(0, len(part) - 1, min(len(part), 4 * pieces)).astype(int).tolist()
    )
    return sorted({drawn[n * len(drawn) // pieces] for n in range(1, pieces)})


def _parts(*arrays: NDArray[Any]) -> Iterator[tuple[NDArray[Any], ...]]:
    """Iterate over arrays of equal length in chunks of `CHUNK` entries."""
    for start in range(0, len(arrays[0]), CHUNK):
        yield tuple(array[start : start + CHUNK] for array in arrays)


def _finder(
    spans: Sequence[Span], values: int, others: bool
) -> Callable[[Codes], NDArray[np.bool_]]:
    """A function that returns which codes are in one of the spans; with `others`, in none."""
    spans = [(first, end) for first, end in spans if first < end]
    if len(spans) > _MAX_COMPARED_SPANS:
        table = np.full(values + 1, others, np.bool_)
        for first, end in spans:
            table[first:end] = not others
        return lambda codes: table.take(codes, mode="clip")  # takes half as long as mode="raise"

    def found(codes: Codes) -> NDArray[np.bool_]:
        flags = np.zeros(len(codes), np.bool_)
        for first, end in spans:
            # A code below `first` wraps around to a large number, so one comparison suffices.
            flags |= codes - codes.dtype.type(first) < end - first
        return ~flags if others else flags

    return found
