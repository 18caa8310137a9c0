"""Liveness and readiness: ready when searches work; and the drain before the exit."""

import os
import re
import shutil
import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx

from kinlens.embedder.fake import FakeEmbedder
from kinlens.service.settings import Settings
from tests.support.own_process import own_process
from tests.support.servers import DEFAULTS, FakeGallery, create_app, run
from tests.support.waiting import until
from tests.tiny import encoded, photo


def test_readiness_reports_what_is_served(start_service) -> None:
    response = start_service().client.get("/ready")
    answer = response.json()
    assert answer["checks"] == {"model": "ok", "gallery shop": "ok"}
    assert response.status_code == 200
    assert answer["status"] == "ready"
    assert answer["provider"] == "FakeExecutionProvider"
    assert (answer["precision"], answer["precision_reason"]) == ("fp32", "asked for")
    assert answer["bundle_id"] == "fake"
    assert list(answer["galleries"]) == ["shop"]
    assert answer["redis"] == "off"
    assert answer["queue_depth"] == 0
    assert answer["last_error"] is None


def test_a_model_that_hangs_is_not_ready_until_it_recovers(
    start_service, embedder, monkeypatch
) -> None:
    monkeypatch.setattr(Settings, "ready_timeout_ms", 100)
    service = start_service()
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
    assert 'kinlens_gallery_ready{gallery="hung"} 0.0' in service.client.get("/metrics").text


def test_metrics_show_readiness_without_a_call_of_ready(tiny_settings, tmp_path) -> None:
    folder = tmp_path / "shop"
    shutil.copytree(str(tiny_settings["galleries"]).partition("=")[2], folder)
    settings = Settings(**DEFAULTS | tiny_settings | {"galleries": f"shop={folder}"})
    with closing(run(create_app(settings))) as service:

        def shown() -> list[str]:
            lines = service.client.get("/metrics").text.splitlines()
            return [line for line in lines if re.match(r"kinlens_(gallery_)?ready[ {]", line)]

        def is_shown(value: int) -> bool:
            named = 'kinlens_gallery_ready{gallery="shop"}'
            return shown() == [f"{named} {value}.0", f"kinlens_ready {value}.0"]

        until(lambda: sorted(shown()) == shown() and is_shown(1))
        assert service.runtime.health.has_started
        [file] = folder.rglob("catalog.sqlite")
        with closing(sqlite3.connect(file)) as catalog:
            tables = catalog.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
            for (name,) in tables.fetchall():
                if not name.startswith("sqlite_"):
                    catalog.execute(f'DROP TABLE "{name}"')
            catalog.commit()
        until(lambda: is_shown(0))


def test_a_check_searches_few_galleries_and_all_in_turn(embedder, photos, start_service) -> None:
    galleries = {f"shop-{n:02}": FakeGallery(embedder, photos[:1]) for n in range(40)}
    service = start_service(galleries=galleries)
    searched: list[int] = []
    for gallery in galleries.values():

        def search(*arguments: Any, gallery: Any = gallery) -> Any:
            searched.append(id(gallery))
            return FakeGallery.search(gallery, *arguments)

        gallery.search = search  # type: ignore[method-assign]
    assert len(service.client.get("/ready").json()["checks"]) <= 1 + 3 * 16
    assert len(searched) <= 3 * 16, "that of the request, and of the timer"
    until(lambda: len(set(searched)) == 40)


def test_readiness_does_not_wait_for_the_queue(
    start_service, embedder, photos, monkeypatch
) -> None:
    monkeypatch.setattr(Settings, "ready_timeout_ms", 3_000)
    slow = type(embedder)(delay_s=0.05)
    limits = {"request_timeout_ms": 60_000}
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


def test_sigterm_drains_before_the_exit(tiny_settings, tmp_path) -> None:
    settings = tiny_settings | {"drain_s": 2}
    with (
        own_process(tmp_path / "log", **settings) as started,
        httpx.Client(base_url=started.url, timeout=60) as client,
    ):
        assert client.get("/startup").status_code == 200
        assert client.get("/ready").status_code == 200
        began = time.monotonic()
        os.kill(started.pid, signal.SIGTERM)
        until(lambda: client.get("/ready").status_code == 503)
        assert client.get("/ready").json()["checks"]["service"] == "shutting down"
        assert client.post("/search", files={"image": encoded(photo(1))}).status_code == 200
        assert started.process.wait(60) == 0
        assert time.monotonic() - began >= 2


def test_readiness_of_one_gallery(start_service, gallery, hung, monkeypatch) -> None:
    monkeypatch.setattr(Settings, "ready_timeout_ms", 200)
    service = start_service(galleries={"shop": gallery, "hung": hung})
    assert service.client.get("/ready?gallery=hung").status_code == 200
    assert service.client.get("/ready?gallery=none").status_code == 404
    hung.gate.clear()
    until(lambda: service.client.get("/ready?gallery=hung").status_code == 503)
    assert service.client.get("/ready?gallery=shop").status_code == 200
    assert service.client.get("/ready").status_code == 200


def test_a_changed_model_is_not_ready(start_service, monkeypatch) -> None:
    service = start_service()
    embed = FakeEmbedder.embed
    monkeypatch.setattr(FakeEmbedder, "embed", lambda self, images: -embed(self, images))
    response = service.client.get("/ready")
    assert response.status_code == 503
    assert "another vector: cosine -1.0000" in response.json()["checks"]["model"]


def test_a_model_that_exits_fails_one_search(start_service, photos, monkeypatch) -> None:
    def die(*_: Any) -> Any:
        raise SystemExit(1)

    service = start_service()
    with monkeypatch.context() as patch:
        patch.setattr(FakeEmbedder, "embed", die)
        response = service.search(photos[0])
    assert response.status_code == 503
    assert response.json()["type"] == "urn:kinlens:problem:search-unavailable"
    assert int(response.headers["retry-after"]) >= 1
    assert service.client.get("/ready").status_code == 200
    assert service.search(photos[0]).status_code == 200
