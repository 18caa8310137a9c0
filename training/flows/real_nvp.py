"""Real-NVP: a chain of affine couplings that transform the two halves in turn."""

import torch
from torch import Tensor, nn

from training.flows.coupling import AffineCoupling, FlowOutput


class RealNVP(nn.Module):
    """An invertible map of R^D that starts as the identity.

    Layers alternate the half that they transform, so with two layers or more every dimension is
    transformed.

    References:
        Density estimation using Real NVP (Dinh et al., 2017), https://arxiv.org/abs/1605.08803

    Example:
        >>> flow = RealNVP(dim=4, layers=2, hidden=8)
        >>> z = torch.ones(3, 4)
        >>> torch.equal(flow(z).y, z)
        True

    Args:
        dim: number of dimensions D, at least 2.
        layers: number L of coupling layers.
        hidden: width of the hidden layers of each coupling.
        clamp: bound of each log-scale.
    """

    def __init__(self, dim: int, layers: int = 12, hidden: int = 256, clamp: float = 2.0) -> None:
        super().__init__()
        self.dim = dim
        self.layers = nn.ModuleList(
            AffineCoupling(dim, hidden, clamp, transform_first=bool(number % 2))
            for number in range(layers)
        )

    def forward(self, z: Tensor) -> FlowOutput:
        """(B, D) to FlowOutput: y (B, D), log_scales (L, B, D)."""
        log_scales = []
        for layer in self.layers:
            z, log_scale = layer(z)
            log_scales.append(log_scale)
        return FlowOutput(z, torch.stack(log_scales))

    def inverse(self, y: Tensor) -> Tensor:
        """The z whose image is y, both (B, D)."""
        for layer in reversed(self.layers):
            assert isinstance(layer, AffineCoupling)
            y = layer.inverse(y)
        return y
