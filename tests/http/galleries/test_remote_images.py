"""Images that stay in an object store are served from there, as long as it answers."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.fake import FakeEmbedder
from kinlens.indexer.entries import Entry
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import build_gallery
from kinlens.indexer.ingest.sources import source_at
from kinlens.service.galleries import remote
from kinlens.service.galleries.remote import DiskCache
from kinlens.service.settings import Settings
from tests.support.shops import Shop, assert_problem, sha256, start_shop
from tests.support.waiting import until
from tests.tiny import encoded, photo

NAMES = ("cup/a.png", "cup/b 'ü#+%41.png", "c.png", "d.png")
IMAGES = {name: encoded(photo(n)) for n, name in enumerate(NAMES)}


def serve(address: str, tmp_path: Path, **settings) -> Shop:
    build_gallery(source_at(address), FakeEmbedder(), tmp_path / "shop")
    given = {"create": False, "galleries": (f"shop={tmp_path / 'shop'}",)}
    return start_shop(tmp_path / "state", **given, **settings)


def links(shop: Shop) -> dict[str, str]:
    return {item["key"]: item["image"] for item in shop.items()["items"]}


def cached(shop: Shop) -> set[str]:
    return {file.name for file in (shop.state / ".image-cache").glob("*/*")}


def test_a_gallery_over_a_store_shows_its_images(s3_store, tmp_path, closes) -> None:
    for path, data in IMAGES.items():
        s3_store.write(path, data)
    shop = closes(serve(s3_store.address, tmp_path))
    assert shop.client.get("/ready").json()["notes"] == {}
    for key, link in links(shop).items():
        assert shop.client.get(link).content == IMAGES[key]
        small = shop.client.get(f"{link}&size=160")
        assert (small.status_code, small.headers["content-type"]) == (200, "image/jpeg")
        by_key = shop.client.get(
            f"{shop.url}/items/by-key/{key.replace('%', '%25').replace('#', '%23')}/image"
        )
        assert by_key.content == IMAGES[key]
    assert cached(shop) == {sha256(data) for data in IMAGES.values()}
    assert not shop.gallery()["image_root_missing"]


def test_a_store_that_goes_away_costs_images_alone(s3_store, tmp_path, closes, monkeypatch) -> None:
    monkeypatch.setattr(remote, "_PAUSE_S", 0.5)
    for path, data in IMAGES.items():
        s3_store.write(path, data)
    shop = closes(serve(s3_store.address, tmp_path, image_cache_bytes=2**22))
    found = links(shop)
    assert shop.client.get(found["c.png"]).status_code == 200
    s3_store.go_away()
    for size in ("", "&size=160"):
        problem = assert_problem(shop.client.get(found["d.png"] + size), 503, "gallery-unavailable")
        assert s3_store.address not in problem["detail"]
    assert shop.client.get(found["c.png"]).content == IMAGES["c.png"]  # from the disk
    ready = shop.client.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    assert ready.json()["notes"].keys() == {"images of shop"}
    assert s3_store.address not in ready.text
    assert shop.gallery()["image_root_missing"]
    assert shop.search(IMAGES["d.png"]).json()["hits"][0]["key"] == "d.png"
    s3_store.come_back()
    until(lambda: shop.client.get(found["d.png"]).status_code == 200)
    assert shop.client.get(found["d.png"]).content == IMAGES["d.png"]
    assert shop.client.get("/ready").json()["notes"] == {}


def test_a_store_is_asked_without_a_reader_whether_it_answers(
    s3_store, tmp_path, closes, monkeypatch
) -> None:
    monkeypatch.setattr(remote, "_PAUSE_S", 0.2)
    monkeypatch.setattr(remote, "_WATCH_S", 0.2)
    s3_store.write("c.png", IMAGES["c.png"])
    shop = closes(serve(s3_store.address, tmp_path))
    s3_store.go_away()
    until(lambda: shop.client.get("/ready").json()["notes"] != {})
    s3_store.come_back()
    until(lambda: shop.client.get("/ready").json()["notes"] == {})


def test_a_store_that_hangs_is_asked_once_and_holds_up_nothing_else(
    web_store, tmp_path, closes, monkeypatch
) -> None:
    monkeypatch.setattr(Settings, "pictures_timeout_ms", 300)
    for path, data in IMAGES.items():
        web_store.write(path, data)
    shop = closes(serve(web_store.address, tmp_path))
    shop.create("other").put({"k": IMAGES["d.png"]}, "other")
    [own] = [item["image"] for item in shop.items("other")["items"]]
    found, before = links(shop), len(web_store.requests)
    web_store.answers.clear()
    assert_problem(shop.client.get(found["c.png"]), 503, "gallery-unavailable")
    for _ in range(20):
        assert shop.client.get(found["d.png"]).status_code == 503
    assert len(web_store.requests) == before + 1
    assert shop.client.get(own).content == IMAGES["d.png"]
    notes = shop.client.get("/ready").json()["notes"]
    assert notes == {"images of shop": "no answer within 0.3 s"}


def test_images_that_changed_are_gone_or_forbidden_concern_no_other(
    web_store, tmp_path, closes
) -> None:
    for path, data in IMAGES.items():
        web_store.write(path, data)
    for name in ("moved.png", "secret.png", "huge.png"):
        with contextlib.closing(_opened(web_store, tmp_path)) as gallery:
            vector = np.eye(32, dtype=np.float32)[0]
            gallery.add([Entry(name, vector, "0" * 64, {}, name, "PNG")])
    outside = web_store.folder.parent / "outside.png"
    outside.write_bytes(IMAGES["c.png"])
    with contextlib.closing(Gallery.open(tmp_path / "shop")) as gallery:
        entry = Entry("up", vector, sha256(IMAGES["c.png"]), {}, "../outside.png", "PNG")
        gallery.add([entry])
    given = (f"shop={tmp_path / 'shop'}",)
    shop = closes(start_shop(tmp_path / "state", create=False, galleries=given))
    web_store.write("c.png", IMAGES["d.png"])
    web_store.remove("d.png")
    statuses = {key: shop.client.get(link).status_code for key, link in links(shop).items()}
    assert statuses == {
        **dict.fromkeys(NAMES[:2], 200),
        **dict.fromkeys(("c.png", "d.png", "moved.png", "huge.png", "up"), 404),
        "secret.png": 503,
    }
    assert shop.client.get("/ready").json()["notes"] == {}
    assert not any("outside" in path for path in web_store.requests)


def _opened(web_store, tmp_path: Path) -> Gallery:
    if not (tmp_path / "shop").exists():
        build_gallery(source_at(web_store.address), FakeEmbedder(), tmp_path / "shop")
    return Gallery.open(tmp_path / "shop")


def test_without_a_state_folder_images_are_read_each_time(web_store, tmp_path, closes) -> None:
    web_store.write("c.png", IMAGES["c.png"])
    build_gallery(source_at(web_store.address), FakeEmbedder(), tmp_path / "shop")
    built = len(web_store.requests)
    given = {"create": False, "galleries": (f"shop={tmp_path / 'shop'}",)}
    shop = closes(start_shop(tmp_path / "state", **given, image_cache_bytes=0))
    [link] = links(shop).values()
    until(lambda: len(web_store.requests) == built + 1)  # the service asks whether it answers
    before = len(web_store.requests)
    for _ in range(2):
        assert shop.client.get(link).content == IMAGES["c.png"]
    assert len(web_store.requests) == before + 2
    assert cached(shop) == set()


def test_the_copies_are_bounded_and_those_used_last_stay(tmp_path) -> None:
    cache = DiskCache(tmp_path, 32_000)
    contents = {sha256(data): data for data in (bytes([n]) * 1000 for n in range(100))}
    first, *_ = contents
    for n, (digest, data) in enumerate(contents.items()):
        cache.put(digest, data)
        assert cache.get(first) == contents[first]
        for file in tmp_path.glob("*/*"):  # as if each was used a second after the one before
            if file.name == digest or file.name == first:
                os.utime(file, (n, n))
        assert sum(file.stat().st_size for file in tmp_path.glob("*/*")) <= 32_000
    kept = [digest for digest in contents if cache.get(digest)]
    assert {first, *[*contents][-20:]} <= {*kept}
    assert DiskCache(tmp_path, 32_000).get(first) == contents[first]
    cache.put(digest := sha256(b"x" * 3000), b"x" * 3000)  # would push out many others
    assert cache.get(digest) is None


def test_a_damaged_copy_is_not_shown(tmp_path) -> None:
    cache = DiskCache(tmp_path, 10**6)
    cache.put(sha256(b"image"), b"image")
    [file] = tmp_path.glob("*/*")
    file.write_bytes(b"imag")
    assert cache.get(sha256(b"image")) is None
    assert not file.exists()


@pytest.mark.parametrize("fails", ["mkdir", "replace"])
def test_a_full_disk_costs_only_the_copy(tmp_path, monkeypatch, fails: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, fails, fail)
    cache = DiskCache(tmp_path / "cache", 10**6)
    cache.put(sha256(b"image"), b"image")
    assert cache.get(sha256(b"image")) is None
