"""Figures over seeds, and ranks within each experiment, averaged over experiments.

An experiment is a backbone and a size, a competitor a loss and a regularizer.

References:
    Psomas, Metric Learning: A Deep Dive (2020), part 4, "Tournament of Loss Functions": the rank of
    each loss in each of 12 experiments (4 sizes x 3 networks), their sum, average and standard
    deviation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from embedder.errors import EvaluationError
from training.studies.runs import Run

SECONDS = "seconds per epoch"
_DECIMALS = 9
"""Means that differ by rounding alone are a tie."""


@dataclass(frozen=True)
class Ranking:
    """`ranks`: a row a competitor, best average first, with its rank in each experiment; then
    "total", "average rank" and "standard deviation" (n - 1, NaN with a single experiment).

    `left_out` maps experiments to the competitors that they lack; `never_finished` are those
    without a score in any experiment.
    """

    ranks: pd.DataFrame
    left_out: Mapping[str, Sequence[str]]
    never_finished: Sequence[str]


def figures_of(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a planned run: backbone, experiment, competitor and figures, NaN without a result."""
    alone = {run.combination.regularizer for run in runs} == {"none"}
    rows = []
    for run in runs:
        one = run.combination
        size = "pooled features" if one.dim is None else f"{one.dim}-d"
        term = "" if alone or one.regularizer == "none" else f" + {one.regularizer}"
        row: dict[str, Any] = {"backbone": one.backbone, "experiment": f"{one.backbone}, {size}"}
        row |= {"competitor": one.loss + term}
        if run.result is not None:
            row |= {**run.result.figures, SECONDS: run.result.seconds_per_epoch}
        rows.append(row)
    return pd.DataFrame(rows)


def recall_at_1(figures: pd.DataFrame) -> pd.DataFrame:
    """Means of R@1 over seeds: a row an experiment, a column a competitor, in their order."""
    means = figures.groupby(["experiment", "competitor"], sort=False)["R@1"].mean().unstack()
    return means.loc[figures["experiment"].unique(), figures["competitor"].unique()]


def rank(scores: pd.DataFrame, missing_last: bool = False) -> Ranking:
    """Rank competitors by score (high is good) within each experiment, then average.

    Ties share the average of their ranks. A rank among five is no rank among ten, so an experiment
    that lacks a competitor is left out or, with `missing_last`, ranks it last, as one that
    diverged; several that are missing share the last ranks. A competitor that no experiment has is
    not ranked.

    Args:
        scores: a row an experiment, a column a competitor, NaN if missing.
        missing_last: what to do with incomplete experiments.

    Raises: EvaluationError if no competitor or no experiment is left.
    """
    present = scores.astype(float).round(_DECIMALS).dropna(axis="columns", how="all")
    gaps = {e: list(present.columns[row.isna()]) for e, row in present.iterrows()}
    left_out = {e: gap for e, gap in gaps.items() if gap and not missing_last}
    kept = present.drop(index=list(left_out))
    if kept.empty:
        raise EvaluationError(
            "No experiment has a score of every competitor, so there is no ranking. Finish the "
            'failed runs, limit the grid, or rank what is missing "last".'
        )
    ranks = kept.rank(axis="columns", ascending=False, na_option="bottom").T
    ranks = ranks.assign(
        **{
            "total": ranks.sum(axis="columns"),
            "average rank": ranks.mean(axis="columns"),
            "standard deviation": ranks.std(axis="columns"),
        }
    ).sort_values("average rank", kind="stable")
    return Ranking(ranks, left_out, [name for name in scores if name not in present])
