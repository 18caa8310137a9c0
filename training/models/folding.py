"""Batch norm folded into the convolutions before it."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from embedder.errors import JobError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_MAX_DIFFERENCE = 1e-3  # of the largest activation


def fold_batch_norm(trunk: nn.Module, side: int = 64) -> None:
    """Fold each batch norm, as it evaluates, into the convolution before it, in place.

    The network computes the same, which is checked on noise. Scales, now part of the weights, learn
    with them; the shifts, now biases, stay as they are. Without batch norm nothing happens.

    Args:
        trunk: float (B, 3, S, S) to features.
        side: S that it takes, in pixels.

    Raises: JobError if a batch norm does not follow a convolution of its own; `trunk` is then
        spoilt.
    """
    if not _has_batch_norm(trunk):
        return
    mode = trunk.training
    trunk.eval()
    before = _on_noise(trunk, side)
    _fold(trunk)
    difference = (_on_noise(trunk, side) - before).abs().max()
    if _has_batch_norm(trunk) or not difference <= _MAX_DIFFERENCE * before.abs().max():
        raise JobError(
            'model.batch_norm = "folded" needs a convolution before each batch norm, which this '
            'backbone does not have everywhere. Set model.batch_norm to "frozen".'
        )
    trunk.train(mode)


def _fold(trunk: nn.Module) -> None:
    for (owner, place, layer), (parent, name, norm) in pairwise(list(_layers(trunk))):
        if not isinstance(layer, nn.Conv2d) or not isinstance(norm, nn.BatchNorm2d):
            continue
        if layer.out_channels == norm.num_features:
            folded = fuse_conv_bn_eval(layer, norm)
            assert folded.bias is not None
            folded.bias.requires_grad_(False)
            setattr(owner, place, folded)
            setattr(parent, name, _what_follows(norm))


def _layers(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Parent, name and layer of all that has no parts of its own, in the order of the source."""
    for name, child in module.named_children():
        if isinstance(child, BATCH_NORMS) or next(child.children(), None) is None:
            yield module, name, child
        else:
            yield from _layers(child)


def _what_follows(norm: nn.BatchNorm2d) -> nn.Module:
    """What a batch norm does besides: timm's may drop and activate."""
    parts = [getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)]
    return nn.Sequential(*parts) if parts else nn.Identity()


def _has_batch_norm(trunk: nn.Module) -> bool:
    return any(isinstance(module, BATCH_NORMS) for module in trunk.modules())


def _on_noise(trunk: nn.Module, side: int) -> Tensor:
    noise = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features: Tensor = trunk(noise.to(next(trunk.parameters()).dtype))
    return features
