"""The items of galleries over HTTP: list, put, patch, delete."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi import Query as Parameter
from pydantic import BeforeValidator

from embedder import errors
from embedder.errors import InvalidParameterError
from indexer.types import Page
from service.api.gallery_models import (
    MAX_KEYS,
    ItemModel,
    ItemPage,
    PatchAnswer,
    PatchItems,
    PutAnswer,
    PutResult,
    RemoveAnswer,
    RemoveItems,
)
from service.api.item_bodies import PUT_BODY, new_items
from service.api.parameters import whole_number
from service.api.problem_models import Problem
from service.api.reading import FAILURES, MAX_ID, item_model, look, where_of
from service.galleries.items import Outcome
from service.galleries.registry import Served
from service.galleries.storing import Put
from service.galleries.versions import VERSION_PATTERN, VERSION_TEXT
from service.http.bodies import body_docs, read_model
from service.http.openapi import problems
from service.problems import (
    BAD_REQUEST,
    BODY_TOO_LARGE,
    BODY_TOO_SLOW,
    KINDS,
    UNSUPPORTED_MEDIA,
    described,
    request_id_of,
)
from service.runtime import Runtime

_MAX_LISTED = 200
_MAX_OFFSET = 10**9
_MAX_PREFIX = 1024
_ID = Annotated[int, Path(ge=0, le=MAX_ID)]
_FILTER = KINDS[errors.FilterError]
_UNKNOWN_ITEM = KINDS[errors.ItemNotFoundError]
_WRITES = (
    *FAILURES,
    *(BAD_REQUEST, BODY_TOO_SLOW, BODY_TOO_LARGE, UNSUPPORTED_MEDIA),
    KINDS[errors.GalleryConflictError],
    KINDS[errors.StateMissingError],
    KINDS[errors.GalleryBusyError],
)
_IMAGES = (
    KINDS[errors.EmptyImageError],
    KINDS[errors.ImageTooManyBytesError],
    KINDS[errors.ImageTooLargeError],
    KINDS[errors.ImageCostError],
    KINDS[errors.UnsupportedFormatError],
    KINDS[errors.CorruptImageError],
    KINDS[errors.BundleError],
)


def build_router(runtime: Runtime) -> APIRouter:
    """The routes of items."""
    router = APIRouter(prefix="/galleries/{name}/items")
    _add_listing(router, runtime)
    _add_reading(router, runtime)
    _add_putting(router, runtime)
    _add_removing(router, runtime)
    _add_removing_one(router, runtime)
    return router


def _add_listing(router: APIRouter, runtime: Runtime) -> None:
    @router.get("", responses=problems(*FAILURES, _FILTER), summary="List items")
    async def items(
        name: str,
        offset: Annotated[
            int,
            Parameter(ge=0, le=_MAX_OFFSET),
            BeforeValidator(whole_number("offset", 0, _MAX_OFFSET)),
        ] = 0,
        limit: Annotated[
            int,
            Parameter(ge=1, le=_MAX_LISTED),
            BeforeValidator(whole_number("limit", 1, _MAX_LISTED)),
        ] = 50,
        where: Annotated[
            str | None, Parameter(alias="filter", description="As in a search: text or JSON.")
        ] = None,
        key_prefix: Annotated[str, Parameter(max_length=_MAX_PREFIX)] = "",
        after: Annotated[
            int | None,
            Parameter(ge=0, le=MAX_ID, description="Only items with higher numbers."),
            BeforeValidator(whole_number("after", 0, MAX_ID)),
        ] = None,
    ) -> ItemPage:
        """Items in the order of their numbers, new ones last.

        To read all while some are added and removed, send the last number of a page as `after`.
        """
        await runtime.registry.know(name)
        with runtime.registry.lease(name) as served:
            gallery = served.gallery

            def read() -> ItemPage:
                above = -1 if after is None else after
                page = gallery.page(offset, limit, where_of(where), key_prefix, above)
                return _item_page(served, page, offset)

            return await look(runtime, "the items", read)


def _add_reading(router: APIRouter, runtime: Runtime) -> None:
    @router.get(
        "/{item_id}", responses=problems(*FAILURES, _UNKNOWN_ITEM), summary="Describe an item"
    )
    async def item(name: str, item_id: _ID) -> ItemModel:
        """What is known of one item."""
        await runtime.registry.know(name)
        with runtime.registry.lease(name) as served:
            gallery = served.gallery
            found = await look(runtime, "the item", lambda: gallery.item(item_id))
            return item_model(name, gallery, found)


def _add_putting(router: APIRouter, runtime: Runtime) -> None:
    @router.put(
        "",
        responses=problems(*_WRITES, *_IMAGES),
        summary="Put items",
        openapi_extra=PUT_BODY,
    )
    async def put(name: str, request: Request) -> PutAnswer:
        """Add items, or replace those with the same keys; a bad image fails alone.

        The same key and content again is `unchanged`. Searches find an item when this returns. If a
        single item was sent and failed, the answer is its problem.
        """
        await runtime.registry.know(name)
        with runtime.registry.lease(name):
            pass  # an unknown gallery is told before the body is read
        items = await new_items(request, runtime)
        done = await runtime.writes.put(name, items)
        if len(items) == 1 and done.outcomes[0].error is not None:
            raise done.outcomes[0].error
        return _put_answer(done, request)

    @router.patch(
        "",
        responses=problems(*_WRITES, _UNKNOWN_ITEM),
        summary="Change attributes",
        openapi_extra=body_docs(PatchItems),
    )
    async def patch(name: str, request: Request) -> PatchAnswer:
        """Change attributes of items by key, all or none."""
        sent = await read_model(request, PatchItems)
        await runtime.registry.know(name)
        changed = await runtime.writes.patch(name, sent.changes)
        return PatchAnswer(changed=changed.count, version=changed.version)


def _add_removing(router: APIRouter, runtime: Runtime) -> None:
    @router.delete("", responses=problems(*_WRITES), summary="Remove items by key")
    async def remove(
        name: str, key: Annotated[list[str], Parameter(min_length=1, max_length=MAX_KEYS)]
    ) -> RemoveAnswer:
        """Remove items; unknown keys are not counted."""
        await runtime.registry.know(name)
        removed = await runtime.writes.remove(name, key)
        return RemoveAnswer(removed=removed.count, version=removed.version)

    @router.post(
        "/delete",
        responses=problems(*_WRITES, _FILTER),
        summary="Remove many items",
        openapi_extra=body_docs(RemoveItems),
    )
    async def remove_many(name: str, request: Request) -> RemoveAnswer:
        """Remove the items with these keys, or all that fit a filter."""
        items = await read_model(request, RemoveItems)
        if (items.keys is None) == (items.filter is None):
            raise InvalidParameterError("Send either keys or filter, and not both.")
        await runtime.registry.know(name)
        if items.keys is not None:
            removed = await runtime.writes.remove(name, items.keys)
        else:
            where = await look(runtime, "the filter", lambda: where_of(items.filter))
            if where is None:
                raise errors.FilterError("The filter is empty. To remove all items, send keys.")
            removed = await runtime.writes.remove_where(name, where)
        return RemoveAnswer(removed=removed.count, version=removed.version)


def _add_removing_one(router: APIRouter, runtime: Runtime) -> None:
    @router.delete(
        "/{item_id}", responses=problems(*_WRITES, _UNKNOWN_ITEM), summary="Remove an item"
    )
    async def remove_item(
        name: str,
        item_id: _ID,
        version: Annotated[
            str | None, Parameter(pattern=VERSION_PATTERN, description=VERSION_TEXT)
        ] = None,
    ) -> RemoveAnswer:
        """Remove one item by its number; in another generation that is the number of another."""
        await runtime.registry.know(name)
        removed = await runtime.writes.remove_item(name, item_id, version)
        return RemoveAnswer(removed=removed.count, version=removed.version)


def _item_page(served: Served, page: Page, offset: int) -> ItemPage:
    return ItemPage(
        total=page.total,
        offset=offset,
        items=[item_model(served.name, served.gallery, item) for item in page.items],
        last=page.last,
        generation=served.gallery.generation,
    )


def _put_answer(done: Put, request: Request) -> PutAnswer:
    return PutAnswer(
        added=done.count("added"),
        replaced=done.count("replaced"),
        updated=done.count("updated"),
        unchanged=done.count("unchanged"),
        failed=done.count("failed"),
        items=_results(done.outcomes, request_id_of(request.scope), request.url.path),
        version=done.version,
    )


def _results(outcomes: Sequence[Outcome], request_id: str, instance: str) -> list[PutResult]:
    return [
        PutResult(
            key=outcome.key,
            status=outcome.status,
            id=outcome.id,
            problem=None
            if outcome.error is None
            else Problem(**described(outcome.error, request_id=request_id, instance=instance)),
        )
        for outcome in outcomes
    ]
