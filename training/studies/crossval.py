"""Class-wise cross validation: one run per fold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from kinlens.training.config.job import Job, parse_job
from kinlens.training.data.records import Split, folds
from kinlens.training.folder import Result, finished_result, replace_text, stamp
from kinlens.training.report.notices import CHOSEN_BY
from kinlens.training.report.tables import table
from kinlens.training.runner import run_job
from kinlens.training.trainer import Listener

Runner = Callable[[Job, Split, Path, Listener], Result]


def cross_validate(
    job: Job,
    split: Split,
    folder: Path,
    listener: Listener,
    count: int = 10,
    seed: int = 0,
    runner: Runner = run_job,
) -> list[Result]:
    """Train `job` once per fold; finished folds in `folder` are not trained again.

    A fold keeps the epoch with the best R@1 on its validation classes and is tested once. The job's
    own `protocol` is replaced; `seed` seeds the folds, `runner` trains one run.

    Raises: JobError if the job does not measure R@1; TrainingError; finished folds are kept.
    """
    protocol = {"folds": count, "validation_seed": seed, "evaluate_test": "end"}
    jobs = [parse_job(on_validation(job, fold=n, **protocol)) for n in range(count)]
    parts = folds(split, count, seed)
    identity = {"split_sha256": split.learnt_sha256(), "folds": count, "seed": seed}
    stamp(folder, "crossval.json", identity, job)
    found = []
    for number, (one, part) in enumerate(zip(jobs, parts, strict=True)):
        run_folder = folder / f"fold-{number:02d}"
        result = finished_result(one, run_folder)
        state = "training" if result is None else "already finished"
        listener.note(f"fold {number + 1} of {count}: {state}")
        found.append(result or runner(one, part, run_folder, listener))
    _write_report(folder, job, split, found)
    return found


def on_validation(job: Job, **protocol: Any) -> dict[str, Any]:
    """`job` as plain data, with a protocol that keeps the epoch of the best validation R@1."""
    content = job.as_dict()
    content["protocol"] = {"choose_by": "validation", **protocol}
    # The recommended jobs evaluate only the last epoch.
    content["runtime"]["eval_every_epochs"] = content["runtime"]["eval_every_epochs"] or 1
    return content


def scores(results: list[Result]) -> dict[str, dict[str, float]]:
    """ "mean" and "std", the sample standard deviation, over the folds of each test figure."""
    figures = pd.DataFrame([one.figures for one in results]).dropna(axis="columns")
    found: dict[str, dict[str, float]] = figures.agg(["mean", "std"]).to_dict()
    return found


def _write_report(folder: Path, job: Job, split: Split, results: list[Result]) -> None:
    over_folds, count = scores(results), len(results)
    rows = []
    for number, one in enumerate(results):
        figures = [one.validation["R@1"], *(one.figures[name] for name in over_folds)]
        rows.append([str(number), str(one.best_epoch), *(f"{figure:.2f}" for figure in figures)])
    means = (f"{score['mean']:.2f} ± {score['std']:.2f}" for score in over_folds.values())
    rows.append(["mean ± std", "", "", *means])
    lines = [
        f"# {job.name}: {count}-fold cross validation over classes",
        "",
        f"- train: {len(split.train):,} images of {split.train.classes:,} classes, "
        f"1/{count} of them held out in each fold; every class was held out once",
        f"- test: {len(split.test):,} images of {split.test.classes:,} other classes",
        f"- split sha256: `{split.sha256()[:16]}`",
        f"- {CHOSEN_BY['validation']}",
        f"- ± is the sample standard deviation over the {count} folds",
        "",
        *table(["fold", "best epoch", "validation R@1", *over_folds], rows),
    ]
    replace_text(folder / "report.md", "\n".join(lines) + "\n")
