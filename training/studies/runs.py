"""Play a tournament: a process for each run without a result; the run folders are its only state.

Whatever kills a run leaves the tournament alive, and the next call goes on where it stopped.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from embedder.errors import JobError
from training.checkpoint import FILE
from training.config.job import Job, job_toml
from training.config.settings import CHOOSE_BY_TEST
from training.folder import replace_json, replace_text
from training.result import Result, finished_result
from training.studies.grid import Combination

Launch = Callable[[Job, Path], str | None]
_FAILURE, _OUTPUT = "failure.json", "output.log"


@dataclass(frozen=True)
class Run:
    """A combination with its result, or, with `attempts`, why the last of them failed."""

    combination: Combination
    result: Result | None = None
    reason: str = ""
    attempts: int = 0

    def row(self) -> dict[str, Any]:
        """What is known of it, flat: axes, figures and how the model was chosen."""
        row: dict[str, Any] = self.combination.axes
        if self.result is not None:
            row |= self.result.figures
            row |= {f"validation {name}": v for name, v in self.result.validation.items()}
            for name in ("best_epoch", "chosen_by", "seconds_per_epoch"):
                row[name] = getattr(self.result, name)
        return row | {"folder": self.combination.folder.as_posix()}


def read_runs(combinations: Sequence[Combination], folder: Path) -> list[Run]:
    """What has become of each combination.

    Raises: JobError if a folder holds the result of another job, or if two runs were trained on
        other images; CheckpointError.
    """
    runs, first = [], None
    for one in combinations:
        result = finished_result(one.job, folder / one.folder)
        if result is not None:
            first = first or (result.split_sha256, one.folder)
            if result.split_sha256 != first[0]:
                raise JobError(
                    f"{one.folder} was trained on other images than {first[1]}, so their figures "
                    "do not compare. Use another --out for other images, or delete one of the two "
                    f"in {folder}."
                )
        failure = folder / one.folder / _FAILURE
        known = json.loads(failure.read_text()) if result is None and failure.exists() else {}
        runs.append(Run(one, result, known.get("reason", ""), known.get("attempts", 0)))
    return runs


def play(
    combinations: Sequence[Combination],
    folder: Path,
    say: Callable[[str], object],
    launch: Launch | None = None,
    report: Callable[[list[Run]], object] = lambda _: None,
) -> list[Run]:
    """Run every combination that has no result in `folder`; those that failed are tried again.

    Args:
        combinations: of `load_grid`.
        folder: gets `runs/`, and a row a finished run in `rows.jsonl` and `runs.csv`.
        say: told how it goes, a line at a time.
        launch: trains a job in a folder; returns None, or why it failed. Default a process.
        report: called before the first run and after each one.

    Raises: JobError if a job does not measure R@1 on test classes, or if `folder` is in use or
        holds results of other jobs.
    """
    for job in (one.job for one in combinations):
        if 1 not in job.recall_at or job.protocol.evaluate_test == "never":
            raise JobError(
                f"{job.name}: a tournament ranks R@1 on test classes. Put 1 into recall_at, and "
                'set protocol.evaluate_test = "end" or "every".'
            )
    launch = launch or run_in_process
    with _alone_in(folder):
        runs = _read_and_report(combinations, folder, report)
        waiting = [run for run in runs if run.result is None]
        done, again = len(runs) - len(waiting), sum(run.attempts > 0 for run in waiting)
        say(
            f"{len(runs)} runs: {done} finished, {len(waiting)} to go, {again} of them failed "
            "before and are tried again"
        )
        for number, run in enumerate(waiting, done + 1):
            one, place = run.combination, folder / run.combination.folder
            say(f"run {number} of {len(runs)}: {one.job.name}")
            reason = launch(one.job, place)
            result = finished_result(one.job, place)
            if result is not None:
                recalls = [f"{k} {v:.2f}" for k, v in result.figures.items() if k[:2] == "R@"]
                say("  " + "  ".join(recalls))
            else:
                reason = reason or f"the run ended well but left no result in {place}"
                replace_json(place / _FAILURE, {"reason": reason, "attempts": run.attempts + 1})
                say(f"  failed: {reason} ({_OUTPUT} in {place})")
            runs = _read_and_report(combinations, folder, report)
    return runs


def run_in_process(job: Job, folder: Path) -> str | None:
    """Train `job` in `folder` with `kinlens-train fit`; goes on from a checkpoint if there is one.

    Its output goes to `output.log`. Returns None, or why it failed. When we are interrupted the run
    is stopped too; its checkpoint stays.
    """
    replace_text(folder / "job.toml", job_toml(job, "A run of a tournament."))
    with (folder / _OUTPUT).open("wb") as output:
        # It inherits our files, so a run that outlives a killed tournament keeps its lock.
        process = subprocess.Popen(
            command(job, folder), stdout=output, stderr=subprocess.STDOUT, close_fds=False
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
    said = (faults or [line for line in lines if line.strip()] or ["it printed nothing"])[-1]
    return f"exit code {code}: {said.removeprefix('error: ').strip()}" if code else None


def command(job: Job, folder: Path) -> list[str]:
    """The command line of a run."""
    words = [sys.executable, "-m", "training", "fit", str(folder / "job.toml")]
    words += ["--out", str(folder)]
    words += ["--resume"] if (folder / FILE).exists() else []
    return words + ([CHOOSE_BY_TEST] if job.protocol.choose_by == "test" else [])


def _read_and_report(
    combinations: Sequence[Combination], folder: Path, report: Callable[[list[Run]], object]
) -> list[Run]:
    runs = read_runs(combinations, folder)
    rows = [run.row() for run in runs if run.result is not None]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    replace_text(folder / "rows.jsonl", lines)
    replace_text(folder / "runs.csv", pd.DataFrame(rows).to_csv(index=False))
    report(runs)
    return runs


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock `folder` against another tournament. Raises: JobError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JobError(
                f"A tournament, or a run of one, is at work in {folder}. Wait for it, stop it, or "
                "use another --out."
            ) from error
        yield
