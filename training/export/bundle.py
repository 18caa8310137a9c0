"""From a checkpoint to a model bundle, through gates.

Only what inference needs is exported: normalisation, trunk, pooling, projection, the first flow and
the L2 normalisation. Proxies, the second flow and the augmentation stay behind.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader

from embedder.bundle import Bundle, write_bundle
from embedder.calibration import Calibration
from embedder.errors import BundleError, EvaluationError, ExportError
from embedder.manifest import (
    Baseline,
    BundleManifest,
    GoldenHashes,
    HeldOut,
    HeldOutSplit,
    Precision,
    Preprocessing,
)
from embedder.preprocess import preprocess
from embedder.session import OnnxEmbedder, SessionSettings
from embedder.types import Embeddings, Images
from training.bundle_weights import new_network
from training.checkpoint import Checkpoint
from training.config.job import parse_job
from training.config.model import Input, Model
from training.data.images import EvaluationImages
from training.data.records import LabelledImages, Split
from training.evaluation.interval import queries_in
from training.evaluation.retrieval import Retrieval, retrieval
from training.export.calibration import fit_calibration
from training.export.golden import golden_images
from training.export.onnx_file import check_parity, torch_embed, write_onnx
from training.export.variants import OnRefusal, Reference, make_variants
from training.models.backbones import channels_of
from training.models.embedding import EmbeddingNet

MAX_RECALL_DIFFERENCE = 0.1  # points of R@1
_BATCH = 64

Embed = Callable[[Images], Embeddings]
OnBatch = Callable[[int], None]


@dataclass(frozen=True)
class _Data:
    """The images that an export is measured on, preprocessed as in the service."""

    split: Split
    spec: Preprocessing
    ks: tuple[int, ...]
    on_batch: OnBatch | None = None

    @property
    def held_out(self) -> LabelledImages:
        """Images on which precisions are compared."""
        return self.split.test if self.split.validation is None else self.split.validation

    def embed_test(self, function: Embed) -> list[Embeddings]:
        """The test images and, if there is one, the gallery."""
        parts = (self.split.test, self.split.gallery)
        return [self._embed(function, part) for part in parts if part is not None]

    def embed_held_out(self, function: Embed) -> Embeddings:
        return self._embed(function, self.held_out)

    def _embed(self, function: Embed, images: LabelledImages) -> Embeddings:
        return embed_with(function, images, self.spec, self.on_batch)


def export_checkpoint(
    checkpoint: Checkpoint,
    split: Split,
    out: Path,
    on_batch: OnBatch | None = None,
    precisions: Sequence[Precision] = ("fp32",),
    on_refusal: OnRefusal | None = None,
) -> Bundle:
    """Write the bundle of a checkpoint to the new folder `out`.

    The ONNX file must agree with torch to 1e-4 on the golden images at several batch sizes and to
    0.1 points of R@1 on the test images, and no other precision may lose more than 0.5 points of
    R@1 on the held-out images, or nothing is written.

    Args:
        checkpoint: of a run.
        split: the run's data. Precisions are compared on `split.validation` or, without one, on
            `split.test`; scores are calibrated on the one of these two with more classes; int8
            takes its ranges from `split.train`.
        out: must not exist.
        on_batch: called with the number of images after each batch; `images_to_embed` in all.
        precisions: fp32 is always written.
        on_refusal: told why another precision is refused; then the bundle is written without it.

    Raises: DatasetError if `split` is not the one of the run; ExportError, BundleError.
    """
    split.require(checkpoint.split_sha256, "The checkpoint")
    job, net = checkpoint.network()
    manifest = _manifest(job.name, net.dim, job.input.preprocessing(), job.model.backbone)
    manifest = manifest.model_copy(
        update={
            "job": job.as_dict(),
            "data_sha256": split.train.content_sha256(),
            "split_sha256": split.sha256(),
            "licence": job.licence,
            "baseline": _baseline(checkpoint, split),
        }
    )
    data = _Data(split, manifest.preprocessing, tuple(sorted({1, *job.recall_at})), on_batch)
    return _export(net, manifest, out, data, precisions, on_refusal)


def export_backbone(
    name: str,
    model: Model,
    spec: Input,
    out: Path,
    split: Split | None = None,
    precisions: Sequence[Precision] = ("fp32",),
) -> Bundle:
    """Write the bundle of a pretrained trunk alone: its pooled features, L2-normalised.

    Recall, calibration and other precisions need images: `split`.

    Raises: CheckpointError if the weights cannot be had; ExportError, BundleError.
    """
    net = EmbeddingNet(model.model_copy(update={"dim": None})).eval()
    manifest = _manifest(name, net.dim, spec.preprocessing(), model.backbone)
    data = None if split is None else _Data(split, manifest.preprocessing, (1,))
    return _export(net, manifest, out, data, precisions)


def export_trunk(
    checkpoint: Checkpoint,
    split: Split,
    out: Path,
    precisions: Sequence[Precision] = ("fp32",),
    on_refusal: OnRefusal | None = None,
) -> Bundle:
    """Write the bundle of the trunk that a run began with: its pooled features.

    Raises: as `export_checkpoint`.
    """
    split.require(checkpoint.split_sha256, "The checkpoint")
    job = parse_job(checkpoint.job)
    net = new_network(job).eval()
    net.projection, net.flow_input, net.flow = nn.Identity(), nn.Identity(), None
    net.dim = channels_of(job.model.backbone, net.trunk)
    manifest = _manifest(
        f"{job.name}-trunk", net.dim, job.input.preprocessing(), job.model.backbone
    )
    manifest = manifest.model_copy(update={"licence": job.licence})
    data = _Data(split, manifest.preprocessing, (1,))
    return _export(net, manifest, out, data, precisions, on_refusal)


def images_to_embed(split: Split, precisions: Sequence[Precision] = ("fp32",)) -> int:
    """How many images `export_checkpoint` embeds: the total of a progress bar."""
    compared = 2 * (len(split.test) + len(split.gallery or ()))
    others = len(set(precisions) - {"fp32"})
    if split.validation is None:
        return compared + others * len(split.test)
    return compared + (1 + others) * len(split.validation)


def _export(
    net: EmbeddingNet,
    manifest: BundleManifest,
    out: Path,
    data: _Data | None,
    precisions: Sequence[Precision],
    on_refusal: OnRefusal | None = None,
) -> Bundle:
    others = [precision for precision in precisions if precision != "fp32"]
    if others and data is None:
        raise ExportError(
            f"{' and '.join(others)} must be compared with fp32 on images, and a trunk alone has "
            "none. Export a run, or fp32 alone."
        )
    if out.exists():
        raise BundleError(f"{out} exists already. Choose another folder or remove it first.")
    with tempfile.TemporaryDirectory() as name:
        trial = _trial(net, manifest, Path(name))
        inputs = trial.golden_inputs()
        embedder = OnnxEmbedder.open(trial, SessionSettings(threads=os.cpu_count() or 1))
        manifest = manifest.model_copy(update={"parity": check_parity(net, embedder, inputs)})
        files = {}
        if data is not None:
            manifest, reference = _measured(net, embedder, manifest, data)
            train = data.split.train
            made = make_variants(others, trial, reference, train, Path(name), on_refusal)
            files = {precision: one.files for precision, one in made.items()}
            pages = {precision: one.page for precision, one in made.items()}
            manifest = manifest.model_copy(update={"variants": pages})
        golden = embedder.embed(inputs)
        images = trial.golden_images()
        return write_bundle(out, manifest, trial.model_path, images, inputs, golden, files)


def _trial(net: EmbeddingNet, manifest: BundleManifest, folder: Path) -> Bundle:
    """A bundle with the golden vectors of torch, to be measured."""
    spec = manifest.preprocessing
    write_onnx(net, spec.crop_px, folder / "model.onnx")
    images = golden_images(spec)
    inputs = np.stack([preprocess(data, spec) for data in images])
    golden = torch_embed(net, inputs)
    return write_bundle(folder / "trial", manifest, folder / "model.onnx", images, inputs, golden)


def _measured(
    net: EmbeddingNet, embedder: OnnxEmbedder, manifest: BundleManifest, data: _Data
) -> tuple[BundleManifest, Reference]:
    """The manifest with recall, its parity and the calibration; fp32 on the held-out images."""
    by_torch = _recall(data, data.embed_test(lambda batch: torch_embed(net, batch)))
    vectors = data.embed_test(embedder.embed)
    by_onnx = _recall(data, vectors)
    if abs(by_torch.recall[1] - by_onnx.recall[1]) > MAX_RECALL_DIFFERENCE:
        raise ExportError(
            f"R@1 is {by_onnx.recall[1]:.2f} with the ONNX file and {by_torch.recall[1]:.2f} with "
            f"torch on the test images; allowed is a difference of {MAX_RECALL_DIFFERENCE} points. "
            "No bundle was written."
        )
    figures = {"recall_at_1_torch": by_torch.recall[1], "recall_at_1_onnx": by_onnx.recall[1]}
    known = data.held_out is data.split.test
    held_out = vectors[0] if known else data.embed_held_out(embedder.embed)
    calibration, reason = _calibrated(data, vectors[0], held_out)
    reference = _reference(data, held_out, reason)
    update = {
        "recall": by_onnx.recall_by_name(),
        "parity": manifest.parity and manifest.parity.model_copy(update=figures),
        "held_out": reference.page,
        "calibration": calibration,
    }
    return manifest.model_copy(update=update), reference


def _recall(data: _Data, vectors: Sequence[Embeddings]) -> Retrieval:
    """Recall of the test images, in the gallery if there is one."""
    if len(vectors) == 1:
        return retrieval(vectors[0], data.split.test.labels, ks=data.ks)
    gallery = data.split.gallery_labels()
    return retrieval(vectors[0], data.split.test.labels, vectors[1], gallery, ks=data.ks)


def _calibrated(
    data: _Data, test: Embeddings, held_out: Embeddings
) -> tuple[Calibration | None, str | None]:
    """The calibration, of the held-out part of most classes; or why there is none."""
    test_images, validation = data.split.test, data.split.validation
    name: HeldOutSplit = "test"
    images, vectors = test_images, test
    if validation is not None and validation.classes > test_images.classes:
        name, images, vectors = "validation", validation, held_out
    try:
        return fit_calibration(vectors, images.labels, name), None
    except EvaluationError as error:
        return None, str(error)


def _reference(data: _Data, vectors: Embeddings, no_calibration: str | None) -> Reference:
    """fp32 on the held-out images."""
    name: HeldOutSplit = "test" if data.held_out is data.split.test else "validation"
    labels = data.held_out.labels
    recall = retrieval(vectors, labels, ks=data.ks).recall_by_name()
    page = HeldOut(split=name, images=len(labels), recall=recall, no_calibration=no_calibration)
    return Reference(page, labels, vectors, data.embed_held_out)


def embed_with(
    function: Embed,
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


def _baseline(checkpoint: Checkpoint, split: Split) -> Baseline | None:
    """What the run measured of its trunk before the first step, on test images."""
    recall = {name: value for name, value in checkpoint.trunk.items() if name.startswith("R@")}
    if "R@1" not in recall:
        return None
    return Baseline(
        model=checkpoint.began_with, queries=queries_in(split.test, split.gallery), recall=recall
    )


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
