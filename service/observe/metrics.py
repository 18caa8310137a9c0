"""Prometheus metrics of one app, in a registry of its own."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPMethod
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from service.jobs.store import State
from service.observe.metrics_shared import RESTARTS, GaugeMode, Readings, is_shared, render
from service.search.cache import CacheKind, Level

Stage = Literal["cache", "decode", "queue", "embed", "search", "total"]
STAGES: tuple[Stage, ...] = get_args(Stage)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
_RECALLS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
_METHODS = frozenset(HTTPMethod)


class Metrics:
    """What is counted and measured; `docs/operations.md` lists every name."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._readings = Readings()
        self.requests = self._counter(
            "kinlens_requests", "Requests answered.", "route", "method", "status"
        )
        self.request_seconds = self._histogram(
            "kinlens_request_seconds", "Time from request to answer.", _SECONDS, "route"
        )
        self.stage_seconds = self._histogram(
            "kinlens_stage_seconds", "Time in each stage of a search.", _SECONDS, "stage"
        )
        self.batch_size = self._histogram(
            "kinlens_batch_size", "Images in each call of the model.", _BATCH_SIZES
        )
        self.cache_lookups = self._counter(
            "kinlens_cache_lookups", "Cache lookups by where they ended.", "kind", "level"
        )
        self.online_recall = self._histogram(
            "kinlens_online_recall",
            "Share of the true best items in sampled answers.",
            _RECALLS,
            "gallery",
        )
        self.rate_limited = self._counter(
            "kinlens_rate_limited", "Requests refused for their number.", "by"
        )
        self.reload_failures = self._counter(
            "kinlens_reload_failures", "Generations that could not be opened.", "gallery"
        )
        self.milvus_seconds = self._histogram(
            "kinlens_milvus_seconds", "Time of a request to Milvus.", _SECONDS, "call"
        )
        self.milvus_failures = self._counter(
            "kinlens_milvus_failures", "Requests that Milvus did not answer.", "call"
        )
        self._counter(*RESTARTS)
        self._add_gauges()
        self._stages = {stage: self.stage_seconds.labels(stage) for stage in STAGES}

    def observe_stage(self, stage: Stage, seconds: float) -> None:
        """Measure a stage of a search."""
        self._stages[stage].observe(seconds)

    def observe_gallery(self, name: str, size: int, created_at: str) -> None:
        """Publish what a gallery is now; `created_at` is ISO 8601."""
        self.gallery_items.labels(name).set(size)
        age = datetime.now(UTC) - datetime.fromisoformat(created_at)
        self.gallery_age.labels(name).set(age.total_seconds())

    def observe_milvus(self, call: str, seconds: float, is_answered: bool) -> None:
        """Measure a request to Milvus."""
        self.milvus_seconds.labels(call).observe(seconds)
        if not is_answered:
            self.milvus_failures.labels(call).inc()

    def observe_rate_limited(self, by: str) -> None:
        """Count a request that was refused for their number, `by` key or address."""
        self.rate_limited.labels(by).inc()

    def observe_jobs(self, counts: Mapping[State, int]) -> None:
        """Publish how many jobs are in each state."""
        for state, count in counts.items():
            self.jobs.labels(state).set(count)

    def observe_lookup(self, kind: CacheKind, level: Level) -> None:
        """Count a cache lookup."""
        self.cache_lookups.labels(kind, level).inc()

    def observe_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count an answered request; `route` is the template, never the address.

        A client can send any word as method, so one that HTTP does not know counts as `other`.
        """
        known = method if method in _METHODS else "other"
        self.requests.labels(route, known, str(status)).inc()
        self.request_seconds.labels(route).observe(seconds)

    def describe(self, provider: str, bundle_id: str) -> None:
        """Publish what runs the model."""
        self.provider.labels(provider, bundle_id).set(1)

    def forget_gallery(self, name: str) -> None:
        """It is no longer served; its series end."""
        for gauge in (self.gallery_items, self.gallery_age):
            _forget(gauge, name)

    def forget_provider(self, provider: str, bundle_id: str) -> None:
        """This bundle runs there no more; its series ends."""
        _forget(self.provider, provider, bundle_id)

    def gauge(
        self, name: str, text: str, read: Callable[[], float], mode: GaugeMode = "livesum"
    ) -> None:
        """Publish a value that is read whenever the metrics are; `mode` joins several processes."""
        self._readings.add(self._gauge(name, text, mode=mode), read)

    def refresh(self) -> None:
        """Read the values of all gauges now."""
        self._readings.refresh()

    def render(self) -> bytes:
        """All of it, of every process of the service, in the text format of Prometheus."""
        self.refresh()
        return render(self.registry)

    def _add_gauges(self) -> None:
        self.in_flight = self._gauge("kinlens_searches_in_flight", "Searches being answered.")
        self.gallery_items = self._gauge(
            "kinlens_gallery_items",
            "Items in a gallery.",
            "gallery",
            mode="livemostrecent",
        )
        self.gallery_age = self._gauge(
            "kinlens_gallery_age_seconds",
            "Time since a gallery was built.",
            "gallery",
            mode="livemostrecent",
        )
        self.jobs = self._gauge("kinlens_jobs", "Jobs by state.", "state", mode="livemostrecent")
        self.provider = self._gauge(
            "kinlens_provider_info",
            "What runs the model.",
            "provider",
            "bundle_id",
            mode="livemax",
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str, mode: GaugeMode = "livesum") -> Gauge:
        return Gauge(name, text, labels, registry=self.registry, multiprocess_mode=mode)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


def _forget(gauge: Gauge, *labels: str) -> None:
    """The library cannot take a series out of files that several processes share: it goes to 0."""
    if is_shared():
        gauge.labels(*labels).set(0)
    else:
        gauge.remove(*labels)
