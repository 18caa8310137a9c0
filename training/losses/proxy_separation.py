"""Proxy separation: samples are pulled to proxies, and proxies push each other apart."""

from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from training.config.settings import Positive
from training.losses.numerics import full_precision, log_1p_sum_exp
from training.losses.proxies import ProxyLoss
from training.losses.proxy_anchor import pull_to_proxies

CHUNK = 2048


class ProxySeparationLoss(ProxyLoss):
    r"""Proxy-Anchor whose negatives are the other proxies; the paper's OurLoss1.

    .. math::
        \frac{1}{|W^+|} \sum_{w \in W^+}
            \log\Bigl(1 + \sum_{x \in X_w^+} e^{-\alpha (w \cdot x - \lambda)}\Bigr)
        + \frac{1}{|W|} \sum_w
            \log\Bigl(1 + \sum_{w^- \ne w} e^{\alpha (w \cdot w^- + \lambda)}\Bigr)

    An empty batch leaves the second term. Its C^2 cosines are held for 2,048 proxies at a time and
    computed again for the gradient: 0.4 GB instead of 2.3 GB at the peak for 11,318 classes.

    **Reading.** The paper gives no values for alpha and lambda: those of Proxy-Anchor.

    References:
        Metric Learning: A Deep Dive (Psomas, 2020), section "Our method", OurLoss1.

    Args:
        classes, dim: see ProxyLoss.
        alpha: scale of the cosines.
        margin: lambda.
    """

    def __init__(self, classes: int, dim: int, alpha: Positive = 32.0, margin: float = 0.1) -> None:
        super().__init__(classes, dim)
        self.alpha = alpha
        self.margin = margin

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) in [0, C) to a scalar."""
        own = self.own(labels)  # (B, C)
        pull = pull_to_proxies(self.cosines(embeddings), own, self.alpha, self.margin)
        return pull + push_apart(self.centres().to(embeddings.dtype), self.alpha, self.margin)


class BatchProxySeparationLoss(ProxyLoss):
    r"""Proxy separation with proxies compared through the batch; the paper's OurLoss2.

    .. math::
        \frac{1}{|W^+|} \sum_{w \in W^+}
            \log\Bigl(1 + \sum_{x \in X_w^+} e^{-\alpha (w \cdot x - \lambda)}\Bigr)
        + \frac{1}{|W|} \sum_w \log\Bigl(1 + \sum_{w^- \ne w}
            e^{\alpha (\sum_{x \in X} (w \cdot x)(x \cdot w^-) + \lambda)}\Bigr)

    An empty batch leaves the second term with an empty inner sum, a constant.

    **Readings.** The paper gives no values for alpha and lambda: those of Proxy-Anchor. The inner
    sum, as printed, grows with the batch; `over_batch = "mean"` does not. Memory: see
    ProxySeparationLoss.

    References:
        Metric Learning: A Deep Dive (Psomas, 2020), section "Our method", OurLoss2.

    Args:
        classes, dim: see ProxyLoss.
        alpha: scale of the similarities.
        margin: lambda.
        over_batch: "sum" or "mean" over x in X.
    """

    def __init__(
        self,
        classes: int,
        dim: int,
        alpha: Positive = 32.0,
        margin: float = 0.1,
        over_batch: Literal["sum", "mean"] = "sum",
    ) -> None:
        super().__init__(classes, dim)
        self.alpha = alpha
        self.margin = margin
        self.over_batch = over_batch

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) in [0, C) to a scalar."""
        cosines = self.cosines(embeddings)  # (B, C)
        pull = pull_to_proxies(cosines, self.own(labels), self.alpha, self.margin)
        seen = cosines.T  # (C, B), so that w . v becomes the sum over x of (w . x)(x . v)
        if self.over_batch == "mean":
            seen = seen / max(len(labels), 1) ** 0.5
        return pull + push_apart(seen, self.alpha, self.margin)


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
    """The terms of `some` rows (n, N), the first of which is rows[start]: (n,)."""
    number = torch.arange(len(rows), device=rows.device)
    other = number[None, :] != number[start : start + len(some), None]  # (n, C)
    return log_1p_sum_exp(alpha * (some @ rows.T + margin), other, dim=1)
