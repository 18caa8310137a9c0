"""Losses that classify among learnt centres: Proxy-NCA, ArcFace, SoftTriple.

Each classifies a sample by a softmax over its cosines with the centres.
"""

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from kinlens.training.losses.base import ProxyLoss, check_labels, log_sum_exp
from kinlens.training.parts.fields import Count, NotNegative, Positive


class ProxyNCALoss(ProxyLoss):
    r"""Samples are nearer to their own proxy than to the others.

    With d the squared Euclidean distance of unit vectors, 2 - 2 cos:

    .. math::
        \frac{1}{B} \sum_i -\log
            \frac{e^{-\sigma d(x_i, p_{y_i})}}{\sum_{z \ne y_i} e^{-\sigma d(x_i, p_z)}}

    The own proxy is not in the denominator, as in the paper, so the value may be negative; without
    another class it is 0. Computed with logarithms, so no sample underflows.

    References:
        No Fuss Distance Metric Learning using Proxies (Movshovitz-Attias et al., 2017).
        https://arxiv.org/abs/1703.07464

    Args:
        scale: sigma, the sharpness of the softmax.
    """

    def __init__(self, classes: int, dim: int, scale: Positive = 1.0) -> None:
        super().__init__(classes, dim)
        self.scale = scale

    def value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        own = self.own(labels)  # (B, C)
        logits = -self.scale * (2 - 2 * self.cosines(embeddings))  # (B, C)
        others = log_sum_exp(logits, ~own)  # (B,)
        terms = others - logits.where(own, 0).sum(dim=1)  # (B,)
        terms = terms.masked_fill(others.isneginf(), 0.0)
        return terms.sum() / max(len(terms), 1)


class ArcFaceLoss(ProxyLoss):
    r"""Cross-entropy over the cosines with class weights, with a margin added to the own angle.

    With theta_j the angle between a sample and the weight vector of class j:

    .. math::
        \frac{1}{B} \sum_i -\log \frac{e^{s \cos(\theta_{y_i} + m)}}
            {e^{s \cos(\theta_{y_i} + m)} + \sum_{j \ne y_i} e^{s \cos \theta_j}}

    cos(theta + m) rises again beyond theta = pi - m. There it is replaced by cos(theta) - m sin(m),
    as the authors' code does, which keeps falling with theta.

    References:
        ArcFace: Additive Angular Margin Loss for Deep Face Recognition (Deng et al., 2019).
        https://arxiv.org/abs/1801.07698

    Args:
        margin_degrees: the margin m, in degrees.
        scale: the scale s.
    """

    def __init__(
        self,
        classes: int,
        dim: int,
        margin_degrees: Annotated[float, Field(ge=0, lt=90)] = 28.6,
        scale: Positive = 64.0,
    ) -> None:
        super().__init__(classes, dim)
        self.margin = math.radians(margin_degrees)
        self.scale = scale

    def value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        own = self.own(labels)  # (B, C)
        cosines = self.cosines(embeddings)  # (B, C)
        sines = (1 - cosines**2).clamp(min=torch.finfo(cosines.dtype).eps).sqrt()
        shifted = cosines * math.cos(self.margin) - sines * math.sin(self.margin)
        beyond = cosines < -math.cos(self.margin)  # theta > pi - m
        shifted = torch.where(beyond, cosines - self.margin * math.sin(self.margin), shifted)
        logits = self.scale * torch.where(own, shifted, cosines)
        return F.cross_entropy(logits, labels, reduction="sum") / max(len(labels), 1)


class SoftTripleLoss(ProxyLoss):
    r"""Cross-entropy over similarities with classes, where each class has K unit centres w.

    .. math::
        S_{i,c} = \sum_k \frac{e^{\gamma\, x_i \cdot w_c^k}}{\sum_l e^{\gamma\, x_i \cdot w_c^l}}\,
            x_i \cdot w_c^k, \qquad
        \frac{1}{B} \sum_i -\log \frac{e^{\lambda (S_{i,y_i} - \delta)}}
            {e^{\lambda (S_{i,y_i} - \delta)} + \sum_{j \ne y_i} e^{\lambda S_{i,j}}}
        + \frac{\tau}{C K (K - 1)} \sum_c \sum_{k < l} \sqrt{2 + 10^{-5} - 2\, w_c^k \cdot w_c^l}

    The last term pulls the centres of a class together, so that a class uses only as many as it
    needs; it remains for an empty batch. Centres start uniform in +-1 / sqrt(C K), as in the
    authors' code. Here gamma multiplies, while the paper divides by its gamma = 0.1.

    References:
        SoftTriple Loss: Deep Metric Learning Without Triplet Sampling (Qian et al., 2019).
        https://arxiv.org/abs/1909.05235

    Args:
        centres_per_class: K, at most the images of a class.
        scale: lambda, the sharpness of the softmax.
        gamma: sharpness of the choice among the centres of a class.
        margin: delta, between similarities with the own class and another.
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

    def value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
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
