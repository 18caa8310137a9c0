"""Searchable snapshots of a gallery: an index segment, a delta of later inserts, and tombstones.

A snapshot is immutable. A change creates a new snapshot that shares the unchanged parts, while
running searches keep the old one. `SnapshotKeeper` returns the snapshot of the latest state.
"""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.durable import lock_folder
from kinlens.embedder.errors import GalleryCorruptError, GalleryError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.bits import Bits, count_of, empty_bits, has_bits, packed_bits, put_bits
from kinlens.indexer.catalog.database import Catalog
from kinlens.indexer.catalog.read import Base, CatalogView, State
from kinlens.indexer.columns.checkpoint import columns_at, store_columns, stored_columns
from kinlens.indexer.columns.columns import Columns
from kinlens.indexer.index.copies import by_owner
from kinlens.indexer.index.faiss import range_search
from kinlens.indexer.index.index_types import Effort
from kinlens.indexer.index.segment import COPY_S, SEGMENTS, Segment
from kinlens.indexer.live.compaction import collect
from kinlens.indexer.live.delta import Delta
from kinlens.indexer.types import Ids, Scores, numbers_in

_OVERFETCH = 2  # extra items to fetch, as a multiple of the expected number of removed hits
_MAX_DROPPED = 0.25  # share of hidden items above which a search with a mask is faster
_COLLECT_S = 0.1
_RETRY_S = 60.0  # pause after a segment could not be opened
_ROUNDED = np.float32(2e-6)  # rounding differences between scores of the same two vectors
_GPU_STEP_S = 0.2  # how often to check for `close` while an index is copied to the GPU
_MIN_CHANGES, _CHANGED_PART = 2**15, 32  # changed items before a new checkpoint of columns
_MAX_ATTEMPTS = 8  # to open a segment that a compaction may delete before it is opened


class Nearest(NamedTuple):
    """The best items for each query, best first, ties by id.

    scores, ids: shape (Q, at most k); missing hits have id -1.
    certain: the number of leading hits (Q,) that no other item can precede. Later hits have the
        score of the last one; if other items have it too, any of them may be there.
    """

    scores: Scores
    ids: Ids
    certain: Ids


@dataclass(frozen=True, slots=True)
class FilterMask:
    """The items that pass a filter: positions in the segment and a mask of the delta's rows."""

    segment: Bits
    delta: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The items of a state. `tombstones` marks the removed positions of the segment.

    `hidden` marks the positions that the index must not return: for each content, the index
    returns its first position as long as any of its items is not removed.

    The segment contains the items of `state.segment_seq`; None if there were no items. `known` has
    the attributes of this state or of an earlier one: see `SnapshotKeeper.columns_of`.
    """

    state: State
    base: Base
    segment: Segment | None
    tombstones: Bits
    tombstone_count: int
    hidden: Bits
    hidden_count: int
    delta: Delta
    known: "_Known" = field(default_factory=lambda: _Known())

    @classmethod
    def load(cls, view: CatalogView, state: State, segment: Segment | None) -> "Snapshot":
        """Load the snapshot of a state: its open segment and all later changes."""
        delta = Delta.of(*view.added_since(state.segment_seq))
        if segment is None:
            none = empty_bits(0)
            return cls(state, state.base, None, none, 0, none, 0, delta)
        gone, copies = segment.removed, segment.copies
        hidden = gone if copies is None else ~copies.folded(~gone)
        loaded = cls(state, state.base, segment, gone, 0, hidden, 0, delta)
        return loaded._without(view.removed_since(state.segment_seq))

    def advanced(self, view: CatalogView, state: State) -> "Snapshot":
        """The snapshot of a later state with the same segment, even if a newer segment exists."""
        removed = view.removed_since(self.state.seq)
        delta = self.delta.changed(*view.added_since(self.state.seq), removed)
        later = replace(self, state=state, delta=delta, known=_Known(self.known.columns))
        if self.segment is not None and len(removed):
            return later._without(removed)
        return later

    @property
    def size(self) -> int:
        """Number of items that are not removed."""
        return self.segment_size - self.tombstone_count + self.delta.size

    @property
    def segment_size(self) -> int:
        """Number of rows of the segment, including removed items. The rows of the delta follow."""
        return 0 if self.segment is None else self.segment.size

    def ids_of(self, rows: Ids) -> Ids:
        """The id of the item in each of these rows (N,)."""
        is_later = rows >= self.segment_size
        ids = np.empty(len(rows), np.int64)
        ids[is_later] = self.delta.ids[rows[is_later] - self.segment_size]
        if self.segment is not None:
            ids[~is_later] = self.segment.row_ids.of(rows[~is_later])
        return ids

    def rows_of(self, ids: Ids) -> Ids:
        """The row of each of these items, removed or not.

        Raises: GalleryCorruptError if an item is not in the snapshot.
        """
        rows = np.full(len(ids), -1, np.int64)
        if self.segment is not None:
            rows = self.segment.positions_of(ids)
        others = rows < 0
        found = self.delta.positions_of(ids[others])
        if len(found) < np.count_nonzero(others):
            raise GalleryCorruptError(
                "An item of the catalogue is missing from the index. Rebuild the index: "
                "kinlens-index compact GALLERY --rebuild."
            )
        rows[others] = self.segment_size + found
        return rows

    def range_search(self, query: Embeddings, least: float, among: FilterMask | None) -> Ids:
        """The rows of all items with a score of at least `least` for the query (1, D).

        Compares the query with every item that passes `among`.
        """
        bits, later = self._allowed(among)
        own = packed_bits(later)
        rows = self.segment_size + range_search(self.delta.vectors, query, least, own)
        if self.segment is None:
            return rows
        return np.concatenate([self.segment.index.range_search(query, least, bits), rows])

    def _allowed(self, among: FilterMask | None) -> tuple[Bits | None, NDArray[np.bool_]]:
        """Searchable positions of the segment (None: all of them) and rows of the delta."""
        if among is None:
            return (~self.tombstones if self.tombstone_count else None), self.delta.alive
        return among.segment & ~self.tombstones, self.delta.alive & among.delta

    def nearest(
        self,
        queries: Embeddings,
        k: int,
        among: FilterMask | None = None,
        *,
        exact: bool = False,
        effort: int | None = None,
        copies: int | None = None,
    ) -> Nearest:
        """The best items for each query (Q, D).

        among: the items to search; None for all.
        effort: efSearch or nprobe; None for the tuned one.
        copies: at most this number of items with equal content, those with the lowest ids; None
            for all.
        """
        if k < 1:  # an empty gallery limits k to 0
            none = np.empty((len(queries), 0), np.int64)
            return Nearest(none.astype(np.float32), none, np.zeros(len(queries), np.int64))
        if self.segment is not None and not len(self.delta.alive):
            scores, ids = self._in_segment(queries, k, among, exact, effort)
        else:
            scores, ids = self.delta.nearest(queries, k, None if among is None else among.delta)
            if self.segment is not None:
                found = self._in_segment(queries, k, among, exact, effort)
                scores = np.concatenate([found[0], scores], axis=1)
                ids = np.concatenate([found[1], ids], axis=1)
        scores, ids = _sorted(scores, ids, k)
        if len(queries) > 1:
            scores, ids = self._with_exact_ties(queries, scores, ids)
        certain = _certain(scores, ids, k)
        if self.delta.has_copies or (self.segment is not None and self.segment.copies is not None):
            return self._with_copies(Nearest(scores, ids, certain), k, among, copies or k)
        return Nearest(scores, ids, certain)

    def _with_copies(
        self, firsts: Nearest, k: int, among: FilterMask | None, limit: int
    ) -> Nearest:
        """The `k` best items of the contents found, at most `limit` of each content."""
        is_hit = firsts.ids >= 0
        names, content = np.full(firsts.ids.shape, -1, np.int64), np.zeros(is_hit.shape, np.int64)
        names[is_hit] = self.rows_of(firsts.ids[is_hit])
        distinct, content[is_hit] = np.unique(names[is_hit], return_inverse=True)
        owners, rows = self._rows_like(distinct, among, limit)
        if np.array_equal(rows, distinct):
            return firsts
        counts = np.bincount(owners, minlength=len(distinct))
        sizes = np.where(is_hit, counts[content], 0)
        # Contents whose items follow the k-th item are omitted, unless their score ties with it.
        is_full = np.cumsum(sizes, axis=1) >= k
        last = np.take_along_axis(firsts.scores, is_full.argmax(axis=1)[:, None], axis=1)
        is_kept = is_hit & (~is_full.any(axis=1, keepdims=True) | (firsts.scores >= last))
        is_complete = (firsts.certain == is_hit.sum(axis=1)) | (is_hit & ~is_kept).any(axis=1)
        sizes, content = sizes[is_kept], content[is_kept]
        queries = np.repeat(np.nonzero(is_kept)[0], sizes)
        given = np.repeat(firsts.scores[is_kept], sizes)
        found = self.ids_of(rows[numbers_in((np.cumsum(counts) - counts)[content], sizes)])
        order = np.lexsort((found, -given, queries))
        queries, given, found = queries[order], given[order], found[order]
        places = np.arange(len(order)) - np.searchsorted(queries, queries)
        shown = places < k
        scores = np.full((len(is_hit), k), -1, np.float32)
        ids = np.full(scores.shape, -1, np.int64)
        scores[queries[shown], places[shown]] = given[shown]
        ids[queries[shown], places[shown]] = found[shown]
        lowest = np.where(is_hit, firsts.scores, np.inf).min(axis=1, keepdims=True)
        is_above = (ids >= 0) & ((scores > lowest) | is_complete[:, None])
        return Nearest(scores, ids, np.count_nonzero(is_above, axis=1))

    def _rows_like(self, firsts: Ids, among: FilterMask | None, limit: int) -> tuple[Ids, Ids]:
        """The rows that pass `among` with the contents that begin with these rows (C,).

        limit: of the rows of a content, the first ones are returned.

        Returns (the index in `firsts` (N,), ascending; the row (N,), ascending for each).
        """
        later = firsts - self.segment_size
        is_copied = (later >= 0) & self.delta.rows.is_copied[np.maximum(later, 0)]
        copies = None if self.segment is None else self.segment.copies
        contents = np.full(len(firsts), -1) if copies is None else copies.content_of(firsts)
        alone = np.flatnonzero(~is_copied & (contents < 0))
        if len(alone) == len(firsts):
            return alone, firsts
        bits, alive = self._allowed(among)
        found = [(alone, firsts[alone])]
        if copies is not None:
            copied = np.flatnonzero(contents >= 0)
            owners, rows = copies.rows_of(contents[copied], bits, limit)
            found.append((copied[owners], rows))
        for owner in np.flatnonzero(is_copied).tolist():
            own = list(islice(self.delta.rows_of(int(later[owner]), alive), limit))
            found.append((np.full(len(own), owner), self.segment_size + np.array(own, np.int64)))
        return by_owner(found)

    def _with_exact_ties(self, queries: Embeddings, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        """Recompute nearly equal scores, so that equal vectors have equal scores.

        For batches of queries, FAISS rounds the score of a pair differently in a block of vectors,
        a list of candidates and the delta.
        """
        with np.errstate(invalid="ignore"):  # the gap between two missing hits is NaN
            gaps = scores[:, :-1] - scores[:, 1:]
        for row in np.flatnonzero(((gaps > 0) & (gaps < _ROUNDED)).any(axis=1)).tolist():
            found, vectors = self.vectors(ids[row][ids[row] >= 0])
            exact = np.einsum("nd,d->n", vectors, queries[row])
            order = np.lexsort((found, -exact))
            scores[row, : len(order)] = np.clip(exact[order], -1, 1)
            ids[row, : len(order)] = found[order]
        return scores, ids

    def vectors(self, ids: Ids, among: FilterMask | None = None) -> tuple[Ids, Embeddings]:
        """Ids (N,) and vectors (N, D) of the given items that pass `among`, in any order.

        Raises: GalleryCorruptError if an item is not in the snapshot.
        """
        rows = self.rows_of(ids)
        is_later = rows >= self.segment_size
        positions, rows = rows[~is_later], rows[is_later] - self.segment_size
        if among is not None:
            positions = positions[has_bits(among.segment, positions)]
            rows = rows[among.delta[rows]]
        if self.segment is None:
            return self.delta.ids[rows], self.delta.vectors[rows]
        found = self.segment.index.vectors(positions)
        if len(rows):
            found = np.concatenate([found, self.delta.vectors[rows]])
        return np.concatenate([self.segment.row_ids.of(positions), self.delta.ids[rows]]), found

    def _in_segment(
        self, queries: Embeddings, k: int, among: FilterMask | None, exact: bool, effort: int | None
    ) -> tuple[Scores, Ids]:
        assert self.segment is not None
        index, tuned = self.segment.index, self.segment.tuned
        chosen = tuned if effort is None else Effort(effort, tuned.k_factor)
        if among is None and self.hidden_count and not exact:
            return self._search_overfetched(queries, k, chosen)
        if among is None:
            bits = ~self.hidden if self.hidden_count else None
        else:
            bits = among.segment & ~self.tombstones
            bits = bits if self.segment.copies is None else self.segment.copies.folded(bits)
        if exact:
            scores, positions = index.exact(queries, k, bits)
            return scores, self._ids_at(positions)
        return self._search(queries, k, chosen, bits)

    def _search_overfetched(
        self, queries: Embeddings, k: int, effort: Effort
    ) -> tuple[Scores, Ids]:
        """Over-fetch and drop hidden items: much faster than a FAISS search with a mask."""
        assert self.segment is not None
        hidden = self.hidden_count - self.segment.unindexed
        if hidden > _MAX_DROPPED * self.segment.size:
            return self._search(queries, k, effort, ~self.hidden)
        excess = 1 + int(_OVERFETCH * k * hidden / self.segment.size)
        wanted = k + min(excess, hidden)
        scores, positions = self.segment.index.search(queries, wanted, effort)
        is_removed = has_bits(self.hidden, positions)
        is_removed |= positions < 0
        if not is_removed.any():
            return scores[:, :k], self._ids_at(positions[:, :k])
        order = np.argsort(is_removed, axis=1, kind="stable")[:, :k]
        scores = np.take_along_axis(
            np.where(is_removed, np.float32(-np.inf), scores), order, axis=1
        )
        ids = self._ids_at(np.take_along_axis(np.where(is_removed, -1, positions), order, axis=1))
        short = np.flatnonzero((ids < 0).any(axis=1))
        if len(short) and self.segment.size - self.tombstone_count > 0:
            again = self._search(queries[short], k, effort, ~self.hidden)
            width = again[0].shape[1]
            scores[short, :width], ids[short, :width] = again
        return scores, ids

    def _search(
        self, queries: Embeddings, k: int, effort: Effort, allowed: Bits | None
    ) -> tuple[Scores, Ids]:
        assert self.segment is not None
        scores, positions = self.segment.index.search(queries, k, effort, allowed)
        return scores, self._ids_at(positions)

    def _ids_at(self, positions: NDArray[np.int64]) -> Ids:
        assert self.segment is not None
        ids = self.segment.row_ids.of(positions)
        is_missing = positions < 0
        return np.where(is_missing, -1, ids) if np.count_nonzero(is_missing) else ids

    def _without(self, removed: Ids) -> "Snapshot":
        """This snapshot without these items of the segment; other ids are ignored."""
        assert self.segment is not None
        positions = self.segment.positions_of(removed)
        positions = positions[positions >= 0]
        tombstones, hidden = self.tombstones.copy(), self.hidden.copy()
        put_bits(tombstones, positions, True)
        if self.segment.copies is not None:
            positions = self.segment.copies.hidden_by(positions, tombstones)
        put_bits(hidden, positions, True)
        return replace(
            self,
            tombstones=tombstones,
            tombstone_count=count_of(tombstones, self.segment_size),
            hidden=hidden,
            hidden_count=count_of(hidden, self.segment_size),
        )


@dataclass(slots=True)
class _Known:
    """The newest columns that are known for a snapshot; None if no filter needed any."""

    columns: Columns | None = None


class Reading(NamedTuple):
    """One state of a gallery: the catalogue in a read transaction, and the snapshot."""

    view: CatalogView
    snapshot: Snapshot


class SnapshotKeeper:
    """Returns the latest snapshot. A search uses one read transaction, so states never mix."""

    def __init__(
        self, catalog: Catalog, generation: Path, device: str, verify_hashes: bool | None
    ) -> None:
        self.catalog = catalog
        self.generation = generation
        self._device = device
        self._verify_hashes = verify_hashes
        self._collector = _Collector(generation)
        self._refreshing = threading.Lock()
        self._opener: threading.Thread | None = None
        self._next: Snapshot | None = None
        self._failed: tuple[Base | None, float] = (None, 0.0)
        self._is_closed = False
        self._snapshot: Snapshot | None = None
        self._advancing = threading.Lock()
        self._columns: Columns | None = None  # the newest ones
        self._loading = threading.Lock()  # not `_advancing`, which all searches take

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reading]:
        """The latest state, for the duration of a `with` block. Raises: GalleryCorruptError."""
        missing = 0
        while missing < _MAX_ATTEMPTS:
            with self.catalog.reading() as view:
                state = view.state()
                try:
                    snapshot = self.at(view, state)
                except FileNotFoundError:
                    missing += 1  # replaced by a compaction in the meantime, or lost
                    continue
                if snapshot is not None:
                    yield Reading(view, snapshot)
                    return
        raise GalleryCorruptError(
            f"The segment {state.segment} of the gallery is missing below {self.generation}. "
            "Rebuild it from the catalogue: kinlens-index compact GALLERY --rebuild."
        )

    def columns_of(self, now: Reading) -> Columns:
        """The attributes of the state of `now`.

        They are read, or brought up to date, when a filter or a facet needs them. Only searches
        with a filter wait for that; those of an earlier state have its columns.
        """
        known = now.snapshot.known
        columns = known.columns
        if columns is None or columns.seq != now.snapshot.state.seq:
            with self._loading:
                columns = columns_at(self.generation, now.view, self._columns, known.columns)
                known.columns = columns
                if self._columns is None or self._columns.seq <= columns.seq:
                    self._columns = columns
        return columns

    def follow(self) -> None:
        """Apply new writes to what searches use, so that no search has to do it."""
        if self._snapshot is not None:
            with contextlib.suppress(GalleryError), self.reading() as now:  # the next search raises
                if self._columns is not None:
                    self.columns_of(now)

    def checkpoint(self) -> None:
        """Store the columns if many items changed since their checkpoint. Raises: OSError."""
        columns = self._columns
        many = _MIN_CHANGES if columns is None else max(_MIN_CHANGES, columns.size // _CHANGED_PART)
        if columns is None or columns.changes < many:
            return
        with self.catalog.reading() as view:
            stored = stored_columns(self.generation, view)  # perhaps by another process since
            is_old = stored is None or len(view.changed_since(stored.seq)) >= many
        if stored is None or is_old:
            stored = store_columns(self.generation, columns)
        # Its values are sorted, and its arrays are not in memory.
        with self._loading, self.catalog.reading() as view:  # a state that no search is beyond
            self._columns = columns_at(self.generation, view, stored, self._columns)

    def newest(self) -> Snapshot:
        """The snapshot of the latest state, for searches that read no rows of the catalogue.

        Raises: GalleryCorruptError.
        """
        current = self._snapshot
        if current is not None and current.state == self.catalog.state() and self._next is None:
            return current
        with self.reading() as reading:
            return reading.snapshot

    def at(self, view: CatalogView, state: State) -> Snapshot | None:
        """The snapshot of `state`; None if another thread has already advanced beyond it."""
        current = self._snapshot
        if current is None or current.state != state or self._next is not None:
            with self._advancing:
                current = self._advanced(view, state)
        return current

    def _advanced(self, view: CatalogView, state: State) -> Snapshot | None:
        current = self._snapshot
        if current is not None and state.is_before(current.state):
            return None
        if current is None or (
            current.base != state.base
            and not self._is_next(state.base)
            and not self._can_keep_current(current, state)
        ):
            with self._refreshing:  # another thread may be opening it
                pass
            if not self._is_next(state.base):
                self._next = Snapshot.load(view, state, self._opened(state))
        following = self._next
        if following is not None and following.base == state.base:
            if current is not None and current.base == state.base:
                self._next = None  # two threads have opened it; cached masks are of the first
            elif state.is_before(following.state):
                return None
            else:
                current, self._next = following, None
        elif following is not None and following.state.is_before(state):
            self._next = None  # a later compaction has replaced it
        assert current is not None
        if current.state != state:
            current = current.advanced(view, state)
        self._check_size(current)
        self._snapshot = current
        return current

    def _check_size(self, snapshot: Snapshot) -> None:
        if snapshot.size != snapshot.state.size:
            raise GalleryCorruptError(
                f"The index of {self.generation} has {snapshot.size:,} items, the catalogue counts "
                f"{snapshot.state.size:,}: it is damaged. Restore a backup: kinlens-index restore."
            )

    def _opened(self, state: State) -> Segment | None:
        """Open the segment of a state; waits until it is on the GPU, if there is one, unless a
        search needs it now.
        """
        if state.segment is None:
            return None
        segment = open_segment(
            self.generation / SEGMENTS / state.segment,
            self._device,
            self._verify_hashes,
            self._collector,
        )
        current, copy = self._snapshot, segment.index.gpu
        end = time.monotonic() + COPY_S
        if current is None or current.state.seq >= state.segment_seq:
            while copy is not None and not self._is_closed and time.monotonic() < end:
                if copy.wait(_GPU_STEP_S):
                    break
        return segment

    def _can_keep_current(self, current: Snapshot, state: State) -> bool:
        """Whether searches can use the current segment while a thread opens the new one."""
        if current.state.seq < state.segment_seq:
            return False  # the catalogue no longer lists the earlier removals
        is_opening = self._opener is not None and self._opener.is_alive()
        if not is_opening and not self._just_failed(state.base):
            self._opener = threading.Thread(target=self.refresh, name="segment")
            self._opener.start()
        return True

    def refresh(self) -> None:
        """Open the latest segment unless it is in use already. Searches are not blocked."""
        if not self._refreshing.acquire(blocking=False):
            return
        base: Base | None = None
        try:
            current, before = self._snapshot, self.catalog.state()
            base = before.base
            if (
                self._is_closed
                or current is None
                or current.base == base
                or self._just_failed(base)
            ):
                return
            segment = self._opened(before)
            with self.catalog.reading() as view:
                state = view.state()
                if state.base != base:
                    return  # replaced by another compaction
                following = Snapshot.load(view, state, segment)
                if self._columns is not None:  # searches use filters
                    self.columns_of(Reading(view, following))
                self._next = following
        except FileNotFoundError:
            return  # replaced by another compaction
        except Exception as error:  # such as a MemoryError; searches keep the current segment
            logging.getLogger(__name__).warning("a new segment cannot be opened: %s", error)
            self._failed = base, time.monotonic()
            return
        finally:
            self._refreshing.release()
        with contextlib.suppress(GalleryError):  # the next search raises it
            self.newest()

    def _just_failed(self, base: Base) -> bool:
        """Whether opening this segment failed a short time ago."""
        failed, when = self._failed
        return failed == base and time.monotonic() - when < _RETRY_S

    def _is_next(self, base: Base) -> bool:
        """Whether a snapshot with this segment has been prepared."""
        return self._next is not None and self._next.base == base

    def close(self) -> None:
        """Release the segment and delete unused files of the generation."""
        self._is_closed = True
        if self._opener is not None and self._opener is not threading.current_thread():
            self._opener.join()
        with self._refreshing:
            pass
        with self._advancing:
            self._snapshot = self._next = None
        self._collector.finish()


class _Collector:
    """Deletes unused segments and vectors in a thread, so that no search waits for it."""

    def __init__(self, generation: Path) -> None:
        self._generation = generation
        self._timer: threading.Timer | None = None

    def __call__(self) -> None:
        # Delayed: the released segment has its files open until this returns.
        self._timer = threading.Timer(_COLLECT_S, collect, (self._generation,))
        self._timer.start()

    def finish(self) -> None:
        """Run a pending collection now."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            timer.join()
            collect(self._generation)


def open_segment(
    folder: Path,
    device: str,
    verify_hashes: bool | None,
    on_release: Callable[[], None] = lambda: None,
) -> Segment:
    """Open a segment. Its lock keeps the files on disk while it is in use.

    `on_release` is called once the segment is garbage collected.

    Raises: FileNotFoundError if the segment has been removed; GalleryCorruptError.
    """
    descriptor = lock_folder(folder)
    try:
        segment = Segment.open(folder, verify_hashes=verify_hashes, device=device)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, GalleryCorruptError) and not folder.is_dir():
            raise FileNotFoundError(folder) from error  # it was being deleted
        raise
    weakref.finalize(segment, _release, descriptor, on_release).atexit = False
    return segment


def _release(descriptor: int, on_release: Callable[[], None]) -> None:
    os.close(descriptor)
    on_release()


def _certain(scores: Scores, ids: Ids, k: int) -> Ids:
    """The number of leading hits (Q,) above the last one; all hits if fewer than `k` exist."""
    found: Ids = np.count_nonzero(ids >= 0, axis=1)
    if ids.shape[1] < k:
        return found
    above: Ids = np.count_nonzero(scores > scores[:, -1:], axis=1)
    return np.where(found < k, found, above)


def _sorted(scores: Scores, ids: Ids, k: int) -> tuple[Scores, Ids]:
    """Sort hits by descending score, ties by id, missing hits last."""
    if np.count_nonzero(scores[:, 1:] >= scores[:, :-1]):
        scores = np.where(ids < 0, np.float32(-np.inf), scores)
        order = np.lexsort((ids, -scores), axis=1)
        scores = np.take_along_axis(scores, order, axis=1)
        ids = np.take_along_axis(ids, order, axis=1)
    return scores[:, :k], ids[:, :k]
