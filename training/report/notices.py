"""What a person should be told about a run, in plain words: for the console and the report."""

from collections.abc import Sequence

from kinlens.training.config.job import Job
from kinlens.training.data.records import Split
from kinlens.training.evaluation.retrieval import GAIN, queries_in, with_interval
from kinlens.training.folder import UNTRAINED, Result
from kinlens.training.regularizers.shares import LEAST, WIDEST
from kinlens.training.state import VALIDATION, Row

CHOSEN_BY = {
    "last": "the model of a run is that of its last epoch; no epoch was chosen by its test recall",
    "folds": "the model of a run is a point between its start and its last epoch, or the trunk "
    "itself, chosen on folds of the train classes; test classes chose nothing",
    "validation": "the model of a run is that of the epoch with the best R@1 on validation "
    "classes; test classes chose nothing",
    "test": "**CHOSEN BY TEST**: the model of a run is that of the epoch with the best R@1 on the "
    "test classes themselves. The figures are too high and compare with no honest ones",
}
_FEW_STEPS = 100
_WEIGHTS = {"determinant": "lambda1 and lambda2"}


def before(job: Job, steps_per_epoch: int) -> list[str]:
    """What can be said before the first step."""
    steps = job.optimizer.epochs * steps_per_epoch
    if steps >= _FEW_STEPS:
        return []
    return [
        f"This run has {steps} steps ({job.optimizer.epochs} epochs of {steps_per_epoch}): too few "
        f"to learn much, and enough to harm a good start. Set optimizer.min_steps to "
        f"{_FEW_STEPS} or more: the epochs are then raised to fit."
    ]


def after_epoch(job: Job, history: Sequence[Row]) -> list[str]:
    """What the figures of the last of these epochs say that those before it did not."""
    *earlier, row = history
    said = []
    for name, settings in job.regularizers:
        if settings is None or any(_faint(job, name, before) for before in earlier):
            continue
        if _faint(job, name, row):
            cure = f"regularizers.{name}.share = 0.2, or raise {_WEIGHTS.get(name, 'weight')}"
            if settings.share is not None:
                cure = "a larger share, or other settings of it: its gradient vanishes"
            said.append(
                f"epoch {row['epoch']:.0f}: regularizers.{name} makes "
                f"{100 * row[f'share {name}']:.2g} % of the gradient of the loss, so it does next "
                f"to nothing. Set {cure}."
            )
            continue
        if _is_in_its_flow(name, row) and not any(_is_in_its_flow(name, r) for r in earlier):
            said.append(
                f"epoch {row['epoch']:.0f}: regularizers.{name} moves flow 1, and hardly what lies "
                f"before it: its gradient at the features is {100 * row[f'reach {name}']:.2g} % of "
                "that of the loss."
            )
        if len(earlier) == 1 and _at_a_bound(row.get(f"scale {name}", 1.0)):
            said.append(
                f"regularizers.{name}: its weight ended at the bound of its calibration, "
                f"{row[f'scale {name}']:g} times the one given, with "
                f"{100 * row[f'share {name}']:.2g} % of the gradient. Give another "
                f"{_WEIGHTS.get(name, 'weight')} to begin with."
            )
    return said


def _faint(job: Job, name: str, row: Row) -> bool:
    """Whether a regularizer did next to nothing in an epoch, its flow not being fitted first."""
    fitted = getattr(getattr(job.regularizers, name), "fit_epochs", 0)
    return row["epoch"] > fitted and row.get(f"share {name}", LEAST) < LEAST


def _is_in_its_flow(name: str, row: Row) -> bool:
    """Whether next to nothing of its gradient leaves the flow, which passes little on at first."""
    return row["epoch"] > 1 and row.get(f"reach {name}", LEAST) < LEAST


def _at_a_bound(scale: float) -> bool:
    return min(abs(scale - WIDEST), abs(scale * WIDEST - 1) * WIDEST) < 1e-6 * WIDEST


def did_it_help(split: Split, result: Result) -> list[str]:
    """The model of a run compared with what it began with, on the same held-out images."""
    said = [result.choice] if result.choice else []
    for part, (model, began, found) in _held_out(result).items():
        images = getattr(split, part)
        if images is None:
            continue
        queries = queries_in(images, split.gallery if part == "test" else None)
        paired = ""
        if GAIN[0] in found:
            low, high = (found[name] for name in GAIN)
            paired = f", 95 % interval {low:+.1f} to {high:+.1f}"
        said.append(
            f"{part} classes: R@1 {with_interval(model, queries)}; {result.began_with} "
            f"{with_interval(began, queries)} ({model - began:+.1f} points{paired})"
        )
    return [*said, result.verdict] if result.verdict else said


def verdict_of(result: Result) -> str:
    """Whether a training helped, and what to do if not; "" where nothing was held out.

    A gain within its interval is chance as far as anybody can tell, so it counts as none.
    """
    parts: dict[str, list[str]] = {"worse": [], "no gain": [], "gain": []}
    chance = ""
    for part, (model, began, found) in _held_out(result).items():
        low, high = (found.get(name, model - began) for name in GAIN)
        chance = " beyond chance" if found.keys() >= {*GAIN} else ""
        parts["worse" if high < 0 else "gain" if low > 0 else "no gain"].append(part)
    cure = "keep the bundle that it went on from"
    if result.began_with == UNTRAINED:
        cure = "export the trunk itself with `kinlens-train export RUN --trunk`"
    for kind, says in (
        ("worse", f"Worse: the model answers worse than {result.began_with}"),
        ("no gain", f"No gain: the model is not better than {result.began_with}{chance}"),
    ):
        if parts[kind]:
            return (
                f"{says} on the {' and the '.join(parts[kind])} classes, so this training did not "
                f"help. Train on more classes, or {cure}."
            )
    if parts["gain"]:
        return (
            f"Gain: the model is better than {result.began_with}{chance} on the "
            f"{' and the '.join(parts['gain'])} classes."
        )
    return ""


def _held_out(result: Result) -> dict[str, tuple[float, float, Row]]:
    """By part: R@1 of the model and of what it began with, and all figures of the model."""
    found = {"validation": (VALIDATION, result.validation), "test": ("", result.figures)}
    return {
        part: (figures["R@1"], result.trunk[f"{prefix}R@1"], figures)
        for part, (prefix, figures) in found.items()
        if "R@1" in figures and f"{prefix}R@1" in result.trunk
    }
