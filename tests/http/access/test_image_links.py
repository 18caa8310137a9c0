"""Signed image links: what they open, for how long, and for whom."""

import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from kinlens.service.access import links
from tests.support.seams import KeyStore, Limits
from tests.support.shops import Shop, assert_problem, start_shop
from tests.support.waiting import until
from tests.tiny import encoded, photo

FILTER = Limits(galleries=("shop",), filter="public = true")


@pytest.fixture
def keys(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "keys.json")


@pytest.fixture
def shop(tmp_path: Path, keys: KeyStore, closes: Any) -> Shop:
    """Two public items and an internal one; only keys can search."""
    admin = keys.create("owner", ["admin"])
    made = closes(
        start_shop(
            tmp_path,
            create=False,
            anonymous_scopes=(),
            image_links="signed",
            rate_limit_per_key="30/hour",
            rate_limit_per_address="1000/hour",
        )
    )
    made.client.headers["X-API-Key"] = admin
    made.create("shop")
    for number in range(3):
        made.put({f"{number}.png": encoded(photo(number))}, public=number < 2)
    del made.client.headers["X-API-Key"]
    return made


def searched(shop: Shop, key: str) -> dict[str, str]:
    """The image links of a search, by key of the item."""
    body = {"files": {"image": encoded(photo(0))}, "headers": {"X-API-Key": key}}
    answer = shop.client.post("/search", params={"gallery": "shop"}, **body).json()
    return {hit["key"]: hit["image"] for hit in answer["hits"]}


def changed(link: str, **parameters: str) -> str:
    parts = urlsplit(link)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    return f"{parts.path}?{urlencode(query | parameters)}"


def test_a_link_shows_one_item_and_counts_for_the_address(shop: Shop, keys: KeyStore) -> None:
    one, other = keys.create("one", ["search"], limits=FILTER), keys.create("two", ["search"])
    found = searched(shop, one)
    assert set(found) == {"0.png", "1.png"}
    link = found["0.png"]
    like = {
        "image": found["1.png"].split("&")[0],
        "},": ["},", "}"],
        "text": '},"image":"/galleries',
    }
    headers = {"X-API-Key": keys.create("writer", ["write", "search"])}
    item = "/galleries/shop/items/by-key/0.png"
    refused = shop.client.patch(item, json={"attributes": {"a": 1}}, headers=headers)
    assert refused.status_code == 422
    assert "must be a string, a number or true/false" in refused.text
    shop.client.patch(item, json=like, headers=headers).raise_for_status()
    for _ in range(2):  # attributes that look like a link stay as they are
        query = {"files": {"image": encoded(photo(0))}, "headers": headers}
        hits = shop.client.post("/search", **query).json()["hits"]
        [stored] = [hit["attributes"] for hit in hits if hit["key"] == "0.png"]
        assert {name: stored[name] for name in like} == like
    whole = searched(shop, other)  # the answer to `one` is cached; its signatures are not
    assert (
        parse_qs(urlsplit(link).query)["signed_by"]
        != parse_qs(urlsplit(whole["2.png"]).query)["signed_by"]
    )
    assert searched(shop, one)["0.png"] == link, "so a browser finds it in its cache"
    wrong = (
        changed(link, signature="ü"),
        changed(link, signature=""),
        changed(link, expires="99999999999"),
        changed(link, expires="٣"),
        changed(link, generation="0" * 12),
        changed(link, signed_by="00000000"),
        changed(link, signed_by=parse_qs(urlsplit(whole["0.png"]).query)["signed_by"][0]),
        f"{found['1.png'].split('?')[0]}?{link.split('?')[1]}",
        found["1.png"].replace("/galleries/shop/", "/galleries/other/"),
        link.split("&")[0],
    )
    for bad in wrong:
        assert shop.client.get(bad).status_code in (401, 403), bad
    assert shop.client.delete(link.replace("/image", "")).status_code in (401, 403)
    for remaining in (999, 998):
        answer = shop.client.get(f"{link}&size=320")
        assert answer.status_code == 200
        assert answer.headers["ratelimit-remaining"] == str(remaining), (
            "not of all who have the key"
        )


def test_a_link_ends_with_its_day_its_key_and_its_item(
    shop: Shop, keys: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keys.create("page", ["search"], limits=FILTER)
    links_of = searched(shop, key)
    with monkeypatch.context() as patch:
        patch.setattr(links.time, "time", lambda: time.monotonic())  # made in 1970
        old = searched(shop, key)["0.png"]
    problem = assert_problem(shop.client.get(old), 401, "key-needed")
    assert "expired" in problem["detail"]
    keys.rotate("page")
    assert shop.client.get(links_of["0.png"]).status_code == 200, "the old secret is still valid"
    owner = {"X-API-Key": keys.rotate("owner")}
    items = f"{shop.url}/items"
    until(lambda: shop.client.get(items, headers=owner).status_code == 200)
    hide = {"changes": {"0.png": {"public": False}}}
    shop.client.patch(items, json=hide, headers=owner).raise_for_status()
    assert shop.client.get(links_of["0.png"]).status_code == 404, "no longer an item of the key"
    shop.client.request("DELETE", items, params={"key": "1.png"}, headers=owner).raise_for_status()
    assert shop.client.get(links_of["1.png"]).status_code == 404
    keys.revoke("page")
    until(lambda: shop.client.get(links_of["0.png"]).status_code == 401)


def test_links_are_plain_unless_they_are_asked_for(tmp_path: Path, closes: Any) -> None:
    shop = closes(start_shop(tmp_path))
    shop.put({"0.png": encoded(photo(0))})
    assert "signature" not in shop.link("0.png")
