"""What all losses compute with: full precision, sums of exponentials, softmax of the own class."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

M = TypeVar("M", bound=nn.Module)


def full_precision(
    forward: Callable[[M, Tensor, Tensor], Tensor],
) -> Callable[[M, Tensor, Tensor], Tensor]:
    """Wrap the `forward(embeddings, labels)` of a loss, to compute in float32 or wider.

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


def log_sum_exp(exponents: Tensor, mask: Tensor) -> Tensor:
    """log(sum of exp(exponents) over the columns in mask): (B, N) to (B,).

    A row without a column in the mask gives -inf, and gradient 0.
    """
    return torch.logsumexp(exponents.masked_fill(~mask, -torch.inf), dim=1)


def log_1p_sum_exp(exponents: Tensor, mask: Tensor, dim: int) -> Tensor:
    """log(1 + sum of exp(exponents) over the entries in mask along dim); 0 without an entry."""
    masked = exponents.masked_fill(~mask, -torch.inf)
    one = (0, 0, 0, 1) if dim == 0 else (0, 1)
    return torch.logsumexp(F.pad(masked, one), dim=dim)
