"""The attributes of one state, for filters, facets, groups and sorted pages."""

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kinlens.indexer.bits import Bits, count_of, first_positions
from kinlens.indexer.catalog.schema import State
from kinlens.indexer.columns.chunks import CHUNK, Chunk
from kinlens.indexer.columns.columns import Chosen, Column, Columns
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
from kinlens.indexer.live.snapshot import Snapshot
from kinlens.indexer.types import Ids, SortBy, no_checkpoint
from kinlens.values import Scalar

T = TypeVar("T")

_CACHE_BYTES = 64 * 2**20  # for the cached filter masks
_MIN_CACHED, _MAX_CACHED = 8, 64  # filters
_MOST_RESULTS = 256
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

    A mask is a bitmap of rows of the file of vectors that have an item.
    """

    def __init__(self, snapshot: Snapshot, columns: Columns, keeper: "AttributesKeeper") -> None:
        """`columns` are the snapshot's columns."""
        self.snapshot = snapshot
        self.columns = columns
        self._keeper = keeper

    def mask(self, where: Filter, checkpoint: Callable[[], None] = no_checkpoint) -> Bits:
        """The items that match a filter; the mask is cached.

        `where` must have been checked against the schema. `checkpoint` is called between chunks;
        an exception from it cancels the evaluation.
        """
        return self._keeper.cached(where).at(where, self, checkpoint)

    def having(self, name: str, values: Collection[Scalar]) -> Bits:
        """The items that have one of these values of an attribute."""
        return self.mask_of(rows_matching(In(name, tuple(values)), self.columns))

    def beyond(self, name: str, values: Collection[Scalar]) -> Bits:
        """The items that have no value, or at least one value that is not in `values`."""
        return self.mask_of(rows_beyond(name, values, self.columns))

    def mask_of(self, rows: Bits) -> Bits:
        """The rows of this bitmap that have an item."""
        return self.snapshot.live & rows[: len(self.snapshot.live)]

    def count(self, among: Bits) -> int:
        """Number of items of a mask."""
        return count_of(among, self.columns.size)

    def is_nearly_unique(self, name: str) -> bool:
        """Whether this is a text attribute with a different value in nearly every item."""
        column = self.columns.get(name)
        if column is None or column.type != "text":
            return False
        most = max(_MANY, column.present // 2)
        return column.codes > most and int(np.count_nonzero(column.counts)) > most

    def selected(self, among: Bits | None = None) -> Chosen:
        """The items of a mask (None: all items), prepared for counting."""
        return Chosen(self.snapshot.live if among is None else among, self.columns.size)

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

    def remembered(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The result of `compute`, which is cached under this key until a change."""
        return self._keeper.remembered(key, self.snapshot.state, compute)

    def ids(self, among: Bits, after: int = -1, limit: int | None = None) -> tuple[Ids, int | None]:
        """Up to `limit` ids above `after` of items of a mask, ascending.

        The second result is the highest id of all of its items; None if there are none.
        """
        row_ids = self.columns.row_ids
        rows = first_positions(among, row_ids.rows_up_to(after), limit)
        filled = np.flatnonzero(among)[-1:]
        last = 8 * filled + np.array([int(byte).bit_length() - 1 for byte in among[filled]], int)
        return row_ids.of(rows), int(row_ids.of(last)[0]) if len(last) else None

    def sorted_ids(self, order: SortBy, among: Bits, limit: int) -> Ids:
        """Ids of the first `limit` items of a mask, sorted by an attribute, ties by id."""
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
    rows = rows_with(codes, column, -(-selected.size // CHUNK))
    return rows[: len(selected.bits)] & selected.bits


class _CachedFilter:
    """The cached rows of a filter, with the chunks from which they were computed.

    A later state evaluates only the chunks that differ.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weak, so that a cached filter does not keep the chunks of earlier states in memory.
        self._parts: list[tuple[list[weakref.ref[Chunk]], Bits]] = []
        self._mask: tuple[State, str | None, Bits] | None = None

    def at(self, where: Filter, now: StateAttributes, checkpoint: Callable[[], None]) -> Bits:
        """The mask of a state. Single-flight: equal filters are evaluated once."""
        # Until the segment of rewritten vectors is open, rows are those of the old file.
        key = now.snapshot.state, now.columns.space
        with self._lock:
            if self._mask is None or self._mask[:2] != key:
                self._evaluate(where, now.columns, checkpoint)
                self._mask = *key, now.mask_of(joined(bits for _, bits in self._parts))
            return self._mask[2]

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
    """Returns the attributes of a state, with caches of filters and results. Thread safe."""

    def __init__(self) -> None:
        self._filters: OrderedDict[Filter, _CachedFilter] = OrderedDict()
        self._max_filters = _MAX_CACHED
        self._results: OrderedDict[Hashable, tuple[State, Any]] = OrderedDict()
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

    def remembered(self, key: Hashable, state: State, compute: Callable[[], T]) -> T:
        """The result of `compute`, which is cached under this key until the state changes."""
        known = self._results.get(key)
        if known is None or known[0] != state:
            known = state, compute()
            with self._lock:
                self._results[key] = known
                while len(self._results) > _MOST_RESULTS:
                    self._results.popitem(last=False)
        result: T = known[1]
        return result
