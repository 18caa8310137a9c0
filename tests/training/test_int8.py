"""int8: the correction of biases, on small random networks."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

from kinlens.embedder.types import Embeddings, Images
from kinlens.training.bundles import int8 as int8_module
from kinlens.training.bundles.bundle import write_onnx
from kinlens.training.bundles.int8 import quantize_int8

SIDE = 24
Kind = Callable[[], nn.Module]


class Net(nn.Module):
    """Three convolutions that stay in float32, then those under test."""

    def __init__(self, *tested: nn.Module) -> None:
        super().__init__()
        thin = [nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 16, 1)]
        self.trunk = nn.Sequential(*thin, nn.ReLU(), *tested)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps: torch.Tensor = self.trunk(images.float() / 64)
        return maps.flatten(1)


class Export:
    """A network in fp32, in int8, and as onnxruntime rounds it before the correction."""

    def __init__(self, net: nn.Module, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.images = smooth_images(64)
        self.fp32, self.int8, self.plain = (folder / f"{name}.onnx" for name in ("a", "b", "c"))
        write_onnx(net.eval(), SIDE, self.fp32)
        quantize_int8(self.fp32, self.images, self.int8)
        with patch.context() as patched:
            patched.setattr(int8_module, "correct", lambda *_: None)
            quantize_int8(self.fp32, self.images, self.plain)


def smooth_images(count: int, seed: int = 0) -> Images:
    """Noise of 3 x 3 blocks, since neighbours are alike in photos: uint8 (n, 3, S, S)."""
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 3, SIDE // 3, SIDE // 3))
    return coarse.repeat(3, axis=2).repeat(3, axis=3).astype(np.uint8)


def run(model: Path, images: Images) -> Embeddings:
    """As written: without optimization products are not fused, so no processor saturates."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    found: Embeddings = ort.InferenceSession(model, options).run(None, {"images": images})[0]
    return found


def mobile() -> nn.Module:
    """Depthwise, strided, padded, dilated and grouped, with and without bias.

    One weight of each channel is large, as in trained networks, and makes the scale coarse.
    """
    layers = [
        nn.Conv2d(16, 16, 3, 2, padding=1, groups=16, bias=False),
        nn.Conv2d(16, 32, 3, 2, padding=1, bias=False),
        nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=4),
        nn.Conv2d(32, 24, (3, 1), padding=(1, 0)),
        nn.Conv2d(24, 12, 1),
    ]
    for conv in layers:
        conv.weight.data.flatten(1)[:, 0] *= 20
    return Net(*(part for conv in layers for part in (conv, nn.ReLU6())))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Kind], Export]:
    def made(kind: Kind) -> Export:
        torch.manual_seed(1)
        return Export(kind(), tmp_path, monkeypatch)

    return made


def test_correction_brings_outputs_nearer_to_fp32(make: Callable[[Kind], Export]) -> None:
    export = make(mobile)
    first = export.int8.read_bytes()
    quantize_int8(export.fp32, export.images, export.int8)
    assert export.int8.read_bytes() == first
    unseen = smooth_images(64, seed=1)
    expected = run(export.fp32, unseen)
    plain, corrected = (run(path, unseen) - expected for path in (export.plain, export.int8))
    assert np.abs(corrected).mean() < 0.9 * np.abs(plain).mean()
    # (n, 12 channels, 6 x 6): the shift of a channel is what bias correction removes.
    shifts = [np.abs(e.reshape(64, 12, -1).mean(axis=(0, 2))).mean() for e in (corrected, plain)]
    assert shifts[0] < 0.2 * shifts[1]


def test_channels_that_are_always_zero_do_no_harm(make: Callable[[Kind], Export]) -> None:
    def dead() -> nn.Module:
        net = Net(nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 3))
        with torch.no_grad():
            net.trunk[4].weight[:2] = 0  # a channel without weights
            net.trunk[4].bias[1:3] = -100  # channels that never pass the ReLU
            net.trunk[6].bias[:4] = -100
        return net

    export = make(dead)
    expected = run(export.fp32, export.images)
    plain, corrected = (run(path, export.images) - expected for path in (export.plain, export.int8))
    assert np.abs(corrected).mean() <= np.abs(plain).mean()
