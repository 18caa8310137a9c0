"""Margin: positive pairs inside, negative pairs outside a learnt distance."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from training.config.settings import NotNegative, Positive
from training.losses.numerics import full_precision
from training.losses.proxies import check_labels
from training.miners import all_pairs, distance_weighted


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
        classes: number of classes C.
        margin: m.
        beta: its start value.
        nu: weight of the last term.
        learn_beta: False fixes beta, as a buffer.
        beta_per_class: learn a beta for each class.
        mining: "distance_weighted", or "all" pairs.
        farthest: of the mining; negatives at this distance or farther are not drawn.
    """

    normalized: bool = True

    def __init__(
        self,
        classes: int,
        margin: NotNegative = 0.5,
        beta: Positive = 1.2,
        nu: NotNegative = 0.0,
        learn_beta: bool = True,
        beta_per_class: bool = False,
        mining: Literal["all", "distance_weighted"] = "distance_weighted",
        farthest: Annotated[float, Field(gt=0, le=2)] = 1.4,
    ) -> None:
        super().__init__()
        self.margin = margin
        self.nu = nu
        self.mining = mining
        self.farthest = farthest
        self.beta: Tensor
        start = torch.full((classes if beta_per_class else 1,), beta)
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
        beta = self._beta_of(labels).to(d.dtype)[:, None]  # (B, 1)
        if self.mining == "all":
            positive, negative = all_pairs(labels)
            to_negative = d
        else:
            positive, drawn = distance_weighted(
                S, labels, embeddings.shape[1], farthest=self.farthest
            )
            negative, to_negative = positive, d.gather(1, drawn)
        pull = (d - beta + self.margin).relu().where(positive, 0)  # (B, B)
        push = (beta - to_negative + self.margin).relu().where(negative, 0)  # (B, B)
        active = (pull > 0).sum() + (push > 0).sum()
        regularizer = self.nu * beta.where(positive, 0).sum() / positive.sum().clamp(min=1)
        return (pull.sum() + push.sum()) / active.clamp(min=1) + regularizer

    def _beta_of(self, labels: Tensor) -> Tensor:
        if len(self.beta) == 1:
            return self.beta.expand(len(labels))
        check_labels(labels, len(self.beta))
        return self.beta[labels]
