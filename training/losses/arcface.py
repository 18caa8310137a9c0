"""ArcFace: classification by angle, with an angular margin for the own class."""

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from training.config.settings import Positive
from training.losses.numerics import full_precision
from training.losses.proxies import ProxyLoss


class ArcFaceLoss(ProxyLoss):
    r"""Cross-entropy over the cosines with class weights, the own angle enlarged by a margin.

    With theta_j the angle between a sample and the weight vector of class j:

    .. math::
        \frac{1}{B} \sum_i -\log \frac{e^{s \cos(\theta_{y_i} + m)}}
            {e^{s \cos(\theta_{y_i} + m)} + \sum_{j \ne y_i} e^{s \cos \theta_j}}

    cos(theta + m) rises again beyond theta = pi - m. There it is replaced by cos(theta) - m sin(m),
    as the authors' code does, which keeps falling with theta. No cosine is clamped from below:
    negative ones count like the others.

    References:
        ArcFace: Additive Angular Margin Loss for Deep Face Recognition (Deng et al., 2019).
        https://arxiv.org/abs/1801.07698

    Args:
        classes, dim: see ProxyLoss.
        margin_degrees: m.
        scale: s.
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

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) in [0, C) to a scalar; an empty batch gives 0."""
        own = self.own(labels)  # (B, C)
        cosines = self.cosines(embeddings)  # (B, C)
        logits = self.scale * torch.where(own, self._with_margin(cosines), cosines)
        return F.cross_entropy(logits, labels, reduction="sum") / max(len(labels), 1)

    def _with_margin(self, cosines: Tensor) -> Tensor:
        sines = (1 - cosines**2).clamp(min=torch.finfo(cosines.dtype).eps).sqrt()
        shifted = cosines * math.cos(self.margin) - sines * math.sin(self.margin)
        beyond = cosines < -math.cos(self.margin)  # theta > pi - m
        return torch.where(beyond, cosines - self.margin * math.sin(self.margin), shifted)
