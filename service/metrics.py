"""Prometheus metrics of one app, in a registry of its own."""

from collections.abc import Callable, Sequence
from http import HTTPMethod

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

from service.cache import Kind, Level

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
_METHODS = frozenset(HTTPMethod)


class Metrics:
    """What is counted and measured; `docs/operations.md` lists every name."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
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
        self.in_flight = Gauge(
            "kinlens_searches_in_flight", "Searches being answered.", registry=self.registry
        )
        self.gallery_items = Gauge(
            "kinlens_gallery_items",
            "Items in a gallery.",
            ["gallery", "generation"],
            registry=self.registry,
        )

    def observe_lookup(self, kind: Kind, level: Level) -> None:
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
        Info("kinlens_provider", "What runs the model.", registry=self.registry).info(
            {"provider": provider, "bundle_id": bundle_id}
        )

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Publish a value that is read whenever the metrics are."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def render(self) -> bytes:
        """All of it in the text format of Prometheus."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)
