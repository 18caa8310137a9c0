"""Several searches in one request: each has its own outcome."""

from typing import Any

import pytest

from tests.support.market import keys, photo, post, text_of
from tests.support.shops import assert_problem

BATCH = "/search/batch"


def query(data: bytes, **fields: Any) -> dict[str, Any]:
    return {"images": [{"data": text_of(data)}], **fields}


def statuses(response: Any) -> list[int]:
    assert response.status_code == 200, response.text
    answers = response.json()["answers"]
    for each in answers:
        assert (each["answer"] is None) == (each["status"] != 200)
        assert (each["problem"] is None) == (each["status"] == 200)
        if each["problem"]:
            assert each["problem"]["status"] == each["status"]
            assert each["problem"]["request_id"] == response.headers["x-request-id"]
    return [each["status"] for each in answers]


def test_every_query_is_answered_as_if_alone(market) -> None:
    queries = [
        query(photo(1), k=3),
        query(photo(2), k=2, filter="price > 5", min_probability=0.0),
        query(photo(3), k=2, group_by="colour"),
        {"positives": ["004.png"], "k": 4, "offset": 2},
    ]
    together = post(market, {"queries": queries}, BATCH).json()["answers"]
    for one, outcome in zip(queries, together, strict=True):
        alone = post(market, one).json()
        for answer in (alone, outcome["answer"]):
            del answer["timings_ms"], answer["cached"]
        assert outcome["answer"] == alone


def test_each_bad_query_fails_alone_with_its_problem(market) -> None:
    bad: list[tuple[Any, int, str]] = [
        (query(b""), 400, "empty-image"),
        (query(b"no picture"), 415, "unsupported-format"),
        (query(photo(1)[:-100]), 422, "corrupt-image"),
        (query(photo(1), k=0), 422, "invalid-parameter"),
        (query(photo(1), gallery="x"), 404, "unknown-gallery"),
        (query(photo(1), filter="size = 3"), 422, "invalid-filter"),
        ({"positives": ["x"]}, 404, "unknown-item"),
        (7, 422, "invalid-parameter"),
    ]
    good = query(photo(5), k=1)
    response = post(
        market, {"queries": [each for bad_one, _, _ in bad for each in (bad_one, good)]}, BATCH
    )
    expected = [status for _, own, _ in bad for status in (own, 200)]
    assert statuses(response) == expected
    answers = response.json()["answers"]
    for (_, _, slug), outcome in zip(bad, answers[::2], strict=True):
        assert outcome["problem"]["type"] == f"urn:kinlens:problem:{slug}"
    for outcome in answers[1::2]:
        assert keys(outcome["answer"]) == ["005.png"]


def test_only_unfinished_queries_fail_at_the_deadline(start_service, embedder, photos) -> None:
    service = start_service(request_timeout_ms=1_000)
    service.search(photos[0], k=1)
    embedder.gate.clear()
    queries = [query(photos[0], k=1), query(photos[1], k=1)]
    response = post(service, {"queries": queries}, BATCH)
    embedder.gate.set()
    assert statuses(response) == [200, 503]
    problem = response.json()["answers"][1]["problem"]
    assert problem["type"] == "urn:kinlens:problem:deadline-exceeded"


def test_a_form_searches_each_image_with_the_same_fields(market) -> None:
    files = [("image", ("a.png", data)) for data in (photo(1), b"no picture", photo(3))]
    response = market.client.post(BATCH, files=files, data={"k": "2", "filter": "price >= 3"})
    assert statuses(response) == [200, 415, 200]
    answers = [outcome["answer"] for outcome in response.json()["answers"]]
    assert keys(answers[2])[0] == "003.png"
    assert all(hit["attributes"]["price"] >= 3 for hit in answers[0]["hits"])
    crops = {"crop": ["0,0,0.5,1", "0.5,0,0.5,1"], "k": "1"}
    response = market.client.post(BATCH, files=files[:1], data=crops)
    assert statuses(response) == [200]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"json": {}}, "queries must be a list"),
        ({"json": {"queries": []}}, "queries must be a list"),
        ({"json": {"queries": [{}], "k": 3}}, "queries must be a list"),
        ({"json": {"queries": [{}] * 65}}, "65 queries in total"),
        ({"json": {"queries": [{"positives": ["a"], "k": 10_000}] * 11}}, "110,000 hits"),
        ({"files": [("k", (None, "3"))]}, "image and positives are missing"),
        ({"files": [("image", ("a.png", photo(1)))] * 65}, "65 queries"),
    ],
)
def test_an_invalid_batch_is_refused_completely(market, sent: Any, message: str) -> None:
    refused = assert_problem(market.client.post(BATCH, **sent), 422, "invalid-parameter")
    assert message in refused["detail"]
