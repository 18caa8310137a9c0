"""What the metrics tell about models, galleries and jobs, read when they are asked for."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from embedder.errors import KinlensError
from service.api.models import JobState
from service.concurrency import BoundedPool, Recent, T
from service.galleries.registry import Registry
from service.observe.health import Health
from service.observe.metrics import Metrics
from service.search.cache import Cache
from service.search.lanes import Lanes
from service.search.model import Models


class Observer(Collector):
    """What is served now; what cannot be read is left out."""

    def __init__(
        self,
        registry: Registry,
        models: Models,
        pool: BoundedPool,
        timeout_s: float,
        jobs: Callable[[], Mapping[JobState, int]] = dict,
    ) -> None:
        self._registry = registry
        self._models = models
        self._pool = pool
        self._timeout_s = timeout_s
        self._jobs = jobs
        self._families = _families()
        self._recent = Recent(self._read)

    def collect(self) -> Sequence[GaugeMetricFamily]:
        """As it was observed last."""
        return self._families

    async def observe(self) -> None:
        """Read models, jobs and galleries as they are now, or were within the last second."""
        self._families = await self._recent.get()

    async def _read(self) -> Sequence[GaugeMetricFamily]:
        provider, jobs, items, age = families = _families()
        for model in self._models.running():
            provider.add_metric([model.provider, model.bundle_id], 1)
        with contextlib.suppress(KinlensError, TimeoutError):
            for state, count in (await self._run(self._jobs)).items():
                jobs.add_metric([state], count)
        for name in self._registry.names():
            with contextlib.suppress(KinlensError, TimeoutError), self._registry.lease(name) as own:
                gallery = own.gallery
                items.add_metric([name], await self._run(lambda: gallery.size))  # noqa: B023
                made_at = datetime.fromisoformat(gallery.created_at)
                age.add_metric([name], (datetime.now(UTC) - made_at).total_seconds())
        return families

    async def _run(self, work: Callable[[], T]) -> T:
        async with asyncio.timeout(self._timeout_s):
            return await self._pool.run(work, urgent=True, patient=True)


def _families() -> Sequence[GaugeMetricFamily]:
    return [
        GaugeMetricFamily(name, text, labels=labels)
        for name, text, labels in [
            ("kinlens_provider_info", "What runs the model.", ["provider", "bundle_id"]),
            ("kinlens_jobs", "Jobs by state.", ["state"]),
            ("kinlens_gallery_items", "Items in a gallery.", ["gallery"]),
            ("kinlens_gallery_age_seconds", "Time since a gallery was built.", ["gallery"]),
        ]
    ]


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
