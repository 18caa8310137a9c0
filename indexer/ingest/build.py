"""Build a gallery: embed a source, then publish a new generation in one step."""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from pydantic import BaseModel, ConfigDict

from embedder.errors import GalleryError
from embedder.session import Embedder
from indexer.folder.layout import GalleryFolder, disk_errors_explained
from indexer.folder.manifest import GalleryManifest, checked_name, name_of
from indexer.index.plan import IndexSettings, Plan, plan_index
from indexer.ingest.embed import (
    EmbedSettings,
    Failure,
    Outcome,
    WorkFile,
    embed_source,
    failures_of,
    refuse_unreadable,
)
from indexer.ingest.generation import publish_generation
from indexer.ingest.sources import Source, check_attributes
from indexer.types import Entry, Progress

_CHUNK = 4096
_ROW_BYTES = 500  # an item in the catalogue, without its vector


class BuildReport(BaseModel):
    """How a build went: indexed = embedded + reused + duplicates, found = indexed + failures."""

    model_config = ConfigDict(frozen=True)

    found: int
    indexed: int
    embedded: int
    reused: int
    duplicates: int
    failures: tuple[Failure, ...]
    bundle_id: str
    provider: str
    elapsed_s: float
    images_per_s: float
    generation: str = ""


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """What a build is called and how it uses the machine; no name: that of the folder."""

    name: str | None = None
    embed: EmbedSettings = field(default_factory=EmbedSettings)
    index: IndexSettings = field(default_factory=IndexSettings)


def planned(count: int, dim: int, settings: IndexSettings) -> Plan:
    """The index that `count` vectors of length `dim` will get. Raises: PlanError, ProviderError."""
    return plan_index(
        count,
        dim,
        kind=settings.kind,
        memory_mb=settings.memory_mb,
        device=settings.device,
        target_recall=settings.target_recall,
    )


def build_gallery(
    source: Source,
    embedder: Embedder,
    out: Path | str,
    settings: BuildSettings | None = None,
    on_progress: Progress | None = None,
    on_indexed: Progress | None = None,
) -> BuildReport:
    """Index `source` and publish it as the new generation of the gallery in folder `out`.

    Unreadable images are left out and reported. A build that was stopped continues with the same
    call. Until the new generation is published, the old one stays as it is. `on_progress` counts
    images that were embedded, `on_indexed` items twice: when
    they are stored, and when they are indexed.

    Raises: SourceError if no image can be read; PlanError if the index does not fit the machine;
        RecallError; GalleryBusyError; GalleryError if `out` cannot be written;
        InvalidParameterError; BundleError.
    """
    settings = settings or BuildSettings()
    folder = GalleryFolder(out)
    name = checked_name(settings.name or name_of(folder.path))
    check_attributes(source, {})
    plan = planned(len(source.records), embedder.dim, settings.index)
    with contextlib.ExitStack() as held:
        with disk_errors_explained(folder.path):
            held.enter_context(folder.locked())
            _check_space(folder.path, needed_mb(plan))
            work = WorkFile(folder.work_path, embedder.bundle_id, embedder.dim)
        held.callback(work.close)
        run = _Build(source, embedder, folder, name, settings, work)
        return run(on_progress, on_indexed)


def needed_mb(plan: Plan) -> float:
    """Space that a build takes, in MiB: work file, catalogue and index."""
    row_bytes = 2 * 4 * plan.dim + _ROW_BYTES
    return plan.disk_mb + plan.n * row_bytes / 2**20


@dataclass(frozen=True, slots=True)
class _Build:
    source: Source
    embedder: Embedder
    folder: GalleryFolder
    name: str
    settings: BuildSettings
    work: WorkFile

    def __call__(self, on_progress: Progress | None, on_indexed: Progress | None) -> BuildReport:
        start = perf_counter()
        earlier = self.work.known()
        outcomes = embed_source(
            self.source, self.embedder, self.work, self.settings.embed, on_progress
        )
        report = _report(outcomes, earlier, self.embedder, perf_counter() - start)
        refuse_unreadable(self.source, report.failures)
        usable = [outcome for outcome in outcomes if outcome.failure is None]
        with disk_errors_explained(self.folder.path):
            generation = self._publish(usable, report, on_indexed)
            self.work.remove()
        return report.model_copy(update={"generation": generation.name})

    def _publish(
        self, usable: Sequence[Outcome], report: BuildReport, on_progress: Progress | None
    ) -> Path:
        manifest = GalleryManifest(
            name=self.name,
            bundle_id=self.embedder.bundle_id,
            dim=self.embedder.dim,
            source=self.source.description,
            source_root=str(self.source.root),
        )
        text = report.model_dump_json(indent=2, exclude={"generation"}) + "\n"
        entries = _entries(usable, self.work)
        return publish_generation(
            self.folder, manifest, entries, self.settings.index, text, on_progress
        )


def _entries(usable: Sequence[Outcome], work: WorkFile) -> Iterator[Entry]:
    for start in range(0, len(usable), _CHUNK):
        chunk = usable[start : start + _CHUNK]
        vectors = work.vectors([outcome.sha256 for outcome in chunk])
        for outcome, vector in zip(chunk, vectors, strict=True):
            record = outcome.record
            yield Entry(
                record.key,
                vector,
                outcome.sha256,
                record.attributes,
                record.path,
                outcome.format,
            )


def _report(
    outcomes: Sequence[Outcome], earlier: set[str], embedder: Embedder, elapsed_s: float
) -> BuildReport:
    usable = [outcome.sha256 for outcome in outcomes if outcome.failure is None]
    distinct = set(usable)
    return BuildReport(
        found=len(outcomes),
        indexed=len(usable),
        embedded=len(distinct - earlier),
        reused=len(distinct & earlier),
        duplicates=len(usable) - len(distinct),
        failures=failures_of(outcomes),
        bundle_id=embedder.bundle_id,
        provider=embedder.provider,
        elapsed_s=round(elapsed_s, 3),
        images_per_s=round(len(outcomes) / max(elapsed_s, 1e-9), 2),
    )


def _check_space(out: Path, needed_mb: float) -> None:
    free_mb = shutil.disk_usage(out).free / 2**20
    if free_mb < needed_mb:
        raise GalleryError(
            f"The build needs about {needed_mb:,.0f} MB in {out}, but {free_mb:,.0f} MB are free. "
            "Make room, or choose a folder on another disk with --out."
        )
