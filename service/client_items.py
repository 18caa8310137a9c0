"""Items of the client: put, listed, patched, removed; the calls of both kinds of client."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from embedder.types import AttributeValue
from service.client_call import Call, Image, address, content, model
from service.client_errors import ProblemError
from service.client_listing import PAGE, Filter, Listing, list_items
from service.client_putting import (
    MAX_ITEMS,
    Attributes,
    NewItem,
    PutProgress,
    PutSum,
    put_one,
    put_requests,
    version_of,
)
from service.client_transport import AsyncSender, Sender
from service.schemas.galleries import ItemModel, ItemPage, PatchAnswer, PutAnswer, RemoveAnswer

Changes = Mapping[str, Mapping[str, AttributeValue | None]]

_ADDRESS_CHARACTERS = 4000  # longer ones may be cut off on the way


class ItemCalls(Sender):
    """Calls about items that wait for their answer."""

    def put(
        self, gallery: str, key: str, image: Image, attributes: Attributes | None = None
    ) -> PutAnswer:
        """Add an item, or replace the one with this key.

        Example: `client.put("shop", "hats/1", "hat.jpg", {"price": 9.5}).items[0].id`
        """
        return self._send(put_one(gallery, NewItem(key, image, attributes or {})))

    def put_many(
        self,
        gallery: str,
        items: Iterable[NewItem],
        on_progress: PutProgress | None = None,
        *,
        per_request: int = MAX_ITEMS,
    ) -> PutAnswer:
        """Put any number of items, in several requests; a bad image fails alone.

        Example: `client.put_many("shop", [NewItem("a", "a.jpg"), NewItem("b", "b.jpg")]).failed`
        """
        done = PutSum(on_progress)
        for request in put_requests(gallery, items, per_request):
            try:
                answer = self._send(request.call)
            except ProblemError as error:
                answer = request.refused(error)
            done.take(answer)
        return done.answer(done.version or self._send(version_of(gallery)).version)

    def items(
        self,
        gallery: str,
        *,
        offset: int = 0,
        limit: int = 50,
        after: int | None = None,
        filter: Filter | None = None,  # noqa: A002 (the name that the service has)
        key_prefix: str = "",
    ) -> ItemPage:
        """A page of items, of those with numbers above `after`, in the order of their numbers.

        Example: `client.items("shop", filter="price < 20", limit=10).total`
        """
        return self._send(list_items(gallery, offset, limit, after, filter, key_prefix))

    def each_item(
        self,
        gallery: str,
        *,
        filter: Filter | None = None,  # noqa: A002
        key_prefix: str = "",
    ) -> Iterator[ItemModel]:
        """Every item that fits, page by page, also while items are added, replaced and removed:
        each that is there from beginning to end comes once, none that came later.

        Example: `[item.key for item in client.each_item("shop", key_prefix="hats/")]`
        """
        listing = Listing(gallery)
        while not listing.ended:
            call = list_items(gallery, 0, PAGE, listing.after, filter, key_prefix)
            yield from listing.take(self._send(call))

    def item(self, gallery: str, item_id: int) -> ItemModel:
        """What is known of an item.

        Example: `client.item("shop", 17).attributes`
        """
        return self._send(_describe(gallery, item_id))

    def image(self, gallery: str, item_id: int) -> bytes:
        """The picture of an item, as a browser can show it.

        Example: `Path("17.png").write_bytes(client.image("shop", 17))`
        """
        return self._send(_image(gallery, item_id))

    def patch(self, gallery: str, changes: Changes) -> PatchAnswer:
        """Change attributes by key, all or none; None takes one away.

        Example: `client.patch("shop", {"hats/1": {"price": 8, "sale": None}}).changed`
        """
        return self._send(_patch(gallery, changes))

    def remove(self, gallery: str, keys: Sequence[str]) -> RemoveAnswer:
        """Remove items by key; unknown keys are not counted.

        Example: `client.remove("shop", ["hats/1"]).removed`
        """
        return self._send(_remove(gallery, keys))

    def remove_where(self, gallery: str, filter: Filter) -> RemoveAnswer:  # noqa: A002
        """Remove all items that fit a filter.

        Example: `client.remove_where("shop", "stock = 0").removed`
        """
        return self._send(_remove_many(gallery, {"filter": filter}))

    def remove_item(self, gallery: str, item_id: int, version: str | None = None) -> RemoveAnswer:
        """Remove an item by its number, one of the generation `version` of the gallery.

        Example: `client.remove_item("shop", 17)`
        """
        return self._send(_remove_item(gallery, item_id, version))


class AsyncItemCalls(AsyncSender):
    """The same calls in an event loop."""

    async def put(
        self, gallery: str, key: str, image: Image, attributes: Attributes | None = None
    ) -> PutAnswer:
        """Add an item, or replace the one with this key.

        Example: `await client.put("shop", "hats/1", "hat.jpg", {"price": 9.5})`
        """
        item = NewItem(key, image, attributes or {})
        return await self._send(await asyncio.to_thread(put_one, gallery, item))

    async def put_many(
        self,
        gallery: str,
        items: Iterable[NewItem],
        on_progress: PutProgress | None = None,
        *,
        per_request: int = MAX_ITEMS,
    ) -> PutAnswer:
        """Put any number of items, in several requests; a bad image fails alone.

        Example: `await client.put_many("shop", [NewItem("a", "a.jpg")])`
        """
        done = PutSum(on_progress)
        requests = put_requests(gallery, items, per_request)
        while request := await asyncio.to_thread(next, requests, None):
            try:
                answer = await self._send(request.call)
            except ProblemError as error:
                answer = request.refused(error)
            done.take(answer)
        return done.answer(done.version or (await self._send(version_of(gallery))).version)

    async def items(
        self,
        gallery: str,
        *,
        offset: int = 0,
        limit: int = 50,
        after: int | None = None,
        filter: Filter | None = None,  # noqa: A002
        key_prefix: str = "",
    ) -> ItemPage:
        """A page of items, of those with numbers above `after`, in the order of their numbers.

        Example: `(await client.items("shop", limit=10)).items`
        """
        return await self._send(list_items(gallery, offset, limit, after, filter, key_prefix))

    async def each_item(
        self,
        gallery: str,
        *,
        filter: Filter | None = None,  # noqa: A002
        key_prefix: str = "",
    ) -> AsyncIterator[ItemModel]:
        """Every item that fits, page by page, also while items are added, replaced and removed:
        each that is there from beginning to end comes once, none that came later.

        Example: `[item.key async for item in client.each_item("shop")]`
        """
        listing = Listing(gallery)
        while not listing.ended:
            call = list_items(gallery, 0, PAGE, listing.after, filter, key_prefix)
            for item in listing.take(await self._send(call)):
                yield item

    async def item(self, gallery: str, item_id: int) -> ItemModel:
        """What is known of an item.

        Example: `(await client.item("shop", 17)).key`
        """
        return await self._send(_describe(gallery, item_id))

    async def image(self, gallery: str, item_id: int) -> bytes:
        """The picture of an item, as a browser can show it.

        Example: `await client.image("shop", 17)`
        """
        return await self._send(_image(gallery, item_id))

    async def patch(self, gallery: str, changes: Changes) -> PatchAnswer:
        """Change attributes by key, all or none; None takes one away.

        Example: `await client.patch("shop", {"hats/1": {"price": 8}})`
        """
        return await self._send(_patch(gallery, changes))

    async def remove(self, gallery: str, keys: Sequence[str]) -> RemoveAnswer:
        """Remove items by key; unknown keys are not counted.

        Example: `await client.remove("shop", ["hats/1"])`
        """
        return await self._send(_remove(gallery, keys))

    async def remove_where(self, gallery: str, filter: Filter) -> RemoveAnswer:  # noqa: A002
        """Remove all items that fit a filter.

        Example: `await client.remove_where("shop", "stock = 0")`
        """
        return await self._send(_remove_many(gallery, {"filter": filter}))

    async def remove_item(
        self, gallery: str, item_id: int, version: str | None = None
    ) -> RemoveAnswer:
        """Remove an item by its number, one of the generation `version` of the gallery.

        Example: `await client.remove_item("shop", 17)`
        """
        return await self._send(_remove_item(gallery, item_id, version))


def _describe(gallery: str, item_id: int) -> Call[ItemModel]:
    return Call("GET", f"{_items(gallery)}/{item_id}", model(ItemModel))


def _image(gallery: str, item_id: int) -> Call[bytes]:
    return Call("GET", f"{_items(gallery)}/{item_id}/image", content)


def _patch(gallery: str, changes: Changes) -> Call[PatchAnswer]:
    return Call("PATCH", _items(gallery), model(PatchAnswer), json={"changes": changes})


def _remove(gallery: str, keys: Sequence[str]) -> Call[RemoveAnswer]:
    query = {"key": list(keys)}
    if len(urlencode(query, doseq=True)) > _ADDRESS_CHARACTERS:
        return _remove_many(gallery, {"keys": list(keys)})
    return Call("DELETE", _items(gallery), model(RemoveAnswer), query=query)


def _remove_many(gallery: str, body: Mapping[str, Any]) -> Call[RemoveAnswer]:
    return Call("POST", f"{_items(gallery)}/delete", model(RemoveAnswer), json=body)


def _remove_item(gallery: str, item_id: int, version: str | None) -> Call[RemoveAnswer]:
    path = f"{_items(gallery)}/{item_id}"
    query = {"version": version}
    return Call("DELETE", path, model(RemoveAnswer), query=query, idempotent=False)


def _items(gallery: str) -> str:
    return address("galleries", gallery, "items")
