"""The pictures of items over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi import Query as Parameter

from embedder import errors
from indexer.pictures import ItemImage, shown
from service.openapi import problems
from service.problems import KINDS
from service.routes.reading import FAILURES, MAX_ID, VERSION_DIGITS, look
from service.runtime import Runtime
from service.types import ItemImage as AnyImage
from service.types import SearchableGallery
from service.uploads import Uploads

_VERSION_TEXT = "The gallery generation that the number is from; default: the one being served."
_VERSION = rf"^[0-9a-f]{{{VERSION_DIGITS},64}}$"


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
            str | None, Parameter(pattern=_VERSION, description=_VERSION_TEXT)
        ] = None,
    ) -> Response:
        """The picture as a browser can show it; items are found by number only."""
        with runtime.registry.lease(name) as served:
            gallery = served.gallery
            check_generation(name, gallery, version)
            etag = f'"{gallery.generation}-{item_id}"'
            headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
            if etag in request.headers.get("if-none-match", ""):
                # It may have been removed.
                await look(runtime, "the picture", lambda: gallery.item(item_id))
                return Response(status_code=304, headers=headers)
            picture = await look(
                runtime, "the picture", lambda: picture_of(gallery, item_id, runtime.uploads)
            )
        return Response(picture.data, media_type=picture.media_type, headers=headers)

    return router


def picture_of(gallery: SearchableGallery, item_id: int, uploads: Uploads | None) -> AnyImage:
    """The picture of an item: the file that was indexed, or the one that was uploaded.

    Raises: ItemNotFoundError, GalleryError.
    """
    if uploads is not None:
        item = gallery.item(item_id)
        if not item.path and uploads.has(item.sha256):
            image: ItemImage = shown(uploads.open(item.sha256), item.format)
            return image
    return gallery.image(item_id)


def check_generation(name: str, gallery: SearchableGallery, version: str | None) -> None:
    """Raises: ItemNotFoundError for a number from another generation than the one served."""
    if version is not None and not gallery.generation.startswith(version):
        raise errors.ItemNotFoundError(
            f"This link is from version {version[:VERSION_DIGITS]} of gallery {name}, which was "
            f"built again and is at version {gallery.generation[:VERSION_DIGITS]} now. "
            "Search again."
        )
