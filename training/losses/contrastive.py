"""Contrastive: positive pairs together, negative pairs no more alike than a margin."""

from typing import Literal

from torch import Tensor, nn

from training.config.settings import Cosine
from training.losses.numerics import full_precision
from training.miners import all_pairs, hard_pairs


class ContrastiveLoss(nn.Module):
    r"""Over cosines S_ij of ordered pairs of different samples:

    .. math::
        \frac{1}{B} \sum_i \Bigl( \sum_{y_j = y_i} -S_{ij}
            + \sum_{y_j \ne y_i} [S_{ij} - \lambda]_+ \Bigr)

    **Reading.** The benchmark prints the term of one pair; here an anchor's terms are summed and
    anchors averaged, as in Multi-Similarity. The value is negative at best.

    References:
        Dimensionality Reduction by Learning an Invariant Mapping (Hadsell et al., 2006), whose
        squared distances the benchmark replaces by cosines.
        Metric Learning: A Deep Dive (Psomas, 2020), section "Contrastive".

    Args:
        margin: lambda.
        mining: "all" pairs, or the "hard" ones of `training.miners.hard_pairs`.
    """

    normalized: bool = True

    def __init__(self, margin: Cosine = 0.5, mining: Literal["all", "hard"] = "all") -> None:
        super().__init__()
        self.margin = margin
        self.mining = mining

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) to a scalar; 0 without a pair."""
        S = embeddings @ embeddings.T  # (B, B)
        pairs = all_pairs(labels) if self.mining == "all" else hard_pairs(S, labels)
        pull = -S.where(pairs.positive, 0).sum()
        push = (S - self.margin).relu().where(pairs.negative, 0).sum()
        return (pull + push) / max(len(labels), 1)
