"""Distance-weighted sampling: negatives drawn evenly over distance, not over the sphere."""

import torch
from torch import Tensor

from training.mining.pairs import Triplets, all_pairs


def distance_weighted(
    similarities: Tensor, labels: Tensor, dim: int, cutoff: float = 0.5, farthest: float = 1.4
) -> Triplets:
    """For each anchor and positive, a negative drawn with `negative_probabilities`.

    Draws B^2 numbers from torch's global CPU generator, whatever the labels; memory B^2.

    Args:
        similarities: cosines (B, B).
        labels: (B,).
        dim: length D of an embedding.
        cutoff, farthest: see negative_probabilities.
    """
    probabilities = negative_probabilities(similarities, labels, dim, cutoff, farthest)
    cumulative = probabilities.cumsum(dim=1)  # (B, B)
    cumulative = cumulative / cumulative[:, -1:]  # ends in exactly 1, or NaN without negatives
    drawn = torch.rand(probabilities.shape, dtype=torch.float64).to(labels.device)
    negative = torch.searchsorted(cumulative, drawn, right=True)  # (B, B), first one above
    pairs = all_pairs(labels)
    anchor, positive = (pairs.positive & pairs.negative.any(dim=1)[:, None]).nonzero(as_tuple=True)
    return Triplets(anchor, positive, negative[anchor, positive])


def negative_probabilities(
    similarities: Tensor, labels: Tensor, dim: int, cutoff: float = 0.5, farthest: float = 1.4
) -> Tensor:
    r"""The probability of each negative of each anchor: (B, B) to (B, B) in float64.

    Proportional to the inverse of the density of distances d on the unit sphere, for d < farthest
    and with d raised to at least cutoff, which bounds the variance:

    .. math:: q(d)^{-1} = d^{2 - D} (1 - d^2 / 4)^{(3 - D) / 2}

    **Reading.** An anchor whose negatives are all too far draws among them evenly, which keeps its
    positive pairs in the loss. Rows of anchors without a negative are 0.

    References:
        Sampling Matters in Deep Embedding Learning (Wu et al., 2017), section 4; cutoff and
        farthest as in the authors' code. https://arxiv.org/abs/1706.07567

    Args:
        similarities: cosines (B, B).
        labels: (B,).
        dim: length D of an embedding.
        cutoff: distances below it are taken for it.
        farthest: distances from it on are not drawn.
    """
    negative = all_pairs(labels).negative
    squared = (2 - 2 * similarities.detach().double()).clamp(min=0)
    d2 = squared.clamp(min=cutoff**2, max=4 - 1e-9)
    log_weights = (2 - dim) / 2 * d2.log() + (3 - dim) / 2 * (1 - d2 / 4).log()
    near = negative & (squared < farthest**2)
    none_near = ~near.any(dim=1, keepdim=True)
    log_weights = log_weights.masked_fill(none_near, 0.0)
    allowed = torch.where(none_near, negative, near)
    return log_weights.masked_fill(~allowed, -torch.inf).softmax(dim=1).nan_to_num(nan=0.0)
