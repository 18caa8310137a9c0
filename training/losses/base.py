"""Common base of the losses: full precision, sums of exponentials, learnt proxies, Matryoshka.

Shapes: B samples, D dimensions, C classes. docs/methods.md documents how each paper was read, and
differences to other libraries.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from kinlens.embedder.errors import TrainingError


class MetricLoss(nn.Module):
    """Embeddings (B, D) and labels (B,) to a scalar, in float32 or wider whatever the autocast.

    Embeddings are unit vectors unless `normalized` is False. They are converted to the widest of
    their own dtype, float32 and the dtypes of the parameters.
    """

    normalized: bool = True

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        for parameter in self.parameters():
            dtype = torch.promote_types(dtype, parameter.dtype)
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.value(embeddings.to(dtype), labels)

    def value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The formula of the loss; 0 without samples or pairs, unless documented otherwise."""
        raise NotImplementedError


class ProxyLoss(MetricLoss):
    """A loss with proxies: learnt vectors, one or more per class, whose length does not matter.

    They start as given, or (C, D) from N(0, 2 / C) (Kaiming, fan-out), like those of Proxy-Anchor's
    authors. Labels are class numbers in [0, C); any other is a TrainingError.
    """

    def __init__(self, classes: int, dim: int, proxies: Tensor | None = None) -> None:
        super().__init__()
        self.classes = classes
        if proxies is None:
            proxies = torch.randn(classes, dim) * math.sqrt(2.0 / classes)
        self.proxies = nn.Parameter(proxies)

    def centres(self) -> Tensor:
        """The proxies as unit rows (C, D), with gradient, in float32 or wider."""
        wide = torch.promote_types(self.proxies.dtype, torch.float32)
        return F.normalize(self.proxies.to(wide), dim=1)

    def class_centres(self) -> Tensor:
        """One unit centre per class: (C, D), with gradient."""
        return self.centres()

    def centre_labels(self) -> Tensor:
        return torch.arange(self.classes, device=self.proxies.device)

    def centre_of(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The unit centre of the class of each sample: (B, D), with gradient to the proxies."""
        del embeddings  # there is only one centre per class
        check_labels(labels, self.classes)
        return self.centres()[labels]

    def cosines(self, embeddings: Tensor) -> Tensor:
        """Cosine of each sample with each proxy: (B, C)."""
        return embeddings @ F.normalize(self.proxies.to(embeddings.dtype), dim=1).T

    def own(self, labels: Tensor) -> Tensor:
        """True at the proxy of the sample's class: (B, C)."""
        check_labels(labels, self.classes)
        return labels[:, None] == torch.arange(self.classes, device=labels.device)


def check_labels(labels: Tensor, classes: int) -> None:
    """Refuse labels that are not class numbers; on the CPU only, where reading needs no sync.

    On a GPU the losses trust the labels: the trainer checks all once. Raises: TrainingError.
    """
    if labels.device.type != "cpu":
        return
    outside = labels[(labels < 0) | (labels >= classes)]
    if len(outside) > 0:
        raise TrainingError(
            f"The label {int(outside[0])} is not in 0..{classes - 1}, the {classes} classes of "
            f"this loss. Number the training classes from 0 without gaps."
        )


def log_sum_exp(exponents: Tensor, mask: Tensor, dim: int = 1) -> Tensor:
    """log(sum of exp(exponents) over the entries in mask along dim); -inf without an entry."""
    return torch.logsumexp(exponents.masked_fill(~mask, -torch.inf), dim=dim)


def log_1p_sum_exp(exponents: Tensor, mask: Tensor, dim: int) -> Tensor:
    """log(1 + sum of exp(exponents) over the entries in mask along dim); 0 without an entry."""
    return F.softplus(log_sum_exp(exponents, mask, dim))


def matryoshka(
    loss: nn.Module, embeddings: Tensor, labels: Tensor, dims: Sequence[int] = ()
) -> Tensor:
    r"""Matryoshka, a loss of embeddings whose first numbers are embeddings too: the mean over the
    first n numbers, for n = D and each of `dims`,

    .. math:: \frac{1}{|M|} \sum_{n \in M} L(x_{1:n}, y), \qquad M = \{D\} \cup \text{dims}

    The first n numbers have unit length again, unless the loss has `normalized = False`. Learnt
    vectors of length D, such as proxies, are cut in the same way, so all n share them.

    References:
        Matryoshka Representation Learning (Kusupati et al., 2022), eq. 1 with equal weights; shared
        vectors are its MRL-E (section 3). https://arxiv.org/abs/2205.13147

    Args:
        loss: maps embeddings (B, D) and labels (B,) to a scalar.
        embeddings: of any length, (B, D).
        labels: (B,).
        dims: each from 1 to D.
    """
    width = embeddings.shape[1]
    values = []
    for n in sorted({*dims, width}):
        first = embeddings[:, :n]
        if getattr(loss, "normalized", True):
            first = F.normalize(first, dim=1)
        cut = {
            name: parameter[..., :n]
            for name, parameter in loss.named_parameters()
            if n < width and parameter.ndim > 1 and parameter.shape[-1] == width
        }
        values.append(functional_call(loss, cut, (first, labels)) if cut else loss(first, labels))
    return torch.stack(values).mean()
