"""Routes for items by the key of the shop, such as a SKU or a path, instead of the item id.

Slashes in a key may be sent as they are or as %2F. An item whose key ends with /similar, /explain
or /image can only be addressed by its id.
"""

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import Field, RootModel
from starlette.convertors import Convertor, register_url_convertor

from kinlens.embedder.errors import ItemNotFoundError
from kinlens.indexer.types import Item
from kinlens.models import ExplainAnswer, ItemModel, PatchAnswer, RemoveAnswer, SearchAnswer
from kinlens.service.access.audit import note
from kinlens.service.api.galleries import CHANGE_FAILURES, FAILURES, Generation
from kinlens.service.api.images import IMAGE_ANSWERS, ImageSize, image_of
from kinlens.service.api.items import UNKNOWN_ITEM, Changes, item_model
from kinlens.service.api.requests import search_models
from kinlens.service.api.search import (
    EXPLAIN,
    SIMILAR,
    explanation_of,
    search_docs,
    search_parameters,
    similar_to,
)
from kinlens.service.galleries.locations import VERSION_DIGITS
from kinlens.service.galleries.registry import Served
from kinlens.service.http.bodies import body_docs, read_model
from kinlens.service.http.openapi import problems
from kinlens.service.http.rules import Route, rule
from kinlens.service.runtime import Runtime

_MAX_KEY = 1024
Key = Annotated[str, Path(min_length=1, max_length=_MAX_KEY, description="The key of the item.")]
_ITEM = "/galleries/{name}/items/by-key/{key:item_key}"
_PART = "/galleries/{name}/items/by-key/{key:path}"


class _ItemKey(Convertor[str]):
    """The rest of a path, unless it ends with a subresource of an item."""

    regex = r".+(?<!/similar)(?<!/explain)(?<!/image)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("item_key", _ItemKey())


class KeyChanges(RootModel[Annotated[Changes, Field(min_length=1)]]):
    """Attributes of one item to change; null removes one, all others stay unchanged."""


def build_router(runtime: Runtime) -> APIRouter:
    """Build the routes of items by key; subresources come before the item itself."""
    router, models = APIRouter(route_class=Route), search_models(runtime.settings)

    @router.get(
        f"{_PART}/similar",
        response_model=SearchAnswer,
        responses={
            200: {"description": "Similar items, without the item itself."},
            **problems(*SIMILAR),
        },
        openapi_extra={"parameters": search_parameters(models.fields)},
        summary="Search with an item by key",
    )
    @rule("search", "items")
    async def similar(request: Request, name: str, key: Key, generation: Generation) -> Response:
        """The items that are visually most similar to this one, without it, best first."""
        number, current = await _number_of(runtime, name, key)
        return await similar_to(runtime, models, request, name, number, generation or current)

    @router.post(
        f"{_PART}/explain",
        response_model=ExplainAnswer,
        responses={
            200: {"description": "The share of each region in the score."},
            **problems(*EXPLAIN),
        },
        openapi_extra=search_docs(models),
        summary="Explain a hit by key",
    )
    @rule("search", "items", "image")
    async def explain(request: Request, name: str, key: Key) -> Response:
        """Which regions of query and hit contribute to the score; send the body of the search."""
        number, generation = await _number_of(runtime, name, key)
        return await explanation_of(runtime, models, request, name, number, generation)

    @router.get(
        f"{_PART}/image",
        response_class=Response,
        responses=IMAGE_ANSWERS,
        summary="The image of an item by key",
    )
    @rule("search", "items")
    async def image(
        request: Request, name: str, key: Key, generation: Generation, size: ImageSize = None
    ) -> Response:
        """The image in a format that browsers can show."""
        number, current = await _number_of(runtime, name, key)
        return await image_of(runtime, request, name, number, generation or current, size)

    @router.get(
        _ITEM, responses=problems(*FAILURES, UNKNOWN_ITEM), summary="Describe an item by key"
    )
    @rule("search", "items")
    async def item(name: str, key: Key) -> ItemModel:
        """One item with its attributes."""
        async with runtime.registry.find(name) as served:
            return item_model(name, served.gallery, await _stored(runtime, served, key))

    @router.patch(
        _ITEM,
        responses=problems(*CHANGE_FAILURES, UNKNOWN_ITEM),
        summary="Change attributes of an item by key",
        openapi_extra=body_docs(KeyChanges),
    )
    @rule("write", "items", "keys")
    async def patch(request: Request, name: str, key: Key) -> PatchAnswer:
        """Change attributes of one item: {"price": 49.9, "sale": null}."""
        sent = await read_model(request, KeyChanges)
        changed = await runtime.items.patch(name, {key: sent.root})
        note(request.scope["state"], affected=changed.count)
        return PatchAnswer(changed=changed.count, version=changed.version)

    @router.delete(
        _ITEM, responses=problems(*CHANGE_FAILURES, UNKNOWN_ITEM), summary="Remove an item by key"
    )
    @rule("write", "items", "keys")
    async def remove(request: Request, name: str, key: Key) -> RemoveAnswer:
        """Remove one item."""
        removed = await runtime.items.remove(name, [key])
        if not removed.count:
            raise _unknown(name, key)
        note(request.scope["state"], affected=removed.count)
        return RemoveAnswer(removed=removed.count, version=removed.version)

    return router


async def _number_of(runtime: Runtime, name: str, key: str) -> tuple[int, str]:
    """The current id of the item with this key, and the generation that the id belongs to.

    Raises: ItemNotFoundError.
    """
    async with runtime.registry.find(name) as served:
        item = await _stored(runtime, served, key)
        return item.id, served.gallery.generation[:VERSION_DIGITS]


async def _stored(runtime: Runtime, served: Served, key: str) -> Item:
    """The item with this key. Raises: ItemNotFoundError."""
    gallery = served.gallery
    found = await runtime.read("the item", lambda: gallery.stored([key]), served=served)
    if key not in found:
        raise _unknown(served.name, key)
    return found[key]


def _unknown(name: str, key: str) -> ItemNotFoundError:
    return ItemNotFoundError(
        f"Gallery {name} has no item with the key {key!r:.200}. Keys are case-sensitive."
    )
