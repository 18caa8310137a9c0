"""Ranks within each experiment, averaged over experiments.

References:
    Psomas, Metric Learning: A Deep Dive (2020), part 4, "Tournament of Loss Functions": the rank of
    each loss in each of 12 experiments (4 sizes x 3 networks), their sum, average and standard
    deviation.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from embedder.errors import EvaluationError

Missing = Literal["leave-out", "last"]
_DECIMALS = 9
"""Means that differ by rounding alone are a tie."""


@dataclass(frozen=True)
class Place:
    """A competitor's ranks, one an experiment; `deviation` is None with a single experiment."""

    competitor: str
    ranks: tuple[float, ...]

    @property
    def total(self) -> float:
        """Sum of the ranks."""
        return sum(self.ranks)

    @property
    def average(self) -> float:
        """Mean rank; 1 is the best."""
        return statistics.fmean(self.ranks)

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation (n - 1) of the ranks, as the paper's figures have it."""
        return statistics.stdev(self.ranks) if len(self.ranks) > 1 else None


@dataclass(frozen=True)
class Ranking:
    """Places, best average first; `left_out` maps experiments to the competitors they lack.

    `never_finished` are competitors without a score in any experiment.
    """

    experiments: tuple[str, ...]
    places: tuple[Place, ...]
    left_out: Mapping[str, tuple[str, ...]]
    never_finished: tuple[str, ...]


def rank(scores: Mapping[str, Mapping[str, float | None]], missing: Missing) -> Ranking:
    """Rank competitors by score (high is good) within each experiment, then average.

    Ties share the average of their ranks. A rank among five is no rank among ten, so an experiment
    that lacks a competitor is either left out ("leave-out") or ranks it "last", as one that
    diverged; several that are missing share the last ranks. A competitor that no experiment has is
    not ranked.

    Args:
        scores: {experiment: {competitor: score, None if missing}}.
        missing: what to do with incomplete experiments.

    Raises: EvaluationError if no competitor or no experiment is left.
    """
    names = list(dict.fromkeys(name for row in scores.values() for name in row))
    absent = tuple(n for n in names if all(row.get(n) is None for row in scores.values()))
    present = [name for name in names if name not in absent]
    gaps = {
        experiment: tuple(name for name in present if row.get(name) is None)
        for experiment, row in scores.items()
    }
    left_out = {e: gap for e, gap in gaps.items() if gap and missing == "leave-out"}
    kept = [experiment for experiment in scores if experiment not in left_out]
    if not present or not kept:
        raise EvaluationError(
            "No experiment has a score of every competitor, so there is no ranking. Finish the "
            'failed runs, limit the grid, or rank what is missing "last".'
        )
    columns = [_ranks([scores[experiment].get(name) for name in present]) for experiment in kept]
    places = [Place(n, tuple(c[i] for c in columns)) for i, n in enumerate(present)]
    places.sort(key=lambda place: place.average)
    return Ranking(tuple(kept), tuple(places), left_out, absent)


def _ranks(scores: list[float | None]) -> list[float]:
    """1 for the highest; equal scores share the mean of the ranks that they take up together."""
    values = [float("-inf") if s is None else round(s, _DECIMALS) for s in scores]
    return [
        1 + sum(other > value for other in values) + (values.count(value) - 1) / 2
        for value in values
    ]
