"""The HTTP contract: good requests, every kind of bad request, and recovery after it."""

from typing import Any

import pytest

from tests.support.odd_images import claiming
from tests.support.servers import render
from tests.support.shops import assert_problem
from tests.tiny import encoded

GOOD = encoded(render(4))  # the fourth image of the gallery


def test_an_answer_has_every_field_of_the_contract(running_service, photos) -> None:
    response = running_service.search(photos[0], k=2, gallery="shop", min_score=-1)
    answer = response.json()
    assert set(answer) == {
        "bundle_id", "gallery", "gallery_version", "k", "offset", "count", "cached", "match",
        "min_score", "no_match_probability", "hits", "groups", "timings_ms",
    }  # fmt: skip
    assert answer["bundle_id"] == response.headers["x-kinlens-bundle"] == "fake"
    assert answer["gallery"] == "shop"
    assert answer["k"] == answer["count"] == len(answer["hits"]) == 2
    assert set(answer["hits"][0]) == {
        "id", "key", "score", "probability", "attributes", "image",
    }  # fmt: skip
    (listed,) = running_service.client.get("/galleries").json()["galleries"]
    assert answer["gallery_version"] == listed["version"]
    link = f"/galleries/shop/items/0/image?generation={listed['generation']}"
    assert answer["hits"][0]["image"] == link
    assert answer["hits"][0]["attributes"] == {"number": 0}
    assert set(answer["timings_ms"]) == {"decode", "embed", "search", "total"}
    assert response.headers["cache-control"] == "no-store"


def test_the_server_timing_header_agrees_with_timings_ms(running_service) -> None:
    for cached in (False, True):
        response = running_service.search(encoded(render(1_000)))
        parts = [part.split(";dur=") for part in response.headers["server-timing"].split(", ")]
        timings = response.json()["timings_ms"]
        assert {stage: float(ms) for stage, ms in parts} == timings
        assert list(timings) == ["decode", "embed", "search", "total"]
        assert timings["total"] > 0
        assert (timings["embed"] == 0) is cached


def sent(image: bytes = GOOD, **fields: str | bytes) -> dict[str, Any]:
    """A form with this image, and fields; those of bytes are files."""
    parts = [("image", ("a.jpg", image))]
    parts += [(k, ("x", v) if isinstance(v, bytes) else (None, v)) for k, v in fields.items()]
    return {"files": parts}


PARAMETER = (422, "invalid-parameter")
BAD: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "empty": (sent(b""), 400, "empty-image", "0 bytes"),
    "address": (sent(b"http://169.254.169.254/"), 415, "unsupported-format", "not an image"),
    "truncated": (sent(GOOD[: len(GOOD) // 2]), 422, "corrupt-image", "truncated"),
    "bomb": (sent(claiming(65_535, 65_535)), 413, "image-too-large", "4294836225 pixels"),
    "k = 0": (sent(k="0"), *PARAMETER, "k = '0' is too small; use 1 or more"),
    "k is long": (sent(k="9" * 5000), *PARAMETER, f"k = '{'9' * 40}' "),
    "k is a file": (sent(k=b"3"), *PARAMETER, "k was sent as a file"),
    "min_score = nan": (sent(min_score="nan"), *PARAMETER, "min_score = 'nan' "),
    "unknown gallery": (sent(gallery="shoes"), 404, "unknown-gallery", "Known are: shop"),
    "no image": ({"files": {"k": (None, "3")}}, *PARAMETER, "image and positives are missing"),
    "image as text": (
        {"files": {"image": (None, "/etc/passwd")}},
        *PARAMETER,
        "URLs and paths are not loaded",
    ),
    "no boundary": (
        {"content": b"abc", "headers": {"content-type": "multipart/form-data"}},
        *(400, "bad-request", "boundary"),
    ),
    "another host": (sent() | {"headers": {"host": "shop.example"}}, 400, "unknown-host", "shop.e"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_bad_request_is_a_documented_problem(running_service, name: str) -> None:
    request, status, slug, message = BAD[name]
    problem = assert_problem(running_service.client.post("/search", **request), status, slug)
    assert message in problem["detail"]
    if (status, slug) == PARAMETER:
        assert problem["errors"][0]["name"] in (*name.split(), "image", "crop")
    assert running_service.search(GOOD, k=1).json()["hits"][0]["id"] == 4
    assert running_service.client.get("/ready").status_code == 200


def test_an_unexpected_error_is_a_plain_500(start_service, gallery, photos, monkeypatch) -> None:
    service = start_service()
    with monkeypatch.context() as patch:
        patch.setattr(gallery, "search", lambda *_: {}["secret /var/lib/path"])
        response = service.search(photos[0])
    assert_problem(response, 500, "internal")
    assert "secret" not in response.text
    assert "nosniff" in response.headers["x-content-type-options"]
    assert service.search(photos[0]).status_code == 200


def test_every_answer_has_the_security_headers_and_a_request_id(running_service) -> None:
    for path in ("/", "/ui/search/app.js", "/live", "/docs", "/nowhere", "/galleries"):
        headers = running_service.client.get(path).headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert len(headers["x-request-id"]) == 32
    assert "<html" in running_service.client.get("/").text
    script = running_service.client.get("/ui/search/app.js")
    assert "javascript" in script.headers["content-type"]


def test_a_request_id_of_the_client_is_kept_if_plain(running_service) -> None:
    def given(request_id: str) -> str:
        response = running_service.client.get("/live", headers={"x-request-id": request_id})
        return str(response.headers["x-request-id"])

    assert given("trace-7.a") == "trace-7.a"
    assert given("x" * 65) != "x" * 65
    assert given('a"b') != 'a"b'
