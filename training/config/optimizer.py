"""The tables `optimizer` and `runtime` of a job."""

from typing import Literal

from pydantic import Field

from training.config.section import Section


class Optimizer(Section):
    """AdamW with a learning rate for each parameter group.

    All rates are constant until `decay_start`, a part of the run, then follow `schedule` to 0.
    """

    epochs: int = Field(30, ge=1)
    batch_size: int = Field(90, ge=2)
    lr_trunk: float = Field(1e-4, ge=0)
    lr_head: float = Field(1e-4, ge=0)
    lr_proxies: float = Field(1e-2, ge=0)
    lr_flows: float = Field(1e-3, ge=0)
    weight_decay: float = Field(1e-4, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    decay_start: float = Field(0.0, ge=0, lt=1)
    warmup_epochs: int = Field(0, ge=0)
    clip_norm: float | None = None
    steps_per_epoch: int | None = Field(None, ge=1)


class Runtime(Section):
    """How to run; does not change what is learnt, save for rounding."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    workers: int = Field(2, ge=0)
    eval_every_epochs: int = Field(1, ge=0)
    tensorboard: bool = False
