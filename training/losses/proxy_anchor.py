"""Losses whose anchors are proxies: Proxy-Anchor, and two that separate proxies directly."""

import torch
from torch import Tensor

from kinlens.training.losses.base import ProxyLoss, log_1p_sum_exp
from kinlens.training.parts.fields import Positive


class ProxyAnchorLoss(ProxyLoss):
    r"""Pull samples to their proxy, push others away, hard ones more.

    With s(x, p) the cosine of sample x and proxy p, P+ the proxies with a sample in the batch, X_p+
    the samples of p's class and X_p- the others:

    .. math::
        \frac{1}{|P^+|} \sum_{p \in P^+}
            \log\Bigl(1 + \sum_{x \in X_p^+} e^{-\alpha (s(x,p) - \delta)}\Bigr)
        + \frac{1}{|P|} \sum_p
            \log\Bigl(1 + \sum_{x \in X_p^-} e^{\alpha (s(x,p) + \delta)}\Bigr)

    References:
        Proxy Anchor Loss for Deep Metric Learning (Kim et al., 2020), eq. 4.
        https://arxiv.org/abs/2003.13911

    Args:
        alpha: sharpness of the choice of hard samples.
        margin: delta, subtracted from cosines that are to grow, added to the others.
    """

    def __init__(self, classes: int, dim: int, alpha: Positive = 32.0, margin: float = 0.1) -> None:
        super().__init__(classes, dim)
        self.alpha = alpha
        self.margin = margin

    def value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        cosines, own = self.cosines(embeddings), self.own(labels)  # (B, C) each
        push = log_1p_sum_exp(self.alpha * (cosines + self.margin), ~own, dim=0)  # (C,)
        return self.pull(cosines, own) + push.mean()

    def pull(self, cosines: Tensor, own: Tensor) -> Tensor:
        """The first term: cosines (B, C) and the mask of the own class, to a scalar."""
        pull = log_1p_sum_exp(-self.alpha * (cosines - self.margin), own, dim=0)  # (C,)
        return pull.sum() / own.any(dim=0).sum().clamp(min=1)


class ProxySeparationLoss(ProxyAnchorLoss):
    r"""Proxy-Anchor whose negatives are the other proxies; the paper's OurLoss1.

    Its second term:

    .. math::
        \frac{1}{|P|} \sum_p
            \log\Bigl(1 + \sum_{q \ne p} e^{\alpha (p \cdot q + \delta)}\Bigr)

    It remains for an empty batch. Memory grows with C^2: 2.3 GB for 11,318 classes.

    References:
        Metric Learning: A Deep Dive (Psomas, 2020), section "Our method", OurLoss1.

    Args:
        alpha: sharpness of the choice of hard samples and near proxies.
        margin: delta, subtracted from cosines that are to grow, added to the others.
    """

    def value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        own = self.own(labels)  # (B, C)
        pull = self.pull(self.cosines(embeddings), own)
        return pull + push_apart(self.centres().to(embeddings.dtype), self.alpha, self.margin)


class BatchProxySeparationLoss(ProxyAnchorLoss):
    r"""Proxy separation with proxies compared through the batch; the paper's OurLoss2.

    p . q becomes the sum over the samples x of (p . x)(x . q), which grows with the batch, as
    printed. For an empty batch a constant remains.

    References:
        Metric Learning: A Deep Dive (Psomas, 2020), section "Our method", OurLoss2.

    Args:
        alpha: sharpness of the choice of hard samples and near proxies.
        margin: delta, subtracted from cosines that are to grow, added to the others.
    """

    def value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        cosines = self.cosines(embeddings)  # (B, C)
        pull = self.pull(cosines, self.own(labels))
        # Products of the rows of (C, B) are the sums over x of (p . x)(x . q).
        return pull + push_apart(cosines.T, self.alpha, self.margin)


def push_apart(rows: Tensor, alpha: float, margin: float) -> Tensor:
    """Mean over rows w of log(1 + sum over v != w of e^(alpha (w . v + margin))): (C, N) to (,)."""
    other = ~torch.eye(len(rows), dtype=torch.bool, device=rows.device)  # (C, C)
    return log_1p_sum_exp(alpha * (rows @ rows.T + margin), other, dim=1).mean()
