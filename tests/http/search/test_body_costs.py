"""Bodies made to be expensive: counted before they are read, and told in a few words."""

import json
import threading
from typing import Any

import httpx
import pytest

from service.api.items import MAX_KEYS
from service.http import bodies
from tests.support.market import picture, text_of
from tests.support.shops import assert_problem

ITEMS = "/galleries/shop/items"
GOOD = text_of(picture(4))
UNKNOWN = b"{" + b",".join(b'"x%x":1' % n for n in range(30_000)) + b"}"


def many(value: bytes, count: int) -> bytes:
    return b"[" + b",".join([value] * count) + b"]"


def send(service: Any, method: str, path: str, body: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    response: httpx.Response = service.client.request(method, path, content=body, headers=headers)
    return response


def crops(value: Any, count: int) -> bytes:
    return json.dumps({"images": [{"data": GOOD, "crops": [value] * count}]}).encode()


BOMBS: dict[str, tuple[str, str, bytes]] = {
    "images of numbers": ("POST", "/search", b'{"images":' + many(b"1", 40_000) + b"}"),
    "many images of numbers": ("POST", "/search", b'{"images":' + many(b"1", 500_000) + b"}"),
    "images of objects": ("POST", "/search", b'{"images":' + many(b"{}", 1_300_000) + b"}"),
    "33 objects": ("POST", "/search", b'{"images":' + many(b"{}", 33) + b"}"),
    "32 objects": ("POST", "/search", b'{"images":' + many(b"{}", 32) + b"}"),
    "crops": ("POST", "/search", crops(1, 40_000)),
    "crop of zeros": ("POST", "/search", crops([0] * 40_000, 1)),
    "crop of commas": ("POST", "/search", crops("," * 90_000, 1)),
    "positives": ("POST", "/search", b'{"positives":' + many(b"1", 40_000) + b"}"),
    "k": ("POST", "/search", b'{"positives":["a"],"k":' + many(many(b"1", 90), 900) + b"}"),
    "unknown": ("POST", "/search", UNKNOWN),
    "unknown of an image": ("POST", "/search", b'{"images":[' + UNKNOWN + b"]}"),
    "batch": (
        "POST",
        "/search/batch",
        b'{"queries":' + many(b'{"images":' + many(b"1", 15_000) + b"}", 64) + b"}",
    ),
    "batch of numbers": ("POST", "/search/batch", b'{"queries":' + many(b"1", 40_000) + b"}"),
    "put": ("PUT", ITEMS, b'{"items":' + many(b"1", 40_000) + b"}"),
    "put 256": ("PUT", ITEMS, b'{"items":' + many(b"1", 256) + b"}"),
    "put unknown": ("PUT", ITEMS, b'{"items":[' + UNKNOWN + b"]}"),
    "put attributes": (
        "PUT",
        ITEMS,
        b'{"items":[{"key":"k","data":"","attributes":' + UNKNOWN.replace(b":1", b":[]") + b"}]}",
    ),
    "patch": ("PATCH", ITEMS, b'{"changes":' + UNKNOWN + b"}"),
    "patch 9000": (
        "PATCH",
        ITEMS,
        b'{"changes":{' + b",".join(b'"%x":1' % n for n in range(9_000)) + b"}}",
    ),
    "patch attributes": (
        "PATCH",
        ITEMS,
        b'{"changes":{"k":' + UNKNOWN.replace(b":1", b":{}") + b"}}",
    ),
    "patch unknown": ("PATCH", ITEMS, UNKNOWN),
    "delete": ("POST", f"{ITEMS}/delete", b'{"keys":' + many(b"1", 90_000) + b"}"),
    "delete 9000": ("POST", f"{ITEMS}/delete", b'{"keys":' + many(b"1", 9_000) + b"}"),
    "delete unknown": ("POST", f"{ITEMS}/delete", UNKNOWN),
    "train": ("POST", "/jobs/train", b'{"overrides":{"a":' + many(b"{}", 5_000) + b"}}"),
    "create": ("POST", "/galleries", UNKNOWN[:15_000].rpartition(b",")[0] + b"}"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_body_of_many_faults_has_a_short_answer(market, name: str) -> None:
    response = send(market, *BOMBS[name])
    assert_problem(response, 422, "invalid-parameter")
    assert len(response.content) < 8_000
    assert len(response.json().get("errors") or []) <= 20


def test_a_batch_of_bad_queries_has_a_short_answer_for_each(market) -> None:
    query = b'{"images":' + many(b"{}", 700) + b"}"
    response = send(market, "POST", "/search/batch", b'{"queries":' + many(query, 60) + b"}")
    assert response.status_code == 200
    assert {answer["status"] for answer in response.json()["answers"]} == {422}
    assert len(response.content) < 60 * 2_000


@pytest.mark.parametrize("path", ["/jobs/train", f"{ITEMS[:-6]}/rebuild", "/galleries"])
def test_a_small_form_of_json_may_not_be_large(market, path: str) -> None:
    assert_problem(send(market, "POST", path, UNKNOWN), 413, "body-too-large")


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"not":'])
def test_what_is_deep_is_refused(market, opening: bytes) -> None:
    deep = opening * 50_000
    for method, path in (
        ("POST", "/search"),
        ("POST", "/search/batch"),
        ("PUT", ITEMS),
        ("PATCH", ITEMS),
        ("POST", f"{ITEMS}/delete"),
    ):
        assert send(market, method, path, deep[:60_000]).status_code in (400, 422)
    for text in (deep[:10_000].decode(), "(" * 10_000, "not " * 2_000):
        response = market.client.get(ITEMS, params={"filter": text})
        assert_problem(response, 422, "invalid-filter")


def test_json_of_more_than_a_few_kb_is_read_off_the_event_loop(
    market, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def spy(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return original(*args, **options)

    original = bodies.from_json
    monkeypatch.setattr(bodies, "from_json", spy)
    long = {"keys": ["x" * 100] * 100, "negatives": ["x" * 100] * 100}
    body = json.dumps(long).encode()
    for method, path in (("POST", "/search"), ("PATCH", ITEMS), ("POST", f"{ITEMS}/delete")):
        send(market, method, path, body)
    send(market, "PUT", ITEMS, body)
    send(market, "POST", "/search/batch", body)
    assert len(threads) == 5
    assert all(name.startswith(("asyncio_", "kinlens-")) for name in threads), threads


def test_a_request_may_patch_and_remove_as_many_items_as_its_own_limit_says(market) -> None:
    keys = [f"k{n}" for n in range(MAX_KEYS)]
    removed = market.client.post(f"{ITEMS}/delete", json={"keys": keys})
    assert removed.json()["removed"] == 0
    for method, path, body in (
        ("POST", f"{ITEMS}/delete", {"keys": [*keys, "k"]}),
        ("PATCH", ITEMS, {"changes": {key: {} for key in [*keys, "k"]}}),
    ):
        problem = assert_problem(
            send(market, method, path, json.dumps(body).encode()), 422, "invalid-parameter"
        )
        assert "at most 10000 items" in problem["detail"]
