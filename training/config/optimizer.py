"""The tables `sampling`, `optimizer` and `runtime` of a job, and the learning rate of a step."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from training.config.section import Section

Rate = Annotated[float, Field(ge=0)] | Annotated[str, Field(pattern=r"^x\d+(\.\d+)?$")]
"""A learning rate, or "x100": so many times `lr_trunk`."""


class Sampling(Section):
    """How batches are drawn: at random, m images of each class, or two draws of each class.

    `per_class` is m; under "paired", which graph consistency needs, each draw has m of each class,
    and the two draws are "disjoint" or "independent", as in the paper (`pairs`). With `draws` = 2
    the loss is the mean over the two halves of a batch, with 1 that of the whole batch; unset it is
    2 under "paired", whatever the regularizers, else 1.
    """

    kind: Literal["random", "balanced", "paired"] = "random"
    per_class: int = Field(2, ge=1)
    pairs: Literal["disjoint", "independent"] = "disjoint"
    draws: Literal[1, 2] | None = None

    @model_validator(mode="after")
    def _check(self) -> "Sampling":
        if self.pairs != "disjoint" and self.kind != "paired":
            raise ValueError(f'kind = "{self.kind}" does not read pairs; remove it')
        return self

    @property
    def parts(self) -> int:
        """In how many parts of a batch the loss is taken."""
        return self.draws or (2 if self.kind == "paired" else 1)


class Optimizer(Section):
    """Adam or AdamW with a learning rate for each parameter group.

    All rates are constant until `decay_start`, a part of the run, then follow `schedule` to 0;
    under "step" they are multiplied by `gamma` every `step_epochs` epochs, or at each epoch of a
    list. `weight_decay_criterion` is that of proxies and flows (default: `weight_decay`).
    The trunk rests for the first `warmup_epochs`. `clip_value` bounds each gradient entry,
    `clip_norm` the norm of them all. With few images an epoch is a few steps, so `min_steps`
    raises `epochs` until the run has that many. With `average`, a decay such as 0.99, the model of
    the run is the exponential moving average of its weights.
    """

    kind: Literal["adamw", "adam"] = "adamw"
    epochs: int = Field(30, ge=1)
    batch_size: int = Field(90, ge=2)
    lr_trunk: float = Field(1e-4, ge=0)
    lr_head: Rate = 1e-4
    lr_proxies: Rate = 1e-2
    lr_flows: Rate = 1e-3
    weight_decay: float = Field(1e-4, ge=0)
    weight_decay_criterion: float | None = Field(None, ge=0)
    eps: float = Field(1e-8, gt=0)
    schedule: Literal["constant", "linear", "cosine", "step"] = "linear"
    decay_start: float = Field(0.0, ge=0, lt=1)
    step_epochs: Annotated[int, Field(ge=1)] | tuple[Annotated[int, Field(ge=1)], ...] = 10
    gamma: float = Field(0.5, gt=0, le=1)
    warmup_epochs: int = Field(0, ge=0)
    clip_norm: float | None = Field(None, gt=0)
    clip_value: float | None = Field(None, gt=0)
    steps_per_epoch: int | None = Field(None, ge=1)
    min_steps: int = Field(0, ge=0)
    average: float | None = Field(None, gt=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> "Optimizer":
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("set clip_norm or clip_value, not both")
        return self

    def enough_epochs(self, steps_per_epoch: int) -> "Optimizer":
        """These settings with the epochs that `min_steps` asks for."""
        epochs = max(self.epochs, math.ceil(self.min_steps / steps_per_epoch))
        return self.model_copy(update={"epochs": epochs})

    def rate_of(self, value: Rate) -> float:
        """`value` as a number: "x100" is 100 times `lr_trunk`."""
        return self.lr_trunk * float(value[1:]) if isinstance(value, str) else value


class Runtime(Section):
    """How to run; does not change what is learnt, save for rounding.

    `precision` is that of the training steps; figures are always computed in float32. `workers` are
    the processes that read images: "auto" is 2 on a CPU, and one a core on a GPU, 16 at most.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    eval_every_epochs: int = Field(1, ge=0)
    tensorboard: bool = False


def rate(settings: Optimizer, step: int, steps_per_epoch: int) -> float:
    """The factor of all learning rates at `step`, in [0, 1].

    Linear and cosine stay at 1 until the part `decay_start` of the steps, then fall towards 0 at
    the end of the run. "step" multiplies by `gamma` every `step_epochs` epochs, warm-up included,
    or at each epoch of a list.
    """
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "step":
        epoch, at = step // steps_per_epoch, settings.step_epochs
        falls = epoch // at if isinstance(at, int) else sum(epoch >= mark for mark in at)
        return float(settings.gamma**falls)
    done = min(step / max(settings.epochs * steps_per_epoch, 1), 1.0)
    progress = max(done - settings.decay_start, 0.0) / (1.0 - settings.decay_start)
    if settings.schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
