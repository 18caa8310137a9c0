"""Add a source to a live gallery, batch by batch; each is durable and visible once written."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from kinlens.embedder.errors import BundleMismatchError, InvalidParameterError, SourceError
from kinlens.embedder.session import Embedder, check_precision
from kinlens.embedder.types import SHORT
from kinlens.indexer.catalog.entries import merged
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.embed import (
    Batch,
    EmbedSettings,
    Failure,
    Outcome,
    embedded,
    embedded_batches,
    entry_of,
    failure_of,
    refuse_unreadable,
)
from kinlens.indexer.ingest.sources import Source, check_attributes
from kinlens.indexer.types import Ids, Item, Progress, VectorStore, Written

_STAYS = "The gallery keeps what it has under this key."
_CHANGED = "The file was changed while it was read. Run the same command again."
_REMOVED_AT_ONCE = 10_000


class AddReport(BaseModel, frozen=True):
    """How an `add` went: found = added + replaced + updated + unchanged + failures.

    `embedded` counts contents that went through the model; the other images were known.
    """

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
    work = Ingest(gallery, source, embedder, source.names)
    work.run(settings or EmbedSettings(), on_progress)
    refuse_unreadable(source, work.found, work.failures)
    elapsed_s = perf_counter() - start
    return AddReport(
        found=work.found,
        **asdict(work.written),
        embedded=work.embedded,
        failures=tuple(work.failures),
        bundle_id=embedder.bundle_id,
        provider=embedder.provider,
        elapsed_s=round(elapsed_s, 3),
        images_per_s=round(work.found / max(elapsed_s, 1e-9), 2),
    )


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
class Ingest:
    """Writes batches as they come, one after the other.

    owned: names of attributes that the source decides on; None if it decides on all.
    rest: told what the gallery holds under the keys of the source, so that it can go in the end.
    """

    gallery: VectorStore
    source: Source
    embedder: Embedder
    owned: frozenset[str] | None = None
    rest: "Rest | None" = None
    found: int = 0
    written: Written = field(default_factory=Written)
    embedded: int = 0
    failures: list[Failure] = field(default_factory=list)

    def run(self, settings: EmbedSettings, on_progress: Progress | None = None) -> None:
        """Raises: as `add_source`."""
        held = self.gallery.contents
        with embedded_batches(self.source, self.embedder, held, settings) as batches:
            for batch in batches:
                self._take(batch)
                if on_progress is not None:
                    on_progress(len(batch.outcomes))

    def _take(self, batch: Batch) -> None:
        self.found += len(batch.outcomes)
        stored = self.gallery.stored([outcome.record.key for outcome in batch.outcomes])
        usable = []
        for outcome in batch.outcomes:
            if outcome.failure is None:
                usable.append(outcome)
            else:
                self._fail(outcome, outcome.record.key in stored)
        if self.rest is not None:
            keys = {outcome.record.key for outcome in usable}
            self.rest.keep(item for key, item in stored.items() if key in keys)
        changed = [o for o in usable if not self._is_stored(o, stored.get(o.record.key))]
        self.written += Written(unchanged=len(usable) - len(changed))
        vectors = self._vectors(changed, batch.vectors)
        entries = [entry_of(o, vectors[o.sha256]) for o in changed if o.sha256 in vectors]
        if entries:
            self.written += self.gallery.add(entries, self.owned)

    def _vectors(
        self, changed: Sequence[Outcome], made: Mapping[str, NDArray[np.float32]]
    ) -> dict[str, NDArray[np.float32]]:
        """Of these contents; one that the gallery has keeps the vector that it has."""
        contents = sorted({outcome.sha256 for outcome in changed} | made.keys())
        held = self.gallery.vectors_of_contents(contents)
        self.embedded += len(made.keys() - held.keys())
        vectors = {**made, **held}
        lost = [outcome for outcome in changed if outcome.sha256 not in vectors]
        if lost:  # the gallery had them when they were read; somebody has removed them since
            records = [outcome.record for outcome in lost]
            again = embedded(self.source, records, self.embedder, lambda _: ()).vectors
            vectors |= again
            self.embedded += len(again)
        for outcome in lost:
            if outcome.sha256 not in vectors:
                self._fail(replace(outcome, failure=_CHANGED), False)
        return vectors

    def _fail(self, outcome: Outcome, is_stored: bool) -> None:
        if is_stored and self.owned is not None:
            outcome = replace(outcome, failure=f"{outcome.failure} {_STAYS}")
        self.failures.append(failure_of(outcome))

    def _is_stored(self, outcome: Outcome, item: Item | None) -> bool:
        record = outcome.record
        if item is None:
            return False
        owned = item.attributes.keys() if self.owned is None else self.owned
        wanted = merged(record.attributes, item.attributes, owned)
        return (item.sha256, item.path, item.format, item.attributes) == (
            outcome.sha256,
            record.path,
            outcome.format,
            wanted,
        )


class Rest:
    """What of a gallery a source does not name: nobody else changes the gallery meanwhile.

    It keeps 9 bytes an item that was there at first.
    """

    def __init__(self, gallery: Gallery) -> None:
        self._gallery = gallery
        self._ids = gallery.ids()
        self._is_named = np.zeros(len(self._ids), np.bool_)

    def keep(self, items: Iterable[Item]) -> None:
        """These stay. Raises: InvalidParameterError for one that the source has named before."""
        for item in items:
            place = int(np.searchsorted(self._ids, item.id))
            is_old = place < len(self._ids) and self._ids[place] == item.id
            if not is_old or self._is_named[place]:
                raise InvalidParameterError(
                    f"Key {item.key!r} is there twice. Give each item a key of its own."
                )
            self._is_named[place] = True

    def remove(self) -> None:
        """Remove what was not named. Raises: GalleryWriteError."""
        remove_in_parts(self._gallery, self._ids[~self._is_named])


def remove_in_parts(gallery: Gallery, ids: Ids) -> None:
    """Remove items by number, some at a time. Raises: GalleryWriteError."""
    for start in range(0, len(ids), _REMOVED_AT_ONCE):
        gallery.remove_items(ids[start : start + _REMOVED_AT_ONCE].tolist())


def _check_bundle(gallery: VectorStore, embedder: Embedder) -> None:
    if gallery.bundle_id != embedder.bundle_id:
        raise BundleMismatchError(
            f"Gallery {gallery.name} was made with bundle {gallery.bundle_id[:SHORT]}, not with "
            f"{embedder.bundle_id[:SHORT]}: their vectors cannot be compared. Use the bundle that "
            "it was made with, or build another gallery."
        )
    check_precision(gallery, embedder)
    gallery.admit(embedder.mode.precision)


def _check_root(gallery: VectorStore, source: Source) -> None:
    check_image_root(gallery)
    if source.root.resolve() != gallery.image_root.resolve():
        raise SourceError(
            f"The paths of the {source.description} start from {source.root}, those of gallery "
            f"{gallery.name} from {gallery.image_root}. Put the images below that folder, or say "
            "with --image-root where the images of the gallery are now."
        )
