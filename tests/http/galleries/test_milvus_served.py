"""A service with a gallery on a real Milvus server, and an outage of that server."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.fake import FakeEmbedder
from kinlens.embedder.session import OnnxEmbedder
from kinlens.service.__main__ import app as command
from kinlens.service.app import create_app
from kinlens.service.settings import Settings
from tests.support.milvus_server import MilvusServer, started_server
from tests.support.seams import KeyStore, Limits, MilvusStore
from tests.support.servers import DEFAULTS, Running, run
from tests.support.shops import Shop, assert_problem
from tests.support.waiting import until

pytestmark = pytest.mark.milvus


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MilvusServer]:
    yield from started_server(request, tmp_path_factory.mktemp("milvus"))


def publish(server: MilvusServer, name: str, embedder: Any) -> None:
    store = MilvusStore.publish(server.uri, name, dim=embedder.dim, bundle_id=embedder.bundle_id)
    store.close()


@pytest.fixture(scope="module")
def empty(server: MilvusServer, tiny_bundle: Bundle) -> str:
    """The address of a gallery of the tiny bundle that stays empty."""
    publish(server, "empty", OnnxEmbedder.open(tiny_bundle))
    return address(server, "empty")


def address(server: MilvusServer, name: str) -> str:
    return f"milvus://{server.uri.removeprefix('http://')}/{name}"


@pytest.fixture
def start(server: MilvusServer, tmp_path: Path) -> Iterator[Callable[..., Shop]]:
    """Serve the gallery `shop` of the server, as one more replica."""
    started: list[Running] = []

    def start(name: str, **settings: Any) -> Shop:
        given = DEFAULTS | {
            "galleries": (f"shop={address(server, name)}",),
            "pictures": (f"shop={tmp_path / 'pictures'}",),
            "anonymous_scopes": ("admin",),
        }
        embedder = settings.pop("embedder", FakeEmbedder())
        started.append(run(create_app(Settings(**given | settings), embedder)))
        return Shop(started[-1], tmp_path)

    yield start
    for running in started:
        running.close()


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


def test_every_replica_reads_and_writes_items(server, start, photos) -> None:
    publish(server, "items", FakeEmbedder())
    one, other = start("items"), start("items")
    put = one.put({f"{n:03d}": data for n, data in enumerate(photos)}, colour="red")
    assert put["added"] == len(photos)

    assert keys(other.running.search(photos[3], k=2))[0] == "003"
    found = other.running.search(photos[3], k=2, filter='colour = "red"').json()
    assert found["hits"][0]["score"] == pytest.approx(1, abs=1e-3)
    photo = other.client.get(found["hits"][0]["image"])
    assert photo.content == photos[3]
    small = other.client.get(found["hits"][0]["image"] + "&size=160")
    assert small.headers["content-type"] == "image/jpeg"

    changes = {"003": {"colour": "blue", "price": 5}, "004": {"colour": "blue"}}
    other.client.patch("/galleries/shop/items", json={"changes": changes}).raise_for_status()
    blue = one.running.search(photos[3], k=9, filter='colour = "blue"')
    assert sorted(keys(blue)) == ["003", "004"]
    groups = one.running.search(photos[3], k=5, group_by="colour").json()["groups"]
    assert sorted(group["value"] for group in groups) == ["blue", "red"]
    assert [item["key"] for item in other.items(key_prefix="00", limit=200)["items"]]
    assert other.gallery()["size"] == len(photos)
    assert {one["name"] for one in other.gallery()["attributes"]} == {"colour", "price"}

    similar = one.client.get(
        f"/galleries/shop/items/{found['hits'][0]['id']}/similar", params={"k": 3}
    )
    assert "003" not in keys(similar)
    assert len(keys(similar)) == 3
    batch = [{"positives": ["004"], "k": 1}, {"positives": ["005"], "k": 2}]
    answered = one.client.post("/search/batch", json={"queries": batch}).json()["answers"]
    assert [len(one["answer"]["hits"]) for one in answered] == [1, 2]

    removed = one.client.delete("/galleries/shop/items", params={"key": "003"})
    assert removed.json()["removed"] == 1
    assert "003" not in keys(other.running.search(photos[3], k=12))
    assert other.client.get(found["hits"][0]["image"]).status_code == 404
    assert len(list((one.state / "pictures").glob("*/*"))) == len(photos) - 1
    many = {"filter": 'colour = "blue"'}
    assert one.client.post("/galleries/shop/items/delete", json=many).json()["removed"] == 1
    [hit] = other.running.search(photos[5], k=1).json()["hits"]
    assert other.client.delete(f"/galleries/shop/items/{hit['id']}").json()["removed"] == 1
    assert sorted(keys(one.running.search(photos[5], k=12))) == [
        f"{n:03d}" for n in range(len(photos)) if n not in (3, 4, 5)
    ]
    one.client.get("/metrics")
    assert one.running.metric("kinlens_milvus_seconds_count", call="upsert") >= 1
    assert one.running.metric("kinlens_gallery_items", gallery="shop") == len(photos) - 3


def test_a_new_alias_is_served(server, start, tmp_path, make_tiny_bundle, photos) -> None:
    old, new = (OnnxEmbedder.open(make_tiny_bundle(seed)) for seed in (0, 1))
    (tmp_path / "state" / "bundles").mkdir(parents=True)
    for embedder in (old, new):
        folder = tmp_path / "state" / "bundles" / embedder.bundle_id[:16]
        folder.symlink_to(embedder.bundle.path)
    publish(server, "swapped", old)
    shop = start("swapped", embedder=old, state=tmp_path / "state", reload_interval_ms=100)
    shop.put({"old": photos[1]})
    publish(server, "swapped", new)
    answer = shop.running.search(photos[0], k=1)
    assert answer.status_code == 200
    assert answer.json()["bundle_id"] == new.bundle_id
    assert answer.json()["hits"] == []
    shop.put({"a": photos[0]})
    assert keys(shop.running.search(photos[0], k=2)) == ["a"]

    assert shop.client.get("/ready").status_code == 200
    server.kill()
    refused = shop.running.search(photos[0])
    assert_problem(refused, 503, "gallery-unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    assert_problem(shop.put_form({"b": photos[1]}), 503, "gallery-unavailable")
    until(lambda: shop.client.get("/ready").status_code == 503)
    assert shop.running.metric("kinlens_milvus_failures_total", call="describe_collection") > 0
    server.restart()
    until(lambda: shop.running.search(photos[0]).status_code == 200)
    assert keys(shop.running.search(photos[0], k=2)) == ["a"]
    until(lambda: shop.client.get("/ready").status_code == 200)


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


WRONG = {
    "no name": ({"galleries": "shop=milvus://127.0.0.1:1"}, "milvus://HOST:PORT/NAME"),
    "a password": ({"galleries": "shop=milvus://a:b@host:1/shop"}, "KINLENS_MILVUS_TOKEN"),
    "nobody there": ({"galleries": "shop=milvus://127.0.0.1:1/shop"}, "does not respond"),
    "unknown collection": ({"galleries": "shop=milvus://SERVER/none"}, "did not find it"),
    "another bundle": ({"galleries": "shop=milvus://SERVER/empty"}, "Serve the bundle"),
    "pictures of nobody": ({"pictures": "hats=/tmp"}, "not a gallery on Milvus"),
    "pictures nowhere": ({"pictures": "shop=nope://x"}, "cannot be reached"),
    "consistency": ({"milvus_consistency": "Sometimes"}, "milvus_consistency"),
}


def test_wrong_settings_are_refused_at_the_start(empty, make_tiny_bundle, monkeypatch) -> None:
    usual = {"galleries": "shop=milvus://SERVER/none", "bundle": str(make_tiny_bundle(9).path)}
    server = empty.removeprefix("milvus://").partition("/")[0]
    for case, (wrong, text) in WRONG.items():
        with monkeypatch.context() as patch:
            for name, value in (usual | wrong).items():
                patch.setenv(f"KINLENS_{name.upper()}", value.replace("SERVER", server))
            done = CliRunner().invoke(command, ["--port", "0"])
        assert done.exit_code == 1, case
        assert text in " ".join(done.output.split()), case
