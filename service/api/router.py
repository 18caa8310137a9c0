"""Thin routes: HTTP in, use case, HTTP out."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from service.api import galleries, items, jobs, pictures, samples, search
from service.api.operation_models import Live, Ready
from service.http.openapi import problems, render_docs
from service.observe.health import Readiness
from service.observe.metrics import CONTENT_TYPE
from service.runtime import Runtime


def build_router(runtime: Runtime) -> APIRouter:
    """The routes of one service."""
    router = APIRouter()
    router.include_router(search.build_router(runtime))
    router.include_router(galleries.build_router(runtime))
    router.include_router(items.build_router(runtime))
    router.include_router(pictures.build_router(runtime))
    router.include_router(jobs.build_router(runtime))
    router.include_router(samples.build_router(runtime))
    _add_operations(router, runtime)
    return router


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
        content = _ready(runtime, readiness)
        return JSONResponse(content.model_dump(), 200 if readiness.ready else 503)

    @router.get(
        "/metrics",
        response_class=Response,
        responses=problems(),
        summary="Metrics for Prometheus",
    )
    async def metrics() -> Response:
        """Counters, histograms and gauges in the text format of Prometheus."""
        await runtime.observe()
        return Response(runtime.metrics.render(), media_type=CONTENT_TYPE)

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        return HTMLResponse(render_docs(request.app.openapi()))


def _ready(runtime: Runtime, readiness: Readiness) -> Ready:
    return Ready(
        status="ready" if readiness.ready else "not ready",
        provider=runtime.registry.model.provider,
        precision=runtime.embedder.precision,
        precision_reason=runtime.embedder.precision_reason,
        bundle_id=runtime.registry.model.bundle_id,
        galleries=readiness.versions,
        queue_depth=runtime.lanes.waiting,
        redis=runtime.cache.remote_state,
        checks=readiness.checks,
        last_error=readiness.last_error,
    )
