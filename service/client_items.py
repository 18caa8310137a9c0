"""Items of the client: put, listed, patched, removed; the calls of both kinds of client."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from embedder.types import AttributeValue
from service.client_call import (
    Call,
    Image,
    address,
    content,
    file_part,
    image_bytes,
    model,
    text_part,
)
from service.client_transport import AsyncSender, Sender
from service.schemas.galleries import ItemModel, ItemPage, PatchAnswer, PutAnswer, RemoveAnswer

Attributes = Mapping[str, AttributeValue]
Changes = Mapping[str, Mapping[str, AttributeValue | None]]
Filter = str | Mapping[str, Any]

_PAGE = 200
_ADDRESS_CHARACTERS = 4000  # longer ones may be cut off on the way


@dataclass(frozen=True, slots=True)
class NewItem:
    """An item to be put: `NewItem("hats/1", "hat.jpg", {"price": 9.5})`."""

    key: str
    image: Image
    attributes: Attributes = field(default_factory=dict)


class ItemCalls(Sender):
    """Calls about items that wait for their answer."""

    def put(
        self, gallery: str, key: str, image: Image, attributes: Attributes | None = None
    ) -> PutAnswer:
        """Add an item, or replace the one with this key.

        Example: `client.put("shop", "hats/1", "hat.jpg", {"price": 9.5}).items[0].id`
        """
        return self._send(_put(gallery, [NewItem(key, image, attributes or {})]))

    def put_many(self, gallery: str, items: Sequence[NewItem]) -> PutAnswer:
        """Put items in one request; a bad image fails alone.

        Example: `client.put_many("shop", [NewItem("a", "a.jpg"), NewItem("b", "b.jpg")]).failed`
        """
        return self._send(_put(gallery, items))

    def items(
        self,
        gallery: str,
        *,
        offset: int = 0,
        limit: int = 50,
        filter: Filter | None = None,  # noqa: A002 (the name that the service has)
        key_prefix: str = "",
    ) -> ItemPage:
        """A page of items, in the order of their numbers.

        Example: `client.items("shop", filter="price < 20", limit=10).total`
        """
        return self._send(_list(gallery, offset, limit, filter, key_prefix))

    def each_item(
        self,
        gallery: str,
        *,
        filter: Filter | None = None,  # noqa: A002
        key_prefix: str = "",
    ) -> Iterator[ItemModel]:
        """Every item that fits, page by page.

        Example: `[item.key for item in client.each_item("shop", key_prefix="hats/")]`
        """
        offset, total = 0, 1
        while offset < total:
            page = self._send(_list(gallery, offset, _PAGE, filter, key_prefix))
            yield from page.items
            offset, total = offset + _PAGE, page.total

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
        return await self.put_many(gallery, [NewItem(key, image, attributes or {})])

    async def put_many(self, gallery: str, items: Sequence[NewItem]) -> PutAnswer:
        """Put items in one request; a bad image fails alone.

        Example: `await client.put_many("shop", [NewItem("a", "a.jpg")])`
        """
        return await self._send(await asyncio.to_thread(_put, gallery, items))

    async def items(
        self,
        gallery: str,
        *,
        offset: int = 0,
        limit: int = 50,
        filter: Filter | None = None,  # noqa: A002
        key_prefix: str = "",
    ) -> ItemPage:
        """A page of items, in the order of their numbers.

        Example: `(await client.items("shop", limit=10)).items`
        """
        return await self._send(_list(gallery, offset, limit, filter, key_prefix))

    async def each_item(
        self,
        gallery: str,
        *,
        filter: Filter | None = None,  # noqa: A002
        key_prefix: str = "",
    ) -> AsyncIterator[ItemModel]:
        """Every item that fits, page by page.

        Example: `[item.key async for item in client.each_item("shop")]`
        """
        offset, total = 0, 1
        while offset < total:
            page = await self._send(_list(gallery, offset, _PAGE, filter, key_prefix))
            for item in page.items:
                yield item
            offset, total = offset + _PAGE, page.total

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


def _put(gallery: str, items: Sequence[NewItem]) -> Call[PutAnswer]:
    parts = [file_part("image", image_bytes(item.image)) for item in items]
    parts += [text_part("key", item.key) for item in items]
    parts += [text_part("attributes", json.dumps(dict(item.attributes))) for item in items]
    return Call("PUT", _items(gallery), model(PutAnswer), parts=parts)


def _list(
    gallery: str, offset: int, limit: int, where: Filter | None, key_prefix: str
) -> Call[ItemPage]:
    text = json.dumps(where) if isinstance(where, Mapping) else where
    query = {"offset": offset, "limit": limit, "filter": text, "key_prefix": key_prefix}
    return Call("GET", _items(gallery), model(ItemPage), query=query)


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
