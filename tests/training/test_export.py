import dataclasses
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import kinlens.training.export.bundle as export_module
import kinlens.training.export.precisions as precisions_module
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.calibration import Calibration
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import BundleCorruptError, BundleError, DatasetError, ExportError
from kinlens.embedder.explain import explain
from kinlens.embedder.session import MIN_FP32_COSINE, OnnxEmbedder
from kinlens.embedder.types import Embeddings, Images
from kinlens.training.checkpoint import Checkpoint, load_checkpoint
from kinlens.training.config.job import parse_job
from kinlens.training.config.settings import Input, Model, Runtime
from kinlens.training.data.load import load_split
from kinlens.training.data.protocol import with_protocol
from kinlens.training.data.records import LabelledImages, Split
from kinlens.training.evaluation.evaluate import embed_with
from kinlens.training.evaluation.retrieval import Retrieval
from kinlens.training.export.bundle import (
    MAX_DIFFERENCE,
    PARITY_BATCHES,
    check_parity,
    check_recall,
    export_backbone,
    export_checkpoint,
    images_to_embed,
)
from kinlens.training.export.map import EmbeddingMap
from kinlens.training.models.backbones import BACKBONES
from kinlens.training.models.embedding import torch_embed
from kinlens.training.trainer import fit
from tests.embedder.bundles import CALIBRATION
from tests.training.jobs import Silent, small_job

LONG = bool(os.environ.get("KINLENS_LONG_TESTS"))
SMALL = "timm:test_resnet.r160_in1k"
ALL = ("fp32", "int8", "fp16")


@dataclass
class Trained:
    """A run, its data, its bundle, and how often the export read each image and reported them."""

    checkpoint: Checkpoint
    split: Split
    bundle: Bundle
    reads: Counter[Path]
    reported: list[int]


@pytest.fixture(scope="module", autouse=True)
def _any_processor() -> Iterator[None]:
    """Where int8 saturates the network of these tests is far from fp32, which is no matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MIN_FP32_COSINE, "int8", -1.0)
        yield


def split_of(
    folder: Path, validation: float = 0.5, **changes: object
) -> tuple[dict[str, object], Split]:
    """A job on 12 products with a small network, and its split."""
    content = small_job(folder / "products", epochs=2).as_dict()
    content["model"] |= {"backbone": SMALL}
    content["data"] |= {"products": 12, **changes}
    content["protocol"] = {"validation_fraction": validation}
    job = parse_job(content)
    return content, with_protocol(load_split(job.data), job.protocol)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("run")
    content, split = split_of(folder)
    fit(parse_job(content), split, folder, Silent())
    checkpoint = load_checkpoint(folder)
    reported: list[int] = []
    reads: Counter[Path] = Counter()
    read = Path.read_bytes

    def counted(path: Path) -> bytes:
        reads[path] += 1
        return read(path)

    with pytest.MonkeyPatch.context() as patch:
        # Of 12 validation images, one is 8 points of recall.
        patch.setattr(precisions_module, "MAX_RECALL_LOSS", 100.0)
        patch.setattr(Path, "read_bytes", counted)
        bundle = export_checkpoint(
            checkpoint, split, folder / "bundle", reported.append, ALL, with_map=True
        )
    return Trained(checkpoint, split, bundle, reads, reported)


@pytest.fixture
def again(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """The same, where another export takes the ONNX file that is there: tracing takes seconds."""

    def copy(_net: object, _size_px: int, path: Path) -> None:
        shutil.copy(trained.bundle.model_path, path)

    monkeypatch.setattr(export_module, "write_onnx", copy)
    return trained


def test_the_graph_holds_only_what_inference_needs(trained: Trained) -> None:
    checkpoint, bundle = trained.checkpoint, trained.bundle
    model = onnx.load(bundle.model_path)
    names = {tensor.name for tensor in model.graph.initializer}
    names |= {name for node in model.graph.node for name in (node.name, *node.input, *node.output)}
    forbidden = ("proxies", "second", "determinant", "objective", "loss", "augment")
    assert not [name for name in names if any(word in name for word in forbidden)]
    assert any("flow.layers" in name for name in names)
    # Names can lie, so compare contents: no tensor of the objective is in the file, in any order.
    inside = [np.sort(onnx.numpy_helper.to_array(t), axis=None) for t in model.graph.initializer]
    for name, value in checkpoint.objective.items():
        if name.startswith("shares."):
            continue  # single numbers, which many a constant of the graph equals
        wanted = np.sort(value.numpy(), axis=None)
        if wanted.any():
            assert not any(a.shape == wanted.shape and np.allclose(a, wanted) for a in inside), name
    first = np.sort(checkpoint.net["flow.layers.0.conditioner.0.weight"].numpy(), axis=None)
    assert any(a.shape == first.shape and np.allclose(a, first) for a in inside)


def test_torch_and_onnx_agree_at_batch_sizes_that_were_never_traced(trained: Trained) -> None:
    net, embedder = trained.checkpoint.network()[1], OnnxEmbedder.open(trained.bundle)
    for size in (1, 3, 5, 17):
        batch = np.resize(trained.bundle.golden_inputs(), (size, 3, 32, 32))
        np.testing.assert_allclose(embedder.embed(batch), torch_embed(net, batch), atol=1e-4)


def test_an_exported_map_sums_to_the_embeddings_and_explains_their_cosine(trained: Trained) -> None:
    bundle = trained.bundle
    embedder, images = OnnxEmbedder.open(bundle), bundle.golden_inputs()
    assert embedder.has_map
    vectors, maps = embedder.embed(images), embedder.maps(images)
    np.testing.assert_allclose(maps.sum((2, 3)), vectors, atol=1e-3)
    by_torch = torch_embed(EmbeddingMap(trained.checkpoint.network()[1]), images)
    assert np.abs(maps - by_torch).mean() < 1e-2 * np.abs(by_torch).mean()
    match = explain(embedder, images[0], images[1])
    assert match.query.shape == match.hit.shape == maps.shape[2:]
    for total in (match.score, match.query.sum(), match.hit.sum()):
        assert total == pytest.approx(vectors[0] @ vectors[1], abs=1e-3)


def test_a_damaged_map_is_refused(trained: Trained, tiny_bundle: Bundle, tmp_path: Path) -> None:
    embedder = OnnxEmbedder.open(tiny_bundle)
    assert not embedder.has_map
    with pytest.raises(BundleError, match="Export it again with --map"):
        embedder.maps(tiny_bundle.golden_inputs())
    copied = Bundle.open(shutil.copytree(trained.bundle.path, tmp_path / "bundle"))
    copied.map_file().write_bytes(b"no model")
    with pytest.raises(BundleCorruptError, match=r"model\.map\.onnx has sha256"):
        Bundle.open(copied.path)


def test_the_manifest_tells_where_the_model_comes_from(trained: Trained) -> None:
    checkpoint, split, bundle = trained.checkpoint, trained.split, trained.bundle
    manifest = bundle.manifest
    assert manifest.job == checkpoint.job
    assert manifest.split_sha256 == split.sha256()
    assert manifest.recall.keys() == {"R@1", "R@2"}
    assert manifest.parity is not None
    assert manifest.parity.batch_sizes == PARITY_BATCHES
    assert manifest.parity.max_abs_difference <= MAX_DIFFERENCE
    assert manifest.parity.recall_at_1_onnx == manifest.recall["R@1"]
    assert torch.__version__.startswith(manifest.versions["torch"])


def test_a_gpu_installation_exports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its onnxruntime is of the package onnxruntime-gpu; Python 3.11 may refuse to parse once."""
    installed, write, refusals = export_module.version, torch.onnx.export, [SystemError("depth")]

    def of_gpu(package: str) -> str:
        if package == "onnxruntime":
            raise PackageNotFoundError(package)
        return "1.31.1" if package == "onnxruntime-gpu" else installed(package)

    def export(*args: object, **options: object) -> object:
        if refusals:
            raise refusals.pop()
        return write(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(export_module, "version", of_gpu)
    monkeypatch.setattr(torch.onnx, "export", export)
    spec = Input(size_px=32, resize_px=36)
    made = export_backbone("trunk", Model(backbone=SMALL, weights="none"), spec, tmp_path / "made")
    assert made.manifest.versions["onnxruntime"] == "1.31.1"
    assert not refusals


def test_every_image_is_decoded_once_for_torch_onnx_and_all_precisions(trained: Trained) -> None:
    split = trained.split
    assert split.validation is not None
    for images in (split.test, split.validation):
        assert {trained.reads[images.root / path] for path in images.paths} == {1}
    held_out = len(split.test) + len(split.validation)
    assert sum(trained.reported) == images_to_embed(split) == held_out


def test_decoding_processes_name_a_broken_file(trained: Trained, tmp_path: Path) -> None:
    images, spec = trained.split.test, trained.bundle.manifest.preprocessing

    def both(workers: int, images: LabelledImages) -> dict[str, Embeddings]:
        means = {"mean": lambda x: x.mean(axis=(2, 3)), "first": lambda x: x[:, 0, 0]}
        return embed_with(means, images, spec, Runtime(workers=workers))

    alone, shared = both(0, images), both(2, images)
    for name, expected in alone.items():
        np.testing.assert_array_equal(shared[name], expected)
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    broken = dataclasses.replace(images, root=tmp_path, paths=("broken.jpg",) * len(images))
    with pytest.raises(DatasetError, match=r"^[^\n]*broken\.jpg[^\n]*$"):
        both(2, broken)


def moved(by: float) -> tuple[Images, object, object]:
    """Golden tensors, torch, and an ONNX file with one coordinate that is off."""
    inputs = np.arange(8 * 3, dtype=np.uint8).reshape(8, 3, 1, 1)

    def by_torch(images: Images) -> Embeddings:
        return np.zeros((len(images), 4))

    def by_onnx(images: Images) -> Embeddings:
        vectors = np.zeros((len(images), 4))
        vectors[images[:, 0, 0, 0] == 21, 3] = by  # the last golden image
        return vectors

    return inputs, by_torch, by_onnx


def test_torch_and_onnx_may_differ_by_a_ten_thousandth_and_no_more() -> None:
    inputs, by_torch, by_onnx = moved(-0.99e-4)
    found = check_parity(by_torch, by_onnx, inputs)
    assert found.max_abs_difference == pytest.approx(0.99e-4)
    for by, shown in ((1.01e-4, "1.01e-04"), (np.nan, "inf")):
        inputs, by_torch, by_onnx = moved(by)
        with pytest.raises(ExportError, match=f"differs from torch by {shown} .* limit is 1e-04"):
            check_parity(by_torch, by_onnx, inputs)


def test_recall_may_differ_by_a_tenth_of_a_point() -> None:
    for sign in (-1, 1):
        check_recall(50.0, 50.0 + 0.09 * sign)
        with pytest.raises(ExportError, match=r"ONNX file and 50\.00 with torch"):
            check_recall(50.0, 50.0 + 0.11 * sign)


def test_a_model_that_differs_from_torch_is_not_written(
    again: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "check_parity", lambda _, onnx, x: check_parity(
        lambda images: onnx(images) + 2e-4, onnx, x))  # fmt: skip
    with pytest.raises(ExportError, match="differs from torch by 2"):
        export_checkpoint(again.checkpoint, again.split, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_model_that_lost_recall_is_not_written(
    again: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = iter([50.0, 49.8])

    def retrieval(*_: object, **__: object) -> Retrieval:
        return Retrieval({1: next(figures)}, 9.0, queries=9, without_positive=0)

    monkeypatch.setattr(export_module, "retrieval", retrieval)
    with pytest.raises(ExportError, match=r"R@1 is 49.80 .* 50.00 with torch"):
        export_checkpoint(again.checkpoint, again.split, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_every_precision_tells_its_recall_on_the_validation_images(trained: Trained) -> None:
    split, bundle = trained.split, trained.bundle
    held_out, variants = bundle.manifest.held_out, bundle.manifest.variants
    assert held_out is not None
    assert split.validation is not None
    assert (held_out.split, held_out.images) == ("validation", len(split.validation))
    assert bundle.precisions == ALL
    for variant in variants.values():
        assert variant.recall.keys() == held_out.recall.keys() == {"R@1", "R@2"}
        lost = held_out.recall["R@1"] - variant.recall["R@1"]
        assert variant.recall_at_1_loss == pytest.approx(lost)
        assert -1 <= variant.min_cosine <= variant.mean_cosine <= 1.00001
    assert variants["fp16"].min_cosine > 0.99


@pytest.mark.parametrize("precision", ALL)
def test_every_precision_opens_and_gives_unit_vectors(trained: Trained, precision: str) -> None:
    embedder = OnnxEmbedder.open(trained.bundle, SessionSettings(precision=precision))
    vectors = embedder.embed(np.resize(trained.bundle.golden_inputs(), (5, 3, 32, 32)))
    assert (vectors.shape, vectors.dtype) == ((5, 16), np.float32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_too_few_classes_give_no_calibration_but_a_reason(trained: Trained) -> None:
    manifest = trained.bundle.manifest
    assert manifest.calibration is None
    assert manifest.held_out is not None
    assert manifest.held_out.no_calibration is not None
    assert "at least 16 are needed" in manifest.held_out.no_calibration
    assert OnnxEmbedder.open(trained.bundle).no_calibration == manifest.held_out.no_calibration


@pytest.mark.parametrize(("part", "fraction"), [("test", 0.25), ("validation", 0.75)])
def test_scores_are_calibrated_on_the_held_out_part_of_most_classes(
    part: str, fraction: float, again: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = split_of(tmp_path, fraction, train_fraction=0.7)[1]
    checkpoint = dataclasses.replace(again.checkpoint, split_sha256=split.sha256())
    fitted: list[tuple[int, np.ndarray]] = []

    def fit_calibration(vectors: np.ndarray, labels: np.ndarray, name: str) -> Calibration:
        fitted.append((len(vectors), labels))
        return CALIBRATION.model_copy(update={"split": name})

    monkeypatch.setattr(export_module, "fit_calibration", fit_calibration)
    bundle = export_checkpoint(checkpoint, split, tmp_path / "bundle")
    assert bundle.manifest.calibration == CALIBRATION.model_copy(update={"split": part})
    images = split.test if part == "test" else split.validation
    assert images is not None
    [(count, labels)] = fitted
    assert count == len(images)
    np.testing.assert_array_equal(labels, images.labels)
    assert OnnxEmbedder.open(bundle).no_calibration is None


def test_a_precision_that_does_not_hold_here_is_left_out_if_it_may_be(
    again: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MIN_FP32_COSINE, "int8", 1.1)  # as if this processor saturated
    reported: list[str] = []
    arguments = (again.checkpoint, again.split, tmp_path / "bundle", None, ("fp32", "int8"))
    with pytest.raises(
        ExportError, match=r"mean cosine to fp32 0\.\d+, .*VNNI.*No bundle was .*--skip-refused"
    ):
        export_checkpoint(*arguments)
    assert not (tmp_path / "bundle").exists()
    assert export_checkpoint(*arguments, reported.append).precisions == ("fp32",)
    assert reported[0].startswith("int8 is skipped: ")
    assert "mean cosine to fp32" in reported[0]


def test_a_precision_that_loses_recall_or_breaks_is_left_out_if_it_may_be(
    again: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precisions_module, "_paired_loss", lambda *_: (3.0, 1.0, 5.0))
    arguments = (again.checkpoint, again.split)
    with pytest.raises(ExportError, match=r"R@1 falls by 3.00 .* to fp16.* No bundle was written"):
        export_checkpoint(*arguments, tmp_path / "b", None, ("fp32", "fp16"))
    assert not (tmp_path / "b").exists()
    reported: list[str] = []

    def broken(self: OnnxEmbedder, images: Images) -> Embeddings:
        if self.mode.precision == "fp16" and len(images) != 8:  # the golden images work
            raise BundleError("The model gave vectors that are not finite numbers.")
        return embed(self, images)

    embed = OnnxEmbedder.embed
    monkeypatch.setattr(OnnxEmbedder, "embed", broken)
    bundle = export_checkpoint(*arguments, tmp_path / "c", None, ALL[::2], reported.append)
    assert bundle.precisions == ("fp32",)
    assert (
        "does not work in fp16 with onnxruntime: The model gave vectors that are not finite"
        in reported[0]
    )


def test_another_split_is_refused(trained: Trained, tmp_path: Path) -> None:
    checkpoint, split = trained.checkpoint, trained.split
    job, _ = checkpoint.network()
    other = load_split(job.data.model_copy(update={"split_seed": 3}))
    assert other.sha256() != split.sha256()
    with pytest.raises(DatasetError, match="may have been trained on"):
        export_checkpoint(checkpoint, other, tmp_path / "bundle")


def test_an_existing_bundle_is_not_overwritten(trained: Trained) -> None:
    with pytest.raises(BundleError, match="exists already"):
        export_checkpoint(trained.checkpoint, trained.split, trained.bundle.path)


def test_the_network_of_a_checkpoint_needs_no_weight_file(trained: Trained) -> None:
    checkpoint = trained.checkpoint
    job = {**checkpoint.job, "model": {**checkpoint.job["model"], "weights": "/gone.pth"}}
    dataclasses.replace(checkpoint, job=job).network()


@pytest.mark.skipif(not LONG, reason="tracing takes a minute; make soak runs it")
@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone_alone_becomes_a_bundle(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec, channels = Input(size_px=32, resize_px=36), BACKBONES[name].channels
    model = Model(backbone=name, weights="none")
    bundle = export_backbone("plain", model, spec, tmp_path / "bundle")
    assert bundle.manifest.dim == channels
    assert OnnxEmbedder.open(bundle).embed(bundle.golden_inputs()).shape == (8, channels)
