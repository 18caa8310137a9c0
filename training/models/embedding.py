"""The network that is trained and exported: images in, unit vectors out.

Shapes: B images, S pixels a side, C channels of the trunk, D dimensions of an embedding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from kinlens.embedder.errors import JobError
from kinlens.embedder.types import Embeddings
from kinlens.training.config.settings import Model, Pooling
from kinlens.training.models.backbones import (
    BATCH_NORMS,
    TimmTrunk,
    build_trunk,
    channels_of,
    fold_batch_norm,
    normalization_of,
    stages_of,
)
from kinlens.training.models.onnx_trunk import OnnxTrunk
from kinlens.training.parts.fields import Options
from kinlens.training.regularizers.flows import Chain, FlowOutput, build_flow

GEM_START = 3.0
MIN_EXPONENT = 0.1
MIN_ACTIVATION = 1e-6


class Pool(nn.Module):
    """Pooling over all positions: (B, C, H, W), or tokens (B, T, C), to (B, C).

    `gap` is the mean, `gmp` the maximum, `gap+gmp` their sum, `cls` the class token and `gem` the
    generalised mean with one learnt p, the parameter `exponent`, that starts at 3:

        ( mean_x max(x, ε)^p )^(1/p),  ε = 1e-6

    **Reading**: in a trunk of tokens the positions are those of patches; the `prefix` of class and
    register tokens is ignored, except by `cls`. An exponent below 0.1 acts as 0.1.

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
            if maps.shape[1] <= self.prefix:
                raise JobError(
                    'The backbone returns its class token alone. Set model.pooling = "cls", or '
                    "choose another model.backbone."
                )
            maps = maps[:, self.prefix :].transpose(1, 2).unsqueeze(-1)  # (B, C, T, 1)
        if self.kind == "gap":
            return maps.mean(dim=(2, 3))
        if self.kind == "gmp":
            return maps.amax(dim=(2, 3))
        if self.kind == "gap+gmp":
            return maps.mean(dim=(2, 3)) + maps.amax(dim=(2, 3))
        with torch.autocast(maps.device.type, enabled=False):
            x = maps.float().clamp(min=MIN_ACTIVATION)
            p = self.exponent.float().clamp(min=MIN_EXPONENT)
            largest = x.amax(dim=(2, 3), keepdim=True).detach()  # (B, C, 1, 1): no power overflows
            mean = (x / largest).pow(p).mean(dim=(2, 3))
            return largest.flatten(1) * mean.pow(1 / p)


class Head(nn.Module):
    r"""A linear layer plus a second path with one hidden layer, (B, C) to (B, D):

    .. math:: y = W x + b + V \, \max(U x + c, 0) + d

    V and d start at 0, so initial weights computed for the linear layer (see training.start) are
    valid for both.
    """

    def __init__(self, channels: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.linear = linear_layer(channels, dim)
        self.inner = nn.Linear(channels, hidden)
        nn.init.kaiming_normal_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)
        self.outer = nn.Linear(hidden, dim)
        for parameter in self.outer.parameters():
            nn.init.zeros_(parameter)

    def forward(self, pooled: Tensor) -> Tensor:
        y: Tensor = self.linear(pooled) + self.outer(F.relu(self.inner(pooled)))
        return y


def linear_layer(channels: int, dim: int) -> nn.Linear:
    layer = nn.Linear(channels, dim)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    nn.init.zeros_(layer.bias)
    return layer


class FlowInput(nn.Module):
    """Activation, then a fixed norm: the input of the flows of the determinant regularizer.

    Without the bound the flows learn the metric instead of the trunk, and recall on new classes
    halves.
    """

    def __init__(self, activation: Literal["leaky_relu", "none"], norm: float) -> None:
        super().__init__()
        self.activation = nn.LeakyReLU(0.1) if activation == "leaky_relu" else nn.Identity()
        self.norm = norm

    def forward(self, features: Tensor) -> Tensor:
        return self.norm * F.normalize(self.activation(features), dim=1)


class EmbeddingNet(nn.Module):
    """Trunk, pooling, projection and, under determinant regularization, the first flow.

    `forward` is exported. `features` stops before the flow, where the regularizer begins. A `trunk`
    is used in place of the one that `model` names.
    """

    def __init__(
        self, model: Model, determinant: Options | None = None, trunk: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.trunk = trunk or build_trunk(model.backbone, model.weights)
        self.normalize = normalization_of(model.backbone, self.trunk)
        self.channels = channels = channels_of(model.backbone, self.trunk)
        prefix = 0
        if isinstance(self.trunk, TimmTrunk):
            prefix = self.trunk.prefix
            if model.pooling == "cls" and not self.trunk.class_token:
                raise JobError(
                    f'model.pooling = "cls" needs a class token, which {model.backbone} does not '
                    'have. Choose "gap", "gmp", "gap+gmp" or "gem".'
                )
        if model.batch_norm == "folded":
            fold_batch_norm(self.trunk)
        self.pool = Pool(model.pooling, prefix)
        self.dim = model.dim if isinstance(model.dim, int) else channels
        self.projection: nn.Module = nn.Identity()
        if model.dim is not None:
            if model.hidden is None:
                self.projection = linear_layer(channels, self.dim)
            else:
                self.projection = Head(channels, self.dim, model.hidden)
        self.flow_input: nn.Module = nn.Identity()
        self.flow: Chain | None = None
        if determinant is not None:
            self.flow_input = FlowInput(determinant.activation, determinant.input_norm)
            self.flow = build_flow(determinant.flow, self.dim)
        self.batch_norm = model.batch_norm
        self.backbone = model.backbone
        self.frozen_trunk = model.frozen_trunk
        self.frozen_stages = model.frozen_stages
        for norm in self._fixed_norms():
            norm.requires_grad_(self.batch_norm == "statistics")
        if self.frozen_trunk:
            self.trunk.requires_grad_(False)
            self.pool.requires_grad_(False)
        for parameter in self._of_frozen_stages():
            parameter.requires_grad_(False)
        self._freeze()

    def pooled(self, images: Tensor) -> Tensor:
        """uint8 (B, 3, S, S) to the pooled features of the trunk (B, C), in float32 or wider."""
        if isinstance(self.trunk, OnnxTrunk):
            vectors: Tensor = self.trunk(images)
            return vectors
        x = self.normalize(images)
        if not torch.onnx.is_in_onnx_export():
            x = x.contiguous(memory_format=torch.channels_last)
        # An exported trunk may be in float16.
        maps = self.trunk(x.to(next(self.trunk.parameters()).dtype))  # (B, C, H, W) or (B, T, C)
        pooled: Tensor = self.pool(maps.to(torch.promote_types(maps.dtype, torch.float32)))
        return pooled

    def features(self, images: Tensor) -> Tensor:
        """uint8 (B, 3, S, S) to features (B, D): the input of the flow or of the L2 norm."""
        return self.project(self.pooled(images))

    def project(self, pooled: Tensor) -> Tensor:
        """Pooled features (B, C) through projection and flow input to features (B, D)."""
        with torch.autocast(pooled.device.type, enabled=False):
            z: Tensor = self.flow_input(self.projection(pooled))
        return z

    def transform(self, features: Tensor) -> Tensor:
        """Features (B, D) through the flow, if there is one, to (B, D), of any length."""
        if self.flow is None:
            return features
        with torch.autocast(features.device.type, enabled=False):
            output: FlowOutput = self.flow(features)
            return output.y

    def embed(self, features: Tensor) -> Tensor:
        """Features (B, D) to unit embeddings (B, D), in float32 whatever the autocast."""
        with torch.autocast(features.device.type, enabled=False):
            return F.normalize(self.transform(features), dim=1)

    def embed_pooled(self, pooled: Tensor) -> Tensor:
        """Pooled features (B, C) to unit embeddings (B, D)."""
        return self.embed(self.project(pooled))

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (B, 3, S, S) to unit embeddings (B, D)."""
        return self.embed(self.features(images))

    def check_sizes(self, *sides: int) -> None:
        """Run the trunk once at each side, before a job spends time. Raises: JobError."""
        device = device_of(self.trunk)
        with evaluating(self), torch.no_grad():
            for side in sorted(set(sides)):
                self(torch.zeros(1, 3, side, side, dtype=torch.uint8, device=device))

    def train(self, mode: bool = True) -> "EmbeddingNet":
        """Set the mode as torch does, but keep what is frozen in evaluation mode."""
        super().train(mode)
        self._freeze()
        return self

    def without_head(self) -> "EmbeddingNet":
        """This network, changed to return the pooled features of its trunk only, L2-normalised."""
        self.projection, self.flow_input, self.flow = nn.Identity(), nn.Identity(), None
        self.dim = self.channels
        return self

    def _freeze(self) -> None:
        if self.frozen_trunk:
            self.trunk.eval()
        for norm in self._fixed_norms():
            norm.eval()
        frozen = set(self._of_frozen_stages())
        for module in self.trunk.modules():
            own = set(module.parameters())
            if own and own <= frozen:
                module.eval()

    def _of_frozen_stages(self) -> list[nn.Parameter]:
        if self.frozen_stages == 0:
            return []
        stages = stages_of(self.backbone, self.trunk)
        if self.frozen_stages >= len(stages):
            raise JobError(
                f"model.frozen_stages = {self.frozen_stages}, and {self.backbone} has "
                f"{len(stages)} stages. Lower it, or set model.frozen_trunk = true."
            )
        return list(chain.from_iterable(stages[: self.frozen_stages]))

    def _fixed_norms(self) -> list[nn.Module]:
        if self.batch_norm not in ("frozen", "statistics"):
            return []
        return [module for module in self.trunk.modules() if isinstance(module, BATCH_NORMS)]


def device_of(net: nn.Module) -> torch.device:
    """The device of the first parameter, or buffer of a network without parameters."""
    return next(chain(net.parameters(), net.buffers())).device


def torch_embed(
    net: nn.Module, rows: NDArray[Any], function: Callable[[Tensor], Tensor] | None = None
) -> Embeddings:
    """Apply `net`, or a `function` that uses it, to numpy rows on the device of `net`."""
    with evaluating(net), torch.inference_mode():
        there = torch.from_numpy(rows).to(device_of(net))
        vectors: Embeddings = (function or net)(there).float().cpu().numpy()
    return vectors


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """A block in which `net` is in evaluation mode, so that running it changes no state.

    Convolutions run in full float32, which cuDNN otherwise rounds to TF32.
    """
    was_training, rounded = net.training, torch.backends.cudnn.allow_tf32
    net.eval()
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = rounded
        net.train(was_training)
