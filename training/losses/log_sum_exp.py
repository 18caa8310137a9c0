"""Sums of exponentials over a part of a matrix, without overflow."""

import torch
from torch import Tensor
from torch.nn import functional as F


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
