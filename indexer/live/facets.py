"""How many of some items have which value of an attribute, from columns of codes in memory.

SQLite takes 0.3 s to group a million items by one attribute; to count the codes of those that fit
takes a millisecond. A column is read when its attribute is counted first, and carried over from
state to state: after a change only the changed items are looked at again.
"""

import math
import sys
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedder.errors import InvalidParameterError
from embedder.types import AttributeKind, AttributeValue
from indexer.catalog.read import CatalogView, State
from indexer.live.snapshot import Snapshot
from indexer.types import MAX_COUNTED_VALUES, MAX_FACETS, Facet, Ids

MAX_BINS = 20
"""Bins of a histogram, and different numbers up to which each is counted by itself."""

_MAX_BYTES = 256 * 2**20  # of all columns of a gallery that are kept
_MAX_CHANGES = 20_000  # with more of them, reading the column again is faster
_SPARSE = 16  # numbers for each item that is left, from which on most of them have gone
_LARGEST = 2**63 - 1
_VALUE_BYTES = 64  # of a number or a short text in Python, with its place in a list


@dataclass(frozen=True, slots=True)
class Column:
    """The values of one attribute, ascending, and which of them each row of a snapshot has.

    codes (R,): places in `values` from 1 on; 0 without a value. Rows of removed items do not count.
    """

    values: Sequence[Any]  # of one kind, so they have an order
    value_bytes: int
    codes: NDArray[np.int32]

    @classmethod
    def read(cls, view: CatalogView, snapshot: Snapshot, name: str) -> "Column":
        """That of attribute `name` in `snapshot`, which is the state of `view`."""
        values, counts, ids = view.values_of(name)
        places = np.repeat(np.arange(1, len(values) + 1, dtype=np.int32), counts)
        row_ids = snapshot.row_ids
        end = int(max(ids.max(initial=0), row_ids.max(initial=0))) + 1
        if end <= _SPARSE * len(row_ids):  # twenty times as fast as to look for each row
            by_number = np.zeros(end, np.int32)
            by_number[ids] = places
            return cls(values, _bytes_of(values), by_number[row_ids])
        codes = np.zeros(len(row_ids), np.int32)
        codes[snapshot.rows_of(ids)] = places
        return cls(values, _bytes_of(values), codes)

    @property
    def bytes(self) -> int:
        """About what it takes in memory."""
        return self.codes.nbytes + self.value_bytes

    def changed(self, rows: Ids, values: Sequence[Any], row_count: int) -> "Column":
        """With these values in these rows; with more rows, if there are more by now."""
        known, codes = self.values, np.zeros(row_count, np.int32)
        codes[: len(self.codes)] = self.codes
        new = sorted({v for v in values if v is not None and not _is_in(known, v)})
        if new:
            old = np.arange(len(known))
            moved = np.searchsorted([bisect_left(known, v) for v in new], old, "right")
            codes = np.concatenate([[0], 1 + old + moved]).astype(np.int32)[codes]
            known = sorted([*known, *new])
        codes[rows] = [0 if v is None else 1 + bisect_left(known, v) for v in values]
        return Column(known, self.value_bytes + _bytes_of(new), codes)


class Columns:
    """Thread safe; holds the columns that were used last, all of one state."""

    def __init__(self) -> None:
        self._state: State | None = None
        self._columns: OrderedDict[str, Column] = OrderedDict()
        self._lock = threading.Lock()

    def at(
        self,
        view: CatalogView,
        snapshot: Snapshot,
        names: Sequence[str],
        checkpoint: Callable[[], None],
    ) -> list[Column] | None:
        """The column of each attribute in `snapshot`, which is the state of `view`.

        None if others have counted in a later state, which this transaction does not see.
        """
        with self._lock:
            if self._state is not None and snapshot.state.is_before(self._state):
                return None
            self._advance(view, snapshot)
            for name in names:
                if name not in self._columns:
                    checkpoint()
                    self._columns[name] = Column.read(view, snapshot, name)
                self._columns.move_to_end(name)
            found = [self._columns[name] for name in names]
            while sum(each.bytes for each in self._columns.values()) > _MAX_BYTES:
                self._columns.popitem(last=False)
            return found

    def _advance(self, view: CatalogView, snapshot: Snapshot) -> None:
        before, self._state = self._state, snapshot.state
        if before == snapshot.state:
            return
        columns, self._columns = self._columns, OrderedDict()  # none, should this fail half way
        if before is None or not before.has_segment_of(snapshot.state):
            return  # rows of another segment
        changes = view.attributes_since(before.seq, _MAX_CHANGES + 1) if columns else []
        if len(changes) > _MAX_CHANGES:
            return
        rows = snapshot.rows_of(np.array([number for number, _ in changes], np.int64))
        for name, column in columns.items():
            values = [attributes.get(name) for _, attributes in changes]
            self._columns[name] = column.changed(rows, values, snapshot.row_count)


def checked_names(names: Sequence[str]) -> list[str]:
    """The attributes to count, each once. Raises: InvalidParameterError for too many."""
    different = list(dict.fromkeys(names))
    if len(different) > MAX_FACETS:
        raise InvalidParameterError(
            f"facets = {len(different)} attributes; at most {MAX_FACETS} are counted at once. Name "
            "fewer, or ask several times."
        )
    return different


def counted(column: Column, rows: Ids | None, kind: AttributeKind) -> Facet:
    """How the values of an attribute of this kind are spread over these rows; None: over all."""
    codes = column.codes if rows is None else column.codes[rows]
    found = np.bincount(codes, minlength=len(column.values) + 1)
    counts = found[1:]
    present = np.flatnonzero(counts)
    if kind == "number" and len(present) > MAX_BINS:
        bins = _histogram(column.values, counts, present)
        return Facet(None, bins, missing=int(found[0]))
    if kind != "number":
        present = _most_frequent(present, counts[present])
    values = tuple((column.values[place], int(counts[place])) for place in present.tolist())
    other = int(counts.sum()) - sum(count for _, count in values)
    return Facet(values, other=other, missing=int(found[0]))


def _most_frequent(present: Ids, counts: Ids) -> Ids:
    """The places of the most frequent values, equal ones by value; `present` is ascending."""
    if len(present) > MAX_COUNTED_VALUES:
        # How often each count occurs tells the least one shown, in a tenth of the time of a sort.
        at_least = np.cumsum(np.bincount(counts)[::-1])
        least = len(at_least) - 1 - np.searchsorted(at_least, MAX_COUNTED_VALUES)
        more = np.flatnonzero(counts > least)
        equal = np.flatnonzero(counts == least)[: MAX_COUNTED_VALUES - len(more)]
        chosen = np.concatenate([more, equal])
        present, counts = present[chosen], counts[chosen]
    ranked: Ids = present[np.lexsort((present, -counts))]
    return ranked


def _histogram(
    known: Sequence[Any], counts: Ids, present: Ids
) -> tuple[tuple[float, float, int], ...]:
    """Counts in bins of one width, each from its lower end to below its upper, the last with it."""
    edges = bin_edges(known[present[0]], known[present[-1]])
    cuts = [*(bisect_left(known, edge) for edge in edges[:-1]), bisect_right(known, edges[-1])]
    before = np.concatenate([[0], np.cumsum(counts)])[cuts].tolist()
    pairs = zip(pairwise(edges), pairwise(before), strict=True)
    return tuple((low, high, last - first) for (low, high), (first, last) in pairs)


def bin_edges(low: float, high: float) -> list[float]:
    """The ends of at most `MAX_BINS` bins of one width that hold both numbers, low < high:
    multiples of 1, 2 or 5 times a power of ten.
    """
    least, greatest = Fraction(low), Fraction(high)  # a rounded quotient could leave out an end
    power = Fraction(10) ** math.floor(math.log10((greatest - least) / MAX_BINS))
    for factor in (1, 2, 5, 10, 20):
        step = factor * power
        first, last = math.floor(least / step), math.ceil(greatest / step)
        if last - first <= MAX_BINS:
            break
    return sorted({_number(place * step) for place in range(first, last + 1)})


def _number(exact: Fraction) -> float:
    """As it is stored: 64 bits of a whole number, or the nearest float."""
    if exact.denominator == 1 and abs(exact) <= _LARGEST:
        return int(exact)
    most = Fraction(sys.float_info.max)
    return float(max(-most, min(most, exact)))


def _bytes_of(values: Sequence[Any]) -> int:
    texts = sum(len(value) for value in values if isinstance(value, str))
    return _VALUE_BYTES * len(values) + texts


def _is_in(ascending: Sequence[Any], value: AttributeValue) -> bool:
    place = bisect_left(ascending, value)
    return place < len(ascending) and ascending[place] == value
