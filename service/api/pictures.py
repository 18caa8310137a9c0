"""The pictures of items over HTTP."""

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request, Response
from fastapi import Query as Parameter
from pydantic import BeforeValidator

from embedder import errors
from indexer.ingest.pictures import ItemImage, is_shown, item_bytes, shown
from indexer.types import Item
from service.api.reading import FAILURES, MAX_ID, look
from service.galleries.locations import VERSION_PATTERN, VERSION_TEXT, check_generation
from service.galleries.pictures import SIDES_PX
from service.galleries.registry import Served
from service.http.openapi import problems
from service.problems import KINDS
from service.runtime import Runtime

_SIZE_TEXT = (
    f"A JPEG of at most so many pixels a side, one of {', '.join(map(str, SIDES_PX))}; default: "
    "the picture as it is, BMP and TIFF as a JPEG."
)

Size = Literal[160, 320, 640]
_Size = Annotated[
    Size | None,
    BeforeValidator(lambda text: {str(side): side for side in SIDES_PX}.get(text, text)),
    Parameter(description=_SIZE_TEXT),
]


def build_router(runtime: Runtime) -> APIRouter:
    """The route of pictures."""
    router = APIRouter()

    @router.get(
        "/galleries/{name}/items/{item_id}/image",
        response_class=Response,
        responses={
            200: {"content": {"image/*": {}}, "description": "The picture."},
            304: {"description": "Unchanged since the given ETag."},
            **problems(*FAILURES, KINDS[errors.ItemNotFoundError]),
        },
        summary="The picture of an item",
    )
    async def item_image(
        request: Request,
        name: str,
        item_id: Annotated[int, Path(ge=0, le=MAX_ID)],
        version: Annotated[
            str | None, Parameter(pattern=VERSION_PATTERN, description=VERSION_TEXT)
        ] = None,
        size: _Size = None,
    ) -> Response:
        """The picture as a browser can show it; items are found by number only."""
        await runtime.registry.refresh_if_unknown(name)
        with runtime.registry.lease(name) as served:
            gallery = served.gallery
            check_generation(name, gallery.generation, version)
            etag = f'"{gallery.generation}-{item_id}{f"-{size}" if size else ""}"'
            headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
            if etag in request.headers.get("if-none-match", ""):
                # It may have been removed.
                await look(runtime, "the picture", lambda: gallery.item(item_id))
                return Response(status_code=304, headers=headers)
            data, media_type = await _picture(runtime, served, item_id, size)
        return Response(data, media_type=media_type, headers=headers)

    return router


async def _picture(
    runtime: Runtime, served: Served, item_id: int, size: int | None
) -> tuple[bytes, str]:
    """The picture of an item and its media type. What is decoded is decoded elsewhere."""

    def find() -> tuple[Item, ItemImage | None]:
        item = served.gallery.item(item_id)
        as_it_is = size is None and is_shown(item.format)
        return item, _stored(served, item) if as_it_is else None

    item, picture = await look(runtime, "the picture", find)
    if picture is not None:
        return picture.data, picture.media_type

    async def read() -> bytes:
        return await look(runtime, "the picture", lambda: _bytes(served, item))

    # Copies of a folder share their generation and its numbers.
    key = f"{served.name}-{served.gallery.generation}-{item_id}"
    return await runtime.renditions.get(key, read, size), "image/jpeg"


def _stored(served: Served, item: Item) -> ItemImage:
    """A picture that browsers show: the file that was indexed, or the one that was uploaded.

    Raises: ItemNotFoundError, GalleryError.
    """
    data = _uploaded(served, item)
    return served.gallery.image(item.id) if data is None else shown(data, item.format)


def _bytes(served: Served, item: Item) -> bytes:
    """As `_stored`, of any format, as it is."""
    if is_shown(item.format):
        return _stored(served, item).data
    data = _uploaded(served, item)
    return item_bytes(served.gallery.image_root, item) if data is None else data


def _uploaded(served: Served, item: Item) -> bytes | None:
    pictures = served.pictures
    if pictures is None or item.path or not pictures.has(item.sha256):
        return None
    return pictures.read(item.sha256)
