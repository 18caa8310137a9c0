"""How many of the true nearest neighbours a gallery finds, measured against exact answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embedder.types import Embeddings
from indexer.gallery import Gallery
from indexer.types import Ids, Scores, SearchOptions

K = 10
"""Neighbours that are looked for."""

_EXACT = SearchOptions(exact=True)
_EQUAL = 1e-5  # scores this close count as equal: which of two equal items is found does not matter


@dataclass(frozen=True, slots=True)
class Recall:
    """Part of the true `k` nearest neighbours of `queries` vectors that a search finds."""

    value: float
    queries: int
    k: int


def measured_recall(gallery: Gallery, queries: Embeddings) -> Recall:
    """Recall at 10 of `queries` (Q, D). Raises: InvalidParameterError."""
    truth, _ = gallery.nearest(queries, K, _EXACT)
    found, _ = gallery.nearest(queries, K)
    return _recall(found, truth, len(queries))


def own_recall(gallery: Gallery, ids: Sequence[int], vectors: Embeddings) -> Recall:
    """Recall at 10 of stored vectors (Q, D), each without its own item."""
    own = np.asarray(ids, dtype=np.int64)[:, None]
    truth = _without(own, *gallery.nearest(vectors, K + 1, _EXACT))
    found = _without(own, *gallery.nearest(vectors, K + 1))
    return _recall(found, truth, len(ids))


def _without(own: Ids, scores: Scores, ids: Ids) -> Scores:
    """Scores (Q, k) of the others; the worst of k + 1 goes where an item has not found itself."""
    others = np.where((ids == own) | (ids < 0), -np.inf, scores)
    return -np.sort(-others, axis=1)[:, :-1]


def _recall(found: Scores, truth: Scores, queries: int) -> Recall:
    if not truth.size:
        return Recall(1.0, queries, truth.shape[1])
    worst = np.where(np.isfinite(truth), truth, np.inf).min(axis=1, keepdims=True)
    hits = int(((found >= worst - _EQUAL) & np.isfinite(found)).sum())
    return Recall(min(1.0, hits / int(np.isfinite(truth).sum())), queries, truth.shape[1])
