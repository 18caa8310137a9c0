"""The three flows behind one interface, and random weights for them."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from training.flows import NICE, ConditionalGlow, FlowOutput, RealNVP

KINDS = ("real_nvp", "nice", "glow")


class Conditioned(nn.Module):
    """A conditional flow under one condition for all rows."""

    def __init__(self, glow: ConditionalGlow) -> None:
        super().__init__()
        self.glow = glow
        self.condition = nn.Parameter(torch.zeros(1, glow.condition_dim))

    def forward(self, x: Tensor) -> FlowOutput:
        return self.glow(x, self.condition.expand(len(x), -1))

    def inverse(self, y: Tensor) -> Tensor:
        return self.glow.inverse(y, self.condition.expand(len(y), -1))


def flow_of(kind: str, dim: int, layers: int = 4, hidden: int = 8, clamp: float = 2.0) -> nn.Module:
    """A small flow of `layers` couplings, an even number."""
    if kind == "real_nvp":
        return RealNVP(dim, layers, hidden, clamp)
    if kind == "nice":
        return NICE(dim, layers, hidden, clamp)
    glow = ConditionalGlow(dim, 3, blocks=layers // 2, layers=3, hidden=hidden, clamp=clamp)
    return Conditioned(glow)


def triangular_layers(
    flow: nn.Module, z: Tensor
) -> Iterator[tuple[Callable[[Tensor], tuple[Tensor, Tensor]], Tensor]]:
    """Each layer as a function of its input, and that input, less the permutations between."""
    if isinstance(flow, Conditioned):
        for block in flow.glow.blocks:
            z = z[:, block.order]
            for half in (block.first, block.second):
                layer = lambda x, f=half: f(x, flow.condition.expand(len(x), -1))
                yield layer, z
                z, _ = layer(z)
        return
    for layer in (*flow.layers, flow.scaling) if isinstance(flow, NICE) else flow.layers:
        yield layer, z
        z, _ = layer(z)


def trained_like(flow: nn.Module, scale: float = 0.3) -> nn.Module:
    """Give every weight a random value, so that no layer is the identity."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return flow.double()


def rows(count: int, dim: int) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
