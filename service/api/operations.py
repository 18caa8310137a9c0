"""Routes for operators: liveness, readiness, startup and metrics."""

from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from kinlens.embedder.errors import GalleryNotFoundError, InvalidParameterError, KeyMissingError
from kinlens.embedder.machine import free_memory_mb
from kinlens.models import IndexLocation, Live, Ready, Startup
from kinlens.service.access.keys import of_caller
from kinlens.service.api.galleries import Service
from kinlens.service.http.openapi import problems
from kinlens.service.http.rules import Route, rule
from kinlens.service.observe.metrics import CONTENT_TYPE

router = APIRouter(route_class=Route)


@router.get("/live", responses=problems(), summary="Liveness")
@rule(None, "none")
async def live() -> Live:
    """Returns 200 as long as the process responds."""
    return Live()


@router.get(
    "/ready",
    response_model=Ready,
    responses={
        **problems(KeyMissingError, GalleryNotFoundError, InvalidParameterError),
        503: {"model": Ready, "description": "A check failed."},
    },
    summary="Readiness",
)
@rule(None, "items")
async def ready(
    runtime: Service,
    request: Request,
    gallery: Annotated[
        str | None, Query(description="Restrict the status to this gallery.")
    ] = None,
) -> JSONResponse:
    """Whether searches work: embeds a test image and searches galleries with it.

    With more than 16 galleries, each request searches those that were searched longest ago. Where
    callers without a key have no scope, they only get the status.
    """
    is_stranger = not runtime.settings.anonymous_scopes and not hasattr(request.state, "key")
    if is_stranger and gallery is not None:
        raise KeyMissingError("The status of one gallery needs an API key. Send one, or omit it.")
    readiness = (await runtime.health.check()).seen_by(of_caller())
    is_ready = readiness.ready if gallery is None else readiness.of_gallery(gallery)
    status: Literal["ready", "not ready"] = "ready" if is_ready else "not ready"
    if is_stranger:
        return JSONResponse({"status": status}, 200 if is_ready else 503)
    content = Ready(
        status=status,
        provider=runtime.registry.model.provider,
        engine=runtime.embedder.mode.engine,
        precision=runtime.embedder.mode.precision,
        precision_reason=runtime.embedder.precision_reason,
        bundle_id=runtime.registry.model.bundle_id,
        galleries={name: verdict.version for name, verdict in readiness.galleries.items()},
        indexes={
            name: IndexLocation(**asdict(verdict.index))
            for name, verdict in readiness.galleries.items()
            if verdict.index
        },
        free_memory_mb=round(free_memory_mb()),
        free_gpu_memory_mb=readiness.free_gpu_memory_mb,
        queue_depth=runtime.search_threads.waiting,
        redis=runtime.cache.remote_state,
        redis_fault=None if runtime.redis is None or of_caller().is_bound else runtime.redis.fault,
        checks=readiness.checks,
        last_error=readiness.last_error,
    )
    return JSONResponse(content.model_dump(), 200 if is_ready else 503)


@router.get(
    "/startup",
    response_model=Startup,
    responses={**problems(), 503: {"model": Startup, "description": "Not ready so far."}},
    summary="Startup",
)
@rule(None, "none")
async def startup(runtime: Service) -> JSONResponse:
    """For startup probes: 200 from the first time that the service was ready."""
    if not runtime.health.has_started:
        await runtime.health.check()
    has_started = runtime.health.has_started
    content = Startup(status="started" if has_started else "starting")
    return JSONResponse(content.model_dump(), 200 if has_started else 503)


@router.get(
    "/metrics", response_class=Response, responses=problems(), summary="Metrics for Prometheus"
)
@rule("search", "service", is_counted=False)
async def metrics(runtime: Service) -> Response:
    """Counters, histograms and gauges in the Prometheus text format; not charged to a rate."""
    return Response(await runtime.observer.render(), media_type=CONTENT_TYPE)
