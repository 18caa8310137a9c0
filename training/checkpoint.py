"""Checkpoints: all that a run needs to go on as if it had not stopped."""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedder.errors import CheckpointError
from training.average import Average
from training.config.job import Job, parse_job
from training.models.embedding import EmbeddingNet

FILE = "checkpoint.pt"
BEST = "best.pt"
UNTRAINED = "the untrained trunk"
"""What a run begins with, unless it goes on from the trained model of a bundle."""

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
    start: dict[str, float] = field(default_factory=dict)
    began_with: str = UNTRAINED
    cuda_rng: Tensor | None = None

    def network(self) -> tuple[Job, EmbeddingNet]:
        """The job and its trained network, in evaluation mode on the CPU."""
        job = parse_job(self.job, origin="the job in the checkpoint")
        random_start = job.model.model_copy(update={"weights": "none"})
        net = EmbeddingNet(random_start, job.regularizers.determinant)
        if self.average is None:
            net.load_state_dict(self.net)
        else:
            net.load_state_dict(Average.weights(self.average))
        return job, net.eval()


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
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
