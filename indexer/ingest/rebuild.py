"""Rebuild a gallery with another model while the old gallery stays in use, then swap them."""

import contextlib
from collections.abc import Callable, Iterable, Set
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from kinlens.embedder.durable import sync_tree
from kinlens.embedder.errors import (
    GalleryBusyError,
    GalleryCorruptError,
    GalleryNotFoundError,
    SourceError,
)
from kinlens.embedder.session import Embedder
from kinlens.indexer.catalog.database import Catalog
from kinlens.indexer.folder.layout import GalleryFolder, disk_errors_explained
from kinlens.indexer.folder.manifest import GalleryManifest, read_manifest, write_manifest
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.add import Ingest, remove_in_parts
from kinlens.indexer.ingest.embed import EmbedSettings, Failure
from kinlens.indexer.ingest.sources import Record, Source
from kinlens.indexer.live.backup import write_backup
from kinlens.indexer.live.compaction import CATALOG
from kinlens.indexer.types import Ids, Item, Progress

OnCopy = Callable[[Path], None]
"""Changes or checks the copy of a gallery, in this folder, before it replaces another gallery."""

ReadImage = Callable[[Item | Record], bytes]
"""Reads the image of an item as it was indexed. Raises: GalleryError, ImageError, OSError."""

_CHUNK = 4096  # items per read transaction of the catalogue
_NO_IDS: Ids = np.empty(0, np.int64)

_ROUNDS = 8  # attempts to catch up with changes that arrived during the previous round
_SHOWN = 100


def adopt(
    target: Path | str,
    source: Path | str,
    *,
    image_root: Path | str | None = None,
    before_lock: OnCopy | None = None,
    under_lock: OnCopy | None = None,
    on_progress: Progress | None = None,
) -> GalleryManifest:
    """Copy gallery `source` and publish the copy as the current generation of gallery `target`.

    The target keeps its name and, unless `image_root` is given, its image root. The source is not
    changed. Both stay in use during the copy. `before_lock` then gets the copy while the target may
    still change; `under_lock` gets it, already synced, while the target is locked against changes,
    and must make its own changes durable. If the process is killed, either the old or the new
    generation is current. Progress counts bytes.

    Raises: GalleryNotFoundError, GalleryCorruptError; GalleryBusyError if a build runs or has
        replaced the target during the copy; GalleryWriteError; the errors of the two calls.
    """
    folder = GalleryFolder(target)
    with contextlib.ExitStack() as stack:
        current = Gallery.open(folder.path, load_index=False)
        stack.callback(current.close)
        _refuse_other(folder, current)
        stack.enter_context(disk_errors_explained(folder.path))
        stage = stack.enter_context(folder.aside())
        copy = stage / "copy"
        write_backup(source, copy, on_progress)
        made = GalleryFolder(copy).current()
        root = current.manifest.source_root if image_root is None else str(image_root)
        manifest = read_manifest(made).model_copy(
            update={"name": current.name, "source_root": root}
        )
        write_manifest(made, manifest)
        if before_lock is not None:
            before_lock(copy)
        sync_tree(made, "adopt")
        with folder.locked():
            _refuse_other(folder, current)
            if under_lock is not None:
                under_lock(copy)
            folder.publish(made, manifest.generation)
    return manifest


def _refuse_other(folder: GalleryFolder, current: Gallery) -> None:
    if folder.current_name() != current.generation:
        raise GalleryBusyError(
            f"The gallery {folder.path} was replaced by a build in the meantime; nothing was "
            "changed. Start again with the new gallery."
        )


class CatchUp:
    """Replicates the gallery in folder `path`, and its later changes, to a candidate gallery with
    another model. Not thread-safe. Takes 16 bytes per item.

    Attributes:
        failures: items whose images cannot be read, by item id.
        embedded: number of images that the model embedded.
    """

    def __init__(
        self,
        path: Path,
        embedder: Embedder,
        read_image: ReadImage,
        settings: EmbedSettings | None = None,
    ) -> None:
        """Raises: GalleryNotFoundError, GalleryCorruptError."""
        self.embedder = embedder
        self.failures: dict[int, Failure] = {}
        self.embedded = 0
        self._read_image = read_image
        self._settings = settings or EmbedSettings()
        self._seq = -1
        # The ids of the items of the gallery, ascending, and the ids of the same items in the
        # candidate.
        self._ids, self._copies = _NO_IDS, _NO_IDS
        self._folder = GalleryFolder(path)
        self.gallery = Gallery.open(path, load_index=False)
        self._catalog = Catalog.open(self._folder.current() / CATALOG)

    @property
    def path(self) -> Path:
        """The folder of the gallery that is replicated."""
        return self._folder.path

    @property
    def found(self) -> int:
        """Number of items of the gallery at the last `catch_up`."""
        return len(self._ids) + len(self.failures)

    def close(self) -> None:
        """Close the files."""
        self._catalog.close()
        self.gallery.close()

    def catch_up(self, candidate: Gallery, on_progress: Progress | None = None) -> int:
        """Bring `candidate` to the present state of the gallery.

        Returns the number of added, changed and removed items.

        Raises: GalleryBusyError if a build has replaced the gallery; GalleryCorruptError;
            GalleryWriteError; BundleError; InvalidParameterError.
        """
        if self._folder.current_name() != self.gallery.generation:
            raise GalleryBusyError(
                f"The gallery {self.path} was replaced by a build since the start; nothing was "
                "changed. Start again with the new gallery."
            )
        since, self._seq = self._seq, -1  # -1 until this round is complete
        is_first = since < 0
        if is_first:  # also after an interrupted round
            self._ids, self._copies, self.failures = _NO_IDS, _NO_IDS, {}
        with self._catalog.reading() as view:
            seq, live = view.state().seq, view.live_ids()
            changed = _NO_IDS if is_first else view.changed_since(since)
        before = np.union1d(self._ids, np.array([*self.failures], np.int64))
        removed = np.setdiff1d(before, live)
        fresh = np.union1d(np.setdiff1d(live, before), changed)
        old = candidate.ids() if is_first else self._forget(np.union1d(removed, fresh))
        pairs = [np.column_stack([self._ids, self._copies])]
        for start in range(0, len(fresh), _CHUNK):
            some = fresh[start : start + _CHUNK]
            pairs += [self._take(candidate, some, on_progress)]
        both = np.concatenate(pairs)
        self._ids, self._copies = both[np.argsort(both[:, 0])].T
        # Remove old copies, except those that are now the copy of another item.
        remove_in_parts(candidate, np.setdiff1d(old, self._copies))
        self._seq = seq
        return len(fresh) + len(removed)

    def restart(self) -> None:
        """Make the next `catch_up` compare all items, for a candidate without earlier changes."""
        self._seq = -1

    def _forget(self, removed: Ids) -> Ids:
        """Forget items; returns the ids that they had in the candidate."""
        for number in removed.tolist():
            self.failures.pop(number, None)
        is_removed = np.isin(self._ids, removed)
        copies = self._copies[is_removed]
        self._ids, self._copies = self._ids[~is_removed], self._copies[~is_removed]
        return copies

    def _take(
        self, candidate: Gallery, ids: Ids, on_progress: Progress | None
    ) -> NDArray[np.int64]:
        """Copy items to the candidate; returns the ids (N, 2) in both galleries."""
        with self._catalog.reading() as view:
            items = {item.key: item for item in view.get(ids.tolist()).values()}
        source = Source(
            self.gallery.image_root,
            lambda: (_record(item) for item in items.values()),
            len(items),
            f"gallery {self.gallery.name}",
            read=lambda record, _: self._read_image(items[record.key]),
        )
        work = Ingest(candidate, source, self.embedder, None)
        work.run(self._settings, on_progress)
        self.embedded += work.embedded
        for failure in work.failures:
            self.failures[items.pop(failure.key).id] = failure
        copies = candidate.stored([*items])
        pairs = [(item.id, copies[key].id) for key, item in items.items()]
        return np.array(pairs, np.int64).reshape(-1, 2)


def _record(item: Item) -> Record:
    return Record(item.key, item.path, item.attributes, item.sha256, item.format)


class RebuildReport(BaseModel, frozen=True):
    """Result of a rebuild: of `found` items, `items` are in the new gallery and `missing` are not.

    `failures` has the first 100 missing items with the reasons.
    """

    found: int
    items: int
    embedded: int
    missing: int
    failures: tuple[Failure, ...]
    bundle_id: str
    provider: str
    elapsed_s: float


def rebuild(
    follower: CatchUp,
    candidate: Path,
    *,
    max_missing: float = 0.0,
    on_progress: Progress | None = None,
    on_indexed: Progress | None = None,
) -> RebuildReport:
    """Rebuild the gallery of `follower` with the follower's model in the folder `candidate`.

    To resume an interrupted rebuild, make the same call. Items whose images cannot be read are
    skipped, up to the fraction `max_missing` of all items. The index type and its recall target are
    kept. `on_progress` counts items, `on_indexed` indexed items.

    Raises: SourceError if more images are missing; PlanError, RecallError; GalleryBusyError if a
        build replaces the gallery; GalleryWriteError; BundleError.
    """
    started = perf_counter()
    old, embedder = follower.gallery, follower.embedder
    with contextlib.closing(_candidate(candidate, old, embedder)) as made:
        made.when_full = "grow"
        follower.catch_up(made, on_progress)
        check_missing(follower.failures.values(), follower.found, max_missing)
        made.compact(old.index_settings(), wait=True, on_progress=on_indexed)
        return RebuildReport(
            found=follower.found,
            items=made.size,
            embedded=follower.embedded,
            missing=len(follower.failures),
            failures=tuple(follower.failures.values())[:_SHOWN],
            bundle_id=embedder.bundle_id,
            provider=embedder.provider,
            elapsed_s=round(perf_counter() - started, 3),
        )


def _candidate(path: Path, old: Gallery, embedder: Embedder) -> Gallery:
    """The gallery of an interrupted rebuild, or a new one."""
    try:
        made = Gallery.open(path, load_index=False)
        wanted = (embedder.bundle_id, embedder.mode.precision, old.name)
        if (made.bundle_id, made.precision, made.name) == wanted:
            return made
        made.close()
    except (GalleryNotFoundError, GalleryCorruptError):
        pass
    return Gallery.create(
        path,
        name=old.name,
        bundle_id=embedder.bundle_id,
        precision=embedder.mode.precision,
        vector_type=old.vector_type,
        dim=embedder.dim,
        source=old.manifest.source,
        source_root=old.manifest.source_root,
    )


def swap_in(
    follower: CatchUp,
    candidate: Path,
    *,
    max_missing: float = 0.0,
    known_missing: Set[int] = frozenset(),
    on_progress: Progress | None = None,
    before_publish: Callable[[], None] | None = None,
) -> GalleryManifest:
    """Replace the gallery of `follower` by a copy of `candidate`.

    Changes since the rebuild are replicated in rounds, until a round finds no more. A last round
    runs while the gallery is locked against changes, so no acknowledged change is lost. Items whose
    images cannot be read are skipped, up to the fraction `max_missing` of all items. The ids in
    `known_missing` were accepted as missing before and do not count. The candidate is not changed.
    Progress counts bytes. `before_publish` is called just before the swap; if it raises, the
    gallery is unchanged.

    Raises: SourceError if too many images are missing; GalleryBusyError if changes arrive faster
        than they are replicated, or a build runs; the errors of `adopt`.
    """

    def replicate(copy: Path, rounds: int) -> None:
        with contextlib.closing(Gallery.open(copy, load_index=False)) as made:
            made.when_full = "grow"
            _catch_up(follower, made, rounds)
            check_missing(missing_since(follower, known_missing), follower.found, max_missing)

    def finish(copy: Path) -> None:
        replicate(copy, 1)
        if before_publish is not None:
            before_publish()

    try:
        return adopt(
            follower.path,
            candidate,
            before_lock=partial(replicate, rounds=_ROUNDS),
            under_lock=finish,
            on_progress=on_progress,
        )
    finally:
        follower.restart()  # its changes went to the copy, not to the candidate


def missing_since(follower: CatchUp, known: Set[int]) -> list[Failure]:
    """The items that are missing now, except those with an id in `known`."""
    return [failure for number, failure in follower.failures.items() if number not in known]


def check_missing(failures: Iterable[Failure], found: int, max_missing: float) -> None:
    """Raise SourceError if more than the fraction `max_missing` of `found` items is missing."""
    missing = list(failures)
    if len(missing) <= max_missing * found:
        return
    first = missing[0]
    raise SourceError(
        f"The images of {len(missing):,} of {found:,} items cannot be read; the limit is "
        f"{max_missing:.1%}. The first is {first.key!r}: {first.reason} Restore the images, "
        "remove these items, or rebuild with a higher max_missing."
    )


def _catch_up(follower: CatchUp, made: Gallery, rounds: int) -> None:
    few = 64
    touched = 0
    for _ in range(rounds):
        touched = follower.catch_up(made)
        if not touched:
            return
    if rounds > 1 and touched > few:
        raise GalleryBusyError(
            f"The gallery {follower.path} changes faster than the new one can catch up: "
            f"{touched:,} items in the last of {rounds} rounds. Swap it when there are fewer "
            "changes."
        )
