"""Another order of the first hits: by their neighbours, by an attribute, and with fewer alike.

What each does to the answers and what it costs: docs/benchmarks.md, Re-ranking.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from embedder.errors import InvalidParameterError
from embedder.types import Embeddings
from indexer.live.ranking import Candidate, Reorder
from indexer.types import Boost, Ids, SearchOptions

EXPANDED_BY, ALPHA = 5, 3
"""Hits that the expanded query takes in, each weighed with its score to the power of ALPHA."""

NEAR, NEARER, KEPT = 20, 6, 0.3
"""k1, k2 and lambda of the k-reciprocal re-ranking."""

Span = Callable[[str], tuple[float, float] | None]
"""The lowest and highest value of a numeric attribute, None where they are not known; raises for
what is none.
"""

_Relevance = NDArray[np.float32]


def reorder_of(
    options: SearchOptions,
    k: int,
    queries: Embeddings,
    vectors_of: Callable[[Sequence[int]], Embeddings],
    span: Span,
) -> Reorder | None:
    """How the candidates of `queries` (Q, D) change places; None if they stay as they are.

    Args:
        vectors_of: the vectors (N, D) of items by their numbers, in the order asked for.

    Raises: InvalidParameterError, FilterError for an attribute that cannot boost.
    """
    if not options.reorders:
        return None
    boost = options.boost
    ends = None if boost is None else _ends(boost, span)

    def reorder(row: int, candidates: Sequence[Candidate]) -> Sequence[int]:
        relevance = np.array([c.score for c in candidates], np.float32)
        vectors = np.empty((0, queries.shape[1]), np.float32)
        if candidates and (options.rerank or options.diversity):
            options.checkpoint()
            vectors = vectors_of([c.id for c in candidates])
        if candidates and options.rerank == "aqe":
            relevance = expanded(queries[row], vectors, relevance)
        elif candidates and options.rerank == "reciprocal":
            relevance = reciprocal(queries[row], vectors)
        if boost is not None and ends is not None:
            relevance = relevance + boost.weight * _scaled(candidates, boost, *ends)
        if not options.diversity:
            order: list[int] = np.argsort(-relevance, kind="stable").tolist()
            return order
        return diverse(vectors, relevance, options.diversity, options.offset + k)

    return reorder


def expanded(query: NDArray[np.float32], vectors: Embeddings, scores: _Relevance) -> _Relevance:
    """The similarity (N,) of candidates (N, D) to the query (D,) after average query expansion.

    It becomes q + sum_i s_i^alpha v_i over the best candidates v_i, whose scores are s_i:
    Radenović et al., 2018, https://arxiv.org/abs/1711.02512.
    """
    weights = np.maximum(scores[:EXPANDED_BY], 0) ** ALPHA
    moved = query + weights @ vectors[:EXPANDED_BY]
    found: _Relevance = vectors @ (moved / np.linalg.norm(moved))
    return found


def reciprocal(query: NDArray[np.float32], vectors: Embeddings) -> _Relevance:
    """1 - d* for candidates (N, D): k-reciprocal re-ranking among them and the query (D,) alone.

    Those are near that are near to each other's neighbours: d* = (1 - lambda) d_J + lambda d, with
    the Jaccard distance d_J of k-reciprocal neighbour sets, each member weighed with exp(-d), and
    d = 1 - cosine. Zhong et al., 2017, https://arxiv.org/abs/1701.08398.
    """
    everything = np.concatenate([query[np.newaxis], vectors])  # (1 + N, D)
    distance = np.clip(1 - everything @ everything.T, 0, 2)
    np.fill_diagonal(distance, -1)  # oneself comes first, also among copies
    order = np.argsort(distance, axis=1, kind="stable")
    np.fill_diagonal(distance, 0)
    near, nearer = _mutual(order, NEAR), _mutual(order, NEAR // 2)
    agree = near * (near @ nearer.T > 2 / 3 * nearer.sum(axis=1))
    members = near + agree @ nearer  # and the neighbours of neighbours that mostly agree
    weights = np.where(members > 0, np.exp(-2 * distance), 0)
    weights /= weights.sum(axis=1, keepdims=True)
    weights = weights[order[:, :NEARER]].mean(axis=1)  # local query expansion
    least = np.minimum(weights[0], weights[1:]).sum(axis=1)
    most = np.maximum(weights[0], weights[1:]).sum(axis=1)
    found: _Relevance = 1 - (1 - KEPT) * (1 - least / most) - KEPT * distance[0, 1:]
    return found.astype(np.float32)


def _mutual(order: Ids, k: int) -> NDArray[np.float32]:
    """1 where two are among the k nearest of each other, or the same."""
    near = np.zeros(order.shape, np.float32)
    np.put_along_axis(near, order[:, : k + 1], 1, axis=1)
    return near * near.T


def diverse(vectors: Embeddings, relevance: _Relevance, diversity: float, count: int) -> list[int]:
    """The first `count` places by maximal marginal relevance, from the one most relevant on.

    Carbonell and Goldstein, 1998, https://doi.org/10.1145/290941.291025.
    """
    left = (1 - diversity) * relevance
    alike = np.full(len(left), -np.inf, np.float32)  # of each to the most similar that is placed
    is_left = np.ones(len(left), np.bool_)
    order = [int(np.argmax(relevance))] if len(left) else []
    while len(order) < min(count, len(left)):
        alike = np.maximum(alike, vectors @ vectors[order[-1]])
        is_left[order[-1]] = False
        order.append(int(np.argmax(np.where(is_left, left - diversity * alike, -np.inf))))
    return order


def _ends(boost: Boost, span: Span) -> tuple[float, float]:
    known = span(boost.attribute)
    if boost.low is not None and boost.high is not None:
        return boost.low, boost.high
    if known is None:
        raise InvalidParameterError(
            f"A boost by {boost.attribute!r:.160} needs from and to, since a gallery on Milvus "
            f"does not tell the range of an attribute. Give both, such as {boost.weight:g}:0:50."
        )
    lowest, highest = known
    return (
        lowest if boost.low is None else boost.low,
        highest if boost.high is None else boost.high,
    )


def _scaled(candidates: Sequence[Candidate], boost: Boost, low: float, high: float) -> _Relevance:
    """The attribute of each, from 0 to 1; nobody's, if there is no range."""
    missing = low if boost.weight > 0 else high
    values = np.array([c.attributes.get(boost.attribute, missing) for c in candidates], np.float64)
    if not low < high:
        return np.zeros(len(values), np.float32)
    return np.clip((values - low) / (high - low), 0, 1).astype(np.float32)
