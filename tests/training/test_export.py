import dataclasses
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import kinlens.training.bundles.bundle as export_module
import kinlens.training.bundles.precisions as precisions_module
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.calibration import Calibration
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import BundleCorruptError, BundleError, ExportError
from kinlens.embedder.explain import explain
from kinlens.embedder.session import MIN_FP32_COSINE, OnnxEmbedder
from kinlens.embedder.types import Embed, Embeddings, Images
from kinlens.training.bundles.bundle import (
    MAX_DIFFERENCE,
    PARITY_BATCHES,
    check_parity,
    check_recall,
    export_checkpoint,
    images_to_embed,
)
from kinlens.training.bundles.map import EmbeddingMap
from kinlens.training.checkpoint import Checkpoint, load_checkpoint
from kinlens.training.config.job import parse_job
from kinlens.training.data.load import load_split
from kinlens.training.data.records import Split, with_protocol
from kinlens.training.models.embedding import torch_embed
from kinlens.training.trainer import fit
from tests.embedder.bundles import CALIBRATION
from tests.training.jobs import Silent, small_job

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
    """A job on 12 products, and its split."""
    content = small_job(folder / "products", epochs=2).as_dict()
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
    checkpoint, model = trained.checkpoint, onnx.load(trained.bundle.model_path)
    # Names can lie, so compare contents: no tensor of the objective is in the file, in any order.
    inside = [np.sort(onnx.numpy_helper.to_array(t), axis=None) for t in model.graph.initializer]

    def is_inside(tensor: torch.Tensor) -> bool:
        wanted = np.sort(tensor.numpy(), axis=None)
        return any(a.shape == wanted.shape and np.allclose(a, wanted) for a in inside)

    for name, value in checkpoint.objective.items():
        # The shares are single numbers, which many a constant of the graph equals.
        assert name.startswith("shares.") or not value.any() or not is_inside(value), name
    assert is_inside(checkpoint.net["flow.layers.0.conditioner.0.weight"])


@pytest.mark.parametrize("precision", ALL)
def test_onnx_agrees_with_torch_at_batch_sizes_that_were_never_traced(
    trained: Trained, precision: str
) -> None:
    embedder = OnnxEmbedder.open(trained.bundle, SessionSettings(precision=precision))
    for size in (1, 5, 17):
        batch = np.resize(trained.bundle.golden_inputs(), (size, 3, 32, 32))
        vectors = embedder.embed(batch)
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
        if precision == "fp32":
            expected = torch_embed(trained.checkpoint.network()[1], batch)
            np.testing.assert_allclose(vectors, expected, atol=1e-4)


def test_an_exported_map_sums_to_the_embeddings_and_explains_their_cosine(
    trained: Trained, tmp_path: Path
) -> None:
    bundle = trained.bundle
    embedder, images = OnnxEmbedder.open(bundle), bundle.golden_inputs()
    assert embedder.has_map
    vectors, maps = embedder.embed(images), embedder.maps(images)
    np.testing.assert_allclose(maps.sum((2, 3)), vectors, atol=1e-3)
    by_torch = torch_embed(EmbeddingMap(trained.checkpoint.network()[1]), images)
    assert np.abs(maps - by_torch).mean() < 1e-2 * np.abs(by_torch).mean()
    copied = Bundle.open(shutil.copytree(bundle.path, tmp_path / "copy"))
    copied.map_file().write_bytes(b"no model")
    with pytest.raises(BundleCorruptError, match=r"model\.map\.onnx has sha256"):
        Bundle.open(copied.path)
    match = explain(embedder, images[0], images[1])
    assert match.query.shape == match.hit.shape == maps.shape[2:]
    for total in (match.score, match.query.sum(), match.hit.sum()):
        assert total == pytest.approx(vectors[0] @ vectors[1], abs=1e-3)


def test_the_manifest_tells_where_the_model_comes_from(trained: Trained) -> None:
    manifest = trained.bundle.manifest
    assert manifest.job == trained.checkpoint.job
    assert manifest.split_sha256 == trained.split.sha256()
    assert manifest.recall.keys() == {"R@1", "R@2"}
    assert manifest.parity is not None
    assert manifest.parity.batch_sizes == PARITY_BATCHES
    assert manifest.parity.max_abs_difference <= MAX_DIFFERENCE
    assert manifest.parity.recall_at_1_onnx == manifest.recall["R@1"]
    assert torch.__version__.startswith(manifest.versions["torch"])
    assert manifest.calibration is None
    assert manifest.held_out is not None
    assert "at least 16 are needed" in (manifest.held_out.no_calibration or "")
    assert OnnxEmbedder.open(trained.bundle).no_calibration == manifest.held_out.no_calibration


def test_a_gpu_installation_exports(
    again: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its onnxruntime is of the package onnxruntime-gpu."""
    installed = export_module.version

    def of_gpu(package: str) -> str:
        if package == "onnxruntime":
            raise PackageNotFoundError(package)
        return installed(package)

    monkeypatch.setattr(export_module, "version", of_gpu)
    bundle = export_checkpoint(again.checkpoint, again.split, tmp_path / "new" / "bundle")
    assert bundle.manifest.versions["onnxruntime"] == onnxruntime.__version__
    assert [path.name for path in bundle.path.parent.iterdir()] == ["bundle"]
    with pytest.raises(BundleError, match="exists already"):
        export_checkpoint(again.checkpoint, again.split, bundle.path)


def test_every_image_is_decoded_once_for_torch_onnx_and_all_precisions(trained: Trained) -> None:
    split = trained.split
    assert split.validation is not None
    for images in (split.test, split.validation):
        assert {trained.reads[images.root / path] for path in images.paths} == {1}
    held_out = len(split.test) + len(split.validation)
    assert sum(trained.reported) == images_to_embed(split) == held_out


def moved(by: float) -> tuple[Embeddings, Embed, Images]:
    """Vectors of torch, an ONNX file with one coordinate that is off, and golden tensors."""

    def by_onnx(images: Images) -> Embeddings:
        vectors = np.zeros((len(images), 4))
        vectors[images[:, 0, 0, 0] == 21, 3] = by  # the last golden image
        return vectors

    inputs = np.arange(8 * 3, dtype=np.uint8).reshape(8, 3, 1, 1)
    return np.zeros((8, 4)), by_onnx, inputs


def test_torch_and_onnx_may_differ_by_a_ten_thousandth_and_no_more() -> None:
    assert check_parity(*moved(-0.99e-4)).max_abs_difference == pytest.approx(0.99e-4)
    for by, shown in ((1.01e-4, "1.01e-04"), (np.nan, "inf")):
        with pytest.raises(ExportError, match=f"differs from torch by {shown} .* limit is 1e-04"):
            check_parity(*moved(by))


def test_recall_may_differ_by_a_tenth_of_a_point() -> None:
    for sign in (-1, 1):
        check_recall(50.0, 50.0 + 0.09 * sign)
        with pytest.raises(ExportError, match=r"ONNX file and 50\.00 % with torch"):
            check_recall(50.0, 50.0 + 0.11 * sign)


def test_a_model_that_differs_from_torch_or_lost_recall_is_not_written(
    again: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, message in (
        ("MAX_DIFFERENCE", "differs from torch by"),
        ("MAX_RECALL_DIFFERENCE", r"first result is right for \d+.\d\d .* with torch"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(export_module, limit, -1.0)
            with pytest.raises(ExportError, match=message):
                export_checkpoint(again.checkpoint, again.split, tmp_path / "bundle")
        assert not (tmp_path / "bundle").exists()


def test_every_precision_tells_its_recall_on_the_validation_images(trained: Trained) -> None:
    manifest, validation = trained.bundle.manifest, trained.split.validation
    held_out = manifest.held_out
    assert held_out is not None
    assert validation is not None
    assert (held_out.split, held_out.images) == ("validation", len(validation))
    assert trained.bundle.precisions == ALL
    for variant in manifest.variants.values():
        assert variant.recall.keys() == held_out.recall.keys() == {"R@1", "R@2"}
        lost = held_out.recall["R@1"] - variant.recall["R@1"]
        assert variant.recall_at_1_loss == pytest.approx(lost)
        assert -1 <= variant.min_cosine <= variant.mean_cosine <= 1.00001
    assert manifest.variants["fp16"].min_cosine > 0.99


@pytest.mark.parametrize(("part", "fraction"), [("test", 0.25), ("validation", 0.75)])
def test_scores_are_calibrated_on_the_held_out_part_of_most_classes(
    part: str, fraction: float, again: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = split_of(tmp_path, fraction, train_fraction=0.7)[1]
    checkpoint = dataclasses.replace(again.checkpoint, split_sha256=split.sha256())
    fitted: list[list[int]] = []

    def fit_calibration(vectors: np.ndarray, labels: np.ndarray, name: str) -> Calibration:
        assert len(vectors) == len(labels)
        fitted.append(labels.tolist())
        return CALIBRATION.model_copy(update={"split": name})

    monkeypatch.setattr(export_module, "fit_calibration", fit_calibration)
    bundle = export_checkpoint(checkpoint, split, tmp_path / "bundle")
    assert bundle.manifest.calibration == CALIBRATION.model_copy(update={"split": part})
    assert fitted == [split.parts[part].labels.tolist()]
    assert OnnxEmbedder.open(bundle).no_calibration is None


def test_a_precision_that_does_not_hold_here_is_left_out_if_it_may_be(
    again: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MIN_FP32_COSINE, "int8", 1.1)  # as if this processor saturated
    reported: list[str] = []
    arguments = (again.checkpoint, again.split, tmp_path / "bundle", None, ("fp32", "int8"))
    with pytest.raises(
        ExportError, match=r"mean cosine to fp32 [01]\.\d+, .*VNNI.*No bundle was .*--skip-refused"
    ):
        export_checkpoint(*arguments)
    assert not (tmp_path / "bundle").exists()
    take = lambda _, reason: reported.append(reason)
    assert export_checkpoint(*arguments, take).precisions == ("fp32",)
    assert reported[0].startswith("int8 is skipped: ")
    assert "mean cosine to fp32" in reported[0]
