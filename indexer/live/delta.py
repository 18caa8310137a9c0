"""The items that came after a segment: few, in memory, always compared exactly."""

from dataclasses import dataclass

import faiss
import numpy as np
from numpy.typing import NDArray

from embedder.machine import core_count
from embedder.types import Embeddings
from indexer.types import Ids, Scores

_FIRST_CAPACITY = 256


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
        known = self.ids
        if not len(known):
            return np.empty(0, np.int64)
        found = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        positions: NDArray[np.int64] = found[known[found] == ids]
        return positions

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
        bitmap = None if chosen.all() else np.packbits(chosen, bitorder="little")
        _search(queries, self.vectors, scores, positions, bitmap)
        return np.clip(scores, -1, 1), np.where(positions < 0, -1, self.ids[positions])


def _search(
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
