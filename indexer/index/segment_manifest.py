"""The manifest of a segment, and its files as they must be."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from embedder.bundle import sha256_of
from embedder.errors import GalleryCorruptError
from indexer.folder.hashed_file import FileFacts
from indexer.index.plan import IndexKind, IndexSettings
from indexer.index.search import Effort

VECTORS = "vectors.npy"
IDS = "ids.npy"
INDEX = "index.faiss"
MANIFEST = "segment.json"

HASHED_BELOW = 64 * 2**20
"""Bytes up to which a file's hash is checked on every opening."""

_CURE = "Make the index again from the catalogue: kinlens-index compact GALLERY --rebuild."
_SHORT = 12


class SegmentManifest(BaseModel):
    """What a segment holds and how it was made.

    seq: the state whose items it holds. recall: at 10, measured with `held_out` queries that were
    not in the index yet; 0 of them if the gallery was too small and its own vectors were used.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    seq: int = Field(ge=0)
    size: int = Field(ge=1)
    dim: int = Field(ge=1)
    kind: IndexKind
    parameters: dict[str, int]
    effort: int = Field(ge=0)
    k_factor: int = Field(ge=1)
    recall: float = Field(ge=0, le=1)
    target_recall: float = Field(gt=0, le=1)
    held_out: int = Field(ge=0)
    build_s: float = Field(ge=0)
    created_at: str = Field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds")
    )
    settings: IndexSettings
    files: dict[str, FileFacts]

    @property
    def tuned(self) -> Effort:
        """The effort that reached the target."""
        return Effort(self.effort, self.k_factor)


def write_manifest(folder: Path, manifest: SegmentManifest) -> None:
    """Write the manifest into a folder that nobody reads yet. Raises: OSError."""
    text = manifest.model_dump_json(indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> SegmentManifest:
    """The manifest of a segment. Raises: GalleryCorruptError."""
    path = folder / MANIFEST
    try:
        manifest = SegmentManifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise GalleryCorruptError(
            f"{path} is not a segment manifest that this version of Kinlens can read: "
            f"{_brief(error)}. {_CURE}"
        ) from error
    expected = {VECTORS, IDS} | ({INDEX} if manifest.kind != "flat" else set())
    if manifest.files.keys() != expected:
        raise GalleryCorruptError(
            f"{path} lists the files {sorted(manifest.files)}, an index of kind {manifest.kind} "
            f"has {sorted(expected)}. {_CURE}"
        )
    return manifest


def check_file(path: Path, facts: FileFacts, verify_hash: bool | None) -> None:
    """A file has its size and, where this is checked, its hash. Raises: GalleryCorruptError.

    A mapped file that is shorter than it should be would kill the process with SIGBUS.
    """
    try:
        found = path.stat().st_size
        if found != facts.bytes:
            raise GalleryCorruptError(
                f"{path} has {found:,} bytes, the manifest says {facts.bytes:,}: the file was "
                f"truncated or changed. {_CURE}"
            )
        if verify_hash is False or (verify_hash is None and found >= HASHED_BELOW):
            return
        sha256 = sha256_of(path)
    except OSError as error:
        raise GalleryCorruptError(f"{path} cannot be read: {error}. {_CURE}") from error
    if sha256 != facts.sha256:
        raise GalleryCorruptError(
            f"{path} has sha256 {sha256[:_SHORT]}, the manifest says {facts.sha256[:_SHORT]}: the "
            f"file is damaged or was changed. {_CURE}"
        )


def mapped(path: Path, dtype: type, shape: tuple[int, ...]) -> NDArray[Any]:
    """An array in a file, mapped into memory. Raises: GalleryCorruptError."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise GalleryCorruptError(f"{path} is not an array: {error}. {_CURE}") from error
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise GalleryCorruptError(
            f"{path} holds {array.dtype} {array.shape}, the segment has {np.dtype(dtype)} {shape}. "
            f"{_CURE}"
        )
    found: NDArray[Any] = np.asarray(array)  # indexing a memmap itself takes ten times as long
    return found


def _brief(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)
