"""The items of a gallery that were added after its index segment, compared one by one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import faiss
import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.machine import core_count
from kinlens.embedder.types import Embeddings
from kinlens.indexer.bits import packed_bits
from kinlens.indexer.types import Ids, Scores, find_sorted

_FIRST_CAPACITY = 256  # rows of a delta


class _Rows:
    """Append-only arrays. Appending does not move them, so existing views stay valid.

    contents: a number for each row; rows with equal content have equal numbers.
    firsts: the first row with the same content.
    copies: the rows of each content that several rows have, by the first of them, which
        `is_copied` marks.
    """

    def __init__(self, ids: Ids, vectors: Embeddings, contents: Ids, capacity: int) -> None:
        self.used = 0
        self.ids = np.empty(capacity, np.int64)
        self.vectors = np.empty((capacity, vectors.shape[1]), np.float32)
        self.contents = np.empty(capacity, np.int64)
        self.firsts = np.empty(capacity, np.int64)
        self.is_copied = np.zeros(capacity, np.bool_)
        self.copies: dict[int, list[int]] = {}
        self._first: dict[int, int] = {}
        self.append(ids, vectors, contents)

    def append(self, ids: Ids, vectors: Embeddings, contents: Ids) -> bool:
        """Append rows if they fit into the capacity; return whether they did."""
        end = self.used + len(ids)
        if end > len(self.ids):
            return False
        part = slice(self.used, end)
        self.ids[part], self.vectors[part], self.contents[part] = ids, vectors, contents
        for row, content in enumerate(contents.tolist(), self.used):
            first = self.firsts[row] = self._first.setdefault(content, row)
            if first != row:
                self.copies.setdefault(first, [first]).append(row)
                self.is_copied[first] = True
        self.used = end
        return True


@dataclass(frozen=True, slots=True)
class Delta:
    """Items inserted after the segment, by ascending id; `alive` (N,) is False for removed ones.

    Immutable. Call `changed` on the latest delta only: all deltas share the arrays in `rows`.
    """

    rows: _Rows
    alive: NDArray[np.bool_]

    @classmethod
    def of(cls, ids: Ids, vectors: Embeddings, images: Sequence[bytes]) -> "Delta":
        """A delta of items with ascending ids (N,), vectors (N, D) and hashes of their images."""
        contents = _contents(vectors, images)
        rows = _Rows(ids, vectors, contents, max(_FIRST_CAPACITY, len(ids)))
        return cls(rows, np.ones(len(ids), np.bool_))

    @property
    def ids(self) -> Ids:
        """The item id of each row (N,)."""
        return self.rows.ids[: len(self.alive)]

    @property
    def vectors(self) -> Embeddings:
        """The vectors (N, D)."""
        return self.rows.vectors[: len(self.alive)]

    @property
    def size(self) -> int:
        """Number of items that are not removed."""
        return int(self.alive.sum())

    def changed(
        self, ids: Ids, vectors: Embeddings, images: Sequence[bytes], removed: Ids
    ) -> "Delta":
        """A new delta with more items, whose ids exceed all others, and without `removed`."""
        rows, alive, contents = self.rows, self.alive, _contents(vectors, images)
        if rows.used != len(alive) or not rows.append(ids, vectors, contents):
            capacity = max(_FIRST_CAPACITY, 2 * (self.size + len(ids)))
            known = rows.contents[: len(alive)][alive]
            rows = _Rows(self.ids[alive], self.vectors[alive], known, capacity)
            rows.append(ids, vectors, contents)
            alive = alive[alive]  # removed ones are dropped
        alive = np.concatenate([alive, np.ones(len(ids), np.bool_)])
        grown = Delta(rows, alive)
        alive[grown.positions_of(removed)] = False
        return grown

    def positions_of(self, ids: Ids) -> NDArray[np.int64]:
        """The rows of these items; ids that are not in the delta are omitted."""
        found = find_sorted(ids, self.ids)
        return found[found >= 0]

    @property
    def has_copies(self) -> bool:
        """Whether any two rows may have equal content."""
        return bool(self.rows.copies)

    def rows_of(self, first: int, among: NDArray[np.bool_]) -> Iterator[int]:
        """The rows of `among` (N,) with the content of the row `first`, ascending."""
        for row in self.rows.copies.get(first, (first,)):
            if row < len(among) and among[row]:
                yield row

    def nearest(
        self, queries: Embeddings, k: int, among: NDArray[np.bool_] | None = None
    ) -> tuple[Scores, Ids]:
        """Scores and ids of the best contents for each query (Q, D), best first.

        Both have the shape (Q, at most k); missing hits have id -1. `among` (N,) is a mask of the
        rows to search; by default all of them. A content is found if any of its rows is there, and
        named by the id of its first row, there or not.
        """
        chosen = self.alive if among is None else self.alive & among
        if self.has_copies:
            firsts = np.zeros(len(chosen), np.bool_)
            firsts[self.rows.firsts[: len(chosen)][chosen]] = True
            chosen = firsts
        shape = (len(queries), min(k, int(chosen.sum())))
        scores, positions = np.empty(shape, np.float32), np.empty(shape, np.int64)
        if not scores.size:
            return scores, positions
        bitmap = None if chosen.all() else packed_bits(chosen)
        _inner_products(queries, self.vectors, scores, positions, bitmap)
        return np.clip(scores, -1, 1), np.where(positions < 0, -1, self.ids[positions])


def _contents(vectors: Embeddings, images: Sequence[bytes]) -> Ids:
    """A number for each image and vector (N, D); equal only for equal pairs."""
    pairs = zip(images, vectors, strict=True)
    return np.array([hash(image + vector.tobytes()) for image, vector in pairs], np.int64)


def _inner_products(
    queries: Embeddings,
    vectors: Embeddings,
    scores: Scores,
    positions: Ids,
    bitmap: NDArray[np.uint8] | None,
) -> None:
    """Compute the top inner products with FAISS without copying the vectors into an index."""
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
