"""The end of a replica behind a load balancer, slow starts, and readiness by gallery."""

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from kinlens.embedder.bundle import Bundle
from tests.support.own_process import own_process
from tests.support.waiting import until
from tests.tiny import encoded, photo


@pytest.mark.parametrize("workers", [1, 2])
def test_after_sigterm_it_is_not_ready_and_answers_until_the_drain_is_over(
    tiny_bundle: Bundle, tiny_gallery: Path, tmp_path: Path, workers: int
) -> None:
    served = {"bundle": tiny_bundle.path, "galleries": f"shop={tiny_gallery}"}
    with own_process(tmp_path / "log", workers=workers, drain_s=4, **served) as started:
        url, files = started.url, {"image": encoded(photo(1))}
        assert httpx.get(f"{url}/startup").status_code == 200
        assert httpx.get(f"{url}/ready").status_code == 200
        began = time.monotonic()
        os.kill(started.pid, signal.SIGTERM)
        until(lambda: httpx.get(f"{url}/ready").status_code == 503)
        assert httpx.get(f"{url}/ready").json()["checks"]["service"] == "shutting down"
        for _ in range(5):
            assert httpx.post(f"{url}/search", files=files).status_code == 200
        assert started.process.wait(60) == 0
        assert time.monotonic() - began >= 4


def test_readiness_of_one_gallery(start_service, gallery, embedder, photos, monkeypatch) -> None:
    other = type(gallery)(embedder, photos[:2], name="other", version="v2")
    service = start_service(galleries={"shop": gallery, "other": other}, ready_timeout_ms=200)
    assert service.client.get("/ready", params={"gallery": "other"}).status_code == 200
    assert service.client.get("/ready", params={"gallery": "none"}).status_code == 404
    gate = threading.Event()
    monkeypatch.setattr(other, "search", lambda *_, **__: gate.wait() and [[]])
    try:
        until(lambda: service.client.get("/ready?gallery=other").status_code == 503)
        assert service.client.get("/ready?gallery=shop").status_code == 200
        assert service.client.get("/ready").status_code == 200
    finally:
        gate.set()


def test_a_start_is_over_when_it_was_ready_once(start_service, embedder) -> None:
    service = start_service(ready_timeout_ms=100)
    embedder.gate.clear()
    assert service.client.get("/startup").status_code == 503
    embedder.gate.set()
    until(lambda: service.client.get("/startup").status_code == 200)
    embedder.gate.clear()
    until(lambda: service.client.get("/ready").status_code == 503)
    assert service.client.get("/startup").status_code == 200
    embedder.gate.set()
