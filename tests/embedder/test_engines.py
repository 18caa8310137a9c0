"""Two engines, several precisions: which one runs, why not the others, and that it is right."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import kinlens.embedder.engines.choice as choice_module
import kinlens.embedder.engines.models as models_module
from kinlens.embedder.bundle import Bundle, write_bundle
from kinlens.embedder.engines.models import OPENVINO, OnnxRuntimeModel, SessionSettings, absence
from kinlens.embedder.errors import BundleError, GoldenMismatchError, ProviderError
from kinlens.embedder.machine import cache_folder
from kinlens.embedder.manifest import FP32, Comparison, Engine, Mode
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.types import Embed, Embeddings, Images
from tests.embedder.bundles import INT8, random_images
from tests.tiny import tiny_embed

AUTO = SessionSettings(precision="auto", engine="auto")
OPENVINO_FP32, BF16 = Mode("openvino", "fp32"), Mode("openvino", "bf16")

needs_openvino = pytest.mark.skipif(
    absence(OPENVINO_FP32) is not None, reason=f"{absence(OPENVINO_FP32)}"
)
EACH_ENGINE = pytest.mark.parametrize(
    "engine", ["onnxruntime", pytest.param("openvino", marks=needs_openvino)]
)


def load_any(path: Path, settings: SessionSettings, _: Mode) -> OnnxRuntimeModel:
    return OnnxRuntimeModel(path, settings)


@pytest.fixture
def any_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine had all engines and units; each runs the file as onnxruntime does."""
    monkeypatch.setattr("kinlens.embedder.engines.choice.absence", lambda *_: None)
    monkeypatch.setattr("kinlens.embedder.session.load", load_any)


def measured_bundle(tiny: Bundle, folder: Path, vectors: Embeddings | None = None) -> Bundle:
    """The tiny bundle as if its export had measured bf16 with OpenVINO."""
    compared = Comparison(**INT8.model_dump(exclude={"sha256"}))
    manifest = tiny.manifest.model_copy(update={"modes": {BF16.key: compared}})
    inputs = tiny.golden_inputs()
    golden = tiny.golden_vectors()
    return write_bundle(
        folder / "measured",
        manifest,
        tiny.model_path,
        tiny.golden_images(),
        inputs,
        golden,
        modes={BF16: golden if vectors is None else vectors},
    )


class Gains:
    """Returns how fast modes are, and counts its calls."""

    def __init__(self, **times: float) -> None:
        self.times = times
        self.asked = 0

    def __call__(self, embeds: Mapping[Mode, Embed], images: Images) -> dict[Mode, float]:
        self.asked += 1
        assert len(images) == 1
        return {mode: self.times[mode.precision] for mode in embeds}


@needs_openvino
def test_openvino_serves_several_threads_at_once(tiny_bundle: Bundle) -> None:
    settings = SessionSettings(engine="openvino", callers=2)
    embedder = OnnxEmbedder.open(tiny_bundle, settings)
    assert (embedder.mode, embedder.provider) == (OPENVINO_FP32, OPENVINO)
    images = random_images(70)
    expected, found = tiny_embed(images), dict[int, Embeddings]()

    def work(number: int) -> None:
        found[number] = embedder.embed(images[number::4])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, vectors in found.items():
        np.testing.assert_allclose(vectors, expected[number::4], atol=1e-5)
    assert len(found) == 4


@EACH_ENGINE
def test_a_refused_image_does_not_affect_the_next(tiny_bundle: Bundle, engine: Engine) -> None:
    embedder = OnnxEmbedder.open(tiny_bundle, SessionSettings(engine=engine))
    with pytest.raises(BundleError, match=r"failed on 2 image\(s\) of shape \(3, 5, 5\)"):
        embedder.embed(np.zeros((2, 3, 5, 5), dtype=np.uint8))
    images = random_images(2)
    np.testing.assert_allclose(embedder.embed(images), tiny_embed(images), atol=1e-5)


@needs_openvino
def test_unmeasured_bf16_runs_only_if_asked_for(tiny_bundle: Bundle) -> None:
    if (reason := absence(BF16)) is not None:
        pytest.skip(reason)
    asked = SessionSettings(precision="bf16", engine="auto")
    images = random_images(4)
    found = OnnxEmbedder.open(tiny_bundle, asked)
    assert found.mode == BF16
    cosines = (found.embed(images) * tiny_embed(images)).sum(axis=1)
    assert 0.99 < cosines.min() < 1 - 1e-7  # rounded, and not by much
    assert OnnxEmbedder.open(tiny_bundle, AUTO).mode == FP32


@pytest.mark.parametrize(("times", "taken"), [(1.19, FP32), (1.21, BF16)])
@pytest.mark.usefixtures("any_engine")
def test_auto_takes_what_was_measured_at_the_export_where_the_processor_gains_from_it(
    tiny_bundle: Bundle, tmp_path: Path, times: float, taken: Mode
) -> None:
    bundle = measured_bundle(tiny_bundle, tmp_path)
    embedder = OnnxEmbedder.open(bundle, AUTO, gains=Gains(fp32=1.0, bf16=times))
    assert embedder.mode == taken
    assert f"bf16 with openvino is {times:.2f} times as fast as fp32" in embedder.precision_reason
    unmeasured = OnnxEmbedder.open(tiny_bundle, AUTO, gains=Gains(fp32=1.0, bf16=9.0))
    assert unmeasured.mode == FP32
    assert "bf16 with openvino: the export did not measure it" in unmeasured.precision_reason


@pytest.mark.usefixtures("any_engine")
def test_the_next_start_measures_nothing_until_something_changes(
    tiny_bundle: Bundle, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, gains = measured_bundle(tiny_bundle, tmp_path), Gains(fp32=1.0, bf16=2.0)
    reasons = {OnnxEmbedder.open(bundle, AUTO, gains=gains).precision_reason for _ in range(2)}
    assert (gains.asked, len(reasons)) == (1, 1)
    [file] = (cache_folder() / "engines").iterdir()
    assert file.is_relative_to(cache)

    file.write_text('{"gains": {"openvino-bf16": "fast"}}')
    assert OnnxEmbedder.open(bundle, AUTO, gains=gains).mode == BF16
    assert gains.asked == 2

    for name, value in (("processor", "another"), ("engine_versions", {"onnxruntime": "9"})):
        monkeypatch.setattr(choice_module, name, lambda value=value: value)
        OnnxEmbedder.open(bundle, AUTO, gains=gains)
    assert gains.asked == 4

    shutil.rmtree(cache)
    cache.write_text("a file, where the folder should be")
    for _ in range(2):
        assert OnnxEmbedder.open(bundle, AUTO, gains=gains).mode == BF16
    assert gains.asked == 6


@pytest.mark.usefixtures("any_engine")
def test_auto_omits_modes_that_fail_golden_vectors(tiny_bundle: Bundle, tmp_path: Path) -> None:
    turned = np.roll(tiny_bundle.golden_vectors(), 1, axis=1)
    bundle = measured_bundle(tiny_bundle, tmp_path, turned)
    for _ in range(2):  # measured, and remembered
        embedder = OnnxEmbedder.open(bundle, AUTO, gains=Gains(fp32=1.0, bf16=9.0))
        assert embedder.mode == FP32
        assert "not bf16 with openvino: The bf16 model" in embedder.precision_reason
    with pytest.raises(
        GoldenMismatchError, match=r"The bf16 model .* cosine .*precision fp32 or auto"
    ):
        OnnxEmbedder.open(bundle, SessionSettings(precision="bf16", engine="openvino"))


@pytest.mark.usefixtures("any_engine")
def test_auto_mixes_only_compared_precisions(tiny_bundle: Bundle, tmp_path: Path) -> None:
    bundle, gains = measured_bundle(tiny_bundle, tmp_path), Gains(fp32=1.0, bf16=9.0)
    for galleries, taken in (({"fp32", "bf16"}, BF16), ({"fp32", "int8"}, FP32)):
        settings = SessionSettings(precision="auto", engine="auto", galleries=frozenset(galleries))
        assert OnnxEmbedder.open(bundle, settings, gains=gains).mode == taken
    found = OnnxEmbedder.open(bundle, settings, gains=gains)
    assert "a gallery has vectors in int8" in found.precision_reason


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        (SessionSettings(engine="openvino"), r"not installed.*pip install 'kinlens\[openvino\]'"),
        (SessionSettings(precision="bf16"), "only on ARM.*--engine openvino"),
        (SessionSettings(device="cuda", engine="openvino"), "OpenVINO runs on the CPU only"),
    ],
)
def test_what_this_machine_lacks_is_named_with_its_cure(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, settings: SessionSettings, cure: str
) -> None:
    monkeypatch.setattr(models_module.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(models_module.platform, "machine", lambda: "x86_64")
    with pytest.raises(ProviderError, match=cure):
        OnnxEmbedder.open(tiny_bundle, settings)
    assert OnnxEmbedder.open(tiny_bundle, AUTO).mode == FP32


def test_onnxruntime_sends_no_telemetry(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """Its telemetry leaves a queue and the id of the device in the home of the user."""
    code = (
        "import sys, kinlens.embedder.session;"
        "import onnxruntime.quantization; onnxruntime.InferenceSession(sys.argv[1])"
    )
    quiet = {key: value for key, value in os.environ.items() if key not in ("CI", "XDG_CACHE_HOME")}
    quiet |= {"HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    quiet.pop("ORT_DISABLE_TELEMETRY", None)
    command = [sys.executable, "-c", code, str(tiny_bundle.model_path)]
    subprocess.run(command, env=quiet, check=True, cwd=Path(__file__).parents[2])
    assert not [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name]
