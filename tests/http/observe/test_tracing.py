"""Traces as a real collector receives them; no endpoint, no tracing library."""

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kinlens.embedder.errors import KinlensError
from kinlens.embedder.fake import FakeEmbedder
from kinlens.service.app import create_app
from kinlens.service.settings import Settings
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


class Collector:
    """Takes traces as an OpenTelemetry collector does; `spans` are all that came."""

    def __init__(self) -> None:
        collector = self
        self.spans: list[Span] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.receive(body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def receive(self, body: bytes) -> None:
        for group_ in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in group_.scope_spans:
                self.spans += scope.spans

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def attributes(span: Span) -> dict[str, str]:
    found = {entry.key: entry.value for entry in span.attributes}
    return {key: value.string_value or str(value.int_value) for key, value in found.items()}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()
    thread.join()


def test_a_search_is_one_trace_with_a_span_for_each_stage(start_service, photos, collector) -> None:
    """The span provider is global, so no other test of this process may set one."""
    service = start_service(otlp_endpoint=collector.url)
    parent = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
    files = {"image": ("query.jpg", photos[0], "image/png")}
    merge = structlog.contextvars.merge_contextvars
    with structlog.testing.capture_logs(processors=[merge]) as events:
        service.client.post("/search?k=3", files=files, headers=parent).raise_for_status()
        until(lambda: any(event["event"] == "request" for event in events))
    assert {event["trace_id"] for event in events if event["event"] == "request"} == {TRACE_ID}
    assert service.search(b"hunter2 is not an image").status_code == 415
    service.client.get("/live")
    service.client.get("/ready")
    service.close()
    [request] = [one for one in collector.named("POST /search") if one.trace_id.hex() == TRACE_ID]
    assert attributes(request)["http.response.status_code"] == "200"
    assert attributes(request)["url.query"] == "omitted"
    for name in ("cache", "decode", "queue", "embed", "search"):
        spans = [span for span in collector.named(name) if span.trace_id == request.trace_id]
        assert spans, f"no span {name} among {sorted({s.name for s in collector.spans})}"
        for span in spans:
            assert span.parent_span_id == request.span_id
            assert request.start_time_unix_nano <= span.start_time_unix_nano
            assert span.start_time_unix_nano <= span.end_time_unix_nano
    [failed] = [one for one in collector.named("decode") if one.trace_id != request.trace_id]
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert attributes(failed)["error.type"] == "UnsupportedFormatError"
    assert "hunter2" not in str(collector.spans)
    assert not [span for span in collector.spans if "/live" in span.name or "/ready" in span.name]


OFF_AND_AWAY = """
import sys
from kinlens.service.app import create_app
from kinlens.embedder.fake import FakeEmbedder
from kinlens.service.settings import Settings
from tests.support.servers import DEFAULTS, FakeGallery, run
from tests.tiny import encoded, photo
embedder, image = FakeEmbedder(), encoded(photo(0))
galleries = {"shop": FakeGallery(embedder, [image])}
create_app(Settings(), embedder, galleries)
loaded = ("opentelemetry.sdk.trace", "opentelemetry.exporter")
print([name for name in sys.modules if name.startswith(loaded)])
settings = Settings(otlp_endpoint="http://127.0.0.1:9", **DEFAULTS)
away = run(create_app(settings, embedder, galleries))
assert away.search(image).status_code == 200
away.close()
print("closed")
"""


def test_tracing_is_not_loaded_when_off_and_survives_a_missing_collector() -> None:
    """Neither a request nor the exit."""
    command = [sys.executable, "-c", OFF_AND_AWAY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()  # with those of the log between them
    assert (lines[0], lines[-1]) == ("[]", "closed")


def test_without_the_extra_the_start_names_the_package(monkeypatch, tmp_path) -> None:
    missing = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, missing, None)
    settings = Settings(state=tmp_path, otlp_endpoint="http://user:hunter2@127.0.0.1:4318")
    with pytest.raises(KinlensError, match=r"KINLENS_OTLP_ENDPOINT.*kinlens\[otel\]") as refused:
        create_app(settings, FakeEmbedder(), {})
    assert "hunter2" not in str(refused.value)
