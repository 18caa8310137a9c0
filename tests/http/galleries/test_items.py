"""Items over HTTP: put, listed, patched, removed; each fails alone, and puts are idempotent."""

import json
import re
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from kinlens.indexer.live import compaction
from kinlens.indexer.uploads import UploadFolder
from kinlens.service.api.items import MAX_KEYS
from kinlens.service.galleries.items import MAX_ATTRIBUTES
from kinlens.service.settings import Settings
from tests.indexer.conftest import generation_of
from tests.support.seams import GalleryFolder, adopt
from tests.support.shops import Shop, assert_problem, base64_of, make_gallery, sha256, start_shop


def listed(shop: Shop, **query: Any) -> dict[str, Any]:
    """The attributes of the items by their keys."""
    return {item["key"]: item["attributes"] for item in shop.items(**query)["items"]}


def patch(shop: Shop, **body: Any) -> httpx.Response:
    return shop.client.patch(f"{shop.url}/items", json=body)


def test_a_new_item_is_listed_shown_and_found_at_once(shop, data) -> None:
    answer = shop.put({"hats/1": data[0]}, colour="red", price=9.5)
    assert (answer["added"], answer["failed"]) == (1, 0)
    [put] = answer["items"]
    page = shop.items()
    assert page["total"] == 1
    [item] = page["items"]
    assert (item["id"], item["key"], item["sha256"]) == (put["id"], "hats/1", sha256(data[0]))
    assert item["attributes"] == {"colour": "red", "price": 9.5}
    assert shop.client.get(f"{shop.url}/items/{put['id']}").json() == item
    photo = shop.client.get(item["image"])
    assert (photo.content, photo.headers["content-type"]) == (data[0], "image/png")
    [hit] = shop.search(data[0], k=5).json()["hits"]
    assert (hit["id"], hit["score"]) == (put["id"], pytest.approx(1.0, abs=1e-4))
    assert answer["version"] == shop.gallery()["version"]


def test_an_unchanged_item_is_not_embedded_again(shop, data, model) -> None:
    items = {f"k/{n}": one for n, one in enumerate(data[:4])}
    assert shop.put(items, price=1)["added"] == 4
    batches, version = len(model.batches), shop.gallery()["version"]
    assert shop.put(items, price=1)["unchanged"] == 4
    as_json = {"key": "k/0", "data": base64_of(data[0]), "attributes": {"price": 1}}
    assert shop.put_json([as_json]).json()["unchanged"] == 1
    assert shop.gallery()["version"] == version
    assert shop.put({"k/0": data[0]}, price=2)["updated"] == 1
    [twin] = shop.put({"k/twin": data[0]}, price=2)["items"]
    assert (twin["status"], len(model.batches)) == ("added", batches)
    [new] = shop.put({"k/twin": data[4]})["items"]  # other content under this key
    assert (new["status"], new["id"] != twin["id"]) == ("replaced", True)
    assert_problem(shop.client.get(f"{shop.url}/items/{twin['id']}"), 404, "unknown-item")
    assert shop.remove("k/0") == 1
    assert shop.compacted() == {sha256(one) for one in data[1:5]}


def test_a_put_without_attributes_keeps_the_stored_ones(shop, data) -> None:
    def put(photo: bytes, *texts: str) -> tuple[str, str]:
        [result] = shop.put_form({"k": photo}, texts).json()["items"]
        return result["status"], result["attributes"]

    given = {"colour": "red", "price": 9.5}
    assert put(data[0], json.dumps(given)) == ("added", "replaced")
    assert put(data[0]) == ("unchanged", "kept")
    assert put(data[1], "null") == ("replaced", "kept")
    assert put(data[0], "") == ("replaced", "kept")  # an empty variable of a script
    [result] = shop.put_json([{"key": "k", "data": base64_of(data[2])}]).json()["items"]
    assert result["attributes"] == "kept"
    form = [("product", (None, "boot")), ("key", (None, "k")), ("image", ("x.png", data[2]))]
    [result] = shop.client.put(f"{shop.url}/items", files=form).json()["items"]
    assert (result["status"], result["attributes"]) == ("updated", "kept")
    assert listed(shop) == {"k": given | {"product": "boot"}}
    assert put(data[2], "{}") == ("updated", "replaced")
    assert listed(shop) == {"k": {}}


def test_several_values_are_put_searched_counted_and_changed(shop, data) -> None:
    for n, sizes in enumerate((["S", "M"], ["M", "M", "L"], "L", [])):
        shop.put({f"k{n}": data[n]}, sizes=sizes)
    for where, expected in (('sizes = "M"', ["k0", "k1"]), ('not sizes = "M"', ["k2", "k3"])):
        found = shop.search(data[0], filter=where, k=9).json()
        assert sorted(hit["key"] for hit in found["hits"]) == expected
    found = shop.search(data[0], facets=["sizes"], group_by="sizes", group_size=9).json()
    facet = found["facets"]["sizes"]
    assert {one["value"]: one["count"] for one in facet["values"]} == {"M": 2, "L": 2, "S": 1}
    assert facet["missing"] == 1
    groups = {group["value"]: len(group["hits"]) for group in found["groups"]}
    assert groups == {"S": 1, "M": 2, "L": 2, None: 1}
    assert patch(shop, changes={"k0": {"sizes": ["XL"]}, "k2": {"sizes": []}}).is_success
    sizes = {key: attributes.get("sizes") for key, attributes in listed(shop).items()}
    assert sizes == {"k0": ["XL"], "k1": ["M", "M", "L"], "k2": None, "k3": None}
    wrong = patch(shop, changes={"k0": {"sizes": ["XL", 5]}})
    detail = assert_problem(wrong, 422, "invalid-parameter")["detail"]
    assert "'XL', a text, and 5, a number" in detail


def test_items_and_hits_are_sorted_by_an_attribute(shop, data) -> None:
    for number, price in enumerate([30, None, 10, 20]):
        shop.put({f"k{number}": data[number]}, **({} if price is None else {"price": price}))
    for order, expected in (
        ("price", ["k2", "k3", "k0", "k1"]),
        ("price:desc", ["k0", "k3", "k2", "k1"]),
    ):
        assert [*listed(shop, sort_by=order, offset=1, limit=2)] == expected[1:3]
        hits = shop.search(data[0], sort_by=order).json()["hits"]
        assert [hit["key"] for hit in hits] == expected
    for answer, text in (
        (shop.client.get(f"{shop.url}/items", params={"sort_by": "size"}), "'size' to sort by"),
        (shop.client.get(f"{shop.url}/items", params={"sort_by": "price", "after": 1}), "after"),
        (shop.search(data[0], sort_by="price", diversity=0.2), "sort_by cannot be combined"),
        (shop.search(data[0], sort_by="price", min_probability=0.2), "min_score with sort_by"),
    ):
        assert answer.status_code == 422
        assert text in answer.json()["detail"]


def test_items_are_reached_by_key_on_every_route(shop, data) -> None:
    """Keys of several parts, of odd characters, and of words that are parts of addresses."""
    keys = ["shoes/red/17.png", "a b%2Fc?d#e", "by-key", "größe/👟", "17"]
    for number, key in enumerate(keys):
        shop.put({key: data[number]}, n=number)

    def on_every_route(address: str) -> list[httpx.Response]:
        url, ask = f"{shop.url}/items/by-key/{address}", shop.client
        return [
            *(
                ask.get(f"{url}{part}")
                for part in ("", "/similar?k=9", "/image", "/image?size=160")
            ),
            ask.patch(url, json={"new": 1}),
            ask.post(f"{url}/explain", files={"image": ("a", data[0])}),
        ]

    for number, key in enumerate(keys):
        for address in {quote(key, safe=""), quote(key, safe="/") if "%" not in key else ""} - {""}:
            item, similar, image, small, changed, explained = on_every_route(address)
            assert item.json()["key"] == explained.json()["key"] == key
            assert {hit["key"] for hit in similar.json()["hits"]} == {*keys} - {key}
            assert image.content == data[number]
            assert small.status_code == changed.status_code == 200
        assert listed(shop)[key] == {"n": number, "new": 1}
    for key in keys:
        url = f"{shop.url}/items/by-key/{quote(key, safe='')}"
        assert shop.client.delete(url).json()["removed"] == 1
        for answer in (*on_every_route(quote(key, safe="")), shop.client.delete(url)):
            assert_problem(answer, 404, "unknown-item")


def test_one_request_changes_all_items_of_a_filter(shop, data) -> None:
    for number, one in enumerate(data[:4]):
        shop.put({f"k{number}": one}, product=f"p{number % 2}", stock=number)
    sold_out = {"filter": 'product = "p1"', "set": {"stock": 0, "sale": True}}
    assert [patch(shop, **sold_out).json()["changed"] for _ in range(2)] == [2, 0]
    p0, p1 = {"product": "p0"}, {"product": "p1", "stock": 0, "sale": True}
    before = {"k0": p0 | {"stock": 0}, "k1": p1, "k2": p0 | {"stock": 2}, "k3": p1}
    assert listed(shop) == before
    many = {f"a{n}": n for n in range(MAX_ATTRIBUTES)}
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"filter": 'size = "M"', "set": {"stock": 1}}, "invalid-filter", "'size'"),
        ({"filter": "", "set": {"stock": 1}}, "invalid-filter", "The filter is empty"),
        ({"filter": "stock = 0", "set": {"stock": "few"}}, "invalid-parameter", "'stock'"),
        ({"set": {"stock": 5}}, "invalid-parameter", "Send either changes"),
        ({"filter": "stock = 0", "set": {}}, "invalid-parameter", "set"),
        ({"filter": "stock = 0", "set": many}, "invalid-parameter", str(MAX_ATTRIBUTES)),
    ]
    for body, name, text in wrong:
        assert text in assert_problem(patch(shop, **body), 422, name)["detail"]
    assert listed(shop) == before
    assert patch(shop, filter={"sale": True}, set={"sale": None}).json()["changed"] == 2


def test_one_request_changes_the_items_of_products_all_or_none(shop, data) -> None:
    for number, one in enumerate(data[:4]):
        shop.put({f"k{number}": one}, product=f"p{number % 2}", price=number)
    change = {"products": {"p1": {"price": 9}}}
    assert [patch(shop, **change).json()["changed"] for _ in range(2)] == [2, 0]
    before = listed(shop)
    assert [before[f"k{n}"]["price"] for n in range(4)] == [0, 9, 2, 9]
    for body, status, text in (
        ({"products": {"p0": {"price": 1}, "nope": {"price": 1}}}, 404, "the product 'nope'"),
        ({"products": {"p0": {"price": "low"}}}, 422, "'price'"),
        ({"products": {}}, 422, "products"),
        ({"products": {"p0": {"price": 1}}, "changes": {"k0": {"price": 1}}}, 422, "Send either"),
    ):
        answer = patch(shop, **body)
        assert (answer.status_code, text in answer.json()["detail"]) == (status, True), answer.text
    assert listed(shop) == before


def test_a_key_and_a_text_are_one_in_both_unicode_forms(shop, data) -> None:
    composed, decomposed = "Caf\xe9", "Cafe\u0301"
    assert shop.put({f"{decomposed}/1": data[0]}, brand=decomposed)["added"] == 1
    assert listed(shop) == {f"{composed}/1": {"brand": composed}}
    for name in (composed, decomposed):
        address = f"{shop.url}/items/by-key/{quote(name)}/1"
        assert shop.client.get(address).json()["key"] == f"{composed}/1"
        assert shop.put({f"{name}/1": data[0]}, brand=name)["unchanged"] == 1
        assert len(shop.items(filter=f'brand = "{name}"')["items"]) == 1
        assert len(shop.items(filter=f'brand starts with "{name}"')["items"]) == 1
        assert len(shop.items(key_prefix=name)["items"]) == 1
    assert patch(shop, changes={f"{decomposed}/1": {"note": decomposed}}).json()["changed"] == 1
    assert listed(shop)[f"{composed}/1"]["note"] == composed
    assert shop.remove(f"{decomposed}/1") == 1


def test_an_item_with_wrong_attributes_is_named_by_its_product_and_image(shop, data) -> None:
    parts = [("image", ("x.png", one)) for one in data[:2]] + [("product", (None, "mug"))]
    parts += [("attributes", (None, text)) for text in ('{"bad', "{}")]
    wrong, _ = shop.client.put(f"{shop.url}/items", files=parts).json()["items"]
    assert (wrong["status"], wrong["key"]) == ("failed", f"mug/{sha256(data[0])[:16]}")
    assert "attributes" in wrong["problem"]["detail"]


def test_an_invalid_item_fails_alone_with_its_reason(shop, data) -> None:
    answer = shop.put_form({"good": data[0], "bad": b"no image", "empty": b"", "fine": data[1]})
    content = answer.json()
    assert [item["status"] for item in content["items"]] == ["added", "failed", "failed", "added"]
    problems = [item["problem"] for item in content["items"]]
    assert [problem and problem["status"] for problem in problems] == [None, 415, 400, None]
    assert problems[1]["request_id"] == answer.headers["x-request-id"]
    twice = shop.put_json([{"key": "k", "data": base64_of(one)} for one in data[2:4]]).json()
    kinds = shop.put_form({"a": data[4], "b": data[5]}, ['{"n": 1}', '{"n": "one"}']).json()
    for content, text in ((twice, "twice"), (kinds, "'n'")):
        assert [item["status"] for item in content["items"]] == ["added", "failed"]
        assert text in content["items"][1]["problem"]["detail"]
    # The problem of a single item is that of the request.
    assert_problem(shop.put_form({"x": b"no image"}), 415, "unsupported-format")
    assert_problem(shop.put_form({"x": data[6][:-40]}), 422, "corrupt-image")
    assert [*listed(shop)] == ["good", "fine", "k", "a"]
    assert shop.photos() == {sha256(data[n]) for n in (0, 1, 2, 4)}


def test_what_cannot_be_stored_is_refused_with_its_limit(shop, data) -> None:
    one, url = {"key": "k", "data": base64_of(data[0])}, f"{shop.url}/items"
    image, key = ("image", ("x", data[0])), ("key", (None, "a"))
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"json": {"items": [one | {"key": "k" * 1025}]}}, "1,024"),
        ({"json": {"items": [one | {"key": "a/../b"}]}}, "'..'"),
        ({"json": {"items": [one | {"attributes": {f"a{n}": n for n in range(65)}}]}}, "64"),
        ({"json": {"items": [one | {"attributes": {"text": "x" * 4097}}]}}, "4,096"),
        ({"json": {"items": [one | {"attributes": {"n" * 129: 1}}]}}, "128"),
        ({"json": {"items": [one | {"attributes": {"price": 2**70}}]}}, "64 bits"),
        ({"json": {"items": [one] * 9}}, "from 1 to 8"),
        ({"json": {"items": [one | {"colour": "red"}]}}, "colour"),
        ({"files": [image]}, "key"),
        ({"files": [image, key, ("key", (None, "b"))]}, "key"),
        ({"files": [image, key, ("attributes", (None, "["))]}, "attributes"),
        ({"files": [key]}, "0 items"),
    ]
    for body, text in bodies:
        answer = shop.client.put(url, **body)
        assert text in assert_problem(answer, 422, "invalid-parameter")["detail"]
    for media_type, status in (("image/png", 415), ("", 415), ("multipart/form-data", 400)):
        response = shop.client.put(url, content=b"x", headers={"content-type": media_type})
        assert response.status_code == status, media_type
    assert shop.items()["total"] == 0


def test_a_page_respects_filter_prefix_and_range(shop, data) -> None:
    for n, one in enumerate(data):
        shop.put({f"{'odd' if n % 2 else 'even'}/{n}": one}, n=n)
    page = shop.items(offset=1, limit=2, key_prefix="even/", filter="n < 6")
    assert (page["total"], page["offset"]) == (3, 1)
    assert [item["key"] for item in page["items"]] == ["even/2", "even/4"]
    assert shop.items(filter=json.dumps({"n": {">=": 6}}))["total"] == 2
    wrong = ({"limit": 201}, {"offset": -1}, {"key_prefix": "x" * 1025}, {"after": "x"})
    for query in (*wrong, {"filter": "m = 1"}, {"filter": "{"}):
        response = shop.client.get(f"{shop.url}/items", params=query)
        assert_problem(response, 422, f"invalid-{'filter' if 'filter' in query else 'parameter'}")
    # Pages after the last number miss nothing that stays.
    for query in ({}, {"key_prefix": "even/"}, {"filter": "n >= 0"}):
        page, whole = shop.items(limit=2, **query), shop.items(**query)
        assert page["last"] == whole["items"][-1]["id"]
        rest = shop.items(after=page["items"][-1]["id"], **query)
        assert rest["items"] == whole["items"][2:]
        assert (rest["total"], rest["last"]) == (whole["total"], whole["last"])
        assert shop.items(after=page["last"], **query)["items"] == []


def test_a_patch_is_applied_completely_or_not_at_all(shop, data) -> None:
    shop.put({"a": data[0], "b": data[1]}, price=1, sale=True)
    assert patch(shop, changes={"a": {"price": 2, "sale": None}}).json()["changed"] == 1
    before = {"a": {"price": 2}, "b": {"price": 1, "sale": True}}
    wrong: list[tuple[Any, int, str]] = [
        ({"b": {"price": 5}, "a": {"price": "x"}}, 422, "invalid-parameter"),
        ({"b": {"price": 5}, "z": {"price": 5}}, 404, "unknown-item"),
        ({"b": {f"a{n}": n for n in range(MAX_ATTRIBUTES)}}, 422, "invalid-parameter"),
        ({}, 422, "invalid-parameter"),
    ]
    for changes, status, slug in wrong:
        assert_problem(patch(shop, changes=changes), status, slug)
    assert listed(shop) == before


def test_items_are_removed_by_key_number_list_and_filter(shop, data) -> None:
    url = f"{shop.url}/items"
    answer = shop.put({f"k{n}": one for n, one in enumerate(data)}, stock=0)
    shop.put({"k4": data[4]}, stock=3)
    wrong: list[dict[str, Any]] = [
        {"keys": ["k0"], "filter": "stock = 0"},
        {"keys": ["k0"] * (MAX_KEYS + 1)},
        *({"filter": where} for where in ("", {}, "unknown = 1", "(")),
    ]
    for body in wrong:
        assert shop.client.post(f"{url}/delete", json=body).status_code == 422
    by_filter = shop.client.delete(url, params={"filter": "stock = 0"})
    detail = assert_problem(by_filter, 422, "invalid-parameter")["detail"]
    assert "in the URL, as ?key=" in detail
    assert shop.items()["total"] == len(data), "an invalid removal removes nothing"
    number = answer["items"][2]["id"]
    assert shop.remove("k0", "k1", "unknown") == 2
    assert shop.client.delete(f"{url}/{number}").json()["removed"] == 1
    assert_problem(shop.client.delete(f"{url}/{number}"), 404, "unknown-item")
    for body, count in (({"keys": ["k3", "k3"]}, 1), ({"filter": {"stock": 0}}, 3)):
        assert shop.client.post(f"{url}/delete", json=body).json()["removed"] == count
    assert [*listed(shop)] == ["k4"]
    assert shop.compacted() == {sha256(data[4])}
    assert [hit["key"] for hit in shop.search(data[0]).json()["hits"]] == ["k4"]


def test_a_removal_can_be_undone_until_a_compaction(shop, data) -> None:
    shop.put({f"k{n}": one for n, one in enumerate(data[:4])}, stock=2)
    shop.remove("k1", "k2")
    UploadFolder(shop.folder).sweep()
    url = f"{shop.url}/items/restore"
    answer = shop.client.post(url, json={"keys": ["k1", "k0", "new"]}).json()
    [item] = answer["items"]
    assert (answer["restored"], answer["version"]) == (1, shop.gallery()["version"])
    assert (item["key"], item["attributes"]) == ("k1", {"stock": 2})
    assert shop.client.get(item["image"]).content == data[1]
    assert shop.search(data[1]).json()["hits"][0]["key"] == "k1"
    assert shop.compacted() == {sha256(data[n]) for n in (0, 1, 3)}
    late = shop.client.post(url, json={"keys": ["k2"]}).json()
    assert (late["restored"], late["items"]) == (0, [])
    for body in ({}, {"keys": []}, {"keys": "k1"}):
        assert_problem(shop.client.post(url, json=body), 422, "invalid-parameter")


def test_two_removals_of_duplicates_keep_one_copy(shop, data) -> None:
    shop.put({"a": data[0], "a again": data[0]})
    url = f"{shop.url}/items/delete"
    first = shop.client.post(url, json={"keys": ["a"], "keep": ["a again"]})
    assert first.json()["removed"] == 1
    second = shop.client.post(url, json={"keys": ["a again"], "keep": ["a"]})
    assert "Nothing was removed" in assert_problem(second, 409, "gallery-conflict")["detail"]
    assert [*listed(shop)] == ["a again"]


def test_a_write_is_refused_during_a_replacement_and_goes_into_it_afterwards(shop, data) -> None:
    shop.put({"old": data[0]})
    with GalleryFolder(shop.folder).locked():
        response = shop.put_form({"new": data[1]})
        assert_problem(response, 503, "gallery-busy")
        assert int(response.headers["retry-after"]) >= 1
        assert shop.search(data[0]).status_code == 200
    make_gallery(shop.folder, "", count=0)
    assert shop.put({"new": data[1]})["added"] == 1
    assert [*listed(shop)] == ["new"]


def test_new_items_are_429_while_the_delta_is_full_and_other_changes_go_on(
    shop, data, model, monkeypatch
) -> None:
    monkeypatch.setattr("kinlens.indexer.live.upkeep._SMALL_DELTA", 1)
    stored = {f"k{n}": data[n % 4] for n in range(8)}
    with compaction.compaction_lock(generation_of(shop.folder), wait=False):  # so none can begin
        assert shop.put(stored)["added"] == 8
        embedded = len(model.batches)
        refused = shop.put_form({"new": data[4]})
        detail = assert_problem(refused, 429, "delta-full")["detail"]
        assert re.search("has 8 items .* from 8 on.* kinlens-index compact", detail)
        assert int(refused.headers["retry-after"]) >= 1
        assert (len(model.batches), shop.photos()) == (embedded, {*map(sha256, data[:4])})
        assert shop.put(stored, price=2)["updated"] == 8
        assert patch(shop, changes={"k0": {"price": 3}}).status_code == 200
        assert shop.remove("k1") == 1
        assert shop.put_form({"twin": data[0]}).status_code == 200  # in place of k1
        undo = shop.client.post(f"{shop.url}/items/restore", json={"keys": ["k1"]})
        assert_problem(undo, 429, "delta-full")
    shop.compacted()
    assert shop.put({"new": data[4]})["added"] == 1
    assert [*listed(shop)] == ["k0", *(f"k{n}" for n in range(2, 8)), "twin", "new"]


def test_an_id_of_another_generation_removes_nothing(tmp_path, data, closes, monkeypatch) -> None:
    """After a swap, the id belongs to another item."""
    monkeypatch.setattr(Settings, "reload_interval_ms", 600_000)  # it does not see the swap
    shop = closes(start_shop(tmp_path / "state"))
    shop.put({"old": data[0]})
    other = shop.create("other")
    other.put({"precious": data[1]})
    [old], [precious] = shop.items()["items"], other.items()["items"]
    assert old["id"] == precious["id"]
    before = shop.gallery()["generation"]
    adopt(shop.folder, other.folder)
    url = f"{shop.url}/items/{old['id']}"
    problem = assert_problem(shop.client.delete(url), 404, "unknown-item")
    after = GalleryFolder(shop.folder).current_name()
    assert before in problem["detail"]
    assert after in problem["detail"]
    shop.put({"other": data[2]})  # now the new generation is served
    named = shop.client.delete(url, params={"version": before})
    assert before in assert_problem(named, 404, "unknown-item")["detail"]
    assert [*listed(shop)] == ["precious", "other"]
    assert shop.client.delete(url, params={"version": after}).json()["removed"] == 1
    assert [*listed(shop)] == ["other"]
