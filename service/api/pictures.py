"""Pictures of items over HTTP."""

import contextlib
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BeforeValidator

from kinlens.embedder import errors
from kinlens.indexer.pictures import ItemImage, is_shown, item_bytes, shown
from kinlens.indexer.types import Item
from kinlens.service.api.galleries import FAILURES, ItemId, Version
from kinlens.service.galleries.registry import Served
from kinlens.service.galleries.renditions import SIDES_PX
from kinlens.service.http.openapi import problems
from kinlens.service.problems import KINDS
from kinlens.service.runtime import Runtime

Size = Literal[160, 320, 640]
AS_SIZE = BeforeValidator(lambda text: {str(side): side for side in SIDES_PX}.get(text, text))
"""The number that the text of an address means."""

_UNKNOWN_ITEM = KINDS[errors.ItemNotFoundError]
_PICTURE = {"content": {"image/*": {}}, "description": "The picture."}
_SIZE_TEXT = (
    f"A JPEG of at most so many pixels a side, one of {', '.join(map(str, SIDES_PX))}; default: "
    "the picture as it is, BMP, TIFF and HEIC as a JPEG."
)


PictureSize = Annotated[Size | None, AS_SIZE, Query(description=_SIZE_TEXT)]
PICTURE_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: _PICTURE,
    304: {"description": "Unchanged since the given ETag."},
    **problems(*FAILURES, _UNKNOWN_ITEM),
}


def build_router(runtime: Runtime) -> APIRouter:
    """The routes of pictures."""
    router = APIRouter()

    @router.get(
        "/galleries/{name}/items/{item_id}/image",
        response_class=Response,
        responses=PICTURE_ANSWERS,
        summary="The picture of an item",
    )
    async def item_image(
        request: Request,
        name: str,
        item_id: ItemId,
        version: Version = None,
        size: PictureSize = None,
    ) -> Response:
        """The picture as a browser can show it."""
        return await picture_of(runtime, request, name, item_id, version, size)

    return router


async def picture_of(
    runtime: Runtime,
    request: Request,
    name: str,
    item_id: int,
    version: str | None,
    size: int | None,
) -> Response:
    """The answer with the picture of an item."""
    async with runtime.registry.find(name) as served:
        gallery = served.gallery
        served.check_generation(version)
        etag = f'"{gallery.generation}-{item_id}{f"-{size}" if size else ""}"'
        headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
        if etag in request.headers.get("if-none-match", ""):
            # It may have been removed.
            await runtime.read("the picture", lambda: gallery.item(item_id), served=served)
            return Response(status_code=304, headers=headers)
        data, media_type = await _picture(runtime, served, item_id, size)
    return Response(data, media_type=media_type, headers=headers)


async def _picture(
    runtime: Runtime, served: Served, item_id: int, size: int | None
) -> tuple[bytes, str]:
    """The picture of an item and its media type. What is decoded is decoded elsewhere."""
    gallery = served.gallery

    def find() -> tuple[Item, ItemImage | None]:
        item = gallery.item(item_id)
        as_it_is = size is None and is_shown(item.format)
        return item, shown(original(served, item), item.format) if as_it_is else None

    item, picture = await runtime.read("the picture", find, served=served)
    if picture is not None:
        return picture.data, picture.media_type

    async def read() -> bytes:
        return await runtime.read("the picture", lambda: original(served, item), served=served)

    key = f"{served.name}/{gallery.generation}-{item_id}"  # a copied folder has its generation too
    return await runtime.renditions.get(key, read, size), "image/jpeg"


def original(served: Served, item: Item) -> bytes:
    """The file as published, as uploaded, or as indexed.

    Raises: ItemNotFoundError, GalleryError.
    """
    if served.follows is not None and served.uploads is not None:
        with contextlib.suppress(errors.ItemNotFoundError):  # it was published without pictures
            return served.uploads.read(item.sha256)
    if item.path or served.uploads is None:
        return item_bytes(served.gallery.image_root, item)
    return served.uploads.read(item.sha256)
