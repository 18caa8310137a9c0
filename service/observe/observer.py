"""What the metrics tell about models and galleries, read when they are asked for."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from embedder.errors import KinlensError
from service.concurrency import BoundedPool, Recent
from service.galleries.registry import Registry, Served
from service.jobs.store import State
from service.observe.health import Health
from service.observe.metrics import Metrics
from service.search.cache import Cache
from service.search.lanes import Lanes
from service.search.model import Models


class Observer:
    """Publishes what is served now, and takes back what is no longer served."""

    def __init__(
        self,
        metrics: Metrics,
        registry: Registry,
        models: Models,
        pool: BoundedPool,
        timeout_s: float,
        jobs: Callable[[], Mapping[State, int]] | None = None,
    ) -> None:
        self._metrics = metrics
        self._registry = registry
        self._models = models
        self._pool = pool
        self._timeout_s = timeout_s
        self._jobs = jobs
        self._providers: set[tuple[str, str]] = set()
        self._names: set[str] = set()
        self._recent = Recent(self._observe)

    async def observe(self) -> None:
        """Publish models, jobs and galleries as they are now, or were within the last second; what
        cannot be read stays as it was.
        """
        await self._recent.get()

    async def _observe(self) -> None:
        self._observe_models()
        with contextlib.suppress(KinlensError, TimeoutError):
            await self._observe_jobs()
        names = self._registry.names()
        for name in self._names.difference(names):
            self._metrics.forget_gallery(name)
        self._names = set(names)
        for name in names:
            with contextlib.suppress(KinlensError, TimeoutError), self._registry.lease(name) as own:
                await self._observe_gallery(own)

    def _observe_models(self) -> None:
        running = {(model.provider, model.bundle_id) for model in self._models.running()}
        for provider, bundle_id in self._providers - running:
            self._metrics.forget_provider(provider, bundle_id)
        for provider, bundle_id in running:
            self._metrics.describe(provider, bundle_id)
        self._providers = running

    async def _observe_jobs(self) -> None:
        if self._jobs is not None:
            async with asyncio.timeout(self._timeout_s):
                self._metrics.observe_jobs(await self._pool.run(self._jobs, urgent=True))

    async def _observe_gallery(self, served: Served) -> None:
        name, gallery = served.name, served.gallery
        async with asyncio.timeout(self._timeout_s):
            size = await self._pool.run(lambda: gallery.size, urgent=True)
        self._metrics.observe_gallery(name, size, gallery.created_at)


def publish(metrics: Metrics, lanes: Lanes, cache: Cache, health: Health) -> None:
    """The values that are read whenever the metrics are."""
    metrics.gauge("kinlens_queue_depth", "Searches that wait for a lane.", lambda: lanes.waiting)
    metrics.gauge(
        "kinlens_decoder_restarts",
        "Processes that decode and were replaced.",
        lambda: lanes.restarts,
    )
    metrics.gauge(
        "kinlens_decoder_kills",
        "Processes that decode and were ended for time or memory.",
        lambda: lanes.kills,
    )
    metrics.gauge(
        "kinlens_ready",
        "1 while the last check of readiness passed.",
        lambda: health.passed,
        "livemin",
    )
    metrics.gauge(
        "kinlens_redis_up", "1 while Redis answers.", lambda: cache.remote_state == "up", "livemin"
    )
