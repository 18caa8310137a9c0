"""Optional traces: a span per request and per stage, sent to an OpenTelemetry collector.

    FastAPI: span of the request ─► span("decode"), span("embed"), … of the pipeline

Without `otlp_endpoint` no exporter is imported, and `span` does nothing. Spans contain the path
template, never a query string, an upload or its file name.
"""

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi.telemetry import TelemetryConfig
from opentelemetry.trace import StatusCode, get_current_span, get_tracer, set_tracer_provider

from kinlens.embedder.errors import KinlensError
from kinlens.service.concurrency import in_thread

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_PROBES = frozenset({"/live", "/ready", "/startup", "/metrics"})
_EXPORT_S = 5.0
_NOTHING = contextlib.nullcontext()
_tracer = get_tracer("kinlens")  # uses the provider of the process once it is set


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
            config["exclude"] = lambda scope: scope.get("path") in _PROBES
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
    return _span(name) if get_current_span().get_span_context().is_valid else _NOTHING


def record_wait(name: str, waited_s: float) -> None:
    """Record a span that ends now, for the time that the current request has waited."""
    if get_current_span().get_span_context().is_valid:
        now_ns = time.time_ns()
        _tracer.start_span(name, start_time=now_ns - int(waited_s * 1e9)).end(now_ns)


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
