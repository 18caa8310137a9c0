"""From a checkpoint to a model bundle, through gates.

Only what inference needs is exported: normalisation, trunk, pooling, projection, the first flow and
the L2 normalisation. Proxies, the second flow and the augmentation stay behind.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import nn

from embedder.bundle import Bundle, VariantFiles, write_bundle
from embedder.errors import BundleError, EvaluationError, ExportError
from embedder.manifest import (
    Baseline,
    BundleManifest,
    GoldenHashes,
    HeldOut,
    HeldOutSplit,
    OtherPrecision,
    Precision,
    Preprocessing,
    Variant,
)
from embedder.preprocess import preprocess
from embedder.session import OnnxEmbedder, SessionSettings
from embedder.types import Embeddings
from training.bundle_weights import new_network
from training.checkpoint import Checkpoint
from training.config.job import parse_job
from training.config.settings import Input, Model, Runtime
from training.data.images import EvaluationImages, build_loader
from training.data.records import LabelledImages, Split
from training.evaluation.interval import queries_in
from training.evaluation.retrieval import Retrieval, retrieval
from training.export.calibration import fit_calibration
from training.export.onnx_file import (
    Embed,
    check_parity,
    check_recall,
    golden_images,
    torch_embed,
    write_onnx,
)
from training.export.precisions import Candidate, compare, make_candidate
from training.inference import batches
from training.models.backbones import channels_of
from training.models.embedding import EmbeddingNet

_BATCH = 64

OnBatch = Callable[[int], None]
OnRefusal = Callable[[str], None]
_Vectors = dict[tuple[str, str], Embeddings]


@dataclass(frozen=True)
class _Data:
    """The images that an export is measured on."""

    split: Split
    ks: tuple[int, ...] = (1,)
    runtime: Runtime = field(default_factory=lambda: Runtime(workers=0))
    on_batch: OnBatch | None = None

    @property
    def parts(self) -> dict[str, LabelledImages]:
        """Every image that is embedded, once."""
        split = self.split
        parts = {"test": split.test, "gallery": split.gallery, "validation": split.validation}
        return {name: images for name, images in parts.items() if images is not None}

    @property
    def held_out(self) -> HeldOutSplit:
        """Of what precisions are compared on."""
        return "test" if self.split.validation is None else "validation"


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
            Each is decoded once, by `runtime.workers` of the job, and embedded by torch, the ONNX
            file and the other precisions in turn.
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
    ks = tuple(sorted({1, *job.recall_at}))
    data = _Data(split, ks, job.runtime, on_batch)
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
    return _export(net, manifest, out, None if split is None else _Data(split), precisions)


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
    data = _Data(split, runtime=job.runtime)
    return _export(net, manifest, out, data, precisions, on_refusal)


def images_to_embed(split: Split) -> int:
    """How many images `export_checkpoint` embeds: the total of a progress bar."""
    return sum(len(images) for images in _Data(split).parts.values())


def _export(
    net: EmbeddingNet,
    manifest: BundleManifest,
    out: Path,
    data: _Data | None,
    precisions: Sequence[Precision],
    on_refusal: OnRefusal | None = None,
) -> Bundle:
    others = [precision for precision in dict.fromkeys(precisions) if precision != "fp32"]
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
        fp32 = OnnxEmbedder.open(trial, SessionSettings(threads=os.cpu_count() or 1))
        by_torch = partial(torch_embed, net)
        manifest = manifest.model_copy(
            update={"parity": check_parity(by_torch, fp32.embed, inputs)}
        )
        files: dict[OtherPrecision, VariantFiles] = {}
        if data is not None:
            candidates = _candidates(others, trial, data, on_refusal)
            vectors = _embedded(data, manifest.preprocessing, by_torch, fp32.embed, candidates)
            manifest = _with_figures(manifest, data, vectors, candidates, on_refusal)
            files = {name: candidates[name].files for name in manifest.variants}
        golden = fp32.embed(inputs)
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


def _candidates(
    precisions: Sequence[OtherPrecision], trial: Bundle, data: _Data, on_refusal: OnRefusal | None
) -> dict[OtherPrecision, Candidate]:
    """The precisions that can be made and hold here."""
    made = {}
    for precision in precisions:
        with _refusal(precision, on_refusal):
            made[precision] = make_candidate(precision, trial, data.split.train, trial.path.parent)
    return made


def _embedded(
    data: _Data,
    spec: Preprocessing,
    by_torch: Embed,
    by_onnx: Embed,
    candidates: Mapping[OtherPrecision, Candidate],
) -> _Vectors:
    """Vectors by part of the data and what made them, each image decoded once.

    torch embeds the test images and the gallery, other precisions the held-out images.
    """
    vectors: _Vectors = {}
    for part, images in data.parts.items():
        functions: dict[str, Embed] = {"fp32": by_onnx}
        if part != "validation":
            functions["torch"] = by_torch
        if part == data.held_out:
            functions |= {name: candidate.embed for name, candidate in candidates.items()}
        made = embed_with(functions, images, spec, data.runtime, data.on_batch)
        vectors |= {(part, name): found for name, found in made.items()}
    return vectors


def _with_figures(
    manifest: BundleManifest,
    data: _Data,
    vectors: _Vectors,
    candidates: Mapping[OtherPrecision, Candidate],
    on_refusal: OnRefusal | None,
) -> BundleManifest:
    """The manifest with recall, its parity, the calibration and the precisions that passed."""
    by_torch, by_onnx = (_recall(data, vectors, name) for name in ("torch", "fp32"))
    check_recall(by_torch.recall[1], by_onnx.recall[1])
    figures = {"recall_at_1_torch": by_torch.recall[1], "recall_at_1_onnx": by_onnx.recall[1]}

    images, fp32 = data.parts[data.held_out], vectors[data.held_out, "fp32"]
    recall = retrieval(fp32, images.labels, ks=data.ks).recall_by_name()
    most: HeldOutSplit = "test"
    if data.held_out == "validation" and images.classes > data.split.test.classes:
        most = "validation"
    calibration = reason = None
    try:
        calibration = fit_calibration(vectors[most, "fp32"], data.parts[most].labels, most)
    except EvaluationError as error:
        reason = str(error)
    page = HeldOut(split=data.held_out, images=len(images), recall=recall, no_calibration=reason)

    pages: dict[OtherPrecision, Variant] = {}
    for name, candidate in candidates.items():
        with _refusal(name, on_refusal):
            found = vectors[data.held_out, name]
            pages[name] = compare(candidate, page, images.labels, fp32, found)
    update = {
        "recall": by_onnx.recall_by_name(),
        "parity": manifest.parity and manifest.parity.model_copy(update=figures),
        "held_out": page,
        "calibration": calibration,
        "variants": pages,
    }
    return manifest.model_copy(update=update)


def _recall(data: _Data, vectors: _Vectors, name: str) -> Retrieval:
    """Recall of the test images, in the gallery if there is one."""
    test, labels = vectors["test", name], data.split.test.labels
    if data.split.gallery is None:
        return retrieval(test, labels, ks=data.ks)
    gallery = vectors["gallery", name]
    return retrieval(test, labels, gallery, data.split.gallery_labels(), data.ks)


@contextmanager
def _refusal(precision: Precision, on_refusal: OnRefusal | None) -> Iterator[None]:
    """A block whose ExportError is about one precision, which may be left out."""
    try:
        yield
    except ExportError as error:
        if on_refusal is None:
            raise ExportError(
                f"{error} No bundle was written; export without --precision {precision}, or "
                "with --skip-refused."
            ) from error
        on_refusal(f"{precision} is left out: {error}")


def embed_with(
    functions: Mapping[str, Embed],
    images: LabelledImages,
    spec: Preprocessing,
    runtime: Runtime,
    on_batch: OnBatch | None = None,
) -> dict[str, Embeddings]:
    """What each function makes of all images (N, ...), preprocessed as in the service.

    Every image is decoded once, in the processes of `runtime`; `on_batch` is called with the number
    of images that were just embedded.

    Raises: DatasetError if an image cannot be read.
    """
    dataset = EvaluationImages(images, spec)
    loader = build_loader(dataset, _BATCH, runtime, torch.device("cpu"), seed=0)
    chunks: dict[str, list[Embeddings]] = {name: [] for name in functions}
    for batch, _ in batches(loader):
        for name, function in functions.items():
            chunks[name].append(function(batch.numpy()))
        if on_batch is not None:
            on_batch(len(batch))
    return {name: np.concatenate(parts) for name, parts in chunks.items()}


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
