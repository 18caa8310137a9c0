"""What a person should be told about a run, in plain words: for the console and the report."""

from training.config.job import Job
from training.data.records import Split
from training.evaluation.interval import queries_in, with_interval
from training.shares import LEAST
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
        f"{_FEW_STEPS} or more; the epochs follow."
    ]


def after_epoch(job: Job, row: Row) -> list[str]:
    """What the figures of an epoch say."""
    said = []
    for name, settings in job.regularizers:
        share = row.get(f"share {name}")
        if settings is None or share is None or share >= LEAST:
            continue
        if row["epoch"] <= getattr(settings, "fit_epochs", 0):
            continue  # its flow is fitted first
        cure = f"regularizers.{name}.share = 0.2, or raise {_WEIGHTS.get(name, 'weight')}"
        if settings.share is not None:
            cure = "a larger share, or other settings of it: its gradient vanishes"
        said.append(
            f"epoch {row['epoch']:.0f}: regularizers.{name} makes {100 * share:.2g} % of the "
            f"gradient of the loss, so it does next to nothing. Set {cure}."
        )
    return said


def did_it_help(split: Split, trunk: Row, figures: Row, validation: Row) -> list[str]:
    """The model of a run beside the trunk that it began as, on the same held-out images.

    Args:
        split: of the run.
        trunk: figures of the untrained trunk; those on validation classes with their prefix.
        figures, validation: of the model, on test and on validation classes.
    """
    said = []
    for part, name, found in (("validation", VALIDATION, validation), ("test", "", figures)):
        images = getattr(split, part)
        model, before_it = found.get("R@1"), trunk.get(f"{name}R@1")
        if images is None or model is None or before_it is None:
            continue
        queries = queries_in(images, split.gallery if part == "test" else None)
        said.append(
            f"{part} classes: R@1 {with_interval(model, queries)}, the untrained trunk "
            f"{with_interval(before_it, queries)} ({model - before_it:+.1f} points)"
        )
    if validation.get("R@1", 101.0) <= trunk.get(f"{VALIDATION}R@1", -1.0):
        said.append(
            "No epoch was better than the untrained trunk on the validation classes: this training "
            "did not help. Export the trunk itself with `kinlens-train export RUN --trunk`, or "
            "train on more classes."
        )
    return said
