"""Finished runs side by side: their figures, and what was set differently."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from embedder.errors import JobError
from training.evaluation.retrieval import with_interval
from training.folder import settings
from training.report.markdown import table
from training.result import Result, read_result

_SHARES = ("NMI", "F1", "MAP@R")  # in percent, but of no number of queries


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
    test, validation, gallery = (
        _classes(folder / f"{part}.csv") for part in ("test", "validation", "gallery")
    )
    found = test.index.isin(gallery.index) if len(gallery) else test > 1
    queries, of_validation = int(test[found].sum()), int(validation[validation > 1].sum())
    return FinishedRun(folder.as_posix(), result, queries, of_validation)


def compare(runs: Sequence[FinishedRun]) -> list[str]:
    """Markdown: a table of the runs' figures, remarks, and the settings in which they differ.

    Recalls come with Wilson's 95 % interval over the queries, which are taken as independent.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.result.figures))
    validated = any(run.result.validation for run in runs)
    rows = []
    for run in runs:
        result = run.result
        on_validation = _cell("R@1", result.validation.get("R@1"), run.validation_queries)
        cells = [f"`{run.name}`", str(result.best_epoch), *([on_validation] if validated else [])]
        cells += [_cell(name, result.figures.get(name), run.queries) for name in names]
        rows.append([*cells, f"{result.seconds_per_epoch:.0f}"])
    header = ["run", "epoch", *(["validation R@1"] if validated else []), *names, "s/epoch"]
    lines = [*table(header, rows), "", *(f"- {remark}" for remark in _remarks(runs))]
    differing = _differing_settings(runs)
    if differing:
        lines += ["", *table(["setting", *(f"`{run.name}`" for run in runs)], differing)]
    return lines


def _remarks(runs: Sequence[FinishedRun]) -> list[str]:
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


def _differing_settings(runs: Sequence[FinishedRun]) -> list[list[str]]:
    """Rows of a setting and its value in each run."""
    of_runs = [settings(run.result.job) for run in runs]
    rows = []
    for name in sorted({name for found in of_runs for name in found}):
        values = [found.get(name) for found in of_runs]
        if any(value != values[0] for value in values):
            rows.append([f"`{name}`", *("" if v is None else str(v) for v in values)])
    return rows


def _cell(name: str, value: float | None, queries: int) -> str:
    if value is None:
        return ""
    if name.startswith("R@") and queries:
        return with_interval(value, queries)
    return f"{value:.1f}" if name in _SHARES or name.startswith("R@") else f"{value:.3g}"


def _classes(path: Path) -> pd.Series:
    """How many images of each class a list of a run has; none without that list."""
    if not path.is_file():
        return pd.Series(dtype=int)
    return pd.read_csv(path, dtype=str, keep_default_na=False)["class"].value_counts()
