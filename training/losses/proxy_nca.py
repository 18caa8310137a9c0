"""Proxy-NCA: each sample compares its own proxy with all the others."""

from torch import Tensor

from training.losses.log_sum_exp import log_sum_exp
from training.losses.precision import full_precision
from training.losses.proxies import ProxyLoss, normal_proxies


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
        classes: number of classes C.
        dim: length D of an embedding.
        scale: sigma.
    """

    def __init__(self, classes: int, dim: int, scale: float = 1.0) -> None:
        super().__init__(normal_proxies(classes, dim), classes)
        self.scale = scale

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) in [0, C) to a scalar; an empty batch gives 0.

        Raises: TrainingError if a label is not in [0, C).
        """
        own = self.own(labels)  # (B, C)
        logits = -self.scale * (2 - 2 * self.cosines(embeddings))  # (B, C)
        others = log_sum_exp(logits, ~own)  # (B,)
        terms = (others - logits[own]).masked_fill(others.isneginf(), 0.0)  # (B,)
        return terms.sum() / max(len(terms), 1)
