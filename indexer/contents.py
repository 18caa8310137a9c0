"""What a gallery holds, read from its catalogue: items, their vectors, attributes and contents."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embedder.errors import ItemNotFoundError
from embedder.types import Embeddings, ItemId
from indexer.catalog.attributes import Schema
from indexer.catalog.database import Catalog
from indexer.catalog.read import CatalogView
from indexer.filters.tree import Filter
from indexer.folder.layout import GalleryFolder
from indexer.live import search as searching
from indexer.live.compaction import CATALOG
from indexer.live.state import Reading
from indexer.opening import Opened
from indexer.types import AttributeFacts, Entry, Ids, Item

_PAGE = 1000


class Page(NamedTuple):
    """Some of `total` items, the highest number of which is `last`; None if there are none."""

    total: int
    items: list[Item]
    last: ItemId | None


class GalleryContents:
    """The items of one generation, read while others change them. Thread safe."""

    def __init__(self, parts: Opened) -> None:
        self.manifest = parts.manifest
        self._generation = parts.generation
        self._states = parts.states
        self._facts: tuple[int, tuple[AttributeFacts, ...]] = (-1, ())

    def schema(self) -> Schema:
        """The attributes that items have had so far, and their kinds."""
        with self._reading() as reading:
            return reading.view.schema()

    def item(self, item_id: ItemId) -> Item:
        """What the catalogue knows about an item. Raises: ItemNotFoundError."""
        with self._reading() as reading:
            found = reading.view.get([item_id]) if 0 <= item_id < 2**63 else {}
        if item_id not in found:
            raise ItemNotFoundError(
                f"Gallery {self.manifest.name} has no item {item_id}; it may have been removed. "
                "Take the number from the answer of a search."
            )
        return found[item_id]

    def stored(self, keys: Sequence[str]) -> dict[str, Item]:
        """The items with these keys, by key; unknown keys are left out."""
        with self._reading() as reading:
            numbers = reading.view.find(keys)
            items = reading.view.get(list(numbers.values()))
        return {key: items[number] for key, number in numbers.items()}

    def page(
        self,
        offset: int,
        limit: int,
        where: Filter | None = None,
        prefix: str = "",
        after: ItemId = -1,
    ) -> Page:
        """Items from place `offset` on, at most `limit`, of those that fit `where`, whose keys
        begin with `prefix` and whose numbers are above `after`; in the order of their numbers.
        `total` and `last` are of all that fit, whatever their numbers. Raises: FilterError.
        """
        with self._reading() as reading:
            return _page(reading, offset, limit, where, prefix, after)

    def attribute_facts(self) -> tuple[AttributeFacts, ...]:
        """The values of each attribute, counted; remembered until the gallery changes."""
        with self._reading() as reading:
            seq, facts = self._facts
            if seq != reading.state.seq:
                seq, facts = reading.state.seq, reading.view.attribute_facts()
                self._facts = (seq, facts)
            return facts

    def held(self, sha256s: Sequence[str]) -> set[str]:
        """Which of these contents some item has."""
        with self._reading() as reading:
            return set(reading.view.content(sha256s))

    def items(self) -> Iterator[Item]:
        """Every item, in the order of its number, of one state."""
        with self._own_view() as view:
            yield from view.items()

    def entries(self, keys: Sequence[str]) -> list[Entry]:
        """Items with their vectors, in the order asked for. Raises: ItemNotFoundError."""
        with self._reading() as reading:
            numbers = searching.numbers_of(reading, keys)
            return _entries(reading.view.known(numbers), reading.view.vectors(numbers))

    def scan(self, batch_size: int = _PAGE) -> Iterator[list[Entry]]:
        """Every item with its vector, in the order of its number, of one state."""
        with self._own_view() as view:
            for ids, vectors in view.iter_vectors(batch_size):
                yield _entries(view.known(ids), vectors)

    def ids(self) -> Ids:
        """The numbers of all items (N,), ascending."""
        with self._reading() as reading:
            return reading.view.live_ids()

    def items_at(self, ids: Iterable[ItemId]) -> tuple[list[Item], Embeddings]:
        """Those of the items that are there, by ascending number, and their vectors (N, D)."""
        with self._reading() as reading:
            found = reading.view.get(sorted(ids))
            items = [found[number] for number in sorted(found)]
            return items, reading.view.vectors([item.id for item in items])

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


def _page(
    reading: Reading, offset: int, limit: int, where: Filter | None, prefix: str, after: ItemId
) -> Page:
    view = reading.view
    if where is None and not prefix:
        ids, total, last = view.ids_from(offset, limit, after), reading.state.size, view.last_id()
    else:
        found = view.with_prefix(prefix) if prefix else None
        if where is not None:
            fitting = view.matching(where)
            found = fitting if found is None else np.intersect1d(found, fitting, True)
        assert found is not None
        first = int(np.searchsorted(found, after, "right")) + offset
        ids, total = found[first : first + limit], len(found)
        last = int(found[-1]) if total else None
    return Page(total, view.known(ids), last)


def _entries(items: Sequence[Item], vectors: Embeddings) -> list[Entry]:
    return [
        Entry(item.key, vector, item.sha256, item.attributes, item.path, item.format)
        for item, vector in zip(items, vectors, strict=True)
    ]


def contents_held(folder: Path | str, sha256s: Sequence[str]) -> set[str]:
    """Which of these contents the gallery in `folder` has now; its index is not opened.

    Raises: GalleryNotFoundError, GalleryCorruptError.
    """
    catalog = Catalog.open(GalleryFolder(folder).current() / CATALOG)
    try:
        with catalog.reading() as view:
            return set(view.content(sha256s))
    finally:
        catalog.close()
