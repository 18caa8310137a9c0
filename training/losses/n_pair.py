"""N-pair: a positive pair against the samples of all other classes at once."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.config.settings import NotNegative
from training.losses.numerics import full_precision, log_sum_exp
from training.miners import all_pairs


class NPairLoss(nn.Module):
    r"""On inner products of features that are not normalised, with A the positive pairs (a, p):

    .. math::
        \frac{1}{|A|} \sum_{(a, p) \in A} \log\Bigl(1 + \sum_{n \in N_a}
            e^{f_a \cdot f_n - f_a \cdot f_p}\Bigr) + \mu \frac{1}{B} \sum_i |f_i|^2

    `pairs = "one_per_class"` is the paper's tuple: the first two samples of each class in the
    batch are (a, p), and N_a are the p of the other classes. It ignores all other samples and
    depends on the order of the batch.

    **Reading.** Batches here are not tuples, so by default A are all ordered positive pairs and N_a
    all samples of other classes (eq. 6 of the graph consistency paper, averaged over the choice
    of the positive).

    References:
        Improved Deep Metric Learning with Multi-class N-pair Loss Objective (Sohn, 2016).
        Deep Metric Learning with Graph Consistency (Chen et al., 2021), eq. 6.

    Args:
        l2: mu, the weight of the squared norms.
        pairs: "all" or "one_per_class".
        normalize: use unit vectors (the second term is then a constant).
    """

    normalized: bool = False

    def __init__(
        self,
        l2: NotNegative = 0.02,
        pairs: Literal["all", "one_per_class"] = "all",
        normalize: bool = False,
    ) -> None:
        super().__init__()
        self.l2 = l2
        self.pairs = pairs
        self.normalized = normalize

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Features (B, D), labels (B,) to a scalar; without a pair only the second term is left."""
        if self.normalized:
            embeddings = F.normalize(embeddings, dim=1)
        terms, used = (_all if self.pairs == "all" else _one_per_class)(embeddings, labels)
        norms = embeddings.square().sum() / max(len(embeddings), 1)
        return terms.where(used, 0).sum() / used.sum().clamp(min=1) + self.l2 * norms


def _all(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The term of every pair, and which pairs are positive: (B, B) each."""
    products = features @ features.T  # (B, B)
    pairs = all_pairs(labels)
    negatives = log_sum_exp(products, pairs.negative)  # (B,)
    return F.softplus(negatives[:, None] - products), pairs.positive


def _one_per_class(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The terms of neighbours in the order of labels, and which begin a class: (B - 1,) each."""
    ranked, order = labels.sort(stable=True)
    starts = torch.ones_like(ranked, dtype=torch.bool)
    starts[1:] = ranked[1:] != ranked[:-1]
    used = starts[:-1] & ~starts[1:]
    sorted_ = features[order]
    products = sorted_[:-1] @ sorted_[1:].T  # (B - 1, B - 1): each a with each p
    all_p = log_sum_exp(products, used.expand_as(products))
    return all_p - products.diagonal(), used
