"""Build a gallery: embed a source, write a version, publish it in one step."""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import numpy as np
from pydantic import BaseModel, ConfigDict

from embedder.errors import GalleryError, SourceError
from embedder.session import Embedder
from indexer.catalog import Item
from indexer.embed import EmbedSettings, Outcome, Progress, embed_source
from indexer.faiss_engine import FaissStore
from indexer.images import Source
from indexer.layout import GalleryFolder, disk_errors_explained
from indexer.manifest import GalleryManifest, checked_name, name_of
from indexer.version import open_version, write_version
from indexer.work import WorkFile

_COPIES_ON_DISK = 2  # the work file and the index
_CHUNK = 4096
_EXAMPLES = 3


class Failure(BaseModel):
    """An image that was left out, and why."""

    model_config = ConfigDict(frozen=True)

    key: str
    path: str
    reason: str


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
    version: str = ""


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """What a build is called and how it uses the machine; no name: that of the folder."""

    name: str | None = None
    embed: EmbedSettings = field(default_factory=EmbedSettings)


def estimated_index_mb(count: int, dim: int) -> float:
    """Size of the index of `count` vectors, in MB (10^6 bytes), on disk and in memory."""
    return count * (4 * dim + 8) / 1e6


def build_gallery(
    source: Source,
    embedder: Embedder,
    out: Path | str,
    settings: BuildSettings | None = None,
    on_progress: Progress | None = None,
) -> BuildReport:
    """Index `source` and publish it as the new version of the gallery in folder `out`.

    Unreadable images are left out and reported. A build that was stopped continues with the same
    call. Until the new version is published, the old one stays as it is.

    Raises: SourceError if no image can be read; GalleryError if `out` cannot be written;
        InvalidParameterError; BundleError.
    """
    settings = settings or BuildSettings()
    folder = GalleryFolder(out)
    name = checked_name(settings.name or name_of(folder.path))
    with contextlib.ExitStack() as held:
        with disk_errors_explained(folder.path):
            held.enter_context(folder.locked())
            _check_space(folder.path, estimated_index_mb(len(source.records), embedder.dim))
            work = WorkFile(folder.work_path, embedder.bundle_id, embedder.dim)
        held.callback(work.close)
        return _build(source, embedder, folder, name, settings.embed, work, on_progress)


def _build(
    source: Source,
    embedder: Embedder,
    folder: GalleryFolder,
    name: str,
    settings: EmbedSettings,
    work: WorkFile,
    on_progress: Progress | None,
) -> BuildReport:
    start = perf_counter()
    earlier = work.known()
    outcomes = embed_source(source, embedder, work, settings, on_progress)
    report = _report(outcomes, earlier, embedder, perf_counter() - start)
    usable = [outcome for outcome in outcomes if outcome.failure is None]
    if not usable:
        raise SourceError(_nothing_readable(source, report))
    manifest = GalleryManifest(
        name=name,
        bundle_id=embedder.bundle_id,
        dim=embedder.dim,
        size=len(usable),
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        source=source.description,
        source_root=str(source.root),
        files={},
    )
    with disk_errors_explained(folder.path):
        version = _publish(folder, manifest, usable, work, report)
        work.remove()
    return report.model_copy(update={"version": version})


def _publish(
    folder: GalleryFolder,
    manifest: GalleryManifest,
    usable: Sequence[Outcome],
    work: WorkFile,
    report: BuildReport,
) -> str:
    text = report.model_dump_json(indent=2, exclude={"version"}) + "\n"
    with folder.stage() as stage:
        store = _filled_store(manifest.dim, usable, work)
        manifest = write_version(stage, manifest, _items(usable), store, text)
        del store
        # What was written is read back before anyone else sees it.
        catalog, _ = open_version(stage, manifest)
        catalog.close()
        folder.publish(stage, manifest.version)
    return manifest.version


def _filled_store(dim: int, usable: Sequence[Outcome], work: WorkFile) -> FaissStore:
    store = FaissStore.create(dim)
    for start in range(0, len(usable), _CHUNK):
        vectors = work.vectors([outcome.sha256 for outcome in usable[start : start + _CHUNK]])
        store.add(np.arange(start, start + len(vectors)), vectors)
    return store


def _items(usable: Sequence[Outcome]) -> Iterator[Item]:
    for number, outcome in enumerate(usable):
        record = outcome.record
        yield Item(
            number, record.key, record.path, outcome.sha256, record.attributes, outcome.format
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
        failures=tuple(
            Failure(key=o.record.key, path=_shown(o.record.path), reason=o.failure)
            for o in outcomes
            if o.failure is not None
        ),
        bundle_id=embedder.bundle_id,
        provider=embedder.provider,
        elapsed_s=round(elapsed_s, 3),
        images_per_s=round(len(outcomes) / max(elapsed_s, 1e-9), 2),
    )


def _shown(path: str) -> str:
    return path.encode("utf-8", "backslashreplace").decode()


def _nothing_readable(source: Source, report: BuildReport) -> str:
    examples = "; ".join(f"{f.key}: {f.reason}" for f in report.failures[:_EXAMPLES])
    return (
        f"None of the {report.found:,} images of the {source.description} can be read. "
        f"The first of them: {examples} Check the folder and the paths in the list."
    )


def _check_space(out: Path, index_mb: float) -> None:
    free_mb = shutil.disk_usage(out).free / 1e6
    needed_mb = _COPIES_ON_DISK * index_mb
    if free_mb < needed_mb:
        raise GalleryError(
            f"The build needs about {needed_mb:,.0f} MB in {out}, but {free_mb:,.0f} MB are free. "
            "Make room, or choose a folder on another disk with --out."
        )
