"""From a checkpoint to a model bundle, through parity gates.

Only what inference needs is exported: normalisation, trunk, pooling, projection, the first flow and
the L2 normalisation. Proxies, the second flow and the augmentation stay behind.
"""

import io
import os
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from embedder.bundle import Bundle, write_bundle
from embedder.errors import ExportError
from embedder.manifest import BundleManifest, GoldenHashes, Parity, Preprocessing
from embedder.preprocess import preprocess
from embedder.session import OnnxEmbedder, SessionSettings
from embedder.types import Embeddings, Images
from training.checkpoint import Checkpoint
from training.config.job import Job, parse_job
from training.config.model import Input, Model
from training.data.dataset import EvaluationImages
from training.data.records import LabelledImages, Split
from training.data.rendered import render_view
from training.evaluation import Recall, recall_at
from training.models.embedding import EmbeddingNet

PARITY_BATCHES = (1, 3, 8, 13)
"""Batch sizes at which torch and ONNX are compared; the graph is traced with none of them."""

MAX_DIFFERENCE = 1e-4
MAX_RECALL_DIFFERENCE = 0.1  # points of R@1
_TRACE_BATCH = 2
_OPSET = 20
_GOLDEN_IMAGES = 8
_GOLDEN_SCALES = (1.3, 2.5)
_EXIF_ORIENTATION = 0x0112
_BATCH = 64

OnBatch = Callable[[int], None]


def network_of(checkpoint: Checkpoint) -> tuple[Job, EmbeddingNet]:
    """The job and the trained network of a checkpoint, in evaluation mode on the CPU."""
    job = parse_job(checkpoint.job, origin="the job in the checkpoint")
    random_start = job.model.model_copy(update={"weights": "none"})
    net = EmbeddingNet(random_start, job.regularizers.determinant)
    net.load_state_dict(checkpoint.net)
    return job, net.eval()


def export_checkpoint(
    checkpoint: Checkpoint, split: Split, out: Path, on_batch: OnBatch | None = None
) -> Bundle:
    """Write the bundle of a checkpoint to the new folder `out`.

    The ONNX file must agree with torch to 1e-4 on the golden images at several batch sizes and to
    0.1 points of R@1 on the test images, or nothing is written.

    Args:
        checkpoint: of a run.
        split: the run's data; R@1 is measured on `split.test`.
        out: must not exist.
        on_batch: called with the number of images after each batch that was embedded.

    Raises: DatasetError if `split` is not the one of the run; ExportError, BundleError.
    """
    split.require(checkpoint.split_sha256, "The checkpoint")
    job, net = network_of(checkpoint)
    manifest = _manifest(job.name, net.dim, job.input.preprocessing(), job.model.backbone)
    manifest = manifest.model_copy(
        update={
            "job": job.as_dict(),
            "data_sha256": split.train.content_sha256(),
            "split_sha256": split.sha256(),
            "licence": job.licence,
        }
    )
    return _export(net, manifest, out, split.test, job.recall_at, on_batch)


def export_backbone(name: str, model: Model, spec: Input, out: Path) -> Bundle:
    """Write the bundle of a pretrained trunk alone: its pooled features, L2-normalised.

    Raises: CheckpointError if the weights cannot be had; ExportError, BundleError.
    """
    net = EmbeddingNet(model.model_copy(update={"dim": None})).eval()
    manifest = _manifest(name, net.dim, spec.preprocessing(), model.backbone)
    return _export(net, manifest, out, None, (), None)


def _export(
    net: EmbeddingNet,
    manifest: BundleManifest,
    out: Path,
    test: LabelledImages | None,
    recall_ks: tuple[int, ...],
    on_batch: OnBatch | None,
) -> Bundle:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.onnx"
        write_onnx(net, manifest.preprocessing.crop_px, model)
        images = golden_images(manifest.preprocessing)
        inputs = np.stack([preprocess(data, manifest.preprocessing) for data in images])
        golden = _torch_embed(net, inputs)
        trial = write_bundle(Path(folder) / "trial", manifest, model, images, inputs, golden)
        embedder = OnnxEmbedder.open(trial, SessionSettings(threads=os.cpu_count() or 1))
        parity = check_parity(net, embedder, inputs)
        if test is not None:
            recall, parity = _check_recall(net, embedder, test, recall_ks, parity, on_batch)
            manifest = manifest.model_copy(update={"recall": recall.as_dict()})
        manifest = manifest.model_copy(update={"parity": parity})
        return write_bundle(out, manifest, model, images, inputs, embedder.embed(inputs))


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


def check_parity(net: EmbeddingNet, embedder: OnnxEmbedder, inputs: Images) -> Parity:
    """Compare torch and ONNX on the golden tensors. Raises: ExportError above 1e-4."""
    worst = 0.0
    for size in PARITY_BATCHES:
        batch = np.resize(inputs, (size, *inputs.shape[1:]))
        difference = np.abs(_torch_embed(net, batch) - embedder.embed(batch)).max()
        worst = max(worst, float(np.nan_to_num(difference, nan=np.inf)))
    if worst > MAX_DIFFERENCE:
        raise ExportError(
            f"The ONNX file differs from torch by {worst:.2e} on the golden images, allowed is "
            f"{MAX_DIFFERENCE:.0e}. No bundle was written; compare the versions of torch, onnx and "
            "onnxruntime with constraints.txt."
        )
    return Parity(max_abs_difference=worst, batch_sizes=PARITY_BATCHES)


def embed_with(
    function: Callable[[Images], Embeddings],
    images: LabelledImages,
    spec: Preprocessing,
    on_batch: OnBatch | None = None,
) -> Embeddings:
    """Embeddings (N, D) of all images by `function`, preprocessed as in the service."""
    loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(EvaluationImages(images, spec), _BATCH)
    chunks = []
    for batch, _ in loader:
        chunks.append(function(batch.numpy()))
        if on_batch is not None:
            on_batch(len(batch))
    vectors: NDArray[np.float32] = np.concatenate(chunks)
    return vectors


def _check_recall(
    net: EmbeddingNet,
    embedder: OnnxEmbedder,
    test: LabelledImages,
    ks: tuple[int, ...],
    parity: Parity,
    on_batch: OnBatch | None,
) -> tuple[Recall, Parity]:
    spec = embedder.preprocessing
    ks = tuple(sorted({1, *ks}))
    by_torch = recall_at(
        embed_with(lambda batch: _torch_embed(net, batch), test, spec, on_batch), test.labels, ks
    )
    by_onnx = recall_at(embed_with(embedder.embed, test, spec, on_batch), test.labels, ks)
    if abs(by_torch.at[1] - by_onnx.at[1]) > MAX_RECALL_DIFFERENCE:
        raise ExportError(
            f"R@1 is {by_onnx.at[1]:.2f} with the ONNX file and {by_torch.at[1]:.2f} with torch on "
            f"the test images; allowed is a difference of {MAX_RECALL_DIFFERENCE} points. "
            "No bundle was written."
        )
    figures = {"recall_at_1_torch": by_torch.at[1], "recall_at_1_onnx": by_onnx.at[1]}
    return by_onnx, parity.model_copy(update=figures)


def _torch_embed(net: EmbeddingNet, images: Images) -> Embeddings:
    with torch.inference_mode():
        vectors: Embeddings = net(torch.from_numpy(images)).numpy()
    return vectors


def _manifest(name: str, dim: int, spec: Preprocessing, backbone: str) -> BundleManifest:
    packages = ("torch", "onnx", "onnxruntime", "pillow", "numpy")
    return BundleManifest(
        name=name,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        dim=dim,
        preprocessing=spec,
        model_sha256="",
        golden=GoldenHashes(files={}),
        backbone=backbone,
        versions={package: version(package) for package in packages},
    )
