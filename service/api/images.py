"""Images over HTTP: those of items, the boxes in a photo, and the regions that explain a hit."""

import contextlib
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BeforeValidator, Field
from pydantic_core import to_json

from kinlens import models
from kinlens.embedder import errors
from kinlens.embedder.types import SHORT, ItemId
from kinlens.indexer.entries import Item
from kinlens.indexer.images import ImageAddress, is_shown, item_bytes, shown
from kinlens.service.api.fields import PlainImage, Strict
from kinlens.service.api.galleries import (
    FAILURES,
    IMAGE_FAILURES,
    ITEM_PATHS,
    Generation,
    ItemRef,
    Service,
)
from kinlens.service.api.search import (
    NO_STORE,
    SEARCH_FAILURES,
    SearchRequest,
    charge,
    parsed,
    read_search,
)
from kinlens.service.concurrency import within
from kinlens.service.encoding.model import View
from kinlens.service.galleries.registry import Served
from kinlens.service.galleries.renditions import SIDES_PX
from kinlens.service.http.bodies import FORM, IMAGE, JSON, RAW, off_loop, read_at, read_body
from kinlens.service.http.openapi import FILE, IMAGES, image_docs, problems, search_docs
from kinlens.service.http.rules import RequestRoute, Route, rule, while_connected
from kinlens.service.runtime import Runtime
from kinlens.service.search.explanation import explain
from kinlens.service.search.query import Query as Search
from kinlens.service.search.query import views_of

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

_BOXES_LIMITED = ("The search for boxes", "Send a smaller image, or try again in a second.")

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

    @router.post(
        f"{_path}/explain",
        name="explain" if _by else "explain_hit",  # part of the operation id
        response_model=models.ExplainAnswer,
        responses={
            200: {"description": "The share of each region in the score."},
            **problems(*SEARCH_FAILURES, errors.GalleryConflictError),
        },
        summary=f"Explain a hit{_by}",
    )
    @rule("search", "items", "image", docs=partial(search_docs, SearchRequest))
    async def explain_hit(
        runtime: Service, request: Request, name: str, ref: ItemRef = _item
    ) -> Response:
        """Which regions of query and hit contribute to the score; send the request of the search.

        The gallery is that of the URL; `k`, `filter` and similar fields are ignored. It needs a
        bundle that was exported with a map (`has_map` of the gallery).
        """
        query = await read_search(request)
        if query.best_view:
            raise errors.InvalidParameterError(
                "combine = best is not supported here; send only the image or crop that found the "
                "hit."
            )
        await charge(request, [query])
        since = read_at(request)
        answer = await while_connected(request, _explained(runtime, name, ref, query, since))
        return Response(to_json(answer), headers=NO_STORE, media_type=JSON)


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


class BoxesRequest(Strict):
    """An image to find boxes in."""

    gallery: Annotated[
        str | None,
        Field(description="Its bundle finds the boxes; default: as in POST /search."),
    ] = None
    images: Annotated[list[PlainImage], Field(min_length=1, max_length=1, fail_fast=True)]


def _boxes_docs() -> dict[str, Any]:
    name = {"type": "string", "description": "Its bundle finds the boxes; default: the first one."}
    form = {
        "type": "object",
        "properties": {"image": FILE, "gallery": name},
        "required": ["image"],
        "additionalProperties": False,
    }
    parameter = {"name": "gallery", "in": "query", "required": False, "schema": name}
    examples = {"image": {"value": {"images": IMAGES}}}
    return {"parameters": [parameter], **image_docs(form, BoxesRequest, examples)}


router.route_class = RequestRoute


@router.post(
    "/boxes",
    response_model=models.BoxesAnswer,
    responses={
        200: {"description": "The boxes, best first."},
        **problems(*FAILURES, *IMAGE_FAILURES, errors.SearchError),
    },
    summary="Find objects in a photo",
)
@rule("search", "items", "image", docs=_boxes_docs)
async def boxes(request: Request) -> Response:
    """The boxes of the objects in a photo, which can be sent as crops of a search.

    Send a form, JSON, or the raw bytes of one image with `gallery` in the query string. 422 if the
    bundle of the gallery has no detector (`has_boxes` in GET /galleries).
    """
    runtime: Runtime = request.app.state.runtime
    body, kind = await read_body(request, FORM, IMAGE, RAW, JSON)

    def read() -> tuple[View, str | None]:
        sent = parsed(BoxesRequest, request, body, kind)
        [view] = views_of(sent.images[0].data)
        return view, sent.gallery

    view, gallery = await off_loop(request, read)
    since = read_at(request)
    answer = await while_connected(request, _boxes(runtime, view, gallery, since))
    return Response(to_json(answer), headers=NO_STORE, media_type=JSON)


async def _boxes(
    runtime: Runtime, view: View, gallery: str | None, since: float
) -> models.BoxesAnswer:
    async with runtime.registry.find(gallery) as served:
        model = served.model
        detector = model.embedder.boxes
        if detector is None:
            raise errors.InvalidParameterError(
                f"The model of gallery {served.name}, bundle {model.bundle_id[:SHORT]}, has no "
                "detector. Attach one with kinlens-train attach BUNDLE --boxes detector.onnx, and "
                "serve the new bundle; galleries need no rebuild. Or search with crops = auto."
            )
        served.acquire()  # until the search thread is done, even if the client has disconnected
        async with within(runtime.settings.request_timeout_ms / 1e3, *_BOXES_LIMITED, since=since):
            work = partial(model.boxes, view)
            found = await runtime.search_threads.run(work, after=served.release)
        return models.BoxesAnswer(
            bundle_id=model.bundle_id,
            gallery=served.name,
            boxes=[
                models.BoxModel(box=one.box, score=one.score, label=detector.label(one.kind))
                for one in found
            ],
        )


async def _explained(
    runtime: Runtime, name: str, ref: ItemRef, query: Search, since: float
) -> models.ExplainAnswer:
    async with runtime.registry.find(name) as served:
        served.check_generation(ref.generation)

        def read() -> tuple[str, bytes]:
            item = shown_item(served, ref.id)
            return item.key, original(runtime, served, item)

        limit_s = runtime.settings.request_timeout_ms / 1e3
        cure = "Send fewer images and crops, or try again in a second."
        async with within(limit_s, "The explanation", cure, since):
            key, image = await runtime.read("the image", read, served=served)
            return await explain(runtime.search_threads, served, query, key, image)
