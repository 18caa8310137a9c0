"""`create_app`: connects the parts of a service into an ASGI app."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import Lifespan

from kinlens import __version__
from kinlens.embedder.errors import KinlensError
from kinlens.embedder.session import Embedder
from kinlens.service.access.rates import RateLimits
from kinlens.service.api import (
    access,
    by_key,
    duplicates,
    feedback,
    golden,
    images,
    items,
    jobs,
    operations,
    search,
)
from kinlens.service.api import galleries as gallery_routes
from kinlens.service.encoding.cache import Cache
from kinlens.service.galleries.locations import Opened
from kinlens.service.http.bodies import BodyLimit, ClientDisconnectedError
from kinlens.service.http.gate import Gate, bounds_of, open_rates
from kinlens.service.http.openapi import install_openapi
from kinlens.service.http.pages import Assets, Compression, Page
from kinlens.service.observe.metrics_shared import kept_fresh
from kinlens.service.observe.tracing import Tracing, open_tracing
from kinlens.service.problems import from_disconnect, from_error, from_http
from kinlens.service.runtime import Runtime, build_runtime
from kinlens.service.settings import Settings

_ADMIN_LINK = 'id="admin-link"'


def create_app(
    settings: Settings | None = None,
    embedder: Embedder | None = None,
    galleries: Mapping[str, Opened] | None = None,
    cache: Cache | None = None,
) -> FastAPI:
    """Create the service as an ASGI app. Omitted parts are opened from the settings, and closed.

    A given `embedder` keeps its own image limits.

    Raises: BundleError, GalleryError.
    """
    settings = settings or Settings()
    tracing = open_tracing(settings.otlp_endpoint, __version__)
    runtime = build_runtime(settings, embedder, galleries, cache)
    rates = open_rates(settings)
    app = FastAPI(
        title="Kinlens",
        description="Upload an image, get the most similar items of a gallery.",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        telemetry=tracing.telemetry(),
        lifespan=_lifespan(runtime, rates, tracing),
        middleware=_middleware(runtime, rates),
        exception_handlers={
            KinlensError: from_error,
            RequestValidationError: from_error,
            HTTPException: from_http,
            ClientDisconnectedError: from_disconnect,
        },
    )
    app.state.runtime = runtime
    for router in (
        search.build_router(runtime),
        by_key.build_router(runtime),
        gallery_routes.router,
        items.router,
        golden.router,
        feedback.router,
        duplicates.router,
        images.build_router(runtime),
        jobs.router,
        access.router,
        operations.router,
    ):
        # Not `include_router`: FastAPI would match each route several times per request.
        app.router.routes.extend(
            context.original_route for context in iter_route_contexts(router.routes)
        )
    assets = Assets()
    _add_pages(app, assets, settings.admin_link)
    install_openapi(app, assets)
    return app


def _middleware(runtime: Runtime, rates: RateLimits) -> list[Middleware]:
    """The middleware, outermost first."""
    settings = runtime.settings
    return [
        Middleware(
            Gate,
            settings=settings,
            metrics=runtime.metrics,
            store=runtime.keys,
            rates=rates,
            audit=runtime.audit,
        ),
        Middleware(
            BodyLimit,
            bounds=bounds_of(settings),
            timeout_s=settings.body_timeout_ms / 1e3,
            max_total_bytes=settings.max_held_bytes,
        ),
        Middleware(Compression),
    ]


def _lifespan(runtime: Runtime, rates: RateLimits, tracing: Tracing) -> Lifespan[FastAPI]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await runtime.start()
            async with kept_fresh(runtime.metrics.refresh):
                yield
        finally:
            await runtime.stop()
            await rates.close()
            await tracing.close()

    return lifespan


def _add_pages(app: FastAPI, assets: Assets, admin_link: bool) -> None:
    shown = ((f"{_ADMIN_LINK} hidden", _ADMIN_LINK),) if admin_link else ()
    for path, page in (
        ("/", assets.page("search/index.html", *shown)),
        ("/admin", assets.page("admin/index.html")),
    ):

        async def answer(request: Request, page: Page = page) -> Response:
            return page.answer(request.headers)

        # A plain route: FastAPI would take `page` for a parameter.
        app.add_route(path, answer, methods=["GET"], include_in_schema=False)
    app.mount("/ui", assets)
