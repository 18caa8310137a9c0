"""Multi-Similarity: pairs weighted by their own and by their relative similarity."""

from typing import Literal

from torch import Tensor, nn

from training.config.settings import NotNegative, Positive
from training.losses.numerics import full_precision, log_1p_sum_exp
from training.miners import all_pairs, hard_pairs


class MultiSimilarityLoss(nn.Module):
    r"""Over cosines S, with P_i and N_i the mined positives and negatives of anchor i:

    .. math::
        \frac{1}{B} \sum_i \Bigl\{
            \frac{1}{\alpha} \log\Bigl[1 + \sum_{k \in P_i} e^{-\alpha (S_{ik} - \lambda)}\Bigr]
            + \frac{1}{\beta} \log\Bigl[1 + \sum_{k \in N_i} e^{\beta (S_{ik} - \lambda)}\Bigr]
        \Bigr\}

    **Reading.** lambda = 0.5, as in the benchmark and in the authors' code; their paper has 1.

    References:
        Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning (Wang et al.,
        2019). https://arxiv.org/abs/1904.06627

    Args:
        alpha: scale of positive pairs.
        beta: scale of negative pairs.
        margin: lambda.
        epsilon: of hard mining.
        mining: "hard" (the paper's own, `training.miners.hard_pairs`) or "all".
    """

    normalized: bool = True

    def __init__(
        self,
        alpha: Positive = 2.0,
        beta: Positive = 50.0,
        margin: float = 0.5,
        epsilon: NotNegative = 0.1,
        mining: Literal["all", "hard"] = "hard",
    ) -> None:
        super().__init__()
        self.alpha = alpha
        self.beta = beta
        self.margin = margin
        self.epsilon = epsilon
        self.mining = mining

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) to a scalar; 0 without a pair."""
        S = embeddings @ embeddings.T  # (B, B)
        hard = self.mining == "hard"
        pairs = hard_pairs(S, labels, self.epsilon) if hard else all_pairs(labels)
        pull = log_1p_sum_exp(-self.alpha * (S - self.margin), pairs.positive, dim=1)  # (B,)
        push = log_1p_sum_exp(self.beta * (S - self.margin), pairs.negative, dim=1)  # (B,)
        return (pull / self.alpha + push / self.beta).sum() / max(len(labels), 1)
