"""Galleries and models replaced, or hanging, during searches: no error and no mixed answer."""

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.fake import FakeEmbedder
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.gallery import Gallery
from kinlens.service.galleries.locations import GalleryLocation
from kinlens.service.settings import Settings
from tests.support.seams import Workers
from tests.support.servers import DEFAULTS, Running, create_app, run, workers_of
from tests.support.shops import assert_problem, publish_photos, start_shop
from tests.support.waiting import repeating, until
from tests.tiny import encoded, photo

PHOTOS = 8
CLIENTS = 4
WAIT_S = 20.0


@dataclass
class Shop:
    """A service over one gallery that can be replaced, by either of two bundles."""

    folder: Path
    uploads: Sequence[bytes]
    embedders: dict[str, OnnxEmbedder]
    service: Running = field(init=False)

    def publish(self, round_: int, bundle_id: str, folder: Path | None = None) -> str:
        """The next generation: the same images, made with that bundle."""
        attributes = {"bundle": bundle_id, "round": round_}
        embedder = self.embedders[bundle_id]
        return publish_photos(folder or self.folder, embedder, self.uploads, **attributes)


@pytest.fixture(scope="module")
def bundles(make_tiny_bundle: Callable[..., Bundle]) -> list[Bundle]:
    return [make_tiny_bundle(seed=11), make_tiny_bundle(seed=12)]


@pytest.fixture(scope="module")
def embedders(bundles: list[Bundle]) -> dict[str, OnnxEmbedder]:
    return {bundle.bundle_id: OnnxEmbedder.open(bundle) for bundle in bundles}


@pytest.fixture
def shop(
    tmp_path: Path, bundles: list[Bundle], embedders: dict[str, OnnxEmbedder]
) -> Iterator[Shop]:
    """Served with the first bundle; the second one is in the state folder, under any name."""
    first, second = bundles
    stored = tmp_path / "state" / "bundles" / "spring"
    stored.parent.mkdir(parents=True)
    stored.symlink_to(second.path)
    uploads = [encoded(photo(100 + n)) for n in range(PHOTOS)]
    shop = Shop(tmp_path / "shop", uploads, dict(embedders))
    shop.publish(0, first.bundle_id)
    settings = Settings(
        bundle=first.path,
        galleries=(f"shop={shop.folder}",),
        state=tmp_path / "state",
        **DEFAULTS,
    )
    shop.service = run(create_app(settings))
    yield shop
    shop.service.close()


@contextlib.contextmanager
def group(shop: Shop) -> Iterator[list[dict[str, Any]]]:
    """Clients that search all the time; their answers, each checked to be of one generation."""
    answers: list[dict[str, Any]] = []
    rounds: dict[str, int] = {}
    counts = itertools.count()

    def search(_: int) -> None:
        count = next(counts)
        number = count // 2 % PHOTOS
        # Every other upload is new to all caches, the others are known to them.
        tail = f"{count}".encode() if count % 2 else b""
        response = shop.service.search(shop.uploads[number] + tail, k=PHOTOS)
        assert response.status_code == 200, response.text
        answer = response.json()
        hits = answer["hits"]
        assert {hit["attributes"]["bundle"] for hit in hits} == {answer["bundle_id"]}
        assert len({hit["image"].split("generation=")[1] for hit in hits}) == 1
        [round_] = {hit["attributes"]["round"] for hit in hits}
        assert rounds.setdefault(answer["gallery_version"], round_) == round_
        best = hits[0]
        assert (best["key"], len(hits)) == (f"{number}.png", PHOTOS)
        assert best["score"] > 0.999
        answers.append(answer)

    with repeating(search, CLIENTS):
        yield answers
    assert set(rounds.values()) == set(range(4))


def open_generations(folder: Path) -> set[str]:
    """The generations of which this process has a file open, on Linux."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = link.readlink()
            if target.is_relative_to(folder / "versions"):
                found.add(target.relative_to(folder / "versions").parts[0])
    return found


def served(shop: Shop) -> str:
    answer: dict[str, Any] = shop.service.search(shop.uploads[0], k=1).json()
    return str(answer["hits"][0]["image"].split("generation=")[1])


def test_swaps_under_load_cause_no_error_or_mixed_answer(shop, bundles) -> None:
    first_model = weakref.ref(shop.service.runtime.embedder)
    with group(shop) as answers:
        for round_ in range(1, 4):
            seen = len(answers)
            bundle = bundles[(round_ // 2) % 2]  # now the gallery alone, now the model with it
            generation = shop.publish(round_, bundle.bundle_id)
            until(lambda name=generation: served(shop) == name)
            until(lambda least=seen + 20: len(answers) > least)
    assert {answer["bundle_id"] for answer in answers} == {b.bundle_id for b in bundles}
    assert any(answer["cached"] for answer in answers)
    until(lambda: len(shop.service.runtime.models.running()) == 1)
    ready = shop.service.client.get("/ready").json()
    assert (ready["status"], ready["bundle_id"]) == ("ready", bundles[1].bundle_id)
    text, (old, new) = shop.service.client.get("/metrics").text, bundles
    labels = {"provider": "CPUExecutionProvider", "bundle_id": new.bundle_id, "precision": "fp32"}
    assert shop.service.metric("kinlens_provider_info", **labels) == 1
    assert old.bundle_id not in text
    assert shop.service.metric("kinlens_gallery_items", gallery="shop") == PHOTOS
    # What was replaced leaves nothing behind: no open file, and no memory of a model.
    until(lambda: open_generations(shop.folder) == {generation})
    assert first_model() is None


@pytest.mark.parametrize("fault", ["unknown bundle", "away"])
def test_after_a_failed_reload_the_old_one_answers(shop, make_tiny_bundle, fault: str) -> None:
    before, current, errors = served(shop), shop.folder / "CURRENT", "GalleryNotFoundError"
    if fault == "unknown bundle":
        unknown = OnnxEmbedder.open(make_tiny_bundle(seed=13))
        shop.embedders[unknown.bundle_id] = unknown
        shop.publish(1, unknown.bundle_id)
        errors = "BundleNotFoundError"
    else:
        current.unlink()
    client = shop.service.client
    until(lambda: "reload shop" in client.get("/ready").json()["checks"])
    ready = client.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    assert f"failed with {errors}" in ready.json()["checks"]["reload shop"]
    assert served(shop) == before
    client.get("/metrics")
    assert shop.service.metric("kinlens_reload_failures_total", gallery="shop") >= 1
    current.write_text(f"{before}\n")  # put back by hand
    until(lambda: "reload shop" not in client.get("/ready").json()["checks"])
    assert served(shop) == before


def test_a_search_keeps_its_gallery_open(shop, bundles, monkeypatch) -> None:
    """A search whose client disconnected runs in its thread until it notices."""
    entered, gate, search = threading.Event(), threading.Event(), Gallery.search

    def held(gallery: Gallery, queries: Any, k: int, *options: Any) -> Any:
        if k == 7 and not entered.is_set():  # readiness searches, too
            entered.set()
            assert gate.wait(WAIT_S)
        return search(gallery, queries, k, *options)

    monkeypatch.setattr(Gallery, "search", held)
    asked = {"files": {"image": ("x", shop.uploads[0])}, "data": {"k": "7"}}
    with pytest.raises(httpx.ReadTimeout):
        shop.service.client.post("/search", **asked, timeout=1)
    assert entered.is_set()
    for round_, bundle in enumerate(bundles, 1):
        new = shop.publish(round_, bundle.bundle_id)
        until(lambda name=new: served(shop) == name)
    until(lambda: len(open_generations(shop.folder)) == 2)  # closed by a thread of their own
    gate.set()
    until(lambda: open_generations(shop.folder) == {new})


def test_a_model_is_warm_before_its_gallery_is_served(shop, bundles, monkeypatch) -> None:
    entered, gate, embed = threading.Event(), threading.Event(), Workers.embed
    first = workers_of(shop.service)

    def held(workers: Workers, *arguments: Any) -> Any:
        if workers is not first and not gate.is_set():
            entered.set()
            assert gate.wait(WAIT_S)
        return embed(workers, *arguments)

    before = served(shop)
    monkeypatch.setattr(Workers, "embed", held)  # before the service can look
    new = shop.publish(1, bundles[1].bundle_id)
    assert entered.wait(WAIT_S)
    assert served(shop) == before
    gate.set()
    until(lambda: served(shop) == new)


def test_two_models_are_served_and_checked_by_name(shop, bundles) -> None:
    first, second = (bundle.bundle_id for bundle in bundles)
    managed = shop.folder.parent / "state" / "galleries" / "hats"
    shop.publish(1, second, managed)
    client = shop.service.client
    until(lambda: "hats" in client.get("/ready").json()["galleries"])
    ready = client.get("/ready")
    assert ready.status_code == 200
    models = {f"model {bundle_id[:12]}" for bundle_id in (first, second)}
    assert {*ready.json()["checks"]} == {*models, "gallery shop", "gallery hats"}
    for name, bundle_id in (("shop", first), ("hats", second)):
        for number, data in enumerate(shop.uploads):
            answer = shop.service.search(data, k=1, gallery=name).json()
            assert answer["bundle_id"] == bundle_id
            assert answer["hits"][0]["key"] == f"{number}.png"
            assert answer["hits"][0]["score"] > 0.999


IMAGES = [encoded(photo(300 + number)) for number in range(3)]


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


class HangingDisk:
    """A disk of its own for one gallery, where even a `stat` blocks from `begin` to `release`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._answers = threading.Event()
        self._answers.set()
        stamp = GalleryLocation.stamp

        def look(location: GalleryLocation) -> Any:
            found = stamp(location)
            if location.path != folder:
                return found
            assert self._answers.wait(WAIT_S)
            return found and ("another disk", *found[1:])

        monkeypatch.setattr(GalleryLocation, "stamp", look)

    def begin(self) -> None:
        self._answers.clear()

    def release(self) -> None:
        self._answers.set()


@pytest.mark.parametrize("what", ["file", "disk"])
def test_a_gallery_that_hangs_blocks_no_other_gallery(tmp_path, closes, monkeypatch, what) -> None:
    embedder = FakeEmbedder()
    for name in ("hung", "shop"):
        publish_photos(tmp_path / name, embedder, IMAGES)
    given = {"galleries": tuple(f"{name}={tmp_path / name}" for name in ("hung", "shop"))}
    disk = HangingDisk(tmp_path / "hung", monkeypatch)
    shop = closes(start_shop(tmp_path / "state", embedder, create=False, **given))

    def checks() -> Any:
        return shop.client.get("/ready").raise_for_status().json()["checks"]

    hanging: HangingFile | HangingDisk = disk
    if what == "file":
        hanging = HangingFile(tmp_path / "hung" / "CURRENT")
    else:
        disk.begin()
    try:
        until(lambda: checks().get("reload hung") == "no result within 2 s")
        new = shop.create("new")
        new.put({"a": IMAGES[0]})
        assert [hit["key"] for hit in new.search(IMAGES[0]).json()["hits"]] == ["a"]
        generation = publish_photos(tmp_path / "shop", embedder, IMAGES)
        until(lambda: shop.gallery()["generation"] == generation)
        assert shop.client.delete(new.url).status_code == 204
        listed = shop.client.get("/galleries").json()["galleries"]
        assert {one["name"] for one in listed} == {"hung", "shop"}
        shop.client.get("/metrics").raise_for_status()
        for name in ("hung", "shop"):  # what was opened before is still searched
            assert shop.running.metric("kinlens_gallery_items", gallery=name) == len(IMAGES)
    finally:
        hanging.release()
    until(lambda: "reload hung" not in checks())


def test_a_slow_disk_is_looked_at_to_its_end(tmp_path, closes, monkeypatch) -> None:
    names, stamp = [f"g{number}" for number in range(8)], GalleryLocation.stamp

    def look(location: GalleryLocation) -> Any:
        time.sleep(0.2)  # all take longer than one may
        return stamp(location)

    monkeypatch.setattr("kinlens.service.galleries.reloads.LOCATION_S", 1.0)
    monkeypatch.setattr(GalleryLocation, "stamp", look)
    embedder = FakeEmbedder()
    for name in names:
        publish_photos(tmp_path / name, embedder, IMAGES)
    given = {"galleries": tuple(f"{name}={tmp_path / name}" for name in names)}
    shop = closes(start_shop(tmp_path / "state", embedder, create=False, **given))
    generation = publish_photos(tmp_path / names[-1], embedder, IMAGES)
    url = f"/galleries/{names[-1]}"
    until(lambda: shop.client.get(url).json()["generation"] == generation)


def test_galleries_that_nobody_uses_need_no_thread(tmp_path, closes) -> None:
    embedder, count = FakeEmbedder(), 40
    facts = {"bundle_id": embedder.bundle_id, "dim": embedder.dim, "source": "uploads"}
    for number in range(count):
        path = tmp_path / "state" / "galleries" / f"tenant{number}"
        Gallery.create(path, name=path.name, **facts).close()
    before = threading.active_count()
    shop = closes(start_shop(tmp_path / "state", embedder, create=False))
    assert len(shop.client.get("/galleries").json()["galleries"]) == count
    until(lambda: threading.active_count() - before < count)


@pytest.mark.parametrize("path", ["/search?gallery=hung", "/galleries/hung/items/0/image"])
def test_hung_threads_do_not_block_others(
    start_service, hung, gallery, path: str, monkeypatch
) -> None:
    monkeypatch.setattr(Settings, "ready_timeout_ms", 500)
    limits = {"request_timeout_ms": 2_000, "search_threads": 2}
    service = start_service(galleries={"hung": hung, "shop": gallery}, **limits)
    hung.gate.clear()
    client = service.client

    def ask() -> httpx.Response:
        if "search" not in path:
            return client.get(path)
        return client.post(path, content=IMAGES[1], headers={"content-type": "image/png"})

    with ThreadPoolExecutor(2) as clients:
        late = [clients.submit(ask) for _ in range(2)]
        # Both search threads, or both readers of files, and the check of the service are in it.
        until(lambda: hung.held >= 3)
    for call in late:
        assert "2 s" in assert_problem(call.result(), 503, "deadline-exceeded")["detail"]
    until(lambda: "does not answer" in ask().text)
    refused = ask()
    detail = assert_problem(refused, 503, "overloaded")["detail"]
    assert "Gallery hung does not answer: reads have been running for" in detail
    assert all(int(each.headers["retry-after"]) >= 1 for each in (late[0].result(), refused))
    assert service.runtime.pools["file"].waiting == 0
    assert service.search(IMAGES[2], gallery="shop").status_code == 200
    assert client.get("/galleries/shop/items/1/image").status_code == 200
    until(lambda: client.get("/ready").json()["checks"]["model"] == "ok")
    hung.gate.set()
    until(lambda: ask().status_code == 200)
    for number in range(3):  # as many search threads as before
        assert service.search(IMAGES[number], gallery="shop").status_code == 200
    assert service.runtime.search_threads.waiting == 0


def test_a_gallery_that_hangs_is_unavailable(start_service, hung, gallery, monkeypatch) -> None:
    service = start_service(galleries={"hung": hung, "shop": gallery})
    monkeypatch.setattr("kinlens.service.galleries.registry.LOCATION_S", 0.5)
    hung.gate.clear()
    for _ in range(4):  # more often than there are threads for files
        listed = service.client.get("/galleries")
        assert listed.status_code == 200
        assert [one["name"] for one in listed.json()["galleries"]] == ["shop"]
        assert listed.json()["unavailable"] == ["hung"]
    assert hung.held <= 2, "the list, and the check of the service"
