"""Boxes of the objects in a photo over HTTP, as crops to search with."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from kinlens.embedder import errors
from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.types import SHORT
from kinlens.models import BoxesAnswer, BoxModel
from kinlens.service.api import requests
from kinlens.service.api.galleries import FAILURES, IMAGE_FAILURES
from kinlens.service.api.requests import BoxesRequest
from kinlens.service.api.search import FILE, NO_STORE, PNG, while_connected
from kinlens.service.concurrency import within
from kinlens.service.encoding.model import View
from kinlens.service.http.bodies import FORM, IMAGE, JSON, RAW
from kinlens.service.http.openapi import body_docs, inlined, problems
from kinlens.service.http.rules import RequestRoute, rule
from kinlens.service.runtime import Runtime

_LIMITED = ("The search for boxes", "Send a smaller image, or try again in a second.")


def _docs() -> dict[str, Any]:
    schema = inlined(BoxesRequest)
    gallery = schema["properties"]["gallery"]
    name = {"type": "string", "description": gallery["description"]}
    form = {
        "type": "object",
        "properties": {"image": FILE, "gallery": name},
        "required": ["image"],
        "additionalProperties": False,
    }
    content = {
        FORM: {"schema": form},
        JSON: {"schema": schema, "examples": {"image": {"value": {"images": [{"data": PNG}]}}}},
        RAW: {"schema": FILE},
        IMAGE: {"schema": FILE},
    }
    of_query = {"type": "string"}
    parameter = {"name": "gallery", "in": "query", "required": False, "schema": of_query}
    return {"parameters": [parameter | {"description": name["description"]}], **body_docs(content)}


router = APIRouter(route_class=RequestRoute)


@router.post(
    "/boxes",
    response_model=BoxesAnswer,
    responses={
        200: {"description": "The boxes, best first."},
        **problems(*FAILURES, *IMAGE_FAILURES, errors.SearchError),
    },
    summary="Find objects in a photo",
)
@rule("search", "items", "image", docs=_docs)
async def boxes(request: Request) -> Response:
    """The boxes of the objects in a photo, which can be sent as crops of a search.

    Send a form, JSON, or the raw bytes of one image with `gallery` in the query string. 422 if the
    bundle of the gallery has no detector (`has_boxes` in GET /galleries).
    """
    runtime: Runtime = request.app.state.runtime
    view, gallery = await requests.read_boxes(request)
    answer = await while_connected(request, _found(runtime, view, gallery))
    return Response(to_json(answer), headers=NO_STORE, media_type=JSON)


async def _found(runtime: Runtime, view: View, gallery: str | None) -> BoxesAnswer:
    async with runtime.registry.find(gallery) as served:
        model = served.model
        detector = model.embedder.boxes
        if detector is None:
            raise InvalidParameterError(
                f"The model of gallery {served.name}, bundle {model.bundle_id[:SHORT]}, has no "
                "detector. Attach one with kinlens-train attach BUNDLE --boxes detector.onnx, and "
                "serve the new bundle; galleries need no rebuild. Or search with crops = auto."
            )
        served.acquire()  # until the search thread is done, even if the client has disconnected
        async with within(runtime.settings.request_timeout_ms / 1e3, *_LIMITED):
            work = partial(model.boxes, view)
            found = await runtime.search_threads.run(work, after=served.release)
        return BoxesAnswer(
            bundle_id=model.bundle_id,
            gallery=served.name,
            boxes=[
                BoxModel(box=one.box, score=one.score, label=detector.label(one.kind))
                for one in found
            ],
        )
