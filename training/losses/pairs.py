"""Losses over the pairs of a batch: Contrastive, Binomial deviance, Lifted structure,
Multi-Similarity and N-pair.

Over cosines S (B, B), with P_i and N_i the positives and negatives of anchor i that `mining`
selects: "all", or the "hard" ones of `hard_pairs`, within `epsilon` of the hardest opposite.
"""

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from kinlens.training.losses.base import MetricLoss, log_1p_sum_exp, log_sum_exp
from kinlens.training.losses.miners import Pairs, all_pairs, hard_pairs
from kinlens.training.parts.fields import Cosine, NotNegative, Positive

Mining = Literal["all", "hard"]


class PairLoss(MetricLoss):
    """Base class: the mean over anchors of a sum over their pairs."""

    def __init__(self, mining: Mining = "all", epsilon: float = 0.1) -> None:
        super().__init__()
        self.mining = mining
        self.epsilon = epsilon

    def value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        S = embeddings @ embeddings.T  # (B, B)
        hard = self.mining == "hard"
        pairs = hard_pairs(S, labels, self.epsilon) if hard else all_pairs(labels)
        return self.summed(S, pairs) / max(len(labels), 1)

    def summed(self, S: Tensor, pairs: Pairs) -> Tensor:
        raise NotImplementedError


class ContrastiveLoss(PairLoss):
    r"""Pull positive pairs together; negative pairs may be as similar as a margin lambda.

    .. math::
        \frac{1}{B} \sum_i \Bigl( \sum_{j \in P_i} -S_{ij}
            + \sum_{j \in N_i} [S_{ij} - \lambda]_+ \Bigr)

    References:
        Dimensionality Reduction by Learning an Invariant Mapping (Hadsell et al., 2006), whose
        squared distances the benchmark replaces by cosines.
        Metric Learning: A Deep Dive (Psomas, 2020), section "Contrastive".

    Args:
        margin: lambda, the cosine that a negative pair may have.
        mining: `all` pairs, or the `hard` ones, of the Multi-Similarity miner.
    """

    def __init__(self, margin: Cosine = 0.5, mining: Mining = "all") -> None:
        super().__init__(mining)
        self.margin = margin

    def summed(self, S: Tensor, pairs: Pairs) -> Tensor:
        pull = -S.where(pairs.positive, 0).sum()
        push = (S - self.margin).relu().where(pairs.negative, 0).sum()
        return pull + push


class BinomialDevianceLoss(PairLoss):
    r"""A logistic regression of "same class" on the cosine; negative logits are scaled by eta.

    .. math::
        \frac{1}{B} \sum_i \Bigl( \sum_{j \in P_i} \log(1 + e^{-\alpha (S_{ij} - \beta)})
            + \sum_{j \in N_i} \log(1 + e^{\alpha \eta (S_{ij} - \beta)}) \Bigr)

    References:
        Deep Metric Learning with Graph Consistency (Chen et al., 2021), eq. 7.
        Deep Metric Learning for Practical Person Re-Identification (Yi et al., 2014).
        https://arxiv.org/abs/1407.4979

    Args:
        alpha: steepness of the logistic function.
        beta: the cosine at which both are equally likely.
        negative_cost: eta, the factor of negative logits.
    """

    def __init__(
        self, alpha: Positive = 2.0, beta: Cosine = 0.5, negative_cost: Positive = 25.0
    ) -> None:
        super().__init__()
        self.alpha = alpha
        self.beta = beta
        self.negative_cost = negative_cost

    def summed(self, S: Tensor, pairs: Pairs) -> Tensor:
        logits = self.alpha * (S - self.beta)  # (B, B)
        pull = F.softplus(-logits).where(pairs.positive, 0)
        push = F.softplus(self.negative_cost * logits).where(pairs.negative, 0)
        return (pull + push).sum()


class LiftedStructureLoss(PairLoss):
    r"""Smooth hinge of all positives against all negatives of an anchor.

    .. math::
        \frac{1}{B} \sum_i \Bigl[ \log \sum_{k \in P_i} e^{\lambda - S_{ik}}
            + \log \sum_{k \in N_i} e^{S_{ik}} \Bigr]_+

    An anchor without a positive or without a negative contributes 0.

    References:
        Deep Metric Learning via Lifted Structured Feature Embedding (Song et al., 2016), in
        the per-anchor form of In Defense of the Triplet Loss (Hermans et al., 2017).
        https://arxiv.org/abs/1511.06452, https://arxiv.org/abs/1703.07737
        Metric Learning: A Deep Dive (Psomas, 2020), section "LiftedStructure".

    Args:
        margin: lambda, by how much positives are to be nearer than negatives.
        mining: `all` pairs, or the `hard` ones, of the Multi-Similarity miner.
        epsilon: of the miner, the margin in which a pair is hard.
    """

    def __init__(
        self, margin: float = 0.5, mining: Mining = "hard", epsilon: NotNegative = 0.1
    ) -> None:
        super().__init__(mining, epsilon)
        self.margin = margin

    def summed(self, S: Tensor, pairs: Pairs) -> Tensor:
        pull = log_sum_exp(self.margin - S, pairs.positive)  # (B,), -inf without a positive
        push = log_sum_exp(S, pairs.negative)  # (B,)
        return (pull + push).relu().sum()


class MultiSimilarityLoss(PairLoss):
    r"""Pairs weighted by their own and by their relative similarity.

    .. math::
        \frac{1}{B} \sum_i \Bigl\{
            \frac{1}{\alpha} \log\Bigl[1 + \sum_{k \in P_i} e^{-\alpha (S_{ik} - \lambda)}\Bigr]
            + \frac{1}{\beta} \log\Bigl[1 + \sum_{k \in N_i} e^{\beta (S_{ik} - \lambda)}\Bigr]
        \Bigr\}

    lambda = 0.5 as in the benchmark and in the authors' code; their paper has 1.

    References:
        Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning (Wang et al.,
        2019). https://arxiv.org/abs/1904.06627

    Args:
        alpha: sharpness of the choice among positives.
        beta: sharpness of the choice among negatives.
        margin: lambda, the cosine between positives and negatives.
        epsilon: of the miner, the margin in which a pair is hard.
        mining: `all` pairs, or the `hard` ones, of the paper's own miner.
    """

    def __init__(
        self,
        alpha: Positive = 2.0,
        beta: Positive = 50.0,
        margin: float = 0.5,
        epsilon: NotNegative = 0.1,
        mining: Mining = "hard",
    ) -> None:
        super().__init__(mining, epsilon)
        self.alpha = alpha
        self.beta = beta
        self.margin = margin

    def summed(self, S: Tensor, pairs: Pairs) -> Tensor:
        pull = log_1p_sum_exp(-self.alpha * (S - self.margin), pairs.positive, dim=1)  # (B,)
        push = log_1p_sum_exp(self.beta * (S - self.margin), pairs.negative, dim=1)  # (B,)
        return (pull / self.alpha + push / self.beta).sum()


class NPairLoss(MetricLoss):
    r"""A positive pair against the samples of all other classes at once.

    On inner products of features f of any length, with A the positive pairs (a, p):

    .. math::
        \frac{1}{|A|} \sum_{(a, p) \in A} \log\Bigl(1 + \sum_{n \in N_a}
            e^{f_a \cdot f_n - f_a \cdot f_p}\Bigr) + \mu \frac{1}{B} \sum_i |f_i|^2

    A has all ordered positive pairs and N_a all samples of other classes, as in eq. 6 of the graph
    consistency paper, averaged over the positives. Sohn takes one pair of each class, and as
    negatives only the second samples of the others. Without a pair only the second term remains.

    References:
        Improved Deep Metric Learning with Multi-class N-pair Loss Objective (Sohn, 2016).
        Deep Metric Learning with Graph Consistency (Chen et al., 2021), eq. 6.

    Args:
        l2: mu, the weight of the squared norms.
    """

    normalized = False

    def __init__(self, l2: NotNegative = 0.02) -> None:
        super().__init__()
        self.l2 = l2

    def value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        products = embeddings @ embeddings.T  # (B, B)
        positive, negative = all_pairs(labels)
        negatives = log_sum_exp(products, negative)  # (B,)
        terms = F.softplus(negatives[:, None] - products).where(positive, 0)  # (B, B)
        norms = embeddings.square().sum() / max(len(embeddings), 1)
        return terms.sum() / positive.sum().clamp(min=1) + self.l2 * norms
