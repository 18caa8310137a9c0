"""Losses whose anchors are proxies: Proxy-Anchor, and two that separate proxies directly."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kinlens.training.fields import Positive
from kinlens.training.losses.base import ProxyLoss, log_1p_sum_exp

CHUNK = 2048  # proxies that are compared with all others at a time


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

    It remains for an empty batch. Its C^2 cosines are computed for 2,048 proxies at a time and
    recomputed for the gradient: 0.4 GB instead of 2.3 GB at the peak for 11,318 classes.

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
    if len(rows) <= CHUNK:
        return _push(rows, rows, 0, alpha, margin).mean()
    parts: list[Tensor] = []
    for start in range(0, len(rows), CHUNK):
        some = rows[start : start + CHUNK]
        part = checkpoint(
            _push, some, rows, start, alpha, margin, use_reentrant=False, preserve_rng_state=False
        )
        assert isinstance(part, Tensor)
        parts.append(part)
    return torch.cat(parts).mean()


def _push(some: Tensor, rows: Tensor, start: int, alpha: float, margin: float) -> Tensor:
    """The terms of `some` rows (n, N), which start at rows[start]: (n,)."""
    number = torch.arange(len(rows), device=rows.device)
    other = number[None, :] != number[start : start + len(some), None]  # (n, C)
    return log_1p_sum_exp(alpha * (some @ rows.T + margin), other, dim=1)
