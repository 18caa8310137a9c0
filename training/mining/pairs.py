"""Pairs and triplets of a batch, as masks and as indices."""

from typing import NamedTuple

import torch
from torch import Tensor


class Triplets(NamedTuple):
    """Indices (T,) into the batch: sample `anchor`, one of its class, one of another class."""

    anchor: Tensor
    positive: Tensor
    negative: Tensor


class Pairs(NamedTuple):
    """Masks (B, B): row is the anchor, column the other sample."""

    positive: Tensor
    negative: Tensor


def all_pairs(labels: Tensor) -> Pairs:
    """Every ordered pair of two different samples, by whether they share their class."""
    same = labels[:, None] == labels[None, :]
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return Pairs(same & ~itself, ~same)
