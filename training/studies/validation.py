"""Studies on validation classes: a cross validation, and a search for settings.

The trials of a search never get the test images. Optuna proposes values with a tree-structured
Parzen estimator; a grid has every combination of the steps, in an order drawn by the seed. The
outcomes are in `trials.json`, since Optuna's own journal cannot be read again after a full disk has
truncated a line.

References:
    Psomas, Metric Learning: A Deep Dive (2020), part 5, "Fixed Validation"; the ranges and steps of
    its grids are in `training/jobs/spaces`.
    Bergstra et al., Algorithms for Hyper-Parameter Optimization, NeurIPS 2011,
    https://papers.nips.cc/paper/4443-algorithms-for-hyper-parameter-optimization
"""

import json
import math
import statistics
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from kinlens.embedder.errors import JobError, TrainingError
from kinlens.training.config.job import Job, job_toml, parse_job
from kinlens.training.config.layers import read_file
from kinlens.training.data.records import Split, folds, hold_out, without_test
from kinlens.training.folder import Result, finished_result, replace_json, replace_text, stamp
from kinlens.training.report.log import Callback
from kinlens.training.report.notices import CHOSEN_BY
from kinlens.training.report.page import plain, table
from kinlens.training.runner import run_job

Runner = Callable[[Job, Split, Path, Callback], Result]
Space = Mapping[str, Mapping[str, Any]]
"""The range or the values of each setting, by its dotted name, as in the file."""

_TRIALS = "trials.json"
_FAILURES_IN_A_ROW = 5
_DECIMALS = 12
_FIXED = ("name", "seed", "recall_at", "data.", "protocol.", "runtime.")


def cross_validate(
    job: Job,
    split: Split,
    folder: Path,
    listener: Callback,
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
    _report_folds(folder, job, split, found)
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
    values = {
        name: [one.figures[name] for one in results]
        for name in results[0].figures
        if all(name in one.figures for one in results)
    }
    return {
        name: {"mean": statistics.fmean(of), "std": statistics.stdev(of)}
        for name, of in values.items()
    }


def _report_folds(folder: Path, job: Job, split: Split, results: list[Result]) -> None:
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


@dataclass(frozen=True)
class Plan:
    """The search: `trials` in total, each with `fraction` of the train classes for validation.

    `trial_epochs` shortens the trials; the best job keeps the epochs of its file. A `grid` ends
    with its last point.
    """

    space: Space
    trials: int = 50
    fraction: float = 0.1
    seed: int = 0
    trial_epochs: int | None = None
    sampler: Literal["tpe", "grid"] = "tpe"


@dataclass(frozen=True)
class Trial:
    number: int
    values: dict[str, Any]
    score: float | None = None
    best_epoch: int | None = None
    reason: str = ""


def load_space(path: Path) -> Space:
    """`table.key = {low = 1e-5, high = 1e-3, log = true}` or `{values = [...]}`, as TOML."""
    content = read_file(path)
    space = parse_space(content.get("space", content))
    if not space:
        raise JobError(f"{path} has no setting to search. Add one, such as optimizer.lr_head.")
    return space


def job_for(job: str, path: Path) -> str | dict[str, Any]:
    """The source of a job for `load_job`: the table [job] of a space is laid over it."""
    content = read_file(path)
    return {"base": job, **content["job"]} if "job" in content else job


def parse_space(content: Mapping[str, Any], prefix: str = "") -> Space:
    space: dict[str, Mapping[str, Any]] = {}
    for key, value in content.items():
        name = prefix + key
        if not isinstance(value, dict) or not value:
            raise JobError(
                f"{name} = {value!r}: give a range, {{low = 0.1, high = 0.5}}, or a list, "
                "{values = [0.1, 0.2]}."
            )
        if any(not isinstance(value.get(word, {}), dict) for word in ("low", "high", "values")):
            _distribution(name, value)
            space[name] = value
        else:
            space |= parse_space(value, f"{name}.")
    return space


def search(
    job: Job, split: Split, plan: Plan, folder: Path, listener: Callback, runner: Runner = run_job
) -> Trial:
    """Find the settings of `job` with the best R@1 on validation classes; returns the best trial.

    A failed trial is stored with its reason and counts. Trial n depends on the seed, n and the
    trials before it, so stopping changes nothing. `best.toml` is the job with the best settings.

    Raises: JobError, DatasetError; TrainingError if five trials in a row fail, or all.
    """
    _check_space(job, plan)
    part = without_test(hold_out(split, plan.fraction, job.protocol.validation_seed))
    identity = {"split_sha256": split.learnt_sha256(), **asdict(plan)}
    del identity["trials"]  # their number may be raised later
    if plan.sampler == "grid":
        plan = replace(plan, trials=min(plan.trials, math.prod(map(len, _axes(plan).values()))))
    else:
        del identity["sampler"]  # searches of older versions have none
    stamp(folder, "search.json", identity, job)
    trials = []
    if (folder / _TRIALS).exists():
        known = json.loads((folder / _TRIALS).read_text(encoding="utf-8"))
        trials = [Trial(**trial) for trial in known]
    for number in range(len(trials), plan.trials):
        values = _draw(plan, trials)
        shown = "  ".join(f"{name} = {value}" for name, value in values.items())
        listener.note(f"trial {number + 1} of {plan.trials}: {shown}")
        run_folder = folder / f"trial-{number:03d}"
        try:
            result = runner(trial_job(job, plan, values), part, run_folder, listener)
            trials.append(Trial(number, values, result.validation["R@1"], result.best_epoch))
        except Exception as error:  # any error ends the trial, not the search
            replace_text(run_folder / "failure.txt", traceback.format_exc())
            trials.append(Trial(number, values, reason=f"{type(error).__name__}: {error}"))
        for checkpoint in run_folder.glob("*.pt"):
            checkpoint.unlink()  # only the score is needed, and fifty checkpoints fill a disk
        _report_trials(folder, job, plan, trials)
        if [one.score for one in trials[-_FAILURES_IN_A_ROW:]] == [None] * _FAILURES_IN_A_ROW:
            break
    else:
        best = _report_trials(folder, job, plan, trials)
        if best.score is not None:
            return best
    raise TrainingError(
        f"The last {min(len(trials), _FAILURES_IN_A_ROW)} trials failed, the last one with: "
        f"{trials[-1].reason} Its failure.txt has the traceback. Call again to continue with new "
        "trials."
    )


def trial_job(job: Job, plan: Plan, values: Mapping[str, Any], final: bool = False) -> Job:
    """`job` with `values`; only the `final` one is tested. Raises: JobError."""
    content = on_validation(
        job,
        validation_fraction=plan.fraction,
        validation_seed=job.protocol.validation_seed,
        evaluate_test="end" if final else "never",
    )
    if plan.trial_epochs is not None and not final:
        content["optimizer"]["epochs"] = plan.trial_epochs
    for name, value in values.items():
        *tables, key = name.split(".")
        inner: Any = content
        for one in tables:
            inner = inner.get(one)
            if not isinstance(inner, dict):
                raise JobError(f"{name}: the job has no table {one!r}. Add it to its file first.")
        inner[key] = value
    return parse_job(content, origin=f"the job with {dict(values)}")


def _check_space(job: Job, plan: Plan) -> None:
    for name, words in plan.space.items():
        if name.startswith(_FIXED):
            raise JobError(
                f"{name} cannot be searched: it does not change the training, or it would change "
                "the classes that trials are compared on. Remove it from the space."
            )
        for value in words.get("values") or (words["low"], words["high"]):
            trial_job(job, plan, {name: value})


def _draw(plan: Plan, trials: list[Trial]) -> dict[str, Any]:
    if plan.sampler == "grid":
        axes = _axes(plan)
        shape = tuple(map(len, axes.values()))
        order = np.random.default_rng(plan.seed).permutation(math.prod(shape))
        point = np.unravel_index(order[len(trials)], shape)
        return {name: axis[n] for (name, axis), n in zip(axes.items(), point, strict=True)}
    optuna = _optuna()
    seed = np.random.SeedSequence((plan.seed, len(trials))).generate_state(1)[0]
    sampler = optuna.samplers.TPESampler(seed=int(seed))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions = {name: _distribution(name, words) for name, words in plan.space.items()}
    for trial in trials:
        if trial.score is not None:
            past = {"params": trial.values, "value": trial.score, "distributions": distributions}
            study.add_trial(optuna.trial.create_trial(**past))
    values: dict[str, Any] = study.ask(distributions).params
    return values


def _axes(plan: Plan) -> dict[str, Sequence[Any]]:
    """The values of each setting on a grid. Raises: JobError for a range without a step."""
    axes: dict[str, Sequence[Any]] = {}
    for name, words in plan.space.items():
        if "values" in words:
            axes[name] = words["values"]
            continue
        low, high, step = words["low"], words["high"], words.get("step")
        if step is None or words.get("log"):
            raise JobError(
                f"{name} = {dict(words)} has no steps, which a grid needs. Add a step, give "
                "{values = [...]}, or use the sampler tpe."
            )
        count = round((high - low) / step) + 1
        axes[name] = [round(low + n * step, _DECIMALS) for n in range(count)]
    return axes


def _optuna() -> ModuleType:
    try:
        import optuna
    except ImportError as error:
        raise JobError(
            "A search needs Optuna. Install it: pip install 'kinlens[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(name: str, given: Mapping[str, Any]) -> Any:
    kinds = _optuna().distributions
    words = {"choices" if word == "values" else word: value for word, value in given.items()}
    kind = kinds.FloatDistribution
    if "choices" in words:
        kind = kinds.CategoricalDistribution
    elif not any(isinstance(words.get(word), float) for word in ("low", "high", "step")):
        kind = kinds.IntDistribution
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return kind(**words)
    except (TypeError, ValueError, Warning) as error:
        raise JobError(f"{name} = {dict(given)}: {error}") from error


def _report_trials(folder: Path, job: Job, plan: Plan, trials: list[Trial]) -> Trial:
    order = sorted(trials, key=lambda t: (t.score is None, -(t.score or 0.0)))
    of = f"{plan.fraction:.0%} of the train classes"
    lines = [
        f"# {job.name}: search of {', '.join(plan.space)}",
        "",
        f"- {len(trials)} of {plan.trials} trials, sampler {plan.sampler}, seed {plan.seed}",
        f"- score: best R@1 on validation classes, {of}, seed {job.protocol.validation_seed}",
        "- no trial saw a test class",
        "",
        *table(
            ["trial", "validation R@1", "best epoch", *plan.space],
            [_row(trial, plan) for trial in order],
        ),
    ]
    replace_text(folder / "report.md", "\n".join(lines) + "\n")
    replace_json(folder / _TRIALS, [asdict(trial) for trial in trials])
    best = order[0]
    if best.score is not None:
        comments = (
            f"Best of {len(trials)} trials: trial {best.number}, R@1 {best.score:.2f} on "
            f"validation classes ({of}).",
            "Test figures: kinlens-train fit best.toml --out runs/best",
        )
        text = job_toml(trial_job(job, plan, best.values, final=True), *comments)
        replace_text(folder / "best.toml", text)
    return best


def _row(trial: Trial, plan: Plan) -> list[str]:
    values = [trial.values[name] for name in plan.space]
    score = f"{trial.score:.2f}" if trial.score is not None else f"failed: {plain(trial.reason)}"
    shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
    return [str(trial.number), score, str(trial.best_epoch or ""), *shown]
