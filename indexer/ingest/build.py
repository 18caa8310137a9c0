"""Build a gallery from images, or import one from exported vectors, and publish it atomically.

Both write to a draft: a gallery inside the folder that is not the current one yet. A killed process
leaves the draft on the disk, and the same call resumes it.
"""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter

from pydantic import BaseModel

from kinlens.embedder.durable import discard
from kinlens.embedder.errors import (
    GalleryCorruptError,
    GalleryError,
    GalleryNotFoundError,
    InvalidParameterError,
)
from kinlens.embedder.session import Embedder
from kinlens.indexer.folder.layout import GalleryFolder, disk_errors_explained
from kinlens.indexer.folder.manifest import (
    REPORT,
    GalleryManifest,
    name_of,
    read_manifest,
    write_manifest,
)
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import ITEM_DISK_BYTES, IndexSettings, Plan, plan_index
from kinlens.indexer.ingest.add import Ingest, UnlistedItems
from kinlens.indexer.ingest.embed import EmbedSettings, Failure, faults_of, refuse_unreadable
from kinlens.indexer.ingest.sources import Source, check_attributes
from kinlens.indexer.types import GalleryExport, Progress, VectorType, checked_name

_CHUNK = 4096
_KEPT = "Finished work is kept, and the same command continues it."


class BuildReport(BaseModel, frozen=True):
    """Result of a build: indexed = embedded + reused + duplicates, found = indexed + failures.

    `reused` items have the vector of an interrupted run or of the gallery that is replaced;
    `duplicates` are copies of other images. `omitted` counts the files that are no images, by kind.
    `bundle` is the folder of the model.
    """

    found: int
    indexed: int
    embedded: int
    reused: int
    duplicates: int
    failures: tuple[Failure, ...]
    omitted: dict[str, int] = {}
    bundle: str = ""
    bundle_id: str
    provider: str
    elapsed_s: float
    images_per_s: float
    generation: str = ""


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Settings of a build.

    Attributes:
        name: of the gallery; None for the name of the folder.
        vector_type: number format of the stored vectors.
        bundle: the folder of the model, for the report.
    """

    name: str | None = None
    embed: EmbedSettings = field(default_factory=EmbedSettings)
    index: IndexSettings = field(default_factory=IndexSettings)
    vector_type: VectorType = "fp32"
    bundle: Path | None = None


def build_gallery(
    source: Source,
    embedder: Embedder,
    out: Path | str,
    settings: BuildSettings | None = None,
    on_progress: Progress | None = None,
    on_indexed: Progress | None = None,
) -> BuildReport:
    """Index `source` and publish it as the new generation of the gallery in folder `out`.

    Unreadable images are skipped and reported. To resume an interrupted build, make the same call.
    The old generation is unchanged until the new one is published, which takes the vectors of
    equal images from it if the same model made them. `on_progress` counts embedded images,
    `on_indexed` indexed items.

    Raises: SourceError if no image can be read; PlanError if the index does not fit the machine;
        RecallError; GalleryBusyError; GalleryError if `out` cannot be written;
        InvalidParameterError; BundleError.
    """
    settings = settings or BuildSettings()
    folder = GalleryFolder(out)
    name = checked_name(settings.name or name_of(folder.path))
    check_attributes(source, {})
    plan = plan_index(source.count, embedder.dim, settings.index, settings.vector_type)
    manifest = GalleryManifest(
        name=name,
        bundle_id=embedder.bundle_id,
        precision=embedder.mode.precision,
        vector_type=settings.vector_type,
        dim=embedder.dim,
        source=source.description,
        source_root=str(source.root),
    )
    started = perf_counter()
    with folder.locked(), _draft(folder, manifest, "build") as draft:
        try:
            check_attributes(source, draft.gallery.schema())
        except InvalidParameterError:
            _without_attributes(draft.gallery)
        with disk_errors_explained(folder.path, _KEPT):
            _check_space(folder.path, needed_mb(plan, draft.gallery.size))
        unlisted = UnlistedItems(draft.gallery)
        with _reusable(folder, manifest) as old:
            work = Ingest(draft.gallery, source, embedder, unlisted=unlisted, old=old)
            work.run(settings.embed, on_progress)
        refuse_unreadable(source.description, work.found, work.failures)
        report = _report(work, settings.bundle, perf_counter() - started)
        generation = draft.publish(unlisted, settings.index, report, on_indexed)
    return report.model_copy(update={"generation": generation})


@contextlib.contextmanager
def _reusable(folder: GalleryFolder, manifest: GalleryManifest) -> Iterator[Gallery | None]:
    """The gallery that is replaced, if its vectors are those that the new one would get."""
    try:
        old = Gallery.open(folder.path, load_index=False)
    except GalleryError:  # there is none, or it is damaged: embed all images
        yield None
        return
    with contextlib.closing(old):
        same = ("bundle_id", "precision", "dim")
        is_exact = old.vector_type in ("fp32", manifest.vector_type)
        is_equal = all(getattr(old, name) == getattr(manifest, name) for name in same)
        yield old if is_exact and is_equal else None


class ImportReport(BaseModel, frozen=True):
    """Result of an import."""

    name: str
    bundle_id: str
    dim: int
    items: int
    generation: str


def import_gallery(
    dump: GalleryExport,
    out: Path | str,
    name: str | None = None,
    settings: IndexSettings | None = None,
    on_progress: Progress | None = None,
    vector_type: VectorType = "fp32",
    on_indexed: Progress | None = None,
) -> ImportReport:
    """Build the gallery in folder `out` from `dump`, with the name `name` or that of the dump.

    The old gallery is unchanged until the new one is complete. To resume an interrupted import,
    make the same call. `on_progress` counts stored items, `on_indexed` indexed ones.

    Raises: SourceError for a damaged entry; PlanError, RecallError, GalleryBusyError,
        GalleryWriteError, InvalidParameterError.
    """
    settings = settings or IndexSettings()
    if dump.count:
        plan_index(dump.count, dump.dim, settings, vector_type)
    facts = dump.facts
    manifest = GalleryManifest(
        name=checked_name(name or facts["name"]),
        bundle_id=facts["bundle_id"],
        precision=facts.get("precision", "fp32"),
        vector_type=vector_type,
        dim=dump.dim,
        source=facts.get("source", ""),
        source_root=facts.get("source_root", ""),
    )
    folder = GalleryFolder(out)
    with folder.locked(), _draft(folder, manifest, "import") as draft:
        was_begun = draft.gallery.size > 0
        try:
            unlisted = _filled(draft.gallery, dump, on_progress)
        except InvalidParameterError:
            if not was_begun:
                raise
            # The conflict may be with attribute types of another interrupted import: drop them.
            _without_attributes(draft.gallery)
            unlisted = _filled(draft.gallery, dump, None)
        report = ImportReport(
            name=manifest.name,
            bundle_id=manifest.bundle_id,
            dim=dump.dim,
            items=dump.count,
            generation="",
        )
        generation = draft.publish(unlisted, settings, report, on_indexed)
    return report.model_copy(update={"generation": generation})


def _filled(gallery: Gallery, dump: GalleryExport, on_progress: Progress | None) -> UnlistedItems:
    unlisted, entries = UnlistedItems(gallery), dump.entries()
    while part := list(islice(entries, _CHUNK)):
        unlisted.mark_listed(gallery.stored([entry.key for entry in part]).values())
        gallery.add(part)
        if on_progress is not None:
            on_progress(len(part))
    return unlisted


@dataclass(slots=True)
class _Draft:
    """`gallery`, located in `staging`, will be the next generation of `folder`."""

    folder: GalleryFolder
    staging: GalleryFolder
    manifest: GalleryManifest
    gallery: Gallery

    def publish(
        self,
        unlisted: UnlistedItems,
        settings: IndexSettings,
        report: BaseModel,
        on_progress: Progress | None,
    ) -> str:
        """Publish the draft; returns the name of the generation.

        Raises: PlanError, RecallError, GalleryWriteError.
        """
        unlisted.remove()
        self.gallery.forget_unused_attributes()
        self.gallery.compact(settings, wait=True, on_progress=on_progress)
        self.gallery.close()
        # Verify the files on the disk before the generation becomes visible.
        Gallery.open(self.staging.path, verify_hashes=True).close()
        with disk_errors_explained(self.folder.path, _KEPT):
            made = self.staging.current()
            uid = read_manifest(made).uid
            write_manifest(made, self.manifest.model_copy(update={"uid": uid}))
            text = report.model_dump_json(indent=2, exclude={"generation"}) + "\n"
            (made / REPORT).write_text(text, encoding="utf-8")
            return self.folder.publish(made, made.name).name


@contextlib.contextmanager
def _draft(folder: GalleryFolder, manifest: GalleryManifest, operation: str) -> Iterator[_Draft]:
    """The draft of an interrupted run of the same operation with this bundle, or a new one."""
    key = f"{operation} {manifest.bundle_id} {manifest.precision} {manifest.vector_type}"
    with disk_errors_explained(folder.path, _KEPT):
        stack = contextlib.ExitStack()
        staging = stack.enter_context(folder.draft(key))
    with stack:
        draft = _Draft(folder, staging, manifest, _opened(staging, manifest))
        try:
            yield draft
        except GalleryCorruptError:
            draft.gallery.close()
            discard(staging.path)  # a draft only saves time
            raise
        finally:
            draft.gallery.close()


def _opened(staging: GalleryFolder, manifest: GalleryManifest) -> Gallery:
    try:
        gallery = Gallery.open(staging.path, load_index=False)
        same = ("bundle_id", "precision", "vector_type", "dim")
        if all(getattr(gallery, name) == getattr(manifest, name) for name in same):
            return gallery
        gallery.close()
        discard(staging.path)
    except GalleryNotFoundError:
        pass
    except GalleryCorruptError:
        discard(staging.path)
    return Gallery.create(
        staging.path,
        name=manifest.name,
        bundle_id=manifest.bundle_id,
        precision=manifest.precision,
        vector_type=manifest.vector_type,
        dim=manifest.dim,
    )


def _without_attributes(gallery: Gallery) -> None:
    """Drop the attributes of an interrupted run, whose types conflict with the current ones."""
    items = gallery.items()
    while part := list(islice(items, _CHUNK)):
        gallery.update({item.key: dict.fromkeys(item.attributes) for item in part})
    gallery.forget_unused_attributes()


def needed_mb(plan: Plan, written: int = 0) -> float:
    """Disk space in MiB that a build needs if `written` of its items are already stored."""
    part = min(plan.n, written) / plan.n
    return plan.disk_mb - part * (plan.mapped_mb + plan.n * ITEM_DISK_BYTES / 2**20)


def _report(work: Ingest, bundle: Path | None, elapsed_s: float) -> BuildReport:
    counts = asdict(work.written)
    indexed = sum(counts.values())
    reused = counts["unchanged"] + counts["updated"] + work.reused
    faults = faults_of(work.source)
    return BuildReport(
        found=work.found + len(faults),
        indexed=indexed,
        embedded=work.embedded,
        reused=reused,
        duplicates=indexed - reused - work.embedded,
        failures=(*faults, *work.failures),
        omitted=work.source.omitted.counts,
        bundle="" if bundle is None else str(bundle.resolve()),
        bundle_id=work.embedder.bundle_id,
        provider=work.embedder.provider,
        elapsed_s=round(elapsed_s, 3),
        images_per_s=round(work.found / max(elapsed_s, 1e-9), 2),
    )


def _check_space(out: Path, needed_mb: float) -> None:
    free_mb = shutil.disk_usage(out).free / 2**20
    if free_mb < needed_mb:
        raise GalleryError(
            f"The build needs about {needed_mb:,.0f} MB in {out}, but {free_mb:,.0f} MB are free. "
            "Free some space, or choose a folder on another disk with --out."
        )
