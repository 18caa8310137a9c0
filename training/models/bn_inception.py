"""BN-Inception, the trunk of most published results in metric learning.

Layers have the names of the published weight file `bn_inception-52deb4733.pth`, which come from
Caffe.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHANNELS = 1024
CLASSES = 1000


@dataclass(frozen=True)
class Block:
    """Widths of one inception block; 0 omits a branch.

    Without `project` the pooled input is passed on unchanged, and the block halves the map.
    """

    single: int
    triple: tuple[int, int]
    double: tuple[int, int]
    pool: str
    project: int

    @property
    def stride(self) -> int:
        return 1 if self.project else 2


BLOCKS = {
    "3a": Block(64, (64, 64), (64, 96), "average", 32),
    "3b": Block(64, (64, 96), (64, 96), "average", 64),
    "3c": Block(0, (128, 160), (64, 96), "maximum", 0),
    "4a": Block(224, (64, 96), (96, 128), "average", 128),
    "4b": Block(192, (96, 128), (96, 128), "average", 128),
    "4c": Block(160, (128, 160), (128, 160), "average", 128),
    "4d": Block(96, (128, 192), (160, 192), "average", 128),
    "4e": Block(0, (128, 192), (192, 256), "maximum", 0),
    "5a": Block(352, (192, 320), (160, 224), "average", 128),
    "5b": Block(352, (192, 320), (192, 224), "maximum", 128),
}


class BNInception(nn.Module):
    """BGR in 0..255 minus (104, 117, 128), (B, 3, S, S), to maps (B, 1024, S/32, S/32).

    Every convolution has a bias, a batch norm and a ReLU, in that order; ReLUs act before
    concatenation. `last_linear`, the classifier, only exists to load its weights.

    **Reading**: in a block that halves the map, the original convolutions round an odd side up and
    its pooling rounds it down, so only some input sizes work. Here both round up.

    References:
        Ioffe, Szegedy, Batch Normalization: Accelerating Deep Network Training by Reducing
        Internal Covariate Shift, figure 5. https://arxiv.org/abs/1502.03167
    """

    def __init__(self) -> None:
        super().__init__()
        self._add("conv1_7x7_s2", 3, 64, 7, 2)
        self._add("conv2_3x3_reduce", 64, 64, 1)
        self._add("conv2_3x3", 64, 192, 3)
        channels = 192
        for name, block in BLOCKS.items():
            self._add_block(f"inception_{name}", channels, block)
            channels = (
                block.single + block.triple[1] + block.double[1] + (block.project or channels)
            )
        self.last_linear = nn.Linear(channels, CLASSES)

    def _add(self, name: str, channels: int, width: int, side: int, stride: int = 1) -> None:
        self.add_module(name, nn.Conv2d(channels, width, side, stride, padding=side // 2))
        self.add_module(f"{name}_bn", nn.BatchNorm2d(width))

    def _add_block(self, name: str, channels: int, block: Block) -> None:
        if block.single:
            self._add(f"{name}_1x1", channels, block.single, 1)
        reduced, width = block.triple
        self._add(f"{name}_3x3_reduce", channels, reduced, 1)
        self._add(f"{name}_3x3", reduced, width, 3, block.stride)
        reduced, width = block.double
        self._add(f"{name}_double_3x3_reduce", channels, reduced, 1)
        self._add(f"{name}_double_3x3_1", reduced, width, 3)
        self._add(f"{name}_double_3x3_2", width, width, 3, block.stride)
        if block.project:
            self._add(f"{name}_pool_proj", channels, block.project, 1)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) to (B, 1024, S/32, S/32), about: 7 for 224 to 225, 8 for 232."""
        x = self._apply_layer("conv1_7x7_s2", images)  # (B, 64, S/2, S/2)
        x = F.max_pool2d(x, 3, 2, ceil_mode=True)  # (B, 64, S/4, S/4)
        x = self._apply_layer("conv2_3x3", self._apply_layer("conv2_3x3_reduce", x))
        x = F.max_pool2d(x, 3, 2, ceil_mode=True)  # (B, 192, S/8, S/8)
        for name, block in BLOCKS.items():
            x = self._apply_block(f"inception_{name}", block, x)
        return x

    def _apply_layer(self, name: str, x: Tensor) -> Tensor:
        normed: Tensor = self.get_submodule(f"{name}_bn")(self.get_submodule(name)(x))
        return F.relu(normed, inplace=True)

    def _apply_block(self, name: str, block: Block, x: Tensor) -> Tensor:
        triple = self._apply_layer(f"{name}_3x3_reduce", x)
        triple = self._apply_layer(f"{name}_3x3", triple)
        double = self._apply_layer(f"{name}_double_3x3_reduce", x)
        double = self._apply_layer(f"{name}_double_3x3_1", double)
        double = self._apply_layer(f"{name}_double_3x3_2", double)
        pooled = _pool(block, x)
        if block.project:
            pooled = self._apply_layer(f"{name}_pool_proj", pooled)
        branches = [triple, double, pooled]
        if block.single:
            branches.insert(0, self._apply_layer(f"{name}_1x1", x))
        return torch.cat(branches, dim=1)


def _pool(block: Block, x: Tensor) -> Tensor:
    if block.pool == "average":
        return F.avg_pool2d(x, 3, 1, padding=1)
    if block.stride == 1:
        return F.max_pool2d(x, 3, 1, padding=1)
    # Nothing is negative after a ReLU, so a border of zeros changes no maximum.
    even = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))
    return F.max_pool2d(even, 3, 2, ceil_mode=True)
