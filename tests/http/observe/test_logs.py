"""Logs: JSON lines of the whole process, without secrets; traces as a real collector gets them."""

import gzip
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kinlens.embedder.errors import KinlensError
from kinlens.embedder.fake import FakeEmbedder
from kinlens.service.observe.logs import masked
from kinlens.service.settings import Settings
from tests.support.servers import create_app
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
SAY = """
import asyncio, logging, warnings
import structlog, uvicorn
from kinlens.service.observe.logs import configure_logs

configure_logs("debug")
log = structlog.get_logger()
log.info("ours", detail="redis://user:hunter2@cache:6379/0")
log.debug("small \\ud800")
uvicorn.Config(lambda: None, log_config=None)
logging.getLogger("uvicorn.error").info("Started server process [%d]", 7)
logging.getLogger("uvicorn.access").info("GET /?password=hunter2")
logging.getLogger("elsewhere").warning("a key: %s", "kl_0123456789abcdef_" + "0f" * 32)
warnings.warn("old")
try:
    raise ValueError('Authorization: Bearer hunter2')
except ValueError:
    log.exception("failed", headers={"x-api-key": "hunter2"})
"""


def run(code: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done


def test_every_line_is_json_whoever_logs_it() -> None:
    done = run(SAY)
    assert done.stdout == ""
    assert "hunter2" not in done.stderr
    assert "0f0f" not in done.stderr
    events = [json.loads(line) for line in done.stderr.splitlines()]
    levels = ["info", "debug", "info", "warning", "warning", "error"]
    assert [event["level"] for event in events] == levels
    ours, _, uvicorn, key, warning, failed = events
    assert ours["detail"] == "redis://***@cache:6379/0"
    assert (uvicorn["logger"], uvicorn["event"]) == ("uvicorn.error", "Started server process [7]")
    assert str(key["event"]).endswith("kl_0123456789abcdef_***")
    assert "old" in str(warning["event"])
    assert "ValueError" in str(failed["exception"])
    assert all(str(event["timestamp"]).endswith("Z") for event in events)


def program_that_logs(count: int, fields: str = "") -> str:
    """A program that logs `count` lines."""
    return f"""
import sys
import structlog
from kinlens.service.observe.logs import configure_logs

configure_logs("info")
for number in range({count}):
    structlog.get_logger().info("request", number=number{fields})
"""


WAITING = "print(flush=True)\nsys.stdin.read()\n"


def test_a_log_reader_that_hangs_blocks_nothing_and_learns_what_it_missed() -> None:
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", program_that_logs(30_000) + WAITING]
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        ready, _, _ = select.select([process.stdout], [], [], 60)
        assert ready, "logging waits for its reader"
        reported: list[int] = []
        dropped = 0
        while len(reported) + dropped < 30_000:
            event = json.loads(process.stderr.readline())
            if event["event"] == "log lines dropped":
                dropped += event["times"]
            else:
                reported.append(event["number"])
        process.stdin.close()
        assert process.wait(60) == 0
    assert dropped > 0
    assert reported == sorted(reported)


RECOVERS = """
import os, select, sys, time
import structlog
from kinlens.service.observe.logs import configure_logs, dropped_lines

how, into = sys.argv[1:]
log = structlog.get_logger()
if how == "full disk":  # the file may not grow, until it may
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.RLIM_INFINITY))
    end = os.open(into, os.O_WRONLY | os.O_CREAT)
elif how == "no reader":
    reader, end = os.pipe()
    os.close(reader)
else:  # a pipe that does not block, whose reader is slow
    reader, end = os.pipe()
    os.set_blocking(end, False)
os.dup2(end, 2)
configure_logs("info")
for number in range(200):
    log.info("before", number=number, text="x" * 1_000)
if how != "slow reader":
    while dropped_lines() < (199 if how == "full disk" else 200):
        time.sleep(0.01)
if how == "full disk":
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
elif how == "no reader":
    os.dup2(os.open(into, os.O_WRONLY | os.O_CREAT), 2)
else:
    while select.select([], [end], [], 0)[1]:  # until the pipe is full
        time.sleep(0.01)
    with open(into, "wb") as kept:
        seen = b""
        while seen.count(b"before") < 200:
            seen += os.read(reader, 1 << 16)
        kept.write(seen)
        log.info("after", dropped=dropped_lines())
        kept.write(os.read(reader, 1 << 16))
        sys.exit()
log.info("after", dropped=dropped_lines())
"""


@pytest.mark.parametrize("how", ["full disk", "no reader", "slow reader"])
def test_logging_continues_after_lines_could_not_be_written(how: str, tmp_path: Path) -> None:
    """The lines that are missing are counted, and the next line states how many."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", RECOVERS, how, str(log)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    events = []
    for line in log.read_text().splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            assert how == "full disk"
            assert not events, "only the line that did not fit is cut"
    reports = [event for event in events if event["event"] == "log lines dropped"]
    written = [event["number"] for event in events if event["event"] == "before"]
    assert events[-1]["event"] == "after"
    assert sum(event["times"] for event in reports) == 200 - len(written)
    assert bool(reports) == (how != "slow reader")
    assert events[-1]["dropped"] == 200 - len(written)


def test_no_line_is_lost_at_the_exit() -> None:
    done = run(program_that_logs(1_000), status=0)
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    numbers = [line["number"] for line in lines if line["event"] == "request"]
    assert numbers == list(range(1_000))


def test_processes_that_share_a_pipe_do_not_mix_their_lines() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader:
        options: dict[str, Any] = {"cwd": ROOT, "stdin": subprocess.PIPE, "stderr": writing}
        code = program_that_logs(3_000, ', process=sys.argv[1], text="x" * 50') + WAITING
        options |= {"stdout": subprocess.DEVNULL}
        commands = ([sys.executable, "-c", code, name] for name in "ab")
        processes = [subprocess.Popen(command, **options) for command in commands]
        os.close(writing)
        time.sleep(2)  # both wait for space in the pipe, where a longer write would be cut
        events = [json.loads(reader.readline()) for _ in range(6_000)]
        for process in processes:
            process.communicate()
            assert process.returncode == 0
    for name in "ab":
        numbers = [event["number"] for event in events if event["process"] == name]
        assert numbers == list(range(3_000))


def test_a_masked_line_holds_no_secret_and_is_json_still() -> None:
    for line in (
        '{"authorization": "Bearer hunter2"}',
        '{"X-API-Key": "hunter2"}',
        '{"Cookie": "a=hunter2; b=\\"hunter2\\""}',
        '{"detail": "redis://user:hunter2@[::1]:6379/0"}',
        '{"token": 1234567, "password": "hunter2"}',
    ):
        shown = masked(line)
        assert "hunter2" not in shown
        assert "1234567" not in shown
        json.loads(shown)
    line = '{"event": "serving", "route": "/search", "detail": "http://127.0.0.1:8000/"}'
    assert masked(line) == line


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
from tests.support.servers import create_app
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
    lines = run(OFF_AND_AWAY).stdout.splitlines()  # with those of the log between them
    assert "[]" in lines
    assert lines[-1] == "closed"


HOST = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from kinlens.service.observe.metrics import record_wait, span
spans = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
with span("untraced"), trace.get_tracer("host").start_as_current_span("request"):
    with span("decode"):
        pass
    record_wait("queue", 0.1)
print([one.name for one in spans.get_finished_spans()])
"""


def test_stages_are_spans_of_the_trace_of_a_host() -> None:
    assert run(HOST).stdout.splitlines() == ["['decode', 'queue', 'request']"]


def test_without_the_extra_the_start_names_the_package(monkeypatch, tmp_path) -> None:
    missing = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, missing, None)
    settings = Settings(state=tmp_path, otlp_endpoint="http://user:hunter2@127.0.0.1:4318")
    with pytest.raises(KinlensError, match=r"KINLENS_OTLP_ENDPOINT.*kinlens\[otel\]") as refused:
        create_app(settings, FakeEmbedder(), {})
    assert "hunter2" not in str(refused.value)


def test_logging_goes_on_after_a_gallery_on_milvus_was_opened() -> None:
    """At its import pymilvus configures all logging."""
    pytest.importorskip("pymilvus", reason="pymilvus is not installed")
    code = """
import contextlib
import structlog
from kinlens.embedder.errors import EngineUnavailableError
from kinlens.indexer.galleries import MilvusStore
from kinlens.service.observe.logs import configure_logs

configure_logs("info")
with contextlib.suppress(EngineUnavailableError):
    MilvusStore.open("http://127.0.0.1:1", "shop", timeout_s=0.5)
structlog.get_logger().info("still here")
"""
    assert "still here" in run(code).stderr
