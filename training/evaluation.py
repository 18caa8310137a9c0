"""Recall at K on vectors: the same test for a torch network and for an ONNX file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedder.errors import DatasetError, EvaluationError

TIE = 1e-5
"""Scores that are closer than this are a tie."""

_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class Recall:
    """Recall at each K, in percent, over `queries`; `without_positive` queries were left out."""

    at: dict[int, float]
    queries: int
    without_positive: int

    def as_dict(self) -> dict[str, float]:
        """{"R@1": ..., ...}"""
        return {f"R@{k}": value for k, value in self.at.items()}


def recall_at(
    embeddings: NDArray[np.float32],
    labels: NDArray[np.int64],
    ks: Sequence[int] = (1, 2, 4, 8),
    chunk_rows: int = _CHUNK_ROWS,
) -> Recall:
    """Recall at K by self-retrieval: each image against all others, itself left out.

    A query succeeds at K if a gallery image of its class is among the K most similar ones. **Ties**
    count against us: a negative ranks before the best positive unless it is worse by more than
    1e-5, so that rounding decides nothing, not even for the same photograph in two classes. Memory
    is bounded by chunk_rows^2, whatever N.

    Args:
        embeddings: (N, D), unit norm.
        labels: (N,).
        ks: values of K.
        chunk_rows: rows of a block of the similarity matrix.

    Raises: DatasetError if no query has another image of its class; EvaluationError if an embedding
        is not finite.
    """
    if not np.isfinite(embeddings).all():
        broken = int((~np.isfinite(embeddings)).any(axis=1).sum())
        raise EvaluationError(
            f"{broken:,} of {len(embeddings):,} embeddings are not finite numbers. "
            "Train again with lower learning rates."
        )
    vectors, classes = torch.from_numpy(embeddings), torch.from_numpy(labels)
    ranks = torch.cat(
        [
            _ranks(vectors, classes, start, chunk_rows)
            for start in range(0, len(vectors), chunk_rows)
        ]
    )
    answered = ranks[ranks >= 0]
    if not len(answered):
        raise DatasetError(
            "No test image has another one of its class, so recall is not defined. "
            "Give test classes with at least 2 images each."
        )
    at = {k: 100.0 * float((answered < k).double().mean()) for k in ks}
    return Recall(at, len(answered), len(ranks) - len(answered))


def _ranks(vectors: Tensor, classes: Tensor, start: int, rows: int) -> Tensor:
    """Rank, from 0, of the best positive of each query in a chunk; -1 without a positive: (q,)."""
    queries = slice(start, min(start + rows, len(vectors)))
    best = torch.full((queries.stop - queries.start,), -torch.inf)
    for _, scores, positive in _blocks(vectors, classes, queries, rows):
        best = torch.maximum(best, scores.masked_fill(~positive, -torch.inf).amax(dim=1))
    above = torch.zeros(len(best), dtype=torch.int64)
    for others, scores, positive in _blocks(vectors, classes, queries, rows):
        above += ((scores >= best[:, None] - TIE) & ~positive & others).sum(dim=1)
    return torch.where(best.isfinite(), above, -1)


def _blocks(
    vectors: Tensor, classes: Tensor, queries: slice, rows: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each block of the gallery: not-self, scores (-inf for self), positive; all (q, g)."""
    rows_of_queries = torch.arange(queries.start, queries.stop)[:, None]
    for start in range(0, len(vectors), rows):
        gallery = slice(start, min(start + rows, len(vectors)))
        others = rows_of_queries != torch.arange(gallery.start, gallery.stop)[None, :]
        scores = vectors[queries] @ vectors[gallery].T
        positive = (classes[queries, None] == classes[None, gallery]) & others
        yield others, scores, positive
