"""Rebuild a gallery with another model while the old gallery stays in use, then swap them."""

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np
from pydantic import BaseModel

from kinlens.embedder.durable import discard, sync_tree
from kinlens.embedder.errors import (
    GalleryBusyError,
    GalleryCorruptError,
    GalleryNotFoundError,
    SourceError,
)
from kinlens.embedder.session import Embedder
from kinlens.embedder.sources.names import composed
from kinlens.indexer.catalog.database import Catalog
from kinlens.indexer.catalog.vectors import find_sorted
from kinlens.indexer.entries import Item
from kinlens.indexer.folder.layout import GalleryFolder, disk_errors_explained
from kinlens.indexer.folder.manifest import GalleryManifest, read_manifest, write_manifest
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.add import Ingest
from kinlens.indexer.ingest.embed import EmbedSettings, Failure
from kinlens.indexer.ingest.sources import Record, Source
from kinlens.indexer.live.backup import write_backup
from kinlens.indexer.live.compaction import CATALOG, compaction_lock
from kinlens.indexer.types import Ids, Progress

OnCopy = Callable[[Path], None]
"""Changes or checks the copy of a gallery, in this folder, before it replaces another gallery."""

ReadImage = Callable[[Item | Record], bytes]
"""Reads the image of an item as it was indexed. Raises: GalleryError, ImageError, OSError."""

_CHUNK = 4096  # items per read transaction of the catalogue
_NO_KEYS: Ids = np.empty(0, np.int64)

_ROUNDS = 8  # attempts to catch up with changes that arrived during the previous round
_FEW = 64  # changes that can be repeated while writers wait
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


class LaterWrites(abc.ABC):
    """Repeats the writes to `gallery` in the one that will replace it. Not thread-safe."""

    def __init__(self, gallery: Gallery) -> None:
        """Raises: GalleryCorruptError."""
        self.gallery = gallery
        self._catalog = Catalog.open(gallery.generation_folder / CATALOG)
        self._seq = -1  # the last write that was repeated
        # The keys that it had at first, as of `numbered`; None if `made` has no other ones.
        self._had: Ids | None = None

    def close(self) -> None:
        """Close the files."""
        self._catalog.close()

    def catch_up(self, made: Gallery, on_progress: Progress | None = None) -> int:
        """Repeat in `made` what was written since the last call.

        Returns the number of added, changed and removed items.

        Raises: GalleryCorruptError; GalleryWriteError; the errors of the subclass.
        """
        with self._catalog.reading() as view:
            state, changed = view.state(), view.changed_since(self._seq)
            removed = view.removed_keys(self._seq)
        for start in range(0, len(removed), _CHUNK):
            self._remove(made, removed[start : start + _CHUNK])
        for start in range(0, len(changed), _CHUNK):
            self._take(made, changed[start : start + _CHUNK], on_progress)
        # A compaction since then may have erased removals.
        lost = self._lost(made) if state.segment_seq > self._seq else []
        for start in range(0, len(lost), _CHUNK):
            made.remove(lost[start : start + _CHUNK])
        self._seq = state.seq
        return len(changed) + len(removed) + len(lost)

    def catch_up_in_rounds(self, made: Gallery) -> int:
        """Catch up until a round finds nothing, or a few times; returns what the last one found.

        Raises: the errors of `catch_up`.
        """
        found = 0
        for _ in range(_ROUNDS):
            found = self.catch_up(made)
            if not found:
                break
        return found

    def without_compactions(self) -> contextlib.AbstractContextManager[None]:
        """Keep the gallery from being compacted, after a running compaction. All but the first
        `catch_up` of the block then need not compare every item. Raises: GalleryWriteError.
        """
        return compaction_lock(self.gallery.generation_folder, wait=True)

    def _remove(self, made: Gallery, keys: Sequence[str]) -> None:
        made.remove(keys)

    @abc.abstractmethod
    def _take(self, made: Gallery, ids: Ids, on_progress: Progress | None) -> None:
        """Write these items of the gallery, as far as they are still there, to `made`."""

    def _lost(self, made: Gallery) -> list[str]:
        """The keys in `made` that the gallery had, and has no more. Reads every item of both."""
        there, lost = numbered(self.gallery), list[str]()
        for keys, numbers in _parts(made):
            is_lost = find_sorted(numbers, there) < 0
            if self._had is not None:
                is_lost &= find_sorted(numbers, self._had) >= 0
            lost += [keys[n] for n in np.flatnonzero(is_lost)]
        return lost


class CatchUp(LaterWrites):
    """Replicates the gallery in folder `path`, and its later changes, to a candidate gallery with
    another model.

    Attributes:
        found: number of items of the gallery at the last `catch_up`.
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
        self.found = 0
        self.failures: dict[int, Failure] = {}
        self.embedded = 0
        self._read_image = read_image
        self._settings = settings or EmbedSettings()
        self._folder = GalleryFolder(path)
        super().__init__(Gallery.open(path, load_index=False))
        if self.gallery.manifest.shortened:  # so is the new one
            self.embedder = embedder.first(min(self.gallery.dim, embedder.dim))

    @property
    def path(self) -> Path:
        """The folder of the gallery that is replicated."""
        return self._folder.path

    def close(self) -> None:
        """Close the files."""
        super().close()
        self.gallery.close()

    def catch_up(self, made: Gallery, on_progress: Progress | None = None) -> int:
        """Bring the candidate `made` to the present state of the gallery.

        Raises: GalleryBusyError if a build has replaced the gallery; GalleryCorruptError;
            GalleryWriteError; BundleError; InvalidParameterError.
        """
        if self._folder.current_name() != self.gallery.generation:
            raise GalleryBusyError(
                f"The gallery {self.path} was replaced by a build since the start; nothing was "
                "changed. Start again with the new gallery."
            )
        touched = super().catch_up(made, on_progress)
        with self._catalog.reading() as view:
            self.found = view.state().size
            there = view.get([*self.failures])
        self.failures = {number: self.failures[number] for number in there}
        return touched

    def restart(self) -> None:
        """Make the next `catch_up` compare all items, for a candidate without earlier changes."""
        self._seq = -1

    def _take(self, made: Gallery, ids: Ids, on_progress: Progress | None) -> None:
        with self._catalog.reading() as view:
            items = {item.key: item for item in view.get(ids.tolist()).values()}
        records = [
            Record(item.key, item.path, item.attributes, item.sha256, item.format)
            for item in items.values()
        ]
        source = Source(
            self.gallery.image_root,
            lambda: iter(records),
            len(items),
            f"gallery {self.gallery.name}",
            read=lambda record, _: self._read_image(items[record.key]),
        )
        work = Ingest(made, source, self.embedder, None)
        work.run(self._settings, on_progress)
        self.embedded += work.embedded
        for item in items.values():
            self.failures.pop(item.id, None)
        self.failures |= {items[failure.key].id: failure for failure in work.failures}
        made.remove([failure.key for failure in work.failures])  # what it had with earlier images


def numbered(gallery: Gallery) -> Ids:
    """A number for each key of the gallery, ascending; it is the same in each process."""
    return np.sort(np.concatenate([_NO_KEYS, *(numbers for _, numbers in _parts(gallery))]))


def _parts(gallery: Gallery) -> Iterator[tuple[list[str], Ids]]:
    items = gallery.items()
    while keys := [item.key for item in islice(items, _CHUNK)]:
        yield keys, numbers_of(keys)


def numbers_of(keys: Sequence[str]) -> Ids:
    """The number of each key (N,), as of `numbered`."""
    digests = (blake2b(composed(key).encode(), digest_size=8).digest() for key in keys)
    return np.frombuffer(b"".join(digests), np.int64)


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
    manifest = GalleryManifest(
        name=old.name,
        bundle_id=embedder.bundle_id,
        precision=embedder.mode.precision,
        vector_type=old.vector_type,
        dim=embedder.dim,
        shortened=old.manifest.shortened,
        source=old.manifest.source,
        source_root=old.manifest.source_root,
    )
    with contextlib.closing(begun(candidate, manifest)) as made:
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


def begun(path: Path, manifest: GalleryManifest) -> Gallery:
    """The gallery in the folder `path` of an interrupted run, or else a new one as `manifest` has
    it. Raises: GalleryWriteError.
    """
    same = ("bundle_id", "precision", "vector_type", "dim")
    try:
        made = Gallery.open(path, load_index=False)
        if all(getattr(made, name) == getattr(manifest, name) for name in same):
            return made
        made.close()
        discard(path)
    except GalleryNotFoundError:
        pass
    except GalleryCorruptError:
        discard(path)
    own = {*same, "name", "shortened", "source", "source_root"}
    return Gallery.create(path, **manifest.model_dump(include=own))


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

    def replicate(copy: Path, catch_up: Callable[[Gallery], int]) -> int:
        with contextlib.closing(Gallery.open(copy, load_index=False)) as made:
            made.when_full = "grow"
            touched = catch_up(made)
            check_missing(missing_since(follower, known_missing), follower.found, max_missing)
            return touched

    def prepare(copy: Path) -> None:
        stack.enter_context(follower.without_compactions())
        touched = replicate(copy, follower.catch_up_in_rounds)
        if touched > _FEW:
            raise GalleryBusyError(
                f"The gallery {follower.path} changes faster than the new one can catch up: "
                f"{touched:,} items in the last of {_ROUNDS} rounds. Swap it when there are fewer "
                "changes."
            )

    def finish(copy: Path) -> None:
        replicate(copy, follower.catch_up)
        if before_publish is not None:
            before_publish()

    with contextlib.ExitStack() as stack:
        stack.callback(follower.restart)  # its changes went to the copy, not to the candidate
        return adopt(
            follower.path,
            candidate,
            before_lock=prepare,
            under_lock=finish,
            on_progress=on_progress,
        )


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
