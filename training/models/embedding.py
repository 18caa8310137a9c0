"""The network that is trained and exported: images in, unit vectors out.

Shapes: B images, S pixels a side, C channels of the trunk, D dimensions of an embedding.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.config.model import Model
from training.config.regularizers import Determinant
from training.flows.coupling import FlowOutput
from training.flows.real_nvp import RealNVP
from training.models.backbones import BACKBONES, build_trunk, fold_batch_norm

Pooling = Literal["gap", "gmp", "gap+gmp"]


class Normalize(nn.Module):
    """uint8 RGB (B, 3, S, S) to the float32 input of a trunk."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        scale = 1.0 / (255.0 * torch.tensor(std))
        shift = -torch.tensor(mean) / torch.tensor(std)
        self.register_buffer("scale", scale.view(3, 1, 1), persistent=False)
        self.register_buffer("shift", shift.view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) to the same shape."""
        scale, shift = self.get_buffer("scale"), self.get_buffer("shift")
        return images.float() * scale + shift


class Pool(nn.Module):
    """Global average (GAP) and maximum (GMP) pooling, or their sum: (B, C, H, W) to (B, C)."""

    def __init__(self, kind: Pooling) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, maps: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C)."""
        if self.kind == "gap":
            return maps.mean(dim=(2, 3))
        if self.kind == "gmp":
            return maps.amax(dim=(2, 3))
        return maps.mean(dim=(2, 3)) + maps.amax(dim=(2, 3))


class FlowInput(nn.Module):
    """Activation, then a fixed norm: what enters the flows of the determinant regularizer.

    Without the bound the flows learn the metric in place of the trunk, and recall on new classes
    halves.
    """

    def __init__(self, activation: Literal["leaky_relu", "none"], norm: float) -> None:
        super().__init__()
        self.activation = nn.LeakyReLU(0.1) if activation == "leaky_relu" else nn.Identity()
        self.norm = norm

    def forward(self, features: Tensor) -> Tensor:
        """(B, D) to (B, D), each row of length `norm`."""
        return self.norm * F.normalize(self.activation(features), dim=1)


def _projection(channels: int, dim: int | None) -> nn.Module:
    if dim is None:
        return nn.Identity()
    layer = nn.Linear(channels, dim)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    nn.init.zeros_(layer.bias)
    return layer


class EmbeddingNet(nn.Module):
    """Trunk, pooling, projection and, under determinant regularization, the first flow.

    `forward` is what is exported. `features` stops before the flow, where the regularizer begins.
    """

    def __init__(self, model: Model, determinant: Determinant | None = None) -> None:
        super().__init__()
        backbone = BACKBONES[model.backbone]
        self.normalize = Normalize(backbone.mean, backbone.std)
        self.trunk = build_trunk(model.backbone, model.weights)
        if model.batch_norm == "folded":
            fold_batch_norm(self.trunk)
        self.pool = Pool(model.pooling)
        self.dim = model.dim or backbone.channels
        self.projection = _projection(backbone.channels, model.dim)
        self.flow_input: nn.Module = nn.Identity()
        self.flow: RealNVP | None = None
        if determinant is not None:
            self.flow_input = FlowInput(determinant.activation, determinant.input_norm)
            shape = determinant.flow
            self.flow = RealNVP(self.dim, shape.layers, shape.hidden, shape.clamp)
        self.freeze_batch_norm = model.batch_norm == "frozen"
        self._freeze()

    def features(self, images: Tensor) -> Tensor:
        """uint8 (B, 3, S, S) to what enters the flow, or to the unnormalised embedding: (B, D).

        The result is float32; under autocast only the trunk runs in lower precision.
        """
        x = self.normalize(images)
        if not torch.onnx.is_in_onnx_export():
            x = x.contiguous(memory_format=torch.channels_last)
        maps = self.trunk(x)  # (B, C, H, W)
        pooled = self.pool(maps.float())  # (B, C)
        with torch.autocast(images.device.type, enabled=False):
            z: Tensor = self.flow_input(self.projection(pooled))
        return z

    def embed(self, features: Tensor) -> Tensor:
        """What `features` gave, to unit embeddings (B, D), in float32 whatever the autocast."""
        with torch.autocast(features.device.type, enabled=False):
            if self.flow is not None:
                output: FlowOutput = self.flow(features)
                features = output.y
            return F.normalize(features, dim=1)

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (B, 3, S, S) to unit embeddings (B, D)."""
        return self.embed(self.features(images))

    def train(self, mode: bool = True) -> "EmbeddingNet":
        """As torch's, but frozen batch norm stays in evaluation mode."""
        super().train(mode)
        self._freeze()
        return self

    def _freeze(self) -> None:
        if not self.freeze_batch_norm:
            return
        for module in self.trunk.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
                for parameter in module.parameters():
                    parameter.requires_grad_(False)
