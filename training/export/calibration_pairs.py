"""What searches among held-out images find, at all ranks and in galleries of several sizes.

Shapes: N images, D dimensions, q queries, R ranks, P pairs of a query and what was found for it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embedder.calibration import SMALLEST_GALLERY
from embedder.types import Embeddings

NEIGHBOURS = 10
"""The best hits: those that a page of results begins with."""
_RANKS = 40
_MAX_QUERIES = 5_000
_BLOCK = 1 << 22  # scores at a time

Labels = NDArray[np.int64]
Scores = NDArray[np.float32]
Right = NDArray[np.bool_]


class Hits(NamedTuple):
    """What searches for some queries find at some ranks, of all ranks.

    `scores` and `right` (q, R), `ranks` (R,) from 1 on without a gap up to 10, then ever further
    apart; `best_wrong` (q,) is the highest score of an item of another class, -inf without any.
    """

    scores: Scores
    right: Right
    ranks: Labels
    best_wrong: Scores


class Pairs(NamedTuple):
    """Queries with what was found, each (P,): `items` of the gallery, `classes` of the query.

    `gaps`: how many ranks a pair stands for, itself and those up to the next one in the sample.
    """

    scores: Scores
    right: Right
    ranks: Labels
    gaps: Labels
    items: Labels
    classes: Labels

    def where(self, chosen: Right) -> "Pairs":
        """Some of them; `chosen` (P,)."""
        return Pairs._make(array[chosen] for array in self)


def search(embeddings: Embeddings, labels: Labels, queries: Labels, gallery: Labels) -> Hits:
    """Each query among the others of `gallery`; both are numbers of images, the one in the other.

    An image is left out of its own search by its number.
    """
    ranks = sampled_ranks(len(gallery) - 1)
    rows = max(1, _BLOCK // max(len(gallery), 1))
    scores, right, best_wrong = [], [], []
    for start in range(0, len(queries), rows):
        some = queries[start : start + rows]
        found = embeddings[some] @ embeddings[gallery].T  # (q, N)
        found[some[:, None] == gallery] = -np.inf
        same = labels[some, None] == labels[gallery]
        best_wrong.append(np.where(same, -np.inf, found).max(axis=1).astype(np.float32))
        order = np.argsort(-found, axis=1)[:, ranks - 1]
        scores.append(np.take_along_axis(found, order, axis=1))
        right.append(np.take_along_axis(same, order, axis=1))
    return Hits(np.concatenate(scores), np.concatenate(right), ranks, np.concatenate(best_wrong))


def sampled_ranks(last: int) -> Labels:
    """Ranks (R,) from 1 to `last`: the first 10, then in even steps of the logarithm."""
    further = np.geomspace(1, max(last, 1), _RANKS).round().astype(np.int64)
    return np.unique(np.concatenate((np.arange(1, min(NEIGHBOURS, last) + 1), further)))


def search_parts(
    embeddings: Embeddings, labels: Labels, rng: np.random.Generator
) -> Iterator[Pairs]:
    """Pairs of searches among each half and each quarter of the classes."""
    names = rng.permutation(np.unique(labels))
    parts = 2
    while parts <= SMALLEST_GALLERY:
        for first in range(parts):
            gallery = np.flatnonzero(np.isin(labels, names[first::parts]))
            queries = some_queries(labels, gallery, rng, _MAX_QUERIES // parts)
            if len(queries):
                hits = search(embeddings, labels, queries, gallery)
                yield pairs_of(hits, len(gallery), labels[queries])
        parts *= 2


def pairs_of(hits: Hits, items: int, classes: Labels) -> Pairs:
    """The hits as pairs; `items` of the gallery, `classes` (q,) of the queries."""
    shape = hits.scores.shape
    gaps = np.diff(np.append(hits.ranks, items))
    ranks, gaps = np.broadcast_to(hits.ranks, shape), np.broadcast_to(gaps, shape)
    asked = np.broadcast_to(classes[:, None], shape)
    whole = np.full(shape, items)
    arrays = (hits.scores, hits.right, ranks, gaps, whole, asked)
    return Pairs._make(array.ravel() for array in arrays)


def joined(parts: Sequence[Pairs]) -> Pairs:
    """All of them."""
    return Pairs._make(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def some_queries(
    labels: Labels, gallery: Labels, rng: np.random.Generator, limit: int = _MAX_QUERIES
) -> Labels:
    """Images of `gallery` with another one of their class there; of many, `limit` at random."""
    _, place, counts = np.unique(labels[gallery], return_inverse=True, return_counts=True)
    findable = gallery[counts[place] > 1]
    if len(findable) <= limit:
        return findable
    return np.sort(rng.choice(findable, limit, replace=False))
