"""Metrics and logs: what is counted, what is never written; and pages without a key or a rate
limit, which are cheap to request often.
"""

import asyncio
import re
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from kinlens.indexer.types import SearchOptions
from kinlens.service.http import openapi
from kinlens.service.jobs.store import ACTIVE, ENDED
from kinlens.service.observe import metrics
from kinlens.service.observe.metrics import CONTENT_TYPE
from kinlens.service.settings import Settings
from tests.support.seams import JobStore
from tests.support.servers import FakeGallery, workers_of
from tests.support.shops import start_shop
from tests.support.waiting import until

DOCS = Path(__file__).parents[3] / "docs"


def test_requests_are_counted_by_route_and_status(start_service, photos) -> None:
    service = start_service()
    service.search(photos[0])
    service.search(b"")
    service.client.get("/galleries/shop/items/3/image")
    service.client.get("/secret-address")
    for method in ("PROPFIND", "MKCOL", "BREW"):  # nothing here takes them
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


def test_the_series_of_a_deleted_gallery_end(tmp_path, closes) -> None:
    shop = closes(start_shop(tmp_path / "state"))
    shop.running.runtime.metrics.missing_images.labels("shop").inc()

    def is_shown() -> bool:
        return 'gallery="shop"' in shop.client.get("/metrics").raise_for_status().text

    assert is_shown()
    shop.client.delete(shop.url).raise_for_status()
    until(lambda: not is_shown())


def test_a_gallery_that_cannot_be_read_is_omitted_alone(start_service, monkeypatch) -> None:
    def fail(_: object) -> int:
        raise sqlite3.DatabaseError("database disk image is malformed")

    service = start_service()
    monkeypatch.setattr(FakeGallery, "size", property(fail), raising=False)
    with structlog.testing.capture_logs() as events:
        answer = service.client.get("/metrics")
    assert answer.status_code == 200
    assert "kinlens_gallery_items{" not in answer.text
    assert service.metric("kinlens_ready") == 1
    [omitted] = [event for event in events if event["event"] == "metrics omitted"]
    assert (omitted["subject"], omitted["error"]) == ("gallery shop", "DatabaseError")


def test_every_metric_is_described_and_the_pages_name_no_other_one(start_service) -> None:
    service = start_service()
    service.search(b"")
    service.client.get("/metrics").raise_for_status()
    metrics = service.runtime.metrics
    described = {name: (labels, text) for name, _, labels, text in metrics.described}
    families = {
        f"{family.name}_total" if family.type == "counter" else family.name: family
        for family in metrics.registry.collect()
    }
    assert described.keys() == families.keys()
    deploy = DOCS.parent / "deploy"
    files = [*DOCS.glob("*.md"), *deploy.rglob("*.json"), deploy / "prometheus/alerts.yml"]
    pages = "\n".join(file.read_text("utf-8") for file in files)
    named = set(re.findall(r"\b(kinlens_\w+?)(?:_sum|_count|_bucket)?\b(?![/.])", pages))
    assert len(named) > 5
    assert named <= described.keys()
    for name, (labels, text) in described.items():
        assert text.endswith("."), name
        for sample in families[name].samples:
            assert sample.labels.keys() - {"le"} == set(labels), name


def test_the_start_logs_the_layers_of_the_sandbox(start_service) -> None:
    with structlog.testing.capture_logs() as events:
        service = start_service()
    [line] = [event for event in events if event["event"] == "decoder sandbox"]
    layers = workers_of(service).layers
    names = {layer.name for layer in layers}
    assert names == {"landlock", "seccomp"}
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


def counted(work: Callable[..., Any], on_the_loop: list[bool]) -> Callable[..., Any]:
    """Notes for each call of `work` whether it holds up the event loop."""

    def call(*given: Any, **named: Any) -> Any:
        on_the_loop.append(asyncio._get_running_loop() is not None)
        return work(*given, **named)

    return call


def test_pages_without_a_limit_are_rendered_rarely(start_service, monkeypatch) -> None:
    """Metrics once a second, the document and its page once; none of them on the event loop."""
    scrapes: list[bool] = []
    pages: list[bool] = []
    monkeypatch.setattr(metrics, "generate_latest", counted(metrics.generate_latest, scrapes))
    monkeypatch.setattr(openapi, "get_openapi", counted(openapi.get_openapi, pages))
    service = start_service()
    started = time.monotonic()
    with ThreadPoolExecutor(4) as clients:
        for path in ("/metrics", "/docs", "/openapi.json"):
            answers = list(clients.map(service.client.get, [path] * 80))
            assert {answer.status_code for answer in answers} == {200}
            assert path == "/metrics" or len({answer.content for answer in answers}) == 1
    assert 1 <= len(scrapes) <= time.monotonic() - started + 1
    assert not any(scrapes)
    assert pages == [False]


class Approximate(FakeGallery):
    """Misses its best item unless it is asked to be exact."""

    exact = 0

    def facts(self) -> Any:
        return SimpleNamespace(segment=SimpleNamespace(kind="hnsw"))

    def search(self, queries: Any, k: int, options: SearchOptions | None = None) -> Any:
        options = options or SearchOptions()
        self.exact += options.exact
        missed = options if options.exact else replace(options, offset=options.offset + 1)
        return super().search(queries, k, missed)


def sampled(service: Any) -> float:
    return service.metric("kinlens_online_recall_count", gallery="shop")


def test_one_in_n_searches_is_measured(start_service, embedder, photos, monkeypatch) -> None:
    monkeypatch.setattr(Settings, "recall_sample", 3)
    gallery = Approximate(embedder, photos)
    service = start_service(galleries={"shop": gallery})
    for number in range(9):
        service.search(photos[number], k=4)
        until(lambda number=number: sampled(service) == (number + 1) // 3)
    assert gallery.exact == 3
    total = service.metric("kinlens_online_recall_sum", gallery="shop")
    assert total == pytest.approx(3 * 3 / 4)  # of four true ones the best is missing


def test_jobs_are_counted_by_state(start_service, tmp_path) -> None:
    (tmp_path / "state").mkdir()
    store = JobStore(tmp_path / "state" / "service.sqlite")
    ids = [store.create("compact", f"g{number}", {}, "test").id for number in range(3)]
    assert all(store.begin(job_id) for job_id in ids)
    assert store.succeed(ids[0])
    assert all(store.fail(job_id, "why") for job_id in ids[1:])
    service = start_service(state=tmp_path / "state")
    service.client.get("/metrics").raise_for_status()
    found = {state: service.metric("kinlens_jobs", state=state) for state in (*ACTIVE, *ENDED)}
    assert found == {"queued": 0, "running": 0, "succeeded": 1, "failed": 2, "cancelled": 0}
