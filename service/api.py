"""Thin routes: HTTP in, use case, HTTP out."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, File, Form, Path, Request, Response, UploadFile
from fastapi import Query as Parameter
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BeforeValidator

from embedder import errors
from service.disconnect import ClientGoneError, while_connected
from service.metrics import CONTENT_TYPE
from service.openapi import problems, render_docs
from service.parameters import finite_number, whole_number
from service.problems import BAD_REQUEST, BODY_TOO_LARGE, BODY_TOO_SLOW, KINDS
from service.runtime import Runtime
from service.schemas import (
    Galleries,
    GalleryModel,
    HitModel,
    Live,
    Ready,
    SearchAnswer,
    Timings,
)
from service.search import Answer, Query
from service.types import Gallery

T = TypeVar("T")

_CLIENT_GONE = 499
_MAX_ID = 2**63 - 1
_VERSION_DIGITS = 12
_VERSION_TEXT = "The gallery generation that the number is from; default: the one being served."
_VERSION = rf"^[0-9a-f]{{{_VERSION_DIGITS},64}}$"
_LOOK_FAILURES = (
    KINDS[errors.OverloadedError],
    KINDS[errors.DeadlineExceededError],
    KINDS[errors.GalleryError],
)
_FAILURES = (
    KINDS[errors.GalleryNotFoundError],
    KINDS[errors.InvalidParameterError],
    *_LOOK_FAILURES,
)
_SEARCH_FAILURES = (
    *_FAILURES,
    *(BAD_REQUEST, BODY_TOO_SLOW, BODY_TOO_LARGE),
    KINDS[errors.EmptyImageError],
    KINDS[errors.ImageTooManyBytesError],
    KINDS[errors.ImageTooLargeError],
    KINDS[errors.UnsupportedFormatError],
    KINDS[errors.CorruptImageError],
    KINDS[errors.SearchError],
    KINDS[errors.BundleError],
)


def build_router(runtime: Runtime) -> APIRouter:
    """The routes of one service."""
    router = APIRouter()
    _add_search(router, runtime)
    _add_galleries(router, runtime)
    _add_pictures(router, runtime)
    _add_operations(router, runtime)
    return router


def _add_search(router: APIRouter, runtime: Runtime) -> None:
    settings = runtime.settings
    k_type = Annotated[
        int,
        Form(ge=1, le=settings.max_k, description="How many hits at most."),
        BeforeValidator(whole_number("k", 1, settings.max_k)),
    ]
    score_type = Annotated[
        float | None,
        Form(ge=-1, le=1, description="Leave out hits below this cosine similarity."),
        BeforeValidator(finite_number("min_score", -1.0, 1.0)),
    ]
    gallery_type = Annotated[str | None, Form(description="Where to search; default: the first.")]
    image_type = Annotated[UploadFile, File(description="JPEG, PNG, WebP, BMP, TIFF or GIF.")]

    @router.post(
        "/search",
        response_model=SearchAnswer,
        responses=problems(*_SEARCH_FAILURES),
        summary="Search with an image",
    )
    async def search(
        request: Request,
        response: Response,
        image: image_type,
        k: k_type = settings.default_k,
        gallery: gallery_type = None,
        min_score: score_type = None,
    ) -> Any:
        """The items of a gallery that look most like the uploaded image, best first."""
        await _refuse_several_images(request)
        query = Query(await image.read(), k, gallery, min_score)
        try:
            answer = await while_connected(request, runtime.searching.search(query))
        except ClientGoneError:
            return Response(status_code=_CLIENT_GONE)
        return _search_answer(runtime.embedder.bundle_id, query, answer, response)


def _add_galleries(router: APIRouter, runtime: Runtime) -> None:
    @router.get("/galleries", responses=problems(*_LOOK_FAILURES), summary="List the galleries")
    async def galleries() -> Galleries:
        """Every gallery as it is now; the first is the default of a search."""
        listed = [await _listed(runtime, name) for name in runtime.galleries]
        return Galleries(bundle_id=runtime.embedder.bundle_id, galleries=listed)


def _add_pictures(router: APIRouter, runtime: Runtime) -> None:
    @router.get(
        "/galleries/{name}/items/{item_id}/image",
        response_class=Response,
        responses={
            200: {"content": {"image/*": {}}, "description": "The picture."},
            304: {"description": "Unchanged since the given ETag."},
            **problems(*_FAILURES, KINDS[errors.ItemNotFoundError]),
        },
        summary="The picture of an item",
    )
    async def item_image(
        request: Request,
        name: str,
        item_id: Annotated[int, Path(ge=0, le=_MAX_ID)],
        version: Annotated[
            str | None, Parameter(pattern=_VERSION, description=_VERSION_TEXT)
        ] = None,
    ) -> Response:
        """The picture as a browser can show it; items are found by number only."""
        _, gallery = runtime.searching.gallery(name)
        _check_generation(name, gallery, version)
        etag = f'"{gallery.generation}-{item_id}"'
        headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
        if etag in request.headers.get("if-none-match", ""):
            await _look(runtime, lambda: gallery.item(item_id))  # it may have been removed
            return Response(status_code=304, headers=headers)
        picture = await _look(runtime, lambda: gallery.image(item_id))
        return Response(picture.data, media_type=picture.media_type, headers=headers)


def _add_operations(router: APIRouter, runtime: Runtime) -> None:
    @router.get("/live", responses=problems(), summary="Is the process there")
    async def live() -> Live:
        """Answers as long as the process does."""
        return Live()

    @router.get(
        "/ready",
        response_model=Ready,
        responses={**problems(), 503: {"model": Ready, "description": "A check failed."}},
        summary="Can it answer searches",
    )
    async def ready() -> JSONResponse:
        """Embeds a known image and searches every gallery with it."""
        readiness = await runtime.health.check()
        content = Ready(
            status="ready" if readiness.ready else "not ready",
            provider=runtime.embedder.provider,
            bundle_id=runtime.embedder.bundle_id,
            galleries=readiness.versions,
            queue_depth=runtime.batcher.depth,
            redis=runtime.cache.remote_state,
            checks=readiness.checks,
            last_error=readiness.last_error,
        )
        return JSONResponse(content.model_dump(), 200 if readiness.ready else 503)

    @router.get(
        "/metrics",
        response_class=Response,
        responses=problems(),
        summary="Metrics for Prometheus",
    )
    async def metrics() -> Response:
        """Counters, histograms and gauges in the text format of Prometheus."""
        await runtime.observe_sizes()
        return Response(runtime.metrics.render(), media_type=CONTENT_TYPE)

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        return HTMLResponse(render_docs(request.app.openapi()))


async def _refuse_several_images(request: Request) -> None:
    count = len((await request.form()).getlist("image"))
    if count > 1:
        raise errors.InvalidParameterError(
            f"The form has {count} parts called image; send exactly one, and a request for each."
        )


async def _listed(runtime: Runtime, name: str) -> GalleryModel:
    gallery = runtime.galleries[name]
    state = await runtime.searching.state(gallery)
    return GalleryModel(
        name=name,
        version=state.version,
        generation=gallery.generation,
        bundle_id=gallery.bundle_id,
        size=state.size,
        dim=gallery.dim,
        created_at=gallery.created_at,
    )


def _check_generation(name: str, gallery: Gallery, version: str | None) -> None:
    if version is not None and not gallery.generation.startswith(version):
        raise errors.ItemNotFoundError(
            f"This link is from version {version[:_VERSION_DIGITS]} of gallery {name}, which was "
            f"built again and is at version {gallery.generation[:_VERSION_DIGITS]} now. "
            "Search again."
        )


async def _look(runtime: Runtime, work: Callable[[], T]) -> T:
    limit_s = runtime.settings.request_timeout_ms / 1e3
    try:
        async with asyncio.timeout(limit_s):
            return await runtime.pools["file"].run(work)
    except TimeoutError as error:
        raise errors.DeadlineExceededError(
            f"Reading the picture took longer than {limit_s:g} s, which is the limit. "
            "Try again in a second."
        ) from error


def _search_answer(
    bundle_id: str, query: Query, answer: Answer, response: Response
) -> SearchAnswer:
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Kinlens-Bundle"] = bundle_id
    timings = _timings(answer)
    response.headers["Server-Timing"] = ", ".join(f"{s};dur={ms:.3f}" for s, ms in timings)
    hits = _hits(answer)
    return SearchAnswer(
        bundle_id=bundle_id,
        gallery=answer.gallery,
        gallery_version=answer.gallery_version,
        k=query.k,
        count=len(hits),
        cached=answer.cached,
        hits=hits,
        timings_ms=timings,
    )


def _hits(answer: Answer) -> list[HitModel]:
    items = f"/galleries/{quote(answer.gallery, safe='')}/items"
    version = answer.generation[:_VERSION_DIGITS]
    return [
        HitModel(
            id=hit.id,
            key=hit.key,
            score=hit.score,
            attributes=dict(hit.attributes),
            image=f"{items}/{hit.id}/image?version={version}",
        )
        for hit in answer.hits
    ]


def _timings(answer: Answer) -> Timings:
    stages = answer.stages
    return Timings(
        decode=round(stages.decode, 3),
        embed=round(stages.embed, 3),
        search=round(stages.search, 3),
        total=round(stages.total, 3),
    )
