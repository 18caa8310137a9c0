"""Graph consistency: two draws of the same classes should have equal graphs of similarities."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from kinlens.training.losses.base import MetricLoss
from kinlens.training.parts.fields import Positive
from kinlens.training.regularizers.base import Regularizer


class GraphConsistencyRegularizer(Regularizer):
    """Graph consistency of the two halves of a batch, see `graph_consistency`.

    Args:
        weight: weight of the regularizer.
        sigma: similarity of two images: exp(-squared distance / sigma).
        form: what is compared: similarities times embeddings, as the paper trains, or similarities.
    """

    needs = {"draws": ""}

    def __init__(
        self,
        weight: Positive = 0.001,
        sigma: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0,
        form: Literal["bound", "graph"] = "bound",
    ) -> None:
        super().__init__()
        self.weight, self.sigma, self.form = weight, sigma, form

    def forward(self, embeddings: Tensor, labels: Tensor, loss: MetricLoss | None = None) -> Tensor:
        del labels, loss  # both draws have the same classes in the same order
        first, second = embeddings.chunk(2)
        return graph_consistency(first, second, self)


def graph_consistency(
    first: Tensor, second: Tensor, settings: GraphConsistencyRegularizer
) -> Tensor:
    r"""Penalise the difference of the graphs of two draws X', X'' of the same classes.

    Row i of both draws (N, D) is an image of the same class. With

    .. math:: S_{ij} = \exp(-\lVert x_i - x_j \rVert^2 / \sigma)

    for each draw, the two forms are

    .. math::
        \text{graph:} \quad L_{gc} = \lVert S' - S'' \rVert_F^2, \qquad
        \text{bound:} \quad L_{GC} = \lVert S' X' - S'' X'' \rVert_F

    A graph that is independent of the drawn images has compact classes. The paper trains with L_GC,
    since rounding hides small differences of S in L_gc; nothing is divided by N.

    References:
        Deep Metric Learning with Graph Consistency (Chen et al., 2021), eq. 1 (L_gc), 2 (the
        inequality) and 3 (L_GC). https://ojs.aaai.org/index.php/AAAI/article/view/16182

    The scalar is in float32 or wider. Equal draws give 0 with a gradient of 0; N = 0 gives 0.
    """
    wide = torch.promote_types(first.dtype, torch.float32)
    first, second = first.to(wide), second.to(wide)
    with torch.autocast(first.device.type, enabled=False):
        s_first, s_second = (adjacency(x, settings.sigma) for x in (first, second))
        if settings.form == "graph":
            return (s_first - s_second).square().sum()
        # torch's matrix norm has the subgradient 0 at 0; sqrt would give NaN.
        difference: Tensor = s_first @ first - s_second @ second  # (N, D)
        norm: Tensor = torch.linalg.vector_norm(difference)
        return norm


def adjacency(points: Tensor, sigma: float) -> Tensor:
    """S_ij = exp(-|x_i - x_j|^2 / sigma): (N, D) to (N, N)."""
    squares = points.square().sum(1)  # (N,)
    distances = squares[:, None] + squares[None, :] - 2 * points @ points.T  # (N, N), squared
    return torch.exp(-distances / sigma)
