"""What is minimised: a loss, plus the regularizers that the job names."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.config.job import Job
from training.config.regularizers import Determinant
from training.losses.proxy_anchor import ProxyAnchorLoss
from training.models.embedding import EmbeddingNet
from training.regularizers.determinant import DeterminantRegularizer


@dataclass(frozen=True)
class Terms:
    """The scalar to minimise and its named parts, for the log."""

    total: Tensor
    parts: dict[str, Tensor]


class Objective(nn.Module):
    """Loss and regularizers with their own parameters (proxies, the second flow).

    All of it runs in float32, whatever the precision of the trunk.

    **Reading.** Under determinant regularization the loss is the mean of both branches, so that its
    scale, and with it the meaning of lambda, is that of the loss alone.

    Args:
        job: its loss and regularizers.
        classes: number of training classes C.
        dim: length D of an embedding.
    """

    def __init__(self, job: Job, classes: int, dim: int) -> None:
        super().__init__()
        self.loss = _loss(job, classes, dim)
        self.second_loss: ProxyAnchorLoss | None = None
        self.determinant: DeterminantRegularizer | None = None
        settings = job.regularizers.determinant
        if settings is not None:
            self.determinant = _determinant(settings, dim)
            if settings.proxies == "separate":
                self.second_loss = _loss(job, classes, dim)

    def forward(self, net: EmbeddingNet, images: Tensor, labels: Tensor) -> Terms:
        """uint8 images (B, 3, S, S) and labels (B,) to the terms."""
        features = net.features(images)
        with torch.autocast(images.device.type, enabled=False):
            if self.determinant is None or net.flow is None:
                loss = self.loss(net.embed(features), labels)
                return Terms(loss, {"loss": loss.detach()})
            duel = self.determinant(features, labels, net.flow)
            second = self.loss if self.second_loss is None else self.second_loss
            loss = (self.loss(duel.first, labels) + second(duel.second, labels)) / 2
        parts = {
            "loss": loss.detach(),
            "determinant": duel.penalty.detach(),
            "r_first": duel.r_first,
            "r_second": duel.r_second,
        }
        return Terms(loss + duel.penalty, parts)


def _loss(job: Job, classes: int, dim: int) -> ProxyAnchorLoss:
    return ProxyAnchorLoss(classes, dim, job.loss.alpha, job.loss.margin)


def _determinant(settings: Determinant, dim: int) -> DeterminantRegularizer:
    return DeterminantRegularizer(
        dim,
        layers=settings.flow.layers,
        hidden=settings.flow.hidden,
        clamp=settings.flow.clamp,
        lambda1=settings.lambda1,
        lambda2=settings.lambda2,
        eps=settings.eps,
        neighbours=settings.neighbours,
        same_class=settings.same_class,
        direction=settings.direction,
        normalize_depth=settings.normalize_depth,
    )
