"""Tuning: finds the lowest search effort that reaches a target recall."""

import math
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import RecallError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.bits import Bits
from kinlens.indexer.index.faiss import SegmentIndex
from kinlens.indexer.index.index_types import INDEX_TYPES, TUNED_AT, Effort
from kinlens.indexer.types import SAME_SCORE, Ids, Scores

_SCAN_QUERIES = 100
_FASTER = 0.9  # a higher k_factor is kept only if the time drops below this share


@dataclass(frozen=True, slots=True)
class Tuned:
    """An effort and its measured recall."""

    effort: Effort
    recall: float


def recall_at(found: Ids, truth: Ids) -> float:
    """Share of the true neighbours (Q, k) that are among those found (Q, any width)."""
    if not truth.size:
        return 1.0
    hits = sum(len(np.intersect1d(*rows)) for rows in zip(found, truth, strict=True))
    return hits / truth.size


def tune(
    index: SegmentIndex,
    queries: Embeddings,
    target: float,
    k: int = TUNED_AT,
    allowed: Bits | None = None,
) -> Tuned:
    """The fastest effort that reaches the recall `target` at `k`, measured on `queries` (Q, D).

    The queries must not be in the index. `allowed` are the indexed positions; None for all. Aims
    two standard errors above the target, but at most halfway from the target to 1.

    Raises: RecallError.
    """
    index_type = INDEX_TYPES[index.kind]
    measure = Measure(
        index, queries[:_SCAN_QUERIES] if index_type.is_scan else queries, target, k, allowed
    )
    best: Tuned | None = None
    fastest = math.inf
    for k_factor in (1,) if index.is_on_gpu else index_type.k_factors:
        found = _smallest(measure, k_factor, index_type.efforts(index.size, index.nlist))
        if found is None:
            continue
        if found.seconds >= _FASTER * fastest:
            break
        best, fastest = found.tuned, found.seconds
    if best is None:
        best = max(measure.seen, key=lambda tuned: tuned.recall)
    if best.recall < target:
        raise RecallError(
            f"The index {index.kind} has a recall of {best.recall:.4f} at {measure.k} with its "
            f"highest effort; the target is {target}. Lower --target-recall or "
            "choose another --index (flat is exact)."
        )
    return best


@dataclass(frozen=True, slots=True)
class Tried:
    """A measured effort: recall, standard error, duration, and whether it reaches the target."""

    tuned: Tuned
    error: float
    seconds: float
    is_enough: bool


class Measure:
    """Measures recall and time of an effort against exact results."""

    def __init__(
        self,
        index: SegmentIndex,
        queries: Embeddings,
        target: float,
        k: int = TUNED_AT,
        allowed: Bits | None = None,
    ) -> None:
        self.index = index
        self.target = target
        self.k = min(k, index.size)
        self._queries = queries
        truth, _ = index.exact(queries, self.k, allowed)
        self._worst: Scores = truth[:, -1:]
        self.seen: list[Tuned] = []

    def __call__(self, effort: Effort) -> Tried:
        started = perf_counter()
        scores, _ = self.index.search(self._queries, self.k, effort)
        seconds = perf_counter() - started
        recalls = (scores >= self._worst - SAME_SCORE).mean(axis=1) if scores.size else np.ones(1)
        recall = float(recalls.mean())
        self.seen.append(Tuned(effort, recall))
        error = _error(recalls)
        # Two standard errors above the target, but at most halfway from the target to 1.
        aim = min(self.target + 2 * error, (1 + self.target) / 2)
        return Tried(self.seen[-1], error, seconds, recall >= aim)


def _smallest(measure: Measure, k_factor: int, values: list[int]) -> Tried | None:
    """The smallest value that reaches the target: tries `values` in order, then bisects."""
    low = 0
    for high in values:
        found = measure(Effort(high, k_factor))
        if found.is_enough:
            break
        low = high
    else:
        return None
    while high - low > max(1, high // 8) and low:
        middle = (low + high) // 2
        tried = measure(Effort(middle, k_factor))
        if tried.is_enough:
            found, high = tried, middle
        else:
            low = middle
    return found


def _error(recalls: NDArray[np.float64]) -> float:
    """The standard error of the mean of `recalls` (Q,).

    Computed per query and not per neighbour, since neighbours of one query are correlated.
    """
    return float(recalls.std(ddof=1)) / math.sqrt(len(recalls)) if len(recalls) > 1 else 0.0
