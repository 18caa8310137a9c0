"""Where the positives of some queries stand in a gallery, with memory bounded by a block."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.evaluation.arrays import Labels, Vectors

TIE = 1e-5
"""Scores that are closer than this are a tie."""

Places = NDArray[np.int64]


@dataclass(frozen=True)
class SortedGallery:
    """A gallery read in the order of its classes, so that the positives of a query are one run.

    `order` (N,): row numbers of `vectors`; the classes that are asked for come first, and
    `classes` (M,), ascending, are theirs. No copy of the vectors is made.
    """

    vectors: Vectors
    order: Places
    classes: Labels

    def __post_init__(self) -> None:
        if len(self.order) != len(self.vectors) or len(self.classes) > len(self.order):
            raise ValueError(f"{len(self.order)} places for {len(self.vectors)} vectors.")

    @classmethod
    def sort(cls, vectors: Vectors, labels: Labels, asked: Labels) -> "SortedGallery":
        """The gallery for queries with the labels `asked`."""
        wanted = np.isin(labels, asked)
        order = np.lexsort((labels, ~wanted))
        return cls(vectors, order, labels[order[: int(wanted.sum())]])

    def __len__(self) -> int:
        return len(self.order)

    def positives(self, labels: Labels) -> tuple[Places, Places]:
        """First place of each label and the place behind its last one; equal if it is absent."""
        return (
            np.searchsorted(self.classes, labels, "left"),
            np.searchsorted(self.classes, labels, "right"),
        )

    def places(self) -> Places:
        """Where each row of `vectors` stands: (N,)."""
        places = np.empty_like(self.order)
        places[self.order] = np.arange(len(self.order))
        return places

    def block(self, start: int, stop: int) -> Tensor:
        """The vectors at some places: (g, D)."""
        return torch.from_numpy(self.vectors[self.order[start:stop]].astype(np.float32, copy=False))


@dataclass(frozen=True)
class Queries:
    """Vectors (q, D); their positives are the places first <= i < last, without their `own`.

    `own` (q,) is the place of the query itself, -1 where it is not in the gallery.
    """

    vectors: Tensor
    first: Tensor
    last: Tensor
    own: Tensor


@dataclass(frozen=True)
class Ranks:
    """For each query: rank from 0 of its best positive, average precision at R, and R.

    `best` is -1 where R, the number of positives, is 0.
    """

    best: Tensor
    precision: Tensor
    positives: Tensor

    def __post_init__(self) -> None:
        if not torch.equal(self.best < 0, self.positives == 0):
            raise ValueError("A query has a rank without a positive, or a positive without a rank.")


def rank(queries: Queries, gallery: SortedGallery, columns: int, limit: float = np.inf) -> Ranks:
    """Rank the positives of some queries; a score of `limit` or more leaves the gallery image out.

    The rank of a positive is the number of negatives that are not worse by more than TIE, plus the
    number of better positives.

    Args:
        queries: q of them.
        gallery: N images.
        columns: gallery images of a block of scores; memory is q x columns and q x R.
        limit: see above.
    """
    scores = _positive_scores(queries, gallery, columns, limit)  # (q, R), best first
    counts = scores.isfinite().sum(dim=1)
    counter = _NegativeCounter(scores - TIE, counts)
    for start, block in _blocks(queries, gallery, (0, len(gallery)), columns):
        counter.add(_only_negatives(block, start, queries, limit))
    return counter.ranks()


class _NegativeCounter:
    """Counts, block by block, the negatives above the thresholds (q, R) of the positives.

    Those above the best positive are all counted. Another positive matters only while it can still
    be among the first R: `alive` (q,) is the number of those, and of a block only its R best
    negatives, and only those above the last threshold alive, can change anything. So little is left
    to do after the first blocks.
    """

    def __init__(self, thresholds: Tensor, counts: Tensor) -> None:
        self.thresholds = thresholds
        self.counts = counts
        self.alive = counts
        self.above_best = torch.zeros(len(counts), dtype=torch.int64)
        self.above = torch.zeros_like(thresholds, dtype=torch.int64)
        """(q, R), exact for those alive; the others have a rank of R or more."""

    def add(self, scores: Tensor) -> None:
        """Count a block of scores (q, g), -inf where there is no negative."""
        if not self.thresholds.shape[1]:
            return
        self.above_best += _count(scores >= self.thresholds[:, :1])
        last = self.thresholds.gather(1, (self.alive - 1).clamp(min=0)[:, None])
        hits = _count(scores >= last.masked_fill(self.alive[:, None] == 0, torch.inf))
        rows = hits.nonzero().squeeze(1)
        if len(rows):
            best = scores[rows].topk(min(self.thresholds.shape[1], int(hits.max())), dim=1).values
            living = slice(0, int(self.alive.max()))
            # Negated, both ascend: how many negatives are not below each threshold.
            thresholds = -self.thresholds[rows, living]
            self.above[rows, living] += torch.searchsorted(-best, thresholds, right=True)
            self.alive = (self._ranks(living) < self.counts[:, None]).sum(dim=1)

    def ranks(self) -> Ranks:
        ranks = self._ranks(slice(None))
        precision = torch.arange(1, ranks.shape[1] + 1) / (ranks + 1).double()
        total = precision.masked_fill(ranks >= self.counts[:, None], 0.0).sum(dim=1)
        best = torch.where(self.counts > 0, self.above_best, -1)
        return Ranks(best, total / self.counts.clamp(min=1), self.counts)

    def _ranks(self, positives: slice) -> Tensor:
        """Rank from 0 of some positives of each query, ascending: (q, r)."""
        above = self.above[:, positives]
        return above + torch.arange(above.shape[1])


def _count(hits: Tensor) -> Tensor:
    """Hits per row: (q, g) to (q,). As float32, exact up to 2^24, 50 times as fast as of bool."""
    return hits.float().sum(dim=1).long()


def _positive_scores(
    queries: Queries, gallery: SortedGallery, columns: int, limit: float
) -> Tensor:
    """Scores of the positives, best first, -inf behind the last one: (q, R of the largest)."""
    width = int((queries.last - queries.first).max())
    place = queries.first[:, None] + torch.arange(width)  # (q, R)
    wanted = (place < queries.last[:, None]) & (place != queries.own[:, None])
    scores = torch.full(place.shape, -torch.inf)
    span = (int(queries.first.min()), int(queries.last.max()))
    for start, block in _blocks(queries, gallery, span if width else (0, 0), columns):
        column = place - start
        here = wanted & (column >= 0) & (column < block.shape[1])
        inside = block.gather(1, column.clamp(0, block.shape[1] - 1))
        scores = torch.where(here, inside, scores)
    scores.masked_fill_(scores >= limit, -torch.inf)
    return scores.sort(dim=1, descending=True).values


def _only_negatives(scores: Tensor, start: int, queries: Queries, limit: float) -> Tensor:
    """The block of scores (q, g) from place `start`, -inf for all but the negatives; in place."""
    stop = start + scores.shape[1]
    if start < int(queries.last.max()) and int(queries.first.min()) < stop:
        place = torch.arange(start, stop)
        same = (place >= queries.first[:, None]) & (place < queries.last[:, None])
        scores.masked_fill_(same, -torch.inf)
    if limit < np.inf:
        scores.masked_fill_(scores >= limit, -torch.inf)
    return scores


def _blocks(
    queries: Queries, gallery: SortedGallery, span: tuple[int, int], columns: int
) -> Iterator[tuple[int, Tensor]]:
    """The scores (q, g) of the queries with the places of a span, block by block."""
    for start in range(*span, columns):
        yield start, queries.vectors @ gallery.block(start, min(start + columns, span[1])).T
