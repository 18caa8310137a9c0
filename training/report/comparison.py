"""Finished runs side by side: their figures, and what was set differently."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedder.errors import JobError
from training.evaluation.interval import with_interval
from training.result import Result, read_result
from training.stamp import FREE

_SHARES = ("NMI", "F1", "MAP@R")  # in percent, but of no number of queries
_VALIDATION = "validation R@1"


@dataclass(frozen=True)
class FinishedRun:
    """A run folder's result; `queries` and `validation_queries` have an image to find."""

    name: str
    result: Result
    queries: int
    validation_queries: int


def read_run(folder: Path) -> FinishedRun:
    """The finished run in `folder`. Raises: JobError if there is none; CheckpointError."""
    result = read_result(folder)
    if result is None:
        raise JobError(f"{folder} holds no finished run: it has no result.json. Give run folders.")
    gallery = _classes(folder / "gallery.csv")
    return FinishedRun(
        name=folder.as_posix(),
        result=result,
        queries=_queries(_classes(folder / "test.csv"), gallery),
        validation_queries=_queries(_classes(folder / "validation.csv"), Counter()),
    )


def table(runs: Sequence[FinishedRun]) -> list[str]:
    """Markdown: a line for each run, a column for each figure that one of them has.

    Recalls come with Wilson's 95 % interval over the queries, which are taken as independent.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.result.figures))
    validated = [_VALIDATION] if any(run.result.validation for run in runs) else []
    header = ["run", "epoch", *validated, *names, "s/epoch"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for run in runs:
        result = run.result
        cells = [f"`{run.name}`", str(result.best_epoch)]
        if validated:
            cells.append(_cell("R@1", result.validation.get("R@1"), run.validation_queries))
        cells += [_cell(name, result.figures.get(name), run.queries) for name in names]
        lines.append("| " + " | ".join([*cells, f"{result.seconds_per_epoch:.0f}"]) + " |")
    return lines


def remarks(runs: Sequence[FinishedRun]) -> list[str]:
    """Whether the runs can be compared, and by how much each differs from the first in R@1."""
    first, *others = runs
    said = []
    for run in others:
        if run.result.split_sha256 != first.result.split_sha256:
            said.append(
                f"{run.name} was tested on other images than {first.name}: the figures of the two "
                "say nothing about each other."
            )
            continue
        mine, base = run.result.figures.get("R@1"), first.result.figures.get("R@1")
        if mine is not None and base is not None:
            said.append(
                f"{run.name}: {mine - base:+.1f} points of R@1 against {first.name}, on the same "
                f"{run.queries:,} queries; one seed each, unless you give more runs."
            )
    return said


def differing_settings(runs: Sequence[FinishedRun]) -> dict[str, list[Any]]:
    """The settings in which the runs differ, by name, with the value of each run."""
    flat = [_flat(run.result.job) for run in runs]
    names = sorted({name for settings in flat for name in settings})
    values = {name: [settings.get(name) for settings in flat] for name in names}
    return {
        name: found
        for name, found in values.items()
        if any(value != found[0] for value in found) and not _is_free(name)
    }


def _cell(name: str, value: float | None, queries: int) -> str:
    if value is None:
        return ""
    if name.startswith("R@") and queries:
        return with_interval(value, queries)
    return f"{value:.1f}" if name in _SHARES or name.startswith("R@") else f"{value:.3g}"


def _classes(path: Path) -> Counter[str]:
    """How many images of each class a list of a run has; none without that list."""
    if not path.is_file():
        return Counter()
    with path.open(newline="", encoding="utf-8") as stream:
        return Counter(row["class"] for row in csv.DictReader(stream))


def _queries(sizes: Counter[str], gallery: Counter[str]) -> int:
    if gallery:
        return sum(size for name, size in sizes.items() if gallery[name])
    return sum(size for size in sizes.values() if size > 1)


def _flat(job: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in job.items():
        if isinstance(value, Mapping):
            settings |= _flat(value, f"{prefix}{key}.")
        else:
            settings[prefix + key] = value
    return settings


def _is_free(name: str) -> bool:
    return name in FREE or name.split(".")[0] in FREE
