"""int8: GPTQ and the correction of biases, on small random networks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional as F

from kinlens.embedder.types import Embeddings, Images
from kinlens.training.export import int8 as int8_module
from kinlens.training.export.bundle import write_onnx
from kinlens.training.export.int8 import gptq, quantize_int8

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


class Tokens(nn.Module):
    """A transformer's shape: one convolution cuts patches, the rest is matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleDict({"patch": nn.Conv2d(3, 16, 8, 8), "mlp": nn.Linear(16, 16)})

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.trunk["patch"](images.float() / 64).flatten(2).mT
        attention = torch.softmax(tokens @ tokens.mT, dim=-1)
        mixed: torch.Tensor = self.trunk["mlp"](attention @ tokens)
        return mixed.mean(dim=1)


class Export:
    """A network in fp32, in int8, and as onnxruntime rounds it before the correction."""

    def __init__(self, net: nn.Module, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.images = smooth_images(64)
        self.fp32, self.int8, self.plain = (folder / f"{name}.onnx" for name in ("a", "b", "c"))
        write_onnx(net.eval(), SIDE, self.fp32)
        self.net, self._patch = net, patch

    def quantize(self) -> None:
        quantize_int8(self.fp32, self.images, self.int8)
        with self._patch.context() as patch:
            patch.setattr(int8_module, "correct", lambda *_: None)
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


class Quantized(NamedTuple):
    """Of a convolution: weights as whole numbers and as they count, the bias and its step."""

    codes: NDArray[np.int8]
    weights: NDArray[np.float32]
    bias: NDArray[np.float64]
    step: NDArray[np.float32]


def quantized(path: Path, number: int) -> Quantized:
    """Of the convolution with this number in the file."""
    graph = onnx.load(path).graph
    values = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    node = [node for node in graph.node if node.op_type == "Conv"][number]
    made = {n.output[0]: n for n in graph.node if n.op_type == "DequantizeLinear"}
    kernel, bias = (made[name] for name in node.input[1:])
    codes, scales, whole, step = (values[n] for n in (*kernel.input[:2], *bias.input[:2]))
    weights = codes * scales.reshape(-1, *[1] * (codes.ndim - 1))
    return Quantized(codes, weights, whole * step.astype(np.float64), step)


def mobile() -> nn.Module:
    """Depthwise, strided, padded, dilated and grouped, with and without bias.

    One weight of each channel is large, as in trained networks, and makes the scale coarse.
    """
    net = Net(
        *(nn.Conv2d(16, 16, 3, 2, padding=1, groups=16, bias=False), nn.ReLU6()),
        *(nn.Conv2d(16, 32, 3, 2, padding=1, bias=False), nn.ReLU6()),
        *(nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=4), nn.ReLU6()),
        *(nn.Conv2d(32, 24, (3, 1), padding=(1, 0)), nn.ReLU6(), nn.Conv2d(24, 12, 1)),
    )
    with torch.no_grad():
        for conv in [layer for layer in net.trunk[3:] if isinstance(layer, nn.Conv2d)]:
            conv.weight.flatten(1)[:, 0] *= 20
    return net


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Kind], Export]:
    def made(kind: Kind) -> Export:
        torch.manual_seed(1)
        return Export(kind(), tmp_path, monkeypatch)

    return made


def test_correction_brings_outputs_nearer_to_fp32(make: Callable[[Kind], Export]) -> None:
    export = make(mobile)
    export.quantize()
    first = export.int8.read_bytes()
    export.quantize()
    assert export.int8.read_bytes() == first
    unseen = smooth_images(64, seed=1)
    expected = run(export.fp32, unseen)
    plain, corrected = (run(path, unseen) - expected for path in (export.plain, export.int8))
    assert np.abs(corrected).mean() < 0.7 * np.abs(plain).mean()
    # (n, 12 channels, 6 x 6): the shift of a channel is what bias correction removes.
    shifts = [np.abs(e.reshape(64, 12, -1).mean(axis=(0, 2))).mean() for e in (corrected, plain)]
    assert shifts[0] < 0.2 * shifts[1]


@pytest.mark.parametrize(
    ("groups", "kernel", "stride", "dilation", "pads", "bias"),
    [
        (16, (3, 3), 7, 1, (0, 0, 0, 0), True),
        (1, (3, 3), 7, 1, (1, 0, 0, 0), False),
        (4, (3, 2), 7, (2, 1), (0, 0, 0, 1), True),
        (1, (1, 3), 7, 1, (0, 1, 1, 0), True),
        (2, (6, 6), 1, 1, (0, 0, 0, 0), False),
    ],
)
def test_biases_move_by_the_rounding_error_of_the_mean_patch(
    make: Callable[[Kind], Export],
    groups: int,
    kernel: tuple[int, int],
    stride: int,
    dilation: Any,
    pads: tuple[int, int, int, int],
    bias: bool,
) -> None:
    top, left, bottom, right = pads
    export = make(
        lambda: Net(
            *(nn.AvgPool2d(4), nn.ZeroPad2d((left, right, top, bottom))),
            nn.Conv2d(16, 32, kernel, stride, 0, dilation, groups, bias),
        )
    )
    export.quantize()
    assert run(export.fp32, export.images).shape == (64, 32)  # so the one patch is sampled
    net = export.net
    with torch.no_grad():
        maps = net.trunk[:-1](torch.from_numpy(export.images).float() / 64)
        patches = F.unfold(maps, kernel, dilation, 0, stride)[..., 0]
        mean = patches.mean(dim=0).reshape(groups, -1).repeat_interleave(32 // groups, 0)
        exact = net.trunk[-1].weight.flatten(1).numpy()
    after, before = quantized(export.int8, 3), quantized(export.plain, 3)
    shift = ((exact - after.weights.reshape(exact.shape)) * mean.numpy()).sum(axis=1)
    step = float(after.step.max())
    assert np.abs(shift).max() > 2 * step
    np.testing.assert_allclose(after.bias - before.bias, shift, atol=0.51 * step)


def test_weights_of_too_many_columns_are_not_rounded_again(
    make: Callable[[Kind], Export], monkeypatch: pytest.MonkeyPatch
) -> None:
    export = make(lambda: Net(nn.Conv2d(16, 8, 3), nn.Conv2d(8, 4, 1)))
    monkeypatch.setattr(int8_module, "_MAX_COLUMNS", 16 * 9 - 1)
    export.quantize()
    wide, before = quantized(export.int8, 3), quantized(export.plain, 3)
    np.testing.assert_array_equal(wide.codes, before.codes)
    assert (wide.bias != before.bias).any()
    assert (quantized(export.int8, 4).codes != quantized(export.plain, 4).codes).any()


def test_channels_that_are_always_zero_do_no_harm(make: Callable[[Kind], Export]) -> None:
    def dead() -> nn.Module:
        net = Net(nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 3))
        with torch.no_grad():
            net.trunk[4].weight[:2] = 0  # a channel without weights
            net.trunk[4].bias[1:3] = -100  # channels that never pass the ReLU
            net.trunk[6].bias[:] = -100  # nothing varies behind it
        return net

    export = make(dead)
    export.quantize()
    after, before = (
        [quantized(path, n) for n in (3, 4, 5)] for path in (export.int8, export.plain)
    )
    assert all((conv.codes != 0).any() and np.isfinite(conv.bias).all() for conv in after)
    np.testing.assert_array_equal(after[0].codes[:2], 0)
    np.testing.assert_array_equal(after[2].codes, before[2].codes)


def shared() -> nn.Module:
    conv = nn.Conv2d(16, 16, 1)
    return Net(conv, nn.ReLU(), conv)


def one_dimensional() -> nn.Module:
    return Net(nn.Flatten(2), nn.Conv1d(16, 8, 5, 4))


@pytest.mark.parametrize("kind", [shared, one_dimensional, Tokens])
def test_other_layers_are_only_rounded(make: Callable[[Kind], Export], kind: Kind) -> None:
    export = make(kind)
    export.quantize()
    assert TensorProto.INT8 in {t.data_type for t in onnx.load(export.int8).graph.initializer}
    assert export.int8.read_bytes() == export.plain.read_bytes()


def test_automatic_pads_are_left_alone(make: Callable[[Kind], Export]) -> None:
    export = make(lambda: Net(nn.Conv2d(16, 8, 3, padding=1)))
    model = onnx.load(export.fp32)
    conv = [node for node in model.graph.node if node.op_type == "Conv"][3]
    kept = [a for a in conv.attribute if a.name not in ("pads", "auto_pad")]
    del conv.attribute[:]
    conv.attribute.extend([*kept, helper.make_attribute("auto_pad", "SAME_UPPER")])
    onnx.save(model, export.fp32)
    export.quantize()
    assert export.int8.read_bytes() == export.plain.read_bytes()


def correlated(groups: int, columns: int, seed: int = 0) -> NDArray[np.float64]:
    """A covariance (G, K, K) of full rank, far from diagonal."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(groups, 3 * columns, columns)) + 2 * rng.normal(
        size=(groups, 3 * columns, 1)
    )
    x *= rng.uniform(0.5, 2, size=(groups, 1, columns))
    return np.asarray(x.swapaxes(1, 2) @ x / x.shape[1])


def by_the_definition(
    weights: NDArray[np.float64], scales: NDArray[np.float64], covariance: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Equation 2 of the paper for one group: the inverse of each step is computed afresh."""
    order = list(np.argsort(-np.diag(covariance), kind="stable"))
    damped = covariance + 0.01 * np.diag(covariance).mean() * np.eye(len(order))
    left, codes = weights.copy(), np.zeros_like(weights)
    for position, column in enumerate(order):
        inverse = np.linalg.inv(damped[np.ix_(order[position:], order[position:])])
        codes[:, column] = np.clip(np.rint(left[:, column] / scales), -127, 127)
        error = (left[:, column] - codes[:, column] * scales) / inverse[0, 0]
        left[:, order[position:]] -= error[:, None] * inverse[0]
    return codes


def test_gptq_is_its_definition_in_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_module, "_BLOCK", 8)
    weights = np.random.default_rng(1).normal(size=(3, 5, 20))
    scales = np.abs(weights).max(axis=2, keepdims=True) / 20  # coarse; some codes leave ±127
    scales[:, 0] /= 10
    covariance = correlated(3, 20)
    found = gptq(weights, scales, covariance)
    assert np.abs(found).max() == 127
    for group in range(3):
        expected = by_the_definition(weights[group], scales[group, :, 0], covariance[group])
        np.testing.assert_array_equal(found[group], expected)


def test_without_correlation_gptq_rounds_to_the_nearest() -> None:
    weights = np.random.default_rng(3).normal(size=(2, 4, 9))
    scales = np.abs(weights).max(axis=2, keepdims=True) / 127
    variances = np.diag(np.r_[np.zeros(4), np.arange(1.0, 6)])
    for covariance in (variances, np.zeros((9, 9))):
        found = gptq(weights, scales, np.stack([covariance, covariance]))
        np.testing.assert_array_equal(found, np.rint(weights / scales))
