"""The attributes of one state, for filters, facets, groups and sorted pages."""

import functools
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinlens.indexer.bits import (
    Bits,
    count_of,
    empty_bits,
    first_positions,
    has_bits,
    packed_bits,
    positions_in,
    put_bits,
)
from kinlens.indexer.catalog.read import State
from kinlens.indexer.catalog.vectors import RowIds
from kinlens.indexer.columns.columns import CHUNK, Chosen, Chunk, Column, Columns
from kinlens.indexer.columns.match import (
    Matcher,
    index_of,
    joined,
    rows_beyond,
    rows_matching,
    rows_with,
)
from kinlens.indexer.columns.values import Values
from kinlens.indexer.filters.tree import Filter, In
from kinlens.indexer.index.segment import Segment
from kinlens.indexer.live.snapshot import FilterMask, Snapshot
from kinlens.indexer.types import Facet, Ids, SortBy, no_checkpoint
from kinlens.values import Scalar

_CACHE_BYTES = 64 * 2**20  # for the cached filter masks
_MIN_CACHED, _MAX_CACHED = 8, 64  # filters
_MOST_FACETS = 256
_MANY = 10_000  # distinct texts


@dataclass(frozen=True, slots=True)
class Spread:
    """The value counts of an attribute over some items.

    values: distinct values (V,), ascending.
    counts: the number of items (V,) with each of them.
    later: counts of other values.
    missing: the number of items without a value.
    """

    values: Values
    counts: NDArray[np.int64]
    later: Mapping[Scalar, int]
    missing: int

    @property
    def different(self) -> int:
        """Number of values that some item has."""
        return int(np.count_nonzero(self.counts)) + len(self.later)

    @property
    def total(self) -> int:
        """Sum of all counts."""
        return int(self.counts.sum()) + sum(self.later.values())

    def count(self, value: Scalar) -> int:
        """Number of items with this value."""
        index = index_of(value, self.values)
        return self.later.get(value, 0) if index is None else int(self.counts[index])

    def sizes(self) -> dict[int, int]:
        """Histogram of the counts: number of items -> number of values with that count."""
        sizes, values = np.unique(self.counts[self.counts > 0], return_counts=True)
        found = Counter(self.later.values())
        found.update(dict(zip(sizes.tolist(), values.tolist(), strict=True)))
        return dict(sorted(found.items()))

    def ends(self) -> tuple[Any, Any] | None:
        """The lowest and the highest value; None without values."""
        present = np.flatnonzero(self.counts)
        known: list[Any] = [*self.later]
        if len(present):
            known += [self.values[int(present[0])], self.values[int(present[-1])]]
        return (min(known), max(known)) if known else None


class StateAttributes:
    """The attributes of one state. Thread safe.

    Columns have a row for each row of the file of vectors. Masks have positions of the snapshot:
    those of the segment, which are usually the first rows, and those of the delta.
    """

    def __init__(self, snapshot: Snapshot, columns: Columns, keeper: "AttributesKeeper") -> None:
        """`columns` are the snapshot's columns."""
        self.snapshot = snapshot
        self.columns = columns
        self._keeper = keeper

    def mask(self, where: Filter, checkpoint: Callable[[], None] = no_checkpoint) -> FilterMask:
        """The items that match a filter; the mask is cached.

        `where` must have been checked against the schema. `checkpoint` is called between chunks;
        an exception from it cancels the evaluation.
        """
        return self._keeper.cached(where).at(where, self, checkpoint)

    def having(self, name: str, values: Collection[Scalar]) -> FilterMask:
        """The items that have one of these values of an attribute."""
        return self.mask_of(rows_matching(In(name, tuple(values)), self.columns))

    def beyond(self, name: str, values: Collection[Scalar]) -> FilterMask:
        """The items that have no value, or at least one value that is not in `values`."""
        return self.mask_of(rows_beyond(name, values, self.columns))

    def mask_of_rows(self, rows: Ids) -> FilterMask:
        """The items in these positions of the snapshot."""
        size = self.snapshot.segment_size
        bits, delta = empty_bits(size), np.zeros(len(self.snapshot.delta.alive), np.bool_)
        is_later = rows >= size
        put_bits(bits, rows[~is_later], True)
        delta[rows[is_later] - size] = True
        return FilterMask(bits, delta)

    def mask_of(self, bits: Bits) -> FilterMask:
        """The items in a bitmap of rows."""
        rows, size = self._segment_rows, self.snapshot.segment_size
        if rows is None:
            segment = bits[: (size + 7) // 8].copy()
        else:
            segment = packed_bits((rows >= 0) & has_bits(bits, np.maximum(rows, 0)))
        delta = self._delta_rows  # -1 for items that have just been erased
        if not len(bits):
            return FilterMask(segment, np.zeros(len(delta), np.bool_))
        return FilterMask(segment, (delta >= 0) & has_bits(bits, np.maximum(delta, 0)))

    def rows_of(self, among: FilterMask | None) -> Bits:
        """Bitmap of the rows of the items that pass `among` (None: all) and are not removed."""
        snapshot, rows = self.snapshot, self._segment_rows
        left = ~snapshot.tombstones if among is None else among.segment & ~snapshot.tombstones
        alive = snapshot.delta.alive if among is None else snapshot.delta.alive & among.delta
        found = empty_bits(self.columns.chunks * CHUNK)
        if rows is None:
            found[: len(left)] = left
            if snapshot.segment_size % 8:
                found[len(left) - 1] &= (1 << snapshot.segment_size % 8) - 1
        else:
            own = rows[positions_in(left, snapshot.segment_size)]
            put_bits(found, own[own >= 0], True)
        later = self._delta_rows[alive]
        put_bits(found, later[later >= 0], True)
        return found

    @functools.cached_property
    def _segment_rows(self) -> Ids | None:
        """The row of each position of the segment; None if they are equal."""
        return self._keeper.rows_of(self.snapshot.segment, self.columns)

    @functools.cached_property
    def _delta_rows(self) -> Ids:
        return self.columns.row_ids.rows_of(self.snapshot.delta.ids)

    def count(self, among: FilterMask) -> int:
        """Number of items that pass `among`."""
        later = np.count_nonzero(among.delta & self.snapshot.delta.alive)
        left = among.segment & ~self.snapshot.tombstones
        return count_of(left, self.snapshot.segment_size) + int(later)

    def is_nearly_unique(self, name: str) -> bool:
        """Whether this is a text attribute with a different value in nearly every item."""
        column = self.columns.get(name)
        if column is None or column.type != "text":
            return False
        most = max(_MANY, column.present // 2)
        return column.codes > most and int(np.count_nonzero(column.counts)) > most

    def selected(self, among: FilterMask | None = None) -> Chosen:
        """The rows of the items that pass `among` (None: all items), prepared for counting."""
        return Chosen(self.rows_of(among), self.columns.size)

    def spread(self, name: str, selected: Chosen | None = None) -> Spread:
        """The value counts of an attribute over the selected items (None: all items)."""
        selected = selected or self.selected()
        column = self.columns.get(name)
        if column is None:
            return Spread([], np.zeros(0, np.int64), {}, selected.count)
        if 2 * selected.count > selected.size:  # counting the others and subtracting is faster
            others, without = column.counted(Chosen(~selected.bits, selected.size))
            counts, present = column.counts - others, column.present - without
        else:
            counts, present = column.counted(selected)
        values, codes = column.later()
        given = zip(values, counts[codes - 1].tolist(), strict=True)
        later = {value: count for value, count in given if count}
        known = column.dictionary.values
        return Spread(known, counts[: len(known)], later, selected.count - present)

    def span(self, name: str) -> tuple[float, float] | None:
        """The lowest and the highest value of a number attribute; None if no item has it."""
        return self._keeper.span(name, self)

    def facet(self, name: str, where: Filter | None, count: Callable[[], Facet]) -> Facet:
        """The facet over all items that match `where`, from `count`; cached until a change."""
        return self._keeper.facet(name, where, self.snapshot.state, count)

    def ids(
        self, among: FilterMask, after: int = -1, limit: int | None = None
    ) -> tuple[Ids, int | None]:
        """Up to `limit` ids above `after` of items that pass `among`, ascending.

        The second result is the highest id of all items that pass; None if there are none.
        """
        bits, row_ids = self.rows_of(among), self.columns.row_ids
        first = row_ids.rows_up_to(after)
        rows = first_positions(bits, first, limit)
        filled = np.flatnonzero(bits)[-1:]
        last = 8 * filled + np.array([int(byte).bit_length() - 1 for byte in bits[filled]], int)
        return row_ids.of(rows), int(row_ids.of(last)[0]) if len(last) else None

    def everything(self) -> FilterMask:
        """A mask that every item passes."""
        delta = np.ones(len(self.snapshot.delta.alive), np.bool_)
        return FilterMask(~empty_bits(self.snapshot.segment_size), delta)

    def sorted_ids(self, order: SortBy, among: FilterMask, limit: int) -> Ids:
        """Ids of the first `limit` items that pass `among`, sorted by an attribute, ties by id."""
        selected = self.selected(among)
        column, rest = self.columns.get(order.attribute), selected.bits
        best = np.empty(0, np.int64)
        if column is not None:
            rows = _best(column, selected, limit, order.descending)
            chosen = max if order.descending else min
            values: list[Any] = [chosen(own) for own in column.values_at(rows)]
            places = sorted(range(len(rows)), key=values.__getitem__, reverse=order.descending)
            best = rows[places[:limit]]
            rest = rest & ~_having(column, np.arange(1, column.codes + 1), selected)
        without = first_positions(rest, 0, limit - len(best))
        return self.columns.row_ids.of(np.concatenate([best, without]))


def _best(column: Column, selected: Chosen, count: int, descending: bool) -> Ids:
    """Selected rows, ascending, that contain the `count` first ones in the order of their values.

    Of many rows with the last value that is needed, only the first ones are returned.
    """
    order = column.in_order()[:: -1 if descending else 1]
    cumulative = np.cumsum(column.counted(selected)[0][order - 1])
    wanted = count
    while True:
        step = int(np.searchsorted(cumulative, wanted))  # number of better values
        better = _having(column, order[:step], selected)
        equal = _having(column, order[step : step + 1], selected) & ~better
        found = first_positions(better, 0, None)
        rest = first_positions(equal, 0, max(0, count - len(found)))
        if step >= len(order) or len(found) + len(rest) >= count:
            return np.sort(np.concatenate([found, rest]))
        wanted *= 2  # rows with several values are counted more than once


def _having(column: Column, codes: Ids, selected: Chosen) -> Bits:
    """Bitmap of the selected rows with one of these codes."""
    return rows_with(codes, column, 8 * len(selected.bits) // CHUNK) & selected.bits


class _CachedFilter:
    """The cached rows of a filter, with the chunks from which they were computed.

    A later state evaluates only the chunks that differ.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weak, so that a cached filter does not keep the chunks of earlier states in memory.
        self._parts: list[tuple[list[weakref.ref[Chunk]], Bits]] = []
        self._mask: tuple[object, FilterMask] | None = None

    def at(self, where: Filter, now: StateAttributes, checkpoint: Callable[[], None]) -> FilterMask:
        """The mask of a state. Single-flight: equal filters are evaluated once."""
        # The segment may be an earlier one than that of the state.
        key = now.snapshot.state, now.snapshot.base
        with self._lock:
            if self._mask is None or self._mask[0] != key:
                self._evaluate(where, now.columns, checkpoint)
                self._mask = key, now.mask_of(joined(bits for _, bits in self._parts))
            return self._mask[1]

    def _evaluate(self, where: Filter, columns: Columns, checkpoint: Callable[[], None]) -> None:
        matcher, parts = Matcher(where, columns), []
        for index in range(columns.chunks):
            read = matcher.chunks(index)
            known = self._parts[index] if index < len(self._parts) else None
            if known is None or [ref() for ref in known[0]] != read:
                checkpoint()
                known = [weakref.ref(chunk) for chunk in read], matcher.bits(index)
            parts.append(known)
        self._parts = parts


class AttributesKeeper:
    """Returns the attributes of a state, with caches of filters, spans and facets. Thread safe."""

    def __init__(self) -> None:
        self._filters: OrderedDict[Filter, _CachedFilter] = OrderedDict()
        self._max_filters = _MAX_CACHED
        self._spans: dict[str, tuple[State, tuple[float, float] | None]] = {}
        self._facets: OrderedDict[tuple[str, Filter | None], tuple[State, Facet]] = OrderedDict()
        self._rows: weakref.WeakKeyDictionary[Segment, tuple[RowIds, Ids]]
        self._rows = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def at(self, snapshot: Snapshot, columns: Columns) -> StateAttributes:
        """The attributes of a snapshot, whose columns these are."""
        fitting = _CACHE_BYTES // max(1, columns.size // 4)
        self._max_filters = min(max(fitting, _MIN_CACHED), _MAX_CACHED)
        return StateAttributes(snapshot, columns, self)

    def cached(self, where: Filter) -> _CachedFilter:
        """The cache of a filter."""
        with self._lock:
            cached = self._filters.setdefault(where, _CachedFilter())
            self._filters.move_to_end(where)
            while len(self._filters) > self._max_filters:
                self._filters.popitem(last=False)
            return cached

    def rows_of(self, segment: Segment | None, columns: Columns) -> Ids | None:
        """The row of each position of a segment, -1 without one; None if they are equal.

        They differ for a segment of an earlier version, and after the vectors were rewritten.
        """
        if segment is None or segment.manifest.vectors == columns.space is not None:
            return None
        with self._lock:
            row_ids, rows = self._rows.get(segment, (None, np.empty(0, np.int64)))
            if row_ids is not columns.row_ids:
                rows = columns.row_ids.rows_of(segment.row_ids.of(np.arange(segment.size)))
                rows[rows >= columns.size] = -1
                self._rows[segment] = columns.row_ids, rows
            return rows

    def span(self, name: str, now: StateAttributes) -> tuple[float, float] | None:
        """The lowest and the highest value of a number attribute; None if no item has it."""
        state, span = self._spans.get(name, (None, None))
        if state != now.snapshot.state:
            span = now.spread(name).ends()
            self._spans[name] = now.snapshot.state, span
        return span

    def facet(
        self, name: str, where: Filter | None, state: State, count: Callable[[], Facet]
    ) -> Facet:
        """The facet of an attribute from `count`; cached until the state changes."""
        known = self._facets.get((name, where))
        if known is None or known[0] != state:
            known = state, count()
            with self._lock:
                self._facets[name, where] = known
                while len(self._facets) > _MOST_FACETS:
                    self._facets.popitem(last=False)
        return known[1]
