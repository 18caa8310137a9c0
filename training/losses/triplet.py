"""Triplet: an anchor is more like its positive than its negative, by a margin."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.config.settings import NotNegative
from training.losses.numerics import full_precision
from training.miners import Triplets, all_pairs, batch_hard, distance_weighted, semi_hard


class TripletLoss(nn.Module):
    r"""Over cosines S and the mined triplets (a, p, n):

    .. math:: \frac{1}{|T|} \sum_{(a, p, n) \in T} [S_{an} - S_{ap} + \lambda]_+

    In squared Euclidean distances of unit vectors, 2 - 2 S, a margin m is the same as lambda = m/2,
    with half the value; FaceNet and graph consistency are written so, with m = 0.2 and m = 0.1.

    `mining = "all"` takes every triplet of the batch, with memory B^2.

    **Reading.** Mean over all mined triplets, those that cost nothing included.

    References:
        FaceNet: A Unified Embedding for Face Recognition and Clustering (Schroff et al., 2015),
        section 3.1. https://arxiv.org/abs/1503.03832
        Metric Learning: A Deep Dive (Psomas, 2020), section "Triplet".

    Args:
        margin: lambda, in cosines.
        mining: "all", or by `training.miners`: "semi_hard", "hard" (its `batch_hard`) or
            "distance_weighted".
    """

    normalized: bool = True

    def __init__(
        self,
        margin: NotNegative = 0.1,
        mining: Literal["all", "semi_hard", "hard", "distance_weighted"] = "semi_hard",
    ) -> None:
        super().__init__()
        self.margin = margin
        self.mining = mining

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) to a scalar; 0 without a triplet."""
        S = embeddings @ embeddings.T  # (B, B)
        if self.mining == "all":
            pairs = all_pairs(labels)
            terms = _hinge_sums(S, pairs.negative, S - self.margin).where(pairs.positive, 0)
            triplets = (pairs.positive.sum(dim=1) * pairs.negative.sum(dim=1)).sum()
            return terms.sum() / triplets.clamp(min=1)
        mined, negative = self._mine(S, labels, embeddings.shape[1])
        terms = (S.gather(1, negative) - S + self.margin).relu().where(mined, 0)  # (B, B)
        return terms.sum() / mined.sum().clamp(min=1)

    def _mine(self, similarities: Tensor, labels: Tensor, dim: int) -> Triplets:
        if self.mining == "semi_hard":
            return semi_hard(similarities, labels)
        if self.mining == "hard":
            return batch_hard(similarities, labels)
        return distance_weighted(similarities, labels, dim)


def _hinge_sums(values: Tensor, mask: Tensor, thresholds: Tensor) -> Tensor:
    """For each threshold t of a row the sum of [v - t]_+ over its values v in the mask.

    All (B, B). With a row's values in falling order, those above t are the first k of them, and
    their sum is the k-th partial sum less k t.
    """
    order = values.detach().masked_fill(~mask, -torch.inf).argsort(dim=1, descending=True)
    falling = values.masked_fill(~mask, -torch.inf).gather(1, order).detach()
    k = torch.searchsorted(-falling, -thresholds.detach())  # (B, B)
    partial_sums = F.pad(values.where(mask, 0).gather(1, order).cumsum(dim=1), (1, 0))
    return partial_sums.gather(1, k) - k * thresholds
