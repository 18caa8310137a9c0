"""int8 for the CPU: onnxruntime quantizes the trunk, then each convolution is corrected.

Rounded weights shift the mean of each channel, and these shifts add up over the layers of a trained
network. Correcting the biases removes most of them. See docs/decisions/0022.
"""

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

from kinlens.embedder.engines.models import SessionSettings, create_session
from kinlens.embedder.machine import core_count
from kinlens.embedder.manifest import Preprocessing
from kinlens.embedder.types import Images
from kinlens.training.bundles.graph import trunk_nodes
from kinlens.training.data.images import EvaluationImages
from kinlens.training.data.records import LabelledImages

_BATCH = 8
_INT8 = "Add AveragePool Clip Concat Conv Gemm GlobalAveragePool MatMul MaxPool Relu"
"""The other operators of a trunk stay in float32: 8 bits harm softmax, layer norm and the like."""
_FLOAT_CONVOLUTIONS = 3
"""The first ones are thin: int8 saves no time there, and their rounding costs the most accuracy."""
_POSITIONS = 16
_INT32 = 2**31 - 1

_Floats = NDArray[np.float64]
_Layer = tuple[NodeProto, "_Patches"]


def range_images(images: LabelledImages, spec: Preprocessing, count: int = 200) -> Images:
    """A random sample of images as the service sees them: (n, 3, S, S). Raises: DatasetError."""
    views = EvaluationImages(images.some(count), spec)
    return np.stack([views[number][0].numpy() for number in range(len(views))])


def quantize_int8(model: Path, images: Images, out: Path) -> None:
    """Write the int8 version of an fp32 model, as quantize and dequantize nodes (QDQ).

    Weights are signed, with a scale for each output channel; activations are unsigned, with their
    range on `images`, uint8 (n, 3, S, S). Only the trunk is quantized, without its first three
    convolutions; the others are then corrected on `images` (see `correct`).

    Raises: ExportError if the graph has no trunk.
    """
    # Imported here, after `kinlens.embedder.engines.models` disabled onnxruntime's telemetry.
    from onnxruntime.quantization import QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = out.with_suffix(".prepared.onnx")
    # The exporter has inferred the shapes; onnxruntime's symbolic inference fails on its graphs.
    quant_pre_process(str(model), str(prepared), skip_symbolic_shape=True)
    fp32 = onnx.load(prepared)
    trunk = set(trunk_nodes(fp32))
    convolutions = [n for n in fp32.graph.node if n.op_type == "Conv" and n.name in trunk]
    trunk -= {node.name for node in convolutions[:_FLOAT_CONVOLUTIONS]}
    _add_missing_biases(fp32, convolutions[_FLOAT_CONVOLUTIONS:])
    onnx.save(fp32, prepared)
    quantize_static(
        str(prepared),
        str(out),
        _Reader(fp32.graph.input[0].name, images),
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=_INT8.split(),
        nodes_to_exclude=[node.name for node in fp32.graph.node if node.name not in trunk],
    )
    correct(out, prepared, images)
    prepared.unlink()


class _Reader:
    """Feeds batches to onnxruntime, None at the end: a `CalibrationDataReader`."""

    def __init__(self, name: str, images: Images) -> None:
        starts = range(0, len(images), _BATCH)
        self._batches = iter([{name: images[start : start + _BATCH]} for start in starts])

    def get_next(self) -> dict[str, Images] | None:
        return next(self._batches, None)


def _add_missing_biases(model: ModelProto, convolutions: list[NodeProto]) -> None:
    """Add zero biases, so that onnxruntime writes biases that can be corrected."""
    tensors = {t.name: t for t in model.graph.initializer}
    for node in convolutions:
        if node.input[1] in tensors and not any(node.input[2:]):
            zeros = np.zeros(tensors[node.input[1]].dims[0], np.float32)
            bias = numpy_helper.from_array(zeros, f"{node.name}.zero_bias")
            model.graph.initializer.append(bias)
            node.input[:] = [*node.input[:2], bias.name]


def correct(model: Path, prepared: Path, images: Images) -> None:
    """Correct the biases of the quantized convolutions.

    b += (W - Q) E[x] (https://arxiv.org/abs/1906.04721, section 4.2), with input patches x of the
    fp32 network, weights W and Q = scale * round(W / scale).

    x is sampled at 16 random positions of each image, with a fixed seed. Two-dimensional
    convolutions with explicit pads and weights of their own are corrected, others are unchanged.
    `model` is the output of `quantize_static` for `prepared`; both files are overwritten.
    """
    int8, fp32 = onnx.load(model), onnx.load(prepared)
    tensors = {t.name: t for t in int8.graph.initializer}
    dequantized = {n.output[0]: n for n in int8.graph.node if n.op_type == "DequantizeLinear"}
    twins = {node.name: node for node in int8.graph.node}
    weights = {t.name: t for t in fp32.graph.initializer}
    read = [name for node in fp32.graph.node for name in node.input]
    layers: list[_Layer] = []
    for node in fp32.graph.node:
        if node.op_type == "Conv" and read.count(node.input[1]) == 1 and node.input[1] in weights:
            patches = _Patches(node, list(weights[node.input[1]].dims))
            if patches.known and set(twins[node.name].input[1:]) <= dequantized.keys():
                layers.append((node, patches))
    if layers:
        _watch(fp32, layers, images, prepared)
    for node, patches in layers:
        kernel, bias = (dequantized[name] for name in twins[node.name].input[1:])
        exact = numpy_helper.to_array(weights[node.input[1]]).astype(np.float64)
        rounded, scale, codes, step = (
            numpy_helper.to_array(tensors[name]).astype(np.float64)
            for name in (*kernel.input[:2], *bias.input[:2])
        )
        shape = patches.groups, len(exact) // patches.groups, -1  # (G, O, K)
        scales = np.broadcast_to(scale.reshape(-1), len(exact)).reshape(shape)
        errors = exact.reshape(shape) - rounded.reshape(shape) * scales  # (G, O, K)
        shift = (errors @ patches.mean()[..., None]).reshape(-1)
        moved = np.clip(codes + np.rint(shift / np.where(step > 0, step, 1)), -_INT32, _INT32)
        name = bias.input[0]
        tensors[name].CopyFrom(numpy_helper.from_array(moved.astype(np.int32), name))
    onnx.save(int8, model)


def _watch(model: ModelProto, layers: list[_Layer], images: Images, path: Path) -> None:
    """Pass each layer its input patches; only the activations of one batch are in memory."""
    names = sorted({node.input[0] for node, _ in layers})
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    onnx.save(model, path)
    session = create_session(path, SessionSettings(threads=core_count()))
    random = np.random.default_rng(0)
    for batch in np.split(images, range(_BATCH, len(images), _BATCH)):
        found = session.run(names, {model.graph.input[0].name: batch})
        maps = dict(zip(names, found, strict=True))
        for node, patches in layers:
            patches.add(maps[node.input[0]], random)


class _Patches:
    """The mean of the input patches of a convolution: G groups, K = C / G * kh * kw columns.

    `known` is whether it is two-dimensional with explicit pads, so that patches can be cut.
    """

    def __init__(self, node: NodeProto, shape: list[int]) -> None:
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        self.known = len(shape) == 4 and given.get("auto_pad", b"NOTSET") == b"NOTSET"
        self.groups: int = given.get("group", 1)
        self._kernel = shape[2:]
        self._strides = given.get("strides", [1, 1])
        self._dilations = given.get("dilations", [1, 1])
        self._pads = given.get("pads", [0, 0, 0, 0])
        self._count = 0
        self._sum: _Floats = np.zeros(1)

    def add(self, maps: NDArray[np.float32], random: np.random.Generator) -> None:
        """Add patches of (n, C, h, w), the same number from each image."""
        (top, left, bottom, right), (dh, dw) = self._pads, self._dilations
        padded = np.pad(maps, ((0, 0), (0, 0), (top, bottom), (left, right)))
        spans = [d * (k - 1) + 1 for d, k in zip(self._dilations, self._kernel, strict=True)]
        windows = np.lib.stride_tricks.sliding_window_view(padded, spans, axis=(2, 3))
        windows = windows[:, :, :: self._strides[0], :: self._strides[1], ::dh, ::dw]
        rows, columns = windows.shape[2:4]
        at = random.integers(rows * columns, size=(len(maps), _POSITIONS))
        chosen = windows[np.arange(len(maps))[:, None], :, at // columns, at % columns]
        # (n, positions, C, kh, kw) to (G, P, K)
        x = chosen.reshape(at.size, self.groups, -1).swapaxes(0, 1)
        self._count += at.size
        self._sum = self._sum + x.sum(axis=1, dtype=np.float64)

    def mean(self) -> _Floats:
        """(G, K)."""
        return self._sum / self._count
