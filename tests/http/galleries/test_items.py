"""Items over HTTP: put, listed, patched, removed; each fails alone, and puts are idempotent."""

import json
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any
from urllib.parse import quote

import pytest

from kinlens.indexer.gallery import Gallery, delete_gallery
from kinlens.service.api.items import MAX_KEYS
from kinlens.service.galleries.items import MAX_ATTRIBUTES
from kinlens.service.galleries.renditions import SIDES_PX
from kinlens.service.galleries.uploads import UploadFolder
from tests.support.seams import GalleryFolder, adopt
from tests.support.servers import GatedEmbedder
from tests.support.shops import Shop, assert_problem, base64_of, make_gallery, sha256, start_shop


def keys(shop: Shop, **query: Any) -> list[str]:
    return [item["key"] for item in shop.items(**query)["items"]]


def numbered(shop: Shop, data: list[bytes]) -> None:
    """One item after the other, half of them even."""
    for n, one in enumerate(data):
        shop.put({f"{'odd' if n % 2 else 'even'}/{n}": one}, n=n)


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
    def attributes() -> Any:
        [item] = shop.items()["items"]
        return item["attributes"]

    def put(photo: bytes, *texts: str) -> tuple[str, str]:
        [result] = shop.put_form({"k": photo}, texts).json()["items"]
        return result["status"], result["attributes"]

    given = {"colour": "red", "price": 9.5}
    assert put(data[0]) == ("added", "replaced")
    assert put(data[0], json.dumps(given)) == ("updated", "replaced")
    assert put(data[0]) == ("unchanged", "kept")
    assert put(data[1]) == ("replaced", "kept")
    assert put(data[2], "null") == ("replaced", "kept")
    assert put(data[0], "") == ("replaced", "kept")  # an empty variable of a script
    assert attributes() == given
    body = {"key": "k", "data": base64_of(data[3])}
    for sent in (body, body | {"attributes": None}):
        [result] = shop.put_json([sent]).json()["items"]
        assert result["attributes"] == "kept"
    assert attributes() == given
    form = [("product", (None, "boot")), ("key", (None, "k")), ("image", ("x.png", data[3]))]
    [result] = shop.client.put(f"{shop.url}/items", files=form).json()["items"]
    assert (result["status"], result["attributes"]) == ("updated", "kept")
    assert attributes() == given | {"product": "boot"}
    assert put(data[3], '{"colour": "blue"}') == ("updated", "replaced")
    assert attributes() == {"colour": "blue"}
    assert put(data[3], "{}") == ("updated", "replaced")
    assert attributes() == {}


def test_several_values_are_put_searched_counted_and_changed(shop, data) -> None:
    sizes = [["S", "M"], ["M", "M", "L"], "L", []]
    items = [
        {"key": f"k{n}", "data": base64_of(data[n]), "attributes": {"sizes": own}}
        for n, own in enumerate(sizes)
    ]
    put = shop.put_json(items).json()
    assert put["added"] == 4, put
    for _ in range(2):
        listed = {item["key"]: item["attributes"].get("sizes") for item in shop.items()["items"]}
        assert listed == {"k0": ["S", "M"], "k1": ["M", "M", "L"], "k2": "L", "k3": None}
        for where, expected in (
            ('sizes = "M"', {"k0", "k1"}),
            ('sizes in ("S", "L")', {"k0", "k1", "k2"}),
            ('not sizes = "M"', {"k2", "k3"}),
        ):
            found = shop.search(data[0], filter=where, k=9, facets=["sizes"]).json()
            assert {hit["key"] for hit in found["hits"]} == expected, where
        facet = shop.search(data[0], facets=["sizes"]).json()["facets"]["sizes"]
        assert {one["value"]: one["count"] for one in facet["values"]} == {"M": 2, "L": 2, "S": 1}
        assert facet["missing"] == 1
        groups = shop.search(data[0], group_by="sizes", group_size=9).json()["groups"]
        counts = {group["value"]: len(group["hits"]) for group in groups}
        assert counts == {"S": 1, "M": 2, "L": 2, None: 1}
        shop.compacted()
    url = f"{shop.url}/items"
    change = {"changes": {"k0": {"sizes": ["XL"]}, "k2": {"sizes": []}}}
    assert shop.client.patch(url, json=change).json()["changed"] == 2
    listed = {item["key"]: item["attributes"].get("sizes") for item in shop.items()["items"]}
    assert listed == {"k0": ["XL"], "k1": ["M", "M", "L"], "k2": None, "k3": None}
    wrong = {"changes": {"k0": {"sizes": ["XL", 5]}}}
    problem = assert_problem(shop.client.patch(url, json=wrong), 422, "invalid-parameter")
    assert "'XL', a text, and 5, a number" in problem["detail"]


def test_items_and_hits_are_sorted_by_an_attribute(shop, data) -> None:
    prices = [30, None, 10, 20]
    for number, price in enumerate(prices):
        shop.put({f"k{number}": data[number]}, **({} if price is None else {"price": price}))
    for order, expected in (
        ("price", ["k2", "k3", "k0", "k1"]),
        ("price:asc", ["k2", "k3", "k0", "k1"]),
        ("price:desc", ["k0", "k3", "k2", "k1"]),
    ):
        assert keys(shop, sort_by=order) == expected
        assert keys(shop, sort_by=order, offset=1, limit=2) == expected[1:3]
        hits = shop.search(data[0], sort_by=order).json()["hits"]
        assert [hit["key"] for hit in hits] == expected
    problems = (
        (shop.client.get(f"{shop.url}/items", params={"sort_by": "size"}), "'size' to sort by"),
        (shop.client.get(f"{shop.url}/items", params={"sort_by": "price", "after": 1}), "after"),
        (shop.search(data[0], sort_by="size"), "'size' to sort by"),
        (shop.search(data[0], sort_by="price", diversity=0.2), "sort_by cannot be combined"),
        (shop.search(data[0], sort_by="price", min_probability=0.2), "min_score with sort_by"),
    )
    for answer, text in problems:
        assert answer.status_code == 422
        assert text in answer.json()["detail"]


def test_items_are_reached_by_key_on_every_route(shop, data) -> None:
    """Keys of several parts, of odd characters, and of words that are parts of addresses."""
    keys_ = ["shoes/red/17.png", "a b%2Fc?d#e", "by-key", "größe/👟", "17"]
    for number, key in enumerate(keys_):
        shop.put({key: data[number]}, n=number)
    for number, key in enumerate(keys_):
        for address in {quote(key, safe=""), quote(key, safe="/") if "%" not in key else ""} - {""}:
            url = f"{shop.url}/items/by-key/{address}"
            item = shop.client.get(url).json()
            assert (item["key"], item["attributes"]) == (key, {"n": number})
            similar = shop.client.get(f"{url}/similar", params={"k": 9}).json()["hits"]
            assert {hit["key"] for hit in similar} == {*keys_} - {key}
            photo = shop.client.get(f"{url}/image")
            assert photo.content == shop.client.get(item["image"]).content
            assert shop.client.get(f"{url}/image", params={"size": SIDES_PX[0]}).status_code == 200
            changed = shop.client.patch(url, json={"n": number + 1, "sizes": ["S"]})
            assert changed.json()["changed"] == 1
            assert shop.client.get(url).json()["attributes"] == {"n": number + 1, "sizes": ["S"]}
            assert shop.client.patch(url, json={"n": number, "sizes": None}).status_code == 200
            explained = shop.client.post(f"{url}/explain", files={"image": ("a", data[0])})
            assert explained.json()["key"] == key
    for wrong in ({}, {"n": [[1]]}):
        url = f"{shop.url}/items/by-key/17"
        assert_problem(shop.client.patch(url, json=wrong), 422, "invalid-parameter")
    for key in keys_:
        url = f"{shop.url}/items/by-key/{quote(key, safe='')}"
        assert shop.client.delete(url).json()["removed"] == 1
        answers = [shop.client.get(f"{url}{part}") for part in ("", "/similar", "/image")]
        answers += [shop.client.delete(url), shop.client.patch(url, json={"n": 1})]
        answers += [shop.client.post(f"{url}/explain", files={"image": ("a", data[0])})]
        for answer in answers:
            assert_problem(answer, 404, "unknown-item")
    long = f"{shop.url}/items/by-key/{'k' * 1025}"
    assert_problem(shop.client.get(long), 422, "invalid-parameter")


def test_one_request_changes_all_items_of_a_filter(shop, data) -> None:
    url = f"{shop.url}/items"
    for number, one in enumerate(data[:4]):
        shop.put({f"k{number}": one}, product=f"p{number % 2}", stock=number)
    for _ in range(2):
        sold_out = {"filter": 'product = "p1"', "set": {"stock": 0, "sale": True}}
        shop.client.patch(url, json=sold_out)
        again = shop.client.patch(url, json=sold_out).json()
        assert again["changed"] == 0
        listed = {item["key"]: item["attributes"] for item in shop.items()["items"]}
        assert [listed[f"k{n}"].get("sale") for n in range(4)] == [None, True, None, True]
        assert [listed[f"k{n}"]["stock"] for n in range(4)] == [0, 0, 2, 0]
        back = {"filter": {"sale": True}, "set": {"sale": None, "stock": 5}}
        assert shop.client.patch(url, json=back).json()["changed"] == 2
        shop.compacted()
    many = {f"a{n}": n for n in range(MAX_ATTRIBUTES)}
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"filter": 'size = "M"', "set": {"stock": 1}}, "invalid-filter", "'size'"),
        ({"filter": "", "set": {"stock": 1}}, "invalid-filter", "The filter is empty"),
        ({"filter": "stock = 5", "set": {"stock": "few"}}, "invalid-parameter", "'stock'"),
        ({"filter": "stock = 5"}, "invalid-parameter", "Send either changes"),
        ({"set": {"stock": 5}}, "invalid-parameter", "Send either changes"),
        ({"filter": "stock = 5", "set": {}}, "invalid-parameter", "set"),
        ({"filter": "stock = 5", "set": many}, "invalid-parameter", str(MAX_ATTRIBUTES)),
        (
            {"changes": {"k0": {"a": 1}}, "filter": "stock = 5", "set": {"a": 1}},
            *("invalid-parameter", "Send either changes"),
        ),
    ]
    before = shop.items()["items"]
    for body, name, text in wrong:
        problem = assert_problem(shop.client.patch(url, json=body), 422, name)
        assert text in problem["detail"], problem
    assert shop.items()["items"] == before


def test_an_invalid_item_fails_alone_with_its_reason(shop, data) -> None:
    answer = shop.put_form({"good": data[0], "bad": b"no image", "empty": b"", "fine": data[1]})
    assert answer.status_code == 200
    content = answer.json()
    assert [item["status"] for item in content["items"]] == ["added", "failed", "failed", "added"]
    assert [item["attributes"] for item in content["items"][:2]] == ["replaced", None]
    problems = [item["problem"] for item in content["items"]]
    assert [problem and problem["status"] for problem in problems] == [None, 415, 400, None]
    assert problems[1]["request_id"] == answer.headers["x-request-id"]
    twice = shop.put_json([{"key": "k", "data": base64_of(one)} for one in data[2:4]]).json()
    kinds = shop.put_form({"a": data[4], "b": data[5]}, ['{"n": 1}', '{"n": "one"}']).json()
    for content, text in ((twice, "twice"), (kinds, "'n'")):
        assert [item["status"] for item in content["items"]] == ["added", "failed"]
        assert text in content["items"][1]["problem"]["detail"]
    assert keys(shop) == ["good", "fine", "k", "a"]
    assert shop.photos() == {sha256(data[n]) for n in (0, 1, 2, 4)}


def test_a_single_item_that_fails_is_the_problem_itself(shop, data) -> None:
    assert_problem(shop.put_form({"k": b"no image"}), 415, "unsupported-format")
    assert_problem(shop.put_form({"k": data[0][:-40]}), 422, "corrupt-image")
    assert_problem(shop.put_form({"../k": data[0]}), 422, "invalid-parameter")
    assert shop.items()["total"] == 0
    assert shop.photos() == set()


def test_a_limit_of_an_item_is_named(shop, data) -> None:
    shop.put({"first": data[0]}, price=1.5)
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("k" * 1025, {}, "1,024"),
        ("a/../b", {}, "'..'"),
        ("k", {f"a{n}": n for n in range(MAX_ATTRIBUTES + 1)}, str(MAX_ATTRIBUTES)),
        ("k", {"text": "x" * 4097}, "4,096"),
        ("k", {"n" * 129: 1}, "128"),
        ("k", {"price": "cheap"}, "price"),
        ("k", {"price": 2**70}, "64 bits"),
    ]
    for key, attributes, expected in wrong:
        one = {"key": key, "data": base64_of(data[1]), "attributes": attributes}
        problem = assert_problem(shop.put_json([one]), 422, "invalid-parameter")
        assert expected in problem["detail"]
    assert keys(shop) == ["first"]


def test_an_unreadable_request_is_refused(shop, data) -> None:
    url = f"{shop.url}/items"
    one = {"key": "k", "data": base64_of(data[0])}
    image, key = ("image", ("x", data[0])), ("key", (None, "a"))
    bodies: list[dict[str, Any]] = [
        {"json": {"items": []}},
        {"json": {"items": [one] * 9}},
        {"json": {"items": [one | {"data": "%%%"}]}},
        {"json": {"items": [one | {"attributes": {"a": [[1]]}}]}},
        {"json": {"items": [one | {"colour": "red"}]}},
        {"files": [image]},
        {"files": [image, key, ("key", (None, "b"))]},
        {"files": [image, ("key", ("a.txt", b"a"))]},
        {"files": [image, key, ("keys", (None, "b"))]},
        {"files": [image, key, ("attributes", (None, "["))]},
        {"files": [key]},
    ]
    for body in bodies:
        problem = assert_problem(shop.client.put(url, **body), 422, "invalid-parameter")
        assert problem["detail"], body
    for media_type, status in (("image/png", 415), ("", 415), ("multipart/form-data", 400)):
        response = shop.client.put(url, content=b"x", headers={"content-type": media_type})
        assert response.status_code == status, media_type
    for content in (b"{", b"[" * 5000, b"[]", b'{"items": [{"key": "\\ud800"}]}'):
        headers = {"content-type": "application/json"}
        for method, path in (("PUT", url), ("PATCH", url), ("POST", f"{url}/delete")):
            response = shop.client.request(method, path, content=content, headers=headers)
            assert_problem(response, 400, "bad-request")
    assert shop.items()["total"] == 0


def test_a_page_respects_filter_prefix_and_range(shop, data) -> None:
    numbered(shop, data)
    page = shop.items(offset=1, limit=2, key_prefix="even/", filter="n < 6")
    assert (page["total"], page["offset"]) == (3, 1)
    assert [item["key"] for item in page["items"]] == ["even/2", "even/4"]
    assert shop.items(filter=json.dumps({"n": {">=": 6}}))["total"] == 2
    for query in ({"filter": "m = 1"}, {"filter": "n ="}, {"filter": "{"}):
        response = shop.client.get(f"{shop.url}/items", params=query)
        assert_problem(response, 422, "invalid-filter")
    wrong = ({"limit": 201}, {"limit": 0}, {"offset": -1}, {"key_prefix": "x" * 1025})
    for query in (*wrong, {"after": -1}, {"after": "x"}, {"after": 2**63}):
        response = shop.client.get(f"{shop.url}/items", params=query)
        assert_problem(response, 422, "invalid-parameter")
    # Pages after the last number miss nothing that stays.
    for query in ({}, {"key_prefix": "even/"}, {"filter": "n >= 0"}):
        page, whole = shop.items(limit=2, **query), shop.items(**query)
        assert page["last"] == whole["items"][-1]["id"]
        assert f"version={page['generation']}" in page["items"][0]["image"]
        rest = shop.items(after=page["items"][-1]["id"], **query)
        assert rest["items"] == whole["items"][2:]
        assert (rest["total"], rest["last"]) == (whole["total"], whole["last"])
        assert shop.items(after=page["last"], **query)["items"] == []


def test_a_patch_is_applied_completely_or_not_at_all(shop, data) -> None:
    shop.put({"a": data[0], "b": data[1]}, price=1, sale=True)
    url = f"{shop.url}/items"
    answer = shop.client.patch(url, json={"changes": {"a": {"price": 2, "sale": None}}})
    assert answer.json()["changed"] == 1
    listed = {item["key"]: item["attributes"] for item in shop.items()["items"]}
    assert listed == {"a": {"price": 2}, "b": {"price": 1, "sale": True}}
    wrong = {"changes": {"b": {"price": 5}, "a": {"price": "x"}}}
    problem = assert_problem(shop.client.patch(url, json=wrong), 422, "invalid-parameter")
    assert "price" in problem["detail"]
    unknown = {"changes": {"b": {"price": 5}, "z": {"price": 5}}}
    assert_problem(shop.client.patch(url, json=unknown), 404, "unknown-item")
    many = {"changes": {"b": {f"a{n}": n for n in range(MAX_ATTRIBUTES)}}}
    for body in (many, {"changes": {}}, {}, {"changes": {"a": {"x": [[1]]}}}):
        assert_problem(shop.client.patch(url, json=body), 422, "invalid-parameter")
    assert {item["key"]: item["attributes"] for item in shop.items()["items"]} == listed


def test_items_are_removed_by_key_number_list_and_filter(shop, data) -> None:
    url = f"{shop.url}/items"
    answer = shop.put({f"k{n}": one for n, one in enumerate(data)}, stock=0)
    numbers = [item["id"] for item in answer["items"]]
    assert shop.remove("k0", "k1", "unknown") == 2
    assert shop.client.delete(f"{url}/{numbers[2]}").json()["removed"] == 1
    assert_problem(shop.client.delete(f"{url}/{numbers[2]}"), 404, "unknown-item")
    assert shop.client.post(f"{url}/delete", json={"keys": ["k3", "k3"]}).json()["removed"] == 1
    shop.put({"k4": data[4]}, stock=3)
    fitting = shop.client.post(f"{url}/delete", json={"filter": {"stock": 0}}).json()
    assert fitting["removed"] == 3
    assert keys(shop) == ["k4"]
    assert shop.compacted() == {sha256(data[4])}
    assert [hit["key"] for hit in shop.search(data[0]).json()["hits"]] == ["k4"]


def test_an_invalid_removal_removes_nothing(shop, data) -> None:
    shop.put({"k": data[0]})
    for body in (
        {},
        {"keys": ["a"], "filter": "a = 1"},
        {"keys": []},
        {"keys": ["k"] * (MAX_KEYS + 1)},
        {"filter": ""},
        {"filter": {}},
        {"filter": "unknown = 1"},
        {"filter": "("},
        {"key": "a"},
    ):
        response = shop.client.post(f"{shop.url}/items/delete", json=body)
        assert response.status_code == 422, response.text
    response = shop.client.delete(f"{shop.url}/items", params={"filter": "a = 1"})
    problem = assert_problem(response, 422, "invalid-parameter")
    assert "in the URL, as ?key=" in problem["detail"]
    assert keys(shop) == ["k"]


def test_a_removal_can_be_undone_until_a_compaction(shop, data) -> None:
    shop.put({f"k{n}": one for n, one in enumerate(data[:4])}, stock=2)
    link = shop.link("k1")
    shop.remove("k1", "k2")
    assert shop.client.get(link).status_code == 404
    assert [hit["key"] for hit in shop.search(data[1], k=9).json()["hits"]] == ["k0", "k3"]
    UploadFolder(shop.folder).sweep()
    answer = shop.client.post(f"{shop.url}/items/restore", json={"keys": ["k1", "k0", "new"]})
    assert answer.status_code == 200, answer.text
    [item] = answer.json()["items"]
    assert (answer.json()["restored"], answer.json()["version"]) == (1, shop.gallery()["version"])
    assert (item["key"], item["attributes"]) == ("k1", {"stock": 2})
    assert shop.client.get(item["image"]).content == data[1]
    assert shop.search(data[1]).json()["hits"][0]["key"] == "k1"
    assert shop.compacted() == {sha256(data[n]) for n in (0, 1, 3)}
    late = shop.client.post(f"{shop.url}/items/restore", json={"keys": ["k2"]}).json()
    assert (late["restored"], late["items"]) == (0, [])
    for body in ({}, {"keys": []}, {"keys": [1]}, {"ids": [1]}, {"keys": "k1"}):
        response = shop.client.post(f"{shop.url}/items/restore", json=body)
        assert_problem(response, 422, "invalid-parameter")


def test_two_removals_of_duplicates_keep_one_copy(shop, data) -> None:
    shop.put({"a": data[0], "a again": data[0]})
    url = f"{shop.url}/items/delete"
    first = shop.client.post(url, json={"keys": ["a"], "keep": ["a again"]})
    assert first.json()["removed"] == 1
    second = shop.client.post(url, json={"keys": ["a again"], "keep": ["a"]})
    assert "Nothing was removed" in assert_problem(second, 409, "gallery-conflict")["detail"]
    assert keys(shop) == ["a again"]
    for body in ({"filter": "a = 1", "keep": ["a"]}, {"keys": ["a"], "keep": ["a"]}):
        assert_problem(shop.client.post(url, json=body), 422, "invalid-parameter")


def test_writes_into_an_unknown_gallery_are_404(mall, data) -> None:
    url = "/galleries/nowhere/items"
    for response in (
        mall.put_form({"k": data[0]}, gallery="nowhere"),
        mall.client.get(url),
        mall.client.delete(url, params={"key": "k"}),
        mall.client.patch(url, json={"changes": {"k": {}}}),
        mall.client.post(f"{url}/delete", json={"keys": ["k"]}),
    ):
        assert_problem(response, 404, "unknown-gallery")


@pytest.mark.parametrize("change", ["put", "patch", "remove"])
def test_a_write_into_a_gallery_that_another_process_deleted_is_404(shop, data, change) -> None:
    shop.put({"k": data[0]})
    delete_gallery(shop.folder)
    answer = {
        "put": lambda: shop.put_form({"k": data[1]}),
        "patch": lambda: shop.client.patch(f"{shop.url}/items", json={"changes": {"k": {"n": 1}}}),
        "remove": lambda: shop.client.delete(f"{shop.url}/items", params={"key": "k"}),
    }[change]()
    assert_problem(answer, 404, "unknown-gallery")


def test_puts_above_the_queue_size_are_refused(tmp_path, data, closes) -> None:
    model = GatedEmbedder()
    shop = closes(start_shop(tmp_path / "state", model, queue_size=1))
    model.gate.clear()
    with ThreadPoolExecutor(len(data)) as clients:
        puts = [clients.submit(shop.put_form, {f"k{n}": one}) for n, one in enumerate(data)]
        first = next(as_completed(puts))
        model.gate.set()
    assert_problem(first.result(), 503, "overloaded")
    answers = {put.result().status_code for put in puts}
    assert answers == {200, 503}
    assert len(keys(shop)) == sum(put.result().status_code == 200 for put in puts)


def test_a_write_goes_to_the_newest_generation(shop, data) -> None:
    shop.put({"old": data[0]})
    make_gallery(shop.folder, "", count=0)
    assert shop.put({"new": data[1]})["added"] == 1
    assert keys(shop) == ["new"]


def test_a_gallery_that_is_being_replaced_is_503(shop, data) -> None:
    shop.put({"old": data[0]})
    with GalleryFolder(shop.folder).locked():
        response = shop.put_form({"new": data[1]})
        assert_problem(response, 503, "gallery-busy")
        assert int(response.headers["retry-after"]) >= 1
        assert shop.search(data[0]).status_code == 200
    assert shop.put({"new": data[1]})["added"] == 1
    assert shop.photos() == {sha256(data[0]), sha256(data[1])}


def test_an_id_of_another_generation_removes_nothing(tmp_path, data, closes) -> None:
    """After a swap, the id belongs to another item."""
    # The service does not see the swap.
    shop = closes(start_shop(tmp_path / "state", reload_interval_ms=600_000))
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
    assert keys(shop) == ["precious", "other"]
    assert shop.client.delete(url, params={"version": after}).json()["removed"] == 1
    assert keys(shop) == ["other"]


def test_an_item_replaced_during_its_removal_stays(shop, data, monkeypatch) -> None:
    [item] = shop.put({"k": data[0]})["items"]
    read = Gallery.item

    def replace_after(gallery: Gallery, item_id: int) -> Any:
        found = read(gallery, item_id)
        monkeypatch.setattr(Gallery, "item", read)
        shop.put({"k": data[1]})
        return found

    monkeypatch.setattr(Gallery, "item", replace_after)
    assert_problem(shop.client.delete(f"{shop.url}/items/{item['id']}"), 404, "unknown-item")
    [left] = shop.items()["items"]
    assert (left["key"], left["sha256"]) == ("k", sha256(data[1]))
    assert shop.photos() == {sha256(data[1])}
