"""Items counted with a filter, and answers with chosen attributes."""

from typing import Any

import pytest

from kinlens.client import Client
from tests.support.seams import KeyStore, Limits
from tests.support.shops import Shop, assert_problem, start_shop


@pytest.fixture
def filled(shop: Shop, data: list[bytes]) -> Shop:
    for n in range(6):
        shop.put({f"k{n}": data[n]}, colour="red" if n % 2 else "blue", price=n)
    return shop


def count(shop: Shop, body: dict[str, Any]) -> Any:
    return shop.client.post(f"{shop.url}/count", json=body)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (None, 6),
        ("", 6),
        ('colour = "red"', 3),
        ({"price": {"<": 2}}, 2),
        ('colour = "green"', 0),
    ],
)
def test_items_are_counted_with_a_filter(filled, where: Any, expected: int) -> None:
    answer = count(filled, {"filter": where}).json()
    assert answer == {"count": expected, "version": filled.gallery()["version"]}
    with Client(filled.running.url) as client:
        assert client.count(filled.name, where) == expected


def test_without_a_body_all_items_are_counted(filled) -> None:
    assert filled.client.post(f"{filled.url}/count").json()["count"] == 6
    kind = {"content-type": "application/json"}
    assert filled.client.post(f"{filled.url}/count", headers=kind).json()["count"] == 6
    text = filled.client.post(f"{filled.url}/count", content=b"{}", headers={})
    assert text.status_code == 415, "a body needs its type"


def test_a_wrong_count_is_refused_with_the_reason(filled) -> None:
    wrong = count(filled, {"filter": "size = 3"})
    assert "colour" in assert_problem(wrong, 422, "invalid-filter")["detail"]
    wrong = count(filled, {"where": "price = 3"})
    assert "where is not a parameter" in assert_problem(wrong, 422, "invalid-parameter")["detail"]
    wrong = filled.client.post("/galleries/none/count", json={})
    assert_problem(wrong, 404, "unknown-gallery")


def test_answers_have_only_the_chosen_attributes(filled, data) -> None:
    get, url = filled.client.get, f"{filled.url}/items"
    with Client(filled.running.url) as client:
        for fields in (["price"], ["colour"], ["colour", "price"], []):
            text = ",".join(fields)
            hits = filled.search(data[3], k=6, fields=text).json()["hits"]
            listed = get(url, params={"fields": text}).json()["items"]
            one = get(f"{url}/{hits[0]['id']}", params={"fields": text}).json()
            by_key = get(f"{url}/by-key/k3", params={"fields": text}).json()
            similar = get(f"{url}/by-key/k3/similar", params={"fields": text}).json()["hits"]
            for item in (*hits, *listed, *similar, one, by_key):
                assert list(item["attributes"]) == fields
            assert one == by_key
            assert client.item(filled.name, "k3", fields).attributes == one["attributes"]
            found = client.search(data[3], gallery=filled.name, fields=fields).hits
            assert list(found[0].attributes) == fields
            assert all(
                list(i.attributes) == fields for i in client.each_item(filled.name, fields=fields)
            )
        page = client.items(filled.name, fields=["price"], sort_by="price:desc", facets=["colour"])
        assert [item.attributes for item in page.items] == [{"price": n} for n in range(5, -1, -1)]
    body = {"queries": [{"positives": ["k1"], "gallery": filled.name, "fields": ["price"]}]}
    [answer] = filled.client.post("/search/batch", json=body).json()["answers"]
    assert all(list(hit["attributes"]) == ["price"] for hit in answer["answer"]["hits"])
    groups = filled.search(data[3], group_by="colour", fields="price").json()["groups"]
    assert {group["value"] for group in groups} == {"red", "blue"}
    assert all(list(hit["attributes"]) == ["price"] for group in groups for hit in group["hits"])


def test_an_unknown_attribute_is_refused_with_the_known_ones(filled, data) -> None:
    get, url = filled.client.get, f"{filled.url}/items"
    for answer in (
        filled.search(data[0], fields="price,size"),
        get(url, params={"fields": "size"}),
        get(f"{url}/by-key/k0", params={"fields": "size"}),
        get(f"{url}/by-key/k0/similar", params={"fields": "size"}),
    ):
        detail = assert_problem(answer, 422, "invalid-filter")["detail"]
        assert "'size' to return" in detail
        assert "price" in detail
    wrong = filled.search(data[0], fields="[1]")
    assert "fields = [1] must be names" in assert_problem(wrong, 422, "invalid-parameter")["detail"]


def test_a_key_with_a_filter_counts_and_names_only_what_it_sees(tmp_path, data, closes) -> None:
    state = tmp_path / "state"
    shop = closes(start_shop(state))
    shop.put({"a": data[0], "b": data[1]}, tenant=7, price=3)
    shop.put({"c": data[2]}, tenant=8, secret="x")
    limits = Limits(galleries=("shop",), filter="tenant = 7")
    headers = {"X-API-Key": KeyStore(state / "keys.json").create("seven", ["search"], None, limits)}
    for body, expected in (({}, 2), ({"filter": "price = 3"}, 2), ({"filter": "price = 4"}, 0)):
        answer = shop.client.post(f"{shop.url}/count", json=body, headers=headers)
        assert answer.json()["count"] == expected
    refused = shop.client.get(f"{shop.url}/items", params={"fields": "size"}, headers=headers)
    detail = assert_problem(refused, 422, "invalid-filter")["detail"]
    assert "price" in detail
    assert "secret" not in detail
