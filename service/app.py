"""`create_app`: connects the parts of a service into an ASGI app."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Lifespan

from kinlens import __version__
from kinlens.embedder.session import Embedder
from kinlens.service.api import (
    embeddings,
    feedback,
    images,
    items,
    jobs,
    operations,
    quality,
    search,
)
from kinlens.service.api import galleries as gallery_routes
from kinlens.service.encoding.workers import Workers
from kinlens.service.galleries.locations import Opened
from kinlens.service.http.bodies import BodyLimit
from kinlens.service.http.edge import Compression, Edge
from kinlens.service.http.openapi import openapi_routes
from kinlens.service.http.pages import Assets
from kinlens.service.http.rules import KEY_HEADER, Admission, Route, check_rules, rule
from kinlens.service.observe.logs import configure_logs
from kinlens.service.observe.metrics import Tracing, open_tracing
from kinlens.service.runtime import Runtime
from kinlens.service.settings import Settings

_ADMIN_LINK = 'id="admin-link"'
_CORS_MAX_AGE_S = 600
_CORS_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_CORS_SENT = ("Authorization", "Content-Type", "If-None-Match", "X-Request-ID", KEY_HEADER)
_CORS_SHOWN = (
    "ETag",
    "Location",
    "RateLimit-Limit",
    "RateLimit-Remaining",
    "RateLimit-Reset",
    "Retry-After",
    "Server-Timing",
    "X-Kinlens-Bundle",
    "X-Request-ID",
)


def create_app(
    settings: Settings | None = None,
    embedder: Embedder | None = None,
    galleries: Mapping[str, Opened] | None = None,
    workers: Workers | None = None,
) -> FastAPI:
    """Create the service as an ASGI app. Omitted parts are opened from the settings, and closed.

    Without settings, as an ASGI server calls it, they come from the environment, as does logging.

    A given `embedder` runs in this process, and keeps its own image limits; `workers` that have
    been started decode for it, and have its detector if it has one.

    Raises: BundleError, GalleryError.
    """
    if settings is None:
        settings = Settings()
        configure_logs(settings.log_level)
    tracing = open_tracing(settings.otlp_endpoint, __version__)
    runtime = Runtime(settings, embedder, galleries, workers)
    admission = Admission(settings, runtime.keys, runtime.audit, runtime.redis)
    app = FastAPI(
        title="Kinlens",
        description="Upload an image, get the most similar items of a gallery.",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        # A redirect would send the key along, and behind a proxy the public host is unknown.
        redirect_slashes=False,
        telemetry=tracing.telemetry(),
        lifespan=_lifespan(runtime, tracing),
        middleware=_middleware(runtime),
        exception_handlers={HTTPException: admission.unmatched},
    )
    app.state.runtime = runtime
    app.state.admission = admission
    assets = Assets()
    for router in (
        search.router,
        gallery_routes.router,
        embeddings.router,
        images.router,
        items.router,  # after the routes below an item: a key may have slashes
        quality.router,
        feedback.router,
        jobs.router,
        operations.router,
        _pages(assets, settings.admin_link),
        openapi_routes(app, assets),
    ):
        # Not `include_router`: FastAPI would match each route several times per request.
        app.router.routes.extend(router.routes)
    return app


def _middleware(runtime: Runtime) -> list[Middleware]:
    """The middleware, outermost first."""
    settings = runtime.settings
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_methods=_CORS_METHODS,
        allow_headers=_CORS_SENT,
        expose_headers=_CORS_SHOWN,
        max_age=_CORS_MAX_AGE_S,
    )
    return [
        Middleware(BodyLimit, settings=settings),
        Middleware(Edge, settings=settings, metrics=runtime.metrics),
        *([cors] if settings.cors_origins else ()),
        Middleware(Compression),
    ]


def _lifespan(runtime: Runtime, tracing: Tracing) -> Lifespan[FastAPI]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        check_rules(app.routes)
        try:
            await runtime.start()
            yield
        finally:
            await runtime.stop()
            await tracing.close()

    return lifespan


def _pages(assets: Assets, admin_link: bool) -> APIRouter:
    router = APIRouter(route_class=Route, include_in_schema=False)
    changes = ((f"{_ADMIN_LINK} hidden", _ADMIN_LINK),) if admin_link else ()
    search = assets.page("search/index.html", *changes)
    admin = assets.page("admin/index.html")

    @router.get("/")
    @rule(None, "none")
    async def search_page(request: Request) -> Response:
        return search.answer(request.headers)

    @router.get("/admin")
    @rule(None, "none")
    async def admin_page(request: Request) -> Response:
        return admin.answer(request.headers)

    @router.get("/ui/{path:path}")
    @rule(None, "none")
    async def file(request: Request, path: str) -> Response:
        return assets.answer(path, request.headers)

    return router
