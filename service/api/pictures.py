"""Pictures over HTTP: those of items, and the samples to try a search with."""

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BeforeValidator

from embedder import errors
from indexer.ingest.pictures import ItemImage, is_shown, item_bytes, shown
from indexer.types import Item
from service.api.galleries import FAILURES, ItemId, Version, leased, read_from_disk
from service.api.models import SampleModel, SamplesAnswer
from service.galleries.pictures import MAX_SAMPLES, SIDES_PX, Samples
from service.galleries.registry import Served
from service.http.openapi import problems
from service.problems import INVALID, KINDS
from service.runtime import Runtime

Size = Literal[160, 320, 640]

_UNKNOWN_ITEM = KINDS[errors.ItemNotFoundError]
_PICTURE = {"content": {"image/*": {}}, "description": "The picture."}
_SIZE_TEXT = (
    f"A JPEG of at most so many pixels a side, one of {', '.join(map(str, SIDES_PX))}; default: "
    "the picture as it is, BMP and TIFF as a JPEG."
)


def build_router(runtime: Runtime) -> APIRouter:
    """The routes of pictures; the settings name the folder of samples."""
    router, samples = APIRouter(), Samples(runtime.settings.samples)

    @router.get(
        "/galleries/{name}/items/{item_id}/image",
        response_class=Response,
        responses={
            200: _PICTURE,
            304: {"description": "Unchanged since the given ETag."},
            **problems(*FAILURES, _UNKNOWN_ITEM),
        },
        summary="The picture of an item",
    )
    async def item_image(
        request: Request,
        name: str,
        item_id: ItemId,
        version: Version = None,
        size: Annotated[
            Size | None,
            BeforeValidator(lambda text: {str(side): side for side in SIDES_PX}.get(text, text)),
            Query(description=_SIZE_TEXT),
        ] = None,
    ) -> Response:
        """The picture as a browser can show it; items are found by number only."""
        async with leased(runtime, name) as served:
            gallery = served.gallery
            served.check_generation(version)
            etag = f'"{gallery.generation}-{item_id}{f"-{size}" if size else ""}"'
            headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
            if etag in request.headers.get("if-none-match", ""):
                # It may have been removed.
                await read_from_disk(runtime, "the picture", lambda: gallery.item(item_id))
                return Response(status_code=304, headers=headers)
            data, media_type = await _picture(runtime, served, item_id, size)
        return Response(data, media_type=media_type, headers=headers)

    @router.get("/samples", responses=problems(), summary="List the sample queries")
    async def list_samples() -> SamplesAnswer:
        """Pictures to try a search with; none unless the operator chose a folder of them."""
        listed = [
            SampleModel(name=sample.name, image=f"/samples/{number}")
            for number, sample in enumerate(samples.all())
        ]
        return SamplesAnswer(samples=listed)

    @router.get(
        "/samples/{number}",
        response_class=Response,
        responses={200: _PICTURE, **problems(_UNKNOWN_ITEM, INVALID)},
        summary="A sample query",
    )
    def sample(number: Annotated[int, Path(ge=0, le=MAX_SAMPLES)]) -> Response:
        """The picture of a sample query."""
        media_type = samples.get(number).media_type
        return Response(samples.read(number), media_type=media_type)

    return router


async def _picture(
    runtime: Runtime, served: Served, item_id: int, size: int | None
) -> tuple[bytes, str]:
    """The picture of an item and its media type. What is decoded is decoded elsewhere."""
    gallery = served.gallery

    def find() -> tuple[Item, ItemImage | None]:
        item = gallery.item(item_id)
        as_it_is = size is None and is_shown(item.format)
        return item, _stored(served, item) if as_it_is else None

    item, picture = await read_from_disk(runtime, "the picture", find)
    if picture is not None:
        return picture.data, picture.media_type

    async def read() -> bytes:
        return await read_from_disk(runtime, "the picture", lambda: _bytes(served, item))

    key = f"{served.name}/{gallery.generation}-{item_id}"  # a copied folder has its generation too
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
