"""Items whose image the service embeds and does not keep, and where their image is instead."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kinlens.service.access.links import image_address
from kinlens.service.settings import Settings
from tests.support.seams import publish
from tests.support.shops import Shop, assert_problem, base64_of, sha256, start_shop

CDN = "https://cdn.example"


def put(shop: Shop, key: str, data: bytes, keep: str, **attributes: Any) -> str:
    """The status of a put of one item by a form with the field `keep`."""
    parts = [("image", ("x.png", data)), ("key", (None, key)), ("keep", (None, keep))]
    parts.append(("attributes", (None, json.dumps(attributes))))
    answer = shop.client.put(f"{shop.url}/items", files=parts)
    assert answer.status_code == 200, answer.text
    [result] = answer.json()["items"]
    return str(result["status"])


def test_an_image_that_is_not_kept_is_found_and_nowhere_stored(shop, data) -> None:
    shop.put({"kept": data[0]})
    assert put(shop, "a/1", data[1], "false", colour="red") == "added"
    as_json = {"keep": False, "items": [{"key": "a/2", "data": base64_of(data[2])}]}
    answer = shop.client.put(f"{shop.url}/items", json=as_json)
    assert answer.json()["added"] == 1
    assert shop.photos() == {sha256(data[0])}
    stored = [path.read_bytes() for path in shop.state.rglob("*") if path.is_file()]
    assert not any(data[1] in content or data[2] in content for content in stored)

    hits = {hit["key"]: hit for hit in shop.search(data[1], k=3).json()["hits"]}
    assert {key: hit.get("has_image", True) for key, hit in hits.items()} == {
        "kept": True,
        "a/1": False,
        "a/2": False,
    }
    assert hits["a/1"]["score"] == pytest.approx(1.0, abs=1e-4)
    assert "image_url" not in hits["a/1"]
    item = shop.client.get(f"{shop.url}/items/by-key/a/1").json()
    assert (item["has_image"], item["attributes"]) == (False, {"colour": "red"})
    assert "has_image" not in shop.client.get(f"{shop.url}/items/by-key/kept").json()
    for size in ("", "&size=160"):
        assert_problem(shop.client.get(item["image"] + size), 404, "unknown-item")
    assert shop.running.metric("kinlens_missing_images_total", gallery=shop.name) == 0
    similar = shop.client.get(f"{shop.url}/items/by-key/a/1/similar").json()
    assert {hit["key"] for hit in similar["hits"]} == {"kept", "a/2"}


def test_the_last_put_decides_whether_an_image_is_kept(shop, data) -> None:
    assert put(shop, "k", data[0], "true") == "added"
    assert shop.photos() == {sha256(data[0])}
    assert put(shop, "k", data[0], "false") == "updated"
    assert put(shop, "k", data[0], "false") == "unchanged"
    assert shop.compacted() == set()
    assert put(shop, "k", data[0], "true") == "replaced"
    assert shop.client.get(shop.link("k")).content == data[0]
    assert put(shop, "twin", data[0], "false") == "added"
    assert shop.compacted() == {sha256(data[0])}, "another item shows it"
    assert shop.remove("k") == 1
    assert shop.compacted() == set()


@pytest.mark.parametrize("keep", ["", "no", "False", "0"])
def test_an_unclear_wish_to_keep_is_refused(shop, data, keep: str) -> None:
    parts = [("image", ("x.png", data[0])), ("key", (None, "k")), ("keep", (None, keep))]
    problem = assert_problem(
        shop.client.put(f"{shop.url}/items", files=parts), 422, "invalid-parameter"
    )
    assert "must be true or false" in problem["detail"]
    as_json = {"keep": "perhaps", "items": [{"key": "k", "data": base64_of(data[0])}]}
    assert shop.client.put(f"{shop.url}/items", json=as_json).status_code == 422
    assert shop.items()["total"] == 0


@pytest.mark.parametrize(
    ("image_url", "shown"),
    [
        (f"{CDN}/{{key}}?w={{w}}", f"{CDN}/a/1%20%C3%BC?w=5"),
        ("photo", f"{CDN}/1.jpg"),
        ("script", None),
        ("missing", None),
        (f"{CDN}/{{missing}}.jpg", None),
        ("", None),
    ],
)
def test_an_item_without_an_image_names_that_of_the_shop(
    tmp_path, data, closes, image_url: str, shown: str | None
) -> None:
    shop = closes(start_shop(tmp_path, image_url=image_url))
    more = {"w": 5, "photo": f"{CDN}/1.jpg", "script": "javascript:alert(1)"}
    put(shop, "a/1 ü", data[0], "false", **more)
    put(shop, "kept", data[1], "true", **more)
    for _ in range(2):  # the second answer is from the cache
        [hit, kept] = shop.search(data[0], k=2).json()["hits"]
        assert (hit["key"], hit.get("image_url")) == ("a/1 ü", shown)
        assert "image_url" not in kept
    [item, kept] = shop.items()["items"]
    assert (item.get("image_url"), kept.get("image_url")) == (shown, None)
    policy = shop.client.get("/").headers["content-security-policy"]
    origins = f" {CDN}" if image_url.startswith(CDN) else ""
    assert f"img-src 'self'{origins} blob: data:;" in policy


def test_pages_load_images_from_no_other_origin_than_named_ones(tmp_path, closes) -> None:
    origins = (CDN, "https://img.example:8443")
    shop = closes(start_shop(tmp_path, image_url=f"{CDN}/{{key}}", image_origins=origins))
    policy = shop.client.get("/").headers["content-security-policy"]
    assert f"img-src 'self' {' '.join(origins)} blob: data:;" in policy
    for wrong in ("*", "https://a.example/path", "data:", "https://a.example; script-src *"):
        with pytest.raises(ValidationError):
            Settings(image_origins=(wrong,))
    for wrong in ("/images/{key}", "https://{key}/a", "https://a;b/{key}", "ftp://a/{key}", "a:b"):
        with pytest.raises(ValidationError):
            Settings(image_url=wrong)


def test_an_address_cannot_be_of_another_scheme_or_host() -> None:
    for value in (
        "//evil.example/x",
        "/x",
        "data:image/png;base64,",
        "https:///x",
        5,
        ["https://a"],
    ):
        assert image_address("photo", "k", {"photo": value}) is None
    address = image_address(f"{CDN}/{{photo}}", "k", {"photo": "x#@evil.example?\r\n"})
    assert address == f"{CDN}/x%23%40evil.example%3F%0D%0A"


def test_published_images_that_are_no_longer_kept_go_after_the_next_compaction(
    shop: Shop, data: list[bytes], tmp_path: Path
) -> None:
    address, folder = tmp_path / "published", shop.state / "galleries" / shop.name

    def published() -> set[str]:
        publish(folder, str(address), with_images=True)
        return {file.name for file in address.glob("pictures/??/*")}

    for number, key in enumerate(("unkept", "removed", "kept")):
        put(shop, key, data[number], "true")
    every = {sha256(data[number]) for number in range(3)}
    assert published() == every
    put(shop, "unkept", data[0], "false")
    shop.remove("removed")
    assert published() == every, "the removed item can be restored"
    shop.compacted()  # which erases it
    assert published() == {sha256(data[2])}
    put(shop, "unkept", data[0], "true")
    assert published() == {sha256(data[0]), sha256(data[2])}
