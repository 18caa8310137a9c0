"""Splits, jobs and runners without images, for tests of what happens around a run."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kinlens.training.config.job import Job, parse_job
from kinlens.training.data.records import LabelledImages, Split, labelled
from kinlens.training.folder import RESULT, Result, replace_json
from kinlens.training.report.log import Callback
from kinlens.training.studies.tournament import GridRun, play

Score = Callable[[Job, Split], dict[str, float]]


def images(prefix: str, classes: int, per_class: int = 3) -> LabelledImages:
    """Names of images that do not exist."""
    return labelled(
        Path("nowhere"),
        [
            (f"{prefix}{c:02d}/{n}.png", f"{prefix}{c:02d}")
            for c in range(classes)
            for n in range(per_class)
        ],
    )


def some_split(train: int = 20, test: int = 5, per_class: int = 3) -> Split:
    """Train classes a00, a01, ... and test classes z00, z01, ..."""
    return Split(images("a", train, per_class), images("z", test, per_class))


SHOP: dict[str, Any] = {
    "protocol": {"choose_by": "alpha"},
    "runtime": {"eval_every_epochs": 0},
}
"""Settings of the job `shop` that a study replaces."""


def some_job(**changes: Any) -> Job:
    """A job on a folder that does not exist."""
    return parse_job(
        {
            "name": "study",
            "recall_at": [1, 2],
            "data": {"kind": "folder", "root": "nowhere"},
            "model": {"weights": "none", "dim": 16},
            **changes,
        }
    )


class FakeRunner:
    """A fake `run_job`: writes a result with the scores that `score` gives; remembers calls."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self.calls: list[tuple[Job, Split, Path]] = []

    def __call__(self, job: Job, split: Split, folder: Path, listener: Callback) -> Result:
        self.calls.append((job, split, folder))
        validation = self._score(job, split)
        tested = job.protocol.evaluate_test != "never"
        figures = {"R@1": validation["R@1"] - 10, "R@2": 90.0} if tested else {}
        chosen_by = job.protocol.choose_by
        result = Result(job.as_dict(), figures, validation, 2, chosen_by, 1.5)
        folder.mkdir(parents=True, exist_ok=True)
        replace_json(folder / RESULT, asdict(result))
        return result


def tournament_run(
    loss: str = "a",
    backbone: str = "net",
    dim: int = 64,
    seed: int = 0,
    regularizer: str = "none",
    **changes: object,
) -> GridRun:
    """A run whose job has only names."""
    name = f"{loss}-{regularizer}-{backbone}-{dim}-s{seed}"
    job = some_job(name=name, seed=seed, **{"recall_at": [1, 2, 4, 8], **changes})
    return GridRun(loss, regularizer, backbone, dim, seed, job)


def finished(run: GridRun, recall: float) -> GridRun:
    """As if it had been trained: R@1 = recall, and some other figures."""
    job = run.job
    figures = {f"R@{k}": recall + n for n, k in enumerate(job.recall_at)} | {"MAP@R": recall / 2}
    return replace(run, result=Result(job.as_dict(), figures, {}, 3, job.protocol.choose_by, 2.0))


def played(
    runs: list[GridRun], folder: Path, recall: Callable[[Job], float | str | None]
) -> tuple[list[GridRun], list[str], list[str]]:
    """Play with a launcher that writes the result which `recall` gives; a text is a failure.

    Returns the runs, the messages, and the names of the jobs that were launched.
    """
    messages: list[str] = []
    launched: list[str] = []
    by_name = {run.job.name: run for run in runs}

    def launch(job: Job, place: Path) -> str | None:
        launched.append(job.name)
        place.mkdir(parents=True, exist_ok=True)
        outcome = recall(job)
        if isinstance(outcome, float):
            replace_json(place / RESULT, asdict(finished(by_name[job.name], outcome).result))
            return None
        return outcome

    return play(runs, folder, messages.append, launch=launch), messages, launched
