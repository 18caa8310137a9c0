"""Liveness and readiness: ready when searches work; and problems for each class of errors."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import structlog
from starlette.requests import Request
from starlette.responses import Response

from kinlens.embedder import errors
from kinlens.embedder.errors import BundleMismatchError, KinlensError
from kinlens.embedder.fake import FakeEmbedder
from kinlens.service.app import create_app
from kinlens.service.problems import from_error, problem_type_of
from kinlens.service.settings import Settings
from tests.support.servers import DEFAULTS, run
from tests.support.waiting import until


def test_readiness_reports_what_is_served(running_service) -> None:
    response = running_service.client.get("/ready")
    answer = response.json()
    assert response.status_code == 200
    assert answer["status"] == "ready"
    assert answer["provider"] == "FakeExecutionProvider"
    assert (answer["precision"], answer["precision_reason"]) == ("fp32", "asked for")
    assert answer["bundle_id"] == "fake"
    assert list(answer["galleries"]) == ["shop"]
    assert answer["checks"] == {"model": "ok", "gallery shop": "ok"}
    assert answer["redis"] == "off"
    assert answer["queue_depth"] == 0
    assert answer["last_error"] is None


def test_readiness_searches_galleries(start_service, embedder, gallery, hung, monkeypatch) -> None:
    service = start_service(galleries={"shop": gallery, "hung": hung})
    embedded = len(embedder.batches)
    clock = time.monotonic
    for checks in (1, 2):
        for _ in range(20):
            assert service.client.get("/ready").status_code == 200
        assert len(embedder.batches) == embedded + checks
        assert (gallery.searches, hung.searches) == (checks, checks)
        monkeypatch.setattr("kinlens.service.concurrency.time.monotonic", lambda: clock() + 1.0)


def test_a_model_that_exits_fails_one_search(start_service, embedder, photos, monkeypatch) -> None:
    def die(_: Any) -> Any:
        raise SystemExit(1)

    service = start_service()
    with monkeypatch.context() as patch:
        patch.setattr(embedder, "embed", die)
        response = service.search(photos[0])
    assert response.status_code == 503
    assert response.json()["type"] == "urn:kinlens:problem:search-unavailable"
    assert int(response.headers["retry-after"]) >= 1
    assert service.client.get("/ready").status_code == 200
    assert service.search(photos[0]).status_code == 200


def test_a_model_that_hangs_is_not_ready_until_it_recovers(start_service, embedder) -> None:
    service = start_service(ready_timeout_ms=100)
    embedder.gate.clear()
    red = service.client.get("/ready")
    embedder.gate.set()
    assert red.status_code == 503
    assert red.json()["checks"]["model"] == "no result within 0.1 s"
    answers = []
    until(lambda: answers.append(service.client.get("/ready")) or answers[-1].status_code == 200)
    assert "no result within" in answers[-1].json()["last_error"]


def test_a_failing_gallery_is_named(start_service, gallery, hung, monkeypatch) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("/secret/path is gone")

    service = start_service(galleries={"shop": gallery, "hung": hung})
    monkeypatch.setattr(gallery, "search", fail)
    response = service.client.get("/ready")
    assert response.status_code == 200  # the other one is searched here, and in no better replica
    checks = response.json()["checks"]
    assert (checks["gallery shop"], checks["gallery hung"]) == ("failed with OSError", "ok")
    assert "gallery shop: failed with OSError" in response.json()["last_error"]
    assert "secret" not in response.text
    monkeypatch.setattr(hung, "search", fail)
    until(lambda: service.client.get("/ready").status_code == 503)  # none is searched


def test_a_hung_gallery_delays_one_check(start_service, hung, gallery, monkeypatch) -> None:
    service = start_service(galleries={"hung": hung, "shop": gallery}, ready_timeout_ms=1_500)
    hung.gate.clear()
    took: list[float] = []
    clock, later = time.monotonic, 0.0
    monkeypatch.setattr("kinlens.service.concurrency.time.monotonic", lambda: clock() + later)
    with structlog.testing.capture_logs() as events:
        for _ in range(4):  # more often than there are threads for lookups
            started = time.perf_counter()
            response = service.client.get("/ready")
            took.append(time.perf_counter() - started)
            assert response.status_code == 200
            checks = response.json()["checks"]
            assert checks["gallery hung"] == "no result within 1.5 s"
            assert checks["gallery shop"] == "ok"
            text = service.client.get("/metrics").text
            assert 'kinlens_gallery_items{gallery="shop"} 12.0' in text
            assert 'kinlens_gallery_items{gallery="hung"}' not in text
            assert 'kinlens_gallery_ready{gallery="hung"} 0.0' in text
            assert 'kinlens_gallery_ready{gallery="shop"} 1.0' in text
            later += 1.0
    assert took[0] > 1.4
    assert max(took[1:]) < took[0] / 2, "only the first check waits"
    assert hung.held == 2, "a thread for readiness, and one for the metrics"
    [omitted] = [event for event in events if event["event"] == "metrics omitted"]
    assert (omitted["subject"], omitted["error"]) == ("gallery hung", "TimeoutError")


def test_a_changed_model_is_not_ready(start_service, embedder, monkeypatch) -> None:
    service = start_service()
    embed = embedder.embed
    monkeypatch.setattr(embedder, "embed", lambda images: -embed(images))
    response = service.client.get("/ready")
    assert response.status_code == 503
    assert "another vector: cosine -1.0000" in response.json()["checks"]["model"]


def test_readiness_does_not_wait_for_the_queue(start_service, embedder, photos) -> None:
    slow = type(embedder)(delay_s=0.05)
    limits = {"ready_timeout_ms": 3_000, "request_timeout_ms": 60_000}
    service = start_service(embedder=slow, queue_size=40, search_threads=1, **limits)
    uploads = [photos[0] + number.to_bytes(4, "big") for number in range(40)]
    slow.gate.clear()
    with ThreadPoolExecutor(40) as clients:
        answers = [clients.submit(service.search, upload) for upload in uploads]
        until(lambda: service.runtime.search_threads.waiting == 39)
        slow.gate.set()
        ready = service.client.get("/ready")
        assert service.runtime.search_threads.waiting > 0, "the check waited for the queue"
        assert ready.status_code == 200, ready.text
        assert [answer.result().status_code for answer in answers] == [200] * 40


def test_a_gallery_with_vectors_of_another_length_is_refused_at_start(gallery) -> None:
    gallery.dim = 5
    with pytest.raises(BundleMismatchError, match=r"dimension 5.* 32"):
        create_app(Settings(), FakeEmbedder(), {"shop": gallery})


def test_a_service_with_a_state_folder_is_ready_without_a_gallery(tmp_path, photos) -> None:
    settings = Settings(state=tmp_path, **DEFAULTS)
    service = run(create_app(settings, FakeEmbedder(), {}))
    ready = service.client.get("/ready")
    assert (ready.status_code, ready.json()["galleries"]) == (200, {})
    assert ready.json()["checks"] == {"model": "ok"}
    refused = service.search(photos[0])
    assert refused.status_code == 404
    assert "POST /galleries" in refused.json()["detail"]
    service.close()


def answer(error: KinlensError) -> Response:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/search",
        "headers": [],
        "query_string": b"",
        "server": ("test", 80),
        "scheme": "http",
        "root_path": "",
        "state": {"request_id": "r1"},
    }
    return asyncio.run(from_error(Request(scope), error))


def test_internal_errors_are_not_public() -> None:
    class UnknownError(KinlensError): ...

    families = (errors.BundleError, errors.GalleryError, errors.StateError, errors.TrainingError)
    files = (errors.GoldenMismatchError, errors.GalleryCorruptError, errors.CheckpointError)
    for cls in (UnknownError, *families, *files):
        assert not problem_type_of(cls("x")).public
        assert b"secret" not in answer(cls("secret")).body


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/search", 405), ("POST", "/live", 405)],
)
def test_unknown_paths_and_methods_are_problems(running_service, method, path, status) -> None:
    response = running_service.client.request(method, path)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["instance"] == path
    assert problem["request_id"]
    if status == 405:
        assert response.headers["allow"] in problem["detail"]
