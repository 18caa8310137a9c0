"""Read and write a model bundle: written atomically, verified by hash.

bundle/
  model.onnx          uint8 (N, 3, S, S) -> float32 (N, D), unit norm
  model.int8.onnx     optional files of the network in other precisions: int8, fp16
  model.map.onnx      optional map: float32 (N, D, h, w), whose sum over h, w is the vector
  boxes.onnx          optional detector, attached later: an image -> boxes of its objects
  seen.npy            optional hashes of the classes and images that the model was trained on
  text.onnx           optional text tower: int64 (N, T) -> float32 (N, D), unit norm
  tokenizer.json      its tokenizer, in the format of the package `tokenizers`
  manifest.json       BundleManifest with the bundle_id
  golden/             encoded images, their preprocessed tensors, their vectors in each precision;
                      texts with their vectors
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from pydantic import ValidationError

from kinlens.embedder.durable import rename, staged, sync_tree
from kinlens.embedder.errors import BundleCorruptError, BundleError, BundleNotFoundError
from kinlens.embedder.manifest import (
    FP32,
    BoxesFile,
    BundleManifest,
    Engine,
    GoldenHashes,
    Mode,
    OtherPrecision,
    Precision,
    TextTower,
)
from kinlens.embedder.programs.faults import file_fault
from kinlens.embedder.seen import Seen
from kinlens.embedder.types import Embeddings, Images

MODEL = "model.onnx"
MAP = "model.map.onnx"
BOXES = "boxes.onnx"
MANIFEST = "manifest.json"
SEEN = "seen.npy"
WEIGHTS = "weights.safetensors"
"""The weights as training has them, of a bundle that keeps them."""
TEXT = "text.onnx"
TOKENIZER = "tokenizer.json"
GOLDEN = "golden"
GOLDEN_TEXTS = "texts.json"
"""A JSON object of texts and their vectors."""

_INPUTS = "inputs.npy"
_VECTORS = "vectors.npy"


class Bundle:
    """A bundle whose hashes `open` has verified.

    Attributes:
        bundle_id: the `vectors_id` of the manifest, which attached files do not change.
        model_path: the ONNX file in fp32, which also serves bf16.
        precisions: those with an ONNX file, fp32 first.
    """

    def __init__(self, path: Path, manifest: BundleManifest) -> None:
        self.path = path
        self.manifest = manifest
        self.bundle_id = manifest.vectors_id
        self.model_path = path / MODEL
        self.precisions: tuple[Precision, ...] = ("fp32", *manifest.variants)

    @classmethod
    def open(cls, path: Path | str) -> "Bundle":
        """Open and verify the bundle in folder `path`.

        Raises: BundleNotFoundError, BundleCorruptError.
        """
        bundle = cls(Path(path), read_manifest(Path(path)))
        bundle._verify()
        return bundle

    def model_file(self, precision: Precision) -> Path:
        """Path of the ONNX file of a precision. Raises: BundleError if the bundle lacks it."""
        if precision not in (*self.precisions, "bf16"):
            raise BundleError(
                f"The bundle {self.path} has no {precision} model, only "
                f"{', '.join(self.precisions)}. Choose one of these, or export it again with "
                f"--precision {precision}."
            )
        return self.path / model_name(precision)

    def modes(self) -> list[Mode]:
        """The modes that the export compared with fp32; fp32 in onnxruntime is first."""
        manifest = self.manifest
        known = [FP32, Mode("openvino", "fp32")]
        others: list[Mode] = [
            Mode(engine, precision)
            for engine in get_args(Engine)
            for precision in get_args(OtherPrecision)
        ]
        return known + [mode for mode in others if manifest.comparison(mode) is not None]

    def map_file(self) -> Path:
        """Path of the ONNX file of the map. Raises: BundleError if the bundle lacks it."""
        if self.manifest.map is None:
            raise BundleError(
                f"The bundle {self.path} has no map, which is needed to show where images match. "
                "Export it again with --map, and rebuild its galleries."
            )
        return self.path / MAP

    def seen(self) -> Seen | None:
        """What the model was trained on, its ancestors included; None if it is not recorded.

        A pretrained trunk, which has no job, was trained on no images of ours.
        """
        if self.manifest.seen_sha256 is not None:
            return Seen.load(self.path / SEEN)
        return None if self.manifest.job else Seen.of()

    def golden_images(self) -> list[bytes]:
        """The golden images as encoded files, in the order of the vectors."""
        names = [n for n in self.manifest.golden.files if not n.endswith(".npy")]
        return [(self.path / GOLDEN / name).read_bytes() for name in sorted(names)]

    def golden_inputs(self) -> Images:
        """The golden images after preprocessing, uint8 (N, 3, S, S)."""
        inputs: Images = np.load(self.path / GOLDEN / _INPUTS, allow_pickle=False)
        return inputs

    def golden_vectors(self, mode: Mode = FP32) -> Embeddings:
        """Vectors of the golden images by `mode`, computed at the export, float32 (N, D).

        Raises: KeyError if `mode` is not in `modes()`.
        """
        if mode.precision != "fp32" and self.manifest.comparison(mode) is None:
            raise KeyError(mode)
        path = self.path / GOLDEN / _vectors_name(mode)
        vectors: Embeddings = np.load(path, allow_pickle=False)
        return vectors

    def golden_texts(self) -> dict[str, list[float]]:
        """Texts and their vectors (D,), computed when the text tower was made."""
        path = self.path / GOLDEN / GOLDEN_TEXTS
        texts: dict[str, list[float]] = json.loads(path.read_bytes())
        return texts

    def files(self) -> dict[str, str]:
        """The sha256 of each file that the manifest names, by its name."""
        manifest = self.manifest
        files = {MODEL: manifest.model_sha256}
        optional = {MAP: manifest.map, BOXES: manifest.boxes, TEXT: manifest.text}
        files |= {name: block.sha256 for name, block in optional.items() if block is not None}
        if manifest.seen_sha256 is not None:
            files[SEEN] = manifest.seen_sha256
        if manifest.text is not None:
            files[TOKENIZER] = manifest.text.tokenizer_sha256
            files[f"{GOLDEN}/{GOLDEN_TEXTS}"] = manifest.text.golden_sha256
        for precision, variant in manifest.variants.items():
            files[model_name(precision)] = variant.sha256
        return files | {f"{GOLDEN}/{name}": sha for name, sha in manifest.golden.files.items()}

    def _verify(self) -> None:
        manifest = self.manifest
        named = manifest.with_id()
        if (named.bundle_id, named.base_id) != (manifest.bundle_id, manifest.base_id):
            raise BundleCorruptError(
                f"{self.path / MANIFEST} does not match its bundle_id {manifest.bundle_id[:12]}: "
                "it was edited after the export. Export the bundle again."
            )
        for mode in self.modes():
            if _vectors_name(mode) not in manifest.golden.files:
                raise BundleCorruptError(
                    f"{self.path / MANIFEST} has {mode} without its golden vectors. "
                    "Export the bundle again."
                )
        for name, digest in self.files().items():
            path = self.path / name
            if not path.is_file():
                raise BundleCorruptError(f"{path} is missing. Export or copy the bundle again.")
            found = sha256_of(path)
            if found != digest:
                raise BundleCorruptError(
                    f"{path} has sha256 {found[:12]}, but the manifest has {digest[:12]}: the file "
                    "is damaged or was changed. Export or copy the bundle again."
                )


def read_manifest(path: Path) -> BundleManifest:
    """The manifest of the bundle in folder `path`.

    Raises: BundleNotFoundError, BundleCorruptError.
    """
    if not path.exists():
        raise BundleNotFoundError(
            f"No model bundle at {path}: {path} does not exist. Check the name, or make it: "
            f"kinlens-train adapt --data IMAGES --out {path}"
        )
    if not (path / MANIFEST).is_file():
        raise BundleNotFoundError(
            f"No model bundle at {path}: {MANIFEST} is missing. Pass the folder that "
            "`kinlens-train adapt` or `export` wrote."
        )
    try:
        return BundleManifest.model_validate_json((path / MANIFEST).read_bytes())
    except ValidationError as error:
        raise BundleCorruptError(
            f"{path / MANIFEST} is not a bundle manifest that this version can read: "
            f"{file_fault(error)}."
        ) from error


def make_room(out: Path) -> None:
    """Create the parent folder. Raises: BundleError if `out` exists or cannot be created."""
    if out.exists():
        raise BundleError(f"{out} exists already. Choose another folder or delete it first.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError(
            f"{out} cannot be created ({error.strerror}). Choose another folder."
        ) from error


def write_bundle(
    out: Path,
    manifest: BundleManifest,
    model: Path,
    golden_images: Sequence[bytes],
    golden_inputs: Images,
    golden_vectors: Embeddings,
    files: Mapping[str, Path] | None = None,
    modes: Mapping[Mode, Embeddings] | None = None,
    seen: Seen | None = None,
) -> Bundle:
    """Write a bundle atomically to the new folder `out`.

    Args:
        manifest: without hashes and id, which are filled in here.
        files: further files by name: those of `manifest.variants` (`model_name`), MAP if
            `manifest.map` is set, and WEIGHTS.
        modes: the golden vectors of the modes in `manifest.variants` and `manifest.modes`.
        seen: what the model was trained on.

    Raises: BundleError if `out` exists.
    """
    make_room(out)
    with staged(out.parent) as stage:
        golden = stage / GOLDEN
        golden.mkdir()
        for number, data in enumerate(golden_images):
            (golden / f"{number:03d}.img").write_bytes(data)
        np.save(golden / _INPUTS, golden_inputs)
        np.save(golden / _VECTORS, golden_vectors)
        for name, file in {MODEL: model, **(files or {})}.items():
            shutil.copyfile(file, stage / name)
        for mode, vectors in (modes or {}).items():
            np.save(golden / _vectors_name(mode), vectors)
        if seen is not None:
            np.save(stage / SEEN, seen.hashes)
        _finish(stage, _stamped(manifest, stage), out)
    return Bundle.open(out)


def attach(
    bundle: Bundle, out: Path, files: Mapping[str, Path], **blocks: BoxesFile | TextTower
) -> Bundle:
    """Write a copy of a bundle with more files atomically to the new folder `out`. Galleries of
    `bundle` can be searched with the copy, and the other way round.

    Args:
        files: by their names in the bundle, such as BOXES.
        blocks: the fields of the manifest that describe them, with their sha256.

    Raises: BundleError if `out` exists.
    """
    make_room(out)
    with staged(out.parent) as stage:
        own = {str(p.relative_to(bundle.path)): p for p in bundle.path.rglob("*") if p.is_file()}
        for name, file in {**own, **files}.items():
            (stage / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, stage / name)
        _finish(stage, bundle.manifest.model_copy(update=blocks).with_id(), out)
    return Bundle.open(out)


def _finish(stage: Path, manifest: BundleManifest, out: Path) -> None:
    text = json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False)
    (stage / MANIFEST).write_text(text + "\n", encoding="utf-8")
    sync_tree(stage, "bundle")  # otherwise a power loss could leave an empty bundle
    rename(stage, out, "bundle")


def _stamped(manifest: BundleManifest, stage: Path) -> BundleManifest:
    """The manifest with its id and the hashes of the files in `stage`."""
    golden = {p.name: sha256_of(p) for p in sorted((stage / GOLDEN).iterdir())}
    variants = {
        precision: variant.model_copy(update={"sha256": sha256_of(stage / model_name(precision))})
        for precision, variant in manifest.variants.items()
    }
    hashes = {
        "model_sha256": sha256_of(stage / MODEL),
        "golden": GoldenHashes(files=golden),
        "variants": variants,
        "map": manifest.map and manifest.map.model_copy(update={"sha256": sha256_of(stage / MAP)}),
        "seen_sha256": sha256_of(stage / SEEN) if (stage / SEEN).exists() else None,
    }
    return manifest.model_copy(update=hashes).with_id()


def sha256_of(path: Path) -> str:
    """sha256 (hex) of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_name(precision: Precision) -> str:
    """The name of the ONNX file that a precision runs."""
    return MODEL if precision in ("fp32", "bf16") else f"model.{precision}.onnx"


def _vectors_name(mode: Mode) -> str:
    if mode.precision == "fp32":
        return _VECTORS
    name = mode.precision if mode.engine == "onnxruntime" else mode.key
    return f"vectors.{name}.npy"
