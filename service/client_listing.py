"""The items of a gallery read page by page, while others change it."""

from collections.abc import Mapping, Sequence
from typing import Any

from service.client_call import Call, address, json_text, model
from service.client_errors import AnswerError, GalleryReplacedError
from service.schemas.galleries import ItemModel, ItemPage

Filter = str | Mapping[str, Any]

PAGE = 200
"""Items of a page; the most that the service gives."""


class Listing:
    """How far the items have been read: up to the number `after`, until `ended`.

    Numbers only grow, and a replaced item gets a new one. What comes above the last number of the
    first page's answer was put meanwhile: it is left out, or a caller that replaces each item
    would never come to an end.
    """

    def __init__(self, gallery: str) -> None:
        self.after: int | None = None
        self.ended = False
        self._gallery = gallery
        self._last: int | None = None
        self._generation: str | None = None

    def take(self, page: ItemPage) -> Sequence[ItemModel]:
        """The items of the next page. Raises: GalleryReplacedError, AnswerError."""
        self._check(page)
        if self.after is None:
            self._last, self._generation = page.last, page.generation
        last = self._last
        found = [item for item in page.items if last is None or item.id <= last]
        self.ended = len(found) < PAGE or found[-1].id == last
        self.after = found[-1].id if found else self.after
        return found

    def _check(self, page: ItemPage) -> None:
        if self.after is None:
            return
        if page.generation != self._generation:
            raise GalleryReplacedError(
                f"Gallery {self._gallery} was built again while its items were read, and their "
                "numbers are others now. Read them again."
            )
        if page.items and page.items[0].id <= self.after:
            raise AnswerError(
                f"The items after {self.after} begin with {page.items[0].id}. Do the service and "
                "this client have the same version?"
            )


def list_items(
    gallery: str,
    offset: int,
    limit: int,
    after: int | None,
    where: Filter | None,
    key_prefix: str,
) -> Call[ItemPage]:
    """A page of items. Raises: ArgumentError."""
    query = {
        "offset": offset,
        "limit": limit,
        "after": after,
        "filter": json_text(where) if isinstance(where, Mapping) else where,
        "key_prefix": key_prefix,
    }
    return Call("GET", address("galleries", gallery, "items"), model(ItemPage), query=query)
