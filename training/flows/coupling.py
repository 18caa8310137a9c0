"""The affine coupling layer, the step that every flow of this folder is made of."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class FlowOutput(NamedTuple):
    """What a flow gives: `y` (B, D) and, per layer, the log of the diagonal of its Jacobian.

    `log_scales` has shape (L, B, D): L layers; 0 where a dimension is passed through. Each layer's
    Jacobian is triangular up to a permutation, so the log-determinant of the flow is the sum of
    `log_scales` over L and D.
    """

    y: Tensor
    log_scales: Tensor

    @property
    def log_det(self) -> Tensor:
        """log |det dy/dz|, shape (B,)."""
        return self.log_scales.sum(dim=(0, 2))


class AffineCoupling(nn.Module):
    r"""Scale and shift one half of the dimensions by functions of the other half.

    .. math:: y_a = x_a, \quad y_b = x_b \odot \exp(s(x_a)) + t(x_a), \quad s = c \tanh(\hat s / c)

    The soft clamp c bounds each factor to [e^-c, e^c]. The last linear layer starts at zero, so the
    layer starts as the identity.

    References:
        Density estimation using Real NVP (Dinh et al., 2017), eq. 7 and 8.
        https://arxiv.org/abs/1605.08803

    Args:
        dim: number of dimensions D, at least 2.
        hidden: width of the two hidden layers.
        clamp: c, larger than 0.
        transform_first: transform the first half given the second, instead of the reverse.
    """

    def __init__(self, dim: int, hidden: int, clamp: float, transform_first: bool) -> None:
        super().__init__()
        if dim < 2:
            raise ValueError(f"a coupling layer needs at least 2 dimensions, got {dim}")
        if clamp <= 0:
            raise ValueError(f"clamp = {clamp} must be larger than 0")
        self.split = dim // 2
        self.clamp = clamp
        self.transform_first = transform_first
        given, changed = (
            (dim - self.split, self.split)
            if transform_first
            else (
                self.split,
                dim - self.split,
            )
        )
        last = nn.Linear(hidden, 2 * changed)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.conditioner = nn.Sequential(
            nn.Linear(given, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), last
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, D) to (y, log_scale), both (B, D)."""
        given, changed = self._halves(x)
        log_scale, shift = self._scale_and_shift(given)
        y = self._join(given, changed * log_scale.exp() + shift)
        return y, self._join(torch.zeros_like(given), log_scale)

    def inverse(self, y: Tensor) -> Tensor:
        """The x whose image is y, both (B, D)."""
        given, changed = self._halves(y)
        log_scale, shift = self._scale_and_shift(given)
        return self._join(given, (changed - shift) * (-log_scale).exp())

    def _scale_and_shift(self, given: Tensor) -> tuple[Tensor, Tensor]:
        raw, shift = self.conditioner(given).chunk(2, dim=1)
        return self.clamp * torch.tanh(raw / self.clamp), shift

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x[:, : self.split], x[:, self.split :]
        return (second, first) if self.transform_first else (first, second)

    def _join(self, given: Tensor, changed: Tensor) -> Tensor:
        parts = (changed, given) if self.transform_first else (given, changed)
        return torch.cat(parts, dim=1)
