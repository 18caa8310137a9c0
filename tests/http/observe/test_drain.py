"""Drain before the exit, slow starts, and readiness by gallery."""

import os
import signal
import time

import httpx
import pytest

from tests.support.own_process import own_process
from tests.support.waiting import until
from tests.tiny import encoded, photo


@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_drains_before_the_exit(tiny_settings, tmp_path, workers: int) -> None:
    settings = tiny_settings | {"workers": workers, "drain_s": 3}
    with own_process(tmp_path / "log", **settings) as started:
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
        assert time.monotonic() - began >= 3


def test_readiness_of_one_gallery(start_service, gallery, hung) -> None:
    service = start_service(galleries={"shop": gallery, "hung": hung}, ready_timeout_ms=200)
    assert service.client.get("/ready?gallery=hung").status_code == 200
    assert service.client.get("/ready?gallery=none").status_code == 404
    hung.gate.clear()
    until(lambda: service.client.get("/ready?gallery=hung").status_code == 503)
    assert service.client.get("/ready?gallery=shop").status_code == 200
    assert service.client.get("/ready").status_code == 200


def test_startup_stays_green_after_the_first_readiness(start_service, embedder) -> None:
    service = start_service(ready_timeout_ms=100)
    embedder.gate.clear()
    assert service.client.get("/startup").status_code == 503
    embedder.gate.set()
    until(lambda: service.client.get("/startup").status_code == 200)
    embedder.gate.clear()
    until(lambda: service.client.get("/ready").status_code == 503)
    assert service.client.get("/startup").status_code == 200
    embedder.gate.set()
