"""A tournament: a grid of jobs, each trained in its own process, and the ranks of all.

The run folders are the only state, so the next call resumes it. An experiment is a backbone and a
size, a competitor a loss and a regularizer.

References:
    Psomas, Metric Learning: A Deep Dive (2020), part 4, "Tournament of Loss Functions": the rank of
    each loss in each of 12 experiments, their sum, average and standard deviation.
"""

import copy
import itertools
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    model_validator,
)

from kinlens.embedder.errors import JobError
from kinlens.environment import child_environment
from kinlens.training.config.dead import changed, require_effect, written
from kinlens.training.config.job import (
    Job,
    apply_override,
    explain,
    job_toml,
    load_job,
    parse_job,
    with_absolute_paths,
)
from kinlens.training.config.layers import lay_over, read_file, read_top
from kinlens.training.config.settings import CHOOSE_BY_TEST
from kinlens.training.folder import Result, exclusive, finished_result, is_begun, replace_text
from kinlens.training.report.notices import CHOSEN_BY
from kinlens.training.report.page import draw_sizes, plain, table
from kinlens.training.studies.tables import Study, methods, record

_AXES = ("grid", "loss", "regularizer", "backbone", "dim", "seed")
_FAILURE, _OUTPUT = "failure.txt", "output.log"
_DECIMALS = 9
"""Means that differ only by rounding are a tie."""


class _Entry(BaseModel):
    """A loss, regularizer or backbone: its name, and its settings, which override the base job."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")  # also a folder name

    @model_validator(mode="before")
    @classmethod
    def _word(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    def over(self, content: dict[str, Any], **default: dict[str, Any]) -> dict[str, Any]:
        """A job with the settings of this entry; `default` has tables for those that it lacks."""
        return lay_over(content, default | (self.model_extra or {}))


def _unique(given: list[Any]) -> list[Any]:
    names = [_name(item) for item in given]
    if len(set(names)) < len(names):
        raise ValueError("a name is used twice; give each entry a unique name")
    return given


_Entries = Annotated[list[_Entry], Field(min_length=1), AfterValidator(_unique)]
_Integers = Annotated[list[StrictInt], Field(min_length=1), AfterValidator(_unique)]


class _Grid(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    job: str | dict[str, Any] | None = None
    grids: list[str] = []
    """Other grids, which are one tournament together, such as one for each data set."""
    losses: _Entries | None = None
    regularizers: _Entries | None = None
    backbones: _Entries | None = None
    dims: _Integers | None = None
    seeds: _Integers | None = None

    @model_validator(mode="after")
    def _check(self) -> "_Grid":
        if (self.job is None) == (not self.grids) or (
            self.grids and len(self.model_fields_set) > 1
        ):
            raise ValueError("give a job and lists, or grids and nothing else")
        return self


@dataclass(frozen=True)
class GridRun:
    """A run of a grid; `dim` None means the pooled features, `grid` is its name among several.

    `result` is set if the run finished, `reason` if the last attempt failed.
    """

    loss: str
    regularizer: str
    backbone: str
    dim: int | None
    seed: int
    job: Job
    result: Result | None = None
    reason: str = ""
    grid: str = ""

    @property
    def experiment(self) -> str:
        return "-".join(filter(None, (self.grid, self.backbone, _size(self.dim))))

    @property
    def competitor(self) -> str:
        return self.loss + ("" if self.regularizer == "none" else f" + {self.regularizer}")

    @property
    def folder(self) -> Path:
        return Path("runs", self.experiment, self.loss, self.regularizer, f"seed-{self.seed}")


def load_grid(path: Path, overrides: Sequence[str] = ()) -> list[GridRun]:
    """The runs of a grid, entries over the base job, or of all its grids. Raises: JobError."""
    grid = _read(path)
    if grid.job is not None:
        return _runs(grid, grid.job, path, overrides)
    found = []
    for name in grid.grids:
        other = path.parent / name
        inner = _read(other)
        if inner.job is None:
            raise JobError(f"{other} has no job of its own: grids are joined in one level only.")
        for run in _runs(inner, inner.job, other, overrides):
            job = run.job.model_copy(update={"name": f"{other.stem}-{run.job.name}"})
            found.append(replace(run, grid=other.stem, job=job))
    return found


def _runs(
    grid: _Grid, source: str | dict[str, Any], path: Path, overrides: Sequence[str]
) -> list[GridRun]:
    job = _base(source, path, overrides)
    base = job.as_dict()
    tables = {name: table for name, table in base["regularizers"].items() if table}
    used = "-".join(job.regularizers.wanted()) or "none"
    trunk = re.sub(r"[^A-Za-z0-9._]+", "-", job.model.backbone).strip("._-")
    # Seeds are outermost, so an unfinished tournament has complete tables of fewer seeds.
    lists: dict[str, list[Any]] = {
        "seed": grid.seeds or [job.seed],
        "backbone": grid.backbones or [_Entry(name=trunk, model={})],
        "dim": list(grid.dims) if grid.dims else [job.model.dim],
        "loss": grid.losses or [_Entry(name=job.loss.name, loss=base["loss"])],
        "regularizer": grid.regularizers or [_Entry(name=used, regularizers=tables)],
    }
    found = []
    for combination in itertools.product(*lists.values()):
        values = dict(zip(lists, combination, strict=True))
        names = {axis: _name(value) for axis, value in values.items()}
        found.append(GridRun(**names, job=_job(base, values)))
    _require_effect(found, source, path, overrides)
    return found


def _require_effect(
    runs: Sequence[GridRun], source: str | dict[str, Any], path: Path, overrides: Sequence[str]
) -> None:
    """Refuse what a user set in vain for all runs, or for all of an entry. Raises: JobError."""
    top = read_top(path)
    base = source if isinstance(source, dict) else _beside(path, source)
    of_base = top.get("job", {}) if isinstance(source, dict) else read_top(base)
    require_effect([run.job for run in runs], changed(base, overrides, of_base))
    for axis, key in (
        ("loss", "losses"),
        ("regularizer", "regularizers"),
        ("backbone", "backbones"),
    ):
        for entry in (entry for entry in top.get(key, ()) if isinstance(entry, dict)):
            jobs = [run.job for run in runs if getattr(run, axis) == entry["name"]]
            require_effect(jobs, written(entry))


def _name(value: Any) -> Any:
    return value.name if isinstance(value, _Entry) else value


def _read(path: Path) -> _Grid:
    try:
        return _Grid.model_validate(read_file(path))
    except ValidationError as error:
        first = error.errors()[0]
        message = explain(first)
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            message = f"{first['loc'][0]}: unknown key; a grid has {', '.join(_Grid.model_fields)}."
        raise JobError(f"{path}: {message}") from error


def _base(source: str | dict[str, Any], grid: Path, overrides: Sequence[str]) -> Job:
    if isinstance(source, dict):
        content = copy.deepcopy(source)
        for override in overrides:
            apply_override(content, override)
        return parse_job(content, origin=f"the job in {grid}")
    return load_job(_beside(grid, source), overrides)


def _beside(grid: Path, job: str) -> str | Path:
    """The file of a base job next to its grid; otherwise the name of a shipped job, or a path."""
    neighbour = grid.parent / job
    return neighbour if neighbour.is_file() else job


def _job(base: dict[str, Any], values: Mapping[str, Any]) -> Job:
    backbone, loss, regularizer = (values[axis] for axis in ("backbone", "loss", "regularizer"))
    content = backbone.over(base, model={"backbone": backbone.name})
    content = loss.over(content | {"loss": {"name": loss.name}, "regularizers": {}})
    named: dict[str, Any] = {} if regularizer.name == "none" else {regularizer.name: {}}
    content = regularizer.over(content, regularizers=named)
    content["model"] = content["model"] | {"dim": values["dim"]}
    size, seed = _size(values["dim"]), values["seed"]
    name = f"{loss.name}-{regularizer.name}-{backbone.name}-{size}-s{seed}"
    return with_absolute_paths(parse_job(content | {"seed": seed, "name": name}, origin=name))


def _size(dim: int | None) -> str:
    return "pooled" if dim is None else str(dim)


def play(
    runs: Sequence[GridRun],
    folder: Path,
    report: Callable[[str], object],
    launch: Callable[[Job, Path], str | None] | None = None,
) -> list[GridRun]:
    """Train every run without a result in `folder`; failed runs are tried again.

    Before the first run and after each one, `runs.csv` and `report.md` are written. `report` gets
    progress messages; `launch` trains a job in a folder and returns None, or why it failed.

    Raises: JobError if a job does not measure R@1 on test classes, or if `folder` is in use or
        holds results of other jobs.
    """
    for job in (run.job for run in runs):
        if 1 not in job.recall_at or job.protocol.evaluate_test == "never":
            raise JobError(
                f"{job.name}: a tournament ranks R@1 on test classes. Add 1 to recall_at, and "
                'set protocol.evaluate_test = "end" or "every".'
            )
    launch = launch or run_in_process
    with exclusive(folder, with_children=True):
        found = read_runs(runs, folder)
        write_report(folder, found)
        waiting = [run for run in found if run.result is None]
        failed = sum(bool(run.reason) for run in waiting)
        done = len(runs) - len(waiting)
        left = f"{len(waiting)} to go, {failed} of them after a failure"
        report(f"{len(runs)} runs: {done} finished, {left}")
        for number, run in enumerate(waiting, done + 1):
            report(f"run {number} of {len(runs)}: {run.job.name}")
            run_folder = folder / run.folder
            reason = launch(run.job, run_folder)
            result = finished_result(run.job, run_folder)
            if result is not None:
                recalls = [f"{k} {v:.2f}" for k, v in result.figures.items() if k[:2] == "R@"]
                report("  " + "  ".join(recalls))
            else:
                reason = reason or f"the run exited with 0 but wrote no result to {run_folder}"
                replace_text(run_folder / _FAILURE, reason)
                report(f"  failed: {reason} ({_OUTPUT} in {run_folder})")
            found = read_runs(runs, folder)
            write_report(folder, found)
    return found


def read_runs(runs: Sequence[GridRun], folder: Path) -> list[GridRun]:
    """The runs with their results. Raises: JobError for other jobs or images; CheckpointError."""
    found = []
    for run in runs:
        result, failure = finished_result(run.job, folder / run.folder), ""
        if result is None and (path := folder / run.folder / _FAILURE).exists():
            failure = path.read_text(encoding="utf-8")
        found.append(replace(run, result=result, reason=failure))
    first: dict[str, GridRun] = {}
    for run in found:
        if run.result is None:
            continue
        known = first.setdefault(run.grid, run)
        if known.result is not None and known.result.split_sha256 != run.result.split_sha256:
            raise JobError(
                f"{run.folder} was trained on other images than {known.folder}, so their figures "
                "are not comparable. Use another --out for other images, or delete one of the two "
                f"in {folder}."
            )
    return found


def run_in_process(job: Job, folder: Path) -> str | None:
    """Train or resume `job` in a process, with its output in `output.log`; see `play`."""
    replace_text(folder / "job.toml", job_toml(job, "A run of a tournament."))
    with (folder / _OUTPUT).open("wb") as output:
        # The child inherits our files, so a run that outlives a killed tournament keeps the lock.
        process = subprocess.Popen(
            command(job, folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            close_fds=False,
            env=child_environment(),
        )
    try:
        code = process.wait()
    finally:
        process.kill()
        process.wait()
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
    lines = (folder / _OUTPUT).read_text(encoding="utf-8", errors="replace").split("\n")
    faults = [line for line in lines if line.startswith("error: ")]
    message = (faults or [line for line in lines if line.strip()] or ["it printed nothing"])[-1]
    return f"exit code {code}: {message.removeprefix('error: ').strip()}" if code else None


def command(job: Job, folder: Path) -> list[str]:
    words = [sys.executable, "-m", "kinlens.training", "fit", str(folder / "job.toml")]
    words += ["--out", str(folder)]
    words += ["--resume"] if is_begun(folder) else []
    return words + ([CHOOSE_BY_TEST] if job.protocol.choose_by == "test" else [])


def figures_of(runs: Sequence[GridRun]) -> pd.DataFrame:
    rows = []
    for run in runs:
        row: dict[str, Any] = {axis: getattr(run, axis) for axis in _AXES}
        row |= {"experiment": run.experiment, "competitor": run.competitor}
        row["folder"] = run.folder.as_posix()
        if run.result is not None:
            row |= run.result.figures
            row |= {f"validation {name}": value for name, value in run.result.validation.items()}
            for name in ("best_epoch", "chosen_by", "seconds_per_epoch"):
                row[name] = getattr(run.result, name)
        rows.append(row)
    return pd.DataFrame(rows)


def rank(scores: pd.DataFrame) -> pd.DataFrame:
    """Rank competitors by score (high is good) within each experiment, then average the ranks.

    Ties share the average of their ranks. A competitor without any score is not ranked. An
    experiment that lacks one of the others is excluded, as ranks among five and among ten are not
    comparable.

    `scores` has a row per experiment and a column per competitor. The result has a row per
    competitor, best average first: its rank in each remaining experiment, then "total", "average
    rank" and "standard deviation" (n - 1).
    """
    present = scores.round(_DECIMALS).dropna(axis="columns", how="all")
    ranks = present.dropna().rank(axis="columns", ascending=False).T
    averaged = {
        "total": ranks.sum(axis="columns"),
        "average rank": ranks.mean(axis="columns"),
        "standard deviation": ranks.std(axis="columns"),
    }
    return ranks.assign(**averaged).sort_values("average rank", kind="stable")


def write_report(folder: Path, runs: Sequence[GridRun]) -> None:
    figures = figures_of(runs)
    finished = [(run, run.result) for run in runs if run.result is not None]
    failed = [(run.job.name, plain(run.reason)) for run in runs if run.reason]
    done = [run.result is not None for run in runs]
    replace_text(folder / "runs.csv", figures[done].to_csv(index=False))
    lines = [f"# {plain(folder.name)}", ""]
    lines += [f"- {len(finished)} of {len(runs)} runs finished, {len(failed)} failed"]
    chosen = dict.fromkeys(result.chosen_by for _, result in finished)
    lines += [f"- {CHOSEN_BY[who]}" for who in chosen]
    if len(chosen) > 1:
        lines.append(
            "- The models were chosen in several ways, so their figures cannot be compared."
        )
    if finished:
        lines += ["", "## Ranks by R@1", "", *_ranking(figures)]
    sizes = figures[done].dropna(subset=["dim"])
    if sizes["dim"].nunique() > 1:
        draw_sizes(folder / "sizes.png", sizes)
        lines += ["", "![R@1 over embedding sizes](sizes.png)"]
    for experiment in dict.fromkeys(run.experiment for run, _ in finished):
        here = ((run, result) for run, result in finished if run.experiment == experiment)
        records = tuple(record(run.competitor, result) for run, result in here)
        lines += ["", f"## {plain(experiment)}", "", *methods(Study(records))]
    if failed:
        lines += ["", "## Failed runs", "", "Run the tournament again to retry them.", ""]
        lines += table(["run", "reason"], failed)
    replace_text(folder / "report.md", "\n".join(lines) + "\n")


def _ranking(figures: pd.DataFrame) -> list[str]:
    means = figures.groupby(["experiment", "competitor"], sort=False)["R@1"].mean().unstack()
    scores = means.loc[figures["experiment"].unique(), figures["competitor"].unique()]
    lines = ["- by mean R@1 over the seeds within each experiment; ties share their ranks"]
    never = [name for name in scores if scores[name].isna().all()]
    lines += [f"- not ranked, no finished run: {plain(name)}" for name in never]
    for experiment, row in scores.drop(columns=never).iterrows():
        if row.isna().any():
            missing = plain(", ".join(row.index[row.isna()]))
            lines.append(f"- {plain(experiment)} lacks {missing}, so it is omitted")
    ranks = rank(scores)
    if next(iter(ranks)) == "total":
        return [*lines, "- no experiment has a score of every competitor, so there is no ranking"]
    cells = ranks.map(lambda value: "" if pd.isna(value) else f"{value:.4g}")
    rows = [[plain(name), *row] for name, row in cells.iterrows()]
    return [*lines, "", *table(["", *map(plain, ranks)], rows)]
