"""What the routes of galleries, items and pictures have in common."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

from embedder import errors
from indexer.filters.json import filter_from_json
from indexer.filters.text import parse_filter
from indexer.filters.tree import Filter
from indexer.types import Item
from service.api.gallery_models import ItemModel
from service.galleries.types import Gallery
from service.galleries.versions import VERSION_DIGITS
from service.http.bodies import parse_json
from service.problems import KINDS
from service.runtime import Runtime

T = TypeVar("T")

MAX_ID = 2**63 - 1
LOOK_FAILURES = (
    KINDS[errors.OverloadedError],
    KINDS[errors.DeadlineExceededError],
    KINDS[errors.GalleryError],
)
FAILURES = (
    KINDS[errors.GalleryNotFoundError],
    KINDS[errors.InvalidParameterError],
    *LOOK_FAILURES,
)


async def look(runtime: Runtime, what: str, work: Callable[[], T]) -> T:
    """Read something from the disk, in a thread. Raises: DeadlineExceededError, OverloadedError."""
    limit_s = runtime.settings.request_timeout_ms / 1e3
    try:
        async with asyncio.timeout(limit_s):
            return await runtime.pools["file"].run(work)
    except TimeoutError as error:
        raise errors.DeadlineExceededError(
            f"Reading {what} took longer than {limit_s:g} s, which is the limit. "
            "Try again in a second."
        ) from error


def where_of(value: str | dict[str, Any] | None) -> Filter | None:
    """A filter in its text form, or as JSON, also written as text. Raises: FilterError."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        if not value.lstrip().startswith("{"):
            return parse_filter(value)
        try:
            value = parse_json(value.encode(errors="surrogatepass"))
        except (ValueError, errors.InvalidParameterError) as error:
            raise errors.FilterError(
                f"The filter is not valid JSON: {error}. Write it as "
                '{"colour": "red"}, or as text: colour = "red".'
            ) from error
    return filter_from_json(value)


def item_model(name: str, gallery: Gallery, item: Item) -> ItemModel:
    """An item of the gallery `name` as JSON."""
    return ItemModel(
        id=item.id,
        key=item.key,
        attributes=dict(item.attributes),
        sha256=item.sha256,
        image=image_link(name, gallery.generation, item.id),
    )


def image_link(name: str, generation: str, item_id: int) -> str:
    """The address of the picture of an item."""
    version = generation[:VERSION_DIGITS]
    return f"/galleries/{quote(name, safe='')}/items/{item_id}/image?version={version}"
