"""Golden sets over HTTP: labelled, run and stored."""

import json
from typing import Any

import httpx
import pytest

from kinlens.client import Client
from kinlens.errors import InvalidError, NotFoundError
from tests.support.shops import Shop, assert_problem, sha256
from tests.tiny import encoded, photo


def label(shop: Shop, data: bytes, text: str, **more: Any) -> httpx.Response:
    files = {"image": ("query.png", data, "image/png")}
    return shop.client.post(f"{shop.url}/golden", files=files, data={"label": text, **more})


@pytest.fixture
def stocked(shop: Shop, data: list[bytes]) -> Shop:
    """Four images of products 0 and 1."""
    for number in range(4):
        shop.put({f"k{number}": data[number]}, product=number % 2)
    return shop


def query_photo(seed: int) -> bytes:
    """A photo of an item, other bytes than its own image."""
    return encoded(photo(seed), "JPEG", quality=90)


def test_queries_are_labelled_run_kept_and_removed(stocked, data) -> None:
    with Client(stocked.running.url) as client:
        made = client.add_golden(stocked.name, query_photo(0), keys=["k0", "k2"], name="shelf.jpg")
        assert (made.sha256, made.keys, made.name) == (
            sha256(query_photo(0)),
            ("k0", "k2"),
            "shelf.jpg",
        )
        client.add_golden(stocked.name, query_photo(1), attribute="product", value=1)
        client.add_golden(stocked.name, query_photo(30))
        client.add_golden(stocked.name, query_photo(3), keys=["k1"])
        listed = client.golden(stocked.name).queries
        assert [query.wanted for query in listed] == ["k0, k2", "product = 1", "no match", "k1"]
        assert client.golden_image(stocked.name, made.sha256, 160).startswith(b"\xff\xd8\xff")

        run = client.run_golden(stocked.name)
        gallery = stocked.gallery()
        assert (run.version, run.bundle_id) == (gallery["version"], gallery["bundle_id"])
        assert (run.queries, run.judged, run.no_match, run.left_out) == (4, 3, 1, 0)
        assert run.recall_at_1 == pytest.approx(2 / 3, abs=1e-6)
        assert (run.recall_at_5, run.threshold, run.found) == (1, 0.75, run.recall_at_1)
        assert run.no_match_precision == 1
        assert (run.worst[0].query.wanted, run.worst[0].best_key) == ("k1", "k3")
        strict = client.run_golden(stocked.name, min_score=1.0)
        assert (strict.threshold, strict.found) == (1.0, 0)
        client.remove_golden(stocked.name, made.sha256)
        with pytest.raises(NotFoundError):
            client.remove_golden(stocked.name, made.sha256)
        with pytest.raises(NotFoundError):
            client.golden_image(stocked.name, made.sha256, 160)
        assert client.golden_runs(stocked.name).runs == [strict, run]
        with pytest.raises(InvalidError, match="no item 'nowhere'"):
            client.add_golden(stocked.name, data[0], keys=["nowhere"])
        assert len(client.golden(stocked.name).queries) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "exactly one of"),
        ('{"keys": ["k0"], "no_match": true}', "exactly one of"),
        ('{"right": ["k0"]}', "not a parameter here"),
        ('{"attribute": "product", "value": NaN}', "not valid JSON"),
        ("keys=k0", "not valid JSON"),
    ],
)
def test_a_label_that_cannot_be_read_is_422_and_says_why(stocked, text: str, message: str) -> None:
    problem = assert_problem(label(stocked, query_photo(0), text), 422, "invalid-parameter")
    assert message in problem["detail"]


def test_an_invalid_query_is_refused_with_its_status(stocked) -> None:
    keys = json.dumps({"keys": ["k0"]})
    assert_problem(label(stocked, b"no picture", keys), 415, "unsupported-format")
    assert_problem(label(stocked, query_photo(0)[:300], keys), 422, "corrupt-image")
    unknown = json.dumps({"attribute": "colour", "value": "red"})
    assert_problem(label(stocked, query_photo(0), unknown), 422, "invalid-filter")
    empty = stocked.client.post(f"{stocked.url}/golden/run")
    assert "is empty" in assert_problem(empty, 422, "invalid-parameter")["detail"]
