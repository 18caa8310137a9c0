"""int8 for the CPU: made from the fp32 file. See docs/decisions/0006."""

from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from embedder.manifest import Preprocessing
from embedder.types import Images
from training.data.images import EvaluationImages
from training.data.records import LabelledImages
from training.export.trunk import trunk_nodes

_BATCH = 8
_INT8 = "Add AveragePool Clip Concat Conv Gemm GlobalAveragePool MatMul MaxPool Relu"
"""The rest of a trunk stays in float32: softmax, layer norm and other curves suffer from 8 bits."""


def range_images(images: LabelledImages, spec: Preprocessing, count: int = 200) -> Images:
    """A random choice of images as the service preprocesses them: uint8 (n, 3, S, S).

    Raises: DatasetError if one cannot be read.
    """
    views = EvaluationImages(images.some(count), spec)
    return np.stack([views[number][0].numpy() for number in range(len(views))])


def quantize_int8(model: Path, images: Images, out: Path) -> None:
    """Write the int8 twin of an fp32 model, as quantize and dequantize nodes (QDQ).

    Weights are signed, with a scale for each output channel; activations are unsigned, with the
    range that they have on `images` (n, 3, S, S). Only the trunk is quantized.

    Raises: ExportError if the graph has no trunk.
    """
    prepared = out.with_suffix(".prepared.onnx")
    # The exporter has inferred the shapes; onnxruntime's symbolic inference fails on its graphs.
    quant_pre_process(str(model), str(prepared), skip_symbolic_shape=True)
    content = onnx.load(prepared)
    trunk = set(trunk_nodes(content))
    onnx.save(content, prepared)
    quantize_static(
        str(prepared),
        str(out),
        _Reader(content.graph.input[0].name, images),
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=_INT8.split(),
        nodes_to_exclude=[node.name for node in content.graph.node if node.name not in trunk],
    )
    prepared.unlink()


class _Reader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    """Feeds batches to onnxruntime until it says None."""

    def __init__(self, name: str, images: Images) -> None:
        starts = range(0, len(images), _BATCH)
        self._batches = iter([{name: images[start : start + _BATCH]} for start in starts])

    def get_next(self) -> dict[str, Images] | None:
        return next(self._batches, None)
