"""The network as an ONNX file, and how far the file is from the network."""

from pathlib import Path

import numpy as np
import torch

from embedder.errors import ExportError
from embedder.manifest import Parity
from embedder.session import OnnxEmbedder
from embedder.types import Embeddings, Images
from training.models.embedding import EmbeddingNet

PARITY_BATCHES = (1, 3, 8, 13)
"""Batch sizes at which torch and ONNX are compared; the graph is traced with none of them."""

MAX_DIFFERENCE = 1e-4
_TRACE_BATCH = 2
_OPSET = 20


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


def check_parity(net: EmbeddingNet, embedder: OnnxEmbedder, inputs: Images) -> Parity:
    """Compare torch and ONNX on the golden tensors. Raises: ExportError above 1e-4."""
    worst = 0.0
    for size in PARITY_BATCHES:
        batch = np.resize(inputs, (size, *inputs.shape[1:]))
        difference = np.abs(torch_embed(net, batch) - embedder.embed(batch)).max()
        worst = max(worst, float(np.nan_to_num(difference, nan=np.inf)))
    if worst > MAX_DIFFERENCE:
        raise ExportError(
            f"The ONNX file differs from torch by {worst:.2e} on the golden images, allowed is "
            f"{MAX_DIFFERENCE:.0e}. No bundle was written; compare the versions of torch, onnx and "
            "onnxruntime with constraints.txt."
        )
    return Parity(max_abs_difference=worst, batch_sizes=PARITY_BATCHES)


def torch_embed(net: EmbeddingNet, images: Images) -> Embeddings:
    """uint8 (N, 3, S, S) to the network's own embeddings (N, D)."""
    with torch.inference_mode():
        vectors: Embeddings = net(torch.from_numpy(images)).numpy()
    return vectors
