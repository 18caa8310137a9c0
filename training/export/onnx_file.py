"""The network as an ONNX file, and how far the file is from the network."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from embedder.errors import ExportError
from embedder.manifest import Parity, Preprocessing
from embedder.types import Embeddings, Images
from training.models.embedding import EmbeddingNet
from training.rendered.catalogue import render_view

Embed = Callable[[Images], Embeddings]
"""uint8 (N, 3, S, S) to unit vectors (N, D)."""

PARITY_BATCHES = (1, 3, 8, 13)
"""Batch sizes at which torch and ONNX are compared; the graph is traced with none of them."""

MAX_DIFFERENCE = 1e-4
MAX_RECALL_DIFFERENCE = 0.1
"""Points of R@1."""

_TRACE_BATCH = 2
_OPSET = 20
_GOLDEN_IMAGES = 8
_GOLDEN_SCALES = (1.3, 2.5)
_EXIF_ORIENTATION = 0x0112


def write_onnx(net: EmbeddingNet, size_px: int, path: Path) -> None:
    """The inference graph with its weights: uint8 (N, 3, S, S) to float32 (N, D), N free."""
    sample = torch.zeros(_TRACE_BATCH, 3, size_px, size_px, dtype=torch.uint8)
    with torch.no_grad():
        torch.onnx.export(
            net,
            (sample,),
            path,
            dynamo=True,
            external_data=False,
            opset_version=_OPSET,
            input_names=["images"],
            output_names=["embeddings"],
            dynamic_shapes=({0: torch.export.Dim("n", min=1)},),
            verbose=False,
        )


def torch_embed(net: EmbeddingNet, images: Images) -> Embeddings:
    """uint8 (N, 3, S, S) to the network's own embeddings (N, D)."""
    with torch.inference_mode():
        vectors: Embeddings = net(torch.from_numpy(images)).numpy()
    return vectors


def golden_images(spec: Preprocessing) -> list[bytes]:
    """Rendered products as JPEG files: known images that belong to nobody.

    Every second one is large enough to be decoded at a reduced scale; the last is turned by EXIF.
    """
    files = []
    for number in range(_GOLDEN_IMAGES):
        size = round(spec.resize_px * _GOLDEN_SCALES[number % 2])
        view = render_view(number, number, size_px=min(max(size, 32), 1024))
        exif = Image.Exif()
        if number == _GOLDEN_IMAGES - 1:
            exif[_EXIF_ORIENTATION] = 6
        buffer = io.BytesIO()
        view.save(buffer, "JPEG", quality=92, exif=exif)
        files.append(buffer.getvalue())
    return files


def check_parity(by_torch: Embed, by_onnx: Embed, inputs: Images) -> Parity:
    """Compare torch and ONNX on the golden tensors. Raises: ExportError above 1e-4."""
    worst = 0.0
    for size in PARITY_BATCHES:
        batch = np.resize(inputs, (size, *inputs.shape[1:]))
        difference = np.abs(by_torch(batch) - by_onnx(batch)).max()
        worst = max(worst, float(np.nan_to_num(difference, nan=np.inf)))
    if worst > MAX_DIFFERENCE:
        raise ExportError(
            f"The ONNX file differs from torch by {worst:.2e} on the golden images, allowed is "
            f"{MAX_DIFFERENCE:.0e}. No bundle was written; compare the versions of torch, onnx and "
            "onnxruntime with constraints.txt."
        )
    return Parity(max_abs_difference=worst, batch_sizes=PARITY_BATCHES)


def check_recall(by_torch: float, by_onnx: float) -> None:
    """Compare R@1 of torch and ONNX on the test images. Raises: ExportError above 0.1 points."""
    if abs(by_torch - by_onnx) > MAX_RECALL_DIFFERENCE:
        raise ExportError(
            f"R@1 is {by_onnx:.2f} with the ONNX file and {by_torch:.2f} with torch on the test "
            f"images; allowed is a difference of {MAX_RECALL_DIFFERENCE} points. "
            "No bundle was written."
        )
