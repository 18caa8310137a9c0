"""Near-duplicates over HTTP: groups, refusals, and searches that omit them."""

from typing import Any

import pytest

from kinlens.service.api import duplicates
from tests.support.shops import Shop, assert_problem
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
    monkeypatch.setattr(duplicates, "MAX_ITEMS", 5)
    assert "Run kinlens-index duplicates" in refused()
