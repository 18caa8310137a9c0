"""Add a source to a live gallery, batch by batch; each is durable and visible once written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from embedder.errors import BundleMismatchError, SourceError
from embedder.session import Embedder
from indexer.catalog.entries import merged
from indexer.folder.manifest import SHORT
from indexer.ingest.embed import (
    Embedded,
    EmbedSettings,
    Failure,
    Outcome,
    embedded_batches,
    failures_of,
    refuse_unreadable,
)
from indexer.ingest.sources import Source, check_attributes
from indexer.types import Entry, Item, Progress, VectorStore, Written

_STAYS = "The gallery keeps what it has under this key."
_TAKEN_AWAY = (
    "The gallery had its content, but another process removed it meanwhile. "
    "Run the same command again."
)


class AddReport(BaseModel):
    """How an `add` went: found = added + replaced + updated + unchanged + failures.

    `embedded` counts contents that went through the model; the other images were known.
    """

    model_config = ConfigDict(frozen=True)

    found: int
    added: int
    replaced: int
    updated: int
    unchanged: int
    embedded: int
    failures: tuple[Failure, ...]
    bundle_id: str
    provider: str
    elapsed_s: float
    images_per_s: float


def add_source(
    gallery: VectorStore,
    source: Source,
    embedder: Embedder,
    settings: EmbedSettings | None = None,
    on_progress: Progress | None = None,
) -> AddReport:
    """Store every readable image of `source`, with the attributes that the source gives it.

    Attributes that the source says nothing of stay as they are, such as those of an `update`.
    Images that the gallery holds unchanged are skipped, known content is not embedded again. A run
    that was stopped continues with the same call. The images must lie below the gallery's image
    root, since their paths are stored relative to it.

    Raises: SourceError for another root, or if no image can be read; BundleMismatchError;
        InvalidParameterError for an attribute of another type than the gallery has; BundleError;
        GalleryWriteError; GalleryBusyError.
    """
    _check_bundle(gallery, embedder)
    _check_root(gallery, source)
    check_attributes(source, gallery.schema())
    start = perf_counter()
    ingest = _Ingest(gallery, source.names)
    known = gallery.vectors_of_contents
    with embedded_batches(source, embedder, known, settings or EmbedSettings()) as batches:
        for batch in batches:
            ingest.take(batch)
            if on_progress is not None:
                on_progress(len(batch.outcomes))
    ingest.finish()
    report = ingest.report(source, embedder, perf_counter() - start)
    refuse_unreadable(source, report.failures)
    return report


def check_image_root(gallery: VectorStore) -> None:
    """Raises: SourceError if the folder that paths start from is unknown or missing."""
    root = gallery.image_root
    if root == Path():
        raise SourceError(
            f"Gallery {gallery.name} was made of vectors and has no image root. Say with "
            "--image-root where the paths of its images start."
        )
    if not root.is_dir():
        raise SourceError(
            f"The image root {root} of gallery {gallery.name} is missing. Say with --image-root "
            "where the images are now."
        )


@dataclass(slots=True)
class _Ingest:
    """Writes batches as they come; a copy waits for the batch that brings its vector."""

    gallery: VectorStore
    names: frozenset[str]
    written: Written = field(default_factory=Written)
    embedded: int = 0
    failed: list[Outcome] = field(default_factory=list)
    waiting: list[Outcome] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)

    def take(self, batch: Embedded) -> None:
        self.embedded += len(batch.vectors)
        self.broken |= {o.sha256: o.failure for o in batch.outcomes if o.sha256 and o.failure}
        usable = []
        for outcome in [*self.waiting, *batch.outcomes]:
            reason = outcome.failure or self.broken.get(outcome.sha256)
            if reason is None:
                usable.append(outcome)
            else:
                self._fail(outcome, reason)
        self._store(usable, batch.vectors)

    def finish(self) -> None:
        """Whatever still waits lost its content to another process."""
        for outcome in self.waiting:
            self._fail(outcome, _TAKEN_AWAY)
        self.waiting = []

    def report(self, source: Source, embedder: Embedder, elapsed_s: float) -> AddReport:
        found, written = len(source.records), self.written
        return AddReport(
            found=found,
            added=written.added,
            replaced=written.replaced,
            updated=written.updated,
            unchanged=written.unchanged,
            embedded=self.embedded,
            failures=failures_of(self.failed),
            bundle_id=embedder.bundle_id,
            provider=embedder.provider,
            elapsed_s=round(elapsed_s, 3),
            images_per_s=round(found / max(elapsed_s, 1e-9), 2),
        )

    def _fail(self, outcome: Outcome, reason: str) -> None:
        if self.gallery.stored([outcome.record.key]):
            reason = f"{reason} {_STAYS}"
        self.failed.append(replace(outcome, failure=reason))

    def _store(
        self, outcomes: Sequence[Outcome], vectors: Mapping[str, NDArray[np.float32]]
    ) -> None:
        stored = self.gallery.stored([outcome.record.key for outcome in outcomes])
        changed = [o for o in outcomes if not self._is_stored(o, stored.get(o.record.key))]
        self.written += Written(unchanged=len(outcomes) - len(changed))
        absent = {o.sha256 for o in changed} - vectors.keys()
        available = {**self.gallery.vectors_of_contents(sorted(absent)), **vectors}
        entries = [_entry(o, available[o.sha256]) for o in changed if o.sha256 in available]
        self.waiting = [o for o in changed if o.sha256 not in available]
        if entries:
            self.written += self.gallery.add(entries, self.names)

    def _is_stored(self, outcome: Outcome, item: Item | None) -> bool:
        record = outcome.record
        if item is None:
            return False
        wanted = merged(record.attributes, item.attributes, self.names)
        return (item.sha256, item.path, item.format, _typed(item.attributes)) == (
            outcome.sha256,
            record.path,
            outcome.format,
            _typed(wanted),
        )


def _typed(attributes: Mapping[str, object]) -> dict[str, tuple[bool, object]]:
    """So that True is not taken for 1."""
    return {name: (isinstance(value, bool), value) for name, value in attributes.items()}


def _entry(outcome: Outcome, vector: NDArray[np.float32]) -> Entry:
    record = outcome.record
    return Entry(record.key, vector, outcome.sha256, record.attributes, record.path, outcome.format)


def _check_bundle(gallery: VectorStore, embedder: Embedder) -> None:
    if gallery.bundle_id != embedder.bundle_id:
        raise BundleMismatchError(
            f"Gallery {gallery.name} was made with bundle {gallery.bundle_id[:SHORT]}, not with "
            f"{embedder.bundle_id[:SHORT]}: their vectors cannot be compared. Use the bundle that "
            "it was made with, or build another gallery."
        )


def _check_root(gallery: VectorStore, source: Source) -> None:
    check_image_root(gallery)
    if source.root.resolve() != gallery.image_root.resolve():
        raise SourceError(
            f"The paths of the {source.description} start from {source.root}, those of gallery "
            f"{gallery.name} from {gallery.image_root}. Put the images below that folder, or say "
            "with --image-root where the images of the gallery are now."
        )
