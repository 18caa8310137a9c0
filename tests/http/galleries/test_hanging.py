"""A gallery whose disk hangs holds up no other one: neither new ones, nor reloads, nor the list."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.types import Hit, ItemId
from kinlens.indexer.types import Entry, Item
from kinlens.service.app import create_app
from kinlens.service.galleries.locations import open_gallery
from kinlens.service.settings import Settings
from tests.support.seams import GalleryManifest, publish_generation
from tests.support.servers import DEFAULTS, WAIT_S, FakeGallery, GatedEmbedder, Running, run
from tests.support.shops import assert_problem, sha256
from tests.tiny import encoded, photo

Until = Callable[[Callable[[], bool]], None]
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
        return publish(self.folder / name, self.embedder, round_)

    def served(self, name: str) -> str:
        found = self.service.search(PHOTOS[0], k=1, gallery=name).json()["hits"]
        return str(found[0]["image"].split("version=")[1])

    def checks(self) -> dict[str, str]:
        answer = self.client.get("/ready")
        assert answer.status_code == 200, answer.text
        checks: dict[str, str] = answer.json()["checks"]
        return checks


def publish(folder: Path, embedder: OnnxEmbedder, round_: int) -> str:
    entries = [
        Entry(
            f"{number}.png",
            embedder.embed(embedder.preprocess(data)[None])[0],
            sha256(data),
            {"round": round_},
        )
        for number, data in enumerate(PHOTOS)
    ]
    manifest = GalleryManifest(name=folder.name, bundle_id=embedder.bundle_id, dim=embedder.dim)
    return publish_generation(folder, manifest, entries)


@pytest.fixture
def mall(tmp_path: Path, tiny_bundle: Bundle) -> Iterator[Mall]:
    embedder = OnnxEmbedder.open(tiny_bundle)
    for name in ("hung", "shop"):
        publish(tmp_path / name, embedder, 0)
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


def test_while_one_gallery_hangs_others_are_made_filled_reloaded_and_listed(
    mall: Mall, until: Until
) -> None:
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


def test_a_gallery_that_answers_again_is_served_at_its_new_generation(
    mall: Mall, until: Until
) -> None:
    current = mall.folder / "hung" / "CURRENT"
    before = current.read_text()
    generation = mall.publish("hung", 1)
    until(lambda: mall.served("hung") == generation)
    hanging = HangingFile(current)
    until(lambda: "reload hung" in mall.checks())
    hanging.release(before)
    until(lambda: mall.served("hung") == before.strip())
    until(lambda: "reload hung" not in mall.checks())


def test_a_gallery_that_is_deleted_while_it_is_opened_is_closed_and_never_served(
    mall: Mall, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    publish(folder, mall.embedder, 0)  # by another process
    assert opened.wait(WAIT_S)
    until(lambda: "reload late" in mall.checks())
    assert mall.client.get("/galleries").json()["unavailable"] == ["late"]
    series = {
        'kinlens_gallery_ready{gallery="late"} 0.0',
        'kinlens_gallery_ready{gallery="shop"} 1.0',
    }
    until(lambda: series <= set(mall.client.get("/metrics").text.splitlines()))
    assert 'kinlens_reload_failures_total{gallery="late"}' in mall.client.get("/metrics").text
    shutil.rmtree(folder)
    until(lambda: "reload late" not in mall.checks())
    until(lambda: 'gallery="late"' not in mall.client.get("/metrics").text)
    gate.set()
    assert closed.wait(WAIT_S)
    assert [one["name"] for one in mall.client.get("/galleries").json()["galleries"]] == [
        "hung",
        "shop",
    ]


def test_the_list_names_a_gallery_that_hangs_and_asks_it_once(
    start_service, embedder, gallery, photos, monkeypatch
) -> None:
    held, asked = threading.Event(), []

    class Hanging(type(gallery)):
        @property
        def size(self) -> int:
            asked.append(threading.current_thread())
            held.wait(WAIT_S)
            return 0

        @size.setter
        def size(self, _: int) -> None: ...

    galleries = {"hung": type(gallery)(embedder, photos[:2], name="hung"), "shop": gallery}
    service = start_service(galleries=galleries)
    monkeypatch.setattr(galleries["hung"], "__class__", Hanging)
    monkeypatch.setattr("kinlens.service.galleries.registry._LOCATION_S", 0.5)
    try:
        for _ in range(4):  # more often than there are threads for files
            listed = service.client.get("/galleries")
            assert listed.status_code == 200
            assert [one["name"] for one in listed.json()["galleries"]] == ["shop"]
            assert listed.json()["unavailable"] == ["hung"]
        assert len(asked) == 1
    finally:
        held.set()


class HangingGallery(FakeGallery):
    """Answers nothing until `gate` is set."""

    gate: threading.Event
    started: threading.Semaphore

    def search(self, *arguments: Any) -> list[list[Hit]]:
        self.wait()
        return super().search(*arguments)

    def item(self, item_id: ItemId) -> Item:
        self.wait()
        return super().item(item_id)

    def wait(self) -> None:
        self.started.release()
        assert self.gate.wait(WAIT_S)


@pytest.fixture
def hanging(embedder: GatedEmbedder) -> Iterator[HangingGallery]:
    gallery = HangingGallery(embedder, PHOTOS, name="hung")
    gallery.gate, gallery.started = threading.Event(), threading.Semaphore(0)
    yield gallery
    gallery.gate.set()


@pytest.mark.parametrize("path", ["/search?gallery=hung", "/galleries/hung/items/0/image"])
def test_searches_and_reads_that_hang_leave_their_threads_to_other_galleries(
    start_service: Callable[..., Running],
    hanging: HangingGallery,
    embedder: GatedEmbedder,
    until: Until,
    path: str,
) -> None:
    galleries = {"hung": hanging, "shop": FakeGallery(embedder, PHOTOS)}
    service = start_service(
        galleries=galleries, search_threads=2, request_timeout_ms=2_000, ready_timeout_ms=500
    )
    client = service.client

    def ask() -> httpx.Response:
        if "search" not in path:
            return client.get(path)
        return client.post(path, content=PHOTOS[1], headers={"content-type": "image/png"})

    with ThreadPoolExecutor(2) as clients:
        late = [clients.submit(ask) for _ in range(2)]
        for _ in late:
            hanging.started.acquire()
        # Both search threads, or both readers of files, are in the gallery.
        assert [call.result().status_code for call in late] == [503, 503]
    until(lambda: "does not answer" in ask().text)
    refused = assert_problem(ask(), 503, "overloaded")
    assert "Gallery hung does not answer: reads have been running for" in refused["detail"]
    assert service.search(PHOTOS[2], gallery="shop").status_code == 200
    assert client.get("/galleries/shop/items/1/image").content == PHOTOS[1]
    until(lambda: client.get("/ready").json()["checks"]["model"] == "ok")
    hanging.gate.set()
    until(lambda: ask().status_code == 200)
    for number in range(3):  # as many search threads as before
        assert service.search(PHOTOS[number], gallery="shop").status_code == 200
    assert service.runtime.search_threads.is_uncontended


def test_only_the_first_check_of_readiness_waits_for_a_gallery_that_hangs(
    start_service: Callable[..., Running], hanging: HangingGallery, embedder: GatedEmbedder
) -> None:
    hanging.gate.set()
    galleries = {"hung": hanging, "shop": FakeGallery(embedder, PHOTOS)}
    service = start_service(galleries=galleries, ready_timeout_ms=1500)
    hanging.gate.clear()
    took = []
    for _ in range(3):
        started = time.perf_counter()
        answer = service.client.get("/ready")
        took.append(time.perf_counter() - started)
        assert answer.status_code == 200
        assert answer.json()["checks"]["gallery hung"] == "no result within 1.5 s"
        time.sleep(1.1)  # a result is kept for a second
    assert took[0] > 1.4
    assert max(took[1:]) < took[0] / 2


def test_a_question_that_takes_long_to_embed_is_no_gallery_that_hangs(
    start_service: Callable[..., Running], embedder: GatedEmbedder, until: Until
) -> None:
    """Else whoever sends many images would close the gallery to everybody else."""
    service = start_service(
        galleries={"shop": FakeGallery(embedder, PHOTOS)},
        search_threads=1,
        request_timeout_ms=300,
    )
    embedder.gate.clear()
    for number in range(2):
        late = service.search(PHOTOS[number])
        assert_problem(late, 503, "deadline-exceeded")
    embedder.gate.set()
    until(lambda: service.search(PHOTOS[2]).status_code == 200)
