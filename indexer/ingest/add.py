"""Add a source to a live gallery, batch by batch. Each batch is durable and visible at once."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from kinlens.embedder.errors import BundleMismatchError, InvalidParameterError, SourceError
from kinlens.embedder.session import Embedder, fitted
from kinlens.embedder.types import SHORT
from kinlens.indexer.addresses import is_same_root
from kinlens.indexer.entries import Item, Written, merged
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.embed import (
    Batch,
    EmbedSettings,
    Failure,
    embedded_batches,
    entry_of,
    failure_lines,
    failure_of,
    faults_of,
    refuse_unreadable,
)
from kinlens.indexer.ingest.sources import Record, Source, check_attributes
from kinlens.indexer.store import VectorStore
from kinlens.indexer.types import Progress
from kinlens.reports import Report

KEPT = "The gallery keeps its existing item with this key."
_CHANGED = "The gallery or the file was changed meanwhile. Run the same command again."
_REMOVAL_BATCH = 10_000


class IngestReport(BaseModel, frozen=True):
    """Result of reading a source with `found` images, of which `failures` were skipped.

    `embedded` is the number of contents that the model embedded. `omitted` counts the files that
    are no images, by kind.
    """

    found: int
    embedded: int
    failures: tuple[Failure, ...]
    omitted: dict[str, int] = {}
    bundle_id: str
    provider: str
    elapsed_s: float
    images_per_s: float


class AddReport(Report, IngestReport, frozen=True):
    """Result of `add_source`: found = added + replaced + updated + unchanged + failures.

    For images that were not embedded, the gallery already had a vector. It has `size` items now.
    """

    added: int
    replaced: int
    updated: int
    unchanged: int
    size: int

    def lines(self) -> Iterator[str]:
        """What was done, and the first failures."""
        yield (
            f"{self.added:,} added, {self.replaced:,} replaced, {self.updated:,} with new "
            f"attributes, {self.unchanged:,} unchanged ({self.embedded:,} embedded) in "
            f"{self.elapsed_s:.1f} s, {self.images_per_s:.1f} images/s; {self.size:,} items in all."
        )
        yield from failure_lines(self.failures, self.found)


def add_source(
    gallery: VectorStore,
    source: Source,
    embedder: Embedder,
    settings: EmbedSettings | None = None,
    on_progress: Progress | None = None,
) -> AddReport:
    """Store every readable image of `source` with its attributes.

    Attributes that the source does not define are kept, for example those of an `update`.
    Unchanged items are skipped, and content that the gallery already has is not embedded again. To
    resume an interrupted run, make the same call. The images must be below the gallery's image
    root, because their paths are stored relative to it.

    Raises: SourceError for another root, or if no image can be read; BundleMismatchError;
        InvalidParameterError for an attribute of another type than in the gallery; BundleError;
        GalleryWriteError; GalleryBusyError.
    """
    embedder = fitting(gallery, embedder)
    check_root(gallery, source)
    check_attributes(source, gallery)
    work = Ingest(gallery, source, embedder, source.names)
    work.run(settings or EmbedSettings(), on_progress)
    refuse_unreadable(source.description, work.found, work.failures)
    return AddReport(**work.report().model_dump(), **asdict(work.written), size=gallery.size)


def check_image_root(gallery: VectorStore) -> None:
    """Check that the gallery has an image root. Raises: SourceError if it is unset or missing."""
    root = gallery.image_root
    if root == Path():
        raise SourceError(
            "The gallery was built from vectors and has no image root. Set the folder of its "
            "images with image_root."
        )
    if isinstance(root, Path) and not root.is_dir():
        raise SourceError(
            f"The image root {root} of the gallery is missing. Set the current folder of the "
            "images with image_root."
        )


@dataclass(slots=True)
class Ingest:
    """Embeds a source and writes its batches to a gallery.

    Attributes:
        owned: names of the attributes that the source defines; others are kept. None: all.
        unlisted: gets each item of the gallery that the source lists, so that the caller can remove
            the other items afterwards.
        old: a gallery of the same model whose vectors are used for equal contents.
        found: number of records read so far.
        embedded: number of contents that the model embedded.
        reused: number of contents whose vector comes from `old`.
    """

    gallery: VectorStore
    source: Source
    embedder: Embedder
    owned: frozenset[str] | None = None
    unlisted: "UnlistedItems | None" = None
    old: VectorStore | None = None
    found: int = 0
    written: Written = field(default_factory=Written)
    embedded: int = 0
    reused: int = 0
    failures: list[Failure] = field(default_factory=list)
    started: float = field(default_factory=perf_counter)

    def run(self, settings: EmbedSettings, on_progress: Progress | None = None) -> None:
        """Process the whole source. Raises: the errors of `add_source`."""
        with embedded_batches(self.source, self.embedder, self._known, settings) as batches:
            for batch in batches:
                self._take(batch)
                if on_progress is not None:
                    on_progress(len(batch.records))

    def report(self) -> IngestReport:
        """What was done so far."""
        faults, elapsed_s = faults_of(self.source), perf_counter() - self.started
        return IngestReport(
            found=self.found + len(faults),
            embedded=self.embedded,
            failures=(*faults, *self.failures),
            omitted=self.source.omitted.counts,
            bundle_id=self.embedder.bundle_id,
            provider=self.embedder.provider,
            elapsed_s=round(elapsed_s, 3),
            images_per_s=round(self.found / max(elapsed_s, 1e-9), 2),
        )

    def _known(self, sha256s: Sequence[str]) -> set[str]:
        known = self.gallery.contents(sha256s)
        return known if self.old is None else known | self.old.contents(sha256s)

    def _take(self, batch: Batch) -> None:
        self.found += len(batch.records)
        stored = self.gallery.stored([record.key for record in batch.records])
        usable = []
        for record in batch.records:
            if record.failure:
                self._fail(record, record.key in stored)
            else:
                usable.append(record)
        if self.unlisted is not None:
            keys = {record.key for record in usable}
            self.unlisted.mark_listed(item for key, item in stored.items() if key in keys)
        changed = [one for one in usable if not is_stored(one, stored.get(one.key), self.owned)]
        self.written += Written(unchanged=len(usable) - len(changed))
        vectors = self._vectors(changed, batch.vectors)
        entries = [entry_of(one, vectors[one.sha256]) for one in changed if one.sha256 in vectors]
        if entries:
            self.written += self.gallery.add(entries, self.owned)

    def _vectors(
        self, changed: Sequence[Record], made: Mapping[str, NDArray[np.float32]]
    ) -> dict[str, NDArray[np.float32]]:
        """The vectors of the changed contents by sha256. Stored vectors take precedence."""
        contents = sorted({record.sha256 for record in changed} | made.keys())
        stored = self.gallery.vectors_of_contents(contents)
        if self.old is not None:
            unknown = [sha256 for sha256 in contents if sha256 not in stored]
            reused = self.old.vectors_of_contents(unknown)
            self.reused += len(reused)
            stored |= reused
        self.embedded += len(made.keys() - stored.keys())
        vectors = {**made, **stored}
        for record in changed:
            if record.sha256 not in vectors:  # another process has removed this content since
                self._fail(replace(record, failure=_CHANGED), False)
        return vectors

    def _fail(self, record: Record, is_stored: bool) -> None:
        if is_stored and self.owned is not None:
            record = replace(record, failure=f"{record.failure} {KEPT}")
        self.failures.append(failure_of(record))


def is_stored(record: Record, item: Item | None, owned: frozenset[str] | None) -> bool:
    """Whether `item` is what a record would be stored as; `owned` as in `Ingest`."""
    if item is None:
        return False
    names = item.attributes.keys() if owned is None else owned
    wanted = merged(record.attributes, item.attributes, names)
    return (item.sha256, item.path, item.format, item.attributes) == (
        record.sha256,
        record.path,
        record.format,
        wanted,
    )


class UnlistedItems:
    """The items of a gallery that a source does not list, such as those of an earlier, interrupted
    run. No other process may change the gallery.

    Takes 9 bytes per item that the gallery has at the start.
    """

    def __init__(self, gallery: Gallery) -> None:
        self._gallery = gallery
        self._ids = gallery.ids()
        self._is_listed = np.zeros(len(self._ids), np.bool_)

    def mark_listed(self, items: Iterable[Item]) -> None:
        """Exclude items from removal. Raises: InvalidParameterError if a key is listed twice."""
        for item in items:
            position = int(np.searchsorted(self._ids, item.id))
            is_old = position < len(self._ids) and self._ids[position] == item.id
            if not is_old or self._is_listed[position]:
                raise InvalidParameterError(
                    f"Key {item.key!r} occurs twice. Give each item its own key."
                )
            self._is_listed[position] = True

    def remove(self) -> None:
        """Remove the items that were not listed. Raises: GalleryWriteError."""
        ids = self._ids[~self._is_listed]
        for start in range(0, len(ids), _REMOVAL_BATCH):
            self._gallery.remove_items(ids[start : start + _REMOVAL_BATCH].tolist())


def fitting(gallery: VectorStore, embedder: Embedder) -> Embedder:
    """The model for new vectors of a gallery. Raises: BundleMismatchError."""
    fit = checked_fit(gallery, embedder)
    gallery.admit(embedder.mode.precision)
    return fit


def checked_fit(gallery: VectorStore, embedder: Embedder) -> Embedder:
    """The model for the vectors of a gallery. Raises: BundleMismatchError."""
    if gallery.bundle_id != embedder.bundle_id:
        raise BundleMismatchError(
            f"The gallery was built with bundle {gallery.bundle_id[:SHORT]}, not with "
            f"{embedder.bundle_id[:SHORT]}, and their vectors cannot be compared. Use the first "
            "bundle, or build another gallery."
        )
    return fitted(gallery, embedder)


def check_root(gallery: VectorStore, source: Source) -> None:
    """Check that paths of a source fit those of a gallery. Raises: SourceError."""
    check_image_root(gallery)
    if not is_same_root(source.root, gallery.image_root):
        raise SourceError(
            f"The image paths of the {source.description} are relative to {source.root}, but those "
            f"of the gallery to {gallery.image_root}. Put the images below that folder, "
            "or set the image root of the gallery with image_root."
        )
