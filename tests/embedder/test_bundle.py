import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.bundle import MANIFEST, MODEL, Bundle, write_bundle
from kinlens.embedder.errors import BundleCorruptError, BundleError, BundleNotFoundError
from kinlens.embedder.manifest import GoldenHashes, Mode
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
    "file",
    [MODEL, "golden/vectors.npy", "golden/000.img", "model.int8.onnx", "golden/vectors.int8.npy"],
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


def test_an_edited_manifest_is_found(full_bundle: Bundle) -> None:
    path = full_bundle.path / MANIFEST
    path.write_text(path.read_text().replace('"crop_px": 16', '"crop_px": 18'))
    with pytest.raises(BundleCorruptError, match="does not match its bundle_id"):
        Bundle.open(full_bundle.path)


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"unknown": 1}'])
def test_a_manifest_that_is_none_is_refused(full_bundle: Bundle, text: str) -> None:
    (full_bundle.path / MANIFEST).write_text(text)
    with pytest.raises(BundleCorruptError, match="not a bundle manifest"):
        Bundle.open(full_bundle.path)


@pytest.mark.parametrize("table", ["variants", "held_out"])
def test_an_unknown_key_is_refused(full_bundle: Bundle, table: str) -> None:
    content = json.loads((full_bundle.path / MANIFEST).read_text())
    content[table]["unknown"] = 1
    (full_bundle.path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(BundleCorruptError, match="not a bundle manifest"):
        Bundle.open(full_bundle.path)


def test_a_write_overwrites_nothing_or_leaves_nothing(tiny_bundle: Bundle, tmp_path: Path) -> None:
    model, nothing = tmp_path / "absent.onnx", np.zeros((0,))
    with pytest.raises(BundleError, match="already exists"):
        write_bundle(tiny_bundle.path, tiny_bundle.manifest, model, [], nothing, nothing)
    out = tmp_path / "new" / "bundle"
    with pytest.raises(FileNotFoundError):
        write_bundle(out, tiny_bundle.manifest, model, [], nothing, nothing)
    assert list(out.parent.iterdir()) == []


def test_a_manifest_without_variants_keeps_its_id(tiny_bundle: Bundle, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_bundle.path, tmp_path / "copy"))
    content = json.loads((copy / MANIFEST).read_text())
    assert not content.keys() & {"held_out", "variants", "calibration"}
    content.pop("bundle_id")
    # The id as it was computed before these keys existed.
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    content["bundle_id"] = hashlib.sha256(canonical.encode()).hexdigest()
    (copy / MANIFEST).write_text(json.dumps(content))
    bundle = Bundle.open(copy)
    assert bundle.bundle_id == content["bundle_id"]
    assert bundle.precisions == ("fp32",)
    assert bundle.manifest.calibration is None


def test_a_precision_that_is_absent_names_what_there_is(full_bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="has no fp16 model, only fp32, int8"):
        full_bundle.model_file("fp16")


def test_a_variant_without_golden_vectors_is_refused(full_bundle: Bundle) -> None:
    manifest = full_bundle.manifest
    files = {k: v for k, v in manifest.golden.files.items() if k != "vectors.int8.npy"}
    stripped = manifest.model_copy(update={"golden": GoldenHashes(files=files)}).with_id()
    (full_bundle.path / MANIFEST).write_text(json.dumps(stripped.model_dump(mode="json")))
    with pytest.raises(BundleCorruptError, match="int8 with onnxruntime without its"):
        Bundle.open(full_bundle.path)
