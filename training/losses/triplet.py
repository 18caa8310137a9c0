"""Losses over mined triplets of an anchor, a positive and a negative: Triplet and Margin."""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from kinlens.training.losses.base import MetricLoss
from kinlens.training.losses.miners import all_pairs, mine
from kinlens.training.parts.fields import OR_OWN, NotNegative, Positive


class TripletLoss(MetricLoss):
    r"""An anchor is more similar to its positive than to its negative, by a margin lambda.

    .. math:: \frac{1}{|T|} \sum_{(a, p, n) \in T} [S_{an} - S_{ap} + \lambda]_+

    over cosines S and all mined triplets, including those of zero loss. In squared Euclidean
    distances of unit vectors, 2 - 2 S, a margin m is the same as lambda = m/2, with half the value.

    References:
        FaceNet: A Unified Embedding for Face Recognition and Clustering (Schroff et al., 2015),
        section 3.1. https://arxiv.org/abs/1503.03832
        Metric Learning: A Deep Dive (Psomas, 2020), section "Triplet".

    Args:
        margin: lambda, between the cosines of a positive and a negative.
        mining: the triplets: `all` of them, with memory B^3; for each positive the nearest negative
            farther than it (`semi_hard`) or a random one of any distance (`distance_weighted`); one
            per anchor, of its farthest positive and nearest negative (`hard`); or a function of
            your own by its import path, see `kinlens.training.losses.miners`.
    """

    def __init__(
        self,
        margin: NotNegative = 0.1,
        mining: Annotated[
            Literal["all", "semi_hard", "hard", "distance_weighted"], *OR_OWN
        ] = "semi_hard",
    ) -> None:
        super().__init__()
        self.margin = margin
        self.mining = mining

    def value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        S = embeddings @ embeddings.T  # (B, B)
        if self.mining == "all":
            pairs = all_pairs(labels)
            triplets = pairs.positive[:, :, None] & pairs.negative[:, None, :]  # (B, B, B)
            terms = (S[:, None, :] - S[:, :, None] + self.margin).relu().where(triplets, 0)
            return terms.sum() / triplets.sum().clamp(min=1)
        mined, negative = mine(self.mining, S, labels, embeddings.shape[1])
        terms = (S.gather(1, negative) - S + self.margin).relu().where(mined, 0)  # (B, B)
        return terms.sum() / mined.sum().clamp(min=1)


class MarginLoss(MetricLoss):
    r"""Positive pairs are inside, negative pairs outside a learnt distance beta.

    Over Euclidean distances d of unit vectors, with P and N the mined pairs:

    .. math::
        \frac{1}{K} \Bigl( \sum_{(a, p) \in P} [d_{ap} - \beta + m]_+
            + \sum_{(a, n) \in N} [\beta - d_{an} + m]_+ \Bigr)

    where K is the number of terms above 0. The paper also has a beta for each class and each image,
    and a penalty nu on their size. Here there is one beta, as in the benchmark, and no penalty.

    References:
        Sampling Matters in Deep Embedding Learning (Wu et al., 2017), section 4.
        https://arxiv.org/abs/1706.07567

    Args:
        margin: the margin m.
        beta: the initial beta, which learns at the rate of proxies.
        mining: `all` pairs, or each positive pair and one random negative of any distance.
    """

    def __init__(
        self,
        margin: NotNegative = 0.5,
        beta: Positive = 1.2,
        mining: Annotated[Literal["all", "distance_weighted"], *OR_OWN] = "distance_weighted",
    ) -> None:
        super().__init__()
        self.margin = margin
        self.mining = mining
        self.beta = nn.Parameter(torch.full((1,), beta))

    def value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        S = embeddings @ embeddings.T  # (B, B)
        d = (2 - 2 * S).clamp(min=1e-8).sqrt()  # (B, B), never 0, where the root has no gradient
        beta = self.beta.to(d.dtype)  # (1,)
        if self.mining == "all":
            positive, negative = all_pairs(labels)
            to_negative = d
        else:
            positive, drawn = mine(self.mining, S, labels, embeddings.shape[1])
            negative, to_negative = positive, d.gather(1, drawn)
        pull = (d - beta + self.margin).relu().where(positive, 0)  # (B, B)
        push = (beta - to_negative + self.margin).relu().where(negative, 0)  # (B, B)
        active = (pull > 0).sum() + (push > 0).sum()
        return (pull.sum() + push.sum()) / active.clamp(min=1)
