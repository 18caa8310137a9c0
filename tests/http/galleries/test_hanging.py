"""A gallery whose disk hangs blocks no other gallery: no creation, reload or list."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kinlens.embedder.fake import FakeEmbedder
from tests.support.shops import assert_problem, publish_photos, start_shop
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

    def release(self) -> None:
        """The file is an ordinary one again, also for those that it blocks."""
        self._pipe.write_text(self._content)
        self._pipe.replace(self._path)
        pipe = os.open(self._aside, os.O_RDWR)  # does not wait for a reader
        os.write(pipe, self._content.encode())
        os.close(pipe)
        self._aside.unlink()


def test_a_gallery_that_hangs_blocks_no_other_gallery(tmp_path, closes) -> None:
    embedder = FakeEmbedder()
    for name in ("hung", "shop"):
        publish_photos(tmp_path / name, embedder, PHOTOS)
    given = {"galleries": tuple(f"{name}={tmp_path / name}" for name in ("hung", "shop"))}
    state, given = tmp_path / "state", given | {"reload_interval_ms": 20}
    shop = closes(start_shop(state, embedder, create=False, **given))

    def checks() -> Any:
        return shop.client.get("/ready").raise_for_status().json()["checks"]

    hanging = HangingFile(tmp_path / "hung" / "CURRENT")
    try:
        until(lambda: checks().get("reload hung") == "no result within 2 s")
        new = shop.create("new")
        new.put({"a": PHOTOS[0]})
        assert [hit["key"] for hit in new.search(PHOTOS[0]).json()["hits"]] == ["a"]
        generation = publish_photos(tmp_path / "shop", embedder, PHOTOS)
        until(lambda: shop.gallery()["generation"] == generation)
        assert shop.client.delete(new.url).status_code == 204
        listed = shop.client.get("/galleries").json()["galleries"]
        assert {one["name"] for one in listed} == {"hung", "shop"}
        shop.client.get("/metrics").raise_for_status()
        for name in ("hung", "shop"):  # what was opened before is still searched
            assert shop.running.metric("kinlens_gallery_items", gallery=name) == len(PHOTOS)
    finally:
        hanging.release()
    until(lambda: "reload hung" not in checks())


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
