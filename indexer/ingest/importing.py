"""A gallery made of the content of another, or of a Parquet file."""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from indexer.folder.layout import GalleryFolder
from indexer.folder.manifest import GalleryManifest, checked_name
from indexer.index.plan import IndexSettings
from indexer.ingest.build import planned
from indexer.ingest.generation import publish_generation
from indexer.types import Dump, Progress


class ImportReport(BaseModel):
    """What was imported."""

    model_config = ConfigDict(frozen=True)

    name: str
    bundle_id: str
    dim: int
    items: int
    generation: str


def import_gallery(
    dump: Dump,
    out: Path | str,
    name: str | None = None,
    settings: IndexSettings | None = None,
    on_progress: Progress | None = None,
) -> ImportReport:
    """Make the content of `dump` the gallery in folder `out`, under `name` or its own.

    The old gallery stays as it is until the new one is complete. Progress counts every item twice:
    when it is stored, and when it is indexed.

    Raises: SourceError for a damaged entry; PlanError, RecallError, GalleryBusyError,
        GalleryWriteError, InvalidParameterError.
    """
    settings = settings or IndexSettings()
    if dump.count:
        planned(dump.count, dump.dim, settings)
    facts = dump.facts
    manifest = GalleryManifest(
        name=checked_name(name or facts["name"]),
        bundle_id=facts["bundle_id"],
        dim=dump.dim,
        source=facts.get("source", ""),
        source_root=facts.get("source_root", ""),
    )
    report = json.dumps({"imported": dump.count, "found": dump.count, "failures": []}) + "\n"
    folder = GalleryFolder(out)
    with folder.locked():
        publish_generation(folder, manifest, dump.entries(), settings, report, on_progress)
    return ImportReport(
        name=manifest.name,
        bundle_id=manifest.bundle_id,
        dim=dump.dim,
        items=dump.count,
        generation=manifest.generation,
    )
