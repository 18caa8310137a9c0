"""Regions of photos over HTTP: the boxes to search with, and which regions explain a hit."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field
from pydantic_core import to_json

from kinlens import models
from kinlens.embedder import errors
from kinlens.embedder.types import SHORT
from kinlens.service.api.fields import PlainImage, Strict
from kinlens.service.api.galleries import FAILURES, IMAGE_FAILURES, ITEM_PATHS, ItemRef, Service
from kinlens.service.api.images import original, shown_item
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
from kinlens.service.http.bodies import FORM, IMAGE, JSON, RAW, off_loop, read_body
from kinlens.service.http.openapi import FILE, IMAGES, image_docs, problems, search_docs
from kinlens.service.http.rules import RequestRoute, Route, rule, while_connected
from kinlens.service.runtime import Runtime
from kinlens.service.search.explanation import explain
from kinlens.service.search.query import Query, views_of

_BOXES_LIMITED = ("The search for boxes", "Send a smaller image, or try again in a second.")


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


router = APIRouter(route_class=RequestRoute)


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
    since = request.scope["state"]["read_at"]
    answer = await while_connected(request, _boxes(runtime, view, gallery, since))
    return Response(to_json(answer), headers=NO_STORE, media_type=JSON)


router.route_class = Route

for _path, _by, _item in ITEM_PATHS:

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
        since = request.scope["state"]["read_at"]
        answer = await while_connected(request, _explained(runtime, name, ref, query, since))
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
    runtime: Runtime, name: str, ref: ItemRef, query: Query, since: float
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
