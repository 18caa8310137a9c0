"""The items of galleries over HTTP: list, put, patch, remove."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Self, TypeVar, get_args

from fastapi import APIRouter, Query, Request
from pydantic import (
    ConfigDict,
    Field,
    RootModel,
    SkipValidation,
    model_validator,
)

from kinlens.embedder import errors
from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.sources.names import composed
from kinlens.indexer.entries import Item
from kinlens.indexer.filters.tree import Filter
from kinlens.indexer.types import SearchOptions, sort_by_of
from kinlens.models import (
    MAX_PAGE,
    ItemModel,
    ItemPage,
    ItemStatus,
    PatchAnswer,
    Problem,
    PutAnswer,
    RemoveAnswer,
    RestoreAnswer,
)
from kinlens.service.access.audit import note
from kinlens.service.access.links import image_address, image_link
from kinlens.service.access.rates import account_of
from kinlens.service.api.fields import (
    FilterText,
    Strict,
    custom_error,
    facets_of,
    fields_of,
    where_of,
)
from kinlens.service.api.galleries import (
    CHANGE_FAILURES,
    FAILURES,
    IMAGE_FAILURES,
    Generation,
    ItemId,
    Key,
    Service,
    item_of_key,
    unknown_key,
)
from kinlens.service.api.puts import put_docs, read_items
from kinlens.service.galleries.locations import Gallery
from kinlens.service.galleries.registry import Served
from kinlens.service.galleries.view import check_names
from kinlens.service.http.bodies import read_model
from kinlens.service.http.openapi import model_docs, problems
from kinlens.service.http.rules import Route, rule
from kinlens.service.problems import described, request_id_of
from kinlens.service.runtime import Runtime
from kinlens.service.search.query import chosen
from kinlens.values import AttributeValue

Answer = TypeVar("Answer", PatchAnswer, RemoveAnswer)

Fields = Annotated[
    str | None,
    Query(description="The only attributes to return: colour,price; default: all."),
]

MAX_KEYS = 10_000
"""Maximum number of items that one request may patch or remove by key."""

_MAX_OFFSET = 10**9
_MAX_PREFIX = 1024
_SHOWN = 80
_CHANGED: tuple[ItemStatus, ...] = ("added", "replaced", "updated")


# The gallery checks the values, and names the item and the attribute.
Changes = dict[str, Annotated[AttributeValue | None, SkipValidation]]


class KeyChanges(RootModel[Annotated[Changes, Field(min_length=1)]]):
    """Attributes of one item to change; null removes one, all others stay unchanged."""


_ByKey = Annotated[dict[str, Changes], Field(fail_fast=True, min_length=1, max_length=MAX_KEYS)]
_Keys = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_KEYS)]


class PatchItems(Strict):
    """Attributes to change: per key, per product for all its items, or the same change for all
    items that match a filter. null removes an attribute; all others stay unchanged.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"changes": {"shoes/0017.jpg": {"price": 49.9, "sale": None}}},
                {"products": {"boot-17": {"price": 49.9}}},
                {"filter": 'colour = "red"', "set": {"stock": 0}},
            ]
        }
    )

    changes: _ByKey | None = None
    products: (
        Annotated[_ByKey, Field(description="By value of the attribute `product`.")] | None
    ) = None
    filter: FilterText = None
    set: Annotated[Changes, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        by_filter = self.filter is not None, self.set is not None
        selectors = [any(by_filter), self.changes is not None, self.products is not None]
        if by_filter not in ((True, True), (False, False)) or sum(selectors) != 1:
            raise custom_error("Send either changes, or products, or filter together with set.")
        return self


class RemoveItems(Strict):
    """The items to remove: those with these keys, or those that match the filter."""

    keys: _Keys | None = None
    filter: FilterText = None
    keep: Annotated[
        list[str],
        Field(
            default_factory=list,
            fail_fast=True,
            max_length=MAX_KEYS,
            description="With keys: remove them only if an item with one of these keys exists.",
        ),
    ]


class RestoreItems(Strict):
    """The keys of removed items to restore."""

    keys: _Keys


router = APIRouter(route_class=Route, prefix="/galleries/{name}/items")


@router.get(
    "",
    responses=problems(*FAILURES, errors.FilterError),
    summary="List items",
    response_model_exclude_unset=True,  # omits facets unless they are requested
)
@rule("search", "items")
async def items(
    runtime: Service,
    name: str,
    offset: Annotated[int, Query(ge=0, le=_MAX_OFFSET)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
    where: Annotated[
        str | None, Query(alias="filter", description="As in a search: text or JSON.")
    ] = None,
    key_prefix: Annotated[str, Query(max_length=_MAX_PREFIX)] = "",
    after: Annotated[
        int | None, Query(ge=0, le=2**63 - 1, description="Only items with higher ids.")
    ] = None,
    sort_by: Annotated[
        str | None, Query(description="NAME, NAME:asc or NAME:desc; default: by id.")
    ] = None,
    facets: Annotated[
        str | None, Query(description="Attributes to count over all matching items: colour,price.")
    ] = None,
    fields: Fields = None,
) -> ItemPage:
    """Items ordered by id (new items last), or by an attribute.

    To read all items while others are added and removed, send the last id of a page as `after`.
    """
    fitting = await runtime.read("the filter", lambda: where_of(where), "body") if where else None
    image_url = runtime.settings.image_url

    def read(served: Served) -> ItemPage:
        gallery, above = served.gallery, -1 if after is None else after
        order = sort_by_of(sort_by) if sort_by else None
        wanted_fields = _fields(gallery, fields)
        page = gallery.page(offset, limit, fitting, key_prefix, above, order)
        counts: dict[str, Any] = {}
        if facets:
            wanted = SearchOptions(where=fitting)
            found = gallery.facets(facets_of(facets), None, wanted, key_prefix)
            counts = {"facets": {key: one.described() for key, one in found.items()}}
        return ItemPage(
            total=page.total,
            offset=offset,
            items=[
                item_model(name, gallery, item, image_url, wanted_fields) for item in page.items
            ],
            last=page.last,
            generation=gallery.generation,
            **counts,
        )

    return await runtime.read_in(name, "the items", read)


@router.get(
    "/{item_id}",
    responses=problems(*FAILURES, errors.ItemNotFoundError, errors.FilterError),
    summary="Describe an item",
)
@rule("search", "items")
async def item(runtime: Service, name: str, item_id: ItemId, fields: Fields = None) -> ItemModel:
    """One item with its attributes."""
    return await _described(runtime, name, fields, lambda served: served.gallery.item(item_id))


@router.get(
    "/by-key/{key:path}",
    name="item",
    responses=problems(*FAILURES, errors.ItemNotFoundError, errors.FilterError),
    summary="Describe an item by key",
)
@rule("search", "items")
async def item_by_key(runtime: Service, name: str, key: Key, fields: Fields = None) -> ItemModel:
    """One item with its attributes."""
    return await _described(runtime, name, fields, lambda served: item_of_key(served, key))


@router.patch(
    "/by-key/{key:path}",
    name="patch",
    responses=problems(*CHANGE_FAILURES, errors.ItemNotFoundError),
    summary="Change attributes of an item by key",
)
@rule("write", "items", "keys", docs=partial(model_docs, KeyChanges))
async def patch_by_key(runtime: Service, request: Request, name: str, key: Key) -> PatchAnswer:
    """Change attributes of one item: {"price": 49.9, "sale": null}."""
    sent = await read_model(request, KeyChanges)
    return _noted(request, await runtime.items.patch(name, {key: sent.root}))


@router.delete(
    "/by-key/{key:path}",
    name="remove",
    responses=problems(*CHANGE_FAILURES, errors.ItemNotFoundError),
    summary="Remove an item by key",
)
@rule("write", "items", "keys")
async def remove_by_key(runtime: Service, request: Request, name: str, key: Key) -> RemoveAnswer:
    """Remove one item."""
    answer = await runtime.items.remove(name, [key])
    if not answer.removed:
        raise unknown_key(name, key)
    return _noted(request, answer)


@router.put(
    "",
    responses=problems(*CHANGE_FAILURES, *IMAGE_FAILURES, errors.DeltaFullError),
    summary="Put items",
)
@rule("write", "items", "batch", docs=put_docs)
async def put(runtime: Service, name: str, request: Request) -> PutAnswer:
    """Add items, or replace items with the same keys. A bad image or vector only fails its item.

    An item with the stored key and content is `unchanged`. When this returns, searches find the
    items. If the only item of a request fails, the answer is its problem.
    """
    async with runtime.registry.find(name):
        pass  # raises for an unknown gallery before the body is read
    new = await read_items(request)
    if len(new) > 1:
        await account_of(request.scope).owe(len(new))
    put, version = await runtime.items.put(name, new)
    request_id, instance = request_id_of(request.scope), request.url.path
    for result, error in put:
        if error is not None:
            if len(put) == 1:
                raise error
            document = described(error, request_id=request_id, instance=instance)
            result.problem = Problem(**document)
    counts = Counter(result.status for result, _ in put)
    note(request.scope["state"], affected=sum(counts[status] for status in _CHANGED))
    return PutAnswer(
        **{status: counts[status] for status in get_args(ItemStatus)},
        items=[result for result, _ in put],
        version=version,
    )


@router.patch(
    "",
    responses=problems(*CHANGE_FAILURES, errors.ItemNotFoundError, errors.FilterError),
    summary="Change attributes",
)
@rule("write", "items", "keys", docs=partial(model_docs, PatchItems))
async def patch(runtime: Service, name: str, request: Request) -> PatchAnswer:
    """Change attributes of items by key or by product, all or none; or of all items that match a
    filter, in steps of 10,000.
    """
    sent = await read_model(request, PatchItems)
    if sent.changes is not None:
        answer = await runtime.items.patch(name, sent.changes)
    elif sent.products is not None:
        answer = await runtime.items.patch_products(name, sent.products)
    else:
        where = await _where(runtime, sent.filter, "change single items, send changes")
        answer = await runtime.items.patch_where(name, where, sent.set or {})
    return _noted(request, answer)


@router.delete("", responses=problems(*CHANGE_FAILURES), summary="Remove items by key")
@rule("write", "items", "keys")
async def remove(
    runtime: Service,
    request: Request,
    name: str,
    key: Annotated[list[str], Query(min_length=1, max_length=MAX_KEYS)],
) -> RemoveAnswer:
    """Remove items; unknown keys are not counted."""
    return _noted(request, await runtime.items.remove(name, key))


@router.post(
    "/delete",
    responses=problems(*CHANGE_FAILURES, errors.FilterError, errors.GalleryConflictError),
    summary="Remove many items",
)
@rule("write", "items", "keys", docs=partial(model_docs, RemoveItems))
async def remove_many(runtime: Service, name: str, request: Request) -> RemoveAnswer:
    """Remove the items with these keys, or all items that match a filter.

    With `keep`, nothing is removed (409) if no item with one of these keys exists.
    """
    sent = await read_model(request, RemoveItems)
    if (sent.keys is None) == (sent.filter is None):
        raise InvalidParameterError("Send either keys or filter, not both.")
    if sent.keep and sent.keys is None:
        raise InvalidParameterError("keep requires keys. Send keys, or omit keep.")
    if sent.keys is not None:
        answer = await runtime.items.remove(name, sent.keys, sent.keep)
    else:
        where = await _where(runtime, sent.filter, "remove all items, send keys")
        answer = await runtime.items.remove_where(name, where)
    return _noted(request, answer)


@router.post(
    "/restore",
    responses=problems(*CHANGE_FAILURES, errors.DeltaFullError),
    summary="Undo a removal",
)
@rule("write", "items", "keys", docs=partial(model_docs, RestoreItems))
async def restore(runtime: Service, name: str, request: Request) -> RestoreAnswer:
    """Restore items that were removed within the last day, unchanged, under new ids.

    Skipped: keys that a new item has, and items that `POST .../compact` has erased.
    """
    sent = await read_model(request, RestoreItems)
    restored, version = await runtime.items.restore(name, sent.keys)
    async with runtime.registry.find(name) as served:
        image_url = runtime.settings.image_url
        items = [item_model(name, served.gallery, item, image_url) for item in restored]
    note(request.scope["state"], affected=len(items))
    return RestoreAnswer(restored=len(items), items=items, version=version)


@router.delete(
    "/{item_id}",
    responses=problems(*CHANGE_FAILURES, errors.ItemNotFoundError),
    summary="Remove an item",
)
@rule("write", "items")
async def remove_item(
    runtime: Service, request: Request, name: str, item_id: ItemId, generation: Generation
) -> RemoveAnswer:
    """Remove one item by its id; send `generation`, since ids change with the generation."""
    return _noted(request, await runtime.items.remove_item(name, item_id, generation))


async def _described(
    runtime: Runtime, name: str, fields: str | None, find: Callable[[Served], Item]
) -> ItemModel:
    def read(served: Served) -> ItemModel:
        gallery, image_url = served.gallery, runtime.settings.image_url
        return item_model(name, gallery, find(served), image_url, _fields(gallery, fields))

    return await runtime.read_in(name, "the item", read)


async def _where(runtime: Runtime, sent: str | dict[str, Any] | None, cure: str) -> Filter:
    """The filter of a change. Raises: FilterError."""
    where = await runtime.read("the filter", lambda: where_of(sent), "body")
    if where is None:
        raise errors.FilterError(f"The filter is empty. To {cure}.")
    return where


def _noted(request: Request, answer: Answer) -> Answer:
    """The answer, whose count is noted for the audit log."""
    [count] = answer.model_dump(exclude={"version"}).values()
    note(request.scope["state"], affected=count)
    return answer


def _fields(gallery: Gallery, sent: str | None) -> Sequence[str] | None:
    """The attributes to return; None for all.

    Raises: InvalidParameterError, FilterError for an unknown one.
    """
    sent_names = fields_of(sent)
    names = None if sent_names is None else [composed(name) for name in sent_names]
    check_names(gallery, names or (), "return")
    return names


def item_model(
    name: str,
    gallery: Gallery,
    item: Item,
    image_url: str,
    fields: Sequence[str] | None = None,
) -> ItemModel:
    """The response model of an item of gallery `name`, with the attributes `fields` or all;
    `image_url` as in the settings.
    """
    return ItemModel(
        id=item.id,
        key=item.key,
        attributes=dict(item.attributes) if fields is None else chosen(item.attributes, fields),
        sha256=item.sha256,
        image=image_link(name, item.id, gallery.generation),
        has_image=item.has_image,
        image_url=None if item.has_image else image_address(image_url, item.key, item.attributes),
    )
