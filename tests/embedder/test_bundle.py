import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embedder.bundle import MANIFEST, MODEL, Bundle, write_bundle
from embedder.errors import BundleCorruptError, BundleError, BundleNotFoundError
from tests.tiny import TINY, TINY_DIM


@pytest.fixture
def copy(tiny_bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle.path, tmp_path / "copy"))


def test_a_written_bundle_reads_back(tiny_bundle: Bundle) -> None:
    bundle = Bundle.open(tiny_bundle.path)
    assert bundle.bundle_id == tiny_bundle.bundle_id
    assert bundle.manifest.preprocessing == TINY
    assert bundle.golden_inputs().shape == (3, 3, 16, 16)
    assert bundle.golden_vectors().shape == (3, TINY_DIM)
    assert len(bundle.golden_images()) == 3


def test_the_id_covers_model_and_manifest(
    tiny_bundle: Bundle, make_tiny_bundle: Callable[..., Bundle]
) -> None:
    assert make_tiny_bundle(0).bundle_id == tiny_bundle.bundle_id
    assert make_tiny_bundle(1).bundle_id != tiny_bundle.bundle_id
    renamed = tiny_bundle.manifest.model_copy(update={"name": "other"})
    assert renamed.computed_id() != tiny_bundle.bundle_id


def test_a_missing_bundle_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleNotFoundError, match="nowhere"):
        Bundle.open(tmp_path / "nowhere")


@pytest.mark.parametrize("file", [MODEL, "golden/vectors.npy", "golden/000.img"])
def test_a_changed_byte_is_found(copy: Path, file: str) -> None:
    content = bytearray((copy / file).read_bytes())
    content[-1] ^= 1
    (copy / file).write_bytes(bytes(content))
    with pytest.raises(BundleCorruptError, match=f"{file} has sha256"):
        Bundle.open(copy)


def test_a_missing_file_is_found(copy: Path) -> None:
    (copy / MODEL).unlink()
    with pytest.raises(BundleCorruptError, match="is missing"):
        Bundle.open(copy)


def test_an_edited_manifest_is_found(copy: Path) -> None:
    text = (copy / MANIFEST).read_text()
    (copy / MANIFEST).write_text(text.replace('"crop_px": 16', '"crop_px": 18'))
    with pytest.raises(BundleCorruptError, match="does not match its bundle_id"):
        Bundle.open(copy)


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"unknown": 1}'])
def test_a_manifest_that_is_none_is_refused(copy: Path, text: str) -> None:
    (copy / MANIFEST).write_text(text)
    with pytest.raises(BundleCorruptError, match="not a bundle manifest"):
        Bundle.open(copy)


def test_an_existing_folder_is_not_overwritten(tiny_bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="exists already"):
        write_bundle(
            tiny_bundle.path,
            tiny_bundle.manifest,
            tiny_bundle.model_path,
            tiny_bundle.golden_images(),
            tiny_bundle.golden_inputs(),
            tiny_bundle.golden_vectors(),
        )


def test_a_failed_write_leaves_nothing(tiny_bundle: Bundle, tmp_path: Path) -> None:
    out = tmp_path / "new" / "bundle"
    with pytest.raises(FileNotFoundError):
        write_bundle(
            out, tiny_bundle.manifest, tmp_path / "absent.onnx", [], np.zeros((0,)), np.zeros((0,))
        )
    assert list(out.parent.iterdir()) == []
