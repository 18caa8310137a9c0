"""One vector per image from the map, or the tokens, of a trunk.

Shapes: B images, C channels, H x W positions, T tokens.
"""

import torch
from torch import Tensor, nn

from training.config.settings import Pooling

GEM_START = 3.0
_MIN_EXPONENT = 0.1
_MIN_ACTIVATION = 1e-6


class Pool(nn.Module):
    """Pooling over all positions: (B, C, H, W), or tokens (B, T, C), to (B, C).

    `gap` is the mean, `gmp` the maximum, `gap+gmp` their sum, `gem` the generalised mean

        ( mean_x max(x, ε)^p )^(1/p),  ε = 1e-6,

    with one learnt p, the parameter `exponent`, that starts at 3: p = 1 is the mean, p → ∞ the
    maximum. `cls` is the class token.

    **Reading**: in a trunk of tokens only those of patches are positions; class and register
    tokens are left out, except by `cls`. GeM clips negative activations there too. An exponent
    below 0.1 acts as 0.1.

    Args:
        kind: one of the above.
        prefix: number of tokens before those of the patches; the class token is the first.

    References:
        Radenović, Tolias, Chum, Fine-tuning CNN Image Retrieval with No Human Annotation,
        equation 2. https://arxiv.org/abs/1711.02512
    """

    def __init__(self, kind: Pooling, prefix: int = 0) -> None:
        super().__init__()
        self.kind = kind
        self.prefix = prefix
        if kind == "gem":
            self.exponent = nn.Parameter(torch.tensor(GEM_START))

    def forward(self, maps: Tensor) -> Tensor:
        """(B, C, H, W) or (B, T, C) to (B, C); GeM gives float32 whatever the autocast."""
        if self.kind == "cls":
            return maps[:, 0]
        if maps.ndim == 3:
            maps = maps[:, self.prefix :].transpose(1, 2).unsqueeze(-1)  # (B, C, T, 1)
        if self.kind == "gap":
            return maps.mean(dim=(2, 3))
        if self.kind == "gmp":
            return maps.amax(dim=(2, 3))
        if self.kind == "gem":
            return generalised_mean(maps, self.exponent)
        return maps.mean(dim=(2, 3)) + maps.amax(dim=(2, 3))


def generalised_mean(maps: Tensor, exponent: Tensor) -> Tensor:
    """GeM of (B, C, H, W) to (B, C), in float32.

    The largest activation is divided out before the power and multiplied back after it, so no
    exponent overflows.
    """
    with torch.autocast(maps.device.type, enabled=False):
        x = maps.float().clamp(min=_MIN_ACTIVATION)
        p = exponent.float().clamp(min=_MIN_EXPONENT)
        largest = x.amax(dim=(2, 3), keepdim=True).detach()  # (B, C, 1, 1)
        mean = (x / largest).pow(p).mean(dim=(2, 3))
        pooled: Tensor = largest.flatten(1) * mean.pow(1 / p)
    return pooled
