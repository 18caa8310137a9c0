"""What a gallery contains: items, pages, attributes and vectors, each read at one state."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import InvalidParameterError, ItemNotFoundError
from kinlens.embedder.types import Embeddings, ItemId
from kinlens.indexer.addresses import ImageRoot, image_root_of
from kinlens.indexer.bits import Bits
from kinlens.indexer.catalog.database import Catalog, catalog_view
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.entries import Entry, Item, Schema, as_entries
from kinlens.indexer.filters.text import Where
from kinlens.indexer.filters.tree import check_attribute
from kinlens.indexer.folder.layout import GalleryFolder
from kinlens.indexer.folder.manifest import GalleryManifest
from kinlens.indexer.live.compaction import CATALOG
from kinlens.indexer.live.facets import facts_of
from kinlens.indexer.live.keeper import SnapshotKeeper
from kinlens.indexer.live.search import Searcher
from kinlens.indexer.types import AttributeFacts, Ids, Page, SortBy, no_item, no_key
from kinlens.values import Scalar

_PAGE = 1000
_SPARSE = 10

MAX_SORTED = 10_000
"""Maximum offset + limit of a list of items that is sorted by an attribute."""


class GalleryReader(Searcher):
    """The reading methods of a gallery."""

    def __init__(
        self,
        folder: GalleryFolder,
        generation: Path,
        manifest: GalleryManifest,
        catalog: Catalog,
        snapshots: SnapshotKeeper,
        image_root: ImageRoot | str | None,
    ) -> None:
        super().__init__(snapshots, manifest.dim)
        self.manifest = manifest
        self.generation_folder = generation
        self._folder = folder
        self._catalog = catalog
        self._image_root = image_root_of(image_root or manifest.source_root)

    @property
    def generation(self) -> str:
        return self.manifest.generation

    @property
    def image_root(self) -> ImageRoot:
        return self._image_root

    def schema(self) -> Schema:
        with self._catalog.reading() as view:
            return view.schema()

    def item(self, item_id: ItemId) -> Item:
        with self._catalog.reading() as view:
            found = view.get([item_id]) if 0 <= item_id < 2**63 else {}
        if item_id not in found:
            raise ItemNotFoundError(no_item(item_id))
        return found[item_id]

    def stored(self, keys: Sequence[str]) -> dict[str, Item]:
        with self._catalog.reading() as view:
            return view.by_key(keys)

    def page(
        self,
        offset: int,
        limit: int,
        where: Where | None = None,
        prefix: str = "",
        after: ItemId = -1,
        sort_by: SortBy | None = None,
    ) -> Page:
        if sort_by is not None:
            return self._sorted_page(offset, limit, where, prefix, after, sort_by)
        if where is None and not prefix:
            with self._catalog.reading() as view:
                ids = view.ids_from(offset, limit, after)
                return Page(view.state().size, view.known(ids), view.last_id())
        with self._snapshots.reading() as now:
            among = self._among(now, where, prefix)
            attributes = self._attributes_of(now)
            ids, last = attributes.ids(among, after, offset + limit)
            return Page(attributes.count(among), now.view.known(ids[offset:]), last)

    def _sorted_page(
        self,
        offset: int,
        limit: int,
        where: Where | None,
        prefix: str,
        after: ItemId,
        sort_by: SortBy,
    ) -> Page:
        check_sorted(offset, limit, after)
        with self._snapshots.reading() as now:
            check_attribute(sort_by.attribute, now.view.schema(), "sort by")
            attributes = self._attributes_of(now)
            among = self._among(now, where, prefix) if where or prefix else now.snapshot.live
            ids = attributes.sorted_ids(sort_by, among, offset + limit)[offset:]
            _, last = attributes.ids(among, limit=0)
            return Page(attributes.count(among), now.view.known(ids), last)

    def attribute_facts(self, where: Where | None = None) -> tuple[AttributeFacts, ...]:
        with self._snapshots.reading() as now:
            attributes = self._attributes_of(now)

            def facts(among: Bits | None) -> tuple[AttributeFacts, ...]:
                selected, types = attributes.selected(among), now.view.schema().items()
                return tuple(facts_of(name, type_, attributes, selected) for name, type_ in types)

            if where is not None:
                return facts(self._among(now, where))
            return attributes.remembered("facts", lambda: facts(None))

    def contents(self, sha256s: Sequence[str]) -> set[str]:
        with self._catalog.reading() as view:
            return {*view.vectors_by_content(sha256s)}

    def items(self) -> Iterator[Item]:
        with self._own_view() as view:
            yield from view.items()

    def entries(self, keys: Sequence[str]) -> list[Entry]:
        with self._catalog.reading() as view:
            found = view.by_key(keys)
            for key in keys:
                if key not in found:
                    raise ItemNotFoundError(no_key(key))
            items = [found[key] for key in keys]
            return as_entries(items, view.vectors([item.id for item in items]))

    def scan(self, batch_size: int = _PAGE) -> Iterator[list[Entry]]:
        with self._own_view() as view:
            for ids, vectors in view.iter_vectors(batch_size):
                yield as_entries(view.known(ids), vectors)

    def iter_vectors(self, batch_size: int = _PAGE) -> Iterator[tuple[Ids, Embeddings]]:
        """Batches of ids (N,) and vectors (N, D) of all items of one state, by ascending id."""
        with self._own_view() as view:
            yield from view.iter_vectors(batch_size)

    def ids(self) -> Ids:
        """The ids of all items (N,), ascending."""
        with self._catalog.reading() as view:
            return view.live_ids()

    def items_at(self, ids: Iterable[ItemId]) -> tuple[list[Item], Embeddings]:
        with self._catalog.reading() as view:
            found = view.get(sorted(ids))
            items = [found[item_id] for item_id in sorted(found)]
            return items, view.vectors([item.id for item in items])

    def sample(self, count: int) -> tuple[list[Item], Embeddings]:
        """A random sample of up to `count` items, by ascending id, with their vectors (N, D).

        Small galleries are returned whole. The sample is the same until the gallery changes.
        """
        rng = np.random.default_rng(0)
        with self._catalog.reading() as view:
            size, last = view.state().size, view.last_id() or 0
            if size > count and last < _SPARSE * size:
                # Listing 10 million ids takes seconds, so draw ids and keep those that exist.
                drawn = np.unique(rng.integers(1, last + 1, 2 * count * last // size))
                known = np.array(sorted(view.get(drawn)), np.int64)
            else:
                known = view.live_ids()
            if len(known) > count:
                known = np.sort(rng.choice(known, count, replace=False))
            return view.known(known), view.vectors(known)

    @property
    def last_id(self) -> ItemId:
        """The highest id of an item; 0 without items. New items get higher ids."""
        with self._catalog.reading() as view:
            return view.last_id() or 0

    def counts_after(self, item_id: ItemId) -> tuple[int, int]:
        """The number of items, and of those with higher ids than this one, of one state."""
        with self._catalog.reading() as view:
            return view.state().size, view.count_after(item_id)

    def product_counts(
        self, name: str, values: Sequence[Scalar]
    ) -> tuple[dict[int, int], dict[Scalar, int]]:
        """How many products have how many items, where an attribute identifies the product.

        Returns {number of items: number of values with that many}, and the number of items of each
        of `values` that occurs.
        """
        with self._snapshots.reading() as now:
            spread = self._attributes_of(now).spread(name)
        counts = {value: spread.count(value) for value in values}
        return spread.sizes(), {value: count for value, count in counts.items() if count}

    def counts(self) -> tuple[dict[str, int], int]:
        """The number of items per format, and the number of distinct contents."""
        with self._catalog.reading() as view:
            return view.formats(), view.count_contents()

    def distinct(self, name: str) -> int:
        """Number of distinct values of an attribute."""
        with self._snapshots.reading() as now:
            return self._attributes_of(now).spread(name).different

    def has_more(self, name: str, value: Scalar, than: int) -> bool:
        """Whether more than `than` items have this value of an attribute."""
        with self._snapshots.reading() as now:
            attributes = self._attributes_of(now)
            return attributes.count(attributes.having(name, [value])) > than

    def vectors(self, ids: Sequence[ItemId]) -> Embeddings:
        """The stored vectors (N, D) of known items."""
        with self._catalog.reading() as view:
            return view.vectors(ids)

    def vectors_of_contents(self, sha256s: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        with self._catalog.reading() as view:
            return view.vectors_by_content(sha256s)

    def has_removed(self) -> bool:
        """Whether any removed item can be restored."""
        with self._catalog.reading() as view:
            return view.has_removed()

    def _own_view(self) -> contextlib.AbstractContextManager[CatalogView]:
        """A separate connection for generators, which may end early or overlap with searches."""
        return catalog_view(self.generation_folder / CATALOG)


def check_sorted(offset: int, limit: int, after: ItemId) -> None:
    """Raise InvalidParameterError for a page that cannot be sorted by an attribute."""
    if after >= 0:
        raise InvalidParameterError(
            f"after = {after} requires the order of item ids. Omit after or sort_by."
        )
    if offset + limit > MAX_SORTED:
        raise InvalidParameterError(
            f"offset + limit = {offset + limit:,}; at most {MAX_SORTED:,} items are sorted. "
            "Narrow the list with a filter, or omit sort_by."
        )
