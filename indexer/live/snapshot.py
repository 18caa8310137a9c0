"""One state of a gallery, ready to be searched: a segment, what came after it, what has gone.

A snapshot never changes. A change makes a new one that shares what stayed, while searches go on in
the old one. The keeper gives out that of the newest state.
"""

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import faiss
import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.durable import hold
from kinlens.embedder.errors import GalleryCorruptError, GalleryError
from kinlens.embedder.machine import core_count
from kinlens.embedder.types import Embeddings
from kinlens.indexer.bits import Bits, empty_bits, has_bits, packed_bits, put_bits
from kinlens.indexer.catalog.database import Catalog
from kinlens.indexer.catalog.read import Attributes, Base, CatalogView, State
from kinlens.indexer.index.faiss import reaching
from kinlens.indexer.index.kinds import Effort
from kinlens.indexer.index.segment import COPY_S, Segment
from kinlens.indexer.live.compaction import SEGMENTS, collect
from kinlens.indexer.types import Ids, Scores, places_of
from kinlens.values import Scalar, values_in

_FIRST_CAPACITY = 256  # of a delta
_SPARE = 2  # how many times the expected number of removed items a search fetches in excess
_COLLECT_S = 0.1
_RETRY_S = 60.0  # after which a segment that could not be opened is tried again
_ROUNDED = np.float32(2e-6)  # by which scores of one pair of vectors may differ
_GPU_STEP_S = 0.2  # between looks whether a gallery is closed while its index is copied
_PATIENCE = 8  # a segment that is gone when it is to be opened is looked up anew that often


class _Rows:
    """Arrays that grow behind the views that were handed out, so that these stay valid."""

    def __init__(self, ids: Ids, vectors: Embeddings, capacity: int) -> None:
        self.used = len(ids)
        self.ids = np.empty(capacity, np.int64)
        self.vectors = np.empty((capacity, vectors.shape[1]), np.float32)
        self.ids[: self.used] = ids
        self.vectors[: self.used] = vectors

    def append(self, ids: Ids, vectors: Embeddings) -> bool:
        """Whether there was room."""
        end = self.used + len(ids)
        if end > len(self.ids):
            return False
        self.ids[self.used : end] = ids
        self.vectors[self.used : end] = vectors
        self.used = end
        return True


@dataclass(frozen=True, slots=True)
class Delta:
    """The first `count` rows under ascending item numbers; `alive` (count,) are not removed.

    A delta never changes; `changed` must be called on the newest one.
    """

    rows: _Rows
    alive: NDArray[np.bool_]

    @classmethod
    def of(cls, ids: Ids, vectors: Embeddings) -> "Delta":
        """A delta of items with ascending numbers (N,) and vectors (N, D)."""
        rows = _Rows(ids, vectors, max(_FIRST_CAPACITY, len(ids)))
        return cls(rows, np.ones(len(ids), np.bool_))

    @property
    def ids(self) -> Ids:
        """The number of each row."""
        return self.rows.ids[: len(self.alive)]

    @property
    def vectors(self) -> Embeddings:
        """The vector (D,) of each row."""
        return self.rows.vectors[: len(self.alive)]

    @property
    def size(self) -> int:
        """Number of items that are alive."""
        return int(self.alive.sum())

    def changed(self, ids: Ids, vectors: Embeddings, removed: Ids) -> "Delta":
        """With more items, whose numbers are above all others, and without the removed ones."""
        rows = self.rows
        if rows.used != len(self.alive) or not rows.append(ids, vectors):
            capacity = 2 * (len(self.alive) + len(ids))
            rows = _Rows(self.ids, self.vectors, max(_FIRST_CAPACITY, capacity))
            rows.append(ids, vectors)
        alive = np.concatenate([self.alive, np.ones(len(ids), np.bool_)])
        grown = Delta(rows, alive)
        alive[grown.positions_of(removed)] = False
        return grown

    def positions_of(self, ids: Ids) -> NDArray[np.int64]:
        """The rows of these items; those that are not here are left out."""
        found = places_of(ids, self.ids)
        return found[found >= 0]

    def nearest(
        self, queries: Embeddings, k: int, among: NDArray[np.bool_] | None = None
    ) -> tuple[Scores, Ids]:
        """The best of each query (Q, D), shape (Q, at most k), best first; -1 where fewer.

        `among` (N,) leaves only some rows.
        """
        chosen = self.alive if among is None else self.alive & among
        shape = (len(queries), min(k, int(chosen.sum())))
        scores, positions = np.empty(shape, np.float32), np.empty(shape, np.int64)
        if not scores.size:
            return scores, positions
        bitmap = None if chosen.all() else packed_bits(chosen)
        _compare(queries, self.vectors, scores, positions, bitmap)
        return np.clip(scores, -1, 1), np.where(positions < 0, -1, self.ids[positions])


def _compare(
    queries: Embeddings,
    vectors: Embeddings,
    scores: Scores,
    positions: Ids,
    bitmap: NDArray[np.uint8] | None,
) -> None:
    """Inner products by FAISS, without a copy of the vectors into an index."""
    faiss.omp_set_num_threads(1 if len(queries) == 1 else core_count())
    queries = np.ascontiguousarray(queries, dtype=np.float32)
    faiss.knn_inner_product(
        faiss.swig_ptr(queries),
        faiss.swig_ptr(vectors),
        vectors.shape[1],
        len(queries),
        len(vectors),
        scores.shape[1],
        faiss.swig_ptr(scores),
        faiss.swig_ptr(positions),
        None if bitmap is None else faiss.IDSelectorBitmap(bitmap),
    )


@dataclass(frozen=True)
class Changes:
    """The attributes of the items that were added or changed after the segment, oldest first.

    rows (E,): of a snapshot; of one row the last entry counts. attributes: the first E of them;
    later changes append to the same list. looked_at: the number of entries at which those that were
    replaced are dropped next.
    """

    rows: Ids
    attributes: list[Attributes]
    looked_at: int = 1024

    def extended(self, rows: Ids, attributes: Sequence[Attributes]) -> "Changes":
        """With later ones."""
        if not len(rows):
            return self
        known = self.attributes
        if len(known) > len(self.rows):  # another state has extended it already
            known = known[: len(self.rows)]
        known.extend(attributes)
        found = Changes(np.concatenate([self.rows, rows]), known, self.looked_at)
        if len(known) < self.looked_at:
            return found
        last = np.flatnonzero(found.is_last)
        if 2 * len(last) > len(known):
            return replace(found, looked_at=2 * len(known))
        # A few items that are changed all the time must not fill the memory.
        kept = [known[entry] for entry in last.tolist()]
        return Changes(found.rows[last], kept, max(1024, 2 * len(kept)))

    def values(self, name: str) -> list[tuple[Scalar, ...]]:
        """The different values of an attribute in each entry (E,)."""
        if name not in self._values:
            some = self.attributes[: len(self.rows)]
            self._values[name] = [
                tuple(dict.fromkeys(values_in(attributes.get(name)))) for attributes in some
            ]
        return self._values[name]

    @functools.cached_property
    def _values(self) -> dict[str, list[tuple[Scalar, ...]]]:
        return {}

    @functools.cached_property
    def is_last(self) -> NDArray[np.bool_]:
        """Which entries (E,) no later one replaces."""
        found = np.zeros(len(self.rows), np.bool_)
        _, places = np.unique(self.rows[::-1], return_index=True)
        found[len(self.rows) - 1 - places] = True
        return found


@dataclass(frozen=True, slots=True)
class FilterMask:
    """The items that a filter leaves: positions in the segment, rows of the delta."""

    segment: Bits
    delta: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The items of a state. `dead` marks positions of the segment that have been removed.

    The segment, if there were any items, holds those of `state.segment_seq`. `changes` are read
    when a filter or a facet needs them first.
    """

    state: State
    base: Base
    segment: Segment | None
    dead: Bits
    dead_count: int
    delta: Delta
    changes: Changes | None = None

    @classmethod
    def load(cls, view: CatalogView, state: State, segment: Segment | None) -> "Snapshot":
        """The snapshot of a state whose segment is open; with all that came after the segment."""
        delta = Delta.of(*view.added_since(state.segment_seq))
        gone, count = empty_bits(0), 0
        if segment is not None:
            gone, count = segment.gone, segment.manifest.gone
        loaded = cls(state, state.base, segment, gone, count, delta)
        return loaded._without(view.removed_since(state.segment_seq))

    def advanced(self, view: CatalogView, state: State) -> "Snapshot":
        """The snapshot of a later state, with this segment, although there may be a newer one."""
        removed = view.removed_since(self.state.seq)
        delta = self.delta.changed(*view.added_since(self.state.seq), removed)
        later = replace(self, state=state, delta=delta)._without(removed)
        if self.changes is None:
            return later
        changes = self.changes.extended(*later._changes_since(view, self.state.seq))
        return replace(later, changes=changes)

    def with_changes(self, view: CatalogView, earlier: "_Loaded | None" = None) -> "Snapshot":
        """The same with the attributes of what came after the segment; `view` is of its state. The
        changes of an `earlier` state with this segment are not read again.
        """
        changes, seq = Changes(np.empty(0, np.int64), []), self.base[1]
        if earlier is not None and earlier.base == self.base and earlier.seq <= self.state.seq:
            changes, seq = earlier.changes, earlier.seq
        return replace(self, changes=changes.extended(*self._changes_since(view, seq)))

    def _changes_since(self, view: CatalogView, seq: int) -> tuple[Ids, list[Attributes]]:
        found = view.attributes_since(seq)
        rows = self.rows_of(np.array([number for number, _ in found], np.int64))
        return rows, [attributes for _, attributes in found]

    @property
    def size(self) -> int:
        """Number of items that are alive."""
        return self.segment_size - self.dead_count + self.delta.size

    @property
    def segment_size(self) -> int:
        """Rows of the segment, also of removed items; the rows of the delta follow them."""
        return 0 if self.segment is None else self.segment.size

    def number_of(self, row: int) -> int:
        """The number of the item in a row."""
        if row < self.segment_size and self.segment is not None:
            return int(self.segment.numbers.of(np.array([row]))[0])
        return int(self.delta.ids[row - self.segment_size])

    def rows_of(self, ids: Ids) -> Ids:
        """The row of each of these items, removed or not.

        Raises: GalleryCorruptError for an item that is not here.
        """
        rows = np.full(len(ids), -1, np.int64)
        if self.segment is not None:
            rows = self.segment.positions_of(ids)
        others = rows < 0
        found = self.delta.positions_of(ids[others])
        if len(found) < np.count_nonzero(others):
            raise GalleryCorruptError(
                "An item of the catalogue is not in the index. Make the index again: "
                "kinlens-index compact GALLERY --rebuild."
            )
        rows[others] = self.segment_size + found
        return rows

    def reaching(self, query: Embeddings, least: float, among: FilterMask | None) -> Ids:
        """The rows of all items that `among` leaves whose score for the query (1, D) is at least
        `least`; by comparing with each.
        """
        bits, later = self._left(among)
        own = packed_bits(later)
        rows = self.segment_size + reaching(self.delta.vectors, query, least, own)
        if self.segment is None:
            return rows
        return np.concatenate([self.segment.index.reaching(query, least, bits), rows])

    def _left(self, among: FilterMask | None) -> tuple[Bits | None, NDArray[np.bool_]]:
        """Positions of the segment, None for all of them, and rows of the delta."""
        if among is None:
            return (~self.dead if self.dead_count else None), self.delta.alive
        return among.segment & ~self.dead, self.delta.alive & among.delta

    def nearest(
        self,
        queries: Embeddings,
        k: int,
        among: FilterMask | None = None,
        *,
        exact: bool = False,
        effort: int | None = None,
    ) -> tuple[Scores, Ids]:
        """The best of each query (Q, D), shape (Q, at most k): best first, equal ones by number.

        Where a query has fewer, number -1 fills its row. `effort` is efSearch or nprobe.
        """
        if k < 1:  # as many as there are
            return np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
        if self.segment is not None and not len(self.delta.alive):
            scores, ids = self._in_segment(queries, k, among, exact, effort)
        else:
            scores, ids = self.delta.nearest(queries, k, None if among is None else among.delta)
            if self.segment is not None:
                found = self._in_segment(queries, k, among, exact, effort)
                scores = np.concatenate([found[0], scores], axis=1)
                ids = np.concatenate([found[1], ids], axis=1)
        scores, ids = _ordered(scores, ids, k)
        return (scores, ids) if len(queries) == 1 else self._settled(queries, scores, ids)

    def _settled(self, queries: Embeddings, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        """The same where equal vectors have equal scores: of many queries FAISS rounds a score as
        it comes, in a block of vectors, a list of candidates or the delta.
        """
        with np.errstate(invalid="ignore"):  # between two that are missing
            gaps = scores[:, :-1] - scores[:, 1:]
        for row in np.flatnonzero(((gaps > 0) & (gaps < _ROUNDED)).any(axis=1)).tolist():
            numbers, vectors = self.vectors(ids[row][ids[row] >= 0])
            exact = np.einsum("nd,d->n", vectors, queries[row])
            order = np.lexsort((numbers, -exact))
            scores[row, : len(order)] = np.clip(exact[order], -1, 1)
            ids[row, : len(order)] = numbers[order]
        return scores, ids

    def vectors(self, ids: Ids, among: FilterMask | None = None) -> tuple[Ids, Embeddings]:
        """Numbers (N,) and vectors (N, D) of those of the items that `among` leaves, in any order.

        Raises: GalleryCorruptError for an item that is not here.
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
        return np.concatenate([self.segment.numbers.of(positions), self.delta.ids[rows]]), found

    def _in_segment(
        self,
        queries: Embeddings,
        k: int,
        among: FilterMask | None,
        exact: bool,
        effort: int | None,
    ) -> tuple[Scores, Ids]:
        assert self.segment is not None
        index, tuned = self.segment.index, self.segment.tuned
        chosen = tuned if effort is None else Effort(effort, tuned.k_factor)
        if among is None and self.dead_count and not exact:
            return self._despite_dead(queries, k, chosen)
        bits, _ = self._left(among)
        if exact:
            scores, positions = index.exact(queries, k, bits)
            return scores, self._numbers(positions)
        return self._search(queries, k, chosen, bits)

    def _despite_dead(self, queries: Embeddings, k: int, effort: Effort) -> tuple[Scores, Ids]:
        """Fetch a few more than k and drop the dead: much faster than asking FAISS to skip them."""
        assert self.segment is not None
        dead = self.dead_count - self.segment.unindexed
        excess = 1 + int(_SPARE * k * dead / self.segment.size)
        wanted = k + min(excess, dead)
        scores, positions = self.segment.index.search(queries, wanted, effort)
        is_dead = has_bits(self.dead, positions)
        is_dead |= positions < 0
        if not is_dead.any():
            return scores[:, :k], self._numbers(positions[:, :k])
        order = np.argsort(is_dead, axis=1, kind="stable")[:, :k]
        scores = np.take_along_axis(np.where(is_dead, np.float32(-np.inf), scores), order, axis=1)
        ids = self._numbers(np.take_along_axis(np.where(is_dead, -1, positions), order, axis=1))
        short = np.flatnonzero((ids < 0).any(axis=1))
        if len(short) and self.segment.size - self.dead_count > 0:
            again = self._search(queries[short], k, effort, ~self.dead)
            width = again[0].shape[1]
            scores[short, :width], ids[short, :width] = again
        return scores, ids

    def _search(
        self, queries: Embeddings, k: int, effort: Effort, allowed: Bits | None
    ) -> tuple[Scores, Ids]:
        assert self.segment is not None
        scores, positions = self.segment.index.search(queries, k, effort, allowed)
        return scores, self._numbers(positions)

    def _numbers(self, positions: NDArray[np.int64]) -> Ids:
        assert self.segment is not None
        ids = self.segment.numbers.of(positions)
        is_missing = positions < 0
        return np.where(is_missing, -1, ids) if np.count_nonzero(is_missing) else ids

    def _without(self, removed: Ids) -> "Snapshot":
        """The same with the removed positions of the segment marked."""
        if self.segment is None or not len(removed):
            return self
        positions = self.segment.positions_of(removed)
        dead = self.dead.copy()
        put_bits(dead, positions[positions >= 0], True)
        return replace(self, dead=dead, dead_count=int(np.bitwise_count(dead).sum()))


class _Loaded(NamedTuple):
    """The changes of the state `seq` after a segment."""

    base: Base
    seq: int
    changes: Changes


class Reading(NamedTuple):
    """One state: its rows, and what is searched."""

    view: CatalogView
    snapshot: Snapshot


class SnapshotKeeper:
    """Gives out the newest state; each search holds one read transaction, so nothing is mixed."""

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
        # Not a snapshot, which would keep a segment that a compaction has replaced.
        self._loaded: _Loaded | None = None
        self._loading = threading.Lock()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reading]:
        """The newest state, for the length of a block. Raises: GalleryCorruptError."""
        missing = 0
        while missing < _PATIENCE:
            with self.catalog.reading() as view:
                state = view.state()
                try:
                    snapshot = self.at(view, state)
                except FileNotFoundError:
                    missing += 1  # a compaction has replaced it meanwhile, or it is lost
                    continue
                if snapshot is not None:
                    yield Reading(view, snapshot)
                    return
        raise GalleryCorruptError(
            f"The segment {state.segment} of the gallery is missing below {self.generation}. Make "
            "it again from the catalogue: kinlens-index compact GALLERY --rebuild."
        )

    def with_changes(self, now: Reading) -> Snapshot:
        """The snapshot of `now` with its `changes`."""
        if now.snapshot.changes is not None:
            return now.snapshot
        with self._loading:  # not `_advancing`: other searches go on while many changes are read
            found = now.snapshot.with_changes(now.view, self._loaded)
            assert found.changes is not None
            if self._loaded is None or self._loaded.seq <= found.state.seq:
                self._loaded = _Loaded(found.base, found.state.seq, found.changes)
        with self._advancing:
            if self._snapshot is now.snapshot:
                self._snapshot = found
        return found

    def newest(self) -> Snapshot:
        """The snapshot of the newest state, for a search that reads no rows.

        Raises: GalleryCorruptError.
        """
        current = self._snapshot
        if current is not None and current.state == self.catalog.state() and self._next is None:
            return current
        with self.reading() as reading:
            return reading.snapshot

    def at(self, view: CatalogView, state: State) -> Snapshot | None:
        """The snapshot of `state`; None if this transaction is older than what others have seen."""
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
            and not self._can_wait(current, state)
        ):
            with self._refreshing:  # another thread may be opening it
                pass
            if not self._is_next(state.base):
                segment = self._opened(state)
                if current is None:
                    self._wait_for_gpu(segment)
                self._next = Snapshot.load(view, state, segment)
        following = self._next
        if following is not None and following.base == state.base:
            if state.is_before(following.state):
                return None
            current, self._next = following, None
        elif following is not None and following.state.is_before(state):
            self._next = None  # a later compaction has replaced it
        assert current is not None
        if current.state != state:
            current = current.advanced(view, state)
        if current.size != state.size:
            raise GalleryCorruptError(
                f"The index of {self.generation} has {current.size:,} items, the catalogue counts "
                f"{state.size:,}: it is damaged. Restore a backup: kinlens-index restore."
            )
        self._snapshot = current
        return current

    def _opened(self, state: State) -> Segment | None:
        if state.segment is None:
            return None
        return open_segment(
            self.generation / SEGMENTS / state.segment,
            self._device,
            self._verify_hashes,
            self._collector,
        )

    def _wait_for_gpu(self, segment: Segment | None) -> None:
        """Until the segment is on the GPU, if it is to be there and this is not closed."""
        copy = None if segment is None else segment.index.gpu
        end = time.monotonic() + COPY_S
        while copy is not None and not self._is_closed and time.monotonic() < end:
            if copy.wait(_GPU_STEP_S):
                return

    def _can_wait(self, current: Snapshot, state: State) -> bool:
        """Whether searches can go on in the segment so far while the new one is opened."""
        if current.state.seq < state.segment_seq:
            return False  # the catalogue has forgotten what was removed before
        is_opening = self._opener is not None and self._opener.is_alive()
        if not is_opening and not self._has_failed(state.base):
            self._opener = threading.Thread(target=self.refresh, name="segment")
            self._opener.start()
        return True

    def refresh(self) -> None:
        """Open the newest segment, if it is not in use yet, while searches go on."""
        if not self._refreshing.acquire(blocking=False):
            return
        base: Base | None = None
        try:
            current, before = self._snapshot, self.catalog.state()
            base = before.base
            if self._is_closed or current is None or current.base == base or self._has_failed(base):
                return
            segment = self._opened(before)
            if current.state.seq >= before.segment_seq:  # else a search may wait for this
                self._wait_for_gpu(segment)
            with self.catalog.reading() as view:
                state = view.state()
                if state.base != base:
                    return  # a compaction has replaced it meanwhile
                following = Snapshot.load(view, state, segment)
                if current.changes is not None:  # searches have filters
                    following = following.with_changes(view)
                self._next = following
        except FileNotFoundError:
            return  # a compaction has replaced it meanwhile
        except Exception as error:  # memory for one; searches go on in the segment so far
            logging.getLogger(__name__).warning("a new segment cannot be opened: %s", error)
            self._failed = base, time.monotonic()
            return
        finally:
            self._refreshing.release()
        with contextlib.suppress(GalleryError):  # a search says why
            self.newest()

    def _has_failed(self, base: Base) -> bool:
        """Whether this segment could not be opened a short time ago."""
        failed, when = self._failed
        return failed == base and time.monotonic() - when < _RETRY_S

    def _is_next(self, base: Base) -> bool:
        """Whether a snapshot with this segment was made in advance."""
        return self._next is not None and self._next.base == base

    def forget(self) -> None:
        """Let go of the segment; what nobody reads any more has been removed afterwards."""
        self._is_closed = True
        if self._opener is not None and self._opener is not threading.current_thread():
            self._opener.join()
        with self._refreshing:
            pass
        with self._advancing:
            self._snapshot = self._next = None
        self._collector.finish()


class _Collector:
    """Removes what nobody reads any more from a generation, in a thread: no search waits for it."""

    def __init__(self, generation: Path) -> None:
        self._generation = generation
        self._timer: threading.Timer | None = None

    def __call__(self) -> None:
        # Not at once: the segment that is let go of has its files open until this returns.
        self._timer = threading.Timer(_COLLECT_S, collect, (self._generation,))
        self._timer.start()

    def finish(self) -> None:
        """Do it now, if it is to be done."""
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
    """A segment that stays on the disk while it is used; `on_release` is called afterwards.

    Raises: FileNotFoundError if it is gone; GalleryCorruptError.
    """
    descriptor = hold(folder)
    try:
        segment = Segment.open(folder, verify_hashes=verify_hashes, device=device)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, GalleryCorruptError) and not folder.is_dir():
            raise FileNotFoundError(folder) from error  # it was being removed
        raise
    weakref.finalize(segment, _release, descriptor, on_release).atexit = False
    return segment


def _release(descriptor: int, on_release: Callable[[], None]) -> None:
    os.close(descriptor)
    on_release()


def _ordered(scores: Scores, ids: Ids, k: int) -> tuple[Scores, Ids]:
    """Best first, equal scores by number, what is missing last."""
    if np.count_nonzero(scores[:, 1:] >= scores[:, :-1]):
        scores = np.where(ids < 0, np.float32(-np.inf), scores)
        order = np.lexsort((ids, -scores), axis=1)
        scores = np.take_along_axis(scores, order, axis=1)
        ids = np.take_along_axis(ids, order, axis=1)
    return scores[:, :k], ids[:, :k]
