"""What filters, facets and groups know of one state: the columns of its segment, and what was added
or changed since, item by item.
"""

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinlens.indexer.bits import Bits, count_of, empty_bits, has_bits, put_bits
from kinlens.indexer.catalog.read import Attributes, CatalogView, State
from kinlens.indexer.columns.columns import Chosen, Columns, ColumnsBuilder
from kinlens.indexer.columns.match import place_of, rows_beyond, rows_matching
from kinlens.indexer.columns.values import Values
from kinlens.indexer.filters.tree import Filter, In
from kinlens.indexer.index.segment import Segment
from kinlens.indexer.live.snapshot import Changes, FilterMask, Snapshot
from kinlens.indexer.types import Facet, Ids, SortBy, go_on
from kinlens.values import Scalar

_KEPT_BYTES = 64 * 2**20  # of the filters that a segment keeps
_LEAST_KEPT, _MOST_KEPT = 8, 64  # filters
_MOST_FACETS = 256
_BATCH = 65_536  # items whose attributes are read at a time
_MANY = 10_000  # different texts


@dataclass(frozen=True, slots=True)
class Spread:
    """How the values of an attribute are spread over some items.

    values, counts (V,): those of the segment, ascending, and how many items have each. later: other
    values, with their counts. missing: how many items have none.
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
        """How many items have this value."""
        place = place_of(value, self.values)
        return self.later.get(value, 0) if place is None else int(self.counts[place])

    def sizes(self) -> dict[int, int]:
        """For each number of items, how many values have that many."""
        sizes, values = np.unique(self.counts[self.counts > 0], return_counts=True)
        found = Counter(self.later.values())
        found.update(dict(zip(sizes.tolist(), values.tolist(), strict=True)))
        return dict(sorted(found.items()))

    def ends(self) -> tuple[Any, Any] | None:
        """The lowest and the highest value of an item."""
        present = np.flatnonzero(self.counts)
        known: list[Any] = [*self.later]
        if len(present):
            known += [self.values[int(present[0])], self.values[int(present[-1])]]
        return (min(known), max(known)) if known else None


class StateAttributes:
    """The attributes of one state. Thread safe."""

    def __init__(self, snapshot: Snapshot, changes: Changes, kept: "SegmentAttributes") -> None:
        """`kept` is of the segment of the snapshot, `changes` are its changes."""
        self.snapshot = snapshot
        self.changes = changes
        self._kept = kept
        self._columns = kept.columns

    def mask(self, where: Filter, checkpoint: Callable[[], None] = go_on) -> FilterMask:
        """The items that fit; it is kept for the searches to come.

        `where` must have been checked against the schema.
        """
        return self._kept.mask(where, self, checkpoint)

    def having(self, name: str, values: Collection[Scalar]) -> FilterMask:
        """The items that have one of these values of an attribute."""
        bits = rows_matching(In(name, tuple(values)), self._columns, go_on)
        wanted = set(values)
        given = self.changes.values(name)
        fit = np.fromiter((not wanted.isdisjoint(own) for own in given), np.bool_, len(given))
        return self.updated(bits, fit, 0)

    def beyond(self, name: str, values: Collection[Scalar]) -> FilterMask:
        """The items that have another value of an attribute than these, or none."""
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
        """How many items `among` leaves."""
        later = np.count_nonzero(among.delta & self.snapshot.delta.alive)
        return count_of(among.segment & ~self.snapshot.dead, self._columns.size) + int(later)

    def is_nearly_unique(self, name: str) -> bool:
        """Whether most items that have the attribute, a text, share its value with no other."""
        column = self._columns.get(name)
        if column is None or column.kind != "text":
            return False
        return len(column.values) > max(_MANY, column.present // 2)

    def selected(self, among: FilterMask | None = None) -> "Selected":
        """All items, or those that `among` leaves, to be counted."""
        snapshot, rows, size = self.snapshot, self.changes.rows, self._columns.size
        alive = snapshot.delta.alive if among is None else snapshot.delta.alive & among.delta
        left = ~snapshot.dead if among is None else among.segment & ~snapshot.dead
        is_counted, is_later = self.changes.is_last.copy(), rows >= size
        is_counted[is_later] &= alive[rows[is_later] - size]
        is_counted[~is_later] &= has_bits(left, rows[~is_later])
        put_bits(left, rows[~is_later], False)  # what its columns say is outdated
        return Selected(Chosen(left, size), np.flatnonzero(is_counted))

    def spread(self, name: str, selected: "Selected | None" = None) -> Spread:
        """How the values of an attribute are spread over all items, or the selected ones."""
        selected = selected or self.selected()
        column = self._columns.get(name)
        if column is None:
            values: Values = []
            counts, present = np.zeros(0, np.int64), 0
        elif selected.is_most:  # the others are fewer
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
            place = self._kept.place_of(name, value)
            if place is None:
                later[value] = items
            else:
                counts[place] += items
        return Spread(values, counts, later, missing)

    def span(self, name: str) -> tuple[float, float] | None:
        """The lowest and the highest value of a number; None if no item has it."""
        return self._kept.span(name, self)

    def facet(self, name: str, where: Filter | None, count: Callable[[], Facet]) -> Facet:
        """What `count` says of all items that fit; kept until the gallery changes."""
        return self._kept.facet(name, where, self.snapshot.state, count)

    def ids(
        self, among: FilterMask, after: int = -1, limit: int | None = None
    ) -> tuple[Ids, int | None]:
        """The numbers above `after` of the items that `among` leaves, ascending, at most `limit`;
        and the highest of all of them.
        """
        snapshot = self.snapshot
        later = snapshot.delta.ids[among.delta & snapshot.delta.alive]
        if snapshot.segment is None:
            found, last = later[later > after], None
        else:
            bits = among.segment & ~snapshot.dead
            own, last = snapshot.segment.numbers_in(bits, after, limit)
            found = np.concatenate([own, later[later > after]])
        return found[:limit], int(later[-1]) if len(later) else last

    def everything(self) -> FilterMask:
        """A mask that leaves every item."""
        delta = np.ones(len(self.snapshot.delta.alive), np.bool_)
        return FilterMask(~empty_bits(self._columns.size), delta)

    def sorted_ids(self, order: SortBy, among: FilterMask, limit: int) -> Ids:
        """The numbers of the first `limit` items that `among` leaves, in the order of an attribute,
        equal ones by number.
        """
        selected, size = self.selected(among), self._columns.size
        column, segment = self._columns.get(order.attribute), self.snapshot.segment
        ranked: list[tuple[Any, int]] = []
        rest = selected.rows.bits
        if column is not None and segment is not None:
            rows, codes, bits, last = column.first(selected.rows, limit, order.descending)
            places = (codes - 1).tolist()
            values = [column.values[place] for place in places]
            ranked = [*zip(values, segment.numbers.of(rows).tolist(), strict=True)]
            if last:
                equal, _ = segment.numbers_in(bits, -1, limit)
                ranked += [(column.values[last - 1], number) for number in equal.tolist()]
            rest = rest & ~column.having([(1, len(column.values) + 1)], size)
        without: list[int] = []
        for entry in selected.entries.tolist():
            value = order.value_of(self.changes.attributes[entry])
            number = self.snapshot.number_of(int(self.changes.rows[entry]))
            if value is None:
                without.append(number)
            else:
                ranked.append((value, number))
        ranked.sort(key=lambda one: one[1])
        ranked.sort(key=lambda one: one[0], reverse=order.descending)
        found = [number for _, number in ranked[:limit]]
        if len(found) < limit and segment is not None:
            own, _ = segment.numbers_in(rest, -1, limit - len(found))
            without += own.tolist()
        return np.array([*found, *sorted(without)][:limit], np.int64)

    def updated(self, bits: Bits, fit: NDArray[np.bool_], start: int) -> FilterMask:
        """The items that fit. `bits` are the rows of the segment that fit after the first `start`
        changes, and are changed in place; `fit` (E,) says which of all changes fit.
        """
        rows, size = self.changes.rows, self._columns.size
        is_later = rows >= size
        delta = np.zeros(len(self.snapshot.delta.alive), np.bool_)
        delta[rows[is_later] - size] = fit[is_later]
        new, is_own = rows[start:], ~is_later[start:]
        put_bits(bits, new[is_own], fit[start:][is_own])
        return FilterMask(bits, delta)


class Selected:
    """Some items: `rows` of the segment whose columns are up to date, and `entries` of what came
    or changed after it.
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


class _Kept:
    """A filter: which rows of the segment and which of its first changes fit."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.state: State | None = None
        self.changes: list[Attributes] | None = None
        self.fit: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.mask: FilterMask | None = None

    def at(self, where: Filter, now: StateAttributes, rows: Callable[[Filter], Bits]) -> FilterMask:
        """The mask of a state, from that of the last one if it was earlier."""
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
    """The columns of a segment, and what was asked of them last. Thread safe."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._filters: OrderedDict[Filter, _Kept] = OrderedDict()
        fitting = _KEPT_BYTES // max(1, columns.size // 8)
        self._most = min(max(fitting, _LEAST_KEPT), _MOST_KEPT)
        self._places: dict[tuple[str, Scalar], int | None] = {}
        self._spans: dict[str, tuple[State, tuple[float, float] | None]] = {}
        self._facets: OrderedDict[tuple[str, Filter | None], tuple[State, Facet]] = OrderedDict()
        self._lock = threading.Lock()

    def mask(
        self, where: Filter, now: StateAttributes, checkpoint: Callable[[], None]
    ) -> FilterMask:
        """The items of a state that fit. Threads that ask the same wait for one answer."""
        with self._lock:
            kept = self._filters.setdefault(where, _Kept())
            self._filters.move_to_end(where)
            while len(self._filters) > self._most:
                self._filters.popitem(last=False)
        with kept.lock:
            return kept.at(where, now, lambda it: rows_matching(it, self.columns, checkpoint))

    def place_of(self, name: str, value: Scalar) -> int | None:
        """Where a value stands in the column of an attribute; None if it is not there."""
        column = self.columns.get(name)
        if column is None:
            return None
        if (name, value) not in self._places:
            self._places[name, value] = place_of(value, column.values)
        return self._places[name, value]

    def span(self, name: str, now: StateAttributes) -> tuple[float, float] | None:
        """The lowest and the highest value of a number."""
        state, span = self._spans.get(name, (None, None))
        if state != now.snapshot.state:
            span = now.spread(name).ends()
            self._spans[name] = now.snapshot.state, span
        return span

    def facet(
        self, name: str, where: Filter | None, state: State, count: Callable[[], Facet]
    ) -> Facet:
        """What `count` says of an attribute in a state; kept until it changes."""
        known = self._facets.get((name, where))
        if known is None or known[0] != state:
            known = state, count()
            with self._lock:
                self._facets[name, where] = known
                while len(self._facets) > _MOST_FACETS:
                    self._facets.popitem(last=False)
        return known[1]


class AttributesKeeper:
    """Gives out the attributes of a state. Thread safe."""

    def __init__(self) -> None:
        self._none = SegmentAttributes(Columns(0, {}))
        self._kept: weakref.WeakKeyDictionary[Segment, SegmentAttributes]
        self._kept = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def at(self, view: CatalogView, snapshot: Snapshot) -> StateAttributes:
        """Those of a snapshot that has its changes and is the state of `view`."""
        assert snapshot.changes is not None
        if snapshot.segment is None:
            return StateAttributes(snapshot, snapshot.changes, self._none)
        with self._lock:
            kept = self._kept.get(snapshot.segment)
            if kept is None:
                kept = SegmentAttributes(_columns_of(view, snapshot.segment))
                self._kept[snapshot.segment] = kept
        return StateAttributes(snapshot, snapshot.changes, kept)


def _columns_of(view: CatalogView, segment: Segment) -> Columns:
    """The columns of a segment; of an earlier version, which has none, from its items."""
    if segment.columns is not None:
        return segment.columns
    builder = ColumnsBuilder(segment.size, view.schema())
    for ids, attributes in view.attributes(_BATCH):
        rows = segment.positions_of(ids)
        is_there = rows >= 0
        own = [some for some, there in zip(attributes, is_there, strict=True) if there]
        builder.add(rows[is_there].tolist(), own)
    return Columns(segment.size, dict(builder.columns()))
