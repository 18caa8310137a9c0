"""Another order of the first hits: by an attribute, and with fewer alike.

What each does to the answers and what it costs: docs/benchmarks.md, Diversity and boost.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.live.ranking import Candidate, Reorder
from kinlens.indexer.types import Boost, SearchOptions, SortBy

Span = Callable[[str], tuple[float, float] | None]
"""The lowest and highest value of a numeric attribute, None where they are not known; raises for
what is none.
"""

_Relevance = NDArray[np.float32]


def reorder_of(
    options: SearchOptions,
    k: int,
    vectors_of: Callable[[Sequence[int]], Embeddings],
    span: Span,
) -> Reorder | None:
    """How the candidates of a query change places; None if they stay as they are.

    Args:
        vectors_of: the vectors (N, D) of items by their numbers, in the order asked for.

    Raises: InvalidParameterError, FilterError for an attribute that cannot boost.
    """
    if not options.reorders:
        return None
    if options.sort_by is not None:
        return partial(_sorted, options.sort_by)
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


def _sorted(order: SortBy, candidates: Sequence[Candidate]) -> Sequence[int]:
    """The places of candidates by an attribute; equal ones stay in the order of their scores."""
    values = [order.value_of(candidate.attributes) for candidate in candidates]
    known = [place for place, value in enumerate(values) if value is not None]
    known.sort(key=lambda place: values[place], reverse=order.descending)
    return [*known, *(place for place, value in enumerate(values) if value is None)]


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
    order = SortBy(boost.attribute, descending=boost.weight > 0)  # of several the preferred one
    own = [order.value_of(candidate.attributes) for candidate in candidates]
    values = np.array([missing if value is None else value for value in own], np.float64)
    if not low < high:
        return np.zeros(len(values), np.float32)
    return np.clip((values - low) / (high - low), 0, 1).astype(np.float32)
