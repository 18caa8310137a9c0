"""Invertible maps of R^D: Real-NVP, NICE, and a conditional flow of the GLOW type.

Shapes: B samples, D dimensions, C condition values, L layers.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kinlens.training.parts.fields import Flow


class FlowOutput(NamedTuple):
    """Output of a flow: `y` (B, D) and, per layer, the log of the diagonal of its Jacobian.

    `log_scales` has shape (L, B, D); 0 where a dimension is copied. Each layer's Jacobian
    is triangular up to a permutation, so the log-determinant of the flow is the sum of `log_scales`
    over L and D.
    """

    y: Tensor
    log_scales: Tensor

    @property
    def log_diagonal(self) -> Tensor:
        """Sum over layers for each dimension, (B, D), if no layer permutes: RealNVP."""
        return self.log_scales.sum(dim=0)

    @property
    def log_det(self) -> Tensor:
        return self.log_scales.sum(dim=(0, 2))


class Coupling(nn.Module):
    r"""Scale and shift one half of the dimensions by functions of the other half.

    .. math:: y_a = x_a, \quad y_b = x_b \odot \exp(s(x_a)) + t(x_a)

    The first half has D // 2 dimensions, the second the others. A condition is concatenated with
    x_a.

    References:
        Density estimation using Real NVP (Dinh et al., 2017), eq. 7 and 8.
        https://arxiv.org/abs/1605.08803

    Args:
        dim: number of dimensions D, at least 2.
        transform_first: x_b is the first half, instead of the second.
        network: builds the network for s, before its bound, and t, given the numbers of its inputs
            and outputs.
        bound: maps unbounded values of any shape to s.
        condition_dim: length C of the condition.
    """

    def __init__(
        self,
        dim: int,
        transform_first: bool,
        network: Callable[[int, int], nn.Module],
        bound: Callable[[Tensor], Tensor],
        condition_dim: int = 0,
    ) -> None:
        super().__init__()
        self.split = dim // 2
        self.transform_first = transform_first
        self.bound = bound
        changed = self.split if transform_first else dim - self.split
        self.conditioner = network(dim - changed + condition_dim, 2 * changed)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> FlowOutput:
        given, changed, log_scale, shift = self._parts(x, condition)
        moved = torch.addcmul(shift, changed, log_scale.exp())
        log_scales = self._join(torch.zeros_like(given), log_scale)
        return FlowOutput(self._join(given, moved), log_scales[None])

    def inverse(self, y: Tensor, condition: Tensor | None = None) -> Tensor:
        given, changed, log_scale, shift = self._parts(y, condition)
        return self._join(given, (changed - shift) * (-log_scale).exp())

    def _parts(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The half that is copied, the other half, and the log-scale and shift of the latter."""
        first, second = x[:, : self.split], x[:, self.split :]
        given, changed = (second, first) if self.transform_first else (first, second)
        read = given if condition is None else torch.cat([given, condition], dim=1)
        raw, shift = self.conditioner(read).chunk(2, dim=1)
        return given, changed, self.bound(raw), shift

    def _join(self, given: Tensor, changed: Tensor) -> Tensor:
        return torch.cat((changed, given) if self.transform_first else (given, changed), dim=1)


class Chain(nn.Module):
    """A composition of invertible maps of R^D, which may depend on a condition (B, C)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def chain(self) -> list[Any]:
        raise NotImplementedError

    def forward(self, x: Tensor, condition: Tensor | None = None) -> FlowOutput:
        """(B, D) to y (B, D) and log_scales (L, B, D)."""
        log_scales = []
        for layer in self.chain():
            x, log_scale = layer(x, condition)
            log_scales.append(log_scale)
        return FlowOutput(x, torch.cat(log_scales))

    def inverse(self, y: Tensor, condition: Tensor | None = None) -> Tensor:
        """(B, D) back to x (B, D), with gradient."""
        for layer in reversed(self.chain()):
            y = layer.inverse(y, condition)
        return y

    def sample(self, count: int, condition: Tensor | None = None) -> Tensor:
        """Points (count, D) that the flow maps to N(0, I), one for each row of the condition."""
        like = next(self.parameters())
        with torch.no_grad():
            return self.inverse(torch.randn(count, self.dim).to(like), condition)


class RealNVP(Chain):
    """L = `layers` affine couplings of the two halves in turn; it starts as the identity.

    References:
        Density estimation using Real NVP (Dinh et al., 2017), https://arxiv.org/abs/1605.08803

    Example:
        >>> flow = RealNVP(dim=4, layers=2, hidden=8)
        >>> z = torch.ones(3, 4)
        >>> torch.equal(flow(z).y, z)
        True

    Args:
        dim: D, at least 2.
        layers: L.
        hidden: width of the two hidden layers of each coupling.
        clamp: c in s = c tanh(raw / c), the bound of each log-scale.
    """

    def __init__(self, dim: int, layers: int = 12, hidden: int = 256, clamp: float = 2.0) -> None:
        super().__init__(dim)
        self.layers = _couplings(dim, layers, hidden, partial(soft_clamp, clamp=clamp))

    def chain(self) -> list[Any]:
        return list(self.layers)


def _couplings(
    dim: int, layers: int, hidden: int, bound: Callable[[Tensor], Tensor]
) -> nn.ModuleList:
    """Couplings that transform the second and the first half in turn."""
    network = partial(zero_network, hidden=hidden)
    return nn.ModuleList(Coupling(dim, bool(n % 2), network, bound) for n in range(layers))


class Scaling(nn.Module):
    """A learnt scale of each dimension, the same for all inputs; it starts as the identity."""

    def __init__(self, dim: int, clamp: float) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(dim))
        self.clamp = clamp

    def forward(self, x: Tensor, condition: Tensor | None = None) -> FlowOutput:
        del condition
        log_scale = soft_clamp(self.raw, self.clamp).expand_as(x)
        return FlowOutput(x * log_scale.exp(), log_scale[None])

    def inverse(self, y: Tensor, condition: Tensor | None = None) -> Tensor:
        del condition
        return y * (-soft_clamp(self.raw, self.clamp)).exp()


class NICE(Chain):
    """Couplings that only shift, and a scaling at the end, the only layer that changes volumes.

    References:
        NICE: Non-linear Independent Components Estimation (Dinh et al., 2014), sections 3.2 and
        3.3. https://arxiv.org/abs/1410.8516

    Args:
        dim, layers, hidden: as for RealNVP.
        clamp: bound of the log-scales of the scaling.
    """

    def __init__(self, dim: int, layers: int = 12, hidden: int = 256, clamp: float = 2.0) -> None:
        super().__init__(dim)
        self.layers = _couplings(dim, layers, hidden, torch.zeros_like)
        self.layers.append(Scaling(dim, clamp))

    def chain(self) -> list[Any]:
        return list(self.layers)


def build_flow(flow: Flow, dim: int) -> Chain:
    kind = NICE if flow.kind == "nice" else RealNVP
    return kind(dim, flow.layers, flow.hidden, flow.clamp)


class GlowBlock(Chain):
    """A fixed permutation, then the first half given the second, then the second given the first.

    The permutation is part of the state dict (`order`), so a stored flow does not depend on how it
    was drawn.
    """

    def __init__(
        self, dim: int, condition_dim: int, layers: int, hidden: int, clamp: float, seed: int
    ) -> None:
        super().__init__(dim)
        network = partial(relu_network, hidden=hidden, layers=layers)
        bound = partial(soft_clamp_by_atan, clamp=clamp)
        self.first = Coupling(dim, True, network, bound, condition_dim)
        self.second = Coupling(dim, False, network, bound, condition_dim)
        order = np.random.RandomState(seed).permutation(dim)
        self.register_buffer("order", torch.from_numpy(order.astype(np.int64)))

    def chain(self) -> list[Any]:
        return [self.first, self.second]

    def forward(self, x: Tensor, condition: Tensor | None = None) -> FlowOutput:
        return super().forward(x[:, self.get_buffer("order")], condition)

    def inverse(self, y: Tensor, condition: Tensor | None = None) -> Tensor:
        return super().inverse(y, condition)[:, self.get_buffer("order").argsort()]


class ConditionalGlow(Chain):
    """An invertible map of R^D that depends on a condition (B, C), an input of every coupling.

    A block has two couplings and transforms every dimension; weights start as torch draws them, so
    the flow does not start as the identity. `log_scales` has a row for each coupling, L = 2 *
    blocks; entry (2 b + h, i, d) belongs to dimension d after the permutation of block b.

    GLOW has activation normalisation and learnt 1x1 convolutions between couplings. Non-isotropy
    regularization has only fixed permutations. Here these are the authors' own (NumPy's legacy
    generator, seed = number of the block), without their side effect of seeding NumPy.

    References:
        Glow (Kingma and Dhariwal, 2018), section 3. https://arxiv.org/abs/1807.03039
        Non-isotropy Regularization for Proxy-based Deep Metric Learning (Roth et al., 2022).
        https://arxiv.org/abs/2203.08547

    Args:
        layers: linear layers of each of a block's two networks, with ReLU between them.
        clamp: c in s = 0.636 c arctan(raw), the bound of each log-scale.
    """

    def __init__(
        self,
        dim: int,
        condition_dim: int,
        blocks: int = 5,
        layers: int = 8,
        hidden: int = 128,
        clamp: float = 2.0,
    ) -> None:
        super().__init__(dim)
        self.blocks = nn.ModuleList(
            GlowBlock(dim, condition_dim, layers, hidden, clamp, seed) for seed in range(blocks)
        )

    def chain(self) -> list[Any]:
        return list(self.blocks)


def soft_clamp(raw: Tensor, clamp: float) -> Tensor:
    """clamp * tanh(raw / clamp): the identity near 0, within [-clamp, clamp] everywhere."""
    return clamp * torch.tanh(raw / clamp)


def soft_clamp_by_atan(raw: Tensor, clamp: float) -> Tensor:
    """Within [-clamp, clamp]; 0.636 is about 2 / pi, as in the code of the authors of NIR."""
    return clamp * 0.636 * torch.atan(raw)


def zero_network(inputs: int, outputs: int, hidden: int) -> nn.Sequential:
    """Two hidden layers; it starts as the zero function."""
    last = nn.Linear(hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), last
    )


def relu_network(inputs: int, outputs: int, hidden: int, layers: int) -> nn.Sequential:
    widths = [inputs, *[hidden] * (layers - 1), outputs]
    modules: list[nn.Module] = []
    for before, after in pairwise(widths):
        modules += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*modules[:-1])
