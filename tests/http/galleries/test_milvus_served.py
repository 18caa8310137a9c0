"""A service with a gallery on a real Milvus server."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.fake import FakeEmbedder
from kinlens.embedder.session import OnnxEmbedder
from kinlens.service.commands.program import app as command
from kinlens.service.settings import Settings
from tests.support.milvus_server import MilvusServer, imported, started_server
from tests.support.seams import KeyStore, Limits
from tests.support.servers import DEFAULTS, create_app, run
from tests.support.shops import Shop, assert_problem

pytestmark = pytest.mark.milvus


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MilvusServer]:
    yield from started_server(request, tmp_path_factory.mktemp("milvus"))


def publish(server: MilvusServer, name: str, embedder: Any) -> None:
    imported(server.uri, name, dim=embedder.dim, bundle_id=embedder.bundle_id).close()


@pytest.fixture(scope="module")
def empty(server: MilvusServer, tiny_bundle: Bundle) -> str:
    """The address of a gallery of the tiny bundle that stays empty."""
    publish(server, "empty", OnnxEmbedder.open(tiny_bundle))
    return address(server, "empty")


def address(server: MilvusServer, name: str) -> str:
    return f"milvus://{server.uri.removeprefix('http://')}/{name}"


@pytest.fixture
def start(server: MilvusServer, tmp_path: Path, closes: Any) -> Callable[..., Shop]:
    """Serve the gallery `shop` of the server, as one more replica."""

    def start(name: str, **settings: Any) -> Shop:
        given = DEFAULTS | {
            "galleries": (f"shop={address(server, name)}",),
            "pictures": (f"shop={tmp_path / 'pictures'}",),
            "anonymous_scopes": ("admin",),
        }
        embedder = settings.pop("embedder", FakeEmbedder())
        app = create_app(Settings(**given | settings), embedder)
        made: Shop = closes(Shop(run(app), tmp_path))
        return made

    return start


def keys(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [hit["key"] for hit in answer.json()["hits"]]


def test_a_key_with_a_filter_is_read_only_on_milvus(server, start, photos, tmp_path) -> None:
    publish(server, "tenants", FakeEmbedder())
    shop = start("tenants", state=tmp_path / "state")
    shop.put({"own": photos[0], "own/2": photos[1]}, tenant=7)
    shop.put({"rival": photos[2]}, tenant=8, secret="yes")
    limits = Limits(galleries=("shop",), filter="tenant = 7")
    text = KeyStore(tmp_path / "state" / "keys.json").create("seven", ["write"], limits=limits)
    headers, client = {"authorization": f"Bearer {text}"}, shop.client
    image = [("image", ("x.png", photos[2], "image/png"))]
    found = client.post("/search", files=image, headers=headers)
    assert sorted(keys(found)) == ["own", "own/2"]
    detail = client.get(shop.url, headers=headers).json()
    assert detail["size"] == 2
    assert [one["name"] for one in detail["attributes"]] == ["tenant"]
    assert client.get(f"{shop.url}/items", headers=headers).json()["total"] == 2
    hidden = client.get(f"{shop.url}/items/by-key/rival", headers=headers)
    assert_problem(hidden, 404, "unknown-item")
    change = {"changes": {"own": {"price": 1}}}
    refused = client.patch(f"{shop.url}/items", json=change, headers=headers)
    assert "no transactions" in assert_problem(refused, 403, "not-allowed")["detail"]
    refused = client.delete(f"{shop.url}/items/by-key/own", headers=headers)
    assert_problem(refused, 403, "not-allowed")


def test_items_are_put_searched_changed_and_removed(server, start, photos) -> None:
    publish(server, "items", FakeEmbedder())
    shop = start("items")
    put = shop.put({f"{n:03d}": data for n, data in enumerate(photos)}, colour="red")
    assert put["added"] == len(photos)
    [hit] = shop.search(photos[3], k=1, filter='colour = "red"').json()["hits"]
    assert (hit["key"], hit["score"]) == ("003", pytest.approx(1, abs=1e-3))
    assert shop.client.get(hit["image"]).content == photos[3]
    small = shop.client.get(f"{hit['image']}&size=160")
    assert small.headers["content-type"] == "image/jpeg"

    changes = {
        "003": {"colour": "blue", "price": 5, "sizes": ["S", "M"]},
        "004": {"colour": "blue", "sizes": "M"},
    }
    shop.client.patch(f"{shop.url}/items", json={"changes": changes}).raise_for_status()
    assert sorted(keys(shop.search(photos[3], k=9, filter='colour = "blue"'))) == ["003", "004"]
    [one] = shop.search(photos[3], k=9, filter='sizes = "S"').json()["hits"]
    assert (one["key"], one["attributes"]["sizes"]) == ("003", ["S", "M"])
    assert sorted(keys(shop.search(photos[3], k=9, filter='sizes in ("M", "L")'))) == ["003", "004"]
    assert sorted(keys(shop.search(photos[3], k=9, filter='sizes > "M"'))) == ["003"]
    groups = shop.search(photos[3], k=5, group_by="colour").json()["groups"]
    assert sorted(group["value"] for group in groups) == ["blue", "red"]
    assert {one["name"] for one in shop.gallery()["attributes"]} == {
        "colour", "price", "sizes",
    }  # fmt: skip
    similar = shop.client.get(f"{shop.url}/items/{hit['id']}/similar", params={"k": 3})
    assert len(set(keys(similar)) - {"003"}) == 3
    batch = [{"positives": ["004"], "k": 1}, {"positives": ["005"], "k": 2}]
    answered = shop.client.post("/search/batch", json={"queries": batch}).json()["answers"]
    assert [len(one["answer"]["hits"]) for one in answered] == [1, 2]

    assert shop.remove("003") == 1
    assert shop.client.get(hit["image"]).status_code == 404
    assert len(list((shop.state / "pictures").glob("*/*"))) == len(photos) - 1
    many = {"filter": 'colour = "blue"'}
    assert shop.client.post(f"{shop.url}/items/delete", json=many).json()["removed"] == 1
    [hit] = shop.search(photos[5], k=1).json()["hits"]
    assert shop.client.delete(f"{shop.url}/items/{hit['id']}").json()["removed"] == 1
    left = [f"{n:03d}" for n in range(len(photos)) if n not in (3, 4, 5)]
    assert sorted(keys(shop.search(photos[5], k=12))) == left
    listed = shop.items(key_prefix="00", limit=200)["items"]
    assert sorted(item["key"] for item in listed) == [key for key in left if key.startswith("00")]
    shop.client.get("/metrics")
    assert shop.running.metric("kinlens_milvus_seconds_count", call="upsert") >= 1
    assert shop.running.metric("kinlens_gallery_items", gallery="shop") == len(left)


def test_vectors_counts_fields_and_unkept_images_are_as_in_a_folder(
    server, start, photos, tmp_path
) -> None:
    embedder = FakeEmbedder()
    vectors = embedder.embed(np.stack([embedder.preprocess(data) for data in photos[:2]]))
    publish(server, "vectors", embedder)
    shop = start("vectors")
    items = [
        {"key": "v/0", "vector": vectors[0].tolist(), "attributes": {"colour": "red", "price": 3}},
        {"key": "v/1", "vector": vectors[1].tolist(), "attributes": {"colour": "blue"}},
    ]
    for status in ("added", "unchanged"):
        assert shop.put_json(items).json()[status] == 2
    parts = {"key": (None, "u"), "keep": (None, "false"), "image": ("x.png", photos[2])}
    assert shop.client.put(f"{shop.url}/items", files=parts).json()["added"] == 1
    shop.put({"kept": photos[3]}, colour="red")
    assert len(list((tmp_path / "pictures").glob("*/*"))) == 1

    count = shop.client.post(f"{shop.url}/count").json()["count"]
    red = shop.client.post(f"{shop.url}/count", json={"filter": 'colour = "red"'}).json()["count"]
    assert (count, red) == (4, 2)
    wrong = shop.client.post(f"{shop.url}/count", json={"filter": "size = 3"})
    assert_problem(wrong, 422, "invalid-filter")
    hits = {hit["key"]: hit for hit in shop.search(photos[0], k=4, fields="price").json()["hits"]}
    assert hits["v/0"]["score"] == pytest.approx(1, abs=1e-3)
    assert {key: hit["attributes"] for key, hit in hits.items()} == {
        "v/0": {"price": 3}, "v/1": {}, "u": {}, "kept": {},
    }  # fmt: skip
    assert {key: hit.get("has_image", True) for key, hit in hits.items()} == {
        "v/0": False, "v/1": False, "u": False, "kept": True,
    }  # fmt: skip
    assert_problem(shop.client.get(hits["u"]["image"]), 404, "unknown-item")
    for path in (f"{shop.url}/items/{hits['v/1']['id']}", f"{shop.url}/items/by-key/v/1"):
        read = shop.client.get(f"{path}/vector").json()
        assert (read["key"], read["id"]) == ("v/1", hits["v/1"]["id"])
        assert read["vector"] == pytest.approx(vectors[1].tolist(), abs=1e-6)
    found = shop.client.post("/search", json={"vectors": [{"vector": read["vector"]}], "k": 1})
    assert keys(found) == ["v/1"]
    again = {"key": (None, "u"), "image": ("x.png", photos[2])}
    assert shop.client.put(f"{shop.url}/items", files=again).json()["items"][0]["status"] in (
        "updated", "replaced",
    )  # fmt: skip
    [kept] = shop.search(photos[2], k=1).json()["hits"]
    assert shop.client.get(kept["image"]).content == photos[2]
    unkept = parts | {"keep": (None, "false")}
    assert shop.client.put(f"{shop.url}/items", files=unkept).json()["updated"] == 1
    assert len(list((tmp_path / "pictures").glob("*/*"))) == 1, "a shared store deletes at once"


@pytest.mark.parametrize("path", ["/search", "/search/batch"])
def test_a_new_alias_is_served(
    server, start, tmp_path, make_tiny_bundle, photos, monkeypatch, path: str
) -> None:
    monkeypatch.setattr(Settings, "reload_interval_ms", 60_000)
    old, new = (OnnxEmbedder.open(make_tiny_bundle(seed)) for seed in (0, 1))
    (tmp_path / "state" / "bundles").mkdir(parents=True)
    for embedder in (old, new):
        folder = tmp_path / "state" / "bundles" / embedder.bundle_id[:16]
        folder.symlink_to(embedder.bundle.path)
    name = f"swapped{len(path)}"
    publish(server, name, old)
    shop = start(name, embedder=old, state=tmp_path / "state")
    shop.put({"old": photos[1]})
    publish(server, name, new)
    found = shop.client.post(path, files={"image": photos[0]}, data={"gallery": "shop"}).json()
    answer = found["answers"][0]["answer"] if "batch" in path else found
    assert (answer["bundle_id"], answer["hits"]) == (new.bundle_id, [])
    shop.put({"a": photos[0]})
    assert keys(shop.search(photos[0], k=2)) == ["a"]


def test_unsupported_operations_are_refused(empty, start, tiny_bundle, tmp_path, photos) -> None:
    embedder = OnnxEmbedder.open(tiny_bundle)
    shop = start("empty", embedder=embedder, pictures=(), state=tmp_path / "state")
    refused = assert_problem(shop.put_form({"a": photos[0]}), 409, "state-missing")
    assert "--pictures shop=ADDRESS" in refused["detail"]
    assert not shop.gallery()["writable"]
    for job, body in {"compact": {}, "swap": {"other": "x"}}.items():
        response = shop.client.post(f"/galleries/shop/{job}", json=body)
        assert "kinlens-index import" in assert_problem(response, 409, "gallery-conflict")["detail"]
    deleted = shop.client.delete("/galleries/shop")
    assert_problem(deleted, 409, "gallery-conflict")


def test_check_reads_milvus_or_names_the_missing_client(empty, tiny_bundle, monkeypatch) -> None:
    monkeypatch.setenv("KINLENS_BUNDLE", str(tiny_bundle.path))
    monkeypatch.setenv("KINLENS_GALLERIES", f"shop={empty}")
    reported = CliRunner().invoke(command, ["check", "--port", "0"])
    assert "0 items of bundle" in " ".join(reported.output.split())
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    reported = CliRunner().invoke(command, ["check", "--port", "0"])
    assert reported.exit_code == 1
    assert "kinlens[milvus]" in reported.output
