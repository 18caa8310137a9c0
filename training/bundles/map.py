"""The exported map: the contribution of each position of the trunk's last map to an embedding.

Shapes: B images, S pixels a side, C channels of the trunk, P = h w positions, D dimensions.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kinlens.embedder.engines.models import SessionSettings, load
from kinlens.embedder.errors import ExportError
from kinlens.embedder.machine import core_count
from kinlens.embedder.manifest import FP32, MapFile, Preprocessing
from kinlens.embedder.types import Embeddings, Images, Maps
from kinlens.training.bundles.graph import write_onnx
from kinlens.training.models.embedding import (
    MIN_ACTIVATION,
    MIN_EXPONENT,
    EmbeddingNet,
    FlowInput,
    Head,
    Pool,
    torch_embed,
)
from kinlens.training.models.onnx_trunk import OnnxTrunk
from kinlens.training.regularizers.flows import Coupling, Scaling

MAX_SUM_DIFFERENCE = 1e-3
"""Per coordinate, between the sum of a map and the embedding."""

MAX_DIFFERENCE = 1e-2
"""Mean difference between the maps of ONNX and torch, relative to their mean size: if two positions
share a maximum up to rounding, either may get it."""


class EmbeddingMap(nn.Module):
    r"""An embedding as a sum over the positions p of the trunk's last map.

    .. math:: e = \sum_p m_p, \qquad \langle q, e \rangle = \sum_p \langle q, m_p \rangle

    Given the image, each step of the head is linear. It is applied to the parts :math:`x_p` of its
    input, :math:`x = \sum_p x_p`:

    - pooling: :math:`f_p / P` for a mean; for a maximum its value, shared equally by the positions
      that reach it; for GeM its value, shared in proportion to the powers of the :math:`f_p`;
    - a linear layer: :math:`W x_p + b / P`;
    - an activation: :math:`x_p` times the factor :math:`a(x) / x` of the whole;
    - a coupling: its scale, computed from the whole, and the parts of its shift;
    - a norm: division by the norm of the whole.

    So the sum is exact up to rounding. **Reading**: a bias is spread equally over all positions, as
    if it were part of each feature. So with a projection centred on the training images
    (`start.projection = "trunk"`) a position that looks like their average contributes nothing.

    Raises: ExportError if the pooling uses no positions.
    """

    def __init__(self, net: EmbeddingNet) -> None:
        super().__init__()
        if net.pool.kind == "cls":
            raise ExportError(
                'There is no map for model.pooling = "cls": the class token is not a position of '
                "the image. Export without --map, or train with another pooling."
            )
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (B, 3, S, S) to (B, D, h, w). Raises: ExportError if tokens form no square."""
        net = self.net
        maps = net.trunk(net.normalize(images)).float()  # (B, C, h, w) or (B, T, C)
        if maps.ndim == 3:
            maps = _square(maps[:, net.pool.prefix :])
        height, width = maps.shape[2:]
        parts = pooled_parts(net.pool, maps.flatten(2)).transpose(1, 2)  # (B, P, C)
        layers = [net.projection, net.flow_input, *(net.flow.chain() if net.flow else ())]
        for layer in layers:
            parts = parts_through(layer, parts)  # (B, P, D)
        made = _normalized(parts).transpose(1, 2)
        return made.reshape(*made.shape[:2], height, width)


def pooled_parts(pool: Pool, maps: Tensor) -> Tensor:
    """Contribution of each position to the pooled features, (B, C, P)."""
    mean, largest = maps / maps.shape[-1], maps.amax(-1, keepdim=True)
    reached = (maps == largest).to(maps.dtype)
    at_most = largest * reached / reached.sum(-1, keepdim=True)
    if pool.kind == "gap":
        return mean
    if pool.kind == "gmp":
        return at_most
    if pool.kind == "gap+gmp":
        return mean + at_most
    whole = pool(maps.unsqueeze(-1)).unsqueeze(-1)  # (B, C, 1)
    exponent = pool.exponent.float().clamp(min=MIN_EXPONENT)
    clipped = maps.clamp(min=MIN_ACTIVATION)
    powers: Tensor = (clipped / clipped.amax(-1, keepdim=True)).pow(exponent)
    parts: Tensor = powers / powers.sum(-1, keepdim=True) * whole
    return parts


def parts_through(layer: nn.Module, parts: Tensor) -> Tensor:
    """Parts (B, P, D) of a layer's input to the parts of its output, for layers of the head."""
    whole = parts.sum(1, keepdim=True)  # (B, 1, D)
    if isinstance(layer, nn.Sequential):
        for inner in layer:
            parts = parts_through(inner, parts)
        return parts
    if isinstance(layer, Head):
        hidden = parts_through(nn.ReLU(), parts_through(layer.inner, parts))
        return parts_through(layer.linear, parts) + parts_through(layer.outer, hidden)
    if isinstance(layer, nn.Linear):
        return F.linear(parts, layer.weight) + layer.bias / parts.shape[1]
    if isinstance(layer, FlowInput):
        parts = parts_through(layer.activation, parts)
        return layer.norm * _normalized(parts)
    if isinstance(layer, Coupling):
        return _coupled(layer, parts)
    if isinstance(layer, Scaling):
        scaled: Tensor = layer(parts).y
        return scaled
    if isinstance(layer, nn.Identity):
        return parts
    if isinstance(layer, nn.ReLU | nn.LeakyReLU):
        factor: Tensor = layer(whole) / torch.where(whole == 0, torch.ones_like(whole), whole)
        return parts * factor
    raise AssertionError(f"a head has no {type(layer).__name__}")


def _normalized(parts: Tensor) -> Tensor:
    """Parts (B, P, D) divided by the norm of their sum."""
    norm: Tensor = torch.linalg.vector_norm(parts.sum(1, keepdim=True), dim=2, keepdim=True)
    return parts / norm.clamp(min=1e-12)


def _coupled(layer: Coupling, parts: Tensor) -> Tensor:
    first, second = parts[..., : layer.split], parts[..., layer.split :]
    given, changed = (second, first) if layer.transform_first else (first, second)
    raw, shift = parts_through(layer.conditioner, given).chunk(2, dim=-1)
    moved = changed * layer.bound(raw.sum(1, keepdim=True)).exp() + shift
    return torch.cat((moved, given) if layer.transform_first else (given, moved), dim=-1)


def _square(tokens: Tensor) -> Tensor:
    """Patch tokens (B, P, C) as a map (B, C, h, h). Raises: ExportError."""
    side = math.isqrt(tokens.shape[1])
    if side * side != tokens.shape[1]:
        raise ExportError(
            f"There is no map for this backbone: its {tokens.shape[1]} tokens form no square. "
            "Export without --map."
        )
    return tokens.transpose(1, 2).reshape(tokens.shape[0], tokens.shape[2], side, side)


def require_map(net: nn.Module, spec: Preprocessing) -> None:
    """Raises: ExportError if there can be no map of `net`."""
    if isinstance(net, EmbeddingNet) and isinstance(net.trunk, OnnxTrunk):
        raise ExportError(
            "There is no map of an imported network: its positions are not known. Export without "
            "--map."
        )
    if spec.aspect == "squashed":
        raise ExportError(
            'There is no map for input.aspect = "squashed": its positions are not squares of the '
            "image. Export without --map."
        )


def write_map(
    net: EmbeddingNet, spec: Preprocessing, inputs: Images, embeddings: Embeddings, path: Path
) -> MapFile:
    """Write the map of `net` as ONNX, checked on golden tensors. Raises: ExportError."""
    map_net = EmbeddingMap(net).eval()
    write_onnx(map_net, spec.crop_px, path, "map")
    by_onnx = load(path, SessionSettings(threads=core_count()), FP32).run
    return check_map(partial(torch_embed, map_net), by_onnx, inputs, embeddings)


def check_map(
    by_torch: Callable[[Images], Maps],
    by_onnx: Callable[[Images], Maps],
    inputs: Images,
    embeddings: Embeddings,
) -> MapFile:
    """Compare maps of golden tensors, and their sums with embeddings. Raises: ExportError."""
    expected, found = by_torch(inputs), by_onnx(inputs)
    difference = float(np.abs(found - expected).mean() / np.abs(expected).mean())
    apart = float(np.abs(found.sum(axis=(2, 3)) - embeddings).max())
    if not (difference <= MAX_DIFFERENCE and apart <= MAX_SUM_DIFFERENCE):
        raise ExportError(
            f"The map in ONNX differs from torch by {difference:.1%} of its size (limit "
            f"{MAX_DIFFERENCE:.0%}), and its sums from the embeddings by {apart:.2e} (limit "
            f"{MAX_SUM_DIFFERENCE:.0e}). No bundle was written; export without --map."
        )
    return MapFile(sum_difference=apart, difference=difference)
