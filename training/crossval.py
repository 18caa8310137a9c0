"""Cross validation over classes: train once a fold, choose on validation, test, average."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.config.job import Job, parse_job
from training.data.records import Split
from training.files import replace_json, replace_text
from training.protocols import with_protocol
from training.result import Result, finished_result
from training.runner import run_job
from training.stamp import stamp
from training.trainer import Listener

Runner = Callable[[Job, Split, Path, Listener], Result]
FoldStarted = Callable[[int, int, bool], None]


@dataclass(frozen=True)
class CrossValidation:
    """The results of all folds, in order."""

    folds: tuple[Result, ...]

    def scores(self) -> dict[str, tuple[float, float]]:
        """(mean, sample standard deviation) over the folds of each test figure."""
        names = [n for n in self.folds[0].figures if all(n in f.figures for f in self.folds)]
        columns = {name: [fold.figures[name] for fold in self.folds] for name in names}
        return {
            name: (statistics.fmean(column), statistics.stdev(column))
            for name, column in columns.items()
        }


def cross_validate(
    job: Job,
    split: Split,
    folder: Path,
    listener: Listener,
    count: int = 10,
    seed: int = 0,
    runner: Runner = run_job,
    on_fold: FoldStarted = lambda *_: None,
) -> CrossValidation:
    """Train `job` once a fold; folds that are finished in `folder` are not trained again.

    Every class of `split.train` is a validation class in one fold. A fold keeps the epoch with the
    best R@1 on its validation classes and is tested once, on the test classes.

    Args:
        job: its own `protocol` gives way to this one.
        split: without validation classes.
        folder: gets `fold-00`, ... and the report.
        listener: of the epochs.
        count: number of folds.
        seed: of the folds.
        runner: trains one run.
        on_fold: told the number of a fold, `count`, and whether it was finished before.

    Raises: TrainingError; finished folds are kept.
    """
    content = {"job": job.as_dict(), "split_sha256": split.sha256(), "folds": count, "seed": seed}
    jobs = [fold_job(job, number, count, seed) for number in range(count)]
    parts = [with_protocol(split, one.protocol) for one in jobs]
    stamp(folder, "crossval.json", content)
    results = []
    for number, (one, part) in enumerate(zip(jobs, parts, strict=True)):
        place = folder / f"fold-{number:02d}"
        finished = finished_result(one, place)
        on_fold(number, count, finished is not None)
        results.append(finished or runner(one, part, place, listener))
    found = CrossValidation(tuple(results))
    write_report(folder, job, split, found)
    return found


def fold_job(job: Job, number: int, count: int, seed: int) -> Job:
    """`job` under the protocol of a fold. Raises: JobError if it does not measure R@1."""
    protocol = {
        "folds": count,
        "fold": number,
        "validation_seed": seed,
        "choose_by": "validation",
        "evaluate_test": "end",
    }
    return parse_job(job.as_dict() | {"protocol": protocol})


def write_report(folder: Path, job: Job, split: Split, found: CrossValidation) -> None:
    """Write `report.md` and `report.json`."""
    scores = found.scores()
    content: dict[str, Any] = {
        "job": job.as_dict(),
        "split_sha256": split.sha256(),
        "folds": [{k: v for k, v in asdict(fold).items() if k != "job"} for fold in found.folds],
        "scores": {name: {"mean": mean, "std": std} for name, (mean, std) in scores.items()},
    }
    replace_json(folder / "report.json", content)
    replace_text(folder / "report.md", "\n".join(_page(job, split, found, scores)) + "\n")


def _page(
    job: Job, split: Split, found: CrossValidation, scores: dict[str, tuple[float, float]]
) -> list[str]:
    count, names = len(found.folds), list(scores)
    header = ["fold", "best epoch", "validation R@1", *names]
    rows = [_row(number, fold, names) for number, fold in enumerate(found.folds)]
    means = ["mean ± std", "", "", *(f"{mean:.2f} ± {std:.2f}" for mean, std in scores.values())]
    return [
        f"# {job.name}: {count}-fold cross validation over classes",
        "",
        f"- train: {len(split.train):,} images of {split.train.classes:,} classes, "
        f"1/{count} of them held out in each fold; every class was held out once",
        f"- test: {len(split.test):,} images of {split.test.classes:,} other classes",
        f"- split sha256: `{split.sha256()[:16]}`",
        "- each fold keeps the epoch with the best R@1 on its validation classes; "
        "no epoch was chosen by test recall",
        f"- ± is the sample standard deviation over the {count} folds",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in [*rows, means]),
    ]


def _row(number: int, fold: Result, names: Sequence[str]) -> list[str]:
    figures = (f"{fold.figures[name]:.2f}" for name in names)
    validation = fold.validation.get("R@1")
    shown = "" if validation is None else f"{validation:.2f}"
    return [str(number), str(fold.best_epoch), shown, *figures]
