"""Quality over HTTP: golden sets, labelled, run and stored; groups of near-duplicates."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kinlens.client import Client
from kinlens.errors import InvalidError, NotFoundError
from kinlens.service.api import quality
from tests.support.shops import Shop, assert_problem, sha256, start_shop
from tests.support.waiting import until
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


@pytest.fixture
def twins(shop: Shop, data: list[bytes]) -> Shop:
    """Four products, one listed twice with its file, one photographed twice."""
    shop.put({f"k{n}": data[n] for n in range(4)}, colour="red")
    shop.put({"k0 again": data[0], "k1 again": encoded(photo(1), "JPEG", quality=70)})
    return shop


def found(shop: Shop, **query: Any) -> Any:
    response = shop.client.get(f"{shop.url}/duplicates", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_groups_are_found_by_the_floor_or_by_a_score(twins) -> None:
    answer = found(twins)
    assert (answer["total"], answer["items"], answer["offset"]) == (2, 4, 0)
    assert answer["gallery_version"] == twins.gallery()["version"]
    groups = [[item["key"] for item in group] for group in answer["groups"]]
    assert groups == [["k0", "k0 again"], ["k1", "k1 again"]]
    (_, copy), (first, second) = answer["groups"]
    assert (copy["same_content"], copy["newest"]) == (True, True)
    assert (second["same_content"], second["newest"], first["newest"]) == (False, True, False)
    assert second["score"] >= answer["min_score"]
    assert first["attributes"] == {"colour": "red"}
    assert twins.client.get(first["image"]).status_code == 200
    assert twins.client.get(f"{twins.url}/items/{second['id']}").json()["key"] == "k1 again"

    assert found(twins, offset=1, limit=1)["groups"] == answer["groups"][1:]
    assert found(twins, offset=9)["groups"] == []
    wide = found(twins, min_score=-1)  # and so does a score
    assert wide["items"] == 6
    assert "min_score = -1 is below 0.9500" in wide["warning"]
    assert answer["warning"] is None
    assert answer["min_score"] == answer["floor"]["score"] >= 0.95
    twins.remove("k0 again", "k1")
    assert found(twins)["total"] == 0


def test_pages_without_near_duplicates_join_to_the_whole_answer(twins, data) -> None:
    def keys(**fields: Any) -> list[str]:
        hits = twins.search(data[1], distinct="near", **fields).json()["hits"]
        return [hit["key"].removesuffix(" again") for hit in hits]

    whole = keys()
    assert sorted(whole) == ["k0", "k1", "k2", "k3"]
    assert [key for offset in range(5) for key in keys(k=1, offset=offset)] == whole
    similar = twins.client.get(f"{twins.url}/items/by-key/k3/similar?distinct=near").json()
    assert len(similar["hits"]) == 3


def test_invalid_questions_are_refused_with_a_cure(twins, data, monkeypatch) -> None:
    def refused(**query: Any) -> str:
        response = twins.client.get(f"{twins.url}/duplicates", params=query)
        return str(assert_problem(response, 422, "invalid-parameter")["detail"])

    refused(min_score=2)
    detail = assert_problem(twins.search(data[0], distinct="nearly"), 422, "invalid-parameter")
    assert "send true, false or near" in detail["detail"]
    grouped = twins.search(data[0], distinct="near", group_by="colour")
    assert "removes equal content" in assert_problem(grouped, 422, "invalid-parameter")["detail"]
    monkeypatch.setattr(quality, "MAX_ITEMS", 5)
    assert "Run kinlens-index duplicates" in refused()


def test_one_scan_runs_at_a_time_until_the_limit(tmp_path, monkeypatch, closes) -> None:
    shop = closes(start_shop(tmp_path, request_timeout_ms=2_000))
    seen, go_on = threading.Event(), threading.Event()

    def slow(*_: Any, on_progress: Callable[[int], None], **options: Any) -> None:
        seen.set()
        go_on.wait(30)
        on_progress(1)
        raise AssertionError("the client has disconnected")

    ask = f"{shop.url}/duplicates?min_score=0.9"
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(quality, "find_duplicates", slow)
        first = pool.submit(shop.client.get, ask)
        assert seen.wait(30)
        assert_problem(shop.client.get(ask), 503, "overloaded")
        assert_problem(first.result(), 503, "deadline-exceeded")
    go_on.set()
    until(lambda: shop.client.get(ask).status_code == 200)
