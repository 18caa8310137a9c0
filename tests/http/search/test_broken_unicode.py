"""Halves of surrogate pairs, which are no text, in every place that takes one."""

import json

import pytest
from fastapi.exceptions import RequestValidationError

from embedder.errors import FilterError
from service.problems import INVALID, described, problem
from tests.support.market import picture, text_of

HALF = "\\ud800"
ITEMS = "/galleries/shop/items"
IMAGE = text_of(picture(1))
FILTERS = (f'{{"{HALF}":"x"}}', f'{{"colour":"{HALF}"}}', f'{{"colour":{{"in":["{HALF}"]}}}}')
BODIES: list[tuple[str, str, str]] = [
    ("POST", "/search", f'{{"{HALF}":1}}'),
    ("POST", "/search", f'{{"positives":["{HALF}"]}}'),
    ("POST", "/search", f'{{"positives":["a"],"gallery":"{HALF}"}}'),
    ("POST", "/search", f'{{"positives":["a"],"group_by":"{HALF}"}}'),
    ("POST", "/search", f'{{"positives":["a"],"k":"{HALF}"}}'),
    ("POST", "/search", f'{{"images":[{{"data":"{HALF}"}}]}}'),
    ("POST", "/search/batch", f'{{"queries":[{{"{HALF}":1}}]}}'),
    ("PUT", ITEMS, f'{{"items":[{{"key":"{HALF}","data":"{IMAGE}"}}]}}'),
    ("PUT", ITEMS, f'{{"items":[{{"key":"k","data":"{IMAGE}","attributes":{{"{HALF}":1}}}}]}}'),
    ("PATCH", ITEMS, f'{{"changes":{{"{HALF}":{{}}}}}}'),
    ("PATCH", ITEMS, f'{{"changes":{{"k":{{"{HALF}":1}}}}}}'),
    ("PATCH", ITEMS, f'{{"changes":{{"k":{{"colour":"{HALF}"}}}}}}'),
    ("POST", f"{ITEMS}/delete", f'{{"keys":["{HALF}"]}}'),
    ("POST", f"{ITEMS}/delete", f'{{"{HALF}":1}}'),
    ("POST", "/galleries", f'{{"name":"{HALF}"}}'),
    ("POST", "/galleries", f'{{"name":"abc","bundle_id":"{HALF}"}}'),
    ("POST", "/galleries", f'{{"name":"abc","{HALF}":1}}'),
    ("POST", "/galleries/shop/swap", f'{{"with":"{HALF}"}}'),
    ("POST", "/galleries/shop/swap", f'{{"{HALF}":"x"}}'),
    ("POST", "/galleries/shop/rebuild", f'{{"bundle_id":"{HALF}"}}'),
    ("POST", "/jobs/train", f'{{"job":"shop","gallery":"shop","data":"{HALF}"}}'),
    ("POST", "/jobs/train", f'{{"job":"shop","gallery":"shop","overrides":{{"{HALF}":1}}}}'),
    ("POST", "/jobs/train", f'{{"job":"shop","gallery":"shop","overrides":{{"seed":"{HALF}"}}}}'),
    ("POST", "/jobs/train", f'{{"job":"shop","gallery":"shop","class_attribute":"{HALF}"}}'),
    *(("POST", "/search", f'{{"positives":["a"],"filter":{where}}}') for where in FILTERS),
    *(
        ("POST", "/search", json.dumps({"positives": ["000.png"], "filter": where}))
        for where in FILTERS
    ),
    *(("POST", f"{ITEMS}/delete", f'{{"filter":{where}}}') for where in FILTERS),
    *(("POST", f"{ITEMS}/delete", json.dumps({"filter": where})) for where in FILTERS),
]


@pytest.mark.parametrize(("method", "path", "body"), BODIES)
def test_in_a_body_it_is_the_fault_of_the_caller(market, method: str, path: str, body: str) -> None:
    headers = {"content-type": "application/json"}
    response = market.client.request(method, path, content=body.encode(), headers=headers)
    assert response.status_code in (400, 404, 409, 422), response.text
    assert response.json()["detail"]


@pytest.mark.parametrize("where", FILTERS)
def test_in_a_filter_it_is_the_fault_of_the_caller(market, where: str) -> None:
    png = {"content-type": "image/png"}
    sent = [
        market.client.get(ITEMS, params={"filter": where}),
        market.client.get(f"{ITEMS}/1/similar", params={"filter": where}),
        market.client.post("/search", params={"filter": where}, content=picture(1), headers=png),
        market.client.post("/search", files={"image": ("a", picture(1))}, data={"filter": where}),
    ]
    assert [response.status_code for response in sent] == [422] * 4
    batch = market.client.post(
        "/search/batch", files={"image": ("a", picture(1))}, data={"filter": where}
    )
    assert batch.status_code in (200, 422)


def test_in_the_attributes_of_a_form_it_fails_its_item(market) -> None:
    parts = [
        ("image", ("a.png", picture(1))),
        ("key", (None, "a")),
        ("attributes", (None, f'{{"colour":"{HALF}"}}')),
    ]
    response = market.client.put(ITEMS, files=parts)
    assert response.status_code == 422, response.text


def test_a_problem_can_always_be_written() -> None:
    half = "\ud800"
    answer = json.loads(bytes(problem(INVALID, half, request_id="r", instance=half).body))
    assert answer["detail"] == answer["instance"] == "?"
    faults = RequestValidationError([{"type": "x", "loc": (half,), "msg": half}])
    for error in (FilterError(half), faults):
        inside = described(error, request_id="r", instance=half)
        json.dumps(inside, ensure_ascii=False).encode()
