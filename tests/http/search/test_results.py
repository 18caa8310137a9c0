"""Answers of a search: thresholds, pages, filters, groups, several images, likes."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kinlens.client import Client
from kinlens.embedder.fake import FakeEmbedder
from tests.support.market import (
    CALIBRATION,
    COUNT,
    attributes_of,
    found,
    keys,
    numbers,
    photo,
    post,
    start_market,
    text_of,
)
from tests.support.servers import render
from tests.support.shops import assert_problem, make_gallery, start_shop
from tests.support.waiting import until
from tests.tiny import encoded


@pytest.fixture(scope="module")
def vectors() -> Any:
    embedder = FakeEmbedder()
    return embedder.embed(np.stack([embedder.preprocess(photo(n)) for n in range(COUNT)]))


def side_by_side(left: int, right: int) -> bytes:
    """Two images side by side."""
    whole = Image.new("RGB", (192, 96))
    whole.paste(render(left), (0, 0))
    whole.paste(render(right), (96, 0))
    return encoded(whole)


def test_pages_of_any_size_join_to_the_whole_answer(market) -> None:
    whole = keys(found(market, photo(3), k=COUNT))
    for size in (1, 5, 7):
        pages = [found(market, photo(3), k=size, offset=o) for o in range(0, COUNT, size)]
        assert [key for page in pages for key in keys(page)] == whole
        assert {page["offset"] for page in pages} == set(range(0, COUNT, size))
        assert all(page["match"] for page in pages)


@pytest.mark.parametrize("order", [{"diversity": 0.4}, {"boost": "price:-0.2"}], ids=str)
def test_another_order_has_the_same_hits_on_its_pages(market, order: dict[str, Any]) -> None:
    plain = found(market, photo(3), k=COUNT)["hits"]
    whole = found(market, photo(3), k=COUNT, **order)["hits"]
    scores = [{hit["key"]: hit["score"] for hit in hits} for hits in (plain, whole)]
    assert scores[0] == scores[1]
    assert [*scores[0]] != [*scores[1]]
    pages = [found(market, photo(3), k=5, offset=o, **order) for o in range(0, COUNT, 5)]
    assert [key for page in pages for key in keys(page)] == [*scores[1]]
    assert found(market, photo(3), k=COUNT, **order)["cached"]


def test_a_boost_adds_a_share_of_its_weight(market) -> None:
    hits = found(market, photo(3), k=COUNT)["hits"]
    hits.sort(key=lambda hit: -hit["score"] - 0.2 * hit["attributes"]["price"] / (COUNT - 1))
    expected = [hit["key"] for hit in hits]
    for reported in ("price:0.2", f"price:0.2:0:{COUNT - 1}"):
        assert keys(found(market, photo(3), k=COUNT, boost=reported)) == expected
    sent = {"files": {"image": photo(3)}, "data": {"k": COUNT, "boost": "price:0.2"}}
    assert keys(market.client.post("/search", **sent).json()) == expected


@pytest.mark.parametrize("grouping", [{}, {"group_by": "product"}])
def test_a_page_past_the_end_is_empty_but_a_match(market, grouping: dict[str, str]) -> None:
    past = found(market, photo(3), k=5, offset=COUNT, **grouping)
    assert (past["count"], past["match"], past["hits"]) == (0, True, [])
    assert past["groups"] == ([] if grouping else None)


def test_no_hit_above_a_threshold_is_an_explicit_no_match(market) -> None:
    answer = found(market, encoded(render(99)), min_score=0.9999)
    assert (answer["match"], answer["count"], answer["hits"]) == (False, 0, [])
    assert (answer["min_score"], answer["groups"]) == (0.9999, None)
    answer = found(market, photo(3), min_probability=1)
    assert (answer["match"], answer["hits"]) == (False, [])
    grouped = found(market, photo(3), min_probability=1, group_by="product")
    assert (grouped["match"], grouped["groups"]) == (False, [])


def test_probabilities_need_a_calibration(tmp_path, closes) -> None:
    shop = closes(start_market(tmp_path, calibration=None, no_calibration="Only 2 classes."))
    answer = found(shop.running, photo(3))
    assert answer["hits"][0]["probability"] is None
    assert answer["no_match_probability"] is None
    until(lambda: "at least 16" in shop.gallery()["no_calibration"])
    body = {"images": [{"data": text_of(photo(3))}], "min_probability": 0.5}
    problem = assert_problem(post(shop.running, body), 422, "invalid-parameter")
    assert "min_probability = 0.5 needs probabilities" in problem["detail"]
    assert "Only 2 classes). Send min_score" in problem["detail"]
    described = shop.gallery()
    assert described["calibration"] is None
    assert described["no_calibration"].endswith("Only 2 classes.")


def test_probabilities_of_products_and_of_no_match_sum_to_one(market) -> None:
    answer = found(market, photo(3), k=COUNT)
    products = {hit["attributes"]["product"]: hit["probability"] for hit in answer["hits"]}
    for hit in answer["hits"]:  # all photos of a product are right or wrong together
        assert hit["probability"] == products[hit["attributes"]["product"]]
    total = sum(products.values()) + answer["no_match_probability"]
    assert total == pytest.approx(1, abs=1e-3)
    assert answer["hits"][0]["probability"] == max(products.values())
    for by, k in (("product", 1), ("product", COUNT), ("colour", 3)):
        grouped = found(market, photo(3), group_by=by, group_size=2, k=k)
        total = sum(group["probability"] for group in grouped["groups"])
        assert total + grouped["no_match_probability"] == pytest.approx(1, abs=1e-3)


def test_a_probability_does_not_depend_on_the_page_the_filter_or_k(market) -> None:
    whole = {hit["id"]: hit["probability"] for hit in found(market, photo(3), k=COUNT)["hits"]}
    for fields in ({"k": 1}, {"k": 4, "offset": 5}, {"filter": 'colour = "red"', "k": COUNT}):
        for hit in found(market, photo(3), **fields)["hits"]:
            assert hit["probability"] == whole[hit["id"]]


def test_a_configured_gallery_is_recalibrated_after_changes(tmp_path, closes) -> None:
    make_gallery(tmp_path / "given", "", count=0)
    embedder, galleries = FakeEmbedder(calibration=CALIBRATION), (f"given={tmp_path / 'given'}",)
    shop = closes(start_shop(tmp_path / "state", embedder, galleries=galleries))

    def put(*numbers: int) -> None:
        items = {f"{n:03d}.png": photo(n) for n in numbers}
        shop.put_form(items, [json.dumps(attributes_of(n)) for n in numbers], "given")

    def products() -> int | None:
        calibration = shop.gallery("given")["calibration"]
        return calibration and calibration["products"]

    put(*range(COUNT))
    until(lambda: products() == COUNT // 2)
    put(*range(COUNT, COUNT + 4))
    until(lambda: products() == COUNT // 2 + 2)


def test_min_probability_keeps_the_likely_hits_at_their_ranks(market) -> None:
    hits = found(market, photo(3), k=COUNT)["hits"]
    groups = found(market, photo(3), k=COUNT, group_by="product")["groups"]
    for least in sorted({hit["probability"] for hit in hits}):
        likely = [hit for hit in hits if hit["probability"] >= least - 5e-5]
        asked = {"min_probability": max(least - 5e-5, 0)}  # as precise as what is printed
        assert found(market, photo(3), k=COUNT, **asked)["hits"] == likely
        first = [hit for hit in hits[:3] if hit in likely]
        assert found(market, photo(3), k=3, **asked)["hits"] == first
        some = found(market, photo(3), k=COUNT, group_by="product", **asked)["groups"]
        likely = [one["value"] for one in groups if one["probability"] >= least - 5e-5]
        assert [group["value"] for group in some] == likely


def test_groups_are_ranked_by_their_best_hit(market) -> None:
    hits = found(market, photo(3), k=COUNT)["hits"]
    answer = found(market, photo(3), k=3, group_by="product", group_size=2)
    assert answer["hits"] == []
    assert answer["count"] == 3
    products = list(dict.fromkeys(hit["attributes"]["product"] for hit in hits))
    assert [group["value"] for group in answer["groups"]] == products[:3]
    for group in answer["groups"]:
        own = [hit for hit in hits if hit["attributes"]["product"] == group["value"]]
        assert group["hits"] == own[:2]
        assert group["score"] == own[0]["score"]
        assert group["probability"] == pytest.approx(own[0]["probability"], abs=2e-4)


def test_a_crop_is_searched_like_a_whole_image(market) -> None:
    both = {"data": text_of(side_by_side(2, 7))}
    for number, left in ((2, 0.0), (7, 0.5)):
        body = {"images": [{**both, "crops": [[left, 0, 0.5, 1]]}], "k": 1}
        [hit] = post(market, body).json()["hits"]
        assert hit["attributes"]["price"] == number
        assert hit["score"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("images", "liked", "disliked"), [((1, 2), (5,), ()), ((2,), (5,), (1, 3))]
)
def test_images_likes_and_dislikes_follow_rocchio(market, vectors, images, liked, disliked) -> None:
    named = {"positives": liked, "negatives": disliked}
    fields = {name: [f"{n:03d}.png" for n in items] for name, items in named.items()}
    answer = found(market, *map(photo, images), k=COUNT, **fields)
    target = vectors[[*images, *liked]].mean(axis=0)
    if disliked:
        target = 2 * target - vectors[[*disliked]].mean(axis=0)
    expected = vectors @ (target / np.linalg.norm(target))
    assert set(numbers(answer["hits"])) == set(range(COUNT)) - {*liked, *disliked}
    for hit in answer["hits"]:
        assert hit["score"] == pytest.approx(expected[hit["attributes"]["price"]], abs=1e-5)


def test_invalid_likes_are_refused_with_the_reason(market) -> None:
    unknown = post(market, {"positives": ["none.png"]})
    assert "none.png" in assert_problem(unknown, 404, "unknown-item")["detail"]
    many = post(market, {"positives": [f"{n}" for n in range(257)]})
    problem = assert_problem(many, 422, "invalid-parameter")
    assert "256 or fewer" in problem["detail"]
    assert problem["errors"][0]["name"] == "positives"


def test_similar_items_are_the_hits_of_a_search_with_the_item(market) -> None:
    hits = found(market, photo(3), k=COUNT)["hits"]
    path = f"/galleries/shop/items/{hits[0]['id']}/similar"
    answer = market.client.get(path, params={"k": COUNT}).json()
    assert keys(answer) == [hit["key"] for hit in hits[1:]]
    params = {"k": 2, "offset": 1, "filter": "price < 9", "group_by": "colour"}
    grouped = market.client.get(path, params=params).json()["groups"]
    assert len(grouped) == 2
    assert all(n < 9 for group in grouped for n in numbers(group["hits"]))


def test_a_similar_search_checks_item_gallery_and_version(market) -> None:
    listed = market.client.get("/galleries/shop").json()
    [hit] = found(market, photo(3), k=1)["hits"]
    path = f"/galleries/shop/items/{hit['id']}/similar"
    known = market.client.get(path, params={"version": listed["generation"]})
    assert known.status_code == 200
    other = market.client.get(path, params={"version": "0" * 12})
    assert "was rebuilt" in assert_problem(other, 404, "unknown-item")["detail"]
    assert_problem(market.client.get("/galleries/shop/items/999/similar"), 404, "unknown-item")
    assert_problem(market.client.get("/galleries/x/items/1/similar"), 404, "unknown-gallery")
    for version in ("latest", "A" * 12, "0" * 65):
        for what in ("similar", "image"):
            wrong = f"/galleries/shop/items/1/{what}"
            response = market.client.get(wrong, params={"version": version})
            problem = assert_problem(response, 422, "invalid-parameter")
            assert problem["errors"][0]["name"] == "version"


def test_distinct_counts_equal_contents_once(tmp_path, closes) -> None:
    shop = closes(start_market(tmp_path))
    shop.put({"twin.png": photo(3)}, colour="red", price=3, product="p1")
    assert keys(found(shop.running, photo(3), k=2)) == ["003.png", "twin.png"]
    assert keys(found(shop.running, photo(3), k=2, distinct=True))[0] == "003.png"
    assert "twin.png" not in keys(found(shop.running, photo(3), k=COUNT + 1, distinct=True))


VECTOR = [0.6, 0.8, *[0.0] * 30]


def test_every_parameter_is_part_of_the_cache_key(market) -> None:
    image = {"data": text_of(encoded(render(77)))}
    variants: list[dict[str, Any]] = [
        {},
        {"images": [image, {"data": text_of(photo(1))}]},
        {"images": [image | {"crops": [[0, 0, 0.5, 1]]}]},
        {"k": 3},
        {"offset": 1},
        {"min_score": 0.2},
        {"min_probability": 0.2},
        {"filter": "price < 5"},
        {"group_by": "colour"},
        {"group_by": "colour", "group_size": 2},
        {"positives": ["001.png"]},
        {"positives": ["001.png", "002.png"]},
        {"positives": ["001.png"], "negatives": ["002.png"]},
        {"vectors": [{"vector": VECTOR}]},
        {"vectors": [{"vector": VECTOR, "weight": 0.5}]},
        {"vectors": [{"vector": [-number for number in VECTOR]}]},
        {"distinct": True},
        {"distinct": "near"},
        {"exact": True},
        {"facets": ["colour"]},
        {"facets": ["colour", "price"]},
        {"fields": ["colour"]},
        {"fields": []},
        {"diversity": 0.3},
        {"boost": "price:0.1"},
        {"boost": "price:0.1:0:50"},
        {"sort_by": "price"},
    ]
    document = market.client.get("/openapi.json").json()["paths"]["/search"]["post"]
    schema = document["requestBody"]["content"]["application/json"]["schema"]
    names = {name for variant in variants for name in variant}
    others = {"gallery", "combine", "texts"}  # test_texts.py searches with words
    others |= {"guarantee", "accept"}  # test_guarantee.py has labelled queries
    assert names | others == schema["properties"].keys()
    first = [found(market, **{"images": [image], **variant}) for variant in variants]
    again = [found(market, **{"images": [image], **variant}) for variant in variants]
    assert not any(answer["cached"] for answer in first)
    assert all(answer["cached"] for answer in again)
    for answer in (*first, *again):
        del answer["cached"], answer["timings_ms"]
    assert first == again


NAMES = ["colour", "price"]
EVERYTHING = range(COUNT)


def naive(numbers: Sequence[int]) -> dict[str, Any]:
    """The facets of these items."""
    colours = Counter(attributes_of(n)["colour"] for n in numbers)
    ranked = sorted(colours.items(), key=lambda pair: (-pair[1], pair[0]))
    prices = [(n, 1) for n in sorted(numbers)]
    return {
        name: {"values": [{"value": v, "count": c} for v, c in values], "other": 0, "missing": 0}
        for name, values in (("colour", ranked), ("price", prices))
    }


@pytest.mark.parametrize(
    ("asked", "fitting"),
    [
        ({}, EVERYTHING),
        ({"group_by": "product", "group_size": 2}, EVERYTHING),
        ({"filter": {"colour": "red"}}, [0, 3, 6, 9]),
        ({"filter": "price > 100"}, []),
    ],
)
def test_values_are_counted_over_all_matches(market, asked, fitting) -> None:
    answer = found(market, photo(3), **{"k": 1, "facets": NAMES, **asked})
    expected = naive(fitting)
    if not fitting:
        expected["price"] |= {"values": []}
    assert answer["facets"] == expected


def test_every_route_and_format_counts_the_same(market) -> None:
    where = json.dumps({"colour": {"in": ["red", "blue"]}})
    expected = naive([n for n in EVERYTHING if n % 3 != 1])
    fields = {"facets": "colour,price", "filter": where, "k": "1"}
    image = {"image": ("a.png", photo(2))}
    form = market.client.post("/search", data=fields, files=image)
    assert form.json()["facets"] == expected
    raw = market.client.post(
        "/search",
        params=fields | {"facets": json.dumps(NAMES)},
        content=photo(2),
        headers={"content-type": "image/png"},
    )
    assert raw.json()["facets"] == expected
    one = {"images": [{"data": text_of(photo(2))}], "filter": where, "facets": NAMES}
    [first, second] = post(
        market, {"queries": [one, one | {"facets": []}]}, "/search/batch"
    ).json()["answers"]
    assert first["answer"]["facets"] == expected
    assert "facets" not in second["answer"]
    listed = market.client.get("/galleries/shop/items", params=fields | {"k": []}).json()
    assert (listed["facets"], listed["total"]) == (expected, 8)
    item = listed["items"][0]
    path = f"/galleries/shop/items/{item['id']}/similar"
    similar = market.client.get(path, params=fields).json()
    assert similar["facets"] == naive([n for n in EVERYTHING if n % 3 != 1 and n])
    assert item["attributes"]["price"] == 0
    with Client(market.url) as client:
        answer = client.search(photo(2), filter=json.loads(where), facets=NAMES)
    shown = {name: one.model_dump(exclude={"bins"}) for name, one in answer.facets.items()}
    assert shown == expected


@pytest.mark.parametrize(
    ("facets", "reported", "slug"),
    [
        (["color"], "'color' to count", "invalid-filter"),
        ([f"a{n}" for n in range(9)], "9 attributes; the limit is 8", "invalid-parameter"),
        ("[colour", "not a valid JSON list", "invalid-parameter"),
    ],
)
def test_invalid_facets_are_refused(market, facets: Any, reported: str, slug: str) -> None:
    body = {"images": [{"data": text_of(photo(1))}], "facets": facets}
    assert reported in assert_problem(post(market, body), 422, slug)["detail"]
    if isinstance(facets, str):
        response = market.client.get("/galleries/shop/items", params={"facets": facets})
        assert reported in assert_problem(response, 422, slug)["detail"]


def test_a_product_without_further_images_has_no_match(market) -> None:
    one = found(market, positives=["003.png"], k=COUNT)
    assert one["no_match_probability"] < 1
    assert one["hits"][0]["probability"] > 0
    both = found(market, positives=["002.png", "003.png"], k=COUNT)  # all photos of this product
    assert {hit["probability"] for hit in both["hits"]} == {0}
    assert both["no_match_probability"] == 1


def test_a_larger_prior_raises_the_probability_of_no_match(tmp_path, closes) -> None:
    reported = []
    for prior in (0.0, 0.1, 0.9):
        shop = closes(start_market(tmp_path / f"{prior}", no_match_prior=prior))
        answer = found(shop.running, encoded(render(99)))
        reported.append(answer["no_match_probability"])
        assert shop.gallery()["calibration"]["no_match_prior"] == prior
    assert reported == sorted(reported)
    assert reported[0] < reported[2]
