"""Everything that stands before the routes, put together from the settings."""

from dataclasses import dataclass

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from service.access.address import Addresses
from service.access.keys import KeyStore
from service.access.ratelimit import RateLimit
from service.access.rates import RateLimits, SharedCounts
from service.http.authorize import KEY_HEADER, Authorize
from service.http.bounds import Bounds
from service.http.limits import BodyLimit
from service.http.paths import PlainPaths
from service.http.templates import Templates
from service.settings import Settings

_FAILURES = "30/minute"
_CORS_MAX_AGE_S = 600
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_SENT = ("Authorization", "Content-Type", "If-None-Match", "X-Request-ID", KEY_HEADER)
_SHOWN = (
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


@dataclass(frozen=True, slots=True)
class Guard:
    """Who may do what, how often and how much."""

    settings: Settings
    store: KeyStore | None
    rates: RateLimits

    def middleware(self, served: Templates) -> list[Middleware]:
        """Outermost first: odd paths, other origins, scopes, rates, bodies."""
        settings = self.settings
        bounds = Bounds(settings.max_upload_bytes, settings.max_batch_bytes)
        return [
            Middleware(PlainPaths, drain_bytes=bounds.largest),
            *_cors(settings),
            Middleware(
                Authorize,
                store=self.store,
                anonymous=settings.anonymous_scopes,
                addresses=Addresses(settings.trusted_proxies),
                served=served,
                failures=self.rates,
                drain_bytes=bounds.largest,
                origins=settings.cors_origins,
            ),
            Middleware(RateLimit, rates=self.rates, drain_bytes=bounds.largest),
            Middleware(
                BodyLimit,
                bounds=bounds,
                timeout_s=settings.body_timeout_ms / 1e3,
                max_concurrent=settings.max_concurrent_uploads,
            ),
        ]

    async def close(self) -> None:
        """Disconnect from Redis."""
        await self.rates.close()


def build_guard(settings: Settings, store: KeyStore | None) -> Guard:
    """The guard of the settings, with the keys of `store`."""
    rates = {
        "key": settings.rate_limit_per_key,
        "address": settings.rate_limit_per_address,
        "failure": _FAILURES,
    }
    return Guard(settings, store, RateLimits(rates, _shared(settings)))


def _shared(settings: Settings) -> SharedCounts | None:
    if settings.redis_url is None:
        return None
    return SharedCounts(
        settings.redis_url.get_secret_value(),
        timeout_s=settings.redis_timeout_ms / 1e3,
        retry_s=settings.redis_retry_ms / 1e3,
        connections=settings.redis_connections,
    )


def _cors(settings: Settings) -> list[Middleware]:
    if not settings.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=_METHODS,
            allow_headers=_SENT,
            expose_headers=_SHOWN,
            max_age=_CORS_MAX_AGE_S,
        )
    ]
