"""Near-duplicates over HTTP: groups, refusals, and searches that omit them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kinlens.client import Client
from kinlens.indexer.checks.duplicates import NearDuplicates
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import Progress
from kinlens.service.api import duplicates
from tests.support.shops import Shop, assert_problem, start_shop
from tests.support.waiting import until
from tests.tiny import encoded, photo


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


def test_the_client_lists_duplicates_and_searches_without_them(twins, data) -> None:
    with Client(twins.running.url) as client:
        answer = client.duplicates(twins.name, min_score=0.95, limit=1)
        assert [item.key for item in answer.groups[0]] == ["k0", "k0 again"]
        hits = client.search(data[1], gallery=twins.name, distinct="near").hits
        assert sorted(hit.key for hit in hits) == ["k0", "k1", "k2", "k3"]
        assert len(client.search(data[1], gallery=twins.name, distinct=True).hits) == 5
        assert len(client.search(data[1], gallery=twins.name).hits) == 6


@pytest.mark.parametrize("sent", ["form", "json", "similar"])
def test_pages_without_near_duplicates_join_to_the_whole_answer(twins, data, sent: str) -> None:
    number = twins.items(key_prefix="k3")["items"][0]["id"]

    def keys(**fields: Any) -> list[str]:
        fields |= {"distinct": "near"}
        if sent == "form":
            response = twins.search(data[1], **fields)
        elif sent == "similar":
            response = twins.client.get(f"{twins.url}/items/{number}/similar", params=fields)
        else:
            body = {"gallery": twins.name, "positives": ["k3"], **fields}
            response = twins.client.post("/search", json=body)
        assert response.status_code == 200, response.text
        return [hit["key"] for hit in response.json()["hits"]]

    whole = keys()
    expected = {"k0", "k1", "k2", "k3"} - ({"k3"} if sent != "form" else set())
    assert {key.removesuffix(" again") for key in whole} == expected
    assert len(whole) == len(expected)
    assert [key for offset in range(5) for key in keys(k=1, offset=offset)] == whole


def test_invalid_questions_are_refused_with_a_cure(twins, data, monkeypatch) -> None:
    def refused(**query: Any) -> str:
        response = twins.client.get(f"{twins.url}/duplicates", params=query)
        return str(assert_problem(response, 422, "invalid-parameter")["detail"])

    for query in ({"min_score": 2}, {"limit": 0}, {"offset": -1}):
        refused(**query)
    unknown = twins.client.get("/galleries/nowhere/duplicates")
    assert_problem(unknown, 404, "unknown-gallery")
    detail = assert_problem(twins.search(data[0], distinct="nearly"), 422, "invalid-parameter")
    assert "send true, false or near" in detail["detail"]
    grouped = twins.search(data[0], distinct="near", group_by="colour")
    assert "removes equal content" in assert_problem(grouped, 422, "invalid-parameter")["detail"]
    monkeypatch.setattr(duplicates, "MAX_ITEMS", 5)
    assert "Run kinlens-index duplicates" in refused()


def test_one_scan_runs_at_a_time_until_the_limit(tmp_path, data, monkeypatch) -> None:
    shop = start_shop(tmp_path, request_timeout_ms=300)
    seen, go_on = threading.Event(), threading.Event()

    def slow(gallery: Gallery, *, on_progress: Progress, **_: object) -> NearDuplicates:
        seen.set()
        go_on.wait(30)
        on_progress(1)
        raise AssertionError("the client has disconnected")

    monkeypatch.setattr(duplicates, "find_duplicates", slow)
    ask = f"{shop.url}/duplicates?min_score=0.9"
    try:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(shop.client.get, ask)
            assert seen.wait(30)
            assert_problem(shop.client.get(ask), 503, "overloaded")
            assert_problem(first.result(), 503, "deadline-exceeded")
        go_on.set()
        monkeypatch.undo()
        until(lambda: shop.client.get(ask).status_code == 200)
    finally:
        go_on.set()
        shop.close()


def test_a_placeholder_image_is_shown_by_examples(shop, data) -> None:
    for start in range(0, 24, 8):
        shop.put({f"none-{n}": data[5] for n in range(start, start + 8)})
    shop.put({"k0": data[0], "k1": data[1], "k1 again": data[1]})
    answer = found(shop)
    [cluster] = answer["crowds"]
    assert cluster["items"] == 24
    assert 1 < len(cluster["examples"]) < 10
    assert cluster["examples"][0]["key"] == "none-0"
    assert shop.client.get(cluster["examples"][0]["image"]).content == data[5]
    assert "placeholder" in cluster["detail"]
    assert (answer["total"], answer["items"]) == (1, 2)
    assert [[item["key"] for item in group] for group in answer["groups"]] == [["k1", "k1 again"]]
