"""Metrics and logs: what is counted, what is never written; and pages without a key or a rate
limit, which are cheap to request often.
"""

import asyncio
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from kinlens.service.http import openapi
from kinlens.service.observe import metrics
from kinlens.service.observe.metrics import CONTENT_TYPE

DOCS = Path(__file__).parents[3] / "docs"


def test_requests_are_counted_by_route_and_status(start_service, photos) -> None:
    service = start_service()
    service.search(photos[0])
    service.search(b"")
    service.client.get("/galleries/shop/items/3/image")
    service.client.get("/secret-address")
    assert service.client.request("BREW", "/live").status_code == 400
    for method in ("PROPFIND", "MKCOL", "LOCK"):  # nothing here takes them
        assert service.client.request(method, "/live").status_code == 405
    response = service.client.get("/metrics")
    assert response.headers["content-type"] == CONTENT_TYPE
    for word in ("secret-address", "PROPFIND"):
        assert word not in response.text

    def requests(route: str, method: str, status: str) -> float:
        labels = {"route": route, "method": method, "status": status}
        return service.metric("kinlens_requests_total", **labels)

    assert requests("/search", "POST", "200") == 1
    assert requests("/search", "POST", "400") == 1
    assert requests("/galleries/{name}/items/{item_id}/image", "GET", "200") == 1
    assert requests("unmatched", "GET", "404") == 1
    assert requests("/live", "other", "405") == 3


def test_stages_batches_and_galleries_are_published(start_service, photos) -> None:
    service = start_service()
    service.search(photos[0])
    for stage in ("cache", "queue", "decode", "embed", "search", "total"):
        assert service.metric("kinlens_stage_seconds_count", stage=stage) == 1
    assert service.metric("kinlens_batch_size_count") == 2  # the warm-up and the search
    assert service.metric("kinlens_queue_depth") == 0
    assert service.metric("kinlens_ready") == 1
    text = service.client.get("/metrics").text
    model = 'bundle_id="fake",precision="fp32",provider="FakeExecutionProvider"'
    assert f"kinlens_provider_info{{{model}}} 1.0" in text
    assert 'kinlens_gallery_items{gallery="shop"} 12.0' in text


def test_a_deleted_gallery_has_no_metrics(start_service, tmp_path, monkeypatch) -> None:
    service = start_service(state=tmp_path / "state", anonymous_scopes=("admin",))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))  # as of several processes
    service.client.post("/galleries", json={"name": "gone"}).raise_for_status()
    line = 'kinlens_gallery_items{gallery="gone"}'
    assert line in service.client.get("/metrics").text
    service.client.delete("/galleries/gone").raise_for_status()
    clock = time.monotonic
    monkeypatch.setattr("kinlens.service.concurrency.time.monotonic", lambda: clock() + 1.0)
    assert line not in service.client.get("/metrics").text


def test_every_metric_is_described_with_its_labels_and_nothing_else_is(start_service) -> None:
    service = start_service()
    service.search(b"")
    service.client.get("/metrics").raise_for_status()
    metrics = service.runtime.metrics
    described = {name: (labels, text) for name, _, labels, text in metrics.described()}
    families = {
        f"{family.name}_total" if family.type == "counter" else family.name: family
        for family in metrics.registry.collect()
    }
    assert described.keys() == families.keys()
    for name, (labels, text) in described.items():
        assert text.endswith("."), name
        for sample in families[name].samples:
            assert sample.labels.keys() - {"le"} == set(labels), name


def test_every_metric_that_a_page_names_is_there(start_service) -> None:
    names = {name for name, *_ in start_service().runtime.metrics.described()}
    text = "\n".join(page.read_text("utf-8") for page in DOCS.glob("*.md"))
    found = set(re.findall(r"\b(kinlens_\w+?)(?:_sum|_count|_bucket)?\b(?![/.])", text))
    assert len(found) > 5
    assert found <= names


@pytest.mark.parametrize("is_isolated", [False, True])
def test_the_start_logs_the_layers_of_the_sandbox(start_service, is_isolated: bool) -> None:
    with structlog.testing.capture_logs() as events:
        service = start_service(decode_isolation=is_isolated)
    [line] = [event for event in events if event["event"] == "decoder sandbox"]
    layers = service.runtime.search_threads.layers
    names = {layer.name for layer in layers}
    assert names == ({"landlock", "seccomp"} if is_isolated else {"process"})
    held = [layer.name for layer in layers if layer.holds]
    assert line["layers"] == (", ".join(held) or "none")
    assert line.get("absent", {}).keys() == names - {*held}
    assert service.metric("kinlens_decoder_sandbox_layers") == len(held)


def test_a_log_line_has_nothing_of_the_upload(start_service, photos) -> None:
    service = start_service()
    merge = structlog.contextvars.merge_contextvars
    with structlog.testing.capture_logs(processors=[merge]) as events:
        files = {"image": ("holiday-secret.png", b"content-secret", "image/png")}
        refused = service.client.post("/search?token=query-secret", files=files)
        service.search(photos[0])
    line = next(event for event in events if event["event"] == "request")
    assert line["route"] == "/search"
    assert line["status"] == 422  # there is no parameter token
    assert line["request_id"] == refused.headers["x-request-id"]
    assert (line["principal"], line["client"]) == ("anonymous", "127.0.0.1")
    assert line["bytes"] == len(refused.content)
    assert "secret" not in str(events)
    assert str(photos[0][:40]) not in str(events)


class Counted:
    """Calls `work`, and counts the calls, apart those that held up the event loop."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.calls = self.on_the_loop = 0

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        try:
            asyncio.get_running_loop()
            self.on_the_loop += 1
        except RuntimeError:  # a thread without a loop
            pass
        return self._work(*given, **named)


def ask_often(url: str, path: str) -> list[httpx.Response]:
    """Eighty answers, asked for by four clients at once."""

    def ask(_: int) -> list[httpx.Response]:
        with httpx.Client(base_url=url) as client:
            return [client.get(path) for _ in range(20)]

    with ThreadPoolExecutor(4) as clients:
        return [answer for answers in clients.map(ask, range(4)) for answer in answers]


def test_scrapes_share_one_rendering(start_service, tmp_path, monkeypatch) -> None:
    service = start_service()
    # As of several processes, whose files are all read for a rendering.
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    rendered = Counted(metrics.render)
    monkeypatch.setattr(metrics, "render", rendered)
    started = time.monotonic()
    answers = ask_often(service.url, "/metrics")
    seconds = time.monotonic() - started
    assert {answer.status_code for answer in answers} == {200}
    assert all(b"kinlens_gallery_items" in answer.content for answer in answers)
    assert 1 <= rendered.calls <= seconds + 1
    assert rendered.on_the_loop == 0


def test_the_document_and_its_page_are_rendered_once(start_service, monkeypatch) -> None:
    made = Counted(openapi.render_docs), Counted(openapi.get_openapi)
    monkeypatch.setattr(openapi, "render_docs", made[0])
    monkeypatch.setattr(openapi, "get_openapi", made[1])
    service = start_service()
    for path in ("/docs", "/openapi.json"):
        answers = ask_often(service.url, path)
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.content for answer in answers}) == 1
    assert [one.calls for one in made] == [1, 1]
    assert [one.on_the_loop for one in made] == [0, 0]


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_a_known_document_is_304(running_service, path: str) -> None:
    answer = running_service.client.get(path)
    known = {"If-None-Match": answer.headers["etag"]}
    again = running_service.client.get(path, headers=known)
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == answer.headers["etag"]
    assert running_service.client.get(path, headers={"If-None-Match": '"x"'}).status_code == 200
