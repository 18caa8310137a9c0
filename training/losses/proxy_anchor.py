"""Proxy-Anchor: every class has a proxy, and the proxies are the anchors."""

from torch import Tensor

from training.config.settings import Positive
from training.losses.numerics import full_precision, log_1p_sum_exp
from training.losses.proxies import ProxyLoss


class ProxyAnchorLoss(ProxyLoss):
    r"""Pull the samples of a class towards its proxy, push all others away, hard ones more.

    With s(x, p) the cosine of sample x and proxy p, P+ the proxies with a sample in the batch, X_p+
    the samples of p's class and X_p- the rest:

    .. math::
        \frac{1}{|P^+|} \sum_{p \in P^+}
            \log\Bigl(1 + \sum_{x \in X_p^+} e^{-\alpha (s(x,p) - \delta)}\Bigr)
        + \frac{1}{|P|} \sum_p
            \log\Bigl(1 + \sum_{x \in X_p^-} e^{\alpha (s(x,p) + \delta)}\Bigr)

    References:
        Proxy Anchor Loss for Deep Metric Learning (Kim et al., 2020), eq. 4.
        https://arxiv.org/abs/2003.13911

    Args:
        classes, dim: see ProxyLoss.
        alpha: scale of the cosines.
        margin: delta.
    """

    def __init__(self, classes: int, dim: int, alpha: Positive = 32.0, margin: float = 0.1) -> None:
        super().__init__(classes, dim)
        self.alpha = alpha
        self.margin = margin

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) in [0, C) to a scalar; an empty batch gives 0."""
        cosines, own = self.cosines(embeddings), self.own(labels)  # (B, C) each
        push = log_1p_sum_exp(self.alpha * (cosines + self.margin), ~own, dim=0)  # (C,)
        return pull_to_proxies(cosines, own, self.alpha, self.margin) + push.mean()


def pull_to_proxies(cosines: Tensor, own: Tensor, alpha: float, margin: float) -> Tensor:
    """The first term of the loss: cosines (B, C) and which are of the own class, to a scalar."""
    pull = log_1p_sum_exp(-alpha * (cosines - margin), own, dim=0)  # (C,)
    return pull.sum() / own.any(dim=0).sum().clamp(min=1)
