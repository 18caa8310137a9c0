"""Galleries: created, described, filled, deleted; their precisions, their GPU; and refusals."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import BundleMismatchError
from kinlens.embedder.fake import FakeEmbedder
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import build_gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.service.galleries.locations import GalleryLocation, Locations
from kinlens.service.galleries.registry import Registry
from kinlens.service.runtime import Runtime
from kinlens.service.settings import Settings
from tests.embedder.bundles import write_full_bundle
from tests.support.fake_gpu import fake_gpu
from tests.support.seams import ForkServer
from tests.support.servers import DEFAULTS, create_app, run
from tests.support.shops import Shop, assert_problem, make_gallery, start_shop
from tests.support.waiting import until
from tests.tiny import encoded, photo


def settings(bundle: Bundle, *galleries: str, **more: object) -> Settings:
    return Settings(**DEFAULTS | {"bundle": bundle.path, "galleries": galleries} | more)


def made(folder: Path, bundle: Bundle, precision: str) -> str:
    """An empty gallery, as `NAME=PATH`."""
    facts = {"bundle_id": bundle.bundle_id, "dim": bundle.manifest.dim, "precision": precision}
    Gallery.create(folder / precision, name=precision, **facts).close()
    return f"{precision}={folder / precision}"


def test_a_gallery_is_made_while_made_up_names_wait_for_the_disk(
    tmp_path, closes, monkeypatch, data
) -> None:
    shop = closes(start_shop(tmp_path / "state"))
    answers, read = threading.Event(), Locations.read
    asked: set[str] = set()

    def slowly(self: Locations, location: GalleryLocation) -> GalleryLocation:
        if location.name.startswith("made-up"):
            answers.wait()
        return read(self, location)

    async def find(self: Registry, name: str | None) -> None:
        asked.add(str(name))
        await look(self, name)

    look = Registry.refresh_if_unknown
    monkeypatch.setattr(Locations, "read", slowly)
    monkeypatch.setattr(Registry, "refresh_if_unknown", find)
    with ThreadPoolExecutor(17) as clients:
        guesses = [f"made-up-{number}" for number in range(16)]
        searches = [clients.submit(shop.running.search, data[0], gallery=one) for one in guesses]
        try:
            until(lambda: asked >= {*guesses})
            made = clients.submit(shop.client.post, "/galleries", json={"name": "new"})
            wait([made], 0.5)
        finally:
            answers.set()
        assert made.result().status_code == 201, made.result().text
    assert {search.result().status_code for search in searches} == {404}


FACTS = (
    *("name", "version", "generation", "bundle_id", "precision", "size", "dim", "created_at"),
    *("managed", "writable", "has_map", "has_boxes", "has_words", "product_url"),
)


def test_a_gallery_exists_from_its_creation_to_its_deletion(mall, data) -> None:
    response = mall.client.post("/galleries", json={"name": "summer"})
    assert (response.status_code, response.headers["location"]) == (201, "/galleries/summer")
    made = response.json()
    known = ("name", "size", "managed", "writable")
    assert [made[name] for name in known] == ["summer", 0, True, True]
    assert mall.put({"a": data[0]}, gallery="summer")["added"] == 1
    listed = [one["name"] for one in mall.client.get("/galleries").json()["galleries"]]
    assert listed == sorted(listed)
    assert "summer" in listed
    assert mall.client.delete("/galleries/summer").status_code == 204
    assert_problem(mall.client.get("/galleries/summer"), 404, "unknown-gallery")
    assert_problem(mall.client.delete("/galleries/summer"), 404, "unknown-gallery")
    assert list((mall.state / "galleries").glob("*summer*")) == []
    assert mall.create("summer").gallery()["size"] == 0


def test_concurrent_requests_create_a_gallery_once(mall) -> None:
    taken = mall.client.post("/galleries", json={"name": "shop"})
    assert "delete it first" in assert_problem(taken, 409, "gallery-conflict")["detail"]
    with ThreadPoolExecutor(4) as pool:
        made = pool.map(lambda _: mall.client.post("/galleries", json={"name": "x"}), range(4))
        assert sorted(one.status_code for one in made) == [201, 409, 409, 409]
        gone = pool.map(lambda _: mall.client.delete("/galleries/x"), range(4))
        assert sorted(one.status_code for one in gone) == [204, 404, 404, 404]


def test_an_invalid_gallery_is_422_and_leaves_nothing(mall) -> None:
    before = list((mall.state / "galleries").iterdir())
    names: list[Any] = ["", "../up", ".hidden", "a b", "x" * 65, 5]
    more = ({"bundle_id": "f" * 64}, {"bundle_id": "../../etc"}, {"path": "/tmp"})
    for body in ({}, *({"name": name} for name in names), *({"name": "x"} | one for one in more)):
        assert_problem(mall.client.post("/galleries", json=body), 422, "invalid-parameter")
    assert list((mall.state / "galleries").iterdir()) == before


def test_a_description_holds_what_filters_index_and_page_need(shop, data) -> None:
    for n, one in enumerate(data):
        shop.put({f"k{n}": one}, colour="red" if n % 3 else "blue", price=n / 2, sale=n % 2 == 0)
    assert shop.remove("k7") == 1
    described = shop.gallery()
    galleries = shop.client.get("/galleries").json()["galleries"]
    assert {name: described[name] for name in FACTS} in galleries
    attributes = {one["name"]: one for one in described["attributes"]}
    values = [{"value": "red", "count": 4}, {"value": "blue", "count": 3}]
    known = {"name": "colour", "kind": "text", "values": values}
    assert attributes["colour"] == known | {"minimum": None, "maximum": None}
    values = [{"value": True, "count": 4}, {"value": False, "count": 3}]
    assert attributes["sale"]["values"] == values
    assert (attributes["price"]["minimum"], attributes["price"]["maximum"]) == (0, 3)
    assert (described["index"]["kind"], described["index"]["delta"]) == (None, 7)
    assert described["provider"] == "FakeExecutionProvider"
    assert described["image_root_missing"] is False
    assert described["calibration"] is None
    assert "No attribute names the product of an item" in described["no_calibration"]
    [threshold] = described["thresholds"]
    assert (threshold["false_matches"], threshold["search_score"]) == (0.01, 0.75)


def test_configured_galleries_are_listed_before_managed_ones(tmp_path) -> None:
    """Also after a restart, and next to one that cannot be opened."""
    managed = tmp_path / "state" / "galleries"
    for folder in (tmp_path / "zebra", tmp_path / "apple"):
        make_gallery(folder, folder.name)
    for name in ("nut", "mint", "apple", "bad"):
        make_gallery(managed / name, f"managed-{name}")
    (managed / "bad" / "CURRENT").write_text("0123456789ab\n")
    (managed / "no-gallery").mkdir()
    (managed / ".stage-gone").mkdir()
    galleries = tuple(f"{name}={tmp_path / name}" for name in ("zebra", "apple"))
    shop = start_shop(tmp_path / "state", create=False, galleries=galleries)
    with closing(shop):
        listed = shop.client.get("/galleries").json()["galleries"]
        expected = {"zebra": False, "apple": False, "mint": True, "nut": True}
        assert {one["name"]: one["managed"] for one in listed} == expected
        assert [one["name"] for one in listed] == [*expected]
        assert shop.items("apple")["items"][0]["key"] == "apple-0"
        checks = shop.client.get("/ready").json()["checks"]
        assert "GalleryCorruptError" in checks["reload bad"]
        make_gallery(managed / "bad", "fixed")
        assert shop.items("bad")["items"][0]["key"] == "fixed-0"
        assert "reload bad" not in shop.running.runtime.registry.failures.verdicts()


def test_a_configured_gallery_can_be_written_but_not_deleted(tmp_path, data, closes) -> None:
    photos = tmp_path / "pictures"
    photos.mkdir()
    (photos / "0.png").write_bytes(data[0])
    build_gallery(folder_source(photos), FakeEmbedder(), tmp_path / "given")
    given = (f"given={tmp_path / 'given'}",)
    shop = closes(start_shop(tmp_path / "state", create=False, galleries=given))
    described = shop.gallery("given")
    assert (described["managed"], described["writable"]) == (False, True)
    put = shop.put({"0.png": data[0], "new": data[1]}, gallery="given")
    assert (put["unchanged"], put["added"]) == (1, 1)
    items = shop.items("given")["items"]
    assert [shop.client.get(item["image"]).content for item in items] == data[:2]
    refused = assert_problem(shop.client.delete("/galleries/given"), 409, "gallery-conflict")
    assert "--gallery" in refused["detail"]
    shop.client.delete("/galleries/given/items", params={"key": "0.png"}).raise_for_status()
    assert (photos / "0.png").read_bytes() == data[0]


def test_galleries_of_the_settings_and_managed_ones_are_compacted_after_writes(tmp_path) -> None:
    """After writes over HTTP, and after those of another process."""
    folders = {"given": tmp_path / "given", "made": tmp_path / "state" / "galleries" / "made"}
    for name, folder in folders.items():
        make_gallery(folder, name, count=20)
        with closing(Gallery.open(folder)) as gallery:
            gallery.compact()
    given = (f"given={folders['given']}",)
    with closing(start_shop(tmp_path / "state", create=False, galleries=given)) as shop:
        for name in folders:
            body = {"keys": [f"{name}-{n}" for n in range(10)]}
            shop.client.post(f"/galleries/{name}/items/delete", json=body).raise_for_status()
            until(lambda name=name: shop.gallery(name)["index"]["tombstones"] == 0)
            with closing(Gallery.open(folders[name])) as script:
                script.remove(f"{name}-{n}" for n in range(10, 15))
            until(lambda name=name: shop.gallery(name)["size"] == 5)
            until(lambda name=name: shop.gallery(name)["index"]["tombstones"] == 0)


def test_photos_that_are_replaced_for_ever_fill_no_gallery_of_the_settings(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("kinlens.indexer.live.upkeep._SMALL_DELTA", 2)
    make_gallery(tmp_path / "given", "given", count=2)
    given = (f"given={tmp_path / 'given'}",)
    with closing(start_shop(tmp_path / "state", create=False, galleries=given)) as shop:
        for n in range(30):
            put_when_there_is_space(shop, photo(n))
        until(lambda: shop.gallery("given")["index"]["compaction_due"] is None)
        index = shop.gallery("given")["index"]
        assert index["delta"] + index["tombstones"] < 8
    rows = [*(tmp_path / "given").glob("versions/*/vectors/*/rows.f32")]
    assert sum(file.stat().st_size for file in rows) < 10 * 4 * 32


def put_when_there_is_space(shop: Shop, image: Any) -> None:
    """Replace the image of one item, again after each 429."""
    until(lambda: shop.put_form({"same": encoded(image)}, gallery="given").status_code == 200)


def test_a_start_rewrites_no_gallery_of_the_settings_that_is_due(tmp_path, monkeypatch) -> None:
    """It becomes smaller once something is written, however little."""
    monkeypatch.setattr("kinlens.indexer.live.upkeep._SMALL_DELTA", 2)
    folders = {"given": tmp_path / "given", "made": tmp_path / "state" / "galleries" / "made"}
    for name, folder in folders.items():
        make_gallery(folder, name, count=20)
    given = (f"given={folders['given']}",)
    with closing(start_shop(tmp_path / "state", create=False, galleries=given)) as shop:
        until(lambda: shop.gallery("made")["index"]["delta"] == 0)
        with closing(Gallery.open(folders["made"])) as script:
            script.remove(f"made-{n}" for n in range(10))
        until(lambda: shop.gallery("made")["size"] == 10)  # so there was a look at both
        until(lambda: shop.gallery("made")["index"]["tombstones"] == 0)
        assert shop.gallery("given")["index"]["delta"] == 20
        assert "20 items were added" in shop.gallery("given")["index"]["compaction_due"]
        body = {"changes": {"given-0": {"price": 1}}}
        shop.client.patch("/galleries/given/items", json=body).raise_for_status()
        until(lambda: shop.gallery("given")["index"]["delta"] == 0)


def test_a_gallery_of_the_settings_that_was_full_at_the_start_takes_items_again(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("kinlens.indexer.live.upkeep._SMALL_DELTA", 2)
    make_gallery(tmp_path / "given", "given", count=20)
    given = (f"given={tmp_path / 'given'}",)
    with closing(start_shop(tmp_path / "state", create=False, galleries=given)) as shop:
        assert_problem(shop.put_form({"a": encoded(photo(1))}, gallery="given"), 429, "delta-full")
        put_when_there_is_space(shop, photo(1))


def test_without_a_state_folder_writes_are_409_with_the_cure(start_service, data) -> None:
    running = start_service(anonymous_scopes=("admin",))
    parts = [("image", ("x", data[0])), ("key", (None, "k"))]
    for response in (
        running.client.put("/galleries/shop/items", files=parts),
        running.client.post("/galleries", json={"name": "x"}),
    ):
        assert "--state" in assert_problem(response, 409, "state-missing")["detail"]
    assert_problem(running.client.delete("/galleries/shop"), 409, "gallery-conflict")
    [listed] = running.client.get("/galleries").json()["galleries"]
    assert listed["writable"] is False


def test_a_gallery_records_each_precision_added_to_it(tiny_bundle, tmp_path) -> None:
    bundle, state = write_full_bundle(tiny_bundle, tmp_path), tmp_path / "state"
    facts = {"bundle_id": bundle.bundle_id, "dim": bundle.manifest.dim}
    make_gallery(state / "galleries" / "shop", "", count=0, **facts)
    given = {"state": state, "precision": "int8", "anonymous_scopes": ("admin",)}
    app = create_app(Settings(**DEFAULTS | {"bundle": bundle.path} | given))
    with closing(run(app)) as running:
        shop = Shop(running, state)
        own = shop.create("own")
        found = []
        for gallery in (shop, own):
            found.append(running.client.get(gallery.url).json()["precision"])
            gallery.put({"a": encoded(photo(1))})
            found.append(running.client.get(gallery.url).json()["precision"])
    assert found == ["fp32", "fp32+int8", "int8", "int8"]


def test_searches_use_the_gpu_until_it_fails(tmp_path, data, monkeypatch, closes) -> None:
    device, folder = fake_gpu(monkeypatch), tmp_path / "state" / "galleries" / "shop"
    make_gallery(folder, "a", count=500)
    with closing(Gallery.open(folder)) as gallery:
        gallery.compact(wait=True)
    shop = closes(start_shop(tmp_path / "state", create=False, index_device="cuda"))

    def ready() -> Any:
        return shop.client.get("/ready").json()

    found = shop.search(data[0], k=5).json()["hits"]
    assert len(found) == 5
    assert device.searches
    reported = ready()
    assert reported["indexes"]["shop"]["device"] == "cuda"
    assert reported["indexes"]["shop"]["gpu_memory_mb"] > 0
    assert reported["free_gpu_memory_mb"] == round(device.free / 2**20)
    assert reported["free_memory_mb"] > 0
    device.breaks = True
    again = shop.search(data[0], k=4).json()["hits"]
    assert [hit["id"] for hit in again] == [hit["id"] for hit in found[:4]]
    until(lambda: ready()["indexes"]["shop"]["device"] == "cpu")  # asked once a second
    assert ready()["status"] == "ready"
    assert ready()["indexes"]["shop"]["reason"] == "CUDA error 719 launch failed"


def test_a_precision_that_was_never_compared_is_refused(tiny_bundle, tmp_path) -> None:
    bundle = write_full_bundle(tiny_bundle, tmp_path)
    other = made(tmp_path, bundle, "bf16")
    Runtime(settings(bundle, made(tmp_path, bundle, "int8"), precision="int8"))
    with pytest.raises(BundleMismatchError, match=r"'bf16' was built in bf16, .* in int8.*fp32"):
        Runtime(settings(bundle, other, precision="int8"))
    Runtime(settings(bundle, other, precision="fp32"))


def test_auto_considers_the_precisions_of_all_galleries(tiny_bundle, tmp_path, monkeypatch) -> None:
    bundle = write_full_bundle(tiny_bundle, tmp_path)
    asked: list[SessionSettings] = []

    def fork_server(*limits: Any) -> ForkServer:
        asked.append(limits[-1])
        return ForkServer(*limits[:-1], SessionSettings())

    monkeypatch.setattr("kinlens.service.galleries.bundles.ForkServer", fork_server)
    galleries = [made(tmp_path, bundle, one) for one in ("fp32", "int8")]
    Runtime(settings(bundle, *galleries, precision="auto"))
    assert [one.precision for one in asked] == ["auto"]
    assert asked[0].galleries == {"fp32", "int8"}
