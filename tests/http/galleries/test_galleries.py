"""The life of galleries: made, described, filled, deleted with every picture; what is refused."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from embedder.fake import FakeEmbedder
from indexer.gallery import Gallery
from indexer.ingest.build import build_gallery
from indexer.ingest.sources import folder_source
from service.app import create_app
from service.settings import Settings
from tests.embedder.bundles import CALIBRATION
from tests.support.seams import Locations
from tests.support.servers import DEFAULTS, WAIT_S, run
from tests.support.shops import Shop, assert_problem, start_shop
from tests.tiny import encoded, picture

FACTS = (
    "name",
    "version",
    "generation",
    "bundle_id",
    "size",
    "dim",
    "created_at",
    "managed",
    "writable",
)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = start_shop(tmp_path / "state")
    yield shop
    shop.close()


@pytest.fixture(scope="module")
def data() -> list[bytes]:
    return [encoded(picture(seed)) for seed in range(8)]


def test_a_gallery_is_there_as_soon_as_it_was_made_and_gone_when_deleted(shop, data) -> None:
    response = shop.client.post("/galleries", json={"name": "summer"})
    assert (response.status_code, response.headers["location"]) == (201, "/galleries/summer")
    made = response.json()
    assert (made["name"], made["size"], made["managed"], made["writable"]) == (
        "summer",
        0,
        True,
        True,
    )
    assert shop.put({"a": data[0]}, gallery="summer")["added"] == 1
    assert [one["name"] for one in shop.client.get("/galleries").json()["galleries"]] == [
        "shop",
        "summer",
    ]
    assert shop.client.delete("/galleries/summer").status_code == 204
    assert_problem(shop.client.get("/galleries/summer"), 404, "unknown-gallery")
    assert_problem(shop.client.delete("/galleries/summer"), 404, "unknown-gallery")
    assert list((shop.state / "galleries").glob("*summer*")) == []
    assert shop.client.post("/galleries", json={"name": "summer"}).status_code == 201
    assert shop.gallery("summer")["size"] == 0


def test_a_name_that_is_taken_is_409_also_when_two_ask_at_once(shop) -> None:
    taken = shop.client.post("/galleries", json={"name": "shop"})
    assert "delete it first" in assert_problem(taken, 409, "gallery-conflict")["detail"]
    with ThreadPoolExecutor(4) as pool:
        made = list(
            pool.map(lambda _: shop.client.post("/galleries", json={"name": "x"}), range(4))
        )
    assert sorted(one.status_code for one in made) == [201, 409, 409, 409]


@pytest.mark.parametrize(
    "body",
    [
        {"name": ""},
        {"name": "../up"},
        {"name": ".hidden"},
        {"name": "a b"},
        {"name": "x" * 65},
        {"name": "x", "bundle_id": "f" * 64},
        {"name": "x", "bundle_id": "../../etc"},
        {"name": "x", "path": "/tmp"},
        {"name": 5},
        {},
    ],
)
def test_a_gallery_that_cannot_be_made_is_422_and_leaves_nothing(shop, body) -> None:
    assert_problem(shop.client.post("/galleries", json=body), 422, "invalid-parameter")
    assert [one.name for one in (shop.state / "galleries").iterdir() if one.is_dir()] == ["shop"]


def test_a_description_holds_what_filters_index_and_page_need(shop, data) -> None:
    for n, one in enumerate(data):
        shop.put({f"k{n}": one}, colour="red" if n % 3 else "blue", price=n / 2, sale=n % 2 == 0)
    shop.client.delete("/galleries/shop/items", params={"key": "k7"})
    described = shop.gallery()
    listed = shop.client.get("/galleries").json()["galleries"][0]
    assert {name: described[name] for name in FACTS} == listed
    attributes = {one["name"]: one for one in described["attributes"]}
    assert attributes["colour"] == {
        "name": "colour",
        "kind": "text",
        "values": [{"value": "red", "count": 4}, {"value": "blue", "count": 3}],
        "minimum": None,
        "maximum": None,
    }
    assert attributes["sale"]["values"] == [
        {"value": True, "count": 4},
        {"value": False, "count": 3},
    ]
    assert (attributes["price"]["minimum"], attributes["price"]["maximum"]) == (0, 3)
    assert described["index"]["kind"] is None
    assert described["index"]["delta"] == 7
    assert described["provider"] == "FakeExecutionProvider"
    assert (described["calibration"], described["image_root_missing"]) == (None, False)


def test_the_calibration_of_the_bundle_is_described_with_its_thresholds(tmp_path) -> None:
    shop = start_shop(tmp_path, FakeEmbedder(calibration=CALIBRATION))
    calibration = shop.gallery()["calibration"]
    shop.close()
    assert (calibration["slope"], calibration["intercept"]) == (12.0, -6.0)
    [threshold] = calibration["thresholds"]
    assert (threshold["false_matches"], threshold["search_score"]) == (0.01, 0.75)
    assert threshold["probability"] == pytest.approx(0.9525741, abs=1e-6)


def test_galleries_and_items_are_there_after_a_restart(tmp_path, data) -> None:
    shop = start_shop(tmp_path)
    shop.put({"a": data[0]}, n=1)
    before = shop.items()
    shop.close()
    again = start_shop(tmp_path, create=False)
    assert again.items() == before
    assert again.client.get(before["items"][0]["image"]).content == data[0]
    assert again.put({"a": data[0]}, n=1)["unchanged"] == 1
    again.close()


def test_a_gallery_of_the_settings_can_be_written_but_not_deleted(tmp_path, data) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "0.png").write_bytes(data[0])
    embedder = FakeEmbedder()
    build_gallery(folder_source(pictures), embedder, tmp_path / "given")
    shop = start_shop(tmp_path / "state", embedder, galleries=(f"given={tmp_path / 'given'}",))
    described = shop.gallery("given")
    assert (described["managed"], described["writable"]) == (False, True)
    assert shop.put({"0.png": data[0]}, gallery="given")["unchanged"] == 1
    assert shop.put({"new": data[1]}, gallery="given")["added"] == 1
    items = shop.items("given")["items"]
    assert [shop.client.get(item["image"]).content for item in items] == data[:2]
    refused = assert_problem(shop.client.delete("/galleries/given"), 409, "gallery-conflict")
    assert "--gallery" in refused["detail"]
    assert (
        shop.client.delete("/galleries/given/items", params={"key": ["0.png", "new"]}).json()[
            "removed"
        ]
        == 2
    )
    assert (pictures / "0.png").read_bytes() == data[0]
    shop.close()


def test_without_a_folder_for_state_writes_are_409_and_name_the_cure(tmp_path, data) -> None:
    embedder = FakeEmbedder()
    gallery = Gallery.create(
        tmp_path / "g", name="g", bundle_id=embedder.bundle_id, dim=embedder.dim
    )
    settings = Settings(**DEFAULTS, anonymous_scopes=("admin",))
    running = run(create_app(settings, embedder, {"g": gallery}))
    shop = Shop(running, tmp_path)
    for response in (
        shop.put_form({"k": data[0]}, gallery="g"),
        shop.client.post("/galleries", json={"name": "x"}),
    ):
        assert "--state" in assert_problem(response, 409, "state-missing")["detail"]
    assert_problem(shop.client.delete("/galleries/g"), 409, "gallery-conflict")
    assert shop.gallery("g")["writable"] is False
    assert shop.items("g")["total"] == 0
    running.close()
    gallery.close()


@pytest.mark.parametrize("path", ["/galleries", "/galleries/shop"])
def test_a_folder_that_does_not_answer_holds_up_nobody_else(
    shop, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a mount whose server is gone."""
    asked, answer, access = threading.Event(), threading.Event(), os.access

    def slow(folder: Path, mode: int) -> bool:
        asked.set()
        assert answer.wait(20)
        return access(folder, mode)

    monkeypatch.setattr(os, "access", slow)
    with ThreadPoolExecutor(1) as caller:
        described = caller.submit(shop.client.get, path)
        try:
            assert asked.wait(20)
            assert shop.client.get("/live", timeout=5).status_code == 200
        finally:
            answer.set()
        assert described.result().status_code == 200


def test_what_another_process_made_is_there_at_the_first_request(tmp_path) -> None:
    data = encoded(picture(1))
    slow = {"reload_interval_ms": 600_000}
    maker = start_shop(tmp_path, FakeEmbedder(), **slow)
    for name, ask in {
        "put": lambda shop: shop.put_form({"k": data}, gallery="put"),
        "patch": lambda shop: shop.client.patch(
            "/galleries/patch/items", json={"changes": {"k": {"a": 1}}}
        ),
        "list": lambda shop: shop.client.get("/galleries/list/items"),
        "describe": lambda shop: shop.client.get("/galleries/describe"),
        "search": lambda shop: shop.running.search(data, gallery="search"),
        "item": lambda shop: shop.client.get("/galleries/item/items/1"),
        "image": lambda shop: shop.client.get("/galleries/image/items/1/image?size=160"),
        "one": lambda shop: shop.client.delete("/galleries/one/items/1"),
        "remove": lambda shop: shop.client.delete("/galleries/remove/items", params={"key": "k"}),
        "many": lambda shop: shop.client.post("/galleries/many/items/delete", json={"keys": ["k"]}),
        "delete": lambda shop: shop.client.delete("/galleries/delete"),
    }.items():
        other = start_shop(tmp_path, FakeEmbedder(), create=False, **slow)
        maker.client.post("/galleries", json={"name": name}).raise_for_status()
        maker.put({"k": data}, gallery=name, a=0)
        answer = ask(other)
        assert answer.is_success, (name, answer.text)
        assert_problem(other.client.get("/galleries/nowhere"), 404, "unknown-gallery")
        other.close()
    maker.close()


def test_a_gallery_that_is_made_while_the_disk_hangs_is_503_in_time(tmp_path, monkeypatch) -> None:
    shop = start_shop(tmp_path, request_timeout_ms=500, reload_interval_ms=600_000)
    gate = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(Locations, "list_galleries", lambda _: gate.wait(WAIT_S) and [])
        answer = shop.client.post("/galleries", json={"name": "new"})
        assert_problem(answer, 503, "deadline-exceeded")
        assert_problem(shop.client.delete("/galleries/shop"), 503, "deadline-exceeded")
        assert shop.client.get("/live").status_code == 200
    gate.set()
    shop.close()
