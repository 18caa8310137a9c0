"""Proxy-NCA: each sample compares its own proxy with all the others."""

from torch import Tensor

from training.config.settings import Positive
from training.losses.numerics import full_precision, log_sum_exp
from training.losses.proxies import ProxyLoss


class ProxyNCALoss(ProxyLoss):
    r"""Be nearer to the own proxy than to the other proxies.

    With d the squared Euclidean distance of unit vectors, 2 - 2 cos:

    .. math::
        \frac{1}{B} \sum_i -\log
            \frac{e^{-\sigma d(x_i, p_{y_i})}}{\sum_{z \ne y_i} e^{-\sigma d(x_i, p_z)}}

    The own proxy is not in the denominator, as in the paper (Proxy-NCA++ puts it there), so the
    value may be negative. Computed with logarithms: no sample underflows. Without another class
    the loss is 0.

    **Reading.** sigma = 1 is the paper's formula for unit vectors; the benchmark prints e^(w . x),
    which is sigma = 1/2. Both press softly: searches on validation classes found 8 to 14.

    References:
        No Fuss Distance Metric Learning using Proxies (Movshovitz-Attias et al., 2017).
        https://arxiv.org/abs/1703.07464

    Args:
        classes, dim: see ProxyLoss.
        scale: sigma.
    """

    def __init__(self, classes: int, dim: int, scale: Positive = 1.0) -> None:
        super().__init__(classes, dim)
        self.scale = scale

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) in [0, C) to a scalar; an empty batch gives 0."""
        own = self.own(labels)  # (B, C)
        logits = -self.scale * (2 - 2 * self.cosines(embeddings))  # (B, C)
        others = log_sum_exp(logits, ~own)  # (B,)
        terms = others - logits.where(own, 0).sum(dim=1)  # (B,)
        terms = terms.masked_fill(others.isneginf(), 0.0)
        return terms.sum() / max(len(terms), 1)
