"""A tournament without training: combinations, and a launcher that writes results."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from training.config.job import Job, parse_job
from training.folder import replace_json
from training.result import RESULT, Result
from training.studies.grid import Combination
from training.studies.runs import Run, play


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


def finished(one: Combination, recall: float) -> Run:
    """As if it had been trained: R@1 = recall, and some other figures."""
    job = one.job
    figures = {f"R@{k}": recall + n for n, k in enumerate(job.recall_at)} | {"MAP@R": recall / 2}
    return Run(one, Result(job.as_dict(), figures, {}, 3, job.protocol.choose_by, 2.0))


def played(
    combinations: list[Combination], folder: Path, recall: Callable[[Job], float | str | None]
) -> tuple[list[Run], list[str], list[str]]:
    """Play with a launcher that writes the result which `recall` gives; a text is a failure.

    Returns the runs, what was said, and the names of the jobs that were launched.
    """
    said: list[str] = []
    launched: list[str] = []
    by_name = {one.job.name: one for one in combinations}

    def launch(job: Job, place: Path) -> str | None:
        launched.append(job.name)
        place.mkdir(parents=True, exist_ok=True)
        outcome = recall(job)
        if isinstance(outcome, float):
            result = finished(by_name[job.name], outcome).result
            replace_json(place / RESULT, asdict(result))
            return None
        return outcome

    return play(combinations, folder, said.append, launch), said, launched
