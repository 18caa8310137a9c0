"""Which items fit a filter, remembered between searches and carried over from state to state.

Asking SQLite for a broad filter takes long in a large gallery; after a change only the changed
items are looked at.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedder.types import AttributeValue
from indexer.catalog.read import CatalogView
from indexer.filters.tree import Filter
from indexer.index.kinds import Bits
from indexer.live.snapshot import FilterMask, Snapshot, clear_bits, set_bits
from indexer.types import Ids

_MAX_FILTERS = 64
_MAX_CHANGES = 20_000  # with more of them, asking SQLite for everything is faster

_Changes = Sequence[tuple[int, Mapping[str, AttributeValue]]]


@dataclass(frozen=True, slots=True)
class _Known:
    """What fitted at `seq`: positions in the segment of that name, numbers above it."""

    seq: int
    segment_name: str | None
    segment: Bits
    delta: Ids

    def mask(self, snapshot: Snapshot) -> FilterMask:
        return FilterMask(self.segment, np.isin(snapshot.delta.ids, self.delta))


class FilterCache:
    """Thread safe; holds the filters that were used last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Filter, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def mask(self, view: CatalogView, snapshot: Snapshot, where: Filter) -> FilterMask:
        """The items of `snapshot`, which is the state of `view`, that fit. Raises: FilterError."""
        with self._lock:
            known = self._known.get(where)
        fresh = self._fresh(known, view, snapshot, where)
        with self._lock:
            newest = self._known.get(where)
            if newest is None or newest.seq <= fresh.seq:
                self._known[where] = fresh
            self._known.move_to_end(where)
            while len(self._known) > _MAX_FILTERS:
                self._known.popitem(last=False)
        return fresh.mask(snapshot)

    def _fresh(
        self, known: _Known | None, view: CatalogView, snapshot: Snapshot, where: Filter
    ) -> _Known:
        state = snapshot.state
        if known is not None and known.segment_name == state.segment and known.seq <= state.seq:
            if known.seq == state.seq:
                return known
            changes = view.attributes_since(known.seq, _MAX_CHANGES + 1)
            if len(changes) <= _MAX_CHANGES:
                return _carried(known, changes, snapshot, where)
        return _known_of(snapshot, view.matching(where))


def mask_of(snapshot: Snapshot, ids: Ids) -> FilterMask:
    """The items of `snapshot` with these numbers."""
    return _known_of(snapshot, ids).mask(snapshot)


def _known_of(snapshot: Snapshot, ids: Ids) -> _Known:
    bits = np.zeros_like(snapshot.dead)
    positions = _positions(snapshot, ids)
    set_bits(bits, positions[positions >= 0])
    return _Known(snapshot.state.seq, snapshot.state.segment, bits, ids[positions < 0])


def _carried(known: _Known, changes: _Changes, snapshot: Snapshot, where: Filter) -> _Known:
    changed = np.array([number for number, _ in changes], np.int64)
    fits = np.array([where.matches(attributes) for _, attributes in changes], np.bool_)
    positions = _positions(snapshot, changed)
    bits = known.segment.copy()
    clear_bits(bits, positions[(positions >= 0) & ~fits])
    set_bits(bits, positions[(positions >= 0) & fits])
    others = known.delta[~np.isin(known.delta, changed)]
    delta = np.concatenate([others, changed[(positions < 0) & fits]])
    return _Known(snapshot.state.seq, snapshot.state.segment, bits, delta)


def _positions(snapshot: Snapshot, ids: Ids) -> NDArray[np.int64]:
    if snapshot.segment is None:
        return np.full(len(ids), -1, np.int64)
    return snapshot.segment.positions_of(ids)
