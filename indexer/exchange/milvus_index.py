"""The index types of a Milvus collection, their search parameters, and how recall is measured."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from kinlens.embedder.errors import RecallError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.entries import Entry, checked_vectors

MilvusIndex = Literal["flat", "ivf-flat", "hnsw", "ivf-rabitq", "diskann"]
"""Index types of a collection."""

TARGET_RECALL = 0.98
HELD_OUT, K = 200, 10
_PARAMETERS: dict[MilvusIndex, dict[str, Any]] = {
    "flat": {"index_type": "FLAT"},
    "ivf-flat": {"index_type": "IVF_FLAT"},
    "hnsw": {"index_type": "HNSW", "M": 24, "efConstruction": 200},
    "ivf-rabitq": {"index_type": "IVF_RABITQ", "refine": True, "refine_type": "SQ8"},
    "diskann": {"index_type": "DISKANN"},
}


def clusters_of(kind: MilvusIndex, count: int) -> int:
    """The number of clusters of an index over `count` vectors; 0 for one without them."""
    return 4 * math.isqrt(count) if kind.startswith("ivf") else 0


def index_parameters(kind: MilvusIndex, nlist: int) -> dict[str, Any]:
    """The parameters of `create_index` other than the metric."""
    return _PARAMETERS[kind] | ({"nlist": nlist} if nlist else {})


def search_parameters(
    kind: MilvusIndex, nlist: int, effort: int, n: int, exact: bool
) -> dict[str, int]:
    """The parameters of a search for `n` hits; `exact` is as exact as the index allows."""
    if kind == "flat":
        return {}
    if nlist:
        return {"nprobe": nlist if exact else max(1, min(effort, nlist))}
    wanted = max(n, 32_768 if exact else effort)
    return {"ef" if kind == "hnsw" else "search_list": min(32_768, wanted)}


def is_exact(kind: MilvusIndex) -> bool:
    """Whether a search can compare with every vector."""
    return kind in ("flat", "ivf-flat")


class HeldOut:
    """Held-out vectors, to measure recall, and the scores of their `K` true best neighbours.

    They are added to the gallery after all other vectors. `see` must be called with all other
    vectors, in any parts. `queries` has the shape (Q, D).
    """

    def __init__(self, entries: Iterable[Entry], count: int, dim: int) -> None:
        """Draw them from `count` entries. Raises: InvalidParameterError for an invalid vector."""
        stride = max(2, count // HELD_OUT)
        self.entries = [entry for n, entry in enumerate(entries) if n % stride == stride - 1]
        self.keys = {entry.key for entry in self.entries}
        self.queries: Embeddings = checked_vectors(self.entries, dim)
        self._scores = np.full((len(self.entries), K), -np.inf, np.float32)

    def see(self, vectors: Embeddings) -> None:
        """Update the true scores with other vectors (N, D)."""
        scores = np.concatenate([self._scores, self.queries @ vectors.T], axis=1)
        self._scores = np.sort(np.partition(scores, -K, axis=1)[:, -K:], axis=1)

    def recall(self, scores: list[list[float]]) -> float:
        """The mean share of found scores that reach the true scores."""
        least = self._scores[:, 0] - 1e-5
        hits = [
            sum(score >= bound for score in found[:K]) / K
            for found, bound in zip(scores, least, strict=True)
        ]
        return float(np.mean(hits))


def least_effort(
    kind: MilvusIndex, nlist: int, held_out: HeldOut, search: Callable[[int], list[list[float]]]
) -> tuple[int, float]:
    """The least effort that reaches the target recall, and its recall@10.

    An effort is a number of clusters to visit, or of candidates, per search. `search` returns the
    scores of the held-out queries with a given effort.

    Raises: RecallError if no effort reaches it.
    """
    best, most = 0.0, nlist or 4096
    start = max(1, most // 64) if nlist else 32
    tried = itertools.takewhile(lambda effort: effort < most, (start << n for n in range(20)))
    for effort in (*tried, most):
        recall = held_out.recall(search(effort))
        if recall >= TARGET_RECALL:
            return effort, recall
        best = max(best, recall)
    raise RecallError(
        f"The index {kind} reaches a recall of at most {best:.3f}; the target is "
        f"{TARGET_RECALL}. Choose another one with --index."
    )
