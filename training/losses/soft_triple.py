"""SoftTriple: several centres per class, chosen softly."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from training.config.settings import Count, NotNegative, Positive
from training.losses.numerics import full_precision
from training.losses.proxies import ProxyLoss, check_labels


class SoftTripleLoss(ProxyLoss):
    r"""Cross-entropy over similarities with classes, each class being K unit centres w.

    .. math::
        S_{i,c} = \sum_k \frac{e^{\gamma\, x_i \cdot w_c^k}}{\sum_l e^{\gamma\, x_i \cdot w_c^l}}\,
            x_i \cdot w_c^k, \qquad
        \frac{1}{B} \sum_i -\log \frac{e^{\lambda (S_{i,y_i} - \delta)}}
            {e^{\lambda (S_{i,y_i} - \delta)} + \sum_{j \ne y_i} e^{\lambda S_{i,j}}}
        + \frac{\tau}{C K (K - 1)} \sum_c \sum_{k < l} \sqrt{2 + 10^{-5} - 2\, w_c^k \cdot w_c^l}

    The last term draws the centres of a class together, so that it uses no more than it needs. An
    empty batch leaves this term.

    Centres start uniform in +-1 / sqrt(C K), as the authors' code draws them. K should not exceed
    the images per class.

    **Readings.** gamma = 10 multiplies (the paper divides by its gamma = 0.1). margin 0.1 is the
    benchmark's; the authors' code has 0.01. `centre_of` is the nearest centre of the class.

    References:
        SoftTriple Loss: Deep Metric Learning Without Triplet Sampling (Qian et al., 2019).
        https://arxiv.org/abs/1909.05235

    Args:
        classes, dim: see ProxyLoss.
        centres_per_class: K.
        scale: lambda.
        gamma: sharpness of the choice among the centres of a class.
        margin: delta.
        tau: weight of the last term.
    """

    def __init__(
        self,
        classes: int,
        dim: int,
        centres_per_class: Count = 10,
        scale: Positive = 20.0,
        gamma: Positive = 10.0,
        margin: NotNegative = 0.1,
        tau: NotNegative = 0.2,
    ) -> None:
        count = classes * centres_per_class
        super().__init__(classes, dim, (2 * torch.rand(count, dim) - 1) / math.sqrt(count))
        self.centres_per_class = centres_per_class
        self.scale = scale
        self.gamma = gamma
        self.margin = margin
        self.tau = tau

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) in [0, C) to a scalar."""
        K = self.centres_per_class
        centres = self.centres().to(embeddings.dtype)  # (C K, D)
        cosines = (embeddings @ centres.T).view(-1, self.classes, K)  # (B, C, K)
        similarities = (F.softmax(self.gamma * cosines, dim=2) * cosines).sum(dim=2)  # (B, C)
        own = self.own(labels).to(similarities.dtype)  # (B, C)
        logits = self.scale * (similarities - self.margin * own)
        fit = F.cross_entropy(logits, labels, reduction="sum") / max(len(labels), 1)
        return fit + self.tau * _spread(centres.view(self.classes, K, -1))

    def class_centres(self) -> Tensor:
        """The unit mean of the K centres of each class: (C, D), with gradient."""
        return F.normalize(self.centres().view(self.classes, self.centres_per_class, -1).mean(1))

    def centre_labels(self) -> Tensor:
        """The class of each centre: (C K,)."""
        return super().centre_labels().repeat_interleave(self.centres_per_class)

    def centre_of(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The nearest unit centre of the class of each sample: (B, D), with gradient to it."""
        check_labels(labels, self.classes)
        centres = self.centres()  # (C K, D)
        own = centres.view(self.classes, self.centres_per_class, -1)[labels]  # (B, K, D)
        nearest = (own.detach() * embeddings.detach()[:, None, :]).sum(dim=2).argmax(dim=1)
        return centres[labels * self.centres_per_class + nearest]


def _spread(centres: Tensor) -> Tensor:
    """Sum of the distances of two centres of a class, over C K (K - 1): (C, K, D) to a scalar."""
    C, K, _ = centres.shape
    if K == 1:
        return centres.new_zeros(())
    distances = (2.0 + 1e-5 - 2.0 * centres @ centres.mT).sqrt()  # (C, K, K)
    return distances.triu(1).sum() / (C * K * (K - 1))
