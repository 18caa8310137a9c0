"""Thin routes: HTTP in, use case, HTTP out."""

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, File, Form, Path, Request, Response, UploadFile
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BeforeValidator

from embedder.errors import InvalidParameterError
from service.disconnect import ClientGoneError, while_connected
from service.metrics import CONTENT_TYPE
from service.openapi import problems, render_docs
from service.parameters import finite_number, whole_number
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

_CLIENT_GONE = 499
_MAX_ID = 2**63 - 1


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
        responses=problems(400, 404, 408, 413, 415, 422, 500, 503),
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
        response.headers["Cache-Control"] = "no-store"
        response.headers["X-Kinlens-Bundle"] = runtime.embedder.bundle_id
        response.headers["Server-Timing"] = _server_timing(answer)
        return _search_answer(runtime.embedder.bundle_id, query, answer)


def _add_galleries(router: APIRouter, runtime: Runtime) -> None:
    @router.get("/galleries", summary="List the galleries")
    async def galleries() -> Galleries:
        """Every gallery with its version; the first is the default of a search."""
        listed = [
            GalleryModel(
                name=name,
                version=gallery.version,
                bundle_id=gallery.bundle_id,
                size=gallery.size,
                dim=gallery.dim,
                created_at=gallery.created_at,
            )
            for name, gallery in runtime.galleries.items()
        ]
        return Galleries(bundle_id=runtime.embedder.bundle_id, galleries=listed)


def _add_pictures(router: APIRouter, runtime: Runtime) -> None:
    @router.get(
        "/galleries/{name}/items/{item_id}/image",
        response_class=Response,
        responses={
            200: {"content": {"image/*": {}}, "description": "The picture."},
            304: {"description": "Unchanged since the given ETag."},
            **problems(404, 422, 503),
        },
        summary="The picture of an item",
    )
    async def item_image(
        request: Request, name: str, item_id: Annotated[int, Path(ge=0, le=_MAX_ID)]
    ) -> Response:
        """The picture as a browser can show it; items are found by number only."""
        _, gallery = runtime.searching.gallery(name)
        etag = f'"{gallery.version[:32]}-{item_id}"'
        headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
        picture = await runtime.pools["file"].run(lambda: gallery.image(item_id))
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(picture.data, media_type=picture.media_type, headers=headers)


def _add_operations(router: APIRouter, runtime: Runtime) -> None:
    @router.get("/live", summary="Is the process there")
    async def live() -> Live:
        """Answers as long as the process does."""
        return Live()

    @router.get(
        "/ready",
        response_model=Ready,
        responses={503: {"model": Ready, "description": "A check failed."}},
        summary="Can it answer searches",
    )
    async def ready() -> JSONResponse:
        """Embeds a known image and searches every gallery with it."""
        readiness = await runtime.health.check()
        content = Ready(
            status="ready" if readiness.ready else "not ready",
            provider=runtime.embedder.provider,
            bundle_id=runtime.embedder.bundle_id,
            galleries={name: gallery.version for name, gallery in runtime.galleries.items()},
            queue_depth=runtime.batcher.depth,
            redis=runtime.cache.remote_state,
            checks=readiness.checks,
            last_error=readiness.last_error,
        )
        return JSONResponse(content.model_dump(), 200 if readiness.ready else 503)

    @router.get("/metrics", response_class=Response, summary="Metrics for Prometheus")
    async def metrics() -> Response:
        """Counters, histograms and gauges in the text format of Prometheus."""
        return Response(runtime.metrics.render(), media_type=CONTENT_TYPE)

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        return HTMLResponse(render_docs(request.app.openapi()))


async def _refuse_several_images(request: Request) -> None:
    count = len((await request.form()).getlist("image"))
    if count > 1:
        raise InvalidParameterError(
            f"The form has {count} parts called image; send exactly one, and a request for each."
        )


def _search_answer(bundle_id: str, query: Query, answer: Answer) -> SearchAnswer:
    items = f"/galleries/{quote(answer.gallery, safe='')}/items"
    hits = [
        HitModel(
            id=hit.id,
            key=hit.key,
            score=hit.score,
            attributes=dict(hit.attributes),
            image=f"{items}/{hit.id}/image",
        )
        for hit in answer.hits
    ]
    stages = answer.stages
    return SearchAnswer(
        bundle_id=bundle_id,
        gallery=answer.gallery,
        gallery_version=answer.gallery_version,
        k=query.k,
        count=len(hits),
        cached=answer.cached,
        hits=hits,
        timings_ms=Timings(
            decode=round(stages.decode, 3),
            embed=round(stages.embed, 3),
            search=round(stages.search, 3),
            total=round(stages.total, 3),
        ),
    )


def _server_timing(answer: Answer) -> str:
    stages = answer.stages
    return (
        f"decode;dur={stages.decode:.3f}, embed;dur={stages.embed:.3f}, "
        f"search;dur={stages.search:.3f}, total;dur={stages.total:.3f}"
    )
