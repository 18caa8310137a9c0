"""Items that are vectors without images: put, found, read, replaced."""

import base64
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kinlens.client import Client, NewItem
from kinlens.embedder.fake import FakeEmbedder
from kinlens.errors import ArgumentError, NotAllowedError
from tests.support.seams import KeyStore, Limits
from tests.support.servers import DEFAULTS, create_app, run, settings_of
from tests.support.shops import (
    assert_problem,
    base64_of,
    make_gallery,
    publish_photos,
    sha256,
    start_shop,
)
from tests.tiny import encoded


@pytest.fixture(scope="module")
def vectors(data) -> Any:
    embedder = FakeEmbedder()
    return embedder.embed(np.stack([embedder.preprocess(one) for one in data]))


def sent(vector: Any) -> list[float]:
    numbers: list[float] = np.asarray(vector).tolist()
    return numbers


def test_a_vector_is_put_found_read_and_sent_back(shop, data, vectors, model) -> None:
    batches = len(model.batches)
    packed = base64.b64encode(vectors[1].astype("<f4").tobytes()).decode()
    items = [
        {"key": "v/0", "vector": sent(vectors[0]), "attributes": {"colour": "red"}},
        {"key": "v/1", "vector": packed},
    ]
    answer = shop.put_json(items).json()
    assert (answer["added"], answer["failed"]) == (2, 0)
    assert shop.put_json(items).json()["unchanged"] == 2
    assert len(model.batches) == batches
    assert shop.photos() == set()
    hits = shop.search(data[1], k=2).json()["hits"]
    assert (hits[0]["key"], hits[0]["score"]) == ("v/1", pytest.approx(1, abs=1e-5))
    image = shop.client.get(hits[0]["image"])
    assert "added as a vector" in assert_problem(image, 404, "unknown-item")["detail"]
    assert shop.running.metric("kinlens_missing_images_total", gallery=shop.name) == 0
    for path in (f"{shop.url}/items/{hits[0]['id']}", f"{shop.url}/items/by-key/v/1"):
        read = shop.client.get(f"{path}/vector").json()
        assert read["vector"] == pytest.approx(sent(vectors[1]), abs=1e-7)
        assert (read["key"], read["id"], read["bundle_id"]) == ("v/1", hits[0]["id"], "fake")
    again = shop.put_json([{"key": "v/1", "vector": read["vector"]}]).json()
    assert again["unchanged"] == 1


def test_a_vector_and_an_image_replace_each_other(shop, data, vectors) -> None:
    shop.put({"k": data[0]}, price=3)
    assert shop.put_json([{"key": "k", "vector": sent(vectors[1])}]).json()["replaced"] == 1
    assert shop.search(data[1], k=1).json()["hits"][0]["attributes"] == {"price": 3}
    assert shop.compacted() == set()
    [result] = shop.put_json([{"key": "k", "data": base64_of(data[2])}]).json()["items"]
    assert result["status"] == "replaced"
    assert shop.compacted() == {sha256(data[2])}


def test_the_bytes_of_a_stored_vector_are_no_image(shop, vectors) -> None:
    numbers = vectors[0].astype("<f4").tobytes()
    shop.put_json([{"key": "v", "vector": sent(vectors[0])}]).raise_for_status()
    photo = encoded(Image.new("RGB", (1, 1)), "PNG").ljust(len(numbers), b"\0")
    assert len(photo) == len(numbers)
    items = [{"key": "n", "data": base64_of(numbers)}, {"key": "p", "data": base64_of(photo)}]
    for status in ("added", "unchanged"):
        refused, stored = shop.put_json(items).json()["items"]
        assert (refused["status"], stored["status"]) == ("failed", status)
        assert "unsupported-format" in refused["problem"]["type"]
    assert shop.photos() == {sha256(photo)}


def test_a_bad_vector_only_fails_its_own_item(shop, data, vectors) -> None:
    items: list[dict[str, Any]] = [
        {"key": "good", "vector": sent(vectors[0])},
        {"key": "long", "vector": sent(vectors[0] * 2)},
        {"key": "short", "vector": [0.6, 0.8]},
        {"key": "both", "vector": sent(vectors[1]), "data": base64_of(data[1])},
        {"key": "none"},
        {"key": "words", "vector": "??"},
        {"key": "photo", "data": base64_of(data[3])},
    ]
    answer = shop.put_json(items).json()
    messages = {one["key"]: one["problem"] and one["problem"]["detail"] for one in answer["items"]}
    assert messages.pop("good") is None
    assert messages.pop("photo") is None
    for key, text in {
        "long": "norm 2, not 1; divide it by its norm",
        "short": "dimension 2, and the gallery 32",
        "both": "either data or vector",
        "none": "either data or vector",
        "words": "not base64",
    }.items():
        assert text in messages[key]
    assert (answer["added"], answer["failed"]) == (2, 5)
    alone = assert_problem(shop.put_json(items[1:2]), 422, "invalid-parameter")
    assert "norm 2" in alone["detail"]


def test_vectors_of_a_product_get_keys(shop, vectors) -> None:
    body = {"product": "boot", "items": [{"vector": sent(one)} for one in vectors[:2]]}
    answer = shop.client.put(f"{shop.url}/items", json=body).json()
    assert answer["added"] == 2
    assert all(one["key"].startswith("boot/") for one in answer["items"])
    assert shop.client.put(f"{shop.url}/items", json=body).json()["unchanged"] == 2


def test_a_short_gallery_stores_the_first_numbers(tmp_path, data, vectors, closes) -> None:
    embedder = FakeEmbedder()
    publish_photos(tmp_path / "short", embedder.first(8), data[:2])
    settings = {"galleries": (f"short={tmp_path / 'short'}",)}
    shop = closes(start_shop(tmp_path / "state", embedder, **settings))
    items = [{"key": "whole", "vector": sent(vectors[4])}]
    [short] = embedder.first(8).embed(embedder.preprocess(data[5])[None])
    items += [{"key": "own", "vector": sent(short)}]
    put = shop.client.put("/galleries/short/items", json={"items": items}).json()
    assert put["added"] == 2
    for number, key in ((4, "whole"), (5, "own")):
        hits = shop.running.search(data[number], gallery="short").json()["hits"]
        assert (hits[0]["key"], hits[0]["score"]) == (key, pytest.approx(1, abs=1e-5))


def test_a_service_without_a_folder_for_images_stores_vectors(tmp_path, data, closes) -> None:
    make_gallery(tmp_path / "own", "v")
    settings = {"galleries": (f"own={tmp_path / 'own'}",), "anonymous_scopes": ("admin",)}
    service = closes(run(create_app(settings_of(**DEFAULTS | settings), FakeEmbedder())))
    put = {"items": [{"key": "new", "vector": [1.0, *[0.0] * 31]}]}
    assert service.client.put("/galleries/own/items", json=put).json()["added"] == 1
    put = {"items": [{"key": "photo", "data": base64_of(data[0])}]}
    assert_problem(service.client.put("/galleries/own/items", json=put), 409, "state-missing")


def test_the_client_puts_vectors_and_images_in_one_call(shop, data, vectors) -> None:
    with Client(shop.running.url) as client:
        assert client.put(shop.name, "a", vector=vectors[0]).added == 1
        items = [
            NewItem("b", vector=vectors[1], attributes={"price": 1}),
            NewItem("c", data[2]),
            NewItem("d", vector=sent(vectors[3])),
            NewItem("e", vector=sent(vectors[4])),
        ]
        parts: list[int] = []
        answer = client.put_many(shop.name, items, lambda done, _: parts.append(done))
        assert [one.key for one in answer.items] == ["b", "c", "d", "e"]
        assert (answer.added, parts) == (4, [1, 2, 4])
        assert client.vector(shop.name, "d").vector == pytest.approx(sent(vectors[3]), abs=1e-6)
        assert client.item(shop.name, "b").attributes == {"price": 1}
        for item in (NewItem("x"), NewItem("x", data[0], vector=vectors[0])):
            with pytest.raises(ArgumentError, match="either an image or a vector"):
                client.put_many(shop.name, [item])
        with pytest.raises(ArgumentError, match="not a list of numbers"):
            client.put(shop.name, "x", vector=["a"])


def test_a_vector_leaves_only_with_the_scope_embed(tmp_path, data, closes) -> None:
    state = tmp_path / "state"
    shop = closes(start_shop(state))
    shop.put({"seen": data[0]}, tenant=7)
    shop.put({"hidden": data[1]}, tenant=8)
    store = KeyStore(state / "keys.json")
    texts = {scope: store.create(scope, [scope]) for scope in ("search", "write", "embed")}
    limits = Limits(galleries=("shop",), filter="tenant = 7")
    texts["bound"] = store.create("bound", ["embed"], limits=limits)
    for name, text in texts.items():
        with Client(shop.running.url, key=text) as client:
            if name in ("search", "write"):
                with pytest.raises(NotAllowedError, match="this needs embed"):
                    client.vector("shop", "seen")
            else:
                assert len(client.vector("shop", "seen").vector) == 32
    path = f"{shop.url}/items/by-key/hidden/vector"
    hidden = shop.client.get(path, headers={"X-API-Key": texts["bound"]})
    assert_problem(hidden, 404, "unknown-item")
