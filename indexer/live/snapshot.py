"""One state of a gallery, ready to be searched: a segment, what came after it, what has gone.

A snapshot never changes. A change makes a new one that shares what stayed, while searches go on in
the old one.
"""

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedder.errors import GalleryCorruptError
from embedder.types import Embeddings
from indexer.catalog.read import CatalogView, State
from indexer.folder.durable import hold
from indexer.index.kinds import Effort
from indexer.index.segment import Segment
from indexer.live.delta import Delta
from indexer.types import Ids, Scores

Bits = NDArray[np.uint8]
"""A set of positions as a little-endian bitmap."""

_SPARE = 2  # how many times the expected number of removed items a search fetches in excess


@dataclass(frozen=True, slots=True)
class Among:
    """The items that a filter leaves: positions in the segment, rows of the delta."""

    segment: Bits
    delta: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The items of state `seq`. `dead` marks positions of the segment that have been removed.

    The segment, if there were any items, holds those of state `segment_seq`.
    """

    seq: int
    segment_name: str | None
    segment_seq: int
    segment: Segment | None
    dead: Bits
    dead_count: int
    delta: Delta

    @classmethod
    def load(cls, view: CatalogView, state: State, segment: Segment | None) -> "Snapshot":
        """The snapshot of a state whose segment is open; with all that came after the segment."""
        segment_size = 0 if segment is None else len(segment.ids)
        empty = cls(
            state.segment_seq,
            state.segment,
            state.segment_seq,
            segment,
            np.zeros((segment_size + 7) // 8, np.uint8),
            0,
            Delta.of(*view.added_since(state.segment_seq)),
        )
        return empty._without(view.removed_since(state.segment_seq), state.seq)

    def advanced(self, view: CatalogView, state: State) -> "Snapshot":
        """The snapshot of a later state with the same segment."""
        removed = view.removed_since(self.seq)
        delta = self.delta.changed(*view.added_since(self.seq), removed)
        return replace(self, delta=delta)._without(removed, state.seq)

    @property
    def size(self) -> int:
        """Number of items that are alive."""
        segment_size = 0 if self.segment is None else len(self.segment.ids)
        return segment_size - self.dead_count + self.delta.size

    def nearest(
        self,
        queries: Embeddings,
        k: int,
        among: Among | None = None,
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
            return _ordered(*self._in_segment(queries, k, among, exact, effort), k)
        found = self.delta.nearest(queries, k, None if among is None else among.delta)
        if self.segment is None:
            return _ordered(*found, k)
        segment = self._in_segment(queries, k, among, exact, effort)
        scores = np.concatenate([segment[0], found[0]], axis=1)
        return _ordered(scores, np.concatenate([segment[1], found[1]], axis=1), k)

    def vectors(self, ids: Ids, among: Among | None = None) -> tuple[Ids, Embeddings]:
        """Numbers (N,) and vectors (N, D) of those of the items that `among` leaves, in any order.

        Raises: GalleryCorruptError for an item that is not here.
        """
        positions = np.full(len(ids), -1, np.int64)
        if self.segment is not None:
            positions = self.segment.positions_of(ids)
        rows = self.delta.positions_of(ids[positions < 0])
        positions = positions[positions >= 0]
        if len(positions) + len(rows) < len(ids):
            raise GalleryCorruptError(
                "An item of the catalogue is not in the index. Make the index again: "
                "kinlens-index compact GALLERY --rebuild."
            )
        if among is not None:
            positions = positions[has_bits(among.segment, positions)]
            rows = rows[among.delta[rows]]
        if self.segment is None:
            return self.delta.ids[rows], self.delta.vectors[rows]
        found = self.segment.index.vectors(positions)
        if len(rows):
            found = np.concatenate([found, self.delta.vectors[rows]])
        return np.concatenate([self.segment.ids[positions], self.delta.ids[rows]]), found

    def _in_segment(
        self,
        queries: Embeddings,
        k: int,
        among: Among | None,
        exact: bool,
        effort: int | None,
    ) -> tuple[Scores, Ids]:
        assert self.segment is not None
        if exact:
            return self._exactly(queries, k, among)
        tuned = self.segment.manifest.tuned
        chosen = tuned if effort is None else Effort(effort, tuned.k_factor)
        if among is not None:
            return self._search(queries, k, chosen, among.segment & ~self.dead)
        if not self.dead_count:
            return self._search(queries, k, chosen, None)
        return self._despite_dead(queries, k, chosen)

    def _despite_dead(self, queries: Embeddings, k: int, effort: Effort) -> tuple[Scores, Ids]:
        """Fetch a few more than k and drop the dead: much faster than asking FAISS to skip them."""
        assert self.segment is not None
        excess = 1 + int(_SPARE * k * self.dead_count / len(self.segment.ids))
        wanted = k + min(excess, self.dead_count)
        scores, positions = self.segment.index.search(queries, wanted, effort)
        is_dead = has_bits(self.dead, positions)
        is_dead |= positions < 0
        if not is_dead.any():
            return scores[:, :k], self._numbers(positions[:, :k])
        order = np.argsort(is_dead, axis=1, kind="stable")[:, :k]
        scores = np.take_along_axis(np.where(is_dead, np.float32(-np.inf), scores), order, axis=1)
        ids = self._numbers(np.take_along_axis(np.where(is_dead, -1, positions), order, axis=1))
        short = np.flatnonzero((ids < 0).any(axis=1))
        if len(short) and len(self.segment.ids) - self.dead_count > 0:
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

    def _exactly(self, queries: Embeddings, k: int, among: Among | None) -> tuple[Scores, Ids]:
        assert self.segment is not None
        positions = None
        if among is not None or self.dead_count:
            bits = ~self.dead if among is None else among.segment & ~self.dead
            alive = np.unpackbits(bits, count=len(self.segment.ids), bitorder="little")
            positions = np.flatnonzero(alive)
        scores, found = self.segment.index.exact(queries, k, positions)
        return scores, self._numbers(found)

    def _numbers(self, positions: NDArray[np.int64]) -> Ids:
        assert self.segment is not None
        ids: Ids = self.segment.ids[positions]
        is_missing = positions < 0
        return np.where(is_missing, -1, ids) if is_missing.any() else ids

    def _without(self, removed: Ids, seq: int) -> "Snapshot":
        """The same at state `seq`, with the removed positions of the segment marked."""
        if self.segment is None or not len(removed):
            return replace(self, seq=seq)
        positions = self.segment.positions_of(removed)
        dead = self.dead.copy()
        set_bits(dead, positions[positions >= 0])
        count = int(np.bitwise_count(dead).sum())
        return replace(self, seq=seq, dead=dead, dead_count=count)


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
    weakref.finalize(segment, _release, descriptor, on_release)
    return segment


def _release(descriptor: int, on_release: Callable[[], None]) -> None:
    os.close(descriptor)
    on_release()


def has_bits(bits: Bits, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of the positions are in the set."""
    found: NDArray[np.bool_] = (bits[positions >> 3] >> (positions & 7).astype(np.uint8)) & 1 == 1
    return found


def set_bits(bits: Bits, positions: NDArray[np.int64]) -> None:
    """Put positions into the set, in place."""
    np.bitwise_or.at(bits, positions >> 3, np.left_shift(1, positions & 7).astype(np.uint8))


def clear_bits(bits: Bits, positions: NDArray[np.int64]) -> None:
    """Take positions out of the set, in place."""
    np.bitwise_and.at(bits, positions >> 3, ~np.left_shift(1, positions & 7).astype(np.uint8))


def _ordered(scores: Scores, ids: Ids, k: int) -> tuple[Scores, Ids]:
    """Best first, equal scores by number, what is missing last."""
    if not (scores[:, 1:] < scores[:, :-1]).all():
        scores = np.where(ids < 0, np.float32(-np.inf), scores)
        order = np.lexsort((ids, -scores), axis=1)
        scores = np.take_along_axis(scores, order, axis=1)
        ids = np.take_along_axis(ids, order, axis=1)
    return scores[:, :k], ids[:, :k]
