"""Metrics and logs: what is counted, and what is never written."""

import re
import time
from pathlib import Path

import pytest
import structlog

from kinlens.service.jobs.store import ACTIVE, ENDED
from kinlens.service.observe.metrics import CONTENT_TYPE
from tests.support.seams import JobStore, KeyStore

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


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_deleted_gallery_has_no_metrics(start_service, tmp_path, monkeypatch, is_shared) -> None:
    service = start_service(state=tmp_path / "state", anonymous_scopes=("admin",))
    if is_shared:  # as of several processes
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
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


def test_requests_above_a_rate_are_counted(start_service, tmp_path) -> None:
    secret = KeyStore(tmp_path / "state" / "keys.json").create("till", ("search",))
    service = start_service(
        state=tmp_path / "state", rate_limit_per_key="1/hour", rate_limit_per_address="2/hour"
    )
    for headers, count in (({"X-API-Key": secret}, 3), ({}, 5)):
        for _ in range(count):
            service.client.get("/galleries", headers=headers)
    assert service.metric("kinlens_rate_limited_total", by="key") == 2
    assert service.metric("kinlens_rate_limited_total", by="address") == 3
