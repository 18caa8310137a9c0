"""Hard triplets: each anchor with its farthest positive and its nearest negative."""

import torch
from torch import Tensor
from torch.nn import functional as F

from training.mining.pairs import Triplets, all_pairs


def hard(similarities: Tensor, labels: Tensor) -> Triplets:
    """For each anchor: argmin S_ap and argmax S_an; none if it lacks a positive or a negative.

    References:
        In Defense of the Triplet Loss for Person Re-Identification (Hermans et al., 2017):
        "batch hard". https://arxiv.org/abs/1703.07737

    Args:
        similarities: (B, B), larger is more alike.
        labels: (B,).
    """
    similarities = similarities.detach()
    pairs = all_pairs(labels)
    farthest, positive = _max(-similarities, pairs.positive)
    nearest, negative = _max(similarities, pairs.negative)
    anchor = (farthest.isfinite() & nearest.isfinite()).nonzero()[:, 0]  # (T,)
    return Triplets(anchor, positive[anchor], negative[anchor])


def _max(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and its index over the columns in mask: (B, B) to (B,); -inf without a column."""
    padded = F.pad(values.masked_fill(~mask, -torch.inf), (0, 1), value=-torch.inf)
    best, index = padded.max(dim=1)
    return best, index
