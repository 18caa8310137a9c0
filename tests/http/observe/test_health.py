"""Liveness and readiness, green when searches work; problems, one for each class of errors."""

import asyncio
import threading
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


def test_readiness_really_embeds_and_searches_every_gallery_at_most_once_a_second(
    start_service, embedder, gallery, photos, monkeypatch
) -> None:
    other = type(gallery)(embedder, photos[:2], name="other", version="v2")
    service = start_service(galleries={"shop": gallery, "other": other})
    embedded = len(embedder.batches)
    clock = time.monotonic
    for checks in (1, 2):
        for _ in range(20):
            assert service.client.get("/ready").status_code == 200
        assert len(embedder.batches) == embedded + checks
        assert (gallery.searches, other.searches) == (checks, checks)
        monkeypatch.setattr("kinlens.service.concurrency.time.monotonic", lambda: clock() + 1.0)


def test_a_model_that_wants_to_exit_costs_its_search_alone(
    start_service, embedder, photos, monkeypatch
) -> None:
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


def test_a_model_that_hangs_turns_readiness_red_and_green_again(
    start_service, embedder, until
) -> None:
    service = start_service(ready_timeout_ms=100)
    embedder.gate.clear()
    red = service.client.get("/ready")
    embedder.gate.set()
    assert red.status_code == 503
    assert red.json()["checks"]["model"] == "no result within 0.1 s"
    answers = []
    until(lambda: answers.append(service.client.get("/ready")) or answers[-1].status_code == 200)
    assert "no result within" in answers[-1].json()["last_error"]


def test_a_gallery_that_fails_is_named_and_the_others_are_still_checked(
    start_service, embedder, gallery, photos, monkeypatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("/secret/path is gone")

    other = type(gallery)(embedder, photos[:2], name="other", version="v2")
    service = start_service(galleries={"shop": gallery, "other": other})
    monkeypatch.setattr(gallery, "search", fail)
    response = service.client.get("/ready")
    assert response.status_code == 200  # the other one is searched here, and in no better replica
    checks = response.json()["checks"]
    assert (checks["gallery shop"], checks["gallery other"]) == ("failed with OSError", "ok")
    assert "gallery shop: failed with OSError" in response.json()["last_error"]
    assert "secret" not in response.text


def test_a_service_whose_every_gallery_fails_is_not_ready(
    start_service, gallery, monkeypatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError

    service = start_service()
    monkeypatch.setattr(gallery, "search", fail)
    assert service.client.get("/ready").status_code == 503


def test_a_gallery_that_hangs_costs_one_thread_and_no_verdict_or_metric_of_the_others(
    start_service, embedder, gallery, photos, monkeypatch
) -> None:
    held, probes = threading.Event(), []

    class Hanging(type(gallery)):
        @property
        def size(self) -> int:
            probes.append(threading.current_thread())
            held.wait(20)
            return 0

        @size.setter
        def size(self, _: int) -> None: ...

    galleries = {"hung": type(gallery)(embedder, photos[:2], name="hung"), "shop": gallery}
    service = start_service(galleries=galleries, ready_timeout_ms=300)
    monkeypatch.setattr(galleries["hung"], "__class__", Hanging)
    clock, later = time.monotonic, 0.0
    monkeypatch.setattr("kinlens.service.concurrency.time.monotonic", lambda: clock() + later)
    with structlog.testing.capture_logs() as events:
        for _ in range(4):  # more often than there are threads for lookups
            response = service.client.get("/ready")
            assert response.status_code == 200
            checks = response.json()["checks"]
            assert (checks["gallery hung"], checks["gallery shop"]) == (
                "no result within 0.3 s",
                "ok",
            )
            text = service.client.get("/metrics").text
            assert 'kinlens_gallery_items{gallery="shop"} 12.0' in text
            assert 'kinlens_gallery_items{gallery="hung"}' not in text
            assert 'kinlens_gallery_ready{gallery="hung"} 0.0' in text
            assert 'kinlens_gallery_ready{gallery="shop"} 1.0' in text
            later += 1.0
    held.set()
    assert len(probes) == 2  # one for readiness, one for the metrics
    [omitted] = [event for event in events if event["event"] == "metrics omitted"]
    assert (omitted["subject"], omitted["error"]) == ("gallery hung", "TimeoutError")


def test_a_model_that_gives_other_vectors_than_at_the_start_turns_readiness_red(
    start_service, embedder, monkeypatch
) -> None:
    service = start_service()
    embed = embedder.embed
    monkeypatch.setattr(embedder, "embed", lambda images: -embed(images))
    response = service.client.get("/ready")
    assert response.status_code == 503
    assert "another vector: cosine -1.0000" in response.json()["checks"]["model"]


def test_readiness_does_not_wait_behind_a_long_queue_of_a_slow_model(
    start_service, embedder, photos, until
) -> None:
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


def test_errors_of_the_inside_are_not_public() -> None:
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
def test_unknown_addresses_and_wrong_methods_are_problems(
    running_service, method: str, path: str, status: int
) -> None:
    response = running_service.client.request(method, path)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["instance"] == path
    assert problem["request_id"]
    if status == 405:
        assert response.headers["allow"] in problem["detail"]
