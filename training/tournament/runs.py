"""Play a tournament: the runs that are not finished, one after the other."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from embedder.errors import CheckpointError, JobError
from training.config.job import Job
from training.tournament.grid import Combination
from training.tournament.ledger import Finished, Ledger
from training.tournament.process import alone_in, run_in_process

Launch = Callable[[Job, Path], str | None]


class Observer(Protocol):
    """Who wants to know how a tournament goes."""

    def planned(self, runs: int, finished: int, failed: int) -> None: ...
    def started(self, combination: Combination, number: int, runs: int) -> None: ...
    def finished(self, finished: Finished) -> None: ...
    def failed(self, combination: Combination, reason: str) -> None: ...


def play(
    combinations: Sequence[Combination],
    folder: Path,
    observer: Observer,
    launch: Launch = run_in_process,
    report: Callable[[Ledger], object] = lambda _: None,
) -> Ledger:
    """Run every combination that has no result in `folder`; those that failed are tried again.

    A run that fails, however it ends, is kept with its reason and the next one starts. After an
    interruption the next call goes on with the run that was stopped.

    Args:
        combinations: of `load_grid`.
        folder: gets `runs/`, `rows.jsonl` and `runs.csv`.
        observer: told what happens.
        launch: trains a job in a folder; returns None, or why it failed.
        report: called before the first run and after each one.

    Raises: JobError if `folder` is in use, or holds results of other jobs.
    """
    require_test_recall(combinations)
    with alone_in(folder):
        ledger = Ledger(folder, combinations)
        ledger.write()
        waiting = ledger.open_combinations()
        observer.planned(len(combinations), len(ledger.finished), len(ledger.failed()))
        report(ledger)
        for number, combination in enumerate(waiting, len(combinations) - len(waiting) + 1):
            observer.started(combination, number, len(combinations))
            _run(ledger, combination, folder, observer, launch)
            report(ledger)
    return ledger


def require_test_recall(combinations: Sequence[Combination]) -> None:
    """Raises: JobError unless every run will have R@1 on test classes."""
    for combination in combinations:
        job = combination.job
        if 1 not in job.recall_at or job.protocol.evaluate_test == "never":
            raise JobError(
                f"{job.name}: a tournament ranks R@1 on test classes. Put 1 into recall_at, and "
                'set protocol.evaluate_test = "end" or "every".'
            )


def _run(
    ledger: Ledger, combination: Combination, folder: Path, observer: Observer, launch: Launch
) -> None:
    reason = launch(combination.job, folder / combination.folder)
    if reason is None:
        try:
            observer.finished(ledger.add(combination))
            return
        except CheckpointError as error:
            reason = str(error)
    ledger.add_failure(combination, reason)
    observer.failed(combination, reason)
