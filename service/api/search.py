"""Searches over HTTP: the routes and their OpenAPI documentation.

`kinlens.service.api.requests` parses the forms, JSON and raw images, not FastAPI, so the
documentation of the bodies is derived here from its models.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, create_model
from pydantic_core import to_json

from kinlens.embedder import errors
from kinlens.models import BatchAnswer, ExplainAnswer, QueryShares, SearchAnswer, Timings
from kinlens.service.api.galleries import (
    FAILURES,
    IMAGE_FAILURES,
    Generation,
    ItemId,
)
from kinlens.service.api.images import original
from kinlens.service.api.requests import (
    FORM,
    IMAGE,
    RAW,
    SearchFields,
    SearchModels,
    Strict,
    charge,
    inlined,
    read_batch,
    read_fields,
    read_search,
    search_models,
)
from kinlens.service.galleries.feedback import FeedbackStore, Question
from kinlens.service.galleries.links import with_links
from kinlens.service.http.bodies import JSON, while_connected
from kinlens.service.http.openapi import problems
from kinlens.service.http.rules import RequestRoute, Route, rule
from kinlens.service.problems import PROBLEM_TYPES, described, request_id_of
from kinlens.service.runtime import Runtime
from kinlens.service.search.explanation import explain
from kinlens.service.search.query import Answer, Query

_OF_ID = ("generation", "version")
_HEADERS = {"Cache-Control": "no-store"}
SIMILAR = (*FAILURES, PROBLEM_TYPES[errors.ItemNotFoundError], PROBLEM_TYPES[errors.FilterError])
_SEARCH = (*SIMILAR, *IMAGE_FAILURES, PROBLEM_TYPES[errors.SearchError])
EXPLAIN = (*_SEARCH, PROBLEM_TYPES[errors.GalleryConflictError])
_PNG = (  # red and blue, 8 x 8 px
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAGklEQVR42mM8ISfHAANhDKvgbCYGHGBw"
    "SgAAioUCFJLJ2DgAAAAASUVORK5CYII="
)
_IMAGES = [{"data": _PNG}]
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
    "facets": {"value": {"images": _IMAGES, "min_score": 0.5, "facets": ["colour", "price"]}},
    "like and unlike": {
        "value": {"positives": ["shoes/0017.jpg"], "negatives": ["boots/0004.jpg"]}
    },
}
_BATCHES = {
    "two": {"value": {"queries": [{"images": _IMAGES, "k": 5}, {"positives": ["shoes/0017.jpg"]}]}}
}
_FILE = {"type": "string", "format": "binary"}
_FACETS = {"type": "string", "examples": ["colour,price"]}
_CROP_TEXT = "left,top,width,height as fractions of the upright image; applies to each image."
_CROP = {"type": "string", "examples": ["0.1,0.2,0.5,0.5"]}


def build_router(runtime: Runtime) -> APIRouter:
    """Build the routes of searches, with the limits of the settings."""
    router, models = APIRouter(route_class=RequestRoute), search_models(runtime.settings)
    feedback = runtime.feedback

    @router.post(
        "/search",
        response_model=SearchAnswer,
        responses={
            200: {"description": "The hits or groups."},
            **problems(*_SEARCH),
        },
        openapi_extra=search_docs(models),
        summary="Search with images or items",
    )
    @rule("search", "items", "image")
    async def search(request: Request) -> Response:
        """The items of a gallery that are visually most similar to the query, best first.

        Send a form, JSON, or the raw bytes of an image with the other fields in the query string.
        Several images, crops and items are combined into one query. For several queries use
        POST /search/batch.
        """
        query = await read_search(request, runtime, models)
        await charge(request, [query])
        answer = await while_connected(request, runtime.searching.search(query))
        return _response(answer, feedback)

    @router.post(
        "/search/batch",
        response_model=BatchAnswer,
        responses={
            200: {"description": "An outcome for each query, in order."},
            **problems(
                PROBLEM_TYPES[errors.InvalidParameterError],
                PROBLEM_TYPES[errors.OverloadedError],
            ),
        },
        openapi_extra=_batch_docs(models),
        summary="Several searches at once",
    )
    @rule("search", "items", "batch")
    async def search_batch(request: Request) -> Response:
        """Several independent searches; a query that fails has a problem in place of an answer.

        Send JSON with a list of searches, or a form in which each image is a query and all queries
        share the other fields.
        """
        queries = await read_batch(request, runtime, models)
        await charge(request, queries)
        answers = await while_connected(request, runtime.searching.search_all(queries))
        return _batch_response(answers, request, feedback)

    router.route_class = Route

    @router.get(
        "/galleries/{name}/items/{item_id}/similar",
        response_model=SearchAnswer,
        responses={
            200: {"description": "Similar items, without the item itself."},
            **problems(*SIMILAR),
        },
        openapi_extra={"parameters": search_parameters(models.fields)},
        summary="Search with an item",
    )
    @rule("search", "items")
    async def similar(
        request: Request, name: str, item_id: ItemId, generation: Generation
    ) -> Response:
        """The items that are visually most similar to this one, without it, best first."""
        return await similar_to(runtime, models, request, name, item_id, generation)

    @router.post(
        "/galleries/{name}/items/{item_id}/explain",
        response_model=ExplainAnswer,
        responses={
            200: {"description": "The share of each region in the score."},
            **problems(*EXPLAIN),
        },
        openapi_extra=search_docs(models),
        summary="Explain a hit",
    )
    @rule("search", "items", "image")
    async def explain_hit(request: Request, name: str, item_id: ItemId) -> Response:
        """Which regions of query and hit contribute to the score; send the request of the search.

        The gallery is that of the URL; `k`, `filter` and similar fields are ignored. It needs a
        bundle that was exported with a map (`has_map` of the gallery).
        """
        return await explanation_of(runtime, models, request, name, item_id)

    return router


async def similar_to(
    runtime: Runtime,
    models: SearchModels,
    request: Request,
    name: str,
    item_id: int,
    version: str | None,
) -> Response:
    """The response of a search with an item; the options are in the query string."""
    pairs = [pair for pair in request.query_params.multi_items() if pair[0] not in _OF_ID]
    query = await read_fields(pairs, runtime, models)
    await charge(request, [query])
    query = replace(query, gallery=name, like=item_id, generation=version)
    like = ""
    if runtime.feedback is not None:
        query, like = await _with_key(runtime, query)
    answer = await while_connected(request, runtime.searching.search(query))
    return _response(answer, runtime.feedback, like)


async def explanation_of(
    runtime: Runtime,
    models: SearchModels,
    request: Request,
    name: str,
    item_id: int,
    generation: str | None = None,
) -> Response:
    """The response with the regions of query and item that contribute to their score."""
    query = await read_search(request, runtime, models)
    if query.best_view:
        raise errors.InvalidParameterError(
            "combine = best is not supported here; send only the image or crop that found the hit."
        )
    await charge(request, [query])
    answer = await while_connected(request, _explained(runtime, name, item_id, query, generation))
    return Response(to_json(answer), headers=_HEADERS, media_type=JSON)


async def _explained(
    runtime: Runtime, name: str, item_id: int, query: Query, generation: str | None
) -> ExplainAnswer:
    async with runtime.registry.find(name) as served:
        served.check_generation(generation)

        def read() -> tuple[str, bytes]:
            item = served.gallery.item(item_id)
            return item.key, original(served, item)

        key, image = await runtime.read("the image", read, served=served)
        limit_s = runtime.settings.request_timeout_ms / 1e3
        found = await explain(runtime.search_threads, served, query, image, limit_s)
        return ExplainAnswer(
            bundle_id=served.model.bundle_id,
            gallery=served.name,
            gallery_version=served.gallery.version,
            key=key,
            score=found.score,
            rest=found.rest,
            square=found.square,
            hit=found.hit.tolist(),
            query=[
                QueryShares(image=view.number, crop=view.box, shares=grid.tolist())
                for view, grid in found.query
            ],
        )


async def _with_key(runtime: Runtime, query: Query) -> tuple[Query, str]:
    """The query with the current generation, and the key of its item."""
    number = query.like
    assert number is not None
    async with runtime.registry.find(query.gallery) as served:
        served.check_generation(query.generation)
        item = await runtime.read("the item", lambda: served.gallery.item(number), served=served)
        return replace(query, generation=served.gallery.generation), item.key


def _response(answer: Answer, feedback: FeedbackStore | None, like: str = "") -> Response:
    timings = _timings(answer)
    stages = ", ".join([f"{stage};dur={ms}" for stage, ms in timings.items()])
    headers = {**_HEADERS, "X-Kinlens-Bundle": answer.bundle_id, "Server-Timing": stages}
    return Response(_json(answer, timings, feedback, like), headers=headers, media_type=JSON)


def _batch_response(
    answers: Sequence[Answer | Exception], request: Request, feedback: FeedbackStore | None
) -> Response:
    body = b",".join(_outcome(answer, request, feedback) for answer in answers)
    return Response(b'{"answers":[' + body + b"]}", headers=_HEADERS, media_type=JSON)


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
            **({} if feedback is None else {"answer_id": _answer_id(answer, feedback, like)}),
        }
    )
    return head[:-1] + b"," + with_links(answer.results)[1:]


def _answer_id(answer: Answer, feedback: FeedbackStore, like: str) -> str | None:
    """The id for feedback on this answer; None unless the query is one whole image or an item.

    For several liked items without an image, it is about the first item.
    """
    views, image = answer.query.views, ""
    if len(views) == 1 and views[0].box is None:
        image = views[0].digest
    item = "" if views else like or next(iter(answer.query.positives), "")
    if not image and not item:
        return None
    question = Question(answer.gallery, answer.gallery_version, image, item)
    return feedback.sign(question)


def _timings(answer: Answer) -> dict[str, float]:
    return {name: round(getattr(answer.stages, name), 3) for name in Timings.model_fields}


def search_docs(models: SearchModels) -> dict[str, Any]:
    """The OpenAPI of a search in each syntax."""
    content = {
        FORM: {"schema": _form(models, models.request.limits.max_images)},
        JSON: {"schema": inlined(models.request), "examples": _REQUESTS},
        RAW: {"schema": _FILE},
        IMAGE: {"schema": _FILE},
    }
    return {
        "parameters": search_parameters(models.request),
        "requestBody": {"required": True, "content": content},
    }


def _batch_docs(models: SearchModels) -> dict[str, Any]:
    most = models.request.limits.max_batch_queries
    searches: Any = list[models.request]  # type: ignore[name-defined]
    queries: Any = Annotated[searches, Field(min_length=1, max_length=most)]
    text = "Several searches, validated and answered independently."
    batch = create_model("BatchRequest", __base__=Strict, __doc__=text, queries=queries)
    form = _form(models, most) | {"required": ["image"]}
    content = {JSON: {"schema": inlined(batch), "examples": _BATCHES}, FORM: {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}


def _text_fields(model: type[SearchFields]) -> dict[str, Any]:
    """The schema of each field in a form or a query string, where values are never null."""
    texts = {}
    for name, schema in inlined(model)["properties"].items():
        choice = schema.pop("anyOf", [{}])[0]  # the first type is text if allowed; null is last
        default = schema.pop("default", None)
        known = {} if default is None else {"default": default}
        texts[name.removesuffix("s")] = {**choice, **schema, **known}  # positives -> positive
    texts["facets"] = {**_FACETS, "description": texts.pop("facet")["description"]}
    if texts.pop("image", None):
        crops = {"type": "array", "items": _CROP, "maxItems": model.limits.max_crops}
        texts["crop"] = {**crops, "description": _CROP_TEXT}
    return texts


def _form(models: SearchModels, max_images: int) -> dict[str, Any]:
    image = {
        "type": "array",
        "items": _FILE,
        "maxItems": max_images,
        "description": "JPEG, PNG, WebP, BMP, TIFF, GIF, AVIF or HEIC; one part per image. Of an "
        "animation, the first frame. The content decides the format.",
    }
    return {
        "type": "object",
        "properties": {"image": image, **_text_fields(models.request)},
        "additionalProperties": False,
    }


def search_parameters(model: type[SearchFields]) -> list[dict[str, Any]]:
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
