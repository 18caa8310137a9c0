"""Images of items over HTTP."""

import contextlib
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BeforeValidator

from kinlens.embedder import errors
from kinlens.embedder.types import ItemId
from kinlens.indexer.entries import Item
from kinlens.indexer.images import ImageAddress, is_shown, item_bytes, shown
from kinlens.service.api.galleries import FAILURES, ITEM_PATHS, Generation, ItemRef, Service
from kinlens.service.galleries.registry import Served
from kinlens.service.galleries.renditions import SIDES_PX
from kinlens.service.http.openapi import problems
from kinlens.service.http.rules import Route, rule
from kinlens.service.runtime import Runtime

Size = Literal[160, 320, 480, 640]
AS_SIZE = BeforeValidator(lambda text: {str(side): side for side in SIDES_PX}.get(text, text))
"""A validator that converts the text of a query parameter to a size."""

KEPT = "private, max-age=604800, immutable"
"""`Cache-Control` of thumbnails whose content cannot change."""

_SIZE_TEXT = (
    f"Return a JPEG with this maximum side in pixels, one of {', '.join(map(str, SIDES_PX))}; "
    "default: the stored image, with BMP, TIFF and HEIC converted to JPEG."
)
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/*": {}}, "description": "The image."},
    304: {"description": "Unchanged since the given ETag."},
    **problems(*FAILURES, errors.ItemNotFoundError),
}

router = APIRouter(route_class=Route)

for _path, _by, _item in ITEM_PATHS:

    @router.get(
        f"{_path}/image",
        name="image" if _by else "item_image",  # part of the operation id
        response_class=Response,
        responses=_ANSWERS,
        summary=f"The image of an item{_by}",
    )
    @rule("search", "items")
    async def item_image(
        runtime: Service,
        request: Request,
        name: str,
        generation: Generation,
        size: Annotated[Size | None, AS_SIZE, Query(description=_SIZE_TEXT)] = None,
        ref: ItemRef = _item,
    ) -> Response:
        """The image in a format that browsers can show.

        404: the item was removed, its file is missing or has changed since indexing, or it cannot
        be converted. 503: the file cannot be read, or decoding took too much time or memory; it is
        then not repeated for 30 seconds; or the store of the images does not answer.
        """
        async with runtime.registry.find(name) as served:
            gallery = served.gallery
            served.check_generation(generation or ref.generation)
            etag = f'"{gallery.generation}-{ref.id}{f"-{size}" if size else ""}"'
            # An id, unlike a key, never gets other content within a generation, so browsers need
            # not ask again.
            is_fixed = generation is not None and ref.generation is None and size is not None
            headers = {"ETag": etag, "Cache-Control": KEPT if is_fixed else "private, no-cache"}
            # Before an answer from a cache: the image may be gone.
            item = await runtime.read(
                "the image", lambda: shown_item(served, ref.id), served=served
            )
            if etag in request.headers.get("if-none-match", ""):
                return Response(status_code=304, headers=headers)
            try:
                data, media_type = await _image(runtime, served, item, size)
            except errors.ImageMissingError as error:
                runtime.metrics.missing_images.labels(served.name).inc()
                served.report_missing(item.id, error)
                raise
        return Response(data, media_type=media_type, headers=headers)


async def _image(
    runtime: Runtime, served: Served, item: Item, size: int | None
) -> tuple[bytes, str]:
    """The image of an item and its media type; decoding is done by the decode workers."""
    # Not a read of the gallery: one file that hangs must not stop its searches.
    subject = f"Image {item.id} of gallery {served.name}"

    async def read() -> bytes:
        of_file = partial(original, runtime, served, item)
        return await runtime.read("the image", of_file, "image", subject=subject)

    if size is None and is_shown(item.format):
        image = shown(await read(), item.format)
        return image.data, image.media_type

    key = (
        f"{served.name}/{served.gallery.generation}-{item.id}"  # copied folders share a generation
    )
    return await runtime.renditions.get(key, read, size), "image/jpeg"


def shown_item(served: Served, item_id: ItemId) -> Item:
    """An item that has an image. A file with its sha256 may exist without it: it is deleted later,
    or not at all where it was published. Raises: ItemNotFoundError, GalleryError.
    """
    item = served.gallery.item(item_id)
    if not item.has_image:
        raise errors.ItemNotFoundError(
            f"Item {item.key!r:.200} has no image: it was added as a vector, or its image was not "
            "kept. Put the item again with its image."
        )
    return item


def original(runtime: Runtime, served: Served, item: Item) -> bytes:
    """The original file of an item: as published, as uploaded, or as indexed.

    Raises: ItemNotFoundError, GalleryError; UnreachableError if its store does not answer.
    """
    if served.follows is not None and served.uploads is not None:
        with contextlib.suppress(errors.ItemNotFoundError):  # it was published without images
            return served.uploads.read(item.sha256)
    root = served.gallery.image_root
    if item.path and isinstance(root, ImageAddress):
        return runtime.image_stores.read(root, item)
    if item.path or served.uploads is None:
        return item_bytes(root, item)
    return served.uploads.read(item.sha256)
