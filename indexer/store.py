"""The interface of a gallery engine: FAISS in a folder, or Milvus."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.types import Embeddings, Hit, ItemId
from kinlens.indexer.addresses import ImageRoot
from kinlens.indexer.entries import Entry, Item, Schema, Written
from kinlens.indexer.filters.text import Where
from kinlens.indexer.filters.tree import Exists
from kinlens.indexer.images import ItemImage, item_image
from kinlens.indexer.types import (
    AttributeFacts,
    Facet,
    Group,
    Grouping,
    Page,
    SearchOptions,
    SortBy,
)
from kinlens.values import AttributeValue


class VectorStore(Protocol):
    """A gallery: unit vectors with keys and typed attributes. It can be changed during searches.

    Every change is durable when the call returns, and later searches of every process see it (on
    Milvus: with the consistency level Strong). All methods are thread safe.

    Engines inherit these docstrings, and write down only what they do differently.

    Every change raises GalleryWriteError and GalleryBusyError, and every method
    GalleryCorruptError; on Milvus, EngineUnavailableError instead.
    """

    @property
    def name(self) -> str:
        """The name of the gallery in URLs."""

    @property
    def dim(self) -> int:
        """Length of a vector."""

    @property
    def size(self) -> int:
        """Number of items."""

    @property
    def bundle_id(self) -> str:
        """The id of the bundle that computed the vectors."""

    @property
    def precision(self) -> str:
        """The model precision that computed the vectors, or several, such as fp32+int8."""

    def admit(self, precision: str) -> None:
        """Record that vectors in `precision` will be added; on Milvus this is not stored."""

    @property
    def generation(self) -> str:
        """12 hex digits that change when the whole gallery is replaced, and with it all ids."""

    @property
    def version(self) -> str:
        """sha256 (hex) that changes with every change; cheap enough for a cache key."""

    @property
    def created_at(self) -> str:
        """When the generation was created: ISO 8601, UTC."""

    @property
    def image_root(self) -> ImageRoot:
        """The folder or address that paths of items are relative to; it may not exist."""

    def add(self, entries: Iterable[Entry], owned: frozenset[str] | None = None) -> Written:
        """Store entries.

        They are stored in one transaction. In a folder, the call waits while the delta is full, or
        is refused; its own entries are not counted, and a request over HTTP has at most 256.

        An entry with the key, sha256 and vector of an item updates its attributes. An entry with
        another sha256 or vector replaces the item, which gets a new id. So does, in a folder, an
        entry with the image of an item that had none.

        owned: stored attributes that an entry does not give are removed only if they have one of
            these names; None removes all.

        Raises: InvalidParameterError for a wrong dimension, a vector that is not finite or not of
            unit norm, a repeated key, an attribute of another type than before. Then nothing was
            written.
        """

    def update(self, changes: Mapping[str, Mapping[str, AttributeValue | None]]) -> int:
        """Change attributes by key; None removes one. Returns the number of changed items.

        Raises: ItemNotFoundError for an unknown key, and then nothing was changed;
            InvalidParameterError for a value of another type than the attribute has.
        """

    def update_where(self, where: Where, change: Mapping[str, AttributeValue | None]) -> int:
        """Change attributes of every item that matches; None removes one. Returns the number of
        changed items. After an error, the same call continues with the rest.

        Raises: FilterError; InvalidParameterError for a value of another type than the attribute
            has.
        """

    def remove(self, keys: Iterable[str]) -> int:
        """Remove items by key; returns the number. Unknown keys are not counted.

        Raises: InvalidParameterError if the keys are not a list of texts.
        """

    def remove_items(self, ids: Iterable[ItemId]) -> int:
        """Remove items by id; returns the number. Unknown ids are not counted."""

    def remove_where(self, where: Where) -> int:
        """Remove every item that matches; returns the number. After an error, the same call removes
        the rest. Raises: FilterError.
        """

    def schema(self) -> Schema:
        """The attributes that items have had so far, and their types."""

    def has_attribute(self, name: str) -> bool:
        """Whether an item has a known attribute. The type of others may change."""
        return self.page(0, 1, Exists(name)).total > 0

    def attribute_facts(self, where: Where | None = None) -> Sequence[AttributeFacts]:
        """The value counts of each attribute, of items that match. Raises: FilterError."""

    def item(self, item_id: ItemId) -> Item:
        """The stored item with this id. Raises: ItemNotFoundError."""

    def image(self, item_id: ItemId) -> ItemImage:
        """The indexed image of an item, read from the image root; BMP, TIFF and HEIC become JPEG.

        Raises: ItemNotFoundError for an unknown id, or if the file is missing, was changed or is
            outside the image root; GalleryCorruptError if it cannot be read.
        """
        return item_image(self.image_root, self.item(item_id))

    def items_at(self, ids: Iterable[ItemId]) -> tuple[list[Item], Embeddings]:
        """The items with these ids, by ascending id, and their vectors (N, D); unknown omitted."""

    def stored(self, keys: Sequence[str]) -> dict[str, Item]:
        """The items with these keys, by key; unknown keys are omitted."""

    def contents(self, sha256s: Sequence[str]) -> set[str]:
        """The given contents that some item has."""

    def vectors_of_contents(self, sha256s: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """A stored vector (D,) for each of these contents that some item has."""

    def page(
        self,
        offset: int,
        limit: int,
        where: Where | None = None,
        prefix: str = "",
        after: ItemId = -1,
        sort_by: SortBy | None = None,
    ) -> Page:
        """Up to `limit` items from index `offset` on, in the order of their ids or of `sort_by`.

        where, prefix: only items that match the filter and whose keys start with `prefix`.
        after: only items with higher ids; `total` and `last` of the page ignore it.

        Raises: FilterError; InvalidParameterError for `sort_by` with `after` or beyond 10,000
            items; on Milvus, if more than 10,000 match.
        """

    def items(self) -> Iterator[Item]:
        """Every item, by ascending id; a local gallery returns one consistent state."""

    def entries(self, keys: Sequence[str]) -> list[Entry]:
        """Items with their vectors, in the order of `keys`. Raises: ItemNotFoundError."""

    def scan(self, batch_size: int = 1000) -> Iterator[list[Entry]]:
        """Batches of every item with its vector, by ascending id, of one state as in `items`."""

    def search(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> list[list[Hit]]:
        """The `k` best items for each query (Q, D), best first, ties by id.

        Raises: InvalidParameterError, FilterError.
        """

    def search_groups(
        self, queries: Embeddings, k: int, grouping: Grouping, options: SearchOptions | None = None
    ) -> list[list[Group]]:
        """The `k` best groups for each query (Q, D), best first; fewer only if fewer exist.

        Raises: InvalidParameterError, FilterError.
        """

    def facets(
        self,
        names: Sequence[str],
        query: Embeddings | None = None,
        options: SearchOptions | None = None,
        prefix: str = "",
    ) -> dict[str, Facet]:
        """The value counts of these attributes over the selected items.

        An item is selected if it matches `options.where`, its key starts with `prefix` and it is
        not in `options.exclude`. With `options.min_score`, its score for at least one of the
        queries (Q, D) must also be that high: up to 1,000 such items are found by the index, more
        by comparing every item, as with `exact`. `distinct`, `offset` and the order are ignored.

        Raises: InvalidParameterError for more than 8 attributes, and on Milvus for more than 10,000
            items; FilterError for an unknown attribute.
        """

    def close(self) -> None:
        """Release files, memory and connections. The gallery cannot be used afterwards."""
