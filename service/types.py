"""What the service asks of a gallery; `indexer.gallery.Gallery` is one."""

from pathlib import Path
from typing import Protocol

from embedder.types import Embeddings, Hit, ItemId


class ItemImage(Protocol):
    """The picture of an item as a browser can show it."""

    @property
    def data(self) -> bytes: ...
    @property
    def media_type(self) -> str: ...


class Gallery(Protocol):
    """A searchable, immutable set of items. Thread safe."""

    @property
    def version(self) -> str: ...
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
        self, queries: Embeddings, k: int, min_score: float | None = None
    ) -> list[list[Hit]]:
        """For each row of `queries` (Q, D) the best `k` hits, best first."""

    def image(self, item_id: ItemId) -> ItemImage:
        """The picture of an item. Raises: GalleryError, ItemNotFoundError if there is none."""

    def close(self) -> None:
        """Let go of files and memory."""
