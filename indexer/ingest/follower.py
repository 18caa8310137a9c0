"""Keep a gallery, made by another model, equal to one in use in all but the vectors."""

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedder.errors import GalleryBusyError, GalleryError, ImageError, SourceError
from embedder.session import Embedder
from indexer.catalog.database import Catalog
from indexer.folder.layout import GalleryFolder
from indexer.gallery import Gallery
from indexer.ingest.embed import EmbedSettings
from indexer.ingest.failures import Failure
from indexer.live.compaction import CATALOG
from indexer.types import Entry, Ids, Item, Progress

ReadImage = Callable[[Item], bytes]
"""The picture of an item as it was indexed. Raises: GalleryError, ImageError, OSError."""

_CHUNK = 4096  # items looked at in one state of the catalogue


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
