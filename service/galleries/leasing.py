"""What a search asks of whatever knows the galleries."""

from contextlib import AbstractContextManager
from typing import Protocol

from service.galleries.registry import Served


class Leasing(Protocol):
    """Gives out galleries with their models: `service.galleries.registry.Registry`."""

    def lease(self, name: str | None = None) -> AbstractContextManager[Served]:
        """One pair for as long as the block lasts. Raises: GalleryNotFoundError."""

    async def know(self, name: str | None) -> None:
        """Look for a gallery that is unknown so far, once."""
