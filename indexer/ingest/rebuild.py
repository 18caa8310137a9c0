"""Rebuild: a gallery made again with another model, beside the old one, which stays in use."""

import contextlib
from collections.abc import Callable, Iterable, Set
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
from kinlens.indexer.live.backup import backup
from kinlens.indexer.live.compaction import CATALOG
from kinlens.indexer.types import Ids, Item, Progress

CatchUp = Callable[[Path], None]
"""Bring the gallery in this folder up to the one that it will replace."""

ReadImage = Callable[[Item | Record], bytes]
"""The picture of an item as it was indexed. Raises: GalleryError, ImageError, OSError."""

_CHUNK = 4096  # items looked at in one state of the catalogue
_NO_IDS: Ids = np.empty(0, np.int64)

_ROUNDS = 8  # of changes that came while the last ones were repeated
_SHOWN = 100


def adopt(
    target: Path | str,
    source: Path | str,
    *,
    image_root: Path | str | None = None,
    catch_up: CatchUp | None = None,
    on_progress: Progress | None = None,
) -> GalleryManifest:
    """Make the state of gallery `source` the current generation of gallery `target`.

    The target keeps its name and, unless another `image_root` is given, its image root; the source
    stays as it is. Everything is copied while both are in use. `catch_up` may then bring the copy
    up to what the target has become: it is called once while the target is in use, and once more
    while nobody can change it. A kill at any moment leaves the old generation or the new one.
    Progress counts bytes.

    Raises: GalleryNotFoundError, GalleryCorruptError; GalleryBusyError if a build runs or has
        replaced the target meanwhile; GalleryWriteError; what `catch_up` raises.
    """
    folder = GalleryFolder(target)
    with contextlib.ExitStack() as held:
        current = Gallery.open(folder.path, load_index=False)
        held.callback(current.close)
        _refuse_other(folder, current)
        held.enter_context(disk_errors_explained(folder.path))
        stage = held.enter_context(folder.aside())
        copy = stage / "copy"
        backup(source, copy, on_progress)
        made = GalleryFolder(copy).current()
        root = current.manifest.source_root if image_root is None else str(image_root)
        manifest = read_manifest(made).model_copy(
            update={"name": current.name, "source_root": root}
        )
        write_manifest(made, manifest)
        if catch_up is not None:
            catch_up(copy)
        sync_tree(made, "adopt")
        with folder.locked():
            _refuse_other(folder, current)
            if catch_up is not None:
                catch_up(copy)
            folder.publish(made, manifest.generation)
    return manifest


def _refuse_other(folder: GalleryFolder, current: Gallery) -> None:
    if folder.current_name() != current.generation:
        raise GalleryBusyError(
            f"The gallery {folder.path} was replaced by a build meanwhile; nothing was changed. "
            "Start again from what it is now."
        )


class Follower:
    """Repeats what the gallery in folder `path` holds, and its changes, in another; one thread
    uses it. It keeps 16 bytes an item.

    `failures` are the items whose pictures cannot be read, by number; `embedded` counts pictures
    that went through the model.
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
        # The numbers of items of the gallery, ascending, and those of the same items in the other.
        self._ids, self._copies = _NO_IDS, _NO_IDS
        self._folder = GalleryFolder(path)
        self.gallery = Gallery.open(path, load_index=False)
        self._catalog = Catalog.open(self._folder.current() / CATALOG)

    @property
    def path(self) -> Path:
        """The folder of the gallery that is followed."""
        return self._folder.path

    @property
    def found(self) -> int:
        """Items of the gallery when it was last looked at."""
        return len(self._ids) + len(self.failures)

    def close(self) -> None:
        """Let go of the files."""
        self._catalog.close()
        self.gallery.close()

    def catch_up(self, candidate: Gallery, on_progress: Progress | None = None) -> int:
        """Make `candidate` what the gallery is now; how many items were touched.

        Raises: GalleryBusyError if a build has replaced the gallery; GalleryCorruptError;
            GalleryWriteError; BundleError; InvalidParameterError.
        """
        if self._folder.current_name() != self.gallery.generation:
            raise GalleryBusyError(
                f"The gallery {self.path} was replaced by a build since this began; nothing was "
                "changed. Start again from what it is now."
            )
        since, self._seq = self._seq, -1  # until this round is over
        is_first = since < 0
        if is_first:  # also after one that was cut short
            self._ids, self._copies, self.failures = _NO_IDS, _NO_IDS, {}
        with self._catalog.reading() as view:
            seq, live = view.state().seq, view.live_ids()
            changed = _NO_IDS if is_first else view.changed_since(since)
        before = np.union1d(self._ids, np.array([*self.failures], np.int64))
        gone = np.setdiff1d(before, live)
        fresh = np.union1d(np.setdiff1d(live, before), changed)
        old = candidate.ids() if is_first else self._forget(np.union1d(gone, fresh))
        pairs = [np.column_stack([self._ids, self._copies])]
        for start in range(0, len(fresh), _CHUNK):
            some = fresh[start : start + _CHUNK]
            pairs += [self._take(candidate, some, on_progress)]
        both = np.concatenate(pairs)
        self._ids, self._copies = both[np.argsort(both[:, 0])].T
        # What an item was before may be what another one is now.
        remove_in_parts(candidate, np.setdiff1d(old, self._copies))
        self._seq = seq
        return len(fresh) + len(gone)

    def begin_anew(self) -> None:
        """The next `catch_up` looks at everything: of a copy that lacks what was repeated."""
        self._seq = -1

    def _forget(self, gone: Ids) -> Ids:
        """The numbers that these items had in the other gallery."""
        for number in gone.tolist():
            self.failures.pop(number, None)
        is_gone = np.isin(self._ids, gone)
        copies = self._copies[is_gone]
        self._ids, self._copies = self._ids[~is_gone], self._copies[~is_gone]
        return copies

    def _take(
        self, candidate: Gallery, ids: Ids, on_progress: Progress | None
    ) -> NDArray[np.int64]:
        """The numbers (N, 2) of those of the items that are in both galleries now."""
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
    """How a rebuild went: `items` of the `found` are in the new gallery, `missing` are not.

    `failures` names the first 100 of the missing, with the reasons.
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
    follower: Follower,
    candidate: Path,
    *,
    max_missing: float = 0.0,
    on_progress: Progress | None = None,
    on_indexed: Progress | None = None,
) -> RebuildReport:
    """Make the gallery that `follower` reads again in the folder `candidate`, with its model.

    One that was stopped continues with the same call.

    Items whose pictures cannot be read are left out, up to the part `max_missing` of all. The
    kind of index and its target stay as they are. `on_progress` counts items, `on_indexed` items
    of the index.

    Raises: SourceError for more missing pictures; PlanError, RecallError; GalleryBusyError if a
        build replaces the gallery; GalleryWriteError; BundleError.
    """
    started = perf_counter()
    old, embedder = follower.gallery, follower.embedder
    with contextlib.closing(_candidate(candidate, old, embedder)) as made:
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
    """What a rebuild that was stopped has made, or a new gallery."""
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
    follower: Follower,
    candidate: Path,
    *,
    max_missing: float = 0.0,
    known_missing: Set[int] = frozenset(),
    on_progress: Progress | None = None,
    before_publish: Callable[[], None] | None = None,
) -> GalleryManifest:
    """Put `candidate` in the place of the gallery that `follower` reads.

    What changed meanwhile is repeated in rounds until a round finds nothing more; the rest, while
    nobody can change the gallery. So the new generation holds every change that was acknowledged.
    Items whose pictures cannot be read are left out, up to the part `max_missing` of all; the
    numbers `known_missing` are not counted: somebody has decided that these may be left out.
    The candidate stays as it is. Progress counts bytes. `before_publish` is called at the last
    moment at which nothing has changed; if it raises, nothing will.

    Raises: SourceError for too many missing pictures; GalleryBusyError if the changes never end,
        or a build runs; what `adopt` raises.
    """
    calls = 0

    def catch_up(copy: Path) -> None:
        nonlocal calls
        calls += 1
        with contextlib.closing(Gallery.open(copy, load_index=False)) as made:
            _catch_up(follower, made, rounds=_ROUNDS if calls == 1 else 1)
            check_missing(missing_since(follower, known_missing), follower.found, max_missing)
        if calls > 1 and before_publish is not None:
            before_publish()

    try:
        return adopt(follower.path, candidate, catch_up=catch_up, on_progress=on_progress)
    finally:
        follower.begin_anew()  # the candidate itself is as it was


def missing_since(follower: Follower, known: Set[int]) -> list[Failure]:
    """The items that are missing now, without those with the numbers `known`."""
    return [failure for number, failure in follower.failures.items() if number not in known]


def check_missing(failures: Iterable[Failure], found: int, max_missing: float) -> None:
    """Raises: SourceError if more than the part `max_missing` of `found` items is missing."""
    missing = list(failures)
    if len(missing) <= max_missing * found:
        return
    first = missing[0]
    raise SourceError(
        f"The pictures of {len(missing):,} of {found:,} items cannot be read, allowed are "
        f"{max_missing:.1%}; the first is {first.key!r}: {first.reason} Put the pictures back, "
        "remove these items, or rebuild with a greater max_missing."
    )


def _catch_up(follower: Follower, made: Gallery, rounds: int) -> None:
    few = 64
    touched = 0
    for _ in range(rounds):
        touched = follower.catch_up(made)
        if not touched:
            return
    if rounds > 1 and touched > few:
        raise GalleryBusyError(
            f"The gallery {follower.path} changes faster than the new one can follow: "
            f"{touched:,} items in the last of {rounds} rounds. Swap it when fewer changes come."
        )
