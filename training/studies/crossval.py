"""Cross validation over classes: a run a fold."""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from training.config.job import Job, parse_job
from training.data.protocol import with_protocol
from training.data.records import Split
from training.folder import replace_json, replace_text, stamp
from training.report.markdown import table
from training.result import Result, finished_result
from training.runner import run_job
from training.trainer import Listener

Runner = Callable[[Job, Split, Path, Listener], Result]


@dataclass(frozen=True)
class CrossValidation:
    """The results of all folds, in order."""

    folds: tuple[Result, ...]

    def scores(self) -> dict[str, tuple[float, float]]:
        """(mean, sample standard deviation) over the folds of each test figure."""
        found = {}
        for name in self.folds[0].figures:
            values = [fold.figures[name] for fold in self.folds if name in fold.figures]
            if len(values) == len(self.folds):
                found[name] = statistics.fmean(values), statistics.stdev(values)
        return found


def cross_validate(
    job: Job,
    split: Split,
    folder: Path,
    listener: Listener,
    count: int = 10,
    seed: int = 0,
    runner: Runner = run_job,
) -> CrossValidation:
    """Train `job` once a fold; folds that are finished in `folder` are not trained again.

    Every class of `split.train` is a validation class in one fold. A fold keeps the epoch with the
    best R@1 on its validation classes and is tested once, on the test classes.

    Args:
        job: its own `protocol` gives way to this one.
        split: without validation classes.
        folder: gets `fold-00`, ... and the report.
        listener: of the folds and their epochs.
        count: number of folds.
        seed: of the folds.
        runner: trains one run.

    Raises: JobError if the job does not measure R@1; TrainingError; finished folds are kept.
    """
    content = {"job": job.as_dict(), "split_sha256": split.sha256(), "folds": count, "seed": seed}
    protocol = {
        "folds": count,
        "validation_seed": seed,
        "choose_by": "validation",
        "evaluate_test": "end",
    }
    jobs = [parse_job(job.as_dict() | {"protocol": protocol | {"fold": n}}) for n in range(count)]
    parts = [with_protocol(split, one.protocol) for one in jobs]
    stamp(folder, "crossval.json", content)
    results = []
    for number, (one, part) in enumerate(zip(jobs, parts, strict=True)):
        place = folder / f"fold-{number:02d}"
        result = finished_result(one, place)
        state = "trains" if result is None else "finished before"
        listener.said(f"fold {number + 1} of {count}: {state}")
        results.append(result or runner(one, part, place, listener))
    found = CrossValidation(tuple(results))
    _write_report(folder, job, split, found)
    return found


def _write_report(folder: Path, job: Job, split: Split, found: CrossValidation) -> None:
    """Write `report.md` and `report.json`."""
    scores, count = found.scores(), len(found.folds)
    content = {
        "job": job.as_dict(),
        "split_sha256": split.sha256(),
        "folds": [{k: v for k, v in asdict(fold).items() if k != "job"} for fold in found.folds],
        "scores": {name: {"mean": mean, "std": std} for name, (mean, std) in scores.items()},
    }
    replace_json(folder / "report.json", content)
    rows = [
        [
            str(number),
            str(fold.best_epoch),
            f"{fold.validation['R@1']:.2f}",
            *(f"{fold.figures[name]:.2f}" for name in scores),
        ]
        for number, fold in enumerate(found.folds)
    ]
    rows.append(["mean ± std", "", "", *(f"{m:.2f} ± {std:.2f}" for m, std in scores.values())])
    lines = [
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
        *table(["fold", "best epoch", "validation R@1", *scores], rows),
    ]
    replace_text(folder / "report.md", "\n".join(lines) + "\n")
