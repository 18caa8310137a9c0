"""What the service asks of a gallery; `indexer.gallery.Gallery` is one."""

from pathlib import Path
from typing import Protocol

from embedder.types import Embeddings, Hit, ItemId
from indexer.engine import Item, SearchOptions


class ItemImage(Protocol):
    """The picture of an item as a browser can show it."""

    @property
    def data(self) -> bytes: ...
    @property
    def media_type(self) -> str: ...


class Gallery(Protocol):
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

    def item(self, item_id: ItemId) -> Item:
        """What is known of an item. Raises: ItemNotFoundError, also for one that was removed."""

    def image(self, item_id: ItemId) -> ItemImage:
        """The picture of an item. Raises: GalleryError, ItemNotFoundError if there is none."""

    def close(self) -> None:
        """Let go of files and memory."""
