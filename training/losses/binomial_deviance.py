"""Binomial deviance: a logistic regression of "same class" on the cosine."""

from torch import Tensor, nn
from torch.nn import functional as F

from training.config.settings import Cosine, Positive
from training.losses.numerics import full_precision
from training.miners import all_pairs


class BinomialDevianceLoss(nn.Module):
    r"""Over cosines S_ij of ordered pairs of different samples:

    .. math::
        \frac{1}{B} \sum_i \sum_{j \ne i} \log\bigl(1 + e^{-m_{ij} \alpha (S_{ij} - \beta)
            \eta_{ij}}\bigr), \qquad
        m = 1, \eta = 1 \text{ for positives}, \quad m = -1, \eta = \eta_- \text{ for negatives}

    **Readings.** The paper sums over all i, j: a sample with itself is left out (it would add a
    constant), and anchors are averaged, so that the weight of a regularizer does not depend on the
    batch.

    References:
        Deep Metric Learning with Graph Consistency (Chen et al., 2021), eq. 7.
        Deep Metric Learning for Practical Person Re-Identification (Yi et al., 2014).
        https://arxiv.org/abs/1407.4979

    Args:
        alpha: scale of the cosines.
        beta: the cosine at which "same" and "different" are equally likely.
        negative_cost: eta of negative pairs.
    """

    normalized: bool = True

    def __init__(
        self, alpha: Positive = 2.0, beta: Cosine = 0.5, negative_cost: Positive = 25.0
    ) -> None:
        super().__init__()
        self.alpha = alpha
        self.beta = beta
        self.negative_cost = negative_cost

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) to a scalar; 0 without a pair."""
        logits = self.alpha * (embeddings @ embeddings.T - self.beta)  # (B, B)
        pairs = all_pairs(labels)
        pull = F.softplus(-logits).where(pairs.positive, 0)
        push = F.softplus(self.negative_cost * logits).where(pairs.negative, 0)
        return (pull + push).sum() / max(len(labels), 1)
