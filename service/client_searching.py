"""Searches of the client: what to look for, and the calls of both kinds of client."""

import asyncio
import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

from service.client_call import (
    Call,
    Image,
    Part,
    address,
    file_part,
    image_bytes,
    is_image,
    json_text,
    model,
    text_part,
)
from service.client_errors import ArgumentError
from service.client_transport import AsyncSender, Sender
from service.schemas.search import BatchAnswer, SearchAnswer

Crop = tuple[float, float, float, float]
"""left, top, width, height as fractions of the upright image."""

Images = Image | Sequence[Image]
Filter = str | Mapping[str, Any]
_REPEATED = ("crops", "positives", "negatives")


class SearchOptions(TypedDict, total=False):
    """What every search can be given; docs/api.md explains each. None is as not given."""

    k: int | None
    offset: int | None
    min_score: float | None
    min_probability: float | None
    filter: Filter | None
    group_by: str | None
    group_score: Literal["best", "mean"] | None
    group_size: int | None
    distinct: bool | None
    exact: bool | None


class LookingOptions(SearchOptions, total=False):
    """What a search with images can be given beside them. `crops` are of each image."""

    gallery: str | None
    crops: Sequence[Crop] | None
    positives: Sequence[str] | None
    negatives: Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Query:
    """One search of a batch: `Query("shoe.jpg", {"k": 5})`."""

    images: Images = ()
    options: LookingOptions | None = None


class Searching(Sender):
    """Searches that wait for their answer."""

    def search(self, images: Images = (), **options: Unpack[LookingOptions]) -> SearchAnswer:
        """The items most like the mean of the images, crops and positives.

        Example: `client.search("shoe.jpg", k=5, filter='colour = "red"').hits[0].key`
        """
        return self._send(_search(images, options))

    def search_each(self, images: Images = (), **options: Unpack[LookingOptions]) -> BatchAnswer:
        """As `search`, with an answer for each image and crop.

        Example: `client.search_each("street.jpg", crops=[(0, 0, 0.5, 1), (0.5, 0, 0.5, 1)])`
        """
        return self._send(_search_each(images, options))

    def search_batch(self, queries: Sequence[Query]) -> BatchAnswer:
        """Several searches at once; each fails alone.

        Example: `client.search_batch([Query("a.jpg"), Query("b.jpg", {"k": 3})]).answers`
        """
        return self._send(_batch(queries))

    def similar(self, gallery: str, item_id: int, **options: Unpack[SearchOptions]) -> SearchAnswer:
        """The items most like one of the gallery, without it.

        Example: `client.similar("shop", 17, k=10)`
        """
        return self._send(_similar(gallery, item_id, options))


class AsyncSearching(AsyncSender):
    """The same searches in an event loop."""

    async def search(self, images: Images = (), **options: Unpack[LookingOptions]) -> SearchAnswer:
        """The items most like the mean of the images, crops and positives.

        Example: `(await client.search("shoe.jpg", k=5)).hits`
        """
        return await self._send(await asyncio.to_thread(_search, images, options))

    async def search_each(
        self, images: Images = (), **options: Unpack[LookingOptions]
    ) -> BatchAnswer:
        """As `search`, with an answer for each image and crop.

        Example: `await client.search_each(["a.jpg", "b.jpg"])`
        """
        return await self._send(await asyncio.to_thread(_search_each, images, options))

    async def search_batch(self, queries: Sequence[Query]) -> BatchAnswer:
        """Several searches at once; each fails alone.

        Example: `await client.search_batch([Query("a.jpg"), Query("b.jpg")])`
        """
        return await self._send(await asyncio.to_thread(_batch, queries))

    async def similar(
        self, gallery: str, item_id: int, **options: Unpack[SearchOptions]
    ) -> SearchAnswer:
        """The items most like one of the gallery, without it.

        Example: `await client.similar("shop", 17, k=10)`
        """
        return await self._send(_similar(gallery, item_id, options))


def _search(images: Images, options: LookingOptions) -> Call[SearchAnswer]:
    return Call("POST", "/search", model(SearchAnswer), parts=_form(images, options))


def _search_each(images: Images, options: LookingOptions) -> Call[BatchAnswer]:
    parts = [*_form(images, options), text_part("combine", "separate")]
    return Call("POST", "/search", model(BatchAnswer), parts=parts)


def _batch(queries: Sequence[Query]) -> Call[BatchAnswer]:
    body = {"queries": [_query_json(query) for query in queries]}
    return Call("POST", "/search/batch", model(BatchAnswer), json=body)


def _similar(gallery: str, item_id: int, options: SearchOptions) -> Call[SearchAnswer]:
    path = address("galleries", gallery, "items", item_id, "similar")
    query = {name: _text(value) for name, value in _given(options).items()}
    return Call("GET", path, model(SearchAnswer), query=query)


def _form(images: Images, options: LookingOptions) -> list[Part]:
    given = _given(options)
    parts = [file_part("image", image_bytes(image)) for image in _listed(images)]
    parts += [text_part("crop", ",".join(map(str, crop))) for crop in given.get("crops", ())]
    parts += [text_part("positive", key) for key in given.get("positives", ())]
    parts += [text_part("negative", key) for key in given.get("negatives", ())]
    fields = {name: value for name, value in given.items() if name not in _REPEATED}
    return [*parts, *(text_part(name, _text(value)) for name, value in fields.items())]


def _query_json(query: Query) -> dict[str, Any]:
    options = _given(query.options or {})
    crops = [list(crop) for crop in options.pop("crops", ())]
    images = [
        {"data": base64.b64encode(image_bytes(image)).decode(), "crops": crops}
        for image in _listed(query.images)
    ]
    return {"images": images, **options}


def _listed(images: Images) -> Sequence[Image]:
    if is_image(images):
        return [images]  # type: ignore[list-item]
    if not isinstance(images, Iterable):
        raise ArgumentError(f"A {type(images).__name__} is no image; send a path, bytes or a file.")
    return images  # type: ignore[return-value]


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _text(value: object) -> object:
    return json_text(value) if isinstance(value, Mapping) else value
