"""A conditional flow of the GLOW type: permute, then transform both halves, given a condition."""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from training.flows.coupling import Coupling, FlowOutput, positive_clamp

_ATAN = 0.636  # about 2 / pi, as in the authors' code: it brings atan into (-1, 1)


class ConditionalCoupling(Coupling):
    r"""Scale and shift one half of the dimensions by functions of the other and of a condition.

    .. math:: y_a = x_a, \quad y_b = x_b \odot \exp(s(x_a, p)) + t(x_a, p), \quad
        s = 0.636\, c \arctan(\hat s)

    The factors lie within [e^-c, e^c]. Weights start as torch draws them, so the layer does not
    start as the identity.

    Args:
        dim: number of dimensions D, at least 2.
        condition_dim: length C of the condition.
        layers: number of linear layers, at least 1, with ReLU between them.
        hidden: their width.
        clamp: c, larger than 0.
        transform_first: transform the first half given the second, instead of the reverse.
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
        super().__init__(dim, transform_first)
        if layers < 1:
            raise ValueError(f"layers = {layers} must be at least 1")
        self.clamp = positive_clamp(clamp)
        widths = [self.given + condition_dim, *[hidden] * (layers - 1), 2 * self.changed]
        modules: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            modules += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.conditioner = nn.Sequential(*modules[:-1])

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """(B, D) and (B, C) to (y, log_scale), both (B, D)."""
        given, changed = self.halves(x)
        log_scale, shift = self._scale_and_shift(given, condition)
        y = self.join(given, torch.addcmul(shift, changed, log_scale.exp()))
        return y, self.pad(log_scale)

    def inverse(self, y: Tensor, condition: Tensor) -> Tensor:
        """The x (B, D) whose image is y (B, D) under the condition (B, C)."""
        given, changed = self.halves(y)
        log_scale, shift = self._scale_and_shift(given, condition)
        return self.join(given, (changed - shift) * (-log_scale).exp())

    def _scale_and_shift(self, given: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        raw, shift = self.conditioner(torch.cat([given, condition], dim=1)).chunk(2, dim=1)
        return self.clamp * _ATAN * torch.atan(raw), shift


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
