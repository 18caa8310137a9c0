"""Messages about a run in plain words, for the console and the report."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from kinlens.training.config.job import Job
from kinlens.training.data.records import Split
from kinlens.training.evaluation.retrieval import GAIN, queries_in, with_interval
from kinlens.training.folder import UNTRAINED, Result
from kinlens.training.regularizers.shares import LEAST, WIDEST
from kinlens.training.state import VALIDATION, Row

CHOSEN_BY = {
    "last": "the model of a run is its last epoch; no epoch was chosen by its test recall",
    "folds": "the model of a run is a point between its start and its last epoch, or the trunk "
    "itself; test classes chose nothing",
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


def after_epoch(job: Job, history: Sequence[Row]) -> list[str]:
    """Messages from the figures of the last epoch that earlier epochs did not cause."""
    *earlier, row = history
    notes = []
    for name, settings in job.regularizers.wanted().items():
        if any(_faint(job, name, before) for before in earlier):
            continue
        if _faint(job, name, row):
            cure = f"regularizers.{name}.share = 0.2, or raise {_WEIGHTS.get(name, 'weight')}"
            if settings.share is not None:
                cure = "a larger share"
            notes.append(
                f"epoch {row['epoch']:.0f}: the gradient of regularizers.{name} is "
                f"{100 * row[f'share {name}']:.2g} % of the gradient of the loss, so it has almost "
                f"no effect. Set {cure}."
            )
            continue
        if _is_in_its_flow(name, row) and not any(_is_in_its_flow(name, r) for r in earlier):
            notes.append(
                f"epoch {row['epoch']:.0f}: regularizers.{name} changes flow 1, but hardly the "
                f"layers before it: its gradient at the features is "
                f"{100 * row[f'reach {name}']:.2g} % of the gradient of the loss."
            )
        ended = f"calibrates {name}" not in row
        was_ended = any(f"calibrates {name}" not in before for before in earlier)
        if ended and not was_ended and _at_a_bound(row.get(f"scale {name}", 1.0)):
            notes.append(
                f"regularizers.{name}: its weight ended at the bound of its calibration, "
                f"{row[f'scale {name}']:g} times the given weight, with "
                f"{100 * row[f'share {name}']:.2g} % of the gradient. Set another initial "
                f"{_WEIGHTS.get(name, 'weight')}."
            )
    return notes


def _at_a_bound(scale: float) -> bool:
    return min(abs(scale - WIDEST), abs(scale * WIDEST - 1) * WIDEST) < 1e-6 * WIDEST


def _faint(job: Job, name: str, row: Row) -> bool:
    """Whether a regularizer had almost no effect in an epoch after the epochs that fit its flow."""
    fitted = getattr(job.regularizers.wanted()[name], "fit_epochs", 0)
    is_final = f"calibrates {name}" not in row
    return is_final and row["epoch"] > fitted and row.get(f"share {name}", LEAST) < LEAST


def _is_in_its_flow(name: str, row: Row) -> bool:
    """Whether hardly any of its gradient passes the flow, as is normal in the first epoch."""
    is_final = row["epoch"] > 1 and f"calibrates {name}" not in row
    return is_final and row.get(f"reach {name}", LEAST) < LEAST


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
    found = {"validation": (VALIDATION, result.validation), "test": ("", result.figures)}
    return {
        part: (figures["R@1"], result.trunk[f"{prefix}R@1"], figures)
        for part, (prefix, figures) in found.items()
        if "R@1" in figures and f"{prefix}R@1" in result.trunk
    }
