"""Build a gallery from images, or import one from exported vectors, and publish it atomically.

Both write to a draft: a gallery inside the folder that is not the current one yet. A killed process
leaves the draft on the disk, and the same call resumes it. Meanwhile the gallery takes writes,
which are carried over before the swap. If the draft has another model, the gallery refuses them.
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import BaseModel

from kinlens.embedder.durable import discard, sync_tree, write_whole
from kinlens.embedder.errors import (
    GalleryCorruptError,
    GalleryError,
    InvalidParameterError,
)
from kinlens.embedder.session import Embedder
from kinlens.indexer.entries import AttributeTypes, Entry, Schema, as_entries
from kinlens.indexer.folder.layout import BEGAN, GalleryFolder, disk_errors_explained
from kinlens.indexer.folder.manifest import (
    REPORT,
    GalleryManifest,
    name_of,
    read_manifest,
    write_manifest,
)
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import ITEM_DISK_BYTES, IndexSettings, Plan, plan_index
from kinlens.indexer.ingest.add import Ingest, IngestReport, UnlistedItems
from kinlens.indexer.ingest.embed import EmbedSettings, refuse_unreadable
from kinlens.indexer.ingest.rebuild import LaterWrites, begun, numbered, numbers_of
from kinlens.indexer.ingest.sources import Source, check_attributes
from kinlens.indexer.types import GalleryExport, Ids, Progress, VectorType, checked_name
from kinlens.values import AttributeValue

_CHUNK = 4096
_log = logging.getLogger(__name__)

Report = TypeVar("Report", bound=BaseModel)

_KEPT = "Finished work is kept, and the same command continues it."


class _Made(BaseModel, frozen=True):
    """A report of a build, during which `carried` items were written or removed in addition."""

    carried: int = 0

    @property
    def carried_text(self) -> str:
        """A sentence about `carried`; empty for none."""
        return (
            f" {self.carried:,} changes made meanwhile were carried over." if self.carried else ""
        )


class BuildReport(_Made, IngestReport, frozen=True):
    """Result of a build: indexed = embedded + reused + duplicates, found = indexed + failures.

    `reused` items have the vector of an interrupted run or of the gallery that is replaced;
    `duplicates` are copies of other images. `bundle` is the folder of the model.
    """

    indexed: int
    reused: int
    duplicates: int
    bundle: str = ""
    generation: str = ""


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Settings of a build.

    Attributes:
        name: of the gallery; None for the name of the folder.
        vector_type: number format of the stored vectors.
        bundle: the folder of the model, for the report.
        dims: keep the first numbers of each vector, normalised; None keeps all.
    """

    name: str | None = None
    embed: EmbedSettings = field(default_factory=EmbedSettings)
    index: IndexSettings = field(default_factory=IndexSettings)
    vector_type: VectorType = "fp32"
    bundle: Path | None = None
    dims: int | None = None


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
    equal images from it if the same model made them, and then also the changes that were written
    to it since the build began: items added, changed or removed. With another model the gallery
    refuses changes meanwhile. `on_progress` counts embedded images, `on_indexed` indexed items.

    Raises: SourceError if no image can be read; PlanError if the index does not fit the machine;
        RecallError; GalleryBusyError; GalleryError if `out` cannot be written;
        InvalidParameterError; BundleError.
    """
    settings = settings or BuildSettings()
    shortened = settings.dims not in (None, embedder.dim)
    embedder = embedder.first(settings.dims or embedder.dim)
    folder = GalleryFolder(out)
    name = checked_name(settings.name or name_of(folder.path))
    check_attributes(source)
    plan = plan_index(source.count, embedder.dim, settings.index, settings.vector_type)
    manifest = GalleryManifest(
        name=name,
        bundle_id=embedder.bundle_id,
        precision=embedder.mode.precision,
        vector_type=settings.vector_type,
        dim=embedder.dim,
        shortened=shortened,
        source=source.description,
        source_root=str(source.root),
    )
    with folder.building(), _draft(folder, manifest, "build") as draft:
        try:
            check_attributes(source, draft.gallery)
        except InvalidParameterError:
            _forget_attributes(draft.gallery)
        with disk_errors_explained(folder.path, _KEPT):
            _check_space(folder.path, needed_mb(plan, draft.gallery.size))
        unlisted = UnlistedItems(draft.gallery)
        old, same = draft.old, ("bundle_id", "precision", "dim")
        if old is None or any(getattr(old, name) != getattr(manifest, name) for name in same):
            old = None  # its vectors are others than those of the new one
        elif old.vector_type not in ("fp32", manifest.vector_type):
            old = None
        work = Ingest(draft.gallery, source, embedder, unlisted=unlisted, old=old)
        work.run(settings.embed, on_progress)
        refuse_unreadable(source.description, work.found, work.failures)
        counts = asdict(work.written)
        indexed = sum(counts.values())
        reused = counts["unchanged"] + counts["updated"] + work.reused
        report = BuildReport(
            **work.report().model_dump(),
            indexed=indexed,
            reused=reused,
            duplicates=indexed - reused - work.embedded,
            bundle="" if settings.bundle is None else str(settings.bundle.resolve()),
        )
        return draft.publish(unlisted, settings.index, report, on_indexed)


class ImportReport(_Made, frozen=True):
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
    on_progress: Progress = lambda _: None,
    vector_type: VectorType = "fp32",
    on_indexed: Progress | None = None,
) -> ImportReport:
    """Build the gallery in folder `out` from `dump`, with the name `name` or that of the dump.

    The old gallery is unchanged until the new one is complete, and changes that are written to it
    meanwhile are treated as in `build_gallery`. To resume an interrupted import, make the same
    call. `on_progress` counts stored items, `on_indexed` indexed ones.

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
        shortened="shortened" in facts,
        source=facts.get("source", ""),
        source_root=facts.get("source_root", ""),
    )
    folder = GalleryFolder(out)
    with folder.building(), _draft(folder, manifest, "import") as draft:
        was_begun = draft.gallery.size > 0
        try:
            unlisted = _filled(draft.gallery, dump, on_progress)
        except InvalidParameterError:
            if not was_begun:
                raise
            _forget_attributes(draft.gallery)
            unlisted = _filled(draft.gallery, dump, lambda _: None)
        report = ImportReport(
            name=manifest.name,
            bundle_id=manifest.bundle_id,
            dim=dump.dim,
            items=dump.count,
            generation="",
        )
        return draft.publish(unlisted, settings, report, on_indexed)


def _filled(gallery: Gallery, dump: GalleryExport, on_progress: Progress) -> UnlistedItems:
    unlisted, entries = UnlistedItems(gallery), dump.entries()
    while part := list(islice(entries, _CHUNK)):
        unlisted.mark_listed(gallery.stored([entry.key for entry in part]).values())
        gallery.add(part)
        on_progress(len(part))
    return unlisted


class _Carried(LaterWrites):
    """The writes to `old` since the build of its next generation began.

    Items that were added or got another image since then are carried over whole. Of an item that
    was only updated, image, vector and the attributes that the source gives are those of the
    source, so that a feed of one attribute does not bring back the earlier generation.

    An interrupted build of the same source that is resumed began when it was first started.

    Attributes:
        count: number of items that were carried over.
    """

    def __init__(self, old: Gallery, draft: Path, manifest: GalleryManifest) -> None:
        """Raises: GalleryCorruptError; OSError if the folder `draft` cannot be written."""
        super().__init__(old)
        self.count = 0
        self._build = [old.generation, manifest.source, manifest.source_root]
        self._began = draft / BEGAN
        self._given: list[str] | None = None  # the attributes that the source gives
        with contextlib.suppress(FileNotFoundError, ValueError):
            noted, _, keys = self._began.read_bytes().partition(b"\n")
            *known, seq, last, given = json.loads(noted)
            if known == self._build:
                self._seq, self._last, self._given = seq, last, given
                whole = len(keys) // 8 * 8  # a kill may have cut the last one
                self._had = np.unique(np.frombuffer(keys[:whole], np.int64))
        if self._had is None:
            with self._catalog.reading() as view:
                self._seq, self._last = view.state().seq, view.last_given()
            self._had = numbered(old)
        self._note()

    def _note(self) -> None:
        assert self._had is not None
        noted = json.dumps([*self._build, self._seq, self._last, self._given]).encode()
        write_whole(self._began, noted + b"\n" + self._had.tobytes(), "draft")

    def catch_up(self, made: Gallery, on_progress: Progress | None = None) -> int:
        if self._given is None:
            self._given = [*made.schema()]
            self._note()
        touched = super().catch_up(made, on_progress)
        self.count += touched
        return touched

    def _remove(self, made: Gallery, keys: Sequence[str]) -> None:
        with self._catalog.reading() as view:
            items, vectors = view.restorable(keys)
        known = made.stored([item.key for item in items])
        # Items that the new generation never had are added, to let their removal be undone.
        self._add(made, [one for one in as_entries(items, vectors) if one.key not in known])
        super()._remove(made, keys)

    def _take(self, made: Gallery, ids: Ids, _: Progress | None) -> None:
        items, vectors = self.gallery.items_at(ids.tolist())
        new = [n for n, item in enumerate(items) if item.id > self._last]
        self._know([items[n].key for n in new])
        self._add(made, as_entries([items[n] for n in new], vectors[new]))
        updated = {item.key: item.attributes for item in items if item.id <= self._last}
        kept = [*made.stored([*updated])]  # the source has no longer the others
        given = {*(self._given or ())}
        self._add(
            made,
            [
                replace(entry, attributes=_merged(entry.attributes, updated[key], given))
                for key, entry in zip(kept, made.entries(kept), strict=True)
            ],
        )

    def _know(self, keys: Sequence[str]) -> None:
        """Note that the old generation had these keys, before they are carried over."""
        assert self._had is not None
        more = np.setdiff1d(numbers_of(keys), self._had)
        if not len(more):
            return  # changed attributes alone need no write to the disk
        with self._began.open("ab") as file:
            file.write(more.tobytes())
            file.flush()
            os.fsync(file.fileno())
        self._had = np.union1d(self._had, more)

    def _add(self, made: Gallery, entries: list[Entry]) -> None:
        for precision in self.gallery.precision.split("+"):
            made.admit(precision)
        try:
            made.add(entries)
        except InvalidParameterError:  # an attribute has another type in the new generation
            for entry in entries:
                fitting = _fitting(entry.key, entry.attributes, made.schema())
                made.add([replace(entry, attributes=fitting)])


def _merged(
    source: Mapping[str, AttributeValue], own: Mapping[str, AttributeValue], given: set[str]
) -> dict[str, AttributeValue]:
    """The attributes of an item: those `given` by the source, and its own other ones."""
    chosen = {name: value for name, value in source.items() if name in given}
    return chosen | {name: value for name, value in own.items() if name not in given}


def _fitting(
    key: str, attributes: Mapping[str, AttributeValue], kinds: Schema
) -> dict[str, AttributeValue]:
    """The attributes of an item that have the types in `kinds`."""
    fitting = {}
    for name, value in attributes.items():
        try:
            AttributeTypes(kinds).check(key, {name: value})
            fitting[name] = value
        except InvalidParameterError as error:
            _log.warning("An attribute of an item that was written during a build: %s", error)
    return fitting


@dataclass(slots=True)
class _Draft:
    """`gallery`, located in `staging`, will be the next generation of `folder` after `old`.

    later: the writes to `old` meanwhile; None if it takes none.
    """

    folder: GalleryFolder
    staging: GalleryFolder
    manifest: GalleryManifest
    gallery: Gallery
    old: Gallery | None
    later: _Carried | None

    def publish(
        self,
        unlisted: UnlistedItems,
        settings: IndexSettings,
        report: Report,
        on_progress: Progress | None,
    ) -> Report:
        """Publish the draft; returns the report with the generation and what was carried over.

        Raises: PlanError, RecallError, GalleryWriteError.
        """
        unlisted.remove()
        self.gallery.forget_unused_attributes()
        self.gallery.compact(settings, wait=True, on_progress=on_progress)
        if self.later is not None:
            self.later.catch_up_in_rounds(self.gallery)
        self.gallery.close()
        # Verify the files on the disk before the generation becomes visible.
        Gallery.open(self.staging.path, verify_hashes=True).close()
        with disk_errors_explained(self.folder.path, _KEPT), contextlib.ExitStack() as stack:
            made = self.staging.current()
            uid = read_manifest(made).uid
            write_manifest(made, self.manifest.model_copy(update={"uid": uid}))
            facts: dict[str, object] = {"generation": made.name}
            if self.later is not None:
                sync_tree(made, "generation")  # so that the gallery refuses writes for a short time
                stack.enter_context(self.later.without_compactions())
                with contextlib.closing(Gallery.open(self.staging.path, load_index=False)) as now:
                    now.when_full = "grow"
                    self.later.catch_up(now)
                    stack.enter_context(self.folder.replacing())
                    self.later.catch_up(now)
                facts["carried"] = self.later.count
            report = report.model_copy(update=facts)
            text = report.model_dump_json(indent=2, exclude={"generation"}) + "\n"
            (made / REPORT).write_text(text, encoding="utf-8")
            self.folder.publish(made, made.name)
            return report


@contextlib.contextmanager
def _draft(folder: GalleryFolder, manifest: GalleryManifest, operation: str) -> Iterator[_Draft]:
    """The draft of an interrupted run of the same operation with this bundle, or a new one."""
    key = f"{operation} {manifest.bundle_id} {manifest.precision} {manifest.vector_type}"
    with disk_errors_explained(folder.path, _KEPT):
        stack = contextlib.ExitStack()
        staging = stack.enter_context(folder.draft(key))
    with stack:
        gallery = begun(staging.path, manifest)
        gallery.when_full = "grow"
        stack.callback(gallery.close)
        old = later = None
        with contextlib.suppress(GalleryError):  # there is none, or it is damaged
            old = stack.enter_context(
                contextlib.closing(Gallery.open(folder.path, load_index=False))
            )
        if old is not None and (old.bundle_id, old.dim) == (manifest.bundle_id, manifest.dim):
            with disk_errors_explained(folder.path, _KEPT):
                later = stack.enter_context(
                    contextlib.closing(_Carried(old, staging.path, manifest))
                )
        else:
            stack.enter_context(folder.replacing())
        draft = _Draft(folder, staging, manifest, gallery, old, later)
        try:
            yield draft
        except GalleryCorruptError:
            draft.gallery.close()
            discard(staging.path)  # a draft only saves time
            raise


def _forget_attributes(gallery: Gallery) -> None:
    """Drop the attributes of an interrupted run, whose types conflict with the current ones."""
    items = gallery.items()
    while part := list(islice(items, _CHUNK)):
        gallery.update({item.key: dict.fromkeys(item.attributes) for item in part})
    gallery.forget_unused_attributes()


def needed_mb(plan: Plan, written: int = 0) -> float:
    """Disk space in MiB that a build needs if `written` of its items are already stored."""
    part = min(plan.n, written) / plan.n
    return plan.disk_mb - part * (plan.mapped_mb + plan.n * ITEM_DISK_BYTES / 2**20)


def _check_space(out: Path, needed_mb: float) -> None:
    free_mb = shutil.disk_usage(out).free / 2**20
    if free_mb < needed_mb:
        raise GalleryError(
            f"The build needs about {needed_mb:,.0f} MB in {out}, but {free_mb:,.0f} MB are free. "
            "Free some space, or choose a folder on another disk with --out."
        )
