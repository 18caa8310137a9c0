"""What the losses with a learnt vector per class have in common."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embedder.errors import TrainingError


class ProxyLoss(nn.Module):
    """A loss with proxies: learnt vectors, one per class, whose length does not matter.

    Args:
        proxies: their start values (C, D), kept as the parameter `proxies`.
        classes: number of classes C.
    """

    normalized: bool = True

    def __init__(self, proxies: Tensor, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.proxies = nn.Parameter(proxies)

    def centres(self) -> Tensor:
        """The proxies as unit rows (C, D), with gradient, in float32 or wider."""
        return _unit(self.proxies, torch.promote_types(self.proxies.dtype, torch.float32))

    def class_centres(self) -> Tensor:
        """One unit centre per class: (C, D), with gradient."""
        return self.centres()

    def centre_labels(self) -> Tensor:
        """The class of each centre: (C,)."""
        return torch.arange(self.classes, device=self.proxies.device)

    def centre_of(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The unit centre of the class of each sample: (B, D), with gradient to the proxies.

        Raises: TrainingError if a label is not in [0, C).
        """
        del embeddings  # one centre per class: no choice to make
        check_labels(labels, self.classes)
        return self.centres()[labels]

    def cosines(self, embeddings: Tensor) -> Tensor:
        """Cosine of each sample with each proxy: (B, C)."""
        return embeddings @ _unit(self.proxies, embeddings.dtype).T

    def own(self, labels: Tensor) -> Tensor:
        """True where the proxy is that of the sample's class: (B, C).

        Raises: TrainingError if a label is not in [0, C).
        """
        check_labels(labels, self.classes)
        return F.one_hot(labels, self.classes).bool()


def normal_proxies(classes: int, dim: int) -> Tensor:
    """Start values N(0, 2 / C) (Kaiming, fan-out), as Proxy-Anchor's authors draw them: (C, D)."""
    return torch.randn(classes, dim) * math.sqrt(2.0 / classes)


def check_labels(labels: Tensor, classes: int) -> None:
    """Refuse labels that are not class numbers; on the CPU only, where looking costs no wait.

    Raises: TrainingError.
    """
    if labels.device.type != "cpu":
        return
    outside = labels[(labels < 0) | (labels >= classes)]
    if len(outside) > 0:
        raise TrainingError(
            f"The label {int(outside[0])} is not in 0..{classes - 1}, the {classes} classes of "
            f"this loss. Number the training classes from 0 without gaps."
        )


def _unit(proxies: Tensor, dtype: torch.dtype) -> Tensor:
    return F.normalize(proxies.to(dtype), dim=1)
