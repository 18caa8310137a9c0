"""Bodies that are compressed or begin with a byte order mark mean the same on every route."""

import base64
import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.support.servers import render
from tests.support.shops import assert_problem, start_shop
from tests.tiny import encoded

PHOTO = encoded(render(1))
TEXT = base64.b64encode(PHOTO).decode()
FORM = httpx.Request("POST", "http://a", files={"image": ("a.png", PHOTO)}, data={"k": "1"})
LABELLED = httpx.Request(
    "POST", "http://a", files={"image": ("a.png", PHOTO)}, data={"label": '{"absent": true}'}
)
ROUTES: dict[str, tuple[str, Any]] = {
    "form": ("POST /search", FORM),
    "photo": ("POST /search?k=1", PHOTO),
    "JSON": ("POST /search", {"images": [{"data": TEXT}]}),
    "batch": ("POST /search/batch", {"queries": [{"images": [{"data": TEXT}]}]}),
    "items": ("PUT /galleries/shop/items", {"items": [{"key": "a.png", "data": TEXT}]}),
    "changes": ("PATCH /galleries/shop/items", {"changes": [{"key": "a.png", "set": {"n": 1}}]}),
    "golden": ("POST /galleries/shop/golden", LABELLED),
    "feedback": ("POST /feedback", {"gallery": "shop", "event": "clicked", "item": 0}),
    "gallery": ("POST /galleries", {"name": "NEW"}),
    "job": ("POST /jobs/train", {"data": "nothing"}),
    "key": ("POST /keys", {"name": "NEW", "scopes": ["search"]}),
}
CODINGS = {
    "gzip": gzip.compress,
    "X-GZip": lambda body: gzip.compress(body[:9]) + gzip.compress(body[9:]),  # two members
    "deflate": zlib.compress,
    "Deflate, identity": lambda body: zlib.compress(body, wbits=-15),  # without a header
    "identity, gzip": lambda body: gzip.compress(body) + bytes(9),  # padding
    "identity": bytes,
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    started = start_shop(tmp_path_factory.mktemp("coded"), feedback="pairs", max_upload_bytes=10**6)
    started.put({"a.png": PHOTO})
    yield started
    started.close()


def raw(sent: Any) -> tuple[bytes, str]:
    """The bytes and the content type of a body."""
    if isinstance(sent, httpx.Request):
        return sent.read(), sent.headers["content-type"]
    if isinstance(sent, bytes):
        return sent, "image/png"
    return json.dumps(sent).replace("NEW", uuid4().hex).encode(), "application/json"


def call(shop: Any, operation: str, body: bytes, kind: str, coding: str = "") -> httpx.Response:
    method, path = operation.split()
    headers = {"Content-Type": kind} | ({"Content-Encoding": coding} if coding else {})
    return shop.client.request(method, path, content=body, headers=headers)  # type: ignore[no-any-return]


def test_a_body_means_the_same_in_every_coding_on_every_route(shop) -> None:
    for name, (operation, sent) in ROUTES.items():
        body, kind = raw(sent)
        expected = call(shop, operation, body, kind).status_code
        for coding, compress in CODINGS.items():
            answer = call(shop, operation, compress(raw(sent)[0]), kind, coding)
            assert answer.status_code == expected, (name, coding, answer.text)
        wrong = call(shop, operation, body, kind, "br")
        assert "gzip or deflate" in assert_problem(wrong, 415, "unsupported-media-type")["detail"]
        assert wrong.headers["accept-encoding"] == "gzip, deflate"
        for damaged in (body, gzip.compress(body)[:-9], gzip.compress(body) + b"more"):
            refused = call(shop, operation, damaged, kind, "gzip")
            assert_problem(refused, 400, "bad-request")
        if kind == "application/json":
            marked = call(shop, operation, codecs.BOM_UTF8 + raw(sent)[0], kind)
            assert marked.status_code == expected, (name, marked.text)
            both = gzip.compress(codecs.BOM_UTF8 + raw(sent)[0])
            assert call(shop, operation, both, kind, "gzip").status_code == expected, name
            for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"):
                refused = call(shop, operation, body.decode().encode(encoding), kind)
                detail = assert_problem(refused, 415, "unsupported-media-type")["detail"]
                assert "UTF-8" in detail


def test_a_body_that_inflates_above_the_limit_is_413(shop) -> None:
    limit = 10**6 + 64 * 2**10
    for coding in ("gzip", "deflate"):
        for size, status in ((10**6, 200), (limit + 1, 413), (50 * limit, 413)):
            data = CODINGS[coding](PHOTO + bytes(size - len(PHOTO)))
            answer = call(shop, "POST /search", data, "image/png", coding)
            assert answer.status_code == status, answer.text
            if status == 413:
                assert "after decompression" in answer.json()["detail"]
    query = gzip.compress(b" " * 10**7)
    detail = call(shop, "POST /feedback", query, "application/json", "gzip").json()["detail"]
    assert "after decompression" in detail
    assert "image" not in detail
    twice = gzip.compress(gzip.compress(PHOTO))
    assert call(shop, "POST /search", twice, "image/png", "gzip").status_code == 415
    assert call(shop, "POST /search", twice, "image/png", "gzip, gzip").status_code == 415
