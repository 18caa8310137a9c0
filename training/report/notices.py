"""What a person should be told about a run, in plain words: for the console and the report."""

from collections.abc import Sequence

from training.checkpoint import UNTRAINED
from training.config.job import Job
from training.data.records import Split
from training.evaluation.retrieval import queries_in, with_interval
from training.regularizers.shares import LEAST, WIDEST
from training.state import VALIDATION, Row

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
        elif len(earlier) == 1 and _at_a_bound(row.get(f"scale {name}", 1.0)):
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


def _at_a_bound(scale: float) -> bool:
    return min(abs(scale - WIDEST), abs(scale * WIDEST - 1) * WIDEST) < 1e-6 * WIDEST


def did_it_help(
    split: Split, began_with: str, trunk: Row, figures: Row, validation: Row
) -> list[str]:
    """The model of a run beside what it began with, on the same held-out images.

    Args:
        split: of the run.
        began_with, trunk: what it began with and the figures of that; those on validation classes
            with their prefix.
        figures, validation: of the model, on test and on validation classes.
    """
    said, worse = [], []
    for part, name, found in (("validation", VALIDATION, validation), ("test", "", figures)):
        images = getattr(split, part)
        model, before_it = found.get("R@1"), trunk.get(f"{name}R@1")
        if images is None or model is None or before_it is None:
            continue
        queries = queries_in(images, split.gallery if part == "test" else None)
        said.append(
            f"{part} classes: R@1 {with_interval(model, queries)}; {began_with} "
            f"{with_interval(before_it, queries)} ({model - before_it:+.1f} points)"
        )
        worse += [part] if model <= before_it else []
    if worse:
        cure = "Keep the bundle that it went on from"
        if began_with == UNTRAINED:
            cure = "Export the trunk itself with `kinlens-train export RUN --trunk`"
        said.append(
            f"The model is not better than {began_with} on the {' and the '.join(worse)} "
            f"classes: this training did not help. {cure}, or train on more classes."
        )
    return said
