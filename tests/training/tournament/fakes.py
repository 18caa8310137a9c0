"""A tournament without training: combinations, and a launcher that writes results."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from training.config.job import Job, parse_job
from training.files import replace_json
from training.result import RESULT, Result
from training.tournament.grid import Combination
from training.tournament.ledger import Finished


def combination(
    loss: str = "a",
    backbone: str = "net",
    dim: int = 64,
    seed: int = 0,
    regularizer: str = "none",
    **changes: object,
) -> Combination:
    """A combination whose job says no more than its names."""
    job = parse_job(
        {
            "name": f"{loss}-{regularizer}-{backbone}-{dim}-s{seed}",
            "data": {"kind": "folder", "root": "nowhere"},
            "model": {"dim": dim},
            "seed": seed,
            **changes,
        }
    )
    return Combination(loss, regularizer, backbone, dim, seed, job)


def result_of(job: Job, recall: float) -> Result:
    """R@1 = recall, and some other figures."""
    figures = {f"R@{k}": recall + n for n, k in enumerate(job.recall_at)} | {"MAP@R": recall / 2}
    return Result(job.as_dict(), figures, {}, 3, job.protocol.choose_by, 2.0)


def finished(one: Combination, recall: float) -> Finished:
    """As if it had been trained."""
    return Finished(one, result_of(one.job, recall))


class FakeLaunch:
    """Writes the result that `recall` gives for a job; a text from it is a failure."""

    def __init__(self, recall: Callable[[Job], float | str | None]) -> None:
        self._recall = recall
        self.calls: list[str] = []

    def __call__(self, job: Job, folder: Path) -> str | None:
        self.calls.append(job.name)
        folder.mkdir(parents=True, exist_ok=True)
        outcome = self._recall(job)
        if isinstance(outcome, str):
            return outcome
        if outcome is not None:
            replace_json(folder / RESULT, asdict(result_of(job, outcome)))
        return None


class Notes:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def planned(self, runs: int, finished: int, failed: int) -> None:
        self.lines.append(f"planned {runs} {finished} {failed}")

    def started(self, combination: Combination, number: int, runs: int) -> None:
        self.lines.append(f"started {number}/{runs} {combination.job.name}")

    def finished(self, finished: Finished) -> None:
        self.lines.append(f"finished {finished.combination.job.name}")

    def failed(self, combination: Combination, reason: str) -> None:
        self.lines.append(f"failed {combination.job.name}: {reason}")
