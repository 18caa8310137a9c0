"""Triplet: an anchor is more like its positive than its negative, by a margin."""

from typing import Literal

import torch
from torch import Tensor, nn

from training.losses.precision import full_precision
from training.mining.distance_weighted import distance_weighted
from training.mining.hard import hard
from training.mining.pairs import Triplets, all_pairs
from training.mining.semi_hard import semi_hard

TripletMining = Literal["all", "semi_hard", "hard", "distance_weighted"]


class TripletLoss(nn.Module):
    r"""Over cosines S and the mined triplets (a, p, n):

    .. math:: \frac{1}{|T|} \sum_{(a, p, n) \in T} [S_{an} - S_{ap} + \lambda]_+

    In squared Euclidean distances of unit vectors, 2 - 2 S, a margin m is the same as lambda = m/2,
    with half the value; FaceNet and graph consistency are written so, with m = 0.2 and m = 0.1.

    `mining = "all"` takes every triplet of the batch with memory B^2: the negatives of an anchor
    are sorted, and those that violate a positive's margin are one end of the list.

    **Reading.** Mean over all mined triplets, those that cost nothing included.

    References:
        FaceNet: A Unified Embedding for Face Recognition and Clustering (Schroff et al., 2015),
        section 3.1. https://arxiv.org/abs/1503.03832
        Metric Learning: A Deep Dive (Psomas, 2020), section "Triplet".

    Args:
        margin: lambda, in cosines.
        mining: "all", or a file of `training.mining`: "semi_hard", "hard", "distance_weighted".
    """

    normalized: bool = True

    def __init__(self, margin: float = 0.1, mining: TripletMining = "semi_hard") -> None:
        super().__init__()
        self.margin = margin
        self.mining = mining

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) to a scalar; 0 without a triplet."""
        S = embeddings @ embeddings.T  # (B, B)
        if self.mining == "all":
            return _mean_over_all(S, labels, self.margin)
        anchor, positive, negative = self._mine(S, labels, embeddings.shape[1])
        terms = (S[anchor, negative] - S[anchor, positive] + self.margin).relu()  # (T,)
        return terms.sum() / max(len(terms), 1)

    def _mine(self, similarities: Tensor, labels: Tensor, dim: int) -> Triplets:
        if self.mining == "semi_hard":
            return semi_hard(similarities, labels)
        if self.mining == "hard":
            return hard(similarities, labels)
        return distance_weighted(similarities, labels, dim)


def _mean_over_all(S: Tensor, labels: Tensor, margin: float) -> Tensor:
    """Mean of [S_an - t_ap]_+ over all triplets, t_ap = S_ap - margin: cosines (B, B) to a scalar.

    For one anchor and positive, the sum over n is (sum of the S_an above t) - (their number) t.
    """
    pairs = all_pairs(labels)
    thresholds = S - margin  # (B, B)
    ranked, order = S.detach().masked_fill(~pairs.negative, -torch.inf).sort(dim=1, descending=True)
    first = torch.searchsorted(-ranked, -thresholds.detach())  # (B, B), how many lie above
    values = S.masked_fill(~pairs.negative, 0.0).gather(1, order)
    sums = torch.nn.functional.pad(values.cumsum(dim=1), (1, 0)).gather(1, first)  # (B, B)
    terms = (sums - first * thresholds)[pairs.positive]
    triplets = (pairs.positive.sum(dim=1) * pairs.negative.sum(dim=1)).sum()
    return terms.sum() / triplets.clamp(min=1)
