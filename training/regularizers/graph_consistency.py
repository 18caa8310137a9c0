"""Graph consistency: two draws of the same classes should have equal graphs of similarities."""

import torch
from torch import Tensor

from kinlens.training.config.settings import GraphConsistency


def graph_consistency(first: Tensor, second: Tensor, settings: GraphConsistency) -> Tensor:
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
