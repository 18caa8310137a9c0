"""Distillation: embeddings should be as similar to each other as a larger network finds them."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from kinlens.training.fields import Positive
from kinlens.training.losses.base import MetricLoss
from kinlens.training.regularizers.base import Regularizer


class DistillationRegularizer(Regularizer):
    r"""Pull the cosines of a batch to those of a teacher.

    With unit embeddings x of the network and t of the teacher, of any two lengths:

    .. math:: R = \frac{1}{B (B - 1)} \sum_{i \ne j} (x_i^T x_j - t_i^T t_j)^2

    The teacher is a bundle. It embeds each training image once, as it is served.

    References:
        Similarity-Preserving Knowledge Distillation (Tung and Mori, 2019), eq. 4, here with cosines
        in place of products divided by the norm of their row. https://arxiv.org/abs/1907.09682

    Args:
        teacher: folder of the bundle of the teacher; may contain `~` and `$VARIABLES`.
        weight: weight of the regularizer.
    """

    needs: ClassVar[Mapping[str, str]] = {"teacher": ""}

    def __init__(self, teacher: str, weight: Positive = 1.0) -> None:
        super().__init__()
        self.teacher = teacher
        self.weight = weight

    def forward(self, embeddings: Tensor, taught: Tensor, loss: MetricLoss | None = None) -> Tensor:
        """Embeddings (B, D) and those of the teacher (B, T) to a scalar; 0 for fewer than two."""
        del loss
        count = len(embeddings)
        differences = embeddings @ embeddings.T - (taught @ taught.T).to(embeddings)  # (B, B)
        others = ~torch.eye(count, dtype=torch.bool, device=embeddings.device)
        value: Tensor = (differences * others).square().sum() / max(count * (count - 1), 1)
        return value
