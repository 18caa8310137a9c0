"""int8 and fp16 of MobileNetV2, and how much a precision may lose."""

import io
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from PIL import Image

import kinlens.training.bundles.precisions as precisions_module
from kinlens.embedder.engines.models import SessionSettings, create_session
from kinlens.embedder.errors import ExportError
from kinlens.embedder.manifest import HeldOut, Mode, Preprocessing
from kinlens.embedder.preprocess import preprocess
from kinlens.embedder.types import Embeddings, Images
from kinlens.library.models import noting_refusals
from kinlens.training.bundles.golden import golden_images
from kinlens.training.bundles.graph import write_onnx
from kinlens.training.bundles.int8 import quantize_int8, range_images
from kinlens.training.bundles.precisions import (
    Candidate,
    accepted,
    compare,
    with_half_trunk,
)
from kinlens.training.config.settings import Model
from kinlens.training.data.load import load_split
from kinlens.training.models.embedding import EmbeddingNet
from tests.training.jobs import small_job

SPEC = Preprocessing(resize_px=110, crop_px=96)


def embed(path: Path, images: Images) -> Embeddings:
    vectors: Embeddings = create_session(path, SessionSettings()).run(None, {"images": images})[0]
    return vectors


def test_golden_images_exercise_reduced_decoding_and_exif() -> None:
    images = [Image.open(io.BytesIO(data)) for data in golden_images(SPEC)]
    assert any(min(image.size) >= 2 * SPEC.resize_px for image in images)
    assert any(image.getexif().get(0x0112) == 6 for image in images)


@pytest.mark.long
@pytest.mark.real_data
def test_pretrained_weights_stay_near_fp32(shared_data: Path, tmp_path: Path) -> None:
    weights = shared_data / "weights" / "mobilenet_v2-imagenet-fp16.pth"
    net = EmbeddingNet(Model(backbone="mobilenet_v2", weights=str(weights), dim=None)).eval()
    model, int8, fp16 = (tmp_path / f"{name}.onnx" for name in ("32", "8", "16"))
    write_onnx(net, SPEC.crop_px, model)
    pixels = np.stack([preprocess(image, SPEC) for image in golden_images(SPEC)])
    quantize_int8(model, pixels, int8)
    write_onnx(with_half_trunk(net), SPEC.crop_px, fp16)
    expected = embed(model, pixels)
    assert (embed(fp16, pixels) * expected).sum(axis=1).mean() > 0.9999
    assert fp16.stat().st_size < 0.6 * model.stat().st_size
    kinds = {tensor.name: tensor.data_type for tensor in onnx.load(int8).graph.initializer}
    kernels = [t for t in onnx.load(model).graph.initializer if t.name.startswith("trunk.")]
    kernels = [kernel for kernel in kernels if len(kernel.dims) > 1]
    assert all(kinds[kernel.name] == TensorProto.FLOAT for kernel in kernels[:3])
    assert all(kinds[f"{kernel.name}_quantized"] == TensorProto.INT8 for kernel in kernels[3:])
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if {"avx512_vnni", "avx_vnni"}.intersection(flags):  # without it int8 saturates, is refused
        assert (embed(int8, pixels) * expected).sum(axis=1).mean() > 0.985
    halves = {tensor.name: tensor.data_type for tensor in onnx.load(fp16).graph.initializer}
    assert {halves[kernel.name] for kernel in kernels} == {TensorProto.FLOAT16}
    # One cast of the pixels, one into the trunk, one out of it: the head stays in float32.
    assert [node.op_type for node in onnx.load(fp16).graph.node].count("Cast") == 3


def test_ranges_come_from_training_images_that_are_always_the_same(tmp_path: Path) -> None:
    train = load_split(small_job(tmp_path).data).train
    chosen, again = (range_images(train, SPEC, count=5) for _ in range(2))
    np.testing.assert_array_equal(chosen, again)
    everything = {image.tobytes() for image in range_images(train, SPEC)}
    assert len(everything) == len(train)
    assert {image.tobytes() for image in chosen} < everything


INT8, FP16 = Mode("onnxruntime", "int8"), Mode("onnxruntime", "fp16")
GOLDEN = np.ones(3, np.float32)


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


def test_a_loss_of_recall_that_chance_explains_is_allowed_and_told() -> None:
    labels, right = classes(40)
    found = compare(INT8, GOLDEN, page(labels), labels, right, blended(right, [0, 8]))
    assert found.recall_at_1_loss == pytest.approx(100 * 2 / 160)  # more than half a point
    assert found.recall_at_1_interval is not None
    low, high = found.recall_at_1_interval
    assert low < 0 < found.recall_at_1_loss < high
    assert found.recall["R@1"] == pytest.approx(100 - 100 * 2 / 160)
    assert found.held_out_cosine is not None
    assert 0.98 < found.held_out_cosine < 1


def test_a_loss_above_two_points_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precisions_module, "MIN_COSINE", -1.0)
    labels, right = classes(40)
    before = blended(right, [4, 12, 20, 28])
    after = blended(right, [0, 8, 16, 24, 32, 40, 48, 56])
    with pytest.raises(ExportError, match=r"Right first results fall by 2\.50 points \(-\d"):
        compare(INT8, GOLDEN, page(labels), labels, before, after)


@pytest.mark.parametrize(("count", "points"), [(40, "3.75"), (250, "0.60")])
def test_a_sure_loss_of_half_a_point_is_refused(count: int, points: str) -> None:
    labels, right = classes(count)
    wrong = blended(right, [0, 8, 16, 24, 32, 40])
    reason = rf"Right first results fall by {points} points \(0\.\d+ to .* {4 * count:,} val"
    with pytest.raises(ExportError, match=reason):
        compare(INT8, GOLDEN, page(labels), labels, right, wrong)


def test_a_loss_in_a_pair_with_fp32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # All classes trade places: they keep together, but each meets the gallery of another one.
    labels, right = classes(40)
    turned = right[(np.arange(160) + 4) % 160]
    arguments = FP16, GOLDEN, page(labels), labels, right, turned
    with pytest.raises(ExportError, match="mean cosine between fp16 with onnxruntime and fp32"):
        compare(*arguments)
    monkeypatch.setattr(precisions_module, "MIN_COSINE", -1.0)
    with pytest.raises(
        ExportError, match=r"Right first results fall by 100\.00 .*, as queries of a gallery"
    ):
        compare(*arguments)


def test_vectors_far_from_fp32_are_refused_though_their_recall_is_as_good() -> None:
    labels, right = classes(40)
    shifted = unit(right + 0.04)
    with pytest.raises(ExportError, match=r"mean cosine .* is 0\.9\d+ on the 160 .*at least 0\.98"):
        compare(INT8, GOLDEN, page(labels), labels, right, shifted)


def test_the_first_engine_decides_on_a_precision_and_a_later_one_on_itself() -> None:
    fault, openvino = ExportError("It broke."), Mode("openvino", "int8")
    good, also, bf16 = Candidate(INT8), Candidate(openvino), Candidate(Mode("openvino", "bf16"))
    asked = ("fp32", "int8")
    assert accepted([good, also, bf16], asked, None) == [good, also, bf16]

    also.fault = bf16.fault = fault  # a second engine, and a precision that nobody asked for
    assert accepted([good, also, bf16], asked, None) == [good]
    reasons: list[tuple[str, str]] = []

    def take(*reason: str) -> None:
        reasons.append(reason)

    assert accepted([good, also, bf16], asked, take) == [good]
    assert reasons == [
        ("int8", "int8 with openvino is skipped: It broke."),
        ("bf16", "bf16 is skipped: It broke."),
    ]

    also.fault, good.fault = None, fault
    with pytest.raises(ExportError, match=r"It broke\. No bundle was .* --precision int8"):
        accepted([good, also], asked, None)
    assert accepted([good, also], asked, take) == []
    assert reasons[2:] == [("int8", "int8 is skipped: It broke.")]


def test_a_precision_that_nobody_asked_for_is_omitted_without_a_line(capsys) -> None:
    for precisions, verbose, printed in (
        ((), False, ""),
        ((), True, "bf16 is skipped\n"),
        (("bf16",), False, "bf16 is skipped\n"),
    ):
        noting_refusals(precisions, verbose)("bf16", "bf16 is skipped")
        assert capsys.readouterr().err == printed
