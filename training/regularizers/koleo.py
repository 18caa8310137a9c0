"""KoLeo: embeddings of a batch should be spread evenly over the sphere."""

import torch
from torch import Tensor

from kinlens.training.losses.base import MetricLoss
from kinlens.training.parts.fields import Positive
from kinlens.training.regularizers.base import Regularizer

_EPS = 1e-8


class KoLeoRegularizer(Regularizer):
    r"""Push each embedding away from its nearest neighbour in the batch.

    With d_i the Euclidean distance of unit embedding i to the nearest other one of the batch:

    .. math:: R = -\frac{1}{B} \sum_i \log(d_i + \epsilon), \qquad \epsilon = 10^{-8}

    This is the estimate of Kozachenko and Leonenko of the differential entropy, up to constants.
    Neighbours may be of any class, as in the papers.

    References:
        Spreading vectors for similarity search (Sablayrolles et al., 2019), section 3.
        https://arxiv.org/abs/1806.03198. DINOv2 (Oquab et al., 2023), section 4, which has it at
        weight 0.1. https://arxiv.org/abs/2304.07193

    Args:
        weight: weight of the regularizer.
    """

    def __init__(self, weight: Positive = 0.1) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, embeddings: Tensor, labels: Tensor, loss: MetricLoss | None = None) -> Tensor:
        """Embeddings (B, D) to a scalar; 0 for fewer than two."""
        del labels, loss
        if len(embeddings) < 2:
            return embeddings.sum() * 0.0
        with torch.no_grad():
            cosines = embeddings @ embeddings.T  # (B, B)
            nearest = cosines.fill_diagonal_(-torch.inf).argmax(dim=1)  # (B,)
        # The norm has the gradient 0 at equal embeddings; their logarithm stays finite.
        distances = torch.linalg.vector_norm(embeddings - embeddings[nearest], dim=1)
        value: Tensor = -torch.log(distances + _EPS).mean()
        return value
