"""Searches over HTTP."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic_core import to_json
from starlette.requests import ClientDisconnect

from embedder import errors
from service.api.reading import MAX_ID
from service.api.search_bodies import read_batch, read_fields, read_search
from service.api.search_docs import (
    ANSWER_DOCS,
    BATCH_DOCS,
    SIMILAR_DOCS,
    batch_docs,
    search_docs,
    similar_docs,
)
from service.api.search_models import BatchAnswer, SearchAnswer
from service.http.bodies import ClientGoneError, while_connected
from service.http.openapi import problems
from service.problems import (
    BAD_REQUEST,
    BODY_TOO_LARGE,
    BODY_TOO_SLOW,
    KINDS,
    UNSUPPORTED_MEDIA,
    described,
    request_id_of,
)
from service.runtime import Runtime
from service.search.answering import Answer
from service.search.query import SearchLimits
from service.settings import Settings

_CLIENT_GONE = 499
_MAX_VIEWS = SearchLimits().max_views
_HEADERS = {"Cache-Control": "no-store"}
_WITHOUT_IMAGE = (
    KINDS[errors.GalleryNotFoundError],
    KINDS[errors.ItemNotFoundError],
    KINDS[errors.InvalidParameterError],
    KINDS[errors.FilterError],
    KINDS[errors.OverloadedError],
    KINDS[errors.DeadlineExceededError],
    KINDS[errors.GalleryError],
)
_BODY = (BAD_REQUEST, BODY_TOO_SLOW, BODY_TOO_LARGE, UNSUPPORTED_MEDIA)
_WITH_IMAGE = (
    *_WITHOUT_IMAGE,
    *_BODY,
    KINDS[errors.EmptyImageError],
    KINDS[errors.ImageTooManyBytesError],
    KINDS[errors.ImageTooLargeError],
    KINDS[errors.UnsupportedFormatError],
    KINDS[errors.CorruptImageError],
    KINDS[errors.ImageCostError],
    KINDS[errors.SearchError],
    KINDS[errors.BundleError],
)


def limits_of(settings: Settings) -> SearchLimits:
    """What a search may ask for under these settings."""
    return SearchLimits(
        default_k=settings.default_k,
        max_k=settings.max_k,
        max_images=settings.max_images,
        max_crops=settings.max_crops,
        max_queries=settings.max_batch_queries,
        max_views=max(_MAX_VIEWS, settings.max_images, settings.max_batch_queries),
    )


def build_router(runtime: Runtime) -> APIRouter:
    """The routes of searches."""
    router = APIRouter()
    limits = limits_of(runtime.settings)
    _add_search(router, runtime, limits)
    _add_batch(router, runtime, limits)
    _add_similar(router, runtime, limits)
    return router


def _add_search(router: APIRouter, runtime: Runtime, limits: SearchLimits) -> None:
    @router.post(
        "/search",
        response_model=SearchAnswer | BatchAnswer,
        responses={**ANSWER_DOCS, **problems(*_WITH_IMAGE)},
        openapi_extra=search_docs(limits),
        summary="Search with images or items",
    )
    async def search(request: Request) -> Response:
        """The items of a gallery that look most like what is sent, best first.

        As a form, as JSON, or as the bare bytes of an image with the other fields in the query
        string. Several images, crops and items make one query, or with combine=separate one each.
        """
        try:
            asked = await read_search(request, limits)
            if asked.separate:
                work = runtime.searching.search_all(asked.queries)
                return _batch_response(await while_connected(request, work), request)
            work_one = runtime.searching.search(asked.queries[0])
            return _response(await while_connected(request, work_one))
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=_CLIENT_GONE)


def _add_batch(router: APIRouter, runtime: Runtime, limits: SearchLimits) -> None:
    @router.post(
        "/search/batch",
        response_model=BatchAnswer,
        responses={**BATCH_DOCS, **problems(*_BODY, KINDS[errors.InvalidParameterError])},
        openapi_extra=batch_docs(limits),
        summary="Several searches at once",
    )
    async def search_batch(request: Request) -> Response:
        """Each query is answered by itself: one that fails has a problem in its place.

        As JSON a list of searches; as a form each image is a query, and all share the other fields.
        """
        try:
            queries = await read_batch(request, limits)
            work = runtime.searching.search_all(queries)
            return _batch_response(await while_connected(request, work), request)
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=_CLIENT_GONE)


def _add_similar(router: APIRouter, runtime: Runtime, limits: SearchLimits) -> None:
    @router.get(
        "/galleries/{name}/items/{item_id}/similar",
        response_model=SearchAnswer,
        responses={**SIMILAR_DOCS, **problems(*_WITHOUT_IMAGE)},
        openapi_extra=similar_docs(limits),
        summary="Search with an item",
    )
    async def similar(
        request: Request, name: str, item_id: Annotated[int, Path(ge=0, le=MAX_ID)]
    ) -> Response:
        """The items that look most like this one, without it, best first."""
        fields = [pair for pair in request.query_params.multi_items() if pair[0] != "version"]
        query = replace(await read_fields(fields, limits), gallery=name, like=item_id)
        query = replace(query, generation=request.query_params.get("version"))
        try:
            return _response(await while_connected(request, runtime.searching.search(query)))
        except ClientGoneError:
            return Response(status_code=_CLIENT_GONE)


def _response(answer: Answer) -> Response:
    stages = ", ".join(f"{stage};dur={ms:.3f}" for stage, ms in _timings(answer).items())
    headers = {**_HEADERS, "X-Kinlens-Bundle": answer.bundle_id, "Server-Timing": stages}
    return Response(_json(answer), headers=headers, media_type="application/json")


def _batch_response(answers: Sequence[Answer | Exception], request: Request) -> Response:
    body = b",".join(_outcome(answer, request) for answer in answers)
    return Response(b'{"answers":[' + body + b"]}", headers=_HEADERS, media_type="application/json")


def _outcome(answer: Answer | Exception, request: Request) -> bytes:
    if isinstance(answer, Answer):
        return b'{"status":200,"answer":' + _json(answer) + b',"problem":null}'
    problem = described(answer, request_id=request_id_of(request.scope), instance=request.url.path)
    return to_json({"status": problem["status"], "answer": None, "problem": problem})


def _json(answer: Answer) -> bytes:
    """The answer as JSON; its results are JSON already, and are not read again."""
    head = to_json(
        {
            "bundle_id": answer.bundle_id,
            "gallery": answer.gallery,
            "gallery_version": answer.gallery_version,
            "k": answer.query.k,
            "offset": answer.query.offset,
            "cached": answer.cached,
            "min_score": answer.min_score,
            "timings_ms": _timings(answer),
        }
    )
    return head[:-1] + b"," + answer.results[1:]


def _timings(answer: Answer) -> dict[str, float]:
    stages = answer.stages
    return {
        "decode": round(stages.decode, 3),
        "embed": round(stages.embed, 3),
        "search": round(stages.search, 3),
        "total": round(stages.total, 3),
    }
