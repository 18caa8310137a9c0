import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import kinlens.embedder.engines.models as models_module
from kinlens.embedder.bundle import MANIFEST, MODEL, Bundle
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import (
    BundleCorruptError,
    BundleError,
    GoldenMismatchError,
    InvalidParameterError,
    ProviderError,
    SourceError,
    UnsupportedFormatError,
)
from kinlens.embedder.manifest import FP32, BundleManifest, Mode
from kinlens.embedder.session import OnnxEmbedder
from tests.embedder.bundles import random_images, write_full_bundle
from tests.tiny import TINY_DIM, encoded, photo, tiny_embed, write_tiny_onnx


def restamp(folder: Path) -> None:
    """Make the hashes fit again, as an attacker or a careless tool would."""
    content = json.loads((folder / MANIFEST).read_text())
    content["model_sha256"] = hashlib.sha256((folder / MODEL).read_bytes()).hexdigest()
    for name in content["golden"]["files"]:
        digest = hashlib.sha256((folder / "golden" / name).read_bytes()).hexdigest()
        content["golden"]["files"][name] = digest
    manifest = BundleManifest.model_validate(content).with_id()
    (folder / MANIFEST).write_text(manifest.model_dump_json())


@pytest.fixture
def copy(tiny_bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle.path, tmp_path / "copy"))


@pytest.fixture(scope="module")
def embedder(tiny_bundle: Bundle) -> OnnxEmbedder:
    return OnnxEmbedder.open(tiny_bundle)


def test_vectors_are_those_of_the_model(embedder: OnnxEmbedder) -> None:
    images = random_images(70)  # more than one run takes
    vectors = embedder.embed(images)
    np.testing.assert_allclose(vectors, tiny_embed(images), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors.dtype == np.float32
    assert embedder.dim == TINY_DIM


def test_a_short_model_gives_the_first_numbers_normalised_and_no_calibration(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    embedder = OnnxEmbedder.open(write_full_bundle(tiny_bundle, tmp_path))
    images, short = random_images(3), embedder.first(3)
    whole = embedder.embed(images)
    expected = whole[:, :3] / np.linalg.norm(whole[:, :3], axis=1, keepdims=True)
    np.testing.assert_allclose(short.embed(images), expected, atol=1e-6)
    assert (short.dim, short.first(3), short.bundle_id) == (3, short, embedder.bundle_id)
    assert embedder.calibration is not None
    assert short.calibration is None
    assert short.no_calibration == f"The gallery keeps the first 3 of {TINY_DIM} numbers."
    for n in (0, TINY_DIM + 1):
        with pytest.raises(InvalidParameterError, match=f"dims = {n} is not one of 1 to"):
            embedder.first(n)


def test_a_file_that_cannot_be_embedded_is_named(embedder: OnnxEmbedder, tmp_path: Path) -> None:
    good, text, latin = tmp_path / "good.png", tmp_path / "text.png", tmp_path / "caf\udce9.png"
    good.write_bytes(encoded(photo(1)))
    latin.write_bytes(encoded(photo(1)))
    text.write_text("no image")
    vectors = embedder.embed_files([good, str(latin)])
    assert np.array_equal(vectors[0], vectors[1])
    assert np.array_equal(embedder.embed_files(good), vectors[:1])
    assert embedder.embed_files([]).shape == (0, TINY_DIM)
    for bad, kind, message in (
        (text, UnsupportedFormatError, "text.png cannot be used"),
        (tmp_path / "gone.png", SourceError, "gone.png does not exist"),
        (good / "inner.png", SourceError, "inner.png does not exist"),
        (tmp_path, SourceError, f"{tmp_path} is a folder"),
        (tmp_path / "gone\udce9.png", SourceError, r"gone\\xe9.png does not exist"),
    ):
        with pytest.raises(kind, match=message):
            embedder.embed_files([good, bad, good])


@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_padded_batch_gives_the_same_vectors(tiny_bundle: Bundle, count: int) -> None:
    session = models_module.create_session(tiny_bundle.model_path, SessionSettings())
    images = random_images(count)
    vectors = models_module.run_bucketed(session, "images", images)
    np.testing.assert_allclose(vectors, tiny_embed(images), atol=1e-5)


def test_absent_cuda_is_refused_unless_the_cpu_is_allowed(tiny_bundle: Bundle) -> None:
    with pytest.raises(ProviderError, match="CUDAExecutionProvider was requested"):
        OnnxEmbedder.open(tiny_bundle, SessionSettings(device="cuda"))
    allowed = SessionSettings(device="cuda", allow_cpu_fallback=True)
    assert OnnxEmbedder.open(tiny_bundle, allowed).provider == "CPUExecutionProvider"


def test_a_silent_fallback_is_found(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    real = models_module.ort.InferenceSession

    def silent(model: Path, options: object, providers: list[tuple[str, dict[str, str]]]) -> object:
        name, reported = providers[0]
        assert (name, reported["cudnn_conv_algo_search"]) == ("CUDAExecutionProvider", "HEURISTIC")
        assert reported["gpu_mem_limit"] == str(500 * 2**20)
        return real(model, options, providers=providers[1:])

    monkeypatch.setattr(models_module.ort, "get_available_providers", lambda: listed)
    monkeypatch.setattr(models_module.ort, "InferenceSession", silent)
    with pytest.raises(ProviderError, match="would run on CPUExecutionProvider"):
        OnnxEmbedder.open(tiny_bundle, SessionSettings(device="cuda", gpu_memory_mb=500))


def test_another_model_under_right_hashes_fails_its_golden_vectors(copy: Path) -> None:
    write_tiny_onnx(copy / MODEL, seed=9)
    restamp(copy)
    with pytest.raises(GoldenMismatchError, match=r"The fp32 model .* vectors: cosine"):
        OnnxEmbedder.open(copy)


def test_another_preprocessing_fails_its_golden_inputs(copy: Path) -> None:
    (copy / "golden" / "001.img").write_bytes(encoded(photo(99)))
    restamp(copy)
    with pytest.raises(GoldenMismatchError, match="grey levels"):
        OnnxEmbedder.open(copy)


def test_a_corrupt_onnx_file_is_refused(copy: Path) -> None:
    whole = (copy / MODEL).read_bytes()
    (copy / MODEL).write_bytes(whole[: len(whole) // 2])
    restamp(copy)
    with pytest.raises(BundleCorruptError, match="cannot be loaded"):
        OnnxEmbedder.open(copy)


def test_a_precision_runs_its_own_model(tiny_bundle: Bundle, tmp_path: Path) -> None:
    bundle = write_full_bundle(tiny_bundle, tmp_path)
    images = random_images(4)
    for precision, seed in (("fp32", 0), ("int8", 0.05)):
        embedder = OnnxEmbedder.open(bundle, SessionSettings(precision=precision))
        np.testing.assert_allclose(embedder.embed(images), tiny_embed(images, seed), atol=1e-5)
        assert embedder.mode == ("onnxruntime", precision)
        assert embedder.bundle_id == bundle.bundle_id


def as_if_made_elsewhere(bundle: Bundle, degrees: float) -> Bundle:
    """The golden vectors of int8, each turned by that much, as from another processor."""
    path = bundle.path / "golden" / "vectors.int8.npy"
    vectors = np.load(path)
    across = np.random.default_rng(0).standard_normal(vectors.shape)
    across -= (across * vectors).sum(axis=1, keepdims=True) * vectors
    across /= np.linalg.norm(across, axis=1, keepdims=True)
    angle = np.radians(degrees)
    np.save(path, (np.cos(angle) * vectors + np.sin(angle) * across).astype(np.float32))
    restamp(bundle.path)
    return Bundle.open(bundle.path)


INT8, AUTO = SessionSettings(precision="int8"), SessionSettings(precision="auto", engine="auto")
BF16 = Mode("openvino", "bf16")


# Cosines 0.9925 and 0.9877; the limit is 0.99.
@pytest.mark.parametrize(("degrees", "opens"), [(7.0, True), (9.0, False)])
def test_int8_may_round_otherwise_on_another_processor_but_not_much(
    tiny_bundle: Bundle, tmp_path: Path, degrees: float, opens: bool
) -> None:
    bundle = as_if_made_elsewhere(write_full_bundle(tiny_bundle, tmp_path), degrees)
    if opens:
        OnnxEmbedder.open(bundle, INT8)
    else:
        with pytest.raises(GoldenMismatchError, match=r"The int8 model .* cosine 0\.98.* VNNI"):
            OnnxEmbedder.open(bundle, INT8)


def test_an_export_with_saturated_int8_is_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    # int8 gives here what it gave at the export; both are far from fp32.
    bundle = write_full_bundle(tiny_bundle, tmp_path, seed=0.3)
    with pytest.raises(GoldenMismatchError, match=r"cosine to fp32 0\.9\d+.* 0\.9800\. .*fp32"):
        OnnxEmbedder.open(bundle, INT8)
    assert OnnxEmbedder.open(bundle).mode == FP32


@pytest.mark.parametrize(("seed", "degrees"), [(0.05, 20.0), (0.3, 0.0)])
def test_auto_keeps_fp32_where_int8_does_not_hold_however_fast_it_is(
    tiny_bundle: Bundle, tmp_path: Path, seed: float, degrees: float
) -> None:
    bundle = as_if_made_elsewhere(write_full_bundle(tiny_bundle, tmp_path, seed), degrees)
    embedder = OnnxEmbedder.open(bundle, AUTO)
    assert embedder.mode == FP32
    assert "not int8 with onnxruntime: The int8 model" in embedder.precision_reason
    assert "cosine" in embedder.precision_reason


def test_vectors_must_be_finite(embedder: OnnxEmbedder, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = np.full((1, TINY_DIM), np.nan, dtype=np.float32)
    monkeypatch.setattr(models_module, "run_plain", lambda *_: nothing)
    with pytest.raises(BundleError, match="not finite"):
        embedder.embed(random_images(1))
