import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

import training.export.bundle as export_module
import training.export.onnx_file as onnx_module
import training.export.variants as variants_module
from embedder.bundle import Bundle
from embedder.calibration import Calibration
from embedder.errors import BundleError, DatasetError, ExportError
from embedder.precision import MIN_FP32_COSINE
from embedder.session import OnnxEmbedder, SessionSettings
from tests.embedder.bundles import CALIBRATION
from tests.training.jobs import Silent, calibrated_weights, small_job
from training.checkpoint import Checkpoint, load_checkpoint
from training.config.job import parse_job
from training.config.model import Input, Model
from training.data.load import load_split
from training.data.records import Split
from training.evaluation.retrieval import Retrieval
from training.export.bundle import export_backbone, export_checkpoint, images_to_embed
from training.export.onnx_file import MAX_DIFFERENCE, PARITY_BATCHES, check_parity
from training.models.backbones import BACKBONES
from training.protocols import with_protocol
from training.trainer import fit

ALL = ("fp32", "int8", "fp16")
Trained = tuple[Checkpoint, Split, Bundle]


@pytest.fixture(scope="module", autouse=True)
def _any_processor() -> Iterator[None]:
    """Where int8 saturates the network of these tests is far from fp32, which is no matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MIN_FP32_COSINE, "int8", -1.0)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("run")
    weights = calibrated_weights(folder / "weights.pth")
    content = small_job(folder / "products", weights=weights, epochs=2).as_dict()
    content["data"]["products"] = 12
    content["protocol"] = {"validation_fraction": 0.5}
    job = parse_job(content)
    split = with_protocol(load_split(job.data), job.protocol)
    fit(job, split, folder, Silent())
    checkpoint = load_checkpoint(folder)
    embedded: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        # Of 12 validation images, one is 8 points of recall.
        patch.setattr(variants_module, "MAX_RECALL_LOSS", 100.0)
        bundle = export_checkpoint(checkpoint, split, folder / "bundle", embedded.append, ALL)
    assert sum(embedded) == images_to_embed(split, ALL)
    return checkpoint, split, bundle


def test_the_graph_holds_only_what_inference_needs(trained: Trained) -> None:
    checkpoint, _, bundle = trained
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


def test_the_weights_lie_inside_the_file(trained: Trained) -> None:
    bundle = trained[2]
    assert sorted(p.name for p in bundle.path.iterdir()) == [
        "golden",
        "manifest.json",
        "model.fp16.onnx",
        "model.int8.onnx",
        "model.onnx",
    ]


@pytest.mark.parametrize("size", [1, 3, 5, 17])
def test_torch_and_onnx_agree_at_batch_sizes_that_were_never_traced(
    trained: Trained, size: int
) -> None:
    checkpoint, _, bundle = trained
    _, net = checkpoint.network()
    batch = np.resize(bundle.golden_inputs(), (size, 3, 32, 32))
    with torch.inference_mode():
        expected = net(torch.from_numpy(batch)).numpy()
    np.testing.assert_allclose(OnnxEmbedder.open(bundle).embed(batch), expected, atol=1e-4)


def test_the_manifest_tells_where_the_model_comes_from(trained: Trained) -> None:
    checkpoint, split, bundle = trained
    manifest = bundle.manifest
    assert manifest.job == checkpoint.job
    assert manifest.split_sha256 == split.sha256()
    assert manifest.recall.keys() == {"R@1", "R@2"}
    assert manifest.parity is not None
    assert manifest.parity.batch_sizes == PARITY_BATCHES
    assert manifest.parity.max_abs_difference <= MAX_DIFFERENCE
    assert manifest.parity.recall_at_1_onnx == manifest.recall["R@1"]
    assert torch.__version__.startswith(manifest.versions["torch"])


def test_a_model_that_differs_from_torch_is_not_written(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, split, _ = trained
    real = onnx_module.torch_embed
    monkeypatch.setattr(onnx_module, "torch_embed", lambda net, x: real(net, x) + 2e-4)
    with pytest.raises(ExportError, match="differs from torch by 2"):
        export_checkpoint(checkpoint, split, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_model_that_lost_recall_is_not_written(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, split, _ = trained
    figures = iter([50.0, 49.8])
    monkeypatch.setattr(
        export_module,
        "retrieval",
        lambda *_, **__: Retrieval({1: next(figures)}, 9.0, queries=9, without_positive=0),
    )
    with pytest.raises(ExportError, match=r"R@1 is 49.80 .* 50.00 with torch"):
        export_checkpoint(checkpoint, split, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_every_precision_tells_its_recall_on_the_validation_images(trained: Trained) -> None:
    _, split, bundle = trained
    held_out, variants = bundle.manifest.held_out, bundle.manifest.variants
    assert held_out is not None
    assert split.validation is not None
    assert (held_out.split, held_out.images) == ("validation", len(split.validation))
    assert bundle.precisions == ALL
    for variant in variants.values():
        assert variant.recall.keys() == held_out.recall.keys() == {"R@1", "R@2"}
        assert variant.recall_at_1_loss == held_out.recall["R@1"] - variant.recall["R@1"]
        assert -1 <= variant.min_cosine <= variant.mean_cosine <= 1.00001
    assert variants["fp16"].min_cosine > 0.99


@pytest.mark.parametrize("precision", ALL)
def test_every_precision_opens_and_gives_unit_vectors(trained: Trained, precision: str) -> None:
    bundle = trained[2]
    embedder = OnnxEmbedder.open(bundle, SessionSettings(precision=precision))
    vectors = embedder.embed(np.resize(bundle.golden_inputs(), (5, 3, 32, 32)))
    assert (vectors.shape, vectors.dtype) == ((5, 16), np.float32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_of_too_few_classes_there_is_no_calibration_and_the_bundle_says_why(
    trained: Trained,
) -> None:
    manifest = trained[2].manifest
    assert manifest.calibration is None
    assert manifest.held_out is not None
    assert manifest.held_out.no_calibration is not None
    assert "at least 16 are needed" in manifest.held_out.no_calibration
    assert OnnxEmbedder.open(trained[2]).no_calibration == manifest.held_out.no_calibration


@pytest.mark.parametrize(("part", "fraction"), [("test", 0.25), ("validation", 0.75)])
def test_scores_are_calibrated_on_the_held_out_part_of_most_classes(
    part: str, fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = small_job(tmp_path / "products").as_dict()
    content["data"] |= {"products": 12, "train_fraction": 0.7}
    content["protocol"] = {"validation_fraction": fraction}
    job = parse_job(content)
    split = with_protocol(load_split(job.data), job.protocol)
    fitted: list[tuple[int, np.ndarray]] = []

    def fit_calibration(vectors: np.ndarray, labels: np.ndarray, name: str) -> Calibration:
        fitted.append((len(vectors), labels))
        return CALIBRATION.model_copy(update={"split": name})

    monkeypatch.setattr(export_module, "fit_calibration", fit_calibration)
    model, spec = Model(weights="none"), Input(size_px=32, resize_px=36)
    bundle = export_backbone("plain", model, spec, tmp_path / "bundle", split)
    assert bundle.manifest.calibration == CALIBRATION.model_copy(update={"split": part})
    images = split.test if part == "test" else split.validation
    assert images is not None
    [(count, labels)] = fitted
    assert count == len(images)
    np.testing.assert_array_equal(labels, images.labels)
    assert OnnxEmbedder.open(bundle).no_calibration is None


def test_a_trunk_alone_has_nothing_to_compare_precisions_on(tmp_path: Path) -> None:
    model = Model(backbone="mobilenet_v2", weights="none")
    with pytest.raises(ExportError, match="int8 must be compared with fp32 on images"):
        export_backbone("plain", model, Input(), tmp_path / "b", precisions=("fp32", "int8"))


def test_a_precision_that_does_not_hold_here_is_left_out_if_it_may_be(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, split, _ = trained
    monkeypatch.setitem(MIN_FP32_COSINE, "int8", 1.1)  # as if this processor saturated
    told: list[str] = []
    arguments = (checkpoint, split, tmp_path / "bundle", None, ("fp32", "int8"))
    with pytest.raises(ExportError, match=r"int8 .* mean cosine to fp32 .* No bundle was written"):
        export_checkpoint(*arguments)
    assert not (tmp_path / "bundle").exists()
    assert export_checkpoint(*arguments, told.append).precisions == ("fp32",)
    assert "mean cosine to fp32" in told[0]


def test_another_split_is_refused_since_its_test_classes_were_trained_on(
    trained: Trained, tmp_path: Path
) -> None:
    checkpoint, split, _ = trained
    job, _ = checkpoint.network()
    other = load_split(job.data.model_copy(update={"split_seed": 3}))
    assert other.sha256() != split.sha256()
    with pytest.raises(DatasetError, match="may have been trained on"):
        export_checkpoint(checkpoint, other, tmp_path / "bundle")


def test_vectors_that_are_not_finite_do_not_pass_the_gate(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, _, bundle = trained
    monkeypatch.setattr(onnx_module, "torch_embed", lambda net, x: np.full((len(x), 16), np.nan))
    with pytest.raises(ExportError, match="differs from torch by inf"):
        check_parity(checkpoint.network()[1], OnnxEmbedder.open(bundle), bundle.golden_inputs())


def test_golden_images_exercise_reduced_decoding_and_exif(trained: Trained) -> None:
    images = [Image.open(io.BytesIO(data)) for data in trained[2].golden_images()]
    assert any(min(image.size) >= 2 * 36 for image in images)
    assert any(image.getexif().get(0x0112) == 6 for image in images)


def test_an_existing_bundle_is_not_overwritten(trained: Trained) -> None:
    checkpoint, split, bundle = trained
    with pytest.raises(BundleError, match="exists already"):
        export_checkpoint(checkpoint, split, bundle.path)


def test_the_network_of_a_checkpoint_needs_no_weight_file(trained: Trained) -> None:
    checkpoint = trained[0]
    job = {**checkpoint.job, "model": {**checkpoint.job["model"], "weights": "/gone.pth"}}
    dataclasses.replace(checkpoint, job=job).network()


@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone_alone_becomes_a_bundle(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec, channels = Input(size_px=32, resize_px=36), BACKBONES[name].channels
    model = Model(backbone=name, weights="none")
    bundle = export_backbone("plain", model, spec, tmp_path / "bundle")
    assert bundle.manifest.dim == channels
    assert OnnxEmbedder.open(bundle).embed(bundle.golden_inputs()).shape == (8, channels)


def test_a_batch_of_33_equals_33_singles_on_a_real_network(trained: Trained) -> None:
    embedder = OnnxEmbedder.open(trained[2])
    batch = np.random.default_rng(0).integers(0, 256, (33, 3, 32, 32), dtype=np.uint8)
    singles = np.concatenate([embedder.embed(batch[n : n + 1]) for n in range(33)])
    np.testing.assert_allclose(embedder.embed(batch), singles, atol=1e-5)
