"""Rebuild: a gallery made again with another model, beside the old one, which stays in use."""

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from embedder.errors import GalleryBusyError, GalleryError, ImageError, SourceError
from embedder.session import Embedder
from indexer.catalog.database import Catalog
from indexer.folder.backup import backup
from indexer.folder.durable import sync_tree
from indexer.folder.layout import GalleryFolder, disk_errors_explained
from indexer.folder.manifest import SHORT, GalleryManifest, read_manifest, write_manifest
from indexer.gallery import Gallery
from indexer.index.plan import IndexSettings
from indexer.ingest.embed import EmbedSettings, Failure
from indexer.live.compaction import CATALOG
from indexer.types import Entry, Ids, Item, Progress

CatchUp = Callable[[Path], None]
"""Bring the gallery in this folder up to the one that it will replace."""

ReadImage = Callable[[Item], bytes]
"""The picture of an item as it was indexed. Raises: GalleryError, ImageError, OSError."""

_CHUNK = 4096  # items looked at in one state of the catalogue

_ROUNDS = 8  # of changes that came while the last ones were repeated
_SHOWN = 100


def adopt(
    target: Path | str,
    source: Path | str,
    expected_version: str | None = None,
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

    Raises: GalleryNotFoundError, GalleryCorruptError; GalleryBusyError if the target is not, or no
        longer, at `expected_version`, or a build runs; GalleryWriteError; what `catch_up` raises.
    """
    folder = GalleryFolder(target)
    with contextlib.ExitStack() as held:
        current = Gallery.open(folder.path, verify_hashes=False)
        held.callback(current.close)
        _refuse_other(folder, current, expected_version)
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
            _refuse_other(folder, current, expected_version)
            if catch_up is not None:
                catch_up(copy)
            folder.publish(made, manifest.generation)
    return manifest


def _refuse_other(folder: GalleryFolder, current: Gallery, expected_version: str | None) -> None:
    if folder.current_name() != current.generation:
        raise GalleryBusyError(
            f"The gallery {folder.path} was replaced by a build meanwhile; nothing was changed. "
            "Start again from what it is now."
        )
    if expected_version is None:
        return
    version = current.version
    if version != expected_version:
        raise GalleryBusyError(
            f"The gallery {folder.path} is at version {version[:SHORT]}, not at "
            f"{expected_version[:SHORT]}: it was changed meanwhile. Start again from what it is "
            "now."
        )


@dataclass(slots=True)
class Batch:
    """What became of some items: entries to store, and pictures that cannot be used."""

    entries: list[Entry] = field(default_factory=list)
    failures: dict[int, Failure] = field(default_factory=dict)
    embedded: int = 0


class Follower:
    """Reads the gallery in folder `path` and repeats its changes in another; one thread uses it.

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
        self._keys: dict[int, str] = {}
        self._folder = GalleryFolder(path)
        self.gallery = Gallery.open(path, verify_hashes=False)
        self._catalog = Catalog.open(self._folder.current() / CATALOG)

    @property
    def path(self) -> Path:
        """The folder of the gallery that is followed."""
        return self._folder.path

    @property
    def found(self) -> int:
        """Items of the gallery when it was last looked at."""
        return len(self._keys)

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
        is_first = self._seq < 0
        with self._catalog.reading() as view:
            seq, live = view.state().seq, view.live_ids()
            changed = [] if is_first else [number for number, _ in view.attributes_since(self._seq)]
        known = np.fromiter(self._keys, np.int64, len(self._keys))
        fresh = np.union1d(np.setdiff1d(live, known), np.array(changed, np.int64))
        gone = np.setdiff1d(known, live).tolist()
        gone_keys = {self._forget(number) for number in gone}
        for start in range(0, len(fresh), _CHUNK):
            self._take(candidate, fresh[start : start + _CHUNK], on_progress)
        if is_first:
            gone_keys |= {item.key for item in candidate.items()}
        # A key may have a new item by now. One that failed keeps nothing of the old item.
        lost = gone_keys - self._held_keys() if gone_keys or self.failures else set()
        lost |= {failure.key for failure in self.failures.values()}
        if lost:
            candidate.remove(sorted(lost))
        self._seq = seq
        return len(fresh) + len(gone)

    def _held_keys(self) -> set[str]:
        return set(self._keys.values())

    def _forget(self, number: int) -> str:
        self.failures.pop(number, None)
        return self._keys.pop(number)

    def _take(self, candidate: Gallery, ids: Ids, on_progress: Progress | None) -> None:
        with self._catalog.reading() as view:
            items = [*view.get(ids.tolist()).values()]
        stored = candidate.stored([item.key for item in items])
        changed = [item for item in items if not _is_same(item, stored.get(item.key))]
        for item in items:
            self._keys[item.id] = item.key
            self.failures.pop(item.id, None)
        if on_progress is not None and len(items) > len(changed):
            on_progress(len(items) - len(changed))
        for taken, batch in self._batches(candidate, changed):
            self.failures |= batch.failures
            self.embedded += batch.embedded
            candidate.add(batch.entries)
            if on_progress is not None:
                on_progress(taken)

    def _batches(self, candidate: Gallery, items: Sequence[Item]) -> Iterator[tuple[int, Batch]]:
        """Batches in order, made by threads, a bounded number ahead; each with its item count."""
        workers, size = self._settings.worker_count, self._settings.batch_size
        pool = ThreadPoolExecutor(workers, thread_name_prefix="rebuild")
        pending: deque[tuple[int, Future[Batch]]] = deque()
        with contextlib.ExitStack() as held:
            held.callback(pool.shutdown, cancel_futures=True)
            for start in range(0, len(items), size):
                part = items[start : start + size]
                pending.append((len(part), pool.submit(self._batch, candidate, part)))
                if len(pending) > 2 * workers:
                    count, made = pending.popleft()
                    yield count, made.result()
            while pending:
                count, made = pending.popleft()
                yield count, made.result()

    def _batch(self, candidate: Gallery, items: Sequence[Item]) -> Batch:
        batch = Batch()
        vectors = candidate.vectors_of_contents(sorted({item.sha256 for item in items}))
        tensors: dict[str, NDArray[np.uint8]] = {}
        for item in items:
            if item.sha256 in vectors or item.sha256 in tensors:
                continue
            try:
                tensors[item.sha256] = self._tensor(item)
            except (ImageError, GalleryError, OSError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                batch.failures[item.id] = Failure(key=item.key, path=item.path, reason=reason)
        if tensors:
            made = self.embedder.embed(np.stack([*tensors.values()]))
            vectors |= dict(zip(tensors, made, strict=True))
            batch.embedded = len(tensors)
        batch.entries = [_entry(i, vectors[i.sha256]) for i in items if i.sha256 in vectors]
        for item in items:  # a copy of a picture that another item still has is no failure
            if item.sha256 in vectors:
                batch.failures.pop(item.id, None)
        return batch

    def _tensor(self, item: Item) -> NDArray[np.uint8]:
        data = self._read_image(item)
        if hashlib.sha256(data).hexdigest() != item.sha256:
            raise SourceError("The picture was changed after it was indexed. Add it again.")
        return self.embedder.preprocess(data)


def _is_same(item: Item, other: Item | None) -> bool:
    """Whether both say the same; True is not taken for 1."""
    return other is not None and _facts(item) == _facts(other)


def _facts(item: Item) -> tuple[object, ...]:
    values = {name: (isinstance(v, bool), v) for name, v in item.attributes.items()}
    return item.sha256, item.path, item.format, values


def _entry(item: Item, vector: NDArray[np.float32]) -> Entry:
    return Entry(item.key, vector, item.sha256, item.attributes, item.path, item.format)


class RebuildReport(BaseModel):
    """How a rebuild went: `items` of the `found` are in the new gallery, `missing` are not.

    `failures` names the first 100 of the missing, with the reasons.
    """

    model_config = ConfigDict(frozen=True)

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
    """Make the gallery that `follower` reads again in the new folder `candidate`, with its model.

    Items whose pictures cannot be read are left out, up to the part `max_missing` of all. The
    kind of index and its target stay as they are. `on_progress` counts items, `on_indexed` items
    of the index.

    Raises: SourceError for more missing pictures; PlanError, RecallError; GalleryBusyError if a
        build replaces the gallery; GalleryWriteError; BundleError.
    """
    started = perf_counter()
    old, embedder = follower.gallery, follower.embedder
    made = Gallery.create(
        candidate,
        name=old.name,
        bundle_id=embedder.bundle_id,
        dim=embedder.dim,
        source=old.manifest.source,
        source_root=old.manifest.source_root,
    )
    try:
        follower.catch_up(made, on_progress)
        check_missing(follower.failures.values(), follower.found, max_missing)
        segment = old.facts().segment
        settings = IndexSettings() if segment is None else segment.settings
        made.compact(settings, wait=True, on_progress=on_indexed)
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
    finally:
        made.close()


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
        made = Gallery.open(copy, verify_hashes=False)
        try:
            _catch_up(follower, made, rounds=_ROUNDS if calls == 1 else 1)
            check_missing(missing_since(follower, known_missing), follower.found, max_missing)
        finally:
            made.close()
        if calls > 1 and before_publish is not None:
            before_publish()

    return adopt(follower.path, candidate, catch_up=catch_up, on_progress=on_progress)


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
