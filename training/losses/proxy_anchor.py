"""Proxy-Anchor: every class has a proxy, and the proxies are the anchors."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ProxyAnchorLoss(nn.Module):
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
        classes: number of classes C.
        dim: length D of an embedding.
        alpha: scale of the cosines.
        margin: delta.
    """

    def __init__(self, classes: int, dim: int, alpha: float = 32.0, margin: float = 0.1) -> None:
        super().__init__()
        self.alpha = alpha
        self.margin = margin
        self.proxies = nn.Parameter(torch.randn(classes, dim) * math.sqrt(2.0 / classes))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) in [0, C) to a scalar, in float32 or wider.

        An empty batch gives 0.
        """
        embeddings = embeddings.to(torch.promote_types(embeddings.dtype, self.proxies.dtype))
        with torch.autocast(embeddings.device.type, enabled=False):
            cosines = embeddings @ F.normalize(self.proxies, dim=1).to(embeddings.dtype).T  # (B, C)
            positive = F.one_hot(labels, len(self.proxies)).bool()  # (B, C)
            pull = _log_1p_sum_exp(-self.alpha * (cosines - self.margin), positive)  # (C,)
            push = _log_1p_sum_exp(self.alpha * (cosines + self.margin), ~positive)  # (C,)
            present = positive.any(dim=0).sum().clamp(min=1)
            return pull.sum() / present + push.mean()


def _log_1p_sum_exp(exponents: Tensor, mask: Tensor) -> Tensor:
    """log(1 + sum of exp(exponents) over the rows in mask): (B, C) to (C,); 0 without a row."""
    masked = exponents.masked_fill(~mask, -torch.inf)
    return torch.logsumexp(F.pad(masked, (0, 0, 0, 1)), dim=0)
