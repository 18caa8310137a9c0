"""Invertible maps of R^D: Real-NVP and NICE, and a conditional flow of the GLOW type.

Shapes: B samples, D dimensions, C numbers of a condition, L layers.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.config.settings import Flow

_ATAN = 0.636  # about 2 / pi, as in the authors' code: it brings atan into (-1, 1)


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
    layer starts as the identity. Where there is a condition (B, C), it is read beside x_a.

    References:
        Density estimation using Real NVP (Dinh et al., 2017), eq. 7 and 8.
        https://arxiv.org/abs/1605.08803

    Args:
        dim, transform_first: see Coupling.
        hidden: width of the two hidden layers.
        clamp: c, larger than 0.
    """

    def __init__(self, dim: int, hidden: int, clamp: float, transform_first: bool) -> None:
        super().__init__(dim, transform_first)
        self.clamp = positive_clamp(clamp)
        self.conditioner = zero_ended(self.given, hidden, 2 * self.changed)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, D) to (y, log_scale), both (B, D)."""
        given, changed = self.halves(x)
        log_scale, shift = self._scale_and_shift(given, condition)
        y = self.join(given, torch.addcmul(shift, changed, log_scale.exp()))
        return y, self.pad(log_scale)

    def inverse(self, y: Tensor, condition: Tensor | None = None) -> Tensor:
        """The x whose image is y under the condition, both (B, D)."""
        given, changed = self.halves(y)
        log_scale, shift = self._scale_and_shift(given, condition)
        return self.join(given, (changed - shift) * (-log_scale).exp())

    def bounded(self, raw: Tensor) -> Tensor:
        """s of the formula, of any shape."""
        return soft_clamp(raw, self.clamp)

    def _scale_and_shift(self, given: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor]:
        read = given if condition is None else torch.cat([given, condition], dim=1)
        raw, shift = self.conditioner(read).chunk(2, dim=1)
        return self.bounded(raw), shift


class AdditiveCoupling(Coupling):
    """Shift one half of the dimensions by a function of the other: y_a = x_a, y_b = x_b + t(x_a).

    Volume is preserved: the diagonal of the Jacobian is 1 everywhere. The last linear layer starts
    at zero, so the layer starts as the identity.

    Args:
        dim, transform_first: see Coupling.
        hidden: width of the two hidden layers.
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


class Chain(nn.Module):
    """Layers one after the other, each invertible and triangular."""

    dim: int

    def chain(self) -> list[Any]:
        """The layers, in the order in which they act."""
        raise NotImplementedError

    def forward(self, z: Tensor) -> FlowOutput:
        """(B, D) to FlowOutput: y (B, D), log_scales (L, B, D)."""
        log_scales = []
        for layer in self.chain():
            z, log_scale = layer(z)
            log_scales.append(log_scale)
        return FlowOutput(z, torch.stack(log_scales))

    def inverse(self, y: Tensor) -> Tensor:
        """The z whose image is y, both (B, D)."""
        for layer in reversed(self.chain()):
            y = layer.inverse(y)
        return y


class RealNVP(Chain):
    """An invertible map of R^D that starts as the identity: affine couplings.

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

    def chain(self) -> list[Any]:
        """The couplings."""
        return list(self.layers)


class NICE(Chain):
    """An invertible map of R^D that starts as the identity; only its last layer changes volume.

    Additive couplings in turn, then the scaling, which counts as a layer: L = layers + 1.

    Under determinant regularization R sees the diagonal of each layer's Jacobian, which is 1 in an
    additive coupling: log 2 each, without a gradient. **Only the last layer can be pressed**, by D
    numbers that do not depend on the input, so augmented points add nothing to R. On the composed
    diagonal R is that of the last layer; as a mean over layers it is (layers log 2 + R_last) /
    (layers + 1), and the same lambda presses layers + 1 times less.

    References:
        NICE: Non-linear Independent Components Estimation (Dinh et al., 2015), sections 3.2 and
        3.3. https://arxiv.org/abs/1410.8516

    Args:
        dim, hidden: see RealNVP.
        layers: number of coupling layers.
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

    def chain(self) -> list[Any]:
        """The couplings, then the scaling."""
        return [*self.layers, self.scaling]


def build_flow(flow: Flow, dim: int) -> RealNVP | NICE:
    """The flow of R^D that a job asks for; it starts as the identity."""
    kind = RealNVP if flow.kind == "real_nvp" else NICE
    return kind(dim, flow.layers, flow.hidden, flow.clamp)


class ConditionalCoupling(AffineCoupling):
    r"""Scale and shift one half of the dimensions by functions of the other and of a condition.

    .. math:: y_a = x_a, \quad y_b = x_b \odot \exp(s(x_a, p)) + t(x_a, p), \quad
        s = 0.636\, c \arctan(\hat s)

    The factors lie within [e^-c, e^c]. Weights start as torch draws them, so the layer does not
    start as the identity.

    Args:
        dim, transform_first: see Coupling.
        condition_dim: length C of the condition.
        layers: number of linear layers, at least 1, with ReLU between them.
        hidden: their width.
        clamp: c, larger than 0.
    """

    def __init__(
        self,
        dim: int,
        condition_dim: int,
        layers: int,
        hidden: int,
        clamp: float,
        transform_first: bool,
    ) -> None:
        Coupling.__init__(self, dim, transform_first)  # without the other conditioner
        if layers < 1:
            raise ValueError(f"layers = {layers} must be at least 1")
        self.clamp = positive_clamp(clamp)
        widths = [self.given + condition_dim, *[hidden] * (layers - 1), 2 * self.changed]
        modules: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            modules += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.conditioner = nn.Sequential(*modules[:-1])

    def bounded(self, raw: Tensor) -> Tensor:
        """s of the formula, of any shape."""
        return self.clamp * _ATAN * torch.atan(raw)


class GlowBlock(nn.Module):
    """A fixed permutation, then the first half given the second, then the second given the first.

    The permutation is drawn by NumPy from `seed` alone, in a generator of its own. It belongs to
    the state dict (`order`), so a stored flow does not depend on how it was drawn.

    Args:
        dim, condition_dim, layers, hidden, clamp: see ConditionalGlow.
        seed: of the permutation.
    """

    def __init__(
        self, dim: int, condition_dim: int, layers: int, hidden: int, clamp: float, seed: int
    ) -> None:
        super().__init__()
        self.first = ConditionalCoupling(dim, condition_dim, layers, hidden, clamp, True)
        self.second = ConditionalCoupling(dim, condition_dim, layers, hidden, clamp, False)
        order = np.random.RandomState(seed).permutation(dim)
        self.register_buffer("order", torch.from_numpy(order.astype(np.int64)))

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """(B, D) and (B, C) to y (B, D) and the log_scales (2, B, D) of the two couplings."""
        x = x[:, self.get_buffer("order")]
        x, first = self.first(x, condition)
        x, second = self.second(x, condition)
        return x, torch.stack([first, second])

    def inverse(self, y: Tensor, condition: Tensor) -> Tensor:
        """The x (B, D) whose image is y (B, D) under the condition (B, C)."""
        y = self.first.inverse(self.second.inverse(y, condition), condition)
        return y[:, self.get_buffer("order").argsort()]


class ConditionalGlow(nn.Module):
    """An invertible map of R^D that depends on a condition, fed to every coupling as it is.

    A block has two couplings and transforms every dimension. `log_scales` has a row for each
    coupling, not for each block, because only the Jacobian of a coupling is triangular:
    L = 2 * blocks, in the order in which they act. Entry (2 b + h, i, d) belongs to dimension d
    after the permutation of block b; it is 0 in the half that the coupling passes through.

    **Readings.** GLOW has activation normalisation and learnt 1x1 convolutions between couplings;
    non-isotropy regularization has neither, only fixed permutations, here the authors' own (NumPy's
    legacy generator, seed = number of the block) without their side effect of seeding NumPy.

    References:
        Glow (Kingma and Dhariwal, 2018), section 3. https://arxiv.org/abs/1807.03039
        Non-isotropy Regularization for Proxy-based Deep Metric Learning (Roth et al., 2022).
        https://arxiv.org/abs/2203.08547

    Example:
        >>> flow = ConditionalGlow(dim=4, layers=2, hidden=8)
        >>> x, condition = torch.ones(3, 4), torch.zeros(3, 4)
        >>> flow(x, condition).log_scales.shape
        torch.Size([10, 3, 4])

    Args:
        dim: number of dimensions D, at least 2.
        condition_dim: length C of the condition; None means D.
        blocks: number of blocks, at least 1.
        layers: linear layers of each of a block's two networks, at least 1.
        hidden: their width.
        clamp: bound of each log-scale.
    """

    def __init__(
        self,
        dim: int,
        condition_dim: int | None = None,
        blocks: int = 5,
        layers: int = 8,
        hidden: int = 128,
        clamp: float = 2.0,
    ) -> None:
        super().__init__()
        if blocks < 1:
            raise ValueError(f"blocks = {blocks} must be at least 1")
        self.dim = dim
        self.condition_dim = dim if condition_dim is None else condition_dim
        self.blocks = nn.ModuleList(
            GlowBlock(dim, self.condition_dim, layers, hidden, clamp, seed)
            for seed in range(blocks)
        )

    def forward(self, x: Tensor, condition: Tensor) -> FlowOutput:
        """(B, D) and (B, C) to FlowOutput: y (B, D), log_scales (L, B, D), L = 2 * blocks."""
        log_scales = []
        for block in self.blocks:
            x, log_scale = block(x, condition)
            log_scales.append(log_scale)
        return FlowOutput(x, torch.cat(log_scales))

    def inverse(self, y: Tensor, condition: Tensor) -> Tensor:
        """The x (B, D) whose image is y (B, D) under the condition (B, C)."""
        for block in reversed(self.blocks):
            assert isinstance(block, GlowBlock)
            y = block.inverse(y, condition)
        return y


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
