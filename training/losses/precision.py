"""Every loss computes in float32 or wider, whatever the autocast around it."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def full_precision(
    forward: Callable[[M, Tensor, Tensor], Tensor],
) -> Callable[[M, Tensor, Tensor], Tensor]:
    """Wrap the `forward(embeddings, labels)` of a loss.

    Inside, autocast is off and the embeddings have the widest of their own type, float32 and the
    types of the loss's parameters. The parameters themselves are never converted.

    Raises: ValueError unless the embeddings are (B, D) and the labels (B,).
    """

    @functools.wraps(forward)
    def wrapped(loss: M, embeddings: Tensor, labels: Tensor) -> Tensor:
        if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1]:
            raise ValueError(
                f"A loss takes embeddings (B, D) and labels (B,), "
                f"not {tuple(embeddings.shape)} and {tuple(labels.shape)}."
            )
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        for parameter in loss.parameters():
            dtype = torch.promote_types(dtype, parameter.dtype)
        with torch.autocast(embeddings.device.type, enabled=False):
            return forward(loss, embeddings.to(dtype), labels)

    return wrapped
