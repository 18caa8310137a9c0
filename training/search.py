"""Hyper-parameter search on validation classes; the test images are not even handed to a trial.

The sampler is a tree-structured Parzen estimator.

References:
    Psomas, Metric Learning: A Deep Dive (2020), part 5, "Fixed Validation".
    Bergstra et al., Algorithms for Hyper-Parameter Optimization, NeurIPS 2011,
    https://papers.nips.cc/paper/4443-algorithms-for-hyper-parameter-optimization
"""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embedder.errors import JobError, TrainingError
from training.config.job import Job, parse_job
from training.config.space import Scalar, Setting, values_to_try
from training.config.toml import job_toml
from training.crossval import Runner
from training.data.records import Split
from training.files import replace_json, replace_text
from training.protocols import hold_out, without_test
from training.result import Result
from training.runner import run_job
from training.stamp import stamp
from training.study import Study, Trial
from training.trainer import Listener

_FAILURES_IN_A_ROW = 5
_FIXED = ("name", "seed", "recall_at", "data.", "protocol.", "runtime.")
TrialStarted = Callable[[int, int, Mapping[str, Scalar]], None]


@dataclass(frozen=True)
class Plan:
    """What is searched: `trials` in all, each with `fraction` of the train classes as validation.

    `trial_epochs` shortens the trials; the best job keeps the epochs of its file. `seed` is that
    of the search, `protocol.validation_seed` of the job that of the validation classes.
    """

    space: Mapping[str, Setting]
    trials: int = 50
    fraction: float = 0.1
    seed: int = 0
    trial_epochs: int | None = None


def search(
    job: Job,
    split: Split,
    plan: Plan,
    folder: Path,
    listener: Listener,
    runner: Runner = run_job,
    on_trial: TrialStarted = lambda *_: None,
) -> Trial:
    """Find the settings of `job` with the best R@1 on validation classes; returns the best trial.

    A trial that fails is kept with its reason and counts; one that was interrupted is taken up
    again. After every trial `report.md`, `trials.json` and `best.toml`, the job with the best
    settings, are written into `folder`. Train `best.toml` to get test figures.

    Args:
        job: what stays the same.
        split: without validation classes.
        plan: the space and how to search it.
        folder: gets the study, `trial-000`, ..., and the results.
        listener: of the epochs.
        runner: trains one run.
        on_trial: told the number of a trial, how many there will be, and its values.

    Raises: JobError, DatasetError; TrainingError if five trials in a row fail, or all.
    """
    check_space(job, plan)
    part = without_test(hold_out(split, plan.fraction, job.protocol.validation_seed))
    stamp(folder, "search.json", _identity(job, split, plan))
    with Study(folder, plan.space, plan.seed) as study:

        def train(trial: Trial) -> Result:
            return runner(trial_job(job, plan, trial.values), part, study.place(trial), listener)

        for trial in study.until(plan.trials):
            on_trial(trial.number, plan.trials, trial.values)
            _run(study, trial, train)
            _report(folder, job, plan, study.trials())
            _require_hope(study.trials())
        trials = study.trials()
    _report(folder, job, plan, trials)
    return _best(trials)


def best_job(job: Job, plan: Plan, values: Mapping[str, Scalar]) -> Job:
    """`job` with `values`, chosen on the validation classes and tested once, at its end."""
    content = job.as_dict()
    for name, value in values.items():
        table, key = _table_of(content, name)
        table[key] = value
    content["protocol"] |= {
        "validation_fraction": plan.fraction,
        "choose_by": "validation",
        "evaluate_test": "end",
    }
    return parse_job(content, origin=f"the job with {dict(values)}")


def trial_job(job: Job, plan: Plan, values: Mapping[str, Scalar]) -> Job:
    """What a trial trains: never tested, and shorter if the plan says so."""
    content = best_job(job, plan, values).as_dict()
    content["protocol"]["evaluate_test"] = "never"
    if plan.trial_epochs is not None:
        content["optimizer"]["epochs"] = plan.trial_epochs
    return parse_job(content)


def check_space(job: Job, plan: Plan) -> None:
    """Raises: JobError for a setting that the job lacks, or a value that it refuses."""
    if 1 not in job.recall_at:
        raise JobError(f"recall_at = {list(job.recall_at)} lacks 1; the search maximizes R@1.")
    if plan.trials < 1:
        raise JobError(f"trials = {plan.trials} must be at least 1.")
    if not 0 < plan.fraction < 1:
        raise JobError(f"The validation fraction {plan.fraction} must lie between 0 and 1.")
    for name, setting in plan.space.items():
        if name.startswith(_FIXED):
            raise JobError(
                f"{name} cannot be searched: it does not change what is learnt, or trials would be "
                "compared on other classes. Take it out of the space."
            )
        if name == "optimizer.epochs" and plan.trial_epochs is not None:
            raise JobError("optimizer.epochs is searched; do not give the epochs of a trial too.")
        for value in values_to_try(setting):
            trial_job(job, plan, {name: value})


def _table_of(content: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """The table that holds the setting `name`, and its key there."""
    *tables, key = name.split(".")
    for table in tables:
        inner = content.get(table)
        if not isinstance(inner, dict):
            raise JobError(f"{name}: the job has no table {table!r}. Add it to the job file first.")
        content = inner
    return content, key


def _identity(job: Job, split: Split, plan: Plan) -> dict[str, Any]:
    """What must be the same when a search goes on; the number of trials may grow."""
    return {
        "job": job.as_dict(),
        "split_sha256": split.sha256(),
        "space": {name: setting.model_dump(mode="json") for name, setting in plan.space.items()},
        "fraction": plan.fraction,
        "seed": plan.seed,
        "trial_epochs": plan.trial_epochs,
    }


def _run(study: Study, trial: Trial, train: Callable[[Trial], Result]) -> None:
    place = study.place(trial)
    try:
        result = train(trial)
        study.succeeded(trial, result.validation["R@1"], result.best_epoch)
    except Exception as error:  # whatever it is, it ends one trial, not the search
        place.mkdir(parents=True, exist_ok=True)
        replace_text(place / "failure.txt", traceback.format_exc())
        study.failed(trial, f"{type(error).__name__}: {error}")
    for checkpoint in place.glob("*.pt"):
        checkpoint.unlink()  # a trial is only worth its score; fifty checkpoints fill a disk


def _require_hope(trials: list[Trial]) -> None:
    last = [trial for trial in trials if trial.state != "running"][-_FAILURES_IN_A_ROW:]
    if len(last) == _FAILURES_IN_A_ROW and all(trial.state == "failed" for trial in last):
        raise TrainingError(
            f"The last {_FAILURES_IN_A_ROW} trials failed, the last one with: {last[-1].reason} "
            "Its failure.txt holds the traceback. Call again to go on with new trials."
        )


def _best(trials: list[Trial]) -> Trial:
    complete = [trial for trial in trials if trial.score is not None]
    if not complete:
        reason = trials[-1].reason if trials else "none was run"
        raise TrainingError(f"All {len(trials)} trials failed, the last one with: {reason}")
    return max(complete, key=lambda trial: trial.score or 0.0)


def _report(folder: Path, job: Job, plan: Plan, trials: list[Trial]) -> None:
    replace_json(folder / "trials.json", [asdict(trial) for trial in trials])
    if any(trial.score is not None for trial in trials):
        best = _best(trials)
        comments = (
            f"Best of {len(trials)} trials: trial {best.number}, R@1 {best.score:.2f} on "
            f"validation classes ({plan.fraction:.0%} of the train classes).",
            "Test figures: kinlens-train fit best.toml --out runs/best",
        )
        text = job_toml(best_job(job, plan, best.values), *comments)
        replace_text(folder / "best.toml", text)
    replace_text(folder / "report.md", "\n".join(_page(job, plan, trials)) + "\n")


def _page(job: Job, plan: Plan, trials: list[Trial]) -> list[str]:
    header = ["trial", "validation R@1", "best epoch", *plan.space, "state"]
    order = sorted(trials, key=lambda t: (t.score is None, -(t.score or 0.0), t.number))
    return [
        f"# {job.name}: search of {', '.join(plan.space)}",
        "",
        f"- {len(trials)} of {plan.trials} trials, seed {plan.seed}",
        f"- score: best R@1 on validation classes, {plan.fraction:.0%} of the train classes, "
        f"seed {job.protocol.validation_seed}",
        "- no trial saw a test class",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *(_row(trial, plan) for trial in order),
    ]


def _row(trial: Trial, plan: Plan) -> str:
    values = [trial.values.get(name, "") for name in plan.space]
    shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
    score = "" if trial.score is None else f"{trial.score:.2f}"
    epoch = "" if trial.best_epoch is None else str(trial.best_epoch)
    reason = " ".join(trial.reason.split()).replace("|", "\\|")
    state = f"{trial.state}: {reason}" if reason else trial.state
    return "| " + " | ".join([str(trial.number), score, epoch, *shown, state]) + " |"
