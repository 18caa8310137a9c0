"""A gallery on this machine, opened for reading: nothing here changes it."""

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from embedder.errors import ItemNotFoundError
from embedder.types import Embeddings, Hit, ItemId
from indexer import searching
from indexer.catalog import Catalog, CatalogView, StaleReadError
from indexer.compaction import CATALOG, due
from indexer.engine import Entry, Group, Grouping, Ids, Item, Scores, SearchOptions
from indexer.facts import GalleryFacts
from indexer.filters import Schema
from indexer.opening import Opened, opened
from indexer.pictures import ItemImage, item_image
from indexer.ranking import check_options, check_search
from indexer.states import Reading

_PAGE = 1000
_DEFAULTS = SearchOptions()
_TRIES = 8  # a user who may not lock the catalogue finds it changed while reading
_T = TypeVar("_T")


class GalleryReader:
    """One generation of a gallery, searched while others change it. Thread safe.

    Item numbers are never given to another content, so they hold as long as the generation.
    """

    def __init__(self, parts: Opened, image_root: Path | None) -> None:
        self.manifest = parts.manifest
        self._folder = parts.folder
        self._generation = parts.generation
        self._states = parts.states
        self._image_root = image_root or Path(parts.manifest.source_root)
        self._close = weakref.finalize(self, parts.close)

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        expected_bundle_id: str | None = None,
        image_root: Path | None = None,
        device: str = "cpu",
        verify_hashes: bool | None = None,
    ) -> Self:
        """Open the current generation of the gallery in folder `path`.

        `image_root` replaces the recorded folder of the images. Hashes of the segment are checked
        if `verify_hashes`, never if it is False; by default those of small files, since all others
        would take longer than to open. A segment that is damaged is made again from the catalogue,
        if the gallery can be written.

        Raises: GalleryNotFoundError, GalleryCorruptError, BundleMismatchError, ProviderError.
        """
        return cls(opened(path, expected_bundle_id, device, verify_hashes), image_root)

    @property
    def name(self) -> str:
        """The name in addresses."""
        return self.manifest.name

    @property
    def generation(self) -> str:
        """The name of this generation: 12 hex digits that a rebuild changes."""
        return self.manifest.generation

    @property
    def version(self) -> str:
        """sha256 (hex) that changes with every change."""
        with self._reading() as reading:
            return self._version_at(reading.state.seq)

    @property
    def bundle_id(self) -> str:
        """The bundle that made the vectors."""
        return self.manifest.bundle_id

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self.manifest.dim

    @property
    def size(self) -> int:
        """Number of items."""
        with self._reading() as reading:
            return reading.state.size

    @property
    def created_at(self) -> str:
        """When this generation was built: ISO 8601, UTC."""
        return self.manifest.created_at

    @property
    def image_root(self) -> Path:
        """The folder that the images are read from; it may be missing."""
        return self._image_root

    def facts(self) -> GalleryFacts:
        """What is in the gallery now."""
        with self._reading() as reading:
            snapshot, state = reading.snapshot, reading.state
            segment = None if snapshot.segment is None else snapshot.segment.manifest
            known = self.manifest.model_dump(
                include={"name", "bundle_id", "dim", "created_at", "source", "source_root"}
            )
            return GalleryFacts(
                **known,
                version=self._version_at(state.seq),
                generation=self.generation,
                size=state.size,
                delta=snapshot.delta.size,
                tombstones=snapshot.dead_count,
                compaction_due=compaction_due(reading),
                segment=segment,
            )

    def nearest(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> tuple[Scores, Ids]:
        """Scores and item numbers of the best, shape (Q, at most k); number -1 where fewer.

        Without the rows of the items, so `where`, `exact` and `effort` alone of the options count.
        Raises: InvalidParameterError, FilterError.
        """
        options = options or _DEFAULTS
        queries = check_search(k, options, self.dim, queries)
        if options.where is not None:
            return self._read(lambda reading: searching.nearest(reading, queries, k, options))
        snapshot = self._states.newest()
        return snapshot.nearest(queries, k, exact=options.exact, effort=options.effort)

    def search(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> list[list[Hit]]:
        """For each query (Q, D) its `k` best items: best first, equal scores by number.

        Raises: InvalidParameterError, FilterError, GalleryCorruptError.
        """
        options = options or _DEFAULTS
        queries = check_search(k, options, self.dim, queries)
        return self._read(lambda reading: searching.search(reading, queries, k, options))

    def search_groups(
        self,
        queries: Embeddings,
        k: int,
        grouping: Grouping,
        options: SearchOptions | None = None,
    ) -> list[list[Group]]:
        """For each query its `k` best groups, exactly k if there are as many.

        Raises: as `search`.
        """
        options = options or _DEFAULTS
        queries = check_search(k, options, self.dim, queries)
        return self._read(
            lambda reading: searching.search_groups(reading, queries, k, grouping, options)
        )

    def search_like(
        self,
        liked: Sequence[str],
        disliked: Sequence[str],
        k: int,
        options: SearchOptions | None = None,
    ) -> list[Hit]:
        """The `k` items most like the items with keys `liked` and least like `disliked`, without
        these. Raises: ItemNotFoundError, InvalidParameterError, FilterError.
        """
        options = options or _DEFAULTS
        check_options(k, options)
        return self._read(
            lambda reading: searching.search_like(reading, liked, disliked, k, options)
        )

    def schema(self) -> Schema:
        """The attributes that items have had so far, and their kinds."""
        with self._reading() as reading:
            return reading.view.schema()

    def image(self, item_id: ItemId) -> ItemImage:
        """The indexed bytes of an item, read from the image root; BMP and TIFF become JPEG.

        Raises: ItemNotFoundError for an unknown number, or if the file is gone, was changed or lies
            outside the image root; GalleryCorruptError if it cannot be read.
        """
        return item_image(self.image_root, self.item(item_id))

    def item(self, item_id: ItemId) -> Item:
        """What the catalogue knows about an item. Raises: ItemNotFoundError."""
        with self._reading() as reading:
            found = reading.view.get([item_id]) if 0 <= item_id < 2**63 else {}
        if item_id not in found:
            raise ItemNotFoundError(
                f"Gallery {self.name} has no item {item_id}; it may have been removed. Take the "
                "number from the answer of a search."
            )
        return found[item_id]

    def stored(self, keys: Sequence[str]) -> dict[str, Item]:
        """The items with these keys, by key; unknown keys are left out."""
        with self._reading() as reading:
            numbers = reading.view.find(keys)
            items = reading.view.get(list(numbers.values()))
        return {key: items[number] for key, number in numbers.items()}

    def items(self) -> Iterator[Item]:
        """Every item, in the order of its number, of one state."""
        with self._own_view() as view:
            yield from view.items()

    def entries(self, keys: Sequence[str]) -> list[Entry]:
        """Items with their vectors, in the order asked for. Raises: ItemNotFoundError."""
        with self._reading() as reading:
            numbers = searching.numbers_of(reading, keys)
            items = reading.view.get(numbers)
            return _entries([items[n] for n in numbers], reading.view.vectors(numbers))

    def scan(self, batch_size: int = _PAGE) -> Iterator[list[Entry]]:
        """Every item with its vector, in the order of its number, of one state."""
        with self._own_view() as view:
            for ids, vectors in view.iter_vectors(batch_size):
                items = view.get(ids.tolist())
                yield _entries([items[n] for n in ids.tolist()], vectors)

    def vectors(self, ids: Sequence[ItemId]) -> Embeddings:
        """The stored vectors (N, D) of known items."""
        with self._reading() as reading:
            return reading.view.vectors(ids)

    def vectors_of_contents(self, sha256s: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """A stored vector (D,) for each of these contents that some item has."""
        with self._reading() as reading:
            numbers = reading.view.content(sha256s)
            vectors = reading.view.vectors(list(numbers.values()))
        return dict(zip(numbers, vectors, strict=True))

    def close(self) -> None:
        """Let go of the files; the gallery cannot be used afterwards."""
        self._close()

    def _read(self, work: Callable[[Reading], _T]) -> _T:
        """What `work` finds in one state; once more if that was not one, see `_TRIES`."""
        for _ in range(_TRIES):
            try:
                with self._reading() as reading:
                    return work(reading)
            except StaleReadError:
                continue
        with self._reading() as reading:
            return work(reading)

    def _reading(self) -> contextlib.AbstractContextManager[Reading]:
        return self._states.reading()

    @contextlib.contextmanager
    def _own_view(self) -> Iterator[CatalogView]:
        """For generators: they may be left half way, or run while their thread searches."""
        catalog = Catalog.open(self._generation / CATALOG)
        try:
            with catalog.reading() as view:
                yield view
        finally:
            catalog.close()

    def _version_at(self, seq: int) -> str:
        return hashlib.sha256(f"{self.manifest.uid}:{seq}".encode()).hexdigest()


def compaction_due(reading: Reading) -> str | None:
    """Why a compaction is due in this state, or None."""
    snapshot = reading.snapshot
    size = 0 if snapshot.segment is None else len(snapshot.segment.ids)
    return due(size, snapshot.dead_count, len(snapshot.delta.alive))


def _entries(items: Sequence[Item], vectors: Embeddings) -> list[Entry]:
    return [
        Entry(item.key, vector, item.sha256, item.attributes, item.path, item.format)
        for item, vector in zip(items, vectors, strict=True)
    ]
