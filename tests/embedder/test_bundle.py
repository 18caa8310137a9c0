from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.bundle import MANIFEST, MODEL, Bundle, write_bundle
from kinlens.embedder.errors import BundleCorruptError, BundleError, BundleNotFoundError
from kinlens.embedder.manifest import Mode
from tests.embedder.bundles import CALIBRATION, HELD_OUT, write_full_bundle
from tests.tiny import TINY, tiny_embed

INT8 = Mode("onnxruntime", "int8")


@pytest.fixture
def full_bundle(tiny_bundle: Bundle, tmp_path: Path) -> Bundle:
    return write_full_bundle(tiny_bundle, tmp_path)


def test_a_bundle_with_all_precisions_reads_back(full_bundle: Bundle) -> None:
    bundle = Bundle.open(full_bundle.path)
    inputs = bundle.golden_inputs()
    assert bundle.bundle_id == full_bundle.bundle_id
    assert bundle.manifest == full_bundle.manifest
    assert bundle.manifest.preprocessing == TINY
    assert bundle.manifest.calibration == CALIBRATION
    assert bundle.manifest.held_out == HELD_OUT
    assert bundle.precisions == ("fp32", "int8")
    assert bundle.model_file("int8").name == "model.int8.onnx"
    assert bundle.model_file("fp32") == bundle.model_path
    assert len(bundle.golden_images()) == 3
    np.testing.assert_allclose(bundle.golden_vectors(), tiny_embed(inputs, 0), atol=1e-6)
    np.testing.assert_allclose(bundle.golden_vectors(INT8), tiny_embed(inputs, 0.05), atol=1e-6)
    with pytest.raises(BundleError, match="has no fp16 model, only fp32, int8"):
        bundle.model_file("fp16")


def test_the_id_covers_model_and_manifest(
    full_bundle: Bundle, tiny_bundle: Bundle, make_tiny_bundle: Callable[..., Bundle]
) -> None:
    assert make_tiny_bundle(0).bundle_id == tiny_bundle.bundle_id
    ids = {tiny_bundle.bundle_id, full_bundle.bundle_id, make_tiny_bundle(1).bundle_id}
    changes = ({"calibration": None}, {"variants": {}}, {"held_out": None}, {"name": "other"})
    for change in changes:
        ids.add(full_bundle.manifest.model_copy(update=change).computed_id())
    assert len(ids) == 7


def test_a_missing_bundle_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleNotFoundError, match="nowhere"):
        Bundle.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "file", [MODEL, "golden/000.img", "model.int8.onnx", "golden/vectors.int8.npy"]
)
def test_a_changed_byte_and_a_missing_file_are_found(full_bundle: Bundle, file: str) -> None:
    content = bytearray((full_bundle.path / file).read_bytes())
    content[-1] ^= 1
    (full_bundle.path / file).write_bytes(bytes(content))
    with pytest.raises(BundleCorruptError, match=f"{file} has sha256"):
        Bundle.open(full_bundle.path)
    (full_bundle.path / file).unlink()
    with pytest.raises(BundleCorruptError, match="is missing"):
        Bundle.open(full_bundle.path)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"crop_px": 16', '"crop_px": 18', "does not match its bundle_id"),
        ('"int8":', '"unknown":', "not a bundle manifest"),
        ("{", "not json {", "not a bundle manifest"),
    ],
)
def test_an_edited_manifest_is_refused(
    full_bundle: Bundle, old: str, new: str, reason: str
) -> None:
    path = full_bundle.path / MANIFEST
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(BundleCorruptError, match=reason):
        Bundle.open(full_bundle.path)


def test_a_write_overwrites_nothing_or_leaves_nothing(tiny_bundle: Bundle, tmp_path: Path) -> None:
    model, nothing = tmp_path / "absent.onnx", np.zeros((0,))
    with pytest.raises(BundleError, match="exists already"):
        write_bundle(tiny_bundle.path, tiny_bundle.manifest, model, [], nothing, nothing)
    out = tmp_path / "new" / "bundle"
    with pytest.raises(FileNotFoundError):
        write_bundle(out, tiny_bundle.manifest, model, [], nothing, nothing)
    assert list(out.parent.iterdir()) == []
