"""The affine coupling layer, and what every coupling layer and every flow of this folder shares."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FlowOutput(NamedTuple):
    """What a flow gives: `y` (B, D) and, per layer, the log of the diagonal of its Jacobian.

    `log_scales` has shape (L, B, D): L layers; 0 where a dimension is passed through. Each layer's
    Jacobian is triangular up to a permutation, so the log-determinant of the flow is the sum of
    `log_scales` over L and D.
    """

    y: Tensor
    log_scales: Tensor

    @property
    def log_diagonal(self) -> Tensor:
        """Per dimension the sum over layers: (B, D). Its sum is `log_det`.

        It is the log-diagonal of the product of the layers' Jacobians, each taken as triangular in
        one order of dimensions. It means something where layers keep that order: RealNVP and NICE.
        """
        return self.log_scales.sum(dim=0)

    @property
    def log_det(self) -> Tensor:
        """log |det dy/dz|, shape (B,)."""
        return self.log_scales.sum(dim=(0, 2))


class Coupling(nn.Module):
    """Change one half of the dimensions by functions of the other half.

    The first half has D // 2 dimensions, the second the rest.

    Args:
        dim: number of dimensions D, at least 2.
        transform_first: transform the first half given the second, instead of the reverse.
    """

    def __init__(self, dim: int, transform_first: bool) -> None:
        super().__init__()
        if dim < 2:
            raise ValueError(f"a coupling layer needs at least 2 dimensions, got {dim}")
        self.split = dim // 2
        self.transform_first = transform_first
        self.changed = self.split if transform_first else dim - self.split
        self.given = dim - self.changed

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, D) to the half that is given and the half to change."""
        first, second = x[:, : self.split], x[:, self.split :]
        return (second, first) if self.transform_first else (first, second)

    def pad(self, changed: Tensor) -> Tensor:
        """The half that is changed with zeros for the other half: to (B, D)."""
        return F.pad(changed, (0, self.given) if self.transform_first else (self.given, 0))

    def join(self, given: Tensor, changed: Tensor) -> Tensor:
        """What `halves` took apart."""
        parts = (changed, given) if self.transform_first else (given, changed)
        return torch.cat(parts, dim=1)


class AffineCoupling(Coupling):
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
        super().__init__(dim, transform_first)
        self.clamp = positive_clamp(clamp)
        self.conditioner = zero_ended(self.given, hidden, 2 * self.changed)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, D) to (y, log_scale), both (B, D)."""
        given, changed = self.halves(x)
        log_scale, shift = self._scale_and_shift(given)
        y = self.join(given, torch.addcmul(shift, changed, log_scale.exp()))
        return y, self.pad(log_scale)

    def inverse(self, y: Tensor) -> Tensor:
        """The x whose image is y, both (B, D)."""
        given, changed = self.halves(y)
        log_scale, shift = self._scale_and_shift(given)
        return self.join(given, (changed - shift) * (-log_scale).exp())

    def _scale_and_shift(self, given: Tensor) -> tuple[Tensor, Tensor]:
        raw, shift = self.conditioner(given).chunk(2, dim=1)
        return soft_clamp(raw, self.clamp), shift


def soft_clamp(raw: Tensor, clamp: float) -> Tensor:
    """clamp * tanh(raw / clamp): the identity near 0, within [-clamp, clamp] everywhere."""
    return clamp * torch.tanh(raw / clamp)


def positive_clamp(clamp: float) -> float:
    """`clamp` itself. Raises: ValueError unless it is larger than 0."""
    if not clamp > 0:
        raise ValueError(f"clamp = {clamp} must be larger than 0")
    return clamp


def zero_ended(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """A network of two hidden layers whose output starts at 0: (B, inputs) to (B, outputs)."""
    last = nn.Linear(hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), last
    )
