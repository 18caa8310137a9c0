"""Evaluates filters on the columns of a segment."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from functools import reduce
from typing import Any

import numpy as np

from kinlens.embedder.sources.names import spellings
from kinlens.indexer.bits import Bits, empty_bits
from kinlens.indexer.columns.columns import Columns, Span
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
from kinlens.values import Scalar


def rows_matching(where: Filter, columns: Columns, checkpoint: Callable[[], None]) -> Bits:
    """Bitmap of the rows that match; the unused bits of the last byte are undefined.

    `checkpoint` is called between conditions; an exception from it cancels the evaluation.
    """
    if isinstance(where, Not):
        return ~rows_matching(where.part, columns, checkpoint)
    if isinstance(where, And):
        return reduce(
            np.bitwise_and, (rows_matching(part, columns, checkpoint) for part in where.parts)
        )
    if isinstance(where, Or):
        return _one_of(where.parts, columns, checkpoint)
    return _one_of([where], columns, checkpoint)


def _one_of(parts: Sequence[Filter], columns: Columns, checkpoint: Callable[[], None]) -> Bits:
    """The rows that match any of the parts. Conditions on one attribute share a pass over it."""
    found = empty_bits(columns.size)
    spans: dict[str, list[Span]] = {}
    for part in parts:
        if isinstance(part, Condition):
            column = columns.get(part.name)
            if column is not None:
                spans.setdefault(part.name, []).extend(_spans(part, column.values))
        else:
            found |= rows_matching(part, columns, checkpoint)
    for name, own in spans.items():
        checkpoint()
        column = columns.get(name)
        if column is not None and own:
            found |= column.having(own, columns.size)
    return found


def rows_beyond(name: str, values: Collection[Scalar], columns: Columns) -> Bits:
    """The rows that have no value, or at least one value that is not in `values`."""
    column = columns.get(name)
    if column is None:
        return ~empty_bits(columns.size)
    others = column.having(
        _spans(In(name, tuple(values)), column.values), columns.size, others=True
    )
    if column.rows is None:
        return others
    return others | ~column.having([(1, len(column.values) + 1)], columns.size)


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
