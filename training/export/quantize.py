"""The network in int8 for the CPU: static quantization, calibrated on training images."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from embedder.manifest import Preprocessing
from embedder.types import Images
from training.data.images import EvaluationImages
from training.data.records import LabelledImages
from training.export.graph import trunk_nodes

CALIBRATION_IMAGES = 200
_BATCH = 8
_OPS = (
    "Add",
    "AveragePool",
    "Clip",
    "Concat",
    "Conv",
    "Gemm",
    "GlobalAveragePool",
    "MatMul",
    "MaxPool",
    "Relu",
)
"""The rest of a trunk stays in float32: softmax, layer norm and other curves suffer from 8 bits."""


def calibration_images(
    images: LabelledImages, spec: Preprocessing, count: int = CALIBRATION_IMAGES, seed: int = 0
) -> Images:
    """A random choice of training images as the service preprocesses them: uint8 (n, 3, S, S).

    Raises: DatasetError if one cannot be read.
    """
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(images), min(count, len(images)), replace=False)
    views = EvaluationImages(images, spec)
    pixels: NDArray[np.uint8] = np.stack([views[int(i)][0].numpy() for i in sorted(chosen)])
    return pixels


def quantize_int8(model: Path, images: Images, out: Path) -> None:
    """Write the int8 twin of an fp32 model, as quantize and dequantize nodes (QDQ).

    Weights are signed, with a scale for each output channel; activations are unsigned, with the
    range that they have on `images`. Only the trunk is quantized. See docs/decisions/0006.

    Args:
        model: what `write_onnx` wrote.
        images: (n, 3, S, S).
        out: file to write.

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
        op_types_to_quantize=list(_OPS),
        nodes_to_exclude=[node.name for node in content.graph.node if node.name not in trunk],
    )
    prepared.unlink()


class _Reader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    """Feeds batches to onnxruntime until it says None."""

    def __init__(self, name: str, images: Images) -> None:
        self._batches: Iterator[dict[str, Images]] = (
            {name: images[start : start + _BATCH]} for start in range(0, len(images), _BATCH)
        )

    def get_next(self) -> dict[str, Images] | None:
        return next(self._batches, None)
