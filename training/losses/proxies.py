"""What the losses with a learnt vector per class have in common."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embedder.errors import TrainingError


class ProxyLoss(nn.Module):
    """A loss with proxies: learnt vectors, one or more a class, whose length does not matter.

    Labels are class numbers in [0, C); another one is a TrainingError, see `check_labels`.

    Args:
        classes: number of classes C.
        dim: length D of an embedding.
        proxies: start values of the parameter `proxies`, if not (C, D) from N(0, 2 / C) (Kaiming,
            fan-out), as Proxy-Anchor's authors draw them.
    """

    normalized: bool = True

    def __init__(self, classes: int, dim: int, proxies: Tensor | None = None) -> None:
        super().__init__()
        self.classes = classes
        if proxies is None:
            proxies = torch.randn(classes, dim) * math.sqrt(2.0 / classes)
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
        """The unit centre of the class of each sample: (B, D), with gradient to the proxies."""
        del embeddings  # one centre per class: no choice to make
        check_labels(labels, self.classes)
        return self.centres()[labels]

    def cosines(self, embeddings: Tensor) -> Tensor:
        """Cosine of each sample with each proxy: (B, C)."""
        return embeddings @ _unit(self.proxies, embeddings.dtype).T

    def own(self, labels: Tensor) -> Tensor:
        """True where the proxy is that of the sample's class: (B, C)."""
        check_labels(labels, self.classes)
        return labels[:, None] == torch.arange(self.classes, device=labels.device)


def check_labels(labels: Tensor, classes: int) -> None:
    """Refuse labels that are not class numbers; on the CPU only, where looking costs no wait.

    On a GPU the losses trust them: `training.trainer.fit` checks all of a run's, once.

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
