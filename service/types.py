"""What the service asks of a gallery; `indexer.gallery.Gallery` is one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embedder.types import AttributeValue, Embeddings, Hit, ItemId
from indexer.catalog.attributes import Schema
from indexer.filters.tree import Filter
from indexer.gallery import GalleryFacts
from indexer.index.plan import IndexSettings
from indexer.types import (
    AttributeFacts,
    Entry,
    Group,
    Grouping,
    Item,
    Page,
    Progress,
    SearchOptions,
    Written,
)


class ItemImage(Protocol):
    """The picture of an item as a browser can show it."""

    @property
    def data(self) -> bytes: ...
    @property
    def media_type(self) -> str: ...


class SearchableGallery(Protocol):
    """A searchable set of items that others may change. Thread safe.

    `version` changes with every change, `generation` (12 or more hex digits) with a rebuild. To
    read `version` or `size` may block, since they are looked up on the disk.
    """

    @property
    def version(self) -> str: ...
    @property
    def generation(self) -> str: ...
    @property
    def bundle_id(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def created_at(self) -> str: ...
    @property
    def image_root(self) -> Path: ...

    def search(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> list[list[Hit]]:
        """For each row of `queries` (Q, D) the best `k` hits, best first."""

    def search_groups(
        self,
        queries: Embeddings,
        k: int,
        grouping: Grouping,
        options: SearchOptions | None = None,
    ) -> list[list[Group]]:
        """For each row of `queries` (Q, D) the best `k` groups, best first."""

    def search_like(
        self,
        liked: Sequence[str],
        disliked: Sequence[str],
        k: int,
        options: SearchOptions | None = None,
    ) -> list[Hit]:
        """The `k` items most like `liked` and least like `disliked`, without these."""

    def item(self, item_id: ItemId) -> Item:
        """What is known of an item. Raises: ItemNotFoundError, also for one that was removed."""

    def items(self) -> Iterator[Item]:
        """Every item, in the order of its number, of one state."""

    def stored(self, keys: Sequence[str]) -> dict[str, Item]:
        """The items with these keys, by key; unknown keys are left out."""

    def entries(self, keys: Sequence[str]) -> list[Entry]:
        """Items with their vectors, in the order asked for. Raises: ItemNotFoundError."""

    def image(self, item_id: ItemId) -> ItemImage:
        """The picture of an item. Raises: GalleryError, ItemNotFoundError if there is none."""

    def schema(self) -> Schema:
        """The attributes that items have had so far, and their kinds."""

    def facts(self) -> GalleryFacts:
        """What is in the gallery now."""

    def page(
        self,
        offset: int,
        limit: int,
        where: Filter | None = None,
        prefix: str = "",
        after: ItemId = -1,
    ) -> Page:
        """Some of the items that fit, above the number `after`, in the order of their numbers.

        Raises: FilterError.
        """

    def attribute_facts(self) -> Sequence[AttributeFacts]:
        """The values of each attribute, counted."""

    def held(self, sha256s: Sequence[str]) -> set[str]:
        """Which of these contents some item has."""

    def vectors_of_contents(self, sha256s: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """A stored vector (D,) for each of these contents that some item has."""

    def close(self) -> None:
        """Let go of files and memory."""


class Gallery(SearchableGallery, Protocol):
    """One that can be changed as well; a change is durable when its call returns.

    Each change raises: GalleryBusyError while a build replaces the gallery, GalleryWriteError.
    """

    def add(self, entries: Iterable[Entry], owned: frozenset[str] | None = None) -> Written:
        """Store entries, all or none. Raises: InvalidParameterError."""

    def update(self, changes: Mapping[str, Mapping[str, AttributeValue | None]]) -> int:
        """Change attributes by key; None takes one away. How many items differ now.

        Raises: ItemNotFoundError, InvalidParameterError.
        """

    def remove(self, keys: Iterable[str]) -> int:
        """Remove items by key; unknown keys are left out of the count."""

    def remove_items(self, ids: Iterable[ItemId]) -> int:
        """Remove items by number; unknown numbers are left out of the count."""

    def remove_where(self, where: Filter) -> int:
        """Remove every item that fits. Raises: FilterError."""

    def compact(
        self,
        settings: IndexSettings | None = None,
        *,
        wait: bool = False,
        on_progress: Progress | None = None,
    ) -> object:
        """Make a new segment of all items; searches and changes go on. Raises: PlanError."""
