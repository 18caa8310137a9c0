"""Graph consistency: two draws of the same classes are to have the same graph of similarities."""

import torch
from torch import Tensor, nn

from training.config import settings as config


class GraphConsistency(nn.Module):
    r"""Press the graphs of two draws X', X'' of the same classes to be equal.

    Row i of both draws is an image of the same class. With

    .. math:: S_{ij} = \exp(-\lVert x_i - x_j \rVert^2 / \sigma)

    for each draw, the two forms are

    .. math::
        \text{graph:} \quad L_{gc} = \lVert S' - S'' \rVert_F^2, \qquad
        \text{bound:} \quad L_{GC} = \lVert S' X' - S'' X'' \rVert_F

    A graph that does not depend on which images were drawn has compact classes. The paper trains
    with L_GC, since rounding hides small differences of S in L_gc.

    What is bounded: if the N rows of X' are linearly independent (so N <= D) and X'^+ is its
    pseudo-inverse, then

    .. math:: \lVert S' - S'' \rVert_F \le
        \bigl(L_{GC} + \lVert S'' \rVert_F \lVert X'' - X' \rVert_F\bigr) \lVert X'^+ \rVert_F

    The paper states this without the condition, which its proof needs (X' X'^+ = 1), and trains
    with L_GC alone: the other factors would shrink S'' and swell X'. L_GC alone is no bound.

    **Readings.** The paper gives no sigma: 1 on unit vectors. Its rows are the embeddings that the
    metric loss sees. Nothing is divided by N, as printed; L_GC grows about as N sqrt(N), L_gc
    as N^2. The paper's weights (0.001 for Triplet, 0.002 for N-Pair and Binomial deviance) stand
    beside losses that it prints as sums over N = 130 images; ours are means, so that beside them
    the same weight counts up to N times as much.

    References:
        Deep Metric Learning with Graph Consistency (Chen et al., 2021), eq. 1 (L_gc), 2 (the
        inequality) and 3 (L_GC). https://ojs.aaai.org/index.php/AAAI/article/view/16182

    Args:
        settings: `sigma`, the width of the kernel in squared units of the embeddings, and `form`,
            "bound" (L_GC) or "graph" (L_gc).
    """

    def __init__(self, settings: config.GraphConsistency) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Draws X', X'' (N, D), same classes in the same order, to a scalar in float32 or wider.

        Equal draws give 0 with a gradient of 0. N = 0 gives 0.

        Raises:
            ValueError: if the draws differ in shape.
        """
        if first.shape != second.shape:
            raise ValueError(f"draws {tuple(first.shape)} and {tuple(second.shape)} do not pair up")
        wide = torch.promote_types(first.dtype, torch.float32)
        first, second = first.to(wide), second.to(wide)
        with torch.autocast(first.device.type, enabled=False):
            s_first, s_second = (
                adjacency(first, self.settings.sigma),
                adjacency(second, self.settings.sigma),
            )
            if self.settings.form == "graph":
                return (s_first - s_second).square().sum()
            # A matrix norm by torch has the subgradient 0 at 0; sqrt would give NaN.
            difference: Tensor = s_first @ first - s_second @ second  # (N, D)
            norm: Tensor = torch.linalg.vector_norm(difference)
            return norm


def adjacency(points: Tensor, sigma: float) -> Tensor:
    """S_ij = exp(-|x_i - x_j|^2 / sigma): (N, D) to (N, N)."""
    squares = points.square().sum(1)  # (N,)
    distances = squares[:, None] + squares[None, :] - 2 * points @ points.T  # (N, N), squared
    return torch.exp(-distances / sigma)
