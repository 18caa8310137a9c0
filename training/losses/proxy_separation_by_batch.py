"""Proxy separation by the batch ("OurLoss2"): how alike two proxies are, as the samples see it."""

from typing import Literal

from torch import Tensor

from training.losses.precision import full_precision
from training.losses.proxies import ProxyLoss, normal_proxies
from training.losses.proxy_anchor import pull_to_proxies
from training.losses.proxy_separation import push_apart

OverBatch = Literal["sum", "mean"]


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
        classes: number of classes C.
        dim: length D of an embedding.
        alpha: scale of the similarities.
        margin: lambda.
        over_batch: "sum" or "mean" over x in X.
    """

    def __init__(
        self,
        classes: int,
        dim: int,
        alpha: float = 32.0,
        margin: float = 0.1,
        over_batch: OverBatch = "sum",
    ) -> None:
        super().__init__(normal_proxies(classes, dim), classes)
        self.alpha = alpha
        self.margin = margin
        self.over_batch = over_batch

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Unit embeddings (B, D), labels (B,) in [0, C) to a scalar.

        Raises: TrainingError if a label is not in [0, C).
        """
        cosines = self.cosines(embeddings)  # (B, C)
        pull = pull_to_proxies(cosines, self.own(labels), self.alpha, self.margin)
        seen = cosines.T  # (C, B), so that w . v becomes the sum over x of (w . x)(x . v)
        if self.over_batch == "mean":
            seen = seen / max(len(labels), 1) ** 0.5
        return pull + push_apart(seen, self.alpha, self.margin)
