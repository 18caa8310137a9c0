"""Messages about a run in plain words, for the console and the report."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from kinlens.golden import with_interval
from kinlens.training.checkpoint import Epoch, Figures, Row
from kinlens.training.config.job import Job
from kinlens.training.data.records import Split
from kinlens.training.evaluation.retrieval import GAIN, queries_in
from kinlens.training.folder import UNTRAINED, Result
from kinlens.training.regularizers.shares import LEAST

CHOSEN_BY = {
    "last": "the model of a run is its last epoch; no epoch was chosen by its test recall",
    "alpha": "the model of a run is a point between its start and its last epoch; test classes "
    "chose nothing",
    "folds": "the model of a run is a point between its start and its last epoch, or the trunk "
    "itself; test classes chose nothing",  # of versions 0.1 and 0.2
    "validation": "the model of a run is the epoch with the best R@1 on validation classes; test "
    "classes chose nothing",
    "test": "**CHOSEN BY TEST**: the model of a run is the epoch with the best R@1 on the test "
    "classes themselves. The figures are too high and not comparable with unbiased ones",
}
MAY_HAVE_SEEN = (
    "The bundle {} was trained on some of these test classes, or does not say on which it was "
    "trained, so the figures of both models may be too high."
)
_FEW_STEPS = 100
_WEIGHTS = {"determinant": "lambda1 and lambda2"}


def before(job: Job, steps_per_epoch: int) -> list[str]:
    steps = job.optimizer.epochs * steps_per_epoch
    few = (
        f"This run has {steps} steps ({job.optimizer.epochs} epochs of {steps_per_epoch}): too few "
        f"to learn much, and enough to harm a good start. Set optimizer.min_steps to "
        f"{_FEW_STEPS} or more: the epochs are then raised to fit."
    )
    return [few] if steps < _FEW_STEPS else []


def after_epoch(job: Job, history: Sequence[Epoch]) -> list[str]:
    """Messages from the figures of the last epoch that earlier epochs did not cause."""
    *earlier, last = history
    notes = []
    for name, settings in job.regularizers.wanted().items():
        if any(_faint(job, name, before) for before in earlier) or not _faint(job, name, last):
            continue
        share = "" if settings.share else f"set regularizers.{name}.share = 0.2, or "
        cure = f"{share}raise {_WEIGHTS.get(name, 'weight')}"
        percent = 100 * last.shares[name]
        notes.append(
            f"epoch {last.epoch}: the gradient of regularizers.{name} is {percent:.2g} % of "
            f"the gradient of the loss, so it has almost no effect. {cure[0].upper()}{cure[1:]}."
        )
    return notes


def _faint(job: Job, name: str, epoch: Epoch) -> bool:
    """Whether a regularizer had almost no effect, once its flow is fitted and its share begun."""
    settings = job.regularizers.wanted()[name]
    waits = getattr(settings, "fit_epochs", 0) + (settings.share is not None)
    return epoch.epoch > waits and epoch.shares.get(name, LEAST) < LEAST


def did_it_help(split: Split, result: Result) -> list[str]:
    """The model of a run compared with the model it began with, on the same held-out images."""
    notes = [result.choice] if result.choice else []
    for part, (model, began, found) in _held_out(result).items():
        images = getattr(split, part)
        if images is None:
            continue
        queries = queries_in(images, split.gallery if part == "test" else None)
        paired = ""
        if GAIN[0] in found:
            low, high = (found[name] for name in GAIN)
            paired = f", 95 % interval {low:+.1f} to {high:+.1f}"
        notes.append(
            f"{part} classes: R@1 {with_interval(model, queries)}; {result.began_with} "
            f"{with_interval(began, queries)} ({model - began:+.1f} points{paired})"
        )
    return [*notes, result.verdict] if result.verdict else notes


def verdict_of(result: Result, run: Path) -> str:
    """Whether a training in the folder `run` helped; a gain whose interval includes 0 is not
    proven.
    """
    parts: dict[str, list[str]] = {"worse": [], "no gain": [], "gain": []}
    chance = ""
    for part, (model, began, found) in _held_out(result).items():
        low, high = (found.get(name, model - began) for name in GAIN)
        chance = " beyond chance" if found.keys() >= {*GAIN} else ""
        parts["worse" if high < 0 else "gain" if low > 0 else "no gain"].append(part)
    cure = "keep the bundle that it continued"
    if result.began_with == UNTRAINED:
        command = shlex.join(["kinlens-train", "export", str(run), "--trunk", "--out", "BUNDLE"])
        cure = f"export the trunk itself with `{command}`"
    for kind, verdict, advice in (
        ("worse", "Worse: the model is worse than", f" Train on more classes, or {cure}."),
        (
            "no gain",
            "No gain proven: the model is not better than",
            f" More classes would tell more. To take no risk, {cure}.",
        ),
        ("gain", "Gain: the model is better than", ""),
    ):
        if parts[kind]:
            classes = f"on the {' and the '.join(parts[kind])} classes"
            return f"{verdict} {result.began_with}{chance} {classes}.{advice}"
    return ""


def _held_out(result: Result) -> dict[str, tuple[float, float, Row]]:
    began = Figures.of(result.trunk)
    found = {
        "validation": (result.validation, began.validation),
        "test": (result.figures, began.test),
    }
    return {
        part: (figures["R@1"], before["R@1"], figures)
        for part, (figures, before) in found.items()
        if "R@1" in figures and "R@1" in before
    }
