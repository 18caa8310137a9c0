"""The model of a run that is a point on the line between its start and its last epoch.

A training on few classes may end below its start, so `protocol.alpha` takes it only a part of the
way. It is a mean of the weights of both.

References:
    Wortsman et al., Robust fine-tuning of zero-shot models (2022), section 3: the line between
    weights. https://arxiv.org/abs/2109.01903
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kinlens.training.checkpoint import BEST, START, load_checkpoint, save_checkpoint
from kinlens.training.folder import UNTRAINED
from kinlens.training.models.backbones import State


def write_chosen(folder: Path, alpha: float | None) -> None:
    """Write the model at `alpha` as the chosen one; None is what the run began with."""
    start, last = load_checkpoint(folder / START), load_checkpoint(folder)
    trunk_alone = start.trunk_alone or (alpha is None and last.began_with == UNTRAINED)
    weights = between(start.weights(), last.weights(), alpha or 0.0)  # the trunk of the start
    save_checkpoint(
        folder / BEST, replace(last, net=weights, average=None, trunk_alone=trunk_alone)
    )


def between(before: State, after: State, alpha: float) -> dict[str, Tensor]:
    """The state of the network at a point on the line."""
    return {
        name: torch.lerp(before[name], value, alpha)
        if value.is_floating_point()
        else (value if alpha else before[name])
        for name, value in after.items()
    }
