"""Evaluates filters on columns."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from kinlens.embedder.sources.names import spellings
from kinlens.indexer.bits import Bits, empty_bits
from kinlens.indexer.columns.chunks import CHUNK, Chunk, Find, Span, finder
from kinlens.indexer.columns.columns import Column, Columns
from kinlens.indexer.filters.tree import (
    And,
    Condition,
    Equals,
    Exists,
    Filter,
    In,
    Not,
    Or,
    StartsWith,
)
from kinlens.indexer.types import Ids
from kinlens.values import Scalar

_Rows = Callable[[int], Bits]
"""Returns the matching rows of the chunk with an index."""


class Matcher:
    """Evaluates a filter on columns, one chunk at a time."""

    def __init__(self, where: Filter, columns: Columns) -> None:
        self._columns = columns
        self._read: dict[str, Column] = {}
        self._bits = self._compiled(where)

    def chunks(self, index: int) -> list[Chunk]:
        """The chunks with this index that `bits` reads."""
        return [column.chunk(index) for column in self._read.values()]

    def bits(self, index: int) -> Bits:
        """Bitmap (CHUNK,) of the rows of a chunk that match."""
        return self._bits(index)

    def _compiled(self, where: Filter) -> _Rows:
        if isinstance(where, Not):
            part = self._compiled(where.part)
            return lambda index: ~part(index)
        if isinstance(where, And):
            parts = [self._compiled(part) for part in where.parts]
            return lambda index: reduce(np.bitwise_and, (part(index) for part in parts))
        return self._one_of(where.parts if isinstance(where, Or) else [where])

    def _one_of(self, parts: Sequence[Filter]) -> _Rows:
        """The rows that match any part. Conditions on one attribute share a pass over it."""
        conditions: dict[str, list[Condition]] = {}
        others: list[_Rows] = []
        for part in parts:
            if isinstance(part, Condition):
                conditions.setdefault(part.name, []).append(part)
            else:
                others.append(self._compiled(part))
        for name, own in conditions.items():
            column = self._columns.get(name)
            if column is not None:
                self._read[name] = column
                others.append(_having(column, _find(own, column)))

        def found(index: int) -> Bits:
            rows = empty_bits(CHUNK)
            for other in others:
                own = other(index)
                rows[: len(own)] |= own
            return rows

        return found


def rows_matching(where: Filter, columns: Columns) -> Bits:
    """Bitmap of the rows that match; bits from `columns.size` on are undefined."""
    matcher = Matcher(where, columns)
    return joined(matcher.bits(index) for index in range(columns.chunks))


def rows_with(codes: Ids, column: Column, chunks: int) -> Bits:
    """Bitmap of the rows of this number of chunks that have one of these codes."""
    spans: list[Span] = []
    if len(codes) and int(np.ptp(codes)) + 1 == len(codes):  # comparing with a span is faster
        spans, codes = [(int(codes.min()), int(codes.max()) + 1)], codes[:0]
    return joined(map(_having(column, finder(spans, codes, column.codes)), range(chunks)))


def rows_beyond(name: str, values: Collection[Scalar], columns: Columns) -> Bits:
    """The rows that have no value, or at least one value that is not in `values`."""
    column = columns.get(name)
    if column is None:
        return ~empty_bits(CHUNK * columns.chunks)
    find = _find([In(name, tuple(values))], column)

    def beyond(index: int) -> Bits:
        chunk, rows = column.chunk(index), empty_bits(CHUNK)
        own = chunk.having(find if chunk.rows is None else lambda codes: ~find(codes))
        rows[: len(own)] = own
        return ~rows if chunk.rows is None else rows | ~chunk.having(np.ones_like)

    return joined(beyond(index) for index in range(columns.chunks))


def _having(column: Column, find: Find) -> _Rows:
    return lambda index: column.chunk(index).having(find)


def joined(parts: Iterable[Bits]) -> Bits:
    """Bitmap of all rows from those of all chunks, of which each may be shorter than a chunk."""
    listed, width = [*parts], CHUNK // 8
    found = empty_bits(CHUNK * len(listed))
    for index, part in enumerate(listed):
        found[index * width : index * width + len(part)] = part
    return found


def _find(conditions: Sequence[Condition], column: Column) -> Find:
    """Finds the codes of the values that fit any of the conditions."""
    values, codes = column.later()
    spans = [span for one in conditions for span in _spans(one, column.dictionary.values)]
    later = [codes[first - 1 : end - 1] for one in conditions for first, end in _spans(one, values)]
    return finder(spans, np.concatenate([codes[:0], *later]), column.codes)


def index_of(value: Scalar, values: Sequence[Any]) -> int | None:
    """The index of a value among ascending values; None if it is not one of them."""
    index = bisect_left(values, value)
    return index if index < len(values) and values[index] == value else None


def _spans(where: Condition, values: Sequence[Any]) -> list[Span]:
    if isinstance(where, Equals | In):
        wanted = (where.value,) if isinstance(where, Equals) else where.values
        forms = (  # galleries of earlier versions keep texts as they were given
            form
            for value in wanted
            for form in (spellings(value) if isinstance(value, str) else (value,))
        )
        indices = {index_of(form, values) for form in forms} - {None}
        return [(index + 1, index + 2) for index in indices if index is not None]
    first, end = 0, len(values)
    if isinstance(where, Exists):
        return [(1, end + 1)]
    if isinstance(where, StartsWith):
        first = bisect_left(values, where.start)
        end = bisect_left(values, True, first, key=lambda text: not text.startswith(where.start))
        return [(first + 1, end + 1)] if first < end else []
    for limit, value in where.limits:
        if limit == "at_least":
            first = bisect_left(values, value)
        elif limit == "above":
            first = bisect_right(values, value)
        elif limit == "at_most":
            end = bisect_right(values, value)
        else:
            end = bisect_left(values, value)
    return [(first + 1, end + 1)] if first < end else []
