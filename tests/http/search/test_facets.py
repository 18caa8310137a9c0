"""Counts of attribute values over HTTP: of all matches, not of the page."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from kinlens.client import Client
from tests.support.market import COUNT, attributes_of, found, photo, post, text_of
from tests.support.shops import assert_problem

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
