"""NICE: a chain of additive couplings that transform the two halves in turn, then a scaling."""

import torch
from torch import Tensor, nn

from training.flows.coupling import Coupling, FlowOutput, positive_clamp, soft_clamp, zero_ended


class AdditiveCoupling(Coupling):
    """Shift one half of the dimensions by a function of the other: y_a = x_a, y_b = x_b + t(x_a).

    Volume is preserved: the diagonal of the Jacobian is 1 everywhere. The last linear layer starts
    at zero, so the layer starts as the identity.

    References:
        NICE: Non-linear Independent Components Estimation (Dinh et al., 2015), section 3.2.
        https://arxiv.org/abs/1410.8516

    Args:
        dim: number of dimensions D, at least 2.
        hidden: width of the two hidden layers.
        transform_first: transform the first half given the second, instead of the reverse.
    """

    def __init__(self, dim: int, hidden: int, transform_first: bool) -> None:
        super().__init__(dim, transform_first)
        self.conditioner = zero_ended(self.given, hidden, self.changed)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, D) to (y, log_scale), both (B, D); log_scale is 0."""
        given, changed = self.halves(x)
        return self.join(given, changed + self.conditioner(given)), torch.zeros_like(x)

    def inverse(self, y: Tensor) -> Tensor:
        """The x whose image is y, both (B, D)."""
        given, changed = self.halves(y)
        return self.join(given, changed - self.conditioner(given))


class DiagonalScaling(nn.Module):
    r"""Scale each dimension by a factor of its own, the same for every input.

    .. math:: y_i = x_i \exp(s_i), \quad s_i = c \tanh(\hat s_i / c), \quad \hat s_i = 0
        \text{ at the start}

    References:
        NICE: Non-linear Independent Components Estimation (Dinh et al., 2015), section 3.3.
        https://arxiv.org/abs/1410.8516

    Args:
        dim: number of dimensions D.
        clamp: c, larger than 0.
    """

    def __init__(self, dim: int, clamp: float) -> None:
        super().__init__()
        self.clamp = positive_clamp(clamp)
        self.raw = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, D) to (y, log_scale), both (B, D)."""
        log_scale = soft_clamp(self.raw, self.clamp)  # (D,)
        return x * log_scale.exp(), log_scale.expand_as(x)

    def inverse(self, y: Tensor) -> Tensor:
        """The x whose image is y, both (B, D)."""
        return y * (-soft_clamp(self.raw, self.clamp)).exp()


class NICE(nn.Module):
    """An invertible map of R^D that starts as the identity; only its last layer changes volume.

    Same interface as RealNVP. The scaling counts as a layer, so there are L = layers + 1.

    Under determinant regularization R sees the diagonal of each layer's Jacobian, which is 1 in an
    additive coupling: log 2 each, without a gradient. **Only the last layer can be pressed**, by D
    numbers that do not depend on the input, so augmented points add nothing to R. On the composed
    diagonal R is that of the last layer; as a mean over layers it is (layers log 2 + R_last) /
    (layers + 1), and the same lambda presses layers + 1 times less.

    References:
        NICE: Non-linear Independent Components Estimation (Dinh et al., 2015), sections 3.2 and
        3.3. https://arxiv.org/abs/1410.8516

    Example:
        >>> flow = NICE(dim=4, layers=2, hidden=8)
        >>> z = torch.ones(3, 4)
        >>> torch.equal(flow(z).y, z)
        True

    Args:
        dim: number of dimensions D, at least 2.
        layers: number of coupling layers.
        hidden: width of the hidden layers of each coupling.
        clamp: bound of each log-scale of the last layer.
    """

    def __init__(self, dim: int, layers: int = 12, hidden: int = 256, clamp: float = 2.0) -> None:
        super().__init__()
        self.dim = dim
        self.layers = nn.ModuleList(
            AdditiveCoupling(dim, hidden, transform_first=bool(number % 2))
            for number in range(layers)
        )
        self.scaling = DiagonalScaling(dim, clamp)

    def forward(self, z: Tensor) -> FlowOutput:
        """(B, D) to FlowOutput: y (B, D), log_scales (L, B, D)."""
        log_scales = []
        for layer in (*self.layers, self.scaling):
            z, log_scale = layer(z)
            log_scales.append(log_scale)
        return FlowOutput(z, torch.stack(log_scales))

    def inverse(self, y: Tensor) -> Tensor:
        """The z whose image is y, both (B, D)."""
        y = self.scaling.inverse(y)
        for layer in reversed(self.layers):
            assert isinstance(layer, AdditiveCoupling)
            y = layer.inverse(y)
        return y
