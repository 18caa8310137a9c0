"""The model bundle on disk: written atomically, verified by hash. The one module that does both.

bundle/
  model.onnx          uint8 (N, 3, S, S) -> float32 (N, D), unit norm
  manifest.json       BundleManifest, stamped with the bundle_id
  golden/             encoded images, their preprocessed tensors, their vectors
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from embedder.errors import BundleCorruptError, BundleError, BundleNotFoundError
from embedder.manifest import BundleManifest, GoldenHashes
from embedder.types import Embeddings, Images

MODEL = "model.onnx"
MANIFEST = "manifest.json"
GOLDEN = "golden"
_INPUTS = "inputs.npy"
_VECTORS = "vectors.npy"


class Bundle:
    """A verified bundle: every hash has been checked when an instance exists."""

    def __init__(self, path: Path, manifest: BundleManifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path | str) -> "Bundle":
        """Open and verify the bundle in folder `path`.

        Raises: BundleNotFoundError, BundleCorruptError.
        """
        path = Path(path)
        if not (path / MANIFEST).is_file():
            raise BundleNotFoundError(
                f"No model bundle at {path}: {MANIFEST} is missing. Give the folder that "
                "`kinlens-train export` wrote."
            )
        bundle = cls(path, _read_manifest(path / MANIFEST))
        bundle._verify()
        return bundle

    @property
    def bundle_id(self) -> str:
        """sha256 (hex) over the model and the manifest."""
        return self.manifest.bundle_id

    @property
    def model_path(self) -> Path:
        """The ONNX file."""
        return self.path / MODEL

    def golden_images(self) -> list[bytes]:
        """The golden images as encoded files, in the order of the vectors."""
        names = [n for n in self.manifest.golden.files if not n.endswith(".npy")]
        return [(self.path / GOLDEN / name).read_bytes() for name in sorted(names)]

    def golden_inputs(self) -> Images:
        """The golden images after preprocessing, uint8 (N, 3, S, S)."""
        inputs: Images = np.load(self.path / GOLDEN / _INPUTS, allow_pickle=False)
        return inputs

    def golden_vectors(self) -> Embeddings:
        """The embeddings of the golden images, float32 (N, D)."""
        vectors: Embeddings = np.load(self.path / GOLDEN / _VECTORS, allow_pickle=False)
        return vectors

    def _verify(self) -> None:
        manifest = self.manifest
        if manifest.computed_id() != manifest.bundle_id:
            raise BundleCorruptError(
                f"{self.path / MANIFEST} does not match its bundle_id {manifest.bundle_id[:12]}: "
                "it was edited after the export. Export the bundle again."
            )
        expected = {MODEL: manifest.model_sha256}
        expected |= {f"{GOLDEN}/{name}": digest for name, digest in manifest.golden.files.items()}
        for name, digest in expected.items():
            _check_hash(self.path / name, digest)


def write_bundle(
    out: Path,
    manifest: BundleManifest,
    model: Path,
    golden_images: Sequence[bytes],
    golden_inputs: Images,
    golden_vectors: Embeddings,
) -> Bundle:
    """Write a bundle to the new folder `out`: either all of it is there or nothing.

    `manifest` comes without hashes and id; both are filled in here.

    Raises: BundleError if `out` exists.
    """
    if out.exists():
        raise BundleError(f"{out} exists already. Choose another folder or remove it first.")
    out.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        golden = stage / GOLDEN
        golden.mkdir()
        for number, data in enumerate(golden_images):
            (golden / f"{number:03d}.img").write_bytes(data)
        np.save(golden / _INPUTS, golden_inputs)
        np.save(golden / _VECTORS, golden_vectors)
        shutil.copyfile(model, stage / MODEL)
        hashes = {p.name: sha256_of(p) for p in sorted(golden.iterdir())}
        stamped = manifest.model_copy(
            update={
                "model_sha256": sha256_of(stage / MODEL),
                "golden": GoldenHashes(files=hashes),
            }
        ).with_id()
        (stage / MANIFEST).write_text(stamped.model_dump_json(indent=2) + "\n", encoding="utf-8")
        stage.chmod(0o755)
        stage.replace(out)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    return Bundle.open(out)


def sha256_of(path: Path) -> str:
    """sha256 (hex) of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(path: Path) -> BundleManifest:
    try:
        return BundleManifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (ValidationError, ValueError) as error:
        raise BundleCorruptError(
            f"{path} is not a bundle manifest this version can read: {error}"
        ) from error


def _check_hash(path: Path, expected: str) -> None:
    if not path.is_file():
        raise BundleCorruptError(f"{path} is missing. Export or copy the bundle again.")
    found = sha256_of(path)
    if found != expected:
        raise BundleCorruptError(
            f"{path} has sha256 {found[:12]}, the manifest says {expected[:12]}: the file is "
            "damaged or was changed. Export or copy the bundle again."
        )
