"""Lifted structure: all positives of an anchor against all its negatives, smoothly."""

from typing import Literal

from torch import Tensor, nn

from training.config.settings import NotNegative
from training.losses.numerics import full_precision, log_sum_exp
from training.miners import all_pairs, hard_pairs


class LiftedStructureLoss(nn.Module):
    r"""Over cosines S, with P_i and N_i the mined positives and negatives of anchor i:

    .. math::
        \frac{1}{B} \sum_i \Bigl[ \log \sum_{k \in P_i} e^{\lambda - S_{ik}}
            + \log \sum_{k \in N_i} e^{S_{ik}} \Bigr]_+

    An anchor without a positive or without a negative gives 0.

    **Readings.** The benchmark sums over anchors, here they are averaged. It says "hard" without
    saying which pairs: those of `training.miners.hard_pairs`, with its epsilon. (The single
    hardest pairs would turn the loss into a triplet loss.)

    References:
        Deep Metric Learning via Lifted Structured Feature Embedding (Song et al., 2016), in
        the per-anchor form of In Defense of the Triplet Loss (Hermans et al., 2017).
        https://arxiv.org/abs/1511.06452, https://arxiv.org/abs/1703.07737
        Metric Learning: A Deep Dive (Psomas, 2020), section "LiftedStructure".

    Args:
        margin: lambda.
        mining: "all" pairs or "hard" ones.
        epsilon: of hard mining.
    """

    normalized: bool = True

    def __init__(
        self,
        margin: float = 0.5,
        mining: Literal["all", "hard"] = "hard",
        epsilon: NotNegative = 0.1,
    ) -> None:
        super().__init__()
        self.margin = margin
        self.mining = mining
        self.epsilon = epsilon

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) to a scalar; 0 without a pair."""
        S = embeddings @ embeddings.T  # (B, B)
        hard = self.mining == "hard"
        pairs = hard_pairs(S, labels, self.epsilon) if hard else all_pairs(labels)
        pull = log_sum_exp(self.margin - S, pairs.positive)  # (B,), -inf without a positive
        push = log_sum_exp(S, pairs.negative)  # (B,)
        return (pull + push).relu().sum() / max(len(labels), 1)
