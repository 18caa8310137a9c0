"""Tuning: finds the lowest search effort that reaches a target recall."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from kinlens.embedder.errors import RecallError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.bits import Bits
from kinlens.indexer.index.faiss import SegmentIndex
from kinlens.indexer.index.index_types import INDEX_TYPES, TUNED_AT, Effort
from kinlens.indexer.types import SAME_SCORE

_SCAN_QUERIES = 100
_FASTER = 0.9  # a higher k_factor is kept only if the time drops below this share


@dataclass(frozen=True, slots=True)
class Tuned:
    """A measured effort: its recall with its standard error, and the duration of the search."""

    effort: Effort
    recall: float
    error: float = 0.0
    seconds: float = 0.0

    def reaches(self, target: float) -> bool:
        """Whether the recall is two standard errors above the target, or halfway to 1."""
        return self.recall >= min(target + 2 * self.error, (1 + target) / 2)


def measuring(
    index: SegmentIndex, queries: Embeddings, allowed: Bits | None = None
) -> Callable[[Effort], Tuned]:
    """A function that compares searches with exact ones among the positions `allowed`."""
    k = min(TUNED_AT, index.size)
    least = index.exact(queries, k, allowed)[0][:, -1:] - SAME_SCORE

    def measure(effort: Effort) -> Tuned:
        started = perf_counter()
        scores, _ = index.search(queries, k, effort)
        seconds = perf_counter() - started
        recalls = (scores >= least).mean(axis=1) if scores.size else np.ones(1)
        # Per query and not per neighbour, since neighbours of one query are correlated.
        error = float(recalls.std(ddof=1)) / math.sqrt(len(recalls)) if len(recalls) > 1 else 0.0
        return Tuned(effort, float(recalls.mean()), error, seconds)

    return measure


def tune(
    index: SegmentIndex,
    queries: Embeddings,
    target: float,
    allowed: Bits | None = None,
) -> Tuned:
    """The fastest effort that reaches the recall `target` at 10, measured on `queries` (Q, D).

    The queries must not be in the index. `allowed` are the indexed positions; None for all.

    Raises: RecallError.
    """
    index_type = INDEX_TYPES[index.kind]
    efforts = index_type.efforts(index.size, index.nlist)
    measure = measuring(index, queries[:_SCAN_QUERIES] if index_type.is_scan else queries, allowed)
    tries: list[Tuned] = []
    best: Tuned | None = None
    for k_factor in (1,) if index.is_on_gpu else index_type.k_factors:
        tries.append(_smallest(measure, target, k_factor, efforts))
        if not tries[-1].reaches(target):
            continue
        if best is not None and tries[-1].seconds >= _FASTER * best.seconds:
            break
        best = tries[-1]
    best = best or max(tries, key=lambda tuned: tuned.recall)
    if best.recall < target:
        raise RecallError(
            f"The index {index.kind} has a recall@10 of {best.recall:.4f} "
            f"with its highest effort; the target is {target}. Lower --target-recall or choose "
            "another --index (flat is exact)."
        )
    return best


def _smallest(
    measure: Callable[[Effort], Tuned], target: float, k_factor: int, values: list[int]
) -> Tuned:
    """The smallest value that reaches the target: tries `values` in order, then bisects.

    The highest value if none does.
    """
    low = 0
    for high in values:
        best = measure(Effort(high, k_factor))
        if best.reaches(target):
            break
        low = high
    while high - low > max(1, high // 8) and low:
        middle = (low + high) // 2
        tried = measure(Effort(middle, k_factor))
        if tried.reaches(target):
            best, high = tried, middle
        else:
            low = middle
    return best
