"""Chunks of a column: the codes of 65,536 rows, and the search for codes in them."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinlens.indexer.bits import Bits, numbers_in, packed_bits
from kinlens.indexer.types import Ids

CHUNK = 2**16
"""Rows of a chunk: small enough to copy at each change, and to stay in the cache of the CPU."""

SEVERAL = 2**32 - 1
"""In place of a code, of a row with several values."""

_SPARSE = 8  # a chunk is sparse if fewer than one row in 8 has the attribute
_MAX_COMPARED_SPANS = 4  # up to this number of spans, comparing is faster than a lookup table

Codes = NDArray[np.unsignedinteger[Any]]
Find = Callable[[Codes], NDArray[np.bool_]]
Span = tuple[int, int]
"""A range of codes: the first, and the one after the last."""


class Chunk:
    """The codes of `CHUNK` rows, of which the last may be omitted if they have no value.

    rows: None for a dense chunk, which has one code per row. A sparse chunk has the row of each
        code, counted within the chunk, ascending; a row with several values occurs once for each.
    """

    def __init__(self, codes: Codes, rows: NDArray[np.uint32] | None = None) -> None:
        self.codes = codes
        self.rows = rows

    @classmethod
    def of(cls, rows: NDArray[np.uint32], codes: Codes, size: int) -> "Chunk":
        """A chunk of `size` rows from entries (E,) with a row and a code each."""
        if not len(rows):
            return NOTHING
        codes = codes.astype(np.min_scalar_type(int(codes.max())))
        if _SPARSE * len(rows) < size or is_repeated(rows):
            return cls(codes, rows)
        dense = np.zeros(size, codes.dtype)
        dense[rows] = codes
        return cls(dense)

    @cached_property
    def present(self) -> int:
        """Number of rows with a value."""
        if self.rows is None:
            return int(np.count_nonzero(self.codes))
        return int(np.count_nonzero(np.diff(self.rows, prepend=np.uint32(2**32 - 1))))

    def entries(self) -> tuple[NDArray[np.uint32], Codes]:
        """The row and the code of each value (E,)."""
        if self.rows is not None:
            return self.rows, self.codes
        rows = np.flatnonzero(self.codes).astype(np.uint32)
        return rows, self.codes[rows]

    def having(self, find: Find) -> Bits:
        """Bitmap of the rows with a code that `find` accepts, at most `CHUNK` bits."""
        if self.rows is None:
            return packed_bits(find(self.codes))
        flags = np.zeros(CHUNK, np.bool_)
        # Indexing with a boolean mask takes three times as long.
        flags[self.rows.take(np.flatnonzero(find(self.codes)))] = True
        return packed_bits(flags)

    def at(self, rows: Ids) -> tuple[Codes, int]:
        """The codes of these rows (N,), and the number of them that have a value."""
        starts, ends = self.ranges(rows)
        lengths = ends - starts
        codes = self.codes.take(numbers_in(starts, lengths))
        return codes, int(np.count_nonzero(codes if self.rows is None else lengths))

    def among(self, flags: NDArray[np.bool_]) -> tuple[Codes, int]:
        """The codes of the rows in a mask of this chunk, and the number of rows with a value.

        The codes of all other rows are 0.
        """
        if self.rows is None:
            size = min(len(flags), len(self.codes))
            codes = self.codes[:size] * flags[:size]
            return codes, int(np.count_nonzero(codes))
        is_chosen = flags.take(self.rows)
        is_first = np.diff(self.rows, prepend=np.uint32(2**32 - 1)) != 0
        return self.codes * is_chosen, int(np.count_nonzero(is_chosen & is_first))

    def ranges(self, rows: Ids) -> tuple[Ids, Ids]:
        """The start and end of the codes of each of these rows (N,)."""
        if self.rows is None:
            starts = np.minimum(rows, len(self.codes))
            return starts, np.minimum(rows + 1, len(self.codes))
        # Convert these rows, or searchsorted would convert all of `self.rows`.
        own = rows.astype(self.rows.dtype)
        return np.searchsorted(self.rows, own, "left"), np.searchsorted(self.rows, own, "right")

    def single(self, rows: Ids) -> Codes:
        """The code of each of these rows (N,), ascending; 0 for no value, `SEVERAL` for several."""
        if self.rows is None and rows[-1] < len(self.codes):
            return self.codes[rows]
        starts, ends = self.ranges(rows)
        found = np.where(starts < ends, np.uint32(SEVERAL), np.uint32(0))
        is_single = ends - starts == 1
        found[is_single] = self.codes[starts[is_single]]
        return found

    def put(self, rows: Ids, codes: Codes, size: int) -> tuple["Chunk", Codes]:
        """This dense chunk, now of `size` rows, with new codes of some rows (R,), 0 for no value.

        The second result are the earlier codes.
        """
        known = self.codes
        if len(known) < size:
            known = np.concatenate([known, np.zeros(size - len(known), known.dtype)])
        before = known[rows]
        known = known.astype(np.promote_types(known.dtype, np.min_scalar_type(int(codes.max()))))
        known[rows] = codes
        return Chunk(known), before

    def changed(
        self, touched: Ids, rows: NDArray[np.uint32], codes: Codes, size: int
    ) -> tuple["Chunk", Codes]:
        """As `put`, for all chunks: the `touched` rows (T,) have these entries (E,), ascending."""
        own_rows, own_codes = self.entries()
        flags = np.zeros(CHUNK, np.bool_)
        flags[touched] = True
        is_touched = flags[own_rows]
        before = own_codes[is_touched]
        if np.array_equal(own_rows[is_touched], rows) and np.array_equal(before, codes):
            return self, before
        all_rows = np.concatenate([own_rows[~is_touched], rows])
        all_codes = np.concatenate([own_codes[~is_touched], codes])
        order = np.argsort(all_rows, kind="stable")
        return Chunk.of(all_rows[order], all_codes[order], size), before


NOTHING = Chunk(np.empty(0, np.uint8), np.empty(0, np.uint32))
"""The chunk without values."""


def is_repeated(rows: NDArray[np.integer]) -> bool:
    """Whether one of these rows, ascending, occurs more than once."""
    return bool((rows[1:] == rows[:-1]).any())


def starts_of(rows: NDArray[np.integer], size: int) -> Iterator[tuple[int, int, int]]:
    """The first row of each chunk, and the start and end of its rows among `rows`, ascending."""
    starts = np.arange(0, size + CHUNK, CHUNK)
    ends = np.searchsorted(rows, starts.astype(rows.dtype)).tolist()
    yield from zip(starts.tolist(), ends[:-1], ends[1:], strict=False)


def finder(spans: Sequence[Span], others: Ids, codes: int) -> Find:
    """A function that returns which codes are in one of the spans or in `others` (N,).

    codes: number of codes of the column.
    """
    spans = [(first, end) for first, end in spans if first < end]
    if len(others) or len(spans) > _MAX_COMPARED_SPANS:
        table = np.zeros(codes + 1, np.bool_)
        table[others] = True
        for first, end in spans:
            table[first:end] = True
        return lambda codes: table.take(codes, mode="clip")  # takes half as long as mode="raise"

    def found(codes: Codes) -> NDArray[np.bool_]:
        most = np.iinfo(codes.dtype).max  # a chunk may have narrower codes than the column
        # A code below `first` wraps around to a large number, so one comparison suffices.
        flags = [
            codes - codes.dtype.type(first) < min(end, most + 1) - first
            for first, end in spans
            if first <= most
        ]
        return reduce(np.logical_or, flags) if flags else np.zeros(len(codes), np.bool_)

    return found
