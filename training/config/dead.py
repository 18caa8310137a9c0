"""Settings without an effect in their job, which are refused as unknown keys are."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from kinlens.embedder.errors import JobError
from kinlens.training.config.job import Job, load_job
from kinlens.training.config.layers import names_of
from kinlens.training.config.settings import AUGMENTATIONS, BACKBONE_NAMES, ONNX
from kinlens.training.parts.own import is_own

_OF_STEPS = ("loss", "regularizers", "sampling", "optimizer", "model.hidden")
_OF_VIEWS = ("crop", "min_crop_area", "flip", *AUGMENTATIONS)
_TABLES = {"model", "start", "input", "sampling", "optimizer", "protocol", "runtime"}


def require_effect(jobs: Sequence[Job], given: Collection[str]) -> None:
    """Refuse the settings among `given`, dotted names, that a user changed in vain in all `jobs`.

    Raises: JobError naming what the first of them needs.
    """
    job, *others = jobs
    for name, cure in idle(job).items():
        if name not in given or _is_default(job, name):
            continue
        if all(name in idle(other) for other in others):
            raise JobError(f"{name} = {_value(job, name)!r} has no effect here: {cure}.")


def changed(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str], top: Mapping[str, Any]
) -> set[str]:
    """The dotted names of the settings that a user changed, for `require_effect`.

    They are those of `--set`, and those of `top`, the tables that the user wrote, that have no
    effect in `source` itself: what is laid over it may idle others, such as the rate of a part that
    it turns off.
    """
    of_file = written(top)
    with suppress(JobError):  # a file may need its overrides
        of_file &= idle(load_job(source)).keys()
    return of_file | names_of(overrides)


def written(content: Mapping[str, Any], prefix: str = "") -> set[str]:
    """The dotted names of the settings in plain data; none if it states every table.

    Programs write such files, of combinations that nobody chose one by one.
    """
    if not prefix and content.keys() >= _TABLES:
        return set()
    found = set()
    for key, value in content.items():
        name = prefix + key
        found |= written(value, f"{name}.") if isinstance(value, Mapping) else {name}
    return found


def without_steps(job: Job, given: Collection[str]) -> list[str]:
    """The settings of training steps among `given`, if the job trains nothing after its start.

    They are no error: `adapt` of version 0.2 trained.
    """
    if job.protocol.trains:
        return []
    steps = (*_OF_STEPS, "model.views") if job.model.views > 1 else _OF_STEPS
    return sorted(name for name in given if name.startswith(steps))


def idle(job: Job) -> dict[str, str]:
    """All settings that have no effect whatever their value, with what they need."""
    from kinlens.training.terms import REGULARIZERS  # imports torch

    model, optimizer, kind = job.model, job.optimizer, job.sampling.kind
    no_mode = model.weights == "none" and model.backbone in BACKBONE_NAMES
    start = job.start
    own = is_own(job.loss.name) or bool(job.regularizers.own)
    rules = {
        "model.weights": (
            no_mode and model.batch_norm != "train",
            f'random weights never learn with model.batch_norm = "{model.batch_norm}", as their '
            'batch norm has no statistics; set model.batch_norm = "train"',
        ),
        "start.images": (
            start.projection == "random" and start.proxies == "random",
            'set start.projection = "trunk"',
        ),
        "protocol.alpha": (job.protocol.choose_by != "alpha", 'set protocol.choose_by = "alpha"'),
        "model.pooling": (model.backbone == ONNX, "an imported network has its own pooling"),
        "model.views": (not model.frozen_trunk, "set model.frozen_trunk = true"),
        "model.frozen_stages": (model.frozen_trunk, "set model.frozen_trunk = false"),
        "optimizer.stage_decay": (model.frozen_trunk, "set model.frozen_trunk = false"),
        "input.min_crop_area": (job.input.crop == "fixed", 'set input.crop = "area"'),
        "sampling.per_class": (kind == "random", 'set sampling.kind = "balanced"'),
        "sampling.pairs": (kind in ("random", "balanced"), 'set sampling.kind = "paired"'),
        "optimizer.lr_flows": (
            not own and not job.regularizers.wanted().keys() & {"determinant", "non_isotropy"},
            "no regularizer has a flow",
        ),
        "optimizer.lr_proxies": (
            not own and not _learns(job.loss.name),
            f"the loss {job.loss.name} learns nothing",
        ),
        "optimizer.gamma": (optimizer.schedule != "step", 'set optimizer.schedule = "step"'),
        "optimizer.step_epochs": (optimizer.schedule != "step", 'set optimizer.schedule = "step"'),
        "optimizer.decay_start": (
            optimizer.schedule in ("constant", "step"),
            'set optimizer.schedule = "linear" or "cosine"',
        ),
        "optimizer.warmup_epochs": (
            model.frozen_trunk
            or (optimizer.min_steps == 0 and optimizer.warmup_epochs >= optimizer.epochs),
            f"the trunk would never be trained in {optimizer.epochs} epochs; lower it",
        ),
    }
    if model.frozen_trunk and model.views == 1:
        rules |= {f"input.{name}": (True, "set model.views = 4") for name in _OF_VIEWS}
        if job.input.aspect == "squashed":  # needs its crop, with an effect or without one
            del rules["input.crop"]
    found = {name: cure for name, (is_dead, cure) in rules.items() if is_dead}
    for name, options in job.regularizers.wanted().items():
        if name in REGULARIZERS:
            for option, cure in REGULARIZERS[name].idle(options).items():
                found[f"regularizers.{name}.{option}"] = cure
    return found


def _learns(loss: str) -> bool:
    from kinlens.training.terms import WITH_PROXIES  # imports torch, like the loss

    return loss in (*WITH_PROXIES, "margin")


def _value(job: Job, name: str) -> Any:
    *_, value = _path(job, name)
    return value


def _is_default(job: Job, name: str) -> bool:
    *_, table, value = _path(job, name)
    return bool(value == type(table).model_fields[name.rpartition(".")[2]].default)


def _path(job: Job, name: str) -> list[Any]:
    """The job, each table on the way to a setting, and its value."""
    return [*accumulate(name.split("."), getattr, initial=job)]
