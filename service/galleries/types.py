"""What the service asks of a gallery; `indexer.gallery.Gallery` is one."""

from typing import Protocol

from embedder.types import ItemId
from indexer.gallery import GalleryFacts
from indexer.types import VectorStore


class ItemImage(Protocol):
    """The picture of an item as a browser can show it."""

    @property
    def data(self) -> bytes: ...
    @property
    def media_type(self) -> str: ...


class Gallery(VectorStore, Protocol):
    """A gallery that is served. To read its `version` or `size` may block, since they are looked
    up on the disk. Each change raises GalleryBusyError while a build replaces the gallery, and
    GalleryWriteError.
    """

    def image(self, item_id: ItemId) -> ItemImage:
        """The picture of an item. Raises: GalleryError, ItemNotFoundError if there is none."""

    def facts(self) -> GalleryFacts:
        """What is in the gallery now."""
