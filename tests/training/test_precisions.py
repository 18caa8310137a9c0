"""int8 and fp16 of a network of two convolutions and a projection, and of MobileNetV2 once."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from torch import nn
from torch.nn import functional as F

import kinlens.training.export.precisions as precisions_module
from kinlens.embedder.bundle import Bundle, write_bundle
from kinlens.embedder.engines.models import SessionSettings, create_session
from kinlens.embedder.errors import ExportError
from kinlens.embedder.manifest import (
    BundleManifest,
    GoldenHashes,
    HeldOut,
    Mode,
    OtherPrecision,
    Preprocessing,
)
from kinlens.embedder.preprocess import preprocess
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.types import Embeddings, Images
from kinlens.training.config.settings import Model
from kinlens.training.data.load import load_split
from kinlens.training.data.records import Split
from kinlens.training.export.bundle import golden_images, write_onnx
from kinlens.training.export.graph import trunk_nodes
from kinlens.training.export.int8 import quantize_int8, range_images
from kinlens.training.export.precisions import Candidate, compare, with_half_trunk
from kinlens.training.models.embedding import EmbeddingNet, torch_embed
from tests.training.jobs import small_job

SPEC = Preprocessing(resize_px=36, crop_px=32)


class Shallow(nn.Module):
    """Five convolutions as a trunk: unlike 52 random ones, they do not amplify rounding.

    Three of them stay in float32. None has a bias, so half the pixel values give half of every
    activation.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(
            *(nn.Conv2d(3, 3, 1, bias=False), nn.Conv2d(3, 8, 1, bias=False)),
            *(nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.ReLU()),
            *(nn.Conv2d(8, 64, 3, 2, bias=False), nn.ReLU(), nn.Conv2d(64, 96, 3, 2, bias=False)),
        )
        self.projection = nn.Linear(96, 16, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pixels = (images.float() / 64).to(self.trunk[0].weight.dtype)
        pooled = self.trunk(pixels).relu().float().mean(dim=(2, 3))
        return F.normalize(self.projection(pooled), dim=1)


@dataclass
class Small:
    split: Split
    bundle: Bundle
    dark: Images
    int8: Path
    fp16: Path

    def made(self, precision: OtherPrecision) -> Candidate:
        """A candidate for `compare`, which asks it for nothing."""
        embedder, golden = OnnxEmbedder.open(self.bundle), self.bundle.golden_vectors()
        mode = Mode("onnxruntime", precision)
        return Candidate(mode, self.int8, golden, np.ones(8, np.float32), embedder)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("small")
    split = load_split(small_job(folder / "products").data)
    net, model = Shallow().eval(), folder / "model.onnx"
    write_onnx(net, SPEC.crop_px, model)
    # Calibrated on twice their values, pixels and activations are codes up to 128, and two products
    # at most 2 * 128 * 127 < 2**15: no processor saturates.
    images = golden_images(SPEC)
    inputs = np.stack([preprocess(image, SPEC) for image in images])
    dark = inputs // 2
    quantize_int8(model, 2 * dark, folder / "int8.onnx")
    write_onnx(with_half_trunk(net), SPEC.crop_px, folder / "fp16.onnx")
    assert sorted(p.name for p in folder.glob("*.onnx")) == ["fp16.onnx", "int8.onnx", "model.onnx"]
    manifest = BundleManifest(
        name="small",
        created_at="",
        dim=16,
        preprocessing=SPEC,
        model_sha256="",
        golden=GoldenHashes(files={}),
        backbone="mobilenet_v2",
    )
    bundle = write_bundle(folder / "b", manifest, model, images, inputs, torch_embed(net, inputs))
    return Small(split, bundle, dark, folder / "int8.onnx", folder / "fp16.onnx")


def embed(path: Path, images: Images) -> Embeddings:
    vectors: Embeddings = create_session(path, SessionSettings()).run(None, {"images": images})[0]
    return vectors


def weight_types(path: Path) -> dict[str, int]:
    return {t.name: t.data_type for t in onnx.load(path).graph.initializer if len(t.dims) > 1}


def test_golden_images_exercise_reduced_decoding_and_exif() -> None:
    images = [Image.open(io.BytesIO(data)) for data in golden_images(SPEC)]
    assert any(min(image.size) >= 2 * 36 for image in images)
    assert any(image.getexif().get(0x0112) == 6 for image in images)


def test_vectors_are_near_those_of_fp32(small: Small) -> None:
    expected = embed(small.bundle.model_path, small.dark)
    others = (expected @ expected.T)[~np.eye(8, dtype=bool)]
    int8, fp16 = (
        1 - (embed(path, small.dark) * expected).sum(axis=1) for path in (small.int8, small.fp16)
    )
    assert int8.max() < 0.1 * (1 - others).mean()
    assert fp16.max() < 1e-5


def has_vnni() -> bool:
    """Whether this processor adds products of 8-bit numbers in 32 bits."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"avx512_vnni", "avx_vnni"}.isdisjoint(flags)


@pytest.mark.real_data
def test_pretrained_weights_stay_near_fp32(shared_data: Path, tmp_path: Path) -> None:
    weights = shared_data / "weights" / "mobilenet_v2-imagenet-fp16.pth"
    net = EmbeddingNet(Model(backbone="mobilenet_v2", weights=str(weights), dim=None)).eval()
    model, int8, fp16 = (tmp_path / f"{name}.onnx" for name in ("model", "int8", "fp16"))
    write_onnx(net, 96, model)
    spec = Preprocessing(resize_px=110, crop_px=96)
    pixels = np.stack([preprocess(image, spec) for image in golden_images(spec)])
    quantize_int8(model, pixels, int8)
    write_onnx(with_half_trunk(net), 96, fp16)
    expected = embed(model, pixels)
    assert (embed(fp16, pixels) * expected).sum(axis=1).mean() > 0.9999
    kernels = [name for name in weight_types(model) if name.startswith("trunk.")]
    assert len(kernels) == 52
    after = weight_types(int8)
    assert all(after[name] == TensorProto.FLOAT for name in kernels[:3])
    assert all(after[f"{name}_quantized"] == TensorProto.INT8 for name in kernels[3:])
    if has_vnni():  # without it int8 saturates, and is refused
        assert (embed(int8, pixels) * expected).sum(axis=1).mean() > 0.985


def test_int8_leaves_the_first_convolutions_and_the_head_in_float(small: Small) -> None:
    after = weight_types(small.int8)
    kernels = [name for name in weight_types(small.bundle.model_path) if name.startswith("trunk.")]
    assert len(kernels) == 5
    assert all(after[name] == TensorProto.FLOAT for name in kernels[:3])
    assert all(after[f"{name}_quantized"] == TensorProto.INT8 for name in kernels[3:])
    assert [t for name, t in after.items() if "trunk" not in name] == [TensorProto.FLOAT]
    scales = next(
        t for t in onnx.load(small.int8).graph.initializer if t.name.endswith("4.weight_scale")
    )
    assert scales.dims == [64]  # one for each output channel


def test_fp16_converts_the_trunk_and_leaves_what_makes_unit_norm(small: Small) -> None:
    before, after = weight_types(small.bundle.model_path), weight_types(small.fp16)
    assert any(name.startswith("trunk.") for name in before)
    for name in before:
        in_trunk = name.startswith("trunk.")
        assert after[name] == (TensorProto.FLOAT16 if in_trunk else TensorProto.FLOAT)
    graph = onnx.load(small.fp16).graph
    assert graph.input[0].type.tensor_type.elem_type == TensorProto.UINT8
    assert graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    # One cast of the pixels, one into the trunk, one out of it.
    assert [node.op_type for node in graph.node].count("Cast") == 3


def branches() -> onnx.ModelProto:
    """x -> scale -> conv -> (conv, itself) -> sum -> relu -> (mean, maximum) -> sum."""
    nodes = [
        helper.make_node("Mul", ["x", "scale"], ["scaled"], name="normalize"),
        helper.make_node("Conv", ["scaled", "trunk.a"], ["a"]),
        helper.make_node("Sigmoid", ["a"], ["between"], name="between"),
        helper.make_node("Conv", ["between", "trunk.b"], ["b"], name="last"),
        helper.make_node("Add", ["a", "b"], ["residual"], name="residual"),
        helper.make_node("Relu", ["residual"], ["maps"], name="relu"),
        helper.make_node("ReduceMean", ["maps"], ["mean"], name="mean"),
        helper.make_node("ReduceMax", ["maps"], ["max"], name="max"),
        helper.make_node("Add", ["mean", "max"], ["pooled"], name="pooled"),
    ]
    weights = [
        numpy_helper.from_array(np.ones((2, 2, 1, 1), np.float32), f"trunk.{n}") for n in "ab"
    ]
    weights.append(numpy_helper.from_array(np.float32(2), "scale"))
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 4, 4])
    out = helper.make_tensor_value_info("pooled", TensorProto.FLOAT, ["n", 2, 1, 1])
    return helper.make_model(helper.make_graph(nodes, "branches", [value], [out], weights))


def test_the_trunk_ends_with_its_last_sum_and_activation() -> None:
    found = trunk_nodes(branches())
    assert found == ["Conv_unnamed_1", "between", "last", "residual", "relu"]


def test_a_graph_without_a_trunk_is_refused() -> None:
    model = branches()
    for node in model.graph.node:
        node.input[:] = [name.replace("trunk.", "other.") for name in node.input]
    with pytest.raises(ExportError, match=r"no weight whose name begins with 'trunk\."):
        trunk_nodes(model)


def test_the_lower_bound_of_generalised_mean_pooling_is_of_the_head() -> None:
    model = branches()
    for node in model.graph.node:
        if node.name in ("mean", "max"):
            node.input[0] = "clipped"
    clip = helper.make_node("Clip", ["maps", "least"], ["clipped"], name="clip")
    model.graph.node.insert(6, clip)
    for least, expected in ((1e-6, "relu"), (0.0, "clip")):
        bound = numpy_helper.from_array(np.float32(least), "least")
        model.graph.initializer.append(bound)
        assert trunk_nodes(model)[-1] == expected
        model.graph.initializer.remove(bound)


def test_ranges_come_from_training_images_that_are_always_the_same(small: Small) -> None:
    chosen = range_images(small.split.train, SPEC, count=5)
    assert chosen.shape == (5, 3, 32, 32)
    np.testing.assert_array_equal(chosen, range_images(small.split.train, SPEC, count=5))
    everything = range_images(small.split.train, SPEC)
    assert len(everything) == len(small.split.train)
    assert {image.tobytes() for image in chosen} <= {image.tobytes() for image in everything}


def classes(count: int) -> tuple[NDArray[np.int64], Embeddings]:
    """Classes of four images: each has a direction of its own, apart from a little noise."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(count), 4)
    return labels, unit(np.eye(count)[labels] + 0.02 * rng.standard_normal((4 * count, count)))


def unit(vectors: NDArray[np.float64]) -> Embeddings:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def blended(vectors: Embeddings, asking: list[int]) -> Embeddings:
    """The images `asking`, each moved nearer to the next class, yet not far from where it was."""
    moved = vectors.astype(np.float64)
    moved[asking] += 1.05 * vectors[(np.array(asking) + 4) % len(vectors)]
    return unit(moved)


def page(labels: NDArray[np.int64]) -> HeldOut:
    return HeldOut(split="validation", images=len(labels), recall={"R@1": 100.0, "R@2": 100.0})


def test_a_loss_of_recall_that_chance_explains_is_allowed_and_told(small: Small) -> None:
    labels, right = classes(40)
    found = compare(small.made("int8"), page(labels), labels, right, blended(right, [0, 8]))
    assert found.recall_at_1_loss == pytest.approx(100 * 2 / 160)  # more than half a point
    assert found.recall_at_1_interval is not None
    low, high = found.recall_at_1_interval
    assert low < 0 < found.recall_at_1_loss < high
    assert found.recall["R@1"] == pytest.approx(100 - 100 * 2 / 160)
    assert found.held_out_cosine is not None
    assert 0.98 < found.held_out_cosine < 1


def test_a_loss_above_two_points_is_refused(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precisions_module, "MIN_COSINE", -1.0)
    labels, right = classes(40)
    before = blended(right, [4, 12, 20, 28])
    after = blended(right, [0, 8, 16, 24, 32, 40, 48, 56])
    with pytest.raises(ExportError, match=r"R@1 falls by 2\.50 points \(-\d"):
        compare(small.made("int8"), page(labels), labels, before, after)


@pytest.mark.parametrize(("count", "points"), [(40, "3.75"), (250, "0.60")])
def test_a_sure_loss_of_half_a_point_is_refused(small: Small, count: int, points: str) -> None:
    labels, right = classes(count)
    wrong = blended(right, [0, 8, 16, 24, 32, 40])
    reason = rf"R@1 falls by {points} points \(0\.\d+ to .* {4 * count:,} val"
    with pytest.raises(ExportError, match=reason):
        compare(small.made("int8"), page(labels), labels, right, wrong)


def test_a_loss_in_a_pair_with_fp32_is_refused(small: Small) -> None:
    # All classes trade places: they keep together, but each meets the gallery of another one.
    labels, right = classes(40)
    turned = right[(np.arange(160) + 4) % 160]
    with pytest.raises(ExportError, match="mean cosine between fp16 with onnxruntime and fp32"):
        compare(small.made("fp16"), page(labels), labels, right, turned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precisions_module, "MIN_COSINE", -1.0)
        with pytest.raises(ExportError, match=r"R@1 falls by 100\.00 .*, as queries of a gallery"):
            compare(small.made("fp16"), page(labels), labels, right, turned)


def test_vectors_far_from_fp32_are_refused_though_their_recall_is_as_good(small: Small) -> None:
    labels, right = classes(40)
    shifted = unit(right + 0.04)
    with pytest.raises(ExportError, match=r"mean cosine .* is 0\.9\d+ on the 160 .*at least 0\.98"):
        compare(small.made("int8"), page(labels), labels, right, shifted)
