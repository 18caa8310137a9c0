"""Attribute data of one state, for filters, facets and groups.

Combines the columns of the segment with the items that were added or changed since.
"""

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinlens.indexer.attributes import Schema
from kinlens.indexer.bits import Bits, count_of, empty_bits, has_bits, put_bits
from kinlens.indexer.catalog.read import Attributes, CatalogView, State
from kinlens.indexer.columns.columns import Chosen, Columns, ColumnsBuilder
from kinlens.indexer.columns.match import index_of, rows_beyond, rows_matching
from kinlens.indexer.columns.values import Values
from kinlens.indexer.filters.tree import Filter, In
from kinlens.indexer.index.segment import Segment
from kinlens.indexer.live.snapshot import Changes, FilterMask, Snapshot
from kinlens.indexer.types import Facet, Ids, SortBy, no_checkpoint
from kinlens.values import Scalar

_CACHE_BYTES = 64 * 2**20  # for the cached filter masks of a segment
_MIN_CACHED, _MAX_CACHED = 8, 64  # filters
_MOST_FACETS = 256
_BATCH = 65_536  # items whose attributes are read at a time
_MANY = 10_000  # distinct texts


@dataclass(frozen=True, slots=True)
class Spread:
    """The value counts of an attribute over some items.

    values: the distinct values (V,) in the segment, ascending.
    counts: the number of items (V,) with each of them.
    later: counts of values that are not in the segment.
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
    """The attributes of one state. Thread safe."""

    def __init__(self, snapshot: Snapshot, changes: Changes, own: "SegmentAttributes") -> None:
        """`own` belongs to the segment of the snapshot; `changes` are the snapshot's changes."""
        self.snapshot = snapshot
        self.changes = changes
        self._own = own
        self._columns = own.columns

    def mask(self, where: Filter, checkpoint: Callable[[], None] = no_checkpoint) -> FilterMask:
        """The items that match a filter; the mask is cached.

        `where` must have been checked against the schema.
        """
        return self._own.mask(where, self, checkpoint)

    def having(self, name: str, values: Collection[Scalar]) -> FilterMask:
        """The items that have one of these values of an attribute."""
        bits = rows_matching(In(name, tuple(values)), self._columns, no_checkpoint)
        wanted = set(values)
        given = self.changes.values(name)
        fit = np.fromiter((not wanted.isdisjoint(own) for own in given), np.bool_, len(given))
        return self.updated(bits, fit, 0)

    def beyond(self, name: str, values: Collection[Scalar]) -> FilterMask:
        """The items that have no value, or at least one value that is not in `values`."""
        bits = rows_beyond(name, values, self._columns)
        known = set(values)
        given = self.changes.values(name)
        fit = np.fromiter(
            (not own or not known.issuperset(own) for own in given), np.bool_, len(given)
        )
        return self.updated(bits, fit, 0)

    def mask_of_rows(self, rows: Ids) -> FilterMask:
        """The items in these rows."""
        size = self._columns.size
        bits, delta = empty_bits(size), np.zeros(len(self.snapshot.delta.alive), np.bool_)
        is_later = rows >= size
        put_bits(bits, rows[~is_later], True)
        delta[rows[is_later] - size] = True
        return FilterMask(bits, delta)

    def count(self, among: FilterMask) -> int:
        """Number of items that pass `among`."""
        later = np.count_nonzero(among.delta & self.snapshot.delta.alive)
        return count_of(among.segment & ~self.snapshot.tombstones, self._columns.size) + int(later)

    def is_nearly_unique(self, name: str) -> bool:
        """Whether this is a text attribute with a different value in nearly every item."""
        column = self._columns.get(name)
        if column is None or column.type != "text":
            return False
        return len(column.values) > max(_MANY, column.present // 2)

    def selected(self, among: FilterMask | None = None) -> "Selected":
        """The items that pass `among` (None: all items), prepared for counting."""
        snapshot, rows, size = self.snapshot, self.changes.rows, self._columns.size
        alive = snapshot.delta.alive if among is None else snapshot.delta.alive & among.delta
        left = ~snapshot.tombstones if among is None else among.segment & ~snapshot.tombstones
        is_counted, is_later = self.changes.is_last.copy(), rows >= size
        is_counted[is_later] &= alive[rows[is_later] - size]
        is_counted[~is_later] &= has_bits(left, rows[~is_later])
        put_bits(left, rows[~is_later], False)  # their columns are outdated
        return Selected(Chosen(left, size), np.flatnonzero(is_counted))

    def spread(self, name: str, selected: "Selected | None" = None) -> Spread:
        """The value counts of an attribute over the selected items (None: all items)."""
        selected = selected or self.selected()
        column = self._columns.get(name)
        if column is None:
            values: Values = []
            counts, present = np.zeros(0, np.int64), 0
        elif selected.is_most:  # counting the other items and subtracting takes less time
            values = column.values
            others, without = column.counted(selected.others)
            counts, present = column.counts - others, column.present - without
        else:
            values = column.values
            counts, present = column.counted(selected.rows)
        known = self.changes.values(name)
        given = [known[entry] for entry in selected.entries.tolist()]
        missing = selected.count - present + sum(not own for own in given)
        later: dict[Scalar, int] = {}
        for value, items in Counter(value for own in given for value in own).items():
            index = self._own.index_of(name, value)
            if index is None:
                later[value] = items
            else:
                counts[index] += items
        return Spread(values, counts, later, missing)

    def span(self, name: str) -> tuple[float, float] | None:
        """The lowest and the highest value of a number attribute; None if no item has it."""
        return self._own.span(name, self)

    def facet(self, name: str, where: Filter | None, count: Callable[[], Facet]) -> Facet:
        """The facet over all items that match `where`, from `count`; cached until a change."""
        return self._own.facet(name, where, self.snapshot.state, count)

    def ids(
        self, among: FilterMask, after: int = -1, limit: int | None = None
    ) -> tuple[Ids, int | None]:
        """Up to `limit` ids above `after` of items that pass `among`, ascending.

        The second result is the highest id of all items that pass; None if there are none.
        """
        snapshot = self.snapshot
        later = snapshot.delta.ids[among.delta & snapshot.delta.alive]
        if snapshot.segment is None:
            found, last = later[later > after], None
        else:
            bits = among.segment & ~snapshot.tombstones
            own, last = snapshot.segment.ids_in(bits, after, limit)
            found = np.concatenate([own, later[later > after]])
        return found[:limit], int(later[-1]) if len(later) else last

    def everything(self) -> FilterMask:
        """A mask that every item passes."""
        delta = np.ones(len(self.snapshot.delta.alive), np.bool_)
        return FilterMask(~empty_bits(self._columns.size), delta)

    def sorted_ids(self, order: SortBy, among: FilterMask, limit: int) -> Ids:
        """Ids of the first `limit` items that pass `among`, sorted by an attribute, ties by id."""
        selected, size = self.selected(among), self._columns.size
        column, segment = self._columns.get(order.attribute), self.snapshot.segment
        ranked: list[tuple[Any, int]] = []
        rest = selected.rows.bits
        if column is not None and segment is not None:
            rows, codes, bits, last = column.first(selected.rows, limit, order.descending)
            values = [column.values[index] for index in (codes - 1).tolist()]
            ranked = [*zip(values, segment.row_ids.of(rows).tolist(), strict=True)]
            if last:
                equal, _ = segment.ids_in(bits, -1, limit)
                ranked += [(column.values[last - 1], item_id) for item_id in equal.tolist()]
            rest = rest & ~column.having([(1, len(column.values) + 1)], size)
        without: list[int] = []
        for entry in selected.entries.tolist():
            value = order.value_of(self.changes.attributes[entry])
            [item_id] = self.snapshot.ids_of(self.changes.rows[[entry]]).tolist()
            if value is None:
                without.append(item_id)
            else:
                ranked.append((value, item_id))
        ranked.sort(key=lambda one: one[1])
        ranked.sort(key=lambda one: one[0], reverse=order.descending)
        found = [item_id for _, item_id in ranked[:limit]]
        if len(found) < limit and segment is not None:
            own, _ = segment.ids_in(rest, -1, limit - len(found))
            without += own.tolist()
        return np.array([*found, *sorted(without)][:limit], np.int64)

    def updated(self, bits: Bits, fit: NDArray[np.bool_], start: int) -> FilterMask:
        """The mask of a filter with the changes from index `start` on applied.

        bits: the rows of the segment that match after the first `start` changes; changed in place.
        fit: whether each of all changes (E,) matches.
        """
        rows, size = self.changes.rows, self._columns.size
        is_later = rows >= size
        delta = np.zeros(len(self.snapshot.delta.alive), np.bool_)
        delta[rows[is_later] - size] = fit[is_later]
        new, is_own = rows[start:], ~is_later[start:]
        put_bits(bits, new[is_own], fit[start:][is_own])
        return FilterMask(bits, delta)


class Selected:
    """A selection of items for counting.

    rows: rows of the segment whose columns are up to date.
    entries: indices of the changes that are selected.
    """

    def __init__(self, rows: Chosen, entries: Ids) -> None:
        self.rows = rows
        self.entries = entries
        self.count = rows.count
        self.others = Chosen(~rows.bits, rows.size)

    @property
    def is_most(self) -> bool:
        """Whether these are more than half of the rows."""
        return 2 * self.count > self.rows.size


class _CachedFilter:
    """The cached result of a filter: matching rows of the segment, and matching changes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.state: State | None = None
        self.changes: list[Attributes] | None = None
        self.fit: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.mask: FilterMask | None = None

    def at(self, where: Filter, now: StateAttributes, rows: Callable[[Filter], Bits]) -> FilterMask:
        """The mask of a state, updated from the last mask if that is of an earlier state."""
        changes = now.changes
        if self.mask is not None and self.state == now.snapshot.state:
            return self.mask
        known, bits = len(self.fit), None if self.mask is None else self.mask.segment.copy()
        if bits is None or self.changes is not changes.attributes or known > len(changes.rows):
            known, bits = 0, rows(where)
        some = changes.attributes[known : len(changes.rows)]
        fit = np.fromiter(map(where.matches, some), np.bool_, len(some))
        self.fit = np.concatenate([self.fit[:known], fit])
        self.changes, self.state = changes.attributes, now.snapshot.state
        self.mask = now.updated(bits, self.fit, known)
        return self.mask


class SegmentAttributes:
    """The columns of a segment, with caches of filters, spans and facets. Thread safe."""

    def __init__(self, columns: Columns, types: Schema) -> None:
        """`types`: the types of the attributes of the first state that is read."""
        self.columns = columns
        self._types = types
        self._filters: OrderedDict[Filter, _CachedFilter] = OrderedDict()
        fitting = _CACHE_BYTES // max(1, columns.size // 8)
        self._max_filters = min(max(fitting, _MIN_CACHED), _MAX_CACHED)
        self._indices: dict[tuple[str, Scalar], int | None] = {}
        self._spans: dict[str, tuple[State, tuple[float, float] | None]] = {}
        self._facets: OrderedDict[tuple[str, Filter | None], tuple[State, Facet]] = OrderedDict()
        self._lock = threading.Lock()

    def has_types(self, types: Schema) -> bool:
        """Whether no attribute has another type in a state with these types."""
        return all(types.get(name, type_) == type_ for name, type_ in self._types.items())

    def mask(
        self, where: Filter, now: StateAttributes, checkpoint: Callable[[], None]
    ) -> FilterMask:
        """The items of a state that match. Single-flight: equal filters are evaluated once."""
        with self._lock:
            cached = self._filters.setdefault(where, _CachedFilter())
            self._filters.move_to_end(where)
            while len(self._filters) > self._max_filters:
                self._filters.popitem(last=False)
        with cached.lock:
            return cached.at(where, now, lambda it: rows_matching(it, self.columns, checkpoint))

    def index_of(self, name: str, value: Scalar) -> int | None:
        """The index of a value among the column's values; None if it is not one of them."""
        column = self.columns.get(name)
        if column is None:
            return None
        if (name, value) not in self._indices:
            self._indices[name, value] = index_of(value, column.values)
        return self._indices[name, value]

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


class AttributesKeeper:
    """Returns the attributes of a state, with caches per segment. Thread safe."""

    def __init__(self) -> None:
        self._none = SegmentAttributes(Columns(0, {}), {})
        self._cached: weakref.WeakKeyDictionary[Segment, SegmentAttributes]
        self._cached = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def at(self, view: CatalogView, snapshot: Snapshot) -> StateAttributes:
        """The attributes of a snapshot with loaded changes; `view` must show the same state."""
        assert snapshot.changes is not None
        if snapshot.segment is None:
            return StateAttributes(snapshot, snapshot.changes, self._none)
        types = view.schema()
        with self._lock:
            cached = self._cached.get(snapshot.segment)
            if cached is None or not cached.has_types(types):
                columns = _columns_of(view, snapshot.segment).of_types(types)
                cached = SegmentAttributes(columns, types)
                self._cached[snapshot.segment] = cached
        return StateAttributes(snapshot, snapshot.changes, cached)


def _columns_of(view: CatalogView, segment: Segment) -> Columns:
    """The columns of a segment; built from the catalogue for segments of an earlier version."""
    if segment.columns is not None:
        return segment.columns
    builder = ColumnsBuilder(segment.size, view.schema())
    for ids, attributes in view.attributes(_BATCH):
        rows = segment.positions_of(ids)
        is_there = rows >= 0
        own = [some for some, there in zip(attributes, is_there, strict=True) if there]
        builder.add(rows[is_there].tolist(), own)
    return Columns(segment.size, dict(builder.columns()))
