"""Results of a tournament by experiment (backbone, size) and competitor (loss, regularizer)."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from training.tournament.grid import Combination
from training.tournament.ledger import Finished
from training.tournament.ranking import Missing, Ranking, rank

SECONDS = "seconds per epoch"


@dataclass(frozen=True)
class Score:
    """Mean of a figure over seeds; `deviation` (n - 1) is None with a single seed."""

    mean: float
    deviation: float | None
    seeds: int


@dataclass(frozen=True)
class Cell:
    """A competitor in an experiment: its scores, and how many seeds were planned for it."""

    scores: dict[str, Score]
    seeds: int
    planned: int


@dataclass(frozen=True)
class Standings:
    """{experiment: {competitor: cell}}, both in the order of the grid."""

    cells: dict[str, dict[str, Cell]]

    @property
    def competitors(self) -> list[str]:
        """All of them, in the order of the grid."""
        return list(dict.fromkeys(name for row in self.cells.values() for name in row))

    def figures(self, experiment: str) -> list[str]:
        """Names of the figures that some competitor of an experiment has."""
        row = self.cells[experiment].values()
        return list(dict.fromkeys(name for cell in row for name in cell.scores))

    def ranking(self, missing: Missing, figure: str = "R@1") -> Ranking:
        """Ranks by the mean of a figure. Raises: EvaluationError if nothing can be ranked."""
        competitors = self.competitors
        scores = {
            experiment: {name: _mean(row.get(name), figure) for name in competitors}
            for experiment, row in self.cells.items()
        }
        return rank(scores, missing)


def standings(combinations: Sequence[Combination], finished: Sequence[Finished]) -> Standings:
    """Averages over seeds; a competitor without a finished run has a cell without scores."""
    alone = {combination.regularizer for combination in combinations} == {"none"}
    results: dict[tuple[str, str], list[Finished]] = {}
    for one in finished:
        results.setdefault(_where(one.combination, alone), []).append(one)
    planned: dict[tuple[str, str], int] = {}
    for combination in combinations:
        key = _where(combination, alone)
        planned[key] = planned.get(key, 0) + 1
    cells: dict[str, dict[str, Cell]] = {}
    for (experiment, competitor), count in planned.items():
        found = results.get((experiment, competitor), [])
        cell = Cell(_scores(found), len(found), count)
        cells.setdefault(experiment, {})[competitor] = cell
    return Standings(cells)


def experiment_of(combination: Combination) -> str:
    """For people: "resnet50, 512-d"."""
    size = "pooled features" if combination.dim is None else f"{combination.dim}-d"
    return f"{combination.backbone}, {size}"


def _where(combination: Combination, alone: bool) -> tuple[str, str]:
    competitor = combination.loss
    if not alone and combination.regularizer != "none":
        competitor += f" + {combination.regularizer}"
    return experiment_of(combination), competitor


def _scores(found: Sequence[Finished]) -> dict[str, Score]:
    rows = [{**one.result.figures, SECONDS: one.result.seconds_per_epoch} for one in found]
    scores = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        scores[name] = Score(statistics.fmean(values), deviation, len(values))
    return scores


def _mean(cell: Cell | None, figure: str) -> float | None:
    return None if cell is None or figure not in cell.scores else cell.scores[figure].mean
