"""Prometheus metrics of one app, in a separate registry; and optional traces: a span per request
and per stage, sent to an OpenTelemetry collector.

    FastAPI: span of the request ─► span("decode"), span("embed"), … of the pipeline

Without `otlp_endpoint` no exporter is imported, and `span` does nothing. Spans contain the path
template, never a query string, an upload or its file name.
"""

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPMethod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from fastapi.telemetry import TelemetryConfig
from opentelemetry.trace import StatusCode, get_current_span, get_tracer, set_tracer_provider
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector

from kinlens.embedder.errors import KinlensError
from kinlens.service.concurrency import in_thread

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Stage = Literal["cache", "decode", "queue", "embed", "search", "total"]
STAGES: tuple[Stage, ...] = get_args(Stage)
CacheKind = Literal["embedding", "boxes", "answer"]
Level = Literal["local", "redis", "miss", "invalid"]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
_RECALLS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
_METHODS = frozenset(HTTPMethod)
PROBES = frozenset({"/live", "/ready", "/startup", "/metrics"})
"""Paths that orchestrators and monitoring call."""

_EXPORT_S = 5.0
_NOTHING = contextlib.nullcontext()
_tracer = get_tracer("kinlens")  # uses the provider of the process once it is set


class Described(NamedTuple):
    """A metric in the documentation."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class Metrics:
    """The counters, histograms and gauges; `described` lists them for the documentation."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.described: list[Described] = []
        self.requests = self._counter(
            "kinlens_requests",
            "Answered requests. `route` is the pattern of a path, never the path itself; `method` "
            "is `other` if it is not an HTTP method; status 499: the client disconnected.",
            "route",
            "method",
            "status",
        )
        self.request_seconds = self._histogram(
            "kinlens_request_seconds", "Time from request to answer.", _SECONDS, "route"
        )
        self.key_requests = self._counter(
            "kinlens_key_requests",
            "Requests with an API key, by its name, including rate-limited ones.",
            "key",
        )
        self.key_units = self._counter(
            "kinlens_key_units",
            "Units of work charged to an API key, as its rate counts them.",
            "key",
        )
        self.rate_limited = self._counter(
            "kinlens_rate_limited", "Requests refused by the rate of a `key` or an `address`.", "by"
        )
        self.stage_seconds = self._histogram(
            "kinlens_stage_seconds",
            "Time of each stage of a search. `cache`: lookups in this process and in Redis; "
            "`queue`: waiting for a search thread; `decode`: from the uploads of a query to their "
            "pixels; `embed`: from pixels to vectors, on a GPU including the wait for the model; "
            "`search`: in the gallery; `total`: from the query to its answer. Stages that a cached "
            "value replaces are not counted.",
            _SECONDS,
            "stage",
        )
        self.batch_size = self._histogram(
            "kinlens_batch_size",
            "Images in each call of the model, including those of readiness checks and new items.",
            _BATCH_SIZES,
        )
        self.cache_lookups = self._counter(
            "kinlens_cache_lookups",
            "Lookups of an `answer`, an `embedding` or `boxes`; `level` is the outcome: `local`, "
            "`redis`, `miss` or `invalid`.",
            "kind",
            "level",
        )
        self.online_recall = self._histogram(
            "kinlens_online_recall",
            "For sampled searches: share of the exact best items that were returned.",
            _RECALLS,
            "gallery",
        )
        self.reload_failures = self._counter(
            "kinlens_reload_failures",
            "Generations that could not be opened and are not served.",
            "gallery",
        )
        self.missing_images = self._counter(
            "kinlens_missing_images",
            "Requests for the image of an item whose file was removed or changed; visitors see a "
            "placeholder.",
            "gallery",
        )
        self.feedback = self._counter(
            "kinlens_feedback",
            "Stored feedback: `clicked`, `bought` or `wrong`, each counted once.",
            "action",
        )
        self.milvus_seconds = self._histogram(
            "kinlens_milvus_seconds",
            "Time of a request to Milvus, by client method (`search`, `query`, `upsert`, ...).",
            _SECONDS,
            "call",
        )
        self.milvus_failures = self._counter(
            "kinlens_milvus_failures", "Requests that Milvus did not answer or refused.", "call"
        )
        self._requests: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._lookups: dict[tuple[CacheKind, Level], Counter] = {}
        self._stages = {stage: self.stage_seconds.labels(stage) for stage in STAGES}

    def observe_stage(self, stage: Stage, seconds: float) -> None:
        """Record the duration of a stage of a search."""
        self._stages[stage].observe(seconds)

    def observe_milvus(self, call: str, seconds: float, is_answered: bool) -> None:
        """Record the duration of a request to Milvus."""
        self.milvus_seconds.labels(call).observe(seconds)
        if not is_answered:
            self.milvus_failures.labels(call).inc()

    def observe_lookup(self, kind: CacheKind, level: Level) -> None:
        """Count a cache lookup."""
        if (kind, level) not in self._lookups:
            self._lookups[kind, level] = self.cache_lookups.labels(kind, level)
        self._lookups[kind, level].inc()

    def observe_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count an answered request; `route` is the path template, never the path.

        Clients can send any word as method, so unknown methods count as `other`.
        """
        known = method if method in _METHODS else "other"
        if (route, known, status) not in self._requests:
            series = self.requests.labels(route, known, str(status))
            self._requests[route, known, status] = series, self.request_seconds.labels(route)
        count, duration = self._requests[route, known, status]
        count.inc()
        duration.observe(seconds)

    def observe_key(self, name: str, units: int) -> None:
        """Count a request with the API key `name` and its units of work."""
        self.key_requests.labels(name).inc()
        self.key_units.labels(name).inc(units)

    def add(self, collector: Collector, described: Sequence[Described]) -> None:
        """Add a collector and the description of its metrics."""
        self.registry.register(collector)
        self.described += described

    def forget(self, gallery: str) -> None:
        """Remove the series of a deleted gallery."""
        for metric in (self.online_recall, self.reload_failures, self.missing_images):
            metric.remove(gallery)

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        self.described.append(Described(f"{name}_total", "counter", labels, text))
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        self.described.append(Described(name, "histogram", labels, text))
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


@dataclass(frozen=True, slots=True)
class Tracing:
    """The destination of spans; without a `provider` no spans are recorded."""

    provider: "TracerProvider | None" = None

    def telemetry(self) -> TelemetryConfig:
        """The configuration of FastAPI: one span for each request that is not a probe."""
        config: TelemetryConfig = {
            "tracing": self.provider is not None,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        }
        if self.provider is not None:
            config["tracer_provider"] = self.provider
            config["exclude"] = lambda scope: scope.get("path") in PROBES
        return config

    async def close(self) -> None:
        """Send the remaining spans, for up to a few seconds."""
        if self.provider is None:
            return
        with contextlib.suppress(TimeoutError):
            await in_thread(self.provider.shutdown, _EXPORT_S)


def open_tracing(endpoint: str | None, version: str) -> Tracing:
    """Send traces to the collector at `endpoint`, such as http://collector:4318; None: no traces.

    Raises: KinlensError if a package is missing; the message includes the command to install it.
    """
    if not endpoint:
        return Tracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise KinlensError(
            f"KINLENS_OTLP_ENDPOINT is set, but traces cannot be sent ({error}). "
            "Install the packages: pip install 'kinlens[otel]', or unset the endpoint."
        ) from error
    url = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
    resource: dict[str, str | int] = {
        "service.name": "kinlens",
        "service.version": version,
        "service.instance.id": uuid.uuid4().hex,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }
    provider = TracerProvider(
        resource=Resource.create(resource),
        span_limits=SpanLimits(max_span_attributes=32, max_span_attribute_length=256),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(_without_queries())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=_EXPORT_S)))
    set_tracer_provider(provider)
    return Tracing(provider)


def trace_fields() -> dict[str, str]:
    """The trace id of the current request as a log field; empty without a trace."""
    request = get_current_span().get_span_context()
    return {"trace_id": f"{request.trace_id:032x}"} if request.is_valid else {}


def span(name: str) -> contextlib.AbstractContextManager[object]:
    """A span for a stage of the current request; does nothing without a trace."""
    return _span(name) if _is_traced() else _NOTHING


def record_wait(name: str, waited_s: float) -> None:
    """Record a span that ends now, for the time that the current request has waited."""
    if _is_traced():
        now_ns = time.time_ns()
        _tracer.start_span(name, start_time=now_ns - int(waited_s * 1e9)).end(now_ns)


def _is_traced() -> bool:
    """Whether the current request has a trace."""
    return get_current_span().get_span_context().is_valid


@contextlib.contextmanager
def _span(name: str) -> Iterator[None]:
    # Error messages can contain client data, so only the class is recorded.
    with _tracer.start_as_current_span(
        name, record_exception=False, set_status_on_exception=False
    ) as current:
        try:
            yield
        except BaseException as error:
            current.set_attribute("error.type", type(error).__name__)
            current.set_status(StatusCode.ERROR)
            raise


def _without_queries() -> Any:
    from opentelemetry.sdk.trace import Span, SpanProcessor

    class WithoutQueries(SpanProcessor):
        def on_start(self, span: Span, parent_context: object = None) -> None:  # noqa: ARG002
            if span.attributes and "url.query" in span.attributes:
                span.set_attribute("url.query", "omitted")

    return WithoutQueries()
