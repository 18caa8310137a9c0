"""Export a checkpoint, or a pretrained trunk, to a model bundle, with quality gates.

Exported are normalisation, trunk, pooling, projection, the first flow and the L2 normalisation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kinlens.embedder.bundle import MAP, WEIGHTS, Bundle, make_room, model_name, write_bundle
from kinlens.embedder.durable import staged
from kinlens.embedder.engines.models import SessionSettings, engine_versions
from kinlens.embedder.errors import CalibrationError, ExportError
from kinlens.embedder.machine import core_count
from kinlens.embedder.manifest import (
    Baseline,
    BundleManifest,
    GoldenHashes,
    HeldOut,
    HeldOutSplit,
    Parity,
    Precision,
    Preprocessing,
    Variant,
)
from kinlens.embedder.seen import Seen
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.types import Embed, Embeddings, Images
from kinlens.training.bundles.calibration import fit_calibration
from kinlens.training.bundles.golden import golden_images, golden_inputs
from kinlens.training.bundles.graph import folded, write_onnx
from kinlens.training.bundles.map import require_map, write_map
from kinlens.training.bundles.precisions import Candidate, OnRefusal, accepted, open_candidates
from kinlens.training.checkpoint import Checkpoint
from kinlens.training.config.job import Job, stored_job
from kinlens.training.config.settings import ONNX, Input, Model
from kinlens.training.data.records import LabelledImages, Split
from kinlens.training.device import choose_device
from kinlens.training.evaluation.evaluate import OnBatch, embed, embed_with, searched
from kinlens.training.evaluation.retrieval import Retrieval, queries_in, retrieval
from kinlens.training.evaluation.structure import require_distinct
from kinlens.training.folder import UNTRAINED
from kinlens.training.models.backbones import write_weights
from kinlens.training.models.embedding import EmbeddingNet, torch_embed
from kinlens.training.models.from_bundle import new_network
from kinlens.training.models.onnx_trunk import OnnxTrunk

PARITY_BATCHES = (1, 3, 8, 13)
"""Batch sizes at which torch and ONNX are compared; none is the batch size of the trace."""

MAX_DIFFERENCE = 1e-4
MAX_RECALL_DIFFERENCE = 0.1
"""Points of R@1."""

_PACKAGES = ("torch", "onnx", "pillow", "numpy")

_Vectors = dict[tuple[str, str], Embeddings]


@dataclass(frozen=True)
class Measured:
    """The images that an export is measured on, the precisions, and the callbacks."""

    split: Split
    job: Job
    asked: Sequence[Precision] = ()
    on_batch: OnBatch | None = None
    on_refusal: OnRefusal | None = None

    @property
    def ks(self) -> tuple[int, ...]:
        return tuple(sorted({1, *self.job.recall_at}))

    @property
    def parts(self) -> dict[str, LabelledImages]:
        return {name: images for name, images in self.split.parts.items() if name != "train"}

    @property
    def held_out(self) -> HeldOutSplit:
        return "test" if self.split.validation is None else "validation"

    def accepted(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those without a fault. Raises: ExportError."""
        return accepted(candidates, self.asked, self.on_refusal)


def export_checkpoint(
    checkpoint: Checkpoint,
    split: Split,
    out: Path,
    on_batch: OnBatch | None = None,
    precisions: Sequence[Precision] = (),
    on_refusal: OnRefusal | None = None,
    trunk: bool = False,
    with_map: bool = False,
    seen: Seen | None = None,
    keep_weights: bool = False,
) -> Bundle:
    """Write the bundle of a checkpoint to the new folder `out`.

    Nothing is written unless the ONNX file agrees with torch to 1e-4 on the golden images in some
    batch sizes and to 0.1 points of R@1 on the test images, and no other precision loses more than
    0.5 points of R@1 on the held-out images.

    Args:
        split: the run's data. Precisions are compared on `split.validation` or, without one, on
            `split.test`; scores are calibrated on whichever of the two has more classes; int8
            takes its ranges from `split.train`.
        on_batch: called with the number of images after each batch; `images_to_embed` in total.
        precisions: to write in addition to fp32.
        on_refusal: called with another precision that fails, and the reason; it is then omitted.
        trunk: export the pooled features of the trunk that the run began with, not its model.
        with_map: also export the share of each position in the embedding (see `EmbeddingMap`).
        seen: what the model was trained on, for comparisons with other models.
        keep_weights: also write the state dict of the network, to continue its training.

    Raises: DatasetError if `split` is not the split of the run; EvaluationError if all embeddings
        are equal; ExportError, BundleError.
    """
    make_room(out)
    split.require(checkpoint.split_sha256, "The checkpoint")
    job = stored_job(checkpoint.job, "the job of the run")
    data = Measured(split, job, precisions, on_batch, on_refusal)
    spec, backbone = job.input.preprocessing(), job.model.backbone
    if trunk and checkpoint.began_with != UNTRAINED:
        raise ExportError(
            f"The run continued the bundle {job.model.weights}, so it has no untrained trunk. "
            "Export the run without --trunk, or use that bundle."
        )
    if trunk or checkpoint.trunk_alone:
        alone = checkpoint.trunk_alone
        net = checkpoint.network()[1] if alone else new_network(job).eval().without_head()
        manifest = _manifest(f"{job.name}-trunk", net.dim, spec, backbone, licence=job.licence)
        seen = None
    else:
        net = checkpoint.network()[1]
        manifest = _manifest(
            job.name,
            net.dim,
            spec,
            backbone,
            licence=job.licence,
            job=job.as_dict(),
            data_sha256=split.train.content_sha256(),
            split_sha256=split.sha256(),
            baseline=_baseline(checkpoint, split),
        )
    return _export(net, manifest, out, data, with_map, seen, keep_weights)


def export_backbone(
    name: str, model: Model, spec: Input, out: Path, with_map: bool = False
) -> Bundle:
    """Write the bundle of a pretrained trunk: its pooled features, without recall."""
    make_room(out)
    net = EmbeddingNet(model.model_copy(update={"dim": None})).eval()
    net.check_sizes(spec.preprocessing().crop_px)
    manifest = _manifest(name, net.dim, spec.preprocessing(), model.backbone)
    return _export(net, manifest, out, with_map=with_map)


def export_network(
    net: nn.Module, dim: int, name: str, spec: Preprocessing, out: Path, licence: str
) -> Bundle:
    """Write the bundle of a network whose vectors have `dim` numbers, without recall.

    Args:
        net: uint8 (N, 3, S, S) to float32 (N, D), unit norm.

    Raises: ExportError unless the ONNX file and torch agree; BundleError.
    """
    make_room(out)
    return _export(net.eval(), _manifest(name, dim, spec, name, licence=licence), out)


def export_imported(
    graph: Path,
    parity: Parity,
    name: str,
    licence: str,
    spec: Preprocessing,
    out: Path,
    data: Measured | None = None,
) -> Bundle:
    """Write the bundle of a graph of `import_graph`, whose difference from its file is `parity`.

    Without `data` it has no recall, calibration and other precisions.

    Raises: EvaluationError if all embeddings are equal; ExportError, BundleError.
    """
    model = Model(backbone=ONNX, weights="none", frozen_trunk=True)
    net = EmbeddingNet(model, trunk=OnnxTrunk(graph.read_bytes())).without_head().eval()
    manifest = _manifest(name, net.dim, spec, ONNX, licence=licence, parity=parity)
    return _export(net, manifest, out, data)


def images_to_embed(split: Split) -> int:
    """The total of a progress bar for `export_checkpoint`."""
    return sum(len(images) for name, images in split.parts.items() if name != "train")


def _manifest(
    name: str, dim: int, spec: Preprocessing, backbone: str, **more: Any
) -> BundleManifest:
    return BundleManifest(
        name=name,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        dim=dim,
        preprocessing=spec,
        model_sha256="",
        golden=GoldenHashes(files={}),
        backbone=backbone,
        versions={**{package: version(package) for package in _PACKAGES}, **engine_versions()},
        **more,
    )


def _baseline(checkpoint: Checkpoint, split: Split) -> Baseline | None:
    recall = {name: value for name, value in checkpoint.trunk.test.items() if name.startswith("R@")}
    if "R@1" not in recall:
        return None
    queries = queries_in(split.test, split.gallery)
    return Baseline(model=checkpoint.began_with, queries=queries, recall=recall)


def _export(
    net: nn.Module,
    manifest: BundleManifest,
    out: Path,
    data: Measured | None = None,
    with_map: bool = False,
    seen: Seen | None = None,
    keep_weights: bool = False,
) -> Bundle:
    if with_map:
        require_map(net, manifest.preprocessing)
    # Next to the bundle there must be space for it; a /tmp in memory may have none.
    with staged(out.parent) as folder:
        written = folded(net, manifest.preprocessing.crop_px)
        trial = _trial(net, written, manifest, folder)
        inputs = trial.golden_inputs()
        fp32 = OnnxEmbedder.open(trial, SessionSettings(threads=core_count()))
        golden = fp32.embed(inputs)
        parity = manifest.parity or check_parity(trial.golden_vectors(), fp32.embed, inputs)
        figures: dict[str, Any] = {"parity": parity}
        candidates: list[Candidate] = []
        if data is not None:
            assert isinstance(net, EmbeddingNet)  # as all that have data or a map
            assert isinstance(written, EmbeddingNet)
            found = open_candidates(written, data.asked, trial, data.split.train)
            candidates = data.accepted(found)
            vectors = _embedded(data, manifest.preprocessing, net, fp32.embed, candidates)
            figures = _figures(parity, data, vectors, candidates)
            candidates = data.accepted(candidates)
        figures["variants"] = {
            each.mode.precision: Variant(**each.comparison.model_dump(), sha256="")
            for each in candidates
            if each.comparison and each.has_own_file
        }
        figures["modes"] = {
            each.mode.key: each.comparison for each in candidates if not each.has_own_file
        }
        files = {model_name(x.mode.precision): x.model for x in candidates if x.model}
        if with_map:
            assert isinstance(written, EmbeddingNet)
            files[MAP] = folder / MAP
            figures["map"] = write_map(written, manifest.preprocessing, inputs, golden, files[MAP])
        if keep_weights:
            files[WEIGHTS] = folder / WEIGHTS
            write_weights(net, files[WEIGHTS])
        return write_bundle(
            out,
            manifest.model_copy(update=figures),
            trial.model_path,
            trial.golden_images(),
            inputs,
            golden,
            files,
            {each.mode: each.golden for each in candidates},
            seen,
        )


def _trial(net: nn.Module, written: nn.Module, manifest: BundleManifest, folder: Path) -> Bundle:
    """A provisional bundle of `written` with the golden vectors of `net`, to be measured."""
    spec = manifest.preprocessing
    write_onnx(written, spec.crop_px, folder / "model.onnx")
    images = golden_images(spec)
    inputs = golden_inputs(images, spec)
    golden = torch_embed(net, inputs)
    return write_bundle(folder / "trial", manifest, folder / "model.onnx", images, inputs, golden)


def _embedded(
    data: Measured,
    spec: Preprocessing,
    net: EmbeddingNet,
    by_onnx: Embed,
    candidates: Sequence[Candidate],
) -> _Vectors:
    """Vectors by part of the data and by source; each image is decoded once.

    Torch runs on the device of the job, and `net` is on the CPU again afterwards. Features of a
    frozen trunk are in the cache of its training, otherwise they are computed for it.
    """
    vectors: _Vectors = {}
    runtime = data.job.runtime
    net.to(choose_device(runtime))
    for part, images in data.parts.items():
        functions: dict[str, Embed] = {"fp32": by_onnx}
        if part != "validation" and net.frozen_trunk:
            vectors[part, "torch"] = embed(net, images, data.job)
        elif part != "validation":
            functions["torch"] = partial(torch_embed, net)
        if part == data.held_out:
            functions |= {candidate.mode.key: candidate.embed for candidate in candidates}
        made = embed_with(functions, images, spec, runtime, data.on_batch)
        vectors |= {(part, name): found for name, found in made.items()}
    net.cpu()
    return vectors


def _figures(
    parity: Parity, data: Measured, vectors: _Vectors, candidates: Sequence[Candidate]
) -> dict[str, Any]:
    """The manifest's fields on recall, parity and calibration; candidates get their comparison."""
    by_torch, by_onnx = (_recall(data, vectors, name) for name in ("torch", "fp32"))
    check_recall(by_torch.recall[1], by_onnx.recall[1])
    recalls = {"recall_at_1_torch": by_torch.recall[1], "recall_at_1_onnx": by_onnx.recall[1]}

    calibration = reason = None
    parts = data.parts
    fitted: HeldOutSplit = max(("test", data.held_out), key=lambda part: parts[part].classes)
    try:
        calibration = fit_calibration(vectors[fitted, "fp32"], parts[fitted].labels, fitted)
    except CalibrationError as error:
        reason = str(error)

    images, fp32 = parts[data.held_out], vectors[data.held_out, "fp32"]
    require_distinct(torch.from_numpy(fp32), parts[data.held_out].labels)
    recall = retrieval(fp32, images.labels, ks=data.ks).recall_by_name()
    page = HeldOut(split=data.held_out, images=len(images), recall=recall, no_calibration=reason)
    for candidate in candidates:
        candidate.measure(page, images.labels, fp32, vectors[data.held_out, candidate.mode.key])
    return {
        "recall": by_onnx.recall_by_name(),
        "parity": parity.model_copy(update=recalls),
        "held_out": page,
        "calibration": calibration,
    }


def _recall(data: Measured, vectors: _Vectors, name: str) -> Retrieval:
    found = [vectors[part, name] for part in ("test", "gallery") if (part, name) in vectors]
    return retrieval(*searched(found, data.split.tested), ks=data.ks)


# The ONNX file, and its difference from the network


def check_parity(by_torch: Embeddings, by_onnx: Embed, inputs: Images) -> Parity:
    """Compare vectors of torch (N, D) with those of ONNX, in each batch size, on golden tensors.

    Raises: ExportError above 1e-4.
    """
    worst = 0.0
    for size in PARITY_BATCHES:
        batch = np.resize(inputs, (size, *inputs.shape[1:]))
        expected = np.resize(by_torch, (size, by_torch.shape[1]))
        difference = np.abs(expected - by_onnx(batch)).max()
        worst = max(worst, float(np.nan_to_num(difference, nan=np.inf)))
    if worst > MAX_DIFFERENCE:
        raise ExportError(
            f"The ONNX file differs from torch by {worst:.2e} on the golden images; the limit is "
            f"{MAX_DIFFERENCE:.0e}. No bundle was written; compare the versions of torch, onnx and "
            "onnxruntime with constraints.txt."
        )
    return Parity(max_abs_difference=worst, batch_sizes=PARITY_BATCHES)


def check_recall(by_torch: float, by_onnx: float) -> None:
    """Compare R@1 of torch and ONNX on the test images. Raises: ExportError above 0.1 points."""
    if abs(by_torch - by_onnx) > MAX_RECALL_DIFFERENCE:
        raise ExportError(
            f"The first result is right for {by_onnx:.2f} % of the test images with the ONNX file "
            f"and {by_torch:.2f} % with torch; the limit is a difference of "
            f"{MAX_RECALL_DIFFERENCE} points."
        )
