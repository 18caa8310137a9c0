"""Proxy separation ("OurLoss1"): samples are pulled to proxies, proxies push each other apart."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from training.losses.log_sum_exp import log_1p_sum_exp
from training.losses.precision import full_precision
from training.losses.proxies import ProxyLoss, normal_proxies
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
        classes: number of classes C.
        dim: length D of an embedding.
        alpha: scale of the cosines.
        margin: lambda.
    """

    def __init__(self, classes: int, dim: int, alpha: float = 32.0, margin: float = 0.1) -> None:
        super().__init__(normal_proxies(classes, dim), classes)
        self.alpha = alpha
        self.margin = margin

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) in [0, C) to a scalar.

        Raises: TrainingError if a label is not in [0, C).
        """
        own = self.own(labels)  # (B, C)
        pull = pull_to_proxies(self.cosines(embeddings), own, self.alpha, self.margin)
        return pull + push_apart(self.centres().to(embeddings.dtype), self.alpha, self.margin)


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
