"""Searches over HTTP, and the boxes to search with: the routes and their OpenAPI documentation.

`kinlens.service.api.requests` parses the forms, JSON and raw images, not FastAPI, so the
documentation of the bodies is derived here from its models.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import Field
from pydantic_core import to_json

from kinlens import models
from kinlens.embedder import errors
from kinlens.embedder.types import SHORT
from kinlens.service.access.links import PREFIX, SIGNER, with_links
from kinlens.service.api import requests
from kinlens.service.api.galleries import (
    FAILURES,
    IMAGE_FAILURES,
    ITEM_PATHS,
    Generation,
    ItemRef,
    Service,
)
from kinlens.service.api.images import original, shown_item
from kinlens.service.api.requests import BoxesRequest, SearchFields, SearchRequest, Strict
from kinlens.service.concurrency import within
from kinlens.service.encoding.model import View
from kinlens.service.galleries.feedback import FeedbackStore, Question
from kinlens.service.http.bodies import FORM, IMAGE, JSON, RAW
from kinlens.service.http.openapi import body_docs, inlined, problems
from kinlens.service.http.rules import RequestRoute, Route, rule
from kinlens.service.problems import CLIENT_DISCONNECTED, RefusedError, described, request_id_of
from kinlens.service.runtime import Runtime
from kinlens.service.search.explanation import explain
from kinlens.service.search.query import Answer, Query
from kinlens.service.settings import Settings

T = TypeVar("T")

_BOXES_LIMITED = ("The search for boxes", "Send a smaller image, or try again in a second.")
_STAGES = tuple(models.Timings.model_fields)
_NO_STORE = {"Cache-Control": "no-store"}
_WATCH_AFTER_S = 0.1
_SIMILAR = (*FAILURES, errors.ItemNotFoundError, errors.FilterError)
_SEARCH = (*_SIMILAR, *IMAGE_FAILURES, errors.SearchError)
_PNG = (  # red and blue, 8 x 8 px
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAGklEQVR42mM8ISfHAANhDKvgbCYGHGBw"
    "SgAAioUCFJLJ2DgAAAAASUVORK5CYII="
)
_IMAGES = [{"data": _PNG}]
_VECTOR = [0.5, 0.5, 0.5, 0.5]  # of a model with four numbers
_REQUESTS = {
    "image": {"value": {"images": _IMAGES, "k": 5}},
    "crops": {"value": {"images": [{"data": _PNG, "crops": [[0, 0, 0.5, 1], [0.5, 0, 0.5, 1]]}]}},
    "filter and groups": {
        "value": {
            "images": _IMAGES,
            "min_score": 0.5,
            "filter": {"colour": "red", "price": {"<": 20}},
            "group_by": "product",
            "group_size": 3,
        }
    },
    "image and vector": {
        "value": {"images": _IMAGES, "vectors": [{"vector": _VECTOR, "weight": 0.5}], "k": 5}
    },
    "words": {"value": {"texts": ["green mug"], "k": 5}},
    "image and words": {
        "value": {"images": _IMAGES, "texts": [{"text": "green", "weight": 0.5}], "k": 5}
    },
    "facets": {"value": {"images": _IMAGES, "min_score": 0.5, "facets": ["colour", "price"]}},
    "like and unlike": {
        "value": {"positives": ["shoes/0017.jpg"], "negatives": ["boots/0004.jpg"]}
    },
}
_BATCHES = {
    "two": {"value": {"queries": [{"images": _IMAGES, "k": 5}, {"positives": ["shoes/0017.jpg"]}]}}
}
_FILE = {"type": "string", "format": "binary"}
_NAMES = {"type": "string", "examples": ["colour,price"]}
_VECTORS = {"type": "string", "examples": ['[{"vector": [0.6, 0.8], "weight": 0.5}]']}
_TEXTS = {"type": "string", "examples": ['["green"]', '[{"text": "green", "weight": 0.5}]']}
_CROP_TEXT = (
    "left,top,width,height as fractions of the upright image; or auto for the whole image and "
    "parts of it. Applies to each image."
)
_CROP = {"type": "string", "examples": ["0.1,0.2,0.5,0.5"]}


class BatchRequest(Strict):
    """Several searches, validated and answered independently."""

    queries: Annotated[
        list[SearchRequest], Field(min_length=1, max_length=Settings.max_batch_queries)
    ]


def _text_fields(model: type[SearchFields]) -> dict[str, Any]:
    """The schema of each field in a form or a query string, where values are never null."""
    texts = {}
    for name, schema in inlined(model)["properties"].items():
        choice = schema.pop("anyOf", [{}])[0]  # the first type is text if allowed; null is last
        default = schema.pop("default", None)
        known = {} if default is None else {"default": default}
        texts[name.removesuffix("s")] = {**choice, **schema, **known}  # positives -> positive
    for name in ("facets", "fields"):
        texts[name] = {**_NAMES, "description": texts.pop(name.removesuffix("s"))["description"]}
    for name, example in (("vectors", _VECTORS), ("texts", _TEXTS)):
        if schema := texts.pop(name.removesuffix("s"), None):
            texts[name] = {**example, "description": f"{schema['description']} As JSON."}
    if texts.pop("image", None):
        crops = {"type": "array", "items": _CROP, "maxItems": Settings.max_crops}
        texts["crop"] = {**crops, "description": _CROP_TEXT}
    return texts


def _parameters(model: type[SearchFields]) -> list[dict[str, Any]]:
    """The OpenAPI parameters for the fields of `model` in a query string."""
    return [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": schema.pop("description"),
            "schema": {key: value for key, value in schema.items() if key != "title"},
        }
        for name, schema in _text_fields(model).items()
    ]


def _form(max_images: int) -> dict[str, Any]:
    image = {
        "type": "array",
        "items": _FILE,
        "maxItems": max_images,
        "description": "JPEG, PNG, WebP, BMP, TIFF, GIF, AVIF or HEIC; one part per image. Of an "
        "animation, the first frame. The content decides the format.",
    }
    return {
        "type": "object",
        "properties": {"image": image, **_text_fields(SearchRequest)},
        "additionalProperties": False,
    }


def _search_docs() -> dict[str, Any]:
    body = _image_docs(_form(Settings.max_images), SearchRequest, _REQUESTS)
    return {"parameters": _parameters(SearchRequest), **body}


def _image_docs(
    form: dict[str, Any], model: type[Strict], examples: dict[str, Any]
) -> dict[str, Any]:
    """The body of a request with an image: a form, JSON, or the image itself."""
    content = {
        FORM: {"schema": form},
        JSON: {"schema": inlined(model), "examples": examples},
        RAW: {"schema": _FILE},
        IMAGE: {"schema": _FILE},
    }
    return body_docs(content)


def _batch_docs() -> dict[str, Any]:
    content = {
        JSON: {"schema": inlined(BatchRequest), "examples": _BATCHES},
        FORM: {"schema": _form(Settings.max_batch_queries) | {"required": ["image"]}},
    }
    return body_docs(content)


def _boxes_docs() -> dict[str, Any]:
    name = {"type": "string", "description": "Its bundle finds the boxes; default: the first one."}
    form = {
        "type": "object",
        "properties": {"image": _FILE, "gallery": name},
        "required": ["image"],
        "additionalProperties": False,
    }
    parameter = {"name": "gallery", "in": "query", "required": False, "schema": name}
    examples = {"image": {"value": {"images": _IMAGES}}}
    return {"parameters": [parameter], **_image_docs(form, BoxesRequest, examples)}


router = APIRouter(route_class=RequestRoute)


@router.post(
    "/search",
    response_model=models.SearchAnswer,
    responses={200: {"description": "The hits or groups."}, **problems(*_SEARCH)},
    summary="Search with images or items",
)
@rule("search", "items", "image", docs=_search_docs)
async def search(request: Request) -> Response:
    """The items of a gallery that are visually most similar to the query, best first.

    Send a form, JSON, or the raw bytes of an image with the other fields in the query string.
    Several images, crops and items are combined into one query. For several queries use
    POST /search/batch.
    """
    runtime: Runtime = request.app.state.runtime
    query = await requests.read_search(request)
    await requests.charge(request, [query])
    since = request.scope["state"]["read_at"]
    answer = await while_connected(request, runtime.searching.search(query, since))
    return _response(answer, runtime.feedback)


@router.post(
    "/search/batch",
    response_model=models.BatchAnswer,
    responses={
        200: {"description": "An outcome for each query, in order."},
        **problems(errors.InvalidParameterError, errors.OverloadedError),
    },
    summary="Several searches at once",
)
@rule("search", "items", "batch", docs=_batch_docs)
async def search_batch(request: Request) -> Response:
    """Several independent searches; a query that fails has a problem in place of an answer.

    Send JSON with a list of searches, or a form in which each image is a query and all queries
    share the other fields.
    """
    runtime: Runtime = request.app.state.runtime
    queries = await requests.read_batch(request)
    await requests.charge(request, queries)
    since = request.scope["state"]["read_at"]
    answers = await while_connected(request, runtime.searching.search_all(queries, since))
    outcomes = b",".join(_outcome(answer, request, runtime.feedback) for answer in answers)
    return Response(b'{"answers":[' + outcomes + b"]}", headers=_NO_STORE, media_type=JSON)


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
    view, gallery = await requests.read_boxes(request)
    since = request.scope["state"]["read_at"]
    answer = await while_connected(request, _boxes(runtime, view, gallery, since))
    return Response(to_json(answer), headers=_NO_STORE, media_type=JSON)


router.route_class = Route

for _path, _by, _item in ITEM_PATHS:

    @router.get(
        f"{_path}/similar",
        response_model=models.SearchAnswer,
        responses={
            200: {"description": "Similar items, without the item itself."},
            **problems(*_SIMILAR),
        },
        summary=f"Search with an item{_by}",
    )
    @rule("search", "items", docs=lambda: {"parameters": _parameters(SearchFields)})
    async def similar(
        runtime: Service, request: Request, name: str, generation: Generation, ref: ItemRef = _item
    ) -> Response:
        """The items that are visually most similar to this one, without it, best first."""
        sent = request.query_params.multi_items()
        options = [pair for pair in sent if pair[0] not in ("generation", "version")]
        query = await requests.read_fields(request, options)
        await requests.charge(request, [query])
        generation = generation or ref.generation
        query, key = replace(query, gallery=name, like=ref.id, generation=generation), ""
        since = request.scope["state"]["read_at"]
        if runtime.feedback is not None:
            async with runtime.registry.find(name) as served:
                served.check_generation(generation)
                read = partial(served.gallery.item, ref.id)
                key = (await runtime.read("the item", read, served=served)).key
                query = replace(query, generation=served.gallery.generation)
        answer = await while_connected(request, runtime.searching.search(query, since))
        return _response(answer, runtime.feedback, key)

    @router.post(
        f"{_path}/explain",
        name="explain" if _by else "explain_hit",  # part of the operation id
        response_model=models.ExplainAnswer,
        responses={
            200: {"description": "The share of each region in the score."},
            **problems(*_SEARCH, errors.GalleryConflictError),
        },
        summary=f"Explain a hit{_by}",
    )
    @rule("search", "items", "image", docs=_search_docs)
    async def explain_hit(
        runtime: Service, request: Request, name: str, ref: ItemRef = _item
    ) -> Response:
        """Which regions of query and hit contribute to the score; send the request of the search.

        The gallery is that of the URL; `k`, `filter` and similar fields are ignored. It needs a
        bundle that was exported with a map (`has_map` of the gallery).
        """
        query = await requests.read_search(request)
        if query.best_view:
            raise errors.InvalidParameterError(
                "combine = best is not supported here; send only the image or crop that found the "
                "hit."
            )
        await requests.charge(request, [query])
        since = request.scope["state"]["read_at"]
        answer = await while_connected(request, _explained(runtime, name, ref, query, since))
        return Response(to_json(answer), headers=_NO_STORE, media_type=JSON)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, for a request whose body was read; cancel it if the client disconnects.

    Raises: RefusedError, any error of `work`.
    """
    working = asyncio.current_task()
    assert working is not None
    watching: asyncio.Task[None] | None = None
    is_disconnected = False

    async def watch() -> None:
        nonlocal is_disconnected
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_disconnected = True
        working.cancel()

    def begin() -> None:
        nonlocal watching
        watching = asyncio.create_task(watch())

    # A task costs more than most answers from the cache.
    timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, begin)
    try:
        return await work
    except asyncio.CancelledError:
        if is_disconnected and not working.uncancel():
            raise RefusedError(
                CLIENT_DISCONNECTED, "The client disconnected before its answer."
            ) from None
        raise
    finally:
        timer.cancel()
        if watching is not None:
            watching.cancel()


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


def _response(answer: Answer, feedback: FeedbackStore | None, like: str = "") -> Response:
    timings = _timings(answer)
    stages = ", ".join([f"{stage};dur={ms}" for stage, ms in timings.items()])
    headers = {**_NO_STORE, "X-Kinlens-Bundle": answer.bundle_id, "Server-Timing": stages}
    return Response(_json(answer, timings, feedback, like), headers=headers, media_type=JSON)


def _outcome(answer: Answer | Exception, request: Request, feedback: FeedbackStore | None) -> bytes:
    if isinstance(answer, Answer):
        return (
            b'{"status":200,"answer":'
            + _json(answer, _timings(answer), feedback)
            + b',"problem":null}'
        )
    problem = described(answer, request_id=request_id_of(request.scope), instance=request.url.path)
    return to_json({"status": problem["status"], "answer": None, "problem": problem})


def _json(
    answer: Answer, timings: dict[str, float], feedback: FeedbackStore | None, like: str = ""
) -> bytes:
    """The answer as JSON; the results are encoded already and are not parsed again."""
    why = answer.no_probabilities
    head = to_json(
        {
            "bundle_id": answer.bundle_id,
            "gallery": answer.gallery,
            "gallery_version": answer.gallery_version,
            "k": answer.query.k,
            "offset": answer.query.offset,
            "cached": answer.cached,
            "min_score": answer.query.min_score,
            "timings_ms": timings,
            **({} if why is None else {"no_probabilities": why}),
            **({} if feedback is None else {"answer_id": _answer_id(answer, feedback, like)}),
        }
    )
    results = answer.results
    if SIGNER.get() is not None or PREFIX.get():
        results = with_links(results)
    return head[:-1] + b"," + results[1:]


def _answer_id(answer: Answer, feedback: FeedbackStore, like: str) -> str | None:
    """The id for feedback on this answer; None unless the query is one whole image or an item, or
    one text alone in a service that keeps what customers send.

    For several liked items without an image, it is about the first item.
    """
    views, image = answer.query.views, ""
    if len(views) == 1 and isinstance(views[0], View) and views[0].box is None:
        image = views[0].digest
    item = "" if views else like or next(iter(answer.query.positives), "")
    texts = answer.query.texts
    is_text = len(texts) == 1 and not (views or item or answer.query.negatives)
    if is_text and feedback.keeps_words:
        text = " ".join(texts[0][0].split())
        question = Question(answer.gallery, answer.gallery_version, text=text)
        return feedback.sign(question)
    if texts or not (image or item):
        return None
    question = Question(answer.gallery, answer.gallery_version, image, item)
    return feedback.sign(question)


def _timings(answer: Answer) -> dict[str, float]:
    return {name: round(getattr(answer.stages, name), 3) for name in _STAGES}
