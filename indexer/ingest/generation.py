"""A new generation of a gallery: written aside, read back, published in one step.

versions/<generation>/
  manifest.json      GalleryManifest
  report.json        how it was made
  catalog.sqlite     the durable truth about its items, vectors included
  segments/<name>/   the FAISS index over them
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from embedder.errors import GalleryCorruptError
from indexer.catalog.write import bulk_load
from indexer.folder.layout import GalleryFolder, disk_errors_explained
from indexer.folder.manifest import GalleryManifest, write_manifest
from indexer.index.plan import IndexSettings
from indexer.live.compaction import CATALOG, SEGMENTS, compact
from indexer.live.snapshot import open_segment
from indexer.types import Entry, Progress

REPORT = "report.json"


def publish_generation(
    folder: GalleryFolder,
    manifest: GalleryManifest,
    entries: Iterable[Entry],
    settings: IndexSettings | None = None,
    report: str = "{}\n",
    on_progress: Progress | None = None,
) -> Path:
    """Make a gallery of `entries` the current one; call it inside `folder.locked()`.

    Until the last moment the old generation stays as it is. Progress counts every entry twice: when
    it is stored, and when it is indexed.

    Raises: InvalidParameterError for entries that do not fit; PlanError, RecallError,
        GalleryWriteError.
    """
    with disk_errors_explained(folder.path), folder.stage() as stage:
        (stage / SEGMENTS).mkdir()
        (stage / REPORT).write_text(report, encoding="utf-8")
        write_manifest(stage, manifest)
        bulk_load(stage / CATALOG, manifest.dim, entries, on_progress)
        _index(stage, settings or IndexSettings(), on_progress)
        return folder.publish(stage, manifest.generation)


def _index(stage: Path, settings: IndexSettings, on_progress: Progress | None) -> None:
    made = compact(stage, settings, on_progress=on_progress)
    if made.segment is not None:
        # What was written is read back before anyone else sees it.
        open_segment(stage / SEGMENTS / made.segment, "cpu", verify_hashes=True)


def read_report(generation: Path) -> dict[str, Any]:
    """How a generation was made. Raises: GalleryCorruptError."""
    path = generation / REPORT
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GalleryCorruptError(
            f"{path} cannot be read: {error}. Restore a backup: kinlens-index restore."
        ) from error
    return report
