"""Which rows of a segment fit a filter, from its columns."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from functools import reduce
from typing import Any

import numpy as np

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
    """The rows that fit; an unused bit of the last byte may be anything.

    `checkpoint` is called between conditions; what it raises ends the work.
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
    """The rows that fit one of the parts. Conditions on one attribute take one pass over it."""
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
    """The rows that have another value of an attribute than these, or none."""
    column = columns.get(name)
    if column is None:
        return ~empty_bits(columns.size)
    others = column.having(
        _spans(In(name, tuple(values)), column.values), columns.size, others=True
    )
    if column.rows is None:
        return others
    return others | ~column.having([(1, len(column.values) + 1)], columns.size)


def place_of(value: Scalar, values: Sequence[Any]) -> int | None:
    """Where a value stands among ascending ones; None if it is not there."""
    place = bisect_left(values, value)
    return place if place < len(values) and values[place] == value else None


def _spans(where: Condition, values: Sequence[Any]) -> list[Span]:
    if isinstance(where, Equals | In):
        wanted = (where.value,) if isinstance(where, Equals) else where.values
        places = {place_of(value, values) for value in wanted} - {None}
        return [(place + 1, place + 2) for place in places if place is not None]
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
