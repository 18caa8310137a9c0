"""Margin: positive pairs inside, negative pairs outside a learnt distance."""

from typing import Literal

import torch
from torch import Tensor, nn

from training.losses.precision import full_precision
from training.losses.proxies import check_labels
from training.mining.distance_weighted import distance_weighted
from training.mining.pairs import all_pairs

MarginMining = Literal["all", "distance_weighted"]


class MarginLoss(nn.Module):
    r"""Over Euclidean distances d of unit vectors, with P and N the mined pairs:

    .. math::
        \frac{1}{K} \Bigl( \sum_{(a, p) \in P} [d_{ap} - \beta_a + m]_+
            + \sum_{(a, n) \in N} [\beta_a - d_{an} + m]_+ \Bigr)
        + \nu \operatorname{mean}_{(a, p) \in P} \beta_a

    where K is the number of terms above 0. beta is one number, or one per class of the anchor; the
    paper's additional beta per image is left out. Distance-weighted mining draws one negative for
    each positive pair.

    References:
        Sampling Matters in Deep Embedding Learning (Wu et al., 2017), section 4.
        https://arxiv.org/abs/1706.07567

    Args:
        margin: m.
        beta: its start value.
        nu: weight of the last term.
        learn_beta: False fixes beta, as a buffer.
        mining: "distance_weighted", or "all" pairs.
        farthest: of the mining; negatives at this distance or farther are not drawn.
        classes: number of classes C for a beta per class; None for one beta.
    """

    normalized: bool = True

    def __init__(
        self,
        margin: float = 0.5,
        beta: float = 1.2,
        nu: float = 0.0,
        learn_beta: bool = True,
        mining: MarginMining = "distance_weighted",
        farthest: float = 1.4,
        classes: int | None = None,
    ) -> None:
        super().__init__()
        self.margin = margin
        self.nu = nu
        self.mining = mining
        self.farthest = farthest
        self.beta: Tensor
        start = torch.full((classes or 1,), beta)
        if learn_beta:
            self.beta = nn.Parameter(start)
        else:
            self.register_buffer("beta", start)

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) to a scalar; 0 without a pair.

        Raises: TrainingError if beta is per class and a label is not in [0, C).
        """
        S = embeddings @ embeddings.T  # (B, B)
        d = (2 - 2 * S).clamp(min=1e-8).sqrt()  # (B, B), never 0, where the root has no gradient
        beta = self._beta_of(labels).to(d.dtype)  # (B,)
        (a, p), (b, n) = self._mine(S, labels, embeddings.shape[1])
        pull = (d[a, p] - beta[a] + self.margin).relu()  # (P,)
        push = (beta[b] - d[b, n] + self.margin).relu()  # (N,)
        active = (pull > 0).sum() + (push > 0).sum()
        regularizer = self.nu * beta[a].sum() / max(len(a), 1)
        return (pull.sum() + push.sum()) / active.clamp(min=1) + regularizer

    def _beta_of(self, labels: Tensor) -> Tensor:
        if len(self.beta) == 1:
            return self.beta.expand(len(labels))
        check_labels(labels, len(self.beta))
        return self.beta[labels]

    def _mine(
        self, similarities: Tensor, labels: Tensor, dim: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Indices (anchor, positive) and (anchor, negative)."""
        if self.mining == "all":
            pairs = all_pairs(labels)
            a, p = pairs.positive.nonzero(as_tuple=True)
            b, n = pairs.negative.nonzero(as_tuple=True)
            return (a, p), (b, n)
        mined = distance_weighted(similarities, labels, dim, farthest=self.farthest)
        return (mined.anchor, mined.positive), (mined.anchor, mined.negative)
