"""Routes for operators: access, API keys, audit log; liveness, readiness, startup and metrics."""

from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from kinlens.embedder import errors
from kinlens.embedder.errors import GalleryNotFoundError, InvalidParameterError, KeyMissingError
from kinlens.embedder.machine import free_memory_mb
from kinlens.models import (
    Access,
    Audit,
    IndexLocation,
    KeyModel,
    Keys,
    Live,
    NewKey,
    Ready,
    Scope,
    Startup,
)
from kinlens.service.access import keys
from kinlens.service.access.audit import note
from kinlens.service.access.keys import CALLER, MAX_OVERLAP, OVERLAP, Key, KeyStore, Limits
from kinlens.service.api.fields import Strict
from kinlens.service.api.galleries import STATE_FAILURES, Service
from kinlens.service.galleries.locations import unknown_gallery
from kinlens.service.health import OK
from kinlens.service.http.openapi import problems
from kinlens.service.http.rules import Route, rule
from kinlens.service.observe.metrics import CONTENT_TYPE
from kinlens.service.runtime import Runtime

T = TypeVar("T")
_MAX_DAYS = 3_650
_MAX_ENTRIES = 1_000
_HOUR = timedelta(hours=1)
_OF_ALL = problems(*STATE_FAILURES)
_OF_ONE = problems(*STATE_FAILURES, errors.KeyNotFoundError)
_NO_STORE = {"Cache-Control": "no-store"}

Name = Annotated[str, Path(max_length=64, description="The name of a key.")]
router = APIRouter(route_class=Route)


class KeyRequest(Limits):
    """A key to create."""

    name: Annotated[str, Field(max_length=64, description="A unique name for the key.")]
    scopes: Annotated[list[Scope], Field(min_length=1)]
    expires_days: Annotated[
        int | None,
        Field(strict=True, ge=1, le=_MAX_DAYS, description="Days until it expires; null: never."),
    ] = None


class RotateRequest(Strict):
    """Options of a key rotation."""

    overlap_hours: Annotated[
        float,
        Field(
            strict=True,
            ge=0,
            le=MAX_OVERLAP / _HOUR,
            allow_inf_nan=False,
            description="How long the previous secret stays valid.",
        ),
    ] = OVERLAP / _HOUR


@router.get("/access", responses=problems(), summary="What the caller may do")
@rule("search", "items")
async def access(runtime: Service, request: Request) -> Access:
    """The scopes and the galleries of the API key that was sent, or of callers without a key."""
    key: Key | None = getattr(request.state, "key", None)
    scopes = keys.allowed(runtime.settings.anonymous_scopes if key is None else key.scopes)
    limits = keys.NO_LIMITS if key is None else key.limits
    return Access(
        key=None if key is None else key.name,
        scopes=[scope for scope in keys.SCOPES if scope in scopes],
        galleries=None if limits.galleries is None else list(limits.galleries),
        filter=limits.filter,
    )


@router.get("/keys", responses=_OF_ALL, summary="List API keys")
@rule("admin", "service")
async def list_keys(runtime: Service) -> Keys:
    """All keys without their secrets, including revoked and expired ones, oldest first."""
    found = await _changed(runtime, lambda store: store.list())
    return Keys(keys=[_model(key) for key in found])


@router.post("/keys", status_code=201, responses=_OF_ALL, summary="Create an API key")
@rule("admin", "service")
async def create_key(
    runtime: Service, new: KeyRequest, request: Request, response: Response
) -> NewKey:
    """Create a key; only this answer contains its text."""
    note(request.scope["state"], target=new.name)
    ends = new.expires_days
    expires_at = None if ends is None else datetime.now(UTC) + timedelta(days=ends)
    limits = Limits(**new.model_dump(include=set(Limits.model_fields)))

    def create(store: KeyStore) -> NewKey:
        return _with_text(store, store.create(new.name, new.scopes, expires_at, limits))

    made = await _changed(runtime, create)
    note(request.scope["state"], affected=1)
    response.headers.update(_NO_STORE)
    return made


@router.delete("/keys/{name}", responses=_OF_ONE, summary="Revoke an API key")
@rule("admin", "service")
async def revoke_key(runtime: Service, name: Name, request: Request) -> KeyModel:
    """Revoke a key with all its secrets; all processes apply it within a second."""
    note(request.scope["state"], target=name)
    revoked = await _changed(runtime, lambda store: store.revoke(name))
    note(request.scope["state"], affected=1)
    return _model(revoked)


@router.post(
    "/keys/{name}/rotate",
    responses=_OF_ONE,
    summary="Give an API key a new secret",
)
@rule("admin", "service")
async def rotate_key(
    runtime: Service,
    name: Name,
    request: Request,
    response: Response,
    how: RotateRequest | None = None,
) -> NewKey:
    """Only this answer contains the new text. The previous secret stays valid for `overlap_hours`;
    older ones expire now. Name, scopes, limits and counters do not change.
    """
    note(request.scope["state"], target=name)
    overlap = (how or RotateRequest()).overlap_hours * _HOUR
    made = await _changed(runtime, lambda store: _with_text(store, store.rotate(name, overlap)))
    note(request.scope["state"], affected=1)
    response.headers.update(_NO_STORE)
    return made


@router.get("/audit", responses=_OF_ALL, summary="List the audit log")
@rule("admin", "service")
async def audit(
    runtime: Service,
    limit: Annotated[int, Query(ge=1, le=_MAX_ENTRIES)] = 100,
    before: Annotated[
        int | None, Query(ge=0, le=2**63 - 1, description="Only entries with lower numbers.")
    ] = None,
) -> Audit:
    """The changes in this service and the attempts that were refused with 403, newest first."""
    found = await runtime.in_state(
        "The audit log", runtime.audit, lambda log: log.newest(limit, before)
    )
    return Audit(entries=found)


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
    health, binding = runtime.health, CALLER.get()
    await health.check()
    is_ready, checks = health.passed, health.checks(binding)
    verdicts = {name: one for name, one in health.verdicts.items() if binding.permits(name)}
    if gallery is not None:
        if gallery not in verdicts and f"reload {gallery}" not in checks:
            raise unknown_gallery(gallery, verdicts)
        is_ready = checks.get(f"gallery {gallery}") == OK
    if health.is_draining:
        is_ready, checks = False, checks | {"service": "shutting down"}
    status: Literal["ready", "not ready"] = "ready" if is_ready else "not ready"
    if is_stranger:
        return JSONResponse({"status": status}, 200 if is_ready else 503)
    content = Ready(
        status=status,
        provider=runtime.embedder.provider,
        engine=runtime.embedder.mode.engine,
        precision=runtime.embedder.mode.precision,
        precision_reason=runtime.embedder.precision_reason,
        bundle_id=runtime.registry.model.bundle_id,
        galleries={name: verdict.version for name, verdict in verdicts.items()},
        indexes={
            name: IndexLocation(**asdict(verdict.index))
            for name, verdict in verdicts.items()
            if verdict.index and binding.where is None
        },
        free_memory_mb=round(free_memory_mb()),
        free_gpu_memory_mb=health.free_gpu_memory_mb,
        queue_depth=runtime.search_threads.waiting,
        redis=runtime.cache.remote_state,
        redis_fault=None if runtime.redis is None or binding.is_bound else runtime.redis.fault,
        checks=checks,
        notes=health.notes(binding),
        last_error=None if binding.is_bound else health.last_error,
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


async def _changed(runtime: Runtime, work: Callable[[KeyStore], T]) -> T:
    """Run `work` on the key store in a thread, since it may wait for the lock of the file."""
    return await runtime.in_state("The file of keys", runtime.keys, work)


def _with_text(store: KeyStore, text: str) -> NewKey:
    [key] = [key for key in store.list() if key.id == text.split("_")[1]]
    return NewKey(text=text, key=_model(key))


def _model(key: Key) -> KeyModel:
    now = datetime.now(UTC)
    shown = ("id", "name", "scopes", "created_at", "expires_at", "revoked_at", "rotated_at")
    return KeyModel(
        **{name: getattr(key, name) for name in shown},
        **key.limits.model_dump(),
        state=key.state(now),
        old_until=key.old_valid_until(now),
    )
