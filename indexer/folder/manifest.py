"""The manifest of a gallery generation: immutable and versioned; unknown keys are refused."""

import hashlib
import json
import re
import uuid
from datetime import UTC, datetime
from operator import not_
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from kinlens.embedder.durable import rename, sync
from kinlens.embedder.errors import GalleryCorruptError
from kinlens.embedder.types import SHORT
from kinlens.indexer.index.segment import SegmentManifest, brief
from kinlens.indexer.types import GALLERY_NAME, RESTORE, VectorType

MANIFEST = "manifest.json"
"""The manifest file; a folder that contains it is a generation."""

REPORT = "report.json"
"""The report of the build, next to the manifest."""

PRECISIONS = "precisions.json"
"""The precisions of items added after the build; absent if they equal that of the build."""

CALIBRATION = "calibration.json"
"""Written by `kinlens.quality`; backups and snapshots copy it."""

SCHEMA_VERSION = 2


class GalleryFacts(BaseModel, frozen=True):
    """One state of a gallery.

    size: number of items; `delta` of them were added after the segment.
    tombstones: number of removed items in the segment, until the next compaction.
    """

    name: str
    version: str
    generation: str
    bundle_id: str
    precision: str
    dim: int
    size: int
    delta: int
    tombstones: int
    created_at: str
    source: str
    source_root: str
    compaction_due: str | None
    segment: SegmentManifest | None


class GalleryManifest(BaseModel, frozen=True, extra="forbid"):
    """The properties of a generation that do not change with its items.

    `precision` is the precision of the model that computed the vectors, `vector_type` the type of
    the stored vectors. Both are omitted for fp32, as in earlier versions. `shortened` vectors are
    the first `dim` numbers of those of the bundle.
    """

    schema_version: Literal[2] = 2
    uid: str = Field(pattern=r"^[0-9a-f]{32}$", default_factory=lambda: uuid.uuid4().hex)
    name: str = Field(pattern=f"^{GALLERY_NAME}$")
    bundle_id: str = Field(min_length=1)
    precision: str = Field(default="fp32", exclude_if=lambda value: value == "fp32")
    vector_type: VectorType = Field(default="fp32", exclude_if=lambda value: value == "fp32")
    dim: int = Field(ge=1)
    shortened: bool = Field(default=False, exclude_if=not_)
    created_at: str = Field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds")
    )
    source: str = ""
    source_root: str = ""
    digest: str = ""

    def stamped(self) -> "GalleryManifest":
        """The same manifest with its digest."""
        return self.model_copy(update={"digest": self.computed_digest()})

    def computed_digest(self) -> str:
        """sha256 (hex) over this manifest without its digest."""
        content = self.model_dump(mode="json", exclude={"digest"})
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def generation(self) -> str:
        """The name of its folder."""
        return self.uid[:SHORT]


def write_manifest(folder: Path, manifest: GalleryManifest) -> None:
    """Write the manifest atomically into a folder that is not in use yet. Raises: OSError."""
    text = manifest.stamped().model_dump_json(indent=2) + "\n"
    aside = folder / f".{MANIFEST}"
    aside.write_text(text, encoding="utf-8")
    sync(aside, "manifest")
    rename(aside, folder / MANIFEST, "manifest")


def read_manifest(folder: Path) -> GalleryManifest:
    """The manifest of a generation. Raises: GalleryCorruptError, also for another schema."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        _refuse_other_schema(path, content)
        manifest = GalleryManifest.model_validate(content)
    except (OSError, ValueError) as error:
        raise GalleryCorruptError(
            f"{path} is not a gallery manifest that this version of Kinlens can read: "
            f"{brief(error)}. Restore a backup (kinlens-index restore) or build the gallery again."
        ) from error
    if manifest.digest != manifest.computed_digest():
        raise GalleryCorruptError(
            f"{path} does not match its digest: it was edited after the build. Restore a backup "
            "(kinlens-index restore) or build the gallery again."
        )
    if manifest.generation != folder.name:
        raise GalleryCorruptError(
            f"{path} belongs to the generation {manifest.generation}, not to {folder.name}: the "
            "folder was renamed or the file was edited. Give the folder its name back."
        )
    return manifest


def _refuse_other_schema(path: Path, content: object) -> None:
    found = content.get("schema_version") if isinstance(content, dict) else None
    if found == 1:
        raise GalleryCorruptError(
            f"{path} has schema 1, this version of Kinlens reads {SCHEMA_VERSION}. Rebuild the "
            "gallery from its images: kinlens-index build."
        )
    if isinstance(found, int) and found > SCHEMA_VERSION:
        raise GalleryCorruptError(
            f"{path} has schema {found}, this version of Kinlens reads {SCHEMA_VERSION}. Use the "
            "version of Kinlens that wrote it, or a newer one."
        )


def read_report(generation: Path) -> dict[str, Any]:
    """The report of the build; empty for a gallery created empty. Raises: GalleryCorruptError."""
    path = generation / REPORT
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GalleryCorruptError(f"{path} cannot be read: {error}. {RESTORE}") from error
    return report


def name_of(folder: Path) -> str:
    """A valid gallery name derived from the name of its folder."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name)[:64]
    return cleaned.strip("-._") or "gallery"
