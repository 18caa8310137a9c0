"""Checkpoints: all that a run needs to go on as if it had not stopped."""

import copy
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embedder.errors import CheckpointError
from training.config.job import Job, parse_job
from training.folder import UNTRAINED
from training.models.embedding import EmbeddingNet

FILE = "checkpoint.pt"
BEST = "best.pt"
START = "start.pt"
"""The network at step 0, of a run that compares with it."""

_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """State after `epoch` finished epochs. Views and batches depend on seed and epoch alone."""

    job: dict[str, Any]
    epoch: int
    step: int
    classes: int
    split_sha256: str
    net: dict[str, Tensor]
    objective: dict[str, Tensor]
    optimizer: dict[str, Any]
    rng: Tensor
    history: list[dict[str, float]]
    evaluated: int = 0
    best_epoch: int = 0
    best_score: float = -1.0
    average: dict[str, Any] | None = None
    trunk: dict[str, float] = field(default_factory=dict)
    trunk_ranks: dict[str, Tensor] = field(default_factory=dict)
    start: dict[str, float] = field(default_factory=dict)
    began_with: str = UNTRAINED
    cuda_rng: Tensor | None = None
    learnt_sha256: str = ""
    trunk_alone: bool = False

    def network(self) -> tuple[Job, EmbeddingNet]:
        """The job and its network, in evaluation mode on the CPU.

        With `trunk_alone` that is the trunk that the run began with, without a projection.
        """
        job = parse_job(self.job, origin="the job in the checkpoint")
        random_start = job.model.model_copy(update={"weights": "none"})
        net = EmbeddingNet(random_start, job.regularizers.determinant)
        weights = self.net
        if self.average is not None:
            weights = {name.removeprefix("module."): x for name, x in self.average.items()}
            del weights["n_averaged"]
        net.load_state_dict(weights)
        return job, (net.without_head() if self.trunk_alone else net).eval()


class Average(nn.Module):
    """The exponential moving average of the weights and buffers of a network, its `module`.

    The decay is `decay`, but less in the first steps, min(decay, (1 + n) / (10 + n)), so that a
    short run is not held back by where it began. Its state dict is that of torch's AveragedModel,
    which would average a frozen trunk too, in each step of the head.
    """

    n_averaged: Tensor

    def __init__(self, net: EmbeddingNet, decay: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(net)
        self.decay = decay
        self.register_buffer("n_averaged", torch.tensor(0))  # on the CPU: no step waits for it

    @torch.no_grad()
    def update(self, net: EmbeddingNet) -> None:
        """Take note of the weights after a step; those of a frozen trunk do not change."""
        n = int(self.n_averaged)
        decay = min(self.decay, (1 + n) / (10 + n)) if n else 0.0
        means, values = [], []
        for mean, value in zip(_changing(self.module), _changing(net), strict=True):
            if mean.is_floating_point():
                means.append(mean)
                values.append(value)
            else:
                mean.copy_(value)
        torch._foreach_lerp_(means, values, 1 - decay)
        self.n_averaged += 1


def _changing(net: EmbeddingNet) -> list[Tensor]:
    modules = [net.projection, net.flow] if net.frozen_trunk else [net]
    return [x for m in modules if m is not None for x in (*m.parameters(), *m.buffers())]


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write to `path`, replacing an older checkpoint only when the new one is complete."""
    stage = path.with_suffix(".tmp")
    with stage.open("wb") as file:
        torch.save({"format": _FORMAT, **vars(checkpoint)}, file)
        file.flush()
        os.fsync(file.fileno())
    stage.replace(path)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; nothing in the file is executed. Raises: CheckpointError."""
    if path.is_dir():
        path = path / FILE
    if not path.is_file():
        raise CheckpointError(f"No checkpoint at {path}. Give the folder of a run.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        found = content.pop("format")
        if found != _FORMAT:
            raise CheckpointError(
                f"{path} has format {found}, this version reads {_FORMAT}. Train again."
            )
        return Checkpoint(**content)
    except CheckpointError:
        raise
    except Exception as error:
        # torch.load raises pickle, zip, runtime, key and type errors on a damaged file.
        raise CheckpointError(
            f"{path} is damaged or no checkpoint ({error}). Resume from a copy or train again."
        ) from error


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
