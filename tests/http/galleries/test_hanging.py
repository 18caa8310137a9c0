"""A gallery whose disk hangs blocks no other gallery: no creation, reload or list."""

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.session import OnnxEmbedder
from kinlens.service.app import create_app
from kinlens.service.galleries.locations import open_gallery
from kinlens.service.settings import Settings
from tests.support.servers import DEFAULTS, WAIT_S, Running, run
from tests.support.shops import assert_problem, publish_photos
from tests.support.waiting import until
from tests.tiny import encoded, photo

PHOTOS = [encoded(photo(300 + number)) for number in range(3)]


class HangingFile:
    """A file that blocks whoever opens it, as a lost network disk does, until `release`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = path.read_text()
        self._pipe = path.with_name("pipe")
        os.mkfifo(self._pipe)
        self._aside = path.with_name("aside")
        os.link(self._pipe, self._aside)
        self._pipe.replace(path)

    def release(self, content: str | None = None) -> None:
        """The file is an ordinary one again, also for those that it blocks."""
        text = content or self._content
        self._pipe.write_text(text)
        self._pipe.replace(self._path)
        pipe = os.open(self._aside, os.O_RDWR)  # does not wait for a reader
        os.write(pipe, text.encode())
        os.close(pipe)
        self._aside.unlink()


@dataclass
class Mall:
    """A service with the galleries `hung` and `shop`, which lie in folders."""

    folder: Path
    embedder: OnnxEmbedder
    service: Running

    @property
    def client(self) -> httpx.Client:
        return self.service.client

    def publish(self, name: str, round_: int) -> str:
        return publish_photos(self.folder / name, self.embedder, PHOTOS, round=round_)

    def served(self, name: str) -> str:
        found = self.service.search(PHOTOS[0], k=1, gallery=name).json()["hits"]
        return str(found[0]["image"].split("version=")[1])

    def checks(self) -> dict[str, str]:
        answer = self.client.get("/ready")
        assert answer.status_code == 200, answer.text
        checks: dict[str, str] = answer.json()["checks"]
        return checks


@pytest.fixture
def mall(tmp_path: Path, tiny_bundle: Bundle) -> Iterator[Mall]:
    embedder = OnnxEmbedder.open(tiny_bundle)
    for name in ("hung", "shop"):
        publish_photos(tmp_path / name, embedder, PHOTOS)
    settings = Settings(
        bundle=tiny_bundle.path,
        galleries=tuple(f"{name}={tmp_path / name}" for name in ("hung", "shop")),
        state=tmp_path / "state",
        reload_interval_ms=20,
        anonymous_scopes=("search", "admin"),
        **DEFAULTS,
    )
    mall = Mall(tmp_path, embedder, run(create_app(settings)))
    yield mall
    mall.service.close()


def test_a_gallery_that_hangs_blocks_no_other_gallery(mall) -> None:
    hanging = HangingFile(mall.folder / "hung" / "CURRENT")
    try:
        until(lambda: mall.checks().get("reload hung") == "no result within 2 s")
        made = mall.client.post("/galleries", json={"name": "new"})
        assert made.status_code == 201, made.text
        put = mall.client.put(
            "/galleries/new/items", files={"image": ("a", PHOTOS[0])}, data={"key": "a"}
        )
        assert put.is_success, put.text
        [hit] = mall.service.search(PHOTOS[0], gallery="new").json()["hits"]
        assert hit["key"] == "a"
        generation = mall.publish("shop", 1)
        until(lambda: mall.served("shop") == generation)
        assert mall.client.delete("/galleries/new").status_code == 204
        listed = mall.client.get("/galleries").json()
        assert {one["name"] for one in listed["galleries"]} == {"hung", "shop"}
        mall.client.get("/metrics").raise_for_status()
        for name in ("hung", "shop"):  # what was opened before is still searched
            assert mall.service.metric("kinlens_gallery_items", gallery=name) == len(PHOTOS)
    finally:
        hanging.release()


def test_a_gallery_that_recovers_is_served_at_its_new_generation(mall) -> None:
    current = mall.folder / "hung" / "CURRENT"
    before = current.read_text()
    generation = mall.publish("hung", 1)
    until(lambda: mall.served("hung") == generation)
    hanging = HangingFile(current)
    until(lambda: "reload hung" in mall.checks())
    hanging.release(before)
    until(lambda: mall.served("hung") == before.strip())
    until(lambda: "reload hung" not in mall.checks())


def test_a_gallery_deleted_while_it_opens_is_never_served(mall, monkeypatch) -> None:
    gate, opened, closed = threading.Event(), threading.Event(), threading.Event()

    def slow(location: Any, *rest: Any) -> Any:
        gallery = open_gallery(location, *rest)
        if location.name == "late":
            close = gallery.close
            monkeypatch.setattr(gallery, "close", lambda: (close(), closed.set()))
            opened.set()
            assert gate.wait(WAIT_S)
        return gallery

    monkeypatch.setattr("kinlens.service.runtime.open_gallery", slow)
    folder = mall.folder / "state" / "galleries" / "late"
    publish_photos(folder, mall.embedder, PHOTOS)  # by another process
    assert opened.wait(WAIT_S)
    until(lambda: "reload late" in mall.checks())
    assert mall.client.get("/galleries").json()["unavailable"] == ["late"]
    states = {"late": 0.0, "shop": 1.0}
    series = {f'kinlens_gallery_ready{{gallery="{name}"}} {up}' for name, up in states.items()}
    until(lambda: series <= set(mall.client.get("/metrics").text.splitlines()))
    assert 'kinlens_reload_failures_total{gallery="late"}' in mall.client.get("/metrics").text
    shutil.rmtree(folder)
    until(lambda: "reload late" not in mall.checks())
    until(lambda: 'gallery="late"' not in mall.client.get("/metrics").text)
    gate.set()
    assert closed.wait(WAIT_S)
    listed = mall.client.get("/galleries").json()["galleries"]
    assert [one["name"] for one in listed] == ["hung", "shop"]


def test_a_gallery_that_hangs_is_unavailable(start_service, hung, gallery, monkeypatch) -> None:
    service = start_service(galleries={"hung": hung, "shop": gallery})
    monkeypatch.setattr("kinlens.service.galleries.registry._LOCATION_S", 0.5)
    hung.gate.clear()
    for _ in range(4):  # more often than there are threads for files
        listed = service.client.get("/galleries")
        assert listed.status_code == 200
        assert [one["name"] for one in listed.json()["galleries"]] == ["shop"]
        assert listed.json()["unavailable"] == ["hung"]
    assert hung.held == 1


@pytest.mark.parametrize("path", ["/search?gallery=hung", "/galleries/hung/items/0/image"])
def test_hung_threads_do_not_block_others(start_service, hung, gallery, path: str) -> None:
    limits = {"request_timeout_ms": 2_000, "ready_timeout_ms": 500, "search_threads": 2}
    service = start_service(galleries={"hung": hung, "shop": gallery}, **limits)
    hung.gate.clear()
    client = service.client

    def ask() -> httpx.Response:
        if "search" not in path:
            return client.get(path)
        return client.post(path, content=PHOTOS[1], headers={"content-type": "image/png"})

    with ThreadPoolExecutor(2) as clients:
        late = [clients.submit(ask) for _ in range(2)]
        # Both search threads, or both readers of files, are in the gallery.
        until(lambda: hung.held == 2)
    for call in late:
        assert "2 s" in assert_problem(call.result(), 503, "deadline-exceeded")["detail"]
    until(lambda: "does not answer" in ask().text)
    refused = ask()
    detail = assert_problem(refused, 503, "overloaded")["detail"]
    assert "Gallery hung does not answer: reads have been running for" in detail
    assert all(int(each.headers["retry-after"]) >= 1 for each in (late[0].result(), refused))
    assert service.runtime.pools["file"].waiting == 0
    assert service.search(PHOTOS[2], gallery="shop").status_code == 200
    assert client.get("/galleries/shop/items/1/image").status_code == 200
    until(lambda: client.get("/ready").json()["checks"]["model"] == "ok")
    hung.gate.set()
    until(lambda: ask().status_code == 200)
    for number in range(3):  # as many search threads as before
        assert service.search(PHOTOS[number], gallery="shop").status_code == 200
    assert service.runtime.search_threads.is_uncontended


def test_a_slow_embedding_does_not_close_the_gallery(start_service, embedder) -> None:
    """Else whoever sends many images would close the gallery to everybody else."""
    service = start_service(search_threads=1, request_timeout_ms=300)
    embedder.gate.clear()
    for number in range(2):
        assert_problem(service.search(PHOTOS[number]), 503, "deadline-exceeded")
    embedder.gate.set()
    until(lambda: service.search(PHOTOS[2]).status_code == 200)
