"""Reordering of the top hits: by an attribute, by a boost, or for diversity.

Effects and costs are measured in docs/benchmarks/galleries.md, Diversity and boost.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.entries import Item
from kinlens.indexer.live.ranking import Candidate, Reorder
from kinlens.indexer.types import Boost, SearchOptions, SortBy

Span = Callable[[str], tuple[float, float] | None]
"""The lowest and highest value of a numeric attribute; None if the engine does not know them.
Raises FilterError for another attribute.
"""

_Relevance = NDArray[np.float32]


def reorder_of(
    options: SearchOptions, k: int, vectors_of: Callable[[Sequence[int]], Embeddings], span: Span
) -> Reorder | None:
    """The function that reorders the candidates of a query; None if they keep their order.

    Args:
        vectors_of: returns the vectors (N, D) of items by id, in the given order.

    Raises: InvalidParameterError; FilterError for an attribute that cannot boost.
    """
    if not options.reorders:
        return None
    if options.sort_by is not None:
        return partial(in_order, options.sort_by)
    boost = options.boost
    ends = None if boost is None else _ends(boost, span)

    def reorder(candidates: Sequence[Candidate]) -> Sequence[int]:
        relevance = np.array([c.score for c in candidates], np.float32)
        if boost is not None and ends is not None:
            relevance = relevance + boost.weight * _scaled(candidates, boost, *ends)
        if not candidates or not options.diversity:
            order: list[int] = np.argsort(-relevance, kind="stable").tolist()
            return order
        options.checkpoint()
        vectors = vectors_of([c.id for c in candidates])
        return diverse(vectors, relevance, options.diversity, options.offset + k)

    return reorder


def in_order(order: SortBy, candidates: Sequence[Candidate] | Sequence[Item]) -> Sequence[int]:
    """Indices of the candidates or items, sorted by an attribute; ties stay in their order."""
    values = [order.value_of(candidate.attributes) for candidate in candidates]
    known = [index for index, value in enumerate(values) if value is not None]
    known.sort(key=lambda index: values[index], reverse=order.descending)
    return [*known, *(index for index, value in enumerate(values) if value is None)]


def diverse(vectors: Embeddings, relevance: _Relevance, diversity: float, count: int) -> list[int]:
    """Indices of the first `count` items by maximal marginal relevance; the most relevant first.

    Carbonell and Goldstein, 1998, https://doi.org/10.1145/290941.291025.
    """
    gain = (1 - diversity) * relevance
    redundancy = np.full(len(gain), -np.inf, np.float32)  # highest cosine to a chosen item
    is_open = np.ones(len(gain), np.bool_)
    order = [int(np.argmax(relevance))] if len(gain) else []
    while len(order) < min(count, len(gain)):
        redundancy = np.maximum(redundancy, vectors @ vectors[order[-1]])
        is_open[order[-1]] = False
        order.append(int(np.argmax(np.where(is_open, gain - diversity * redundancy, -np.inf))))
    return order


def _ends(boost: Boost, span: Span) -> tuple[float, float]:
    known = span(boost.attribute)
    if boost.low is not None and boost.high is not None:
        return boost.low, boost.high
    if known is None:
        raise InvalidParameterError(
            f"A boost by {boost.attribute!r:.160} needs from and to, since a gallery on Milvus "
            f"does not know the range of an attribute. Give both, such as {boost.weight:g}:0:50."
        )
    lowest, highest = known
    return (
        lowest if boost.low is None else boost.low,
        highest if boost.high is None else boost.high,
    )


def _scaled(candidates: Sequence[Candidate], boost: Boost, low: float, high: float) -> _Relevance:
    """The attribute of each candidate, scaled to 0..1; all 0 if the range is empty."""
    missing = low if boost.weight > 0 else high
    order = SortBy(boost.attribute, descending=boost.weight > 0)  # picks the preferred value
    own = [order.value_of(candidate.attributes) for candidate in candidates]
    values = np.array([missing if value is None else value for value in own], np.float64)
    if not low < high:
        return np.zeros(len(values), np.float32)
    return np.clip((values - low) / (high - low), 0, 1).astype(np.float32)
