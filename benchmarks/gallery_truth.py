"""The true neighbours that recall is measured against, found by comparing with every vector."""

from collections.abc import Mapping

import faiss
import numpy as np
from clustered import clustered_batches
from numpy.typing import NDArray

from embedder.types import Embeddings

Positions = NDArray[np.int64]
"""Positions of items in the order in which they were made, shape (Q, k)."""


def true_neighbours(
    n: int,
    dim: int,
    queries: Embeddings,
    k: int,
    among: Mapping[str, NDArray[np.bool_]] | None = None,
) -> dict[str, Positions]:
    """The best `k` of all items under "", and those of each of the sets in `among`.

    The gallery is made anew, batch by batch, and never held as a whole.
    """
    sets = {"": np.ones(n, bool), **(among or {})}
    scores = {name: np.full((len(queries), k), -np.inf, np.float32) for name in sets}
    found = {name: np.full((len(queries), k), -1, np.int64) for name in sets}
    start = 0
    for batch in clustered_batches(n, dim):
        for name, mask in sets.items():
            rows = np.flatnonzero(mask[start : start + len(batch)])
            if len(rows):
                best, near = faiss.knn(
                    queries, batch[rows], min(k, len(rows)), metric=faiss.METRIC_INNER_PRODUCT
                )
                all_scores = np.concatenate([scores[name], best], axis=1)
                all_found = np.concatenate([found[name], start + rows[near]], axis=1)
                order = np.argsort(-all_scores, axis=1, kind="stable")[:, :k]
                scores[name] = np.take_along_axis(all_scores, order, axis=1)
                found[name] = np.take_along_axis(all_found, order, axis=1)
        start += len(batch)
    return found


def recall(found: Positions, truth: Positions) -> float:
    """The part of the true neighbours that was found; -1 in `truth` stands for none."""
    pairs = zip(found, truth, strict=True)
    hits = sum(len(np.intersect1d(row, true[true >= 0])) for row, true in pairs)
    return hits / int((truth >= 0).sum())
