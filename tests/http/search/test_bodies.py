"""Formats, limits and wrong parameters of requests, and bodies that are broken or expensive."""

import json
from typing import Any

import pytest

from kinlens.embedder.preprocess import ImageLimits
from tests.support.market import keys, photo, post, text_of
from tests.support.shops import assert_problem

GOOD = text_of(photo(4))
IMAGES = {"images": [{"data": GOOD}]}
FILES = {"image": ("a.png", photo(4))}
FIELDS: dict[str, Any] = {
    "k": 3,
    "offset": 1,
    "min_score": -0.5,
    "filter": "price >= 2",
    "group_by": "product",
    "group_size": 2,
    "distinct": True,
    "exact": True,
}


def send(service: Any, operation: str, body: bytes | str) -> Any:
    """A body of JSON, as it is."""
    method, path = operation.split()
    headers = {"content-type": "application/json"}
    return service.client.request(method, path, content=body, headers=headers)


def comparable(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    del answer["timings_ms"], answer["cached"]
    return answer


def refusal(response: Any) -> str:
    return str(assert_problem(response, 422, "invalid-parameter")["detail"])


def test_a_form_a_raw_body_and_json_are_equivalent(market) -> None:
    as_text = {name: str(value).lower() for name, value in FIELDS.items()}
    as_text["crop"] = "0.1,0.1,0.8,0.8"
    form = market.client.post("/search", files=FILES, data=as_text)
    png = {"content-type": "image/png"}
    raw = market.client.post("/search", content=photo(4), headers=png, params=as_text)
    images = [{"data": GOOD, "crops": [[0.1, 0.1, 0.8, 0.8]]}]
    as_json = post(market, {"images": images, **FIELDS})
    assert comparable(form) == comparable(raw) == comparable(as_json)
    assert len(as_json.json()["groups"]) == 3


def test_a_query_string_adds_to_a_form_but_repeats_no_field(market) -> None:
    assert market.client.post("/search?k=2", files=FILES).json()["count"] == 2
    for sent in ({"files": FILES, "data": {"k": "3"}}, {"json": {**IMAGES, "k": 3}}):
        assert "k was sent twice" in refusal(market.client.post("/search?k=2", **sent))


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_another_content_type_is_415(market, kind: str) -> None:
    response = market.client.post("/search", content=photo(4), headers={"content-type": kind})
    detail = assert_problem(response, 415, "unsupported-media-type")["detail"]
    for name in ("multipart/form-data", "image/*", "application/octet-stream", "application/json"):
        assert name in detail


@pytest.mark.parametrize(
    "kind", ["application/octet-stream", "image/PNG; name=x", "IMAGE/webp", "application/json"]
)
def test_a_content_type_with_parameters_and_a_data_url_are_read(market, kind: str) -> None:
    body = photo(4)
    if kind == "application/json":
        body = json.dumps({"images": [{"data": f"data:image/png;base64,{GOOD}"}]}).encode()
    response = market.client.post("/search?k=1", content=body, headers={"content-type": kind})
    assert keys(response.json()) == ["004.png"]


def test_a_null_field_is_ignored(market) -> None:
    names = ("gallery", "k", "offset", "min_score", "min_probability", "filter", "group_by")
    nulls = post(market, IMAGES | dict.fromkeys((*names, "group_size")))
    assert comparable(nulls) == comparable(post(market, IMAGES))


def cropped(*crops: Any) -> dict[str, Any]:
    return {"images": [{"data": GOOD, "crops": crops}]}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no image": ({}, "image and positives are missing"),
    "an address": ({"images": [{"data": "http://169.254.169.254/"}]}, "URLs are not loaded"),
    "a path": ({"images": [{"data": "/etc/passwd!"}]}, "not base64"),
    "cut base64": ({"images": [{"data": GOOD[:-3]}]}, "not base64"),
    "a number": ({"images": [{"data": 7}]}, "must be a string"),
    "unknown field": (IMAGES | {"min-score": 1}, "min-score is not a parameter"),
    "k true": (IMAGES | {"k": True}, "k = True"),
    "k list": (IMAGES | {"k": [1]}, "k = [1]"),
    "k as a text": (IMAGES | {"k": "3"}, "k = '3' is not a whole number"),
    "exact as a text": (IMAGES | {"exact": "yes"}, "exact = 'yes' is neither true nor false"),
    "distinct as a text": (IMAGES | {"distinct": "true"}, "send true, false or near"),
    "score as a text": (IMAGES | {"min_score": "0.5"}, "min_score = '0.5' is not a number"),
    "reach": (IMAGES | {"k": 10, "offset": 9_995}, "offset + k = 10,005"),
    "groups": (IMAGES | {"k": 200, "group_by": "x", "group_size": 100}, "k * group_size = 20,000"),
    "min_probability": (IMAGES | {"min_probability": 1.5}, "use 1.0 or less"),
    "combine": (IMAGES | {"combine": "separate"}, "'mean' or 'best'"),
    **{
        f"best with {name}": (
            IMAGES | {"combine": "best", name: value},
            "combine = best searches with each image and crop",
        )
        for name, value in {"positives": ["0"], "distinct": True, "diversity": 0.2}.items()
    },
    "filter": (IMAGES | {"filter": 3}, "filter = 3 is neither"),
    "diversity": (IMAGES | {"diversity": 2}, "diversity = 2 is too large; use 1.0 or less"),
    "boost of a word": (IMAGES | {"boost": "price"}, "Write price:-0.1"),
    "images": ({"images": [{"data": GOOD}] * 33}, "images has 33 entries; use 32 or fewer"),
    "crops": (cropped(*[[0, 0, 1, 1]] * 17), "images[0].crops has 17 entries; use 16 or fewer"),
    "crop outside": (cropped([0.9, 0, 0.5, 1]), "extends beyond the image"),
    "all crops": ({"images": [{"data": GOOD, "crops": "all"}]}, "send auto, or a list of crops"),
    "windows and crops": (cropped("auto", [0, 0, 1, 1]), "crop = auto is not a crop"),
    "mean of windows": (
        {"images": [{"data": GOOD, "crops": "auto"}], "combine": "mean"},
        "crops = auto searches with each window; omit combine = mean",
    ),
    "liked windows": (
        {"images": [{"data": GOOD, "crops": "auto"}], "positives": ["0"]},
        "diversity, boost and sort_by, or omit crops = auto",
    ),
    "crop of three": (cropped([0, 0, 1]), "four finite numbers"),
    "crop of null": (cropped(None), "left,top,width,height"),
    "key no text": ({"positives": [7]}, "positives[0]"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_bad_field_is_named_with_the_cure(market, name: str) -> None:
    body, message = BAD[name]
    problem = assert_problem(post(market, body), 422, "invalid-parameter")
    assert message in problem["detail"]
    assert problem["errors"]
    assert GOOD[:50] not in json.dumps(problem)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"k": NaN}', b"\xff", b"[" * 10_000])
def test_a_body_without_a_json_object_is_400(market, body: bytes) -> None:
    assert_problem(send(market, "POST /search", body), 400, "bad-request")


def test_limits_are_enforced_and_documented(market) -> None:
    assert post(market, IMAGES).json()["k"] == 20
    assert post(market, IMAGES | {"k": 10_000}).status_code == 200
    assert "use 10,000 or less" in refusal(post(market, IMAGES | {"k": 10_001}))
    batch = post(market, {"queries": [IMAGES] * 65}, "/search/batch")
    assert "limit is 64" in refusal(batch)
    paths = market.client.get("/openapi.json").json()["paths"]
    content = paths["/search"]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]["properties"]
    assert schema["images"]["maxItems"] == 32
    assert schema["images"]["items"]["properties"]["crops"]["anyOf"][0]["maxItems"] == 16
    assert schema["k"]["anyOf"][0]["maximum"] == 10_000
    assert content["multipart/form-data"]["schema"]["properties"]["k"]["default"] == 20


def test_all_views_of_a_request_count_together(market) -> None:
    crops = [[0, 0, 1, 0.5 + n / 100] for n in range(16)]
    many = {"images": [{"data": GOOD, "crops": crops}] * 17}
    assert "272 images and crops in total; the limit is 256" in refusal(post(market, many))
    queries = [{"images": [{"data": GOOD, "crops": crops}] * 8, "k": 1}] * 3
    batch = post(market, {"queries": queries}, "/search/batch")
    assert "384 images and crops in total" in refusal(batch)
    some = post(market, {"queries": [many, IMAGES | {"k": 1}]}, "/search/batch")
    assert [answer["status"] for answer in some.json()["answers"]] == [422, 200]
    form: list[Any] = [("image", ("a.png", photo(1)))] * 17
    form += [("crop", (None, ",".join(map(str, crop)))) for crop in crops]
    for path in ("/search", "/search/batch"):
        assert "272 images" in refusal(market.client.post(path, files=form))


ITEMS = "/galleries/shop/items"
SEARCH, BATCH = "POST /search", "POST /search/batch"
PUT, PATCH, DELETE = f"PUT {ITEMS}", f"PATCH {ITEMS}", f"POST {ITEMS}/delete"
UNKNOWN = b"{" + b",".join(b'"x%x":1' % n for n in range(30_000)) + b"}"
LISTS = UNKNOWN.replace(b":1", b":[]")


def many(value: bytes, count: int) -> bytes:
    return b"[" + b",".join([value] * count) + b"]"


BOMBS: dict[str, tuple[str, bytes]] = {
    "images of objects": (SEARCH, b'{"images":' + many(b"{}", 1_300_000) + b"}"),
    "32 objects": (SEARCH, b'{"images":' + many(b"{}", 32) + b"}"),
    "crops": (SEARCH, json.dumps(cropped(*[1] * 40_000)).encode()),
    "crop of commas": (SEARCH, json.dumps(cropped("," * 90_000)).encode()),
    "k": (SEARCH, b'{"positives":["a"],"k":' + many(many(b"1", 90), 900) + b"}"),
    "unknown": (SEARCH, UNKNOWN),
    "batch": (BATCH, b'{"queries":' + many(b'{"images":' + many(b"1", 15_000) + b"}", 64) + b"}"),
    "put": (PUT, b'{"items":' + many(b"1", 40_000) + b"}"),
    "put attributes": (PUT, b'{"items":[{"key":"k","data":"","attributes":' + LISTS + b"}]}"),
    "patch": (PATCH, b'{"changes":' + UNKNOWN + b"}"),
    "delete": (DELETE, b'{"keys":' + many(b"1", 90_000) + b"}"),
    "train": ("POST /jobs/train", b'{"overrides":{"a":' + many(b"{}", 5_000) + b"}}"),
    "create": ("POST /galleries", UNKNOWN[:15_000].rpartition(b",")[0] + b"}"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_body_of_many_faults_has_a_short_answer(market, name: str) -> None:
    response = send(market, *BOMBS[name])
    assert_problem(response, 422, "invalid-parameter")
    assert len(response.content) < 8_000
    assert len(response.json().get("errors") or []) <= 20


def test_json_of_a_short_form_has_a_small_limit(market) -> None:
    assert_problem(send(market, "POST /jobs/train", UNKNOWN), 413, "body-too-large")


@pytest.mark.parametrize("opening", [b"[", b'{"not":'])
def test_deep_nesting_is_refused(market, opening: bytes) -> None:
    deep = opening * 50_000
    for operation in (SEARCH, BATCH, PUT, PATCH, DELETE):
        assert send(market, operation, deep[:60_000]).status_code in (400, 422)
    for text in (deep[:5_000].decode(), "(" * 5_000, "not " * 2_000):
        response = market.client.get(ITEMS, params={"filter": text})
        assert_problem(response, 422, "invalid-filter")


def test_ten_thousand_items_is_the_limit_of_a_change(market) -> None:
    names = [f"k{n}" for n in range(10_000)]
    assert send(market, DELETE, json.dumps({"keys": names})).json()["removed"] == 0
    names.append("k")
    for operation, body in (
        (DELETE, {"keys": names}),
        (PATCH, {"changes": {name: {} for name in names}}),
    ):
        assert "10,000 or fewer" in refusal(send(market, operation, json.dumps(body)))


HALVES = [
    *((SEARCH, body) for body in ('{"?":1}', '{"positives":["?"]}', '{"images":[{"data":"?"}]}')),
    (SEARCH, '{"positives":["a"],"gallery":"?"}'),
    (SEARCH, '{"positives":["000.png"],"filter":{"colour":{"in":["?"]}}}'),
    (PUT, f'{{"items":[{{"key":"?","data":"{GOOD}"}}]}}'),
    (PUT, f'{{"items":[{{"key":"k","data":"{GOOD}","attributes":{{"?":1}}}}]}}'),
    *((PATCH, body) for body in ('{"changes":{"?":{}}}', '{"changes":{"k":{"a":"?"}}}')),
    *((DELETE, body) for body in ('{"keys":["?"]}', '{"filter":{"colour":{"in":["?"]}}}')),
    ("POST /galleries", '{"name":"?"}'),
]


def test_half_a_surrogate_pair_in_a_body_is_a_client_error(market) -> None:
    """It is not valid text."""
    for operation, body in HALVES:
        response = send(market, operation, body.replace("?", "\\ud800"))
        assert response.status_code in (400, 404, 409, 422), (body, response.text)
        assert response.json()["detail"]


NAME_FORM = "1 to 64 letters, digits, dots, hyphens and underscores, the first a letter or digit"
TRAIN = {"gallery": "shop", "job": "shop"}


JOBS, TRAINING = "GET /jobs", "POST /jobs/train"
REBUILD, SWAP = "POST /galleries/shop/rebuild", "POST /galleries/shop/swap"
WRONG: list[tuple[str, object, str]] = [
    ("GET /galleries/shop/items?limit=500", None, "limit = '500' is too large; use 200 or less."),
    (f"{JOBS}?limit=x", None, "limit = 'x' is not a whole number; use only digits."),
    (
        f"{JOBS}?limit={'9' * 5000}",
        *(None, f"limit = '{'9' * 40}' has too many digits; use a smaller number."),
    ),
    (
        "GET /galleries/shop/feedback?format=xml",
        *(None, "format = 'xml' is not a valid choice; use 'csv', 'words' or 'json'."),
    ),
    (SWAP, {"with": "../x"}, f"with = '../x' does not have the right form; use {NAME_FORM}."),
    (REBUILD, {"bundle_id": 5}, "bundle_id must be a string (got 5); use a string."),
    (REBUILD, {}, "bundle_id is missing; send it in the JSON body."),
    (
        "POST /galleries/shop/sync",
        *({"dry_run": "yes"}, "dry_run = 'yes' is neither true nor false; use one of the two."),
    ),
    (
        *(TRAINING, {**TRAIN, "gate": {"max_recall_loss": -1, "min_queries": 2.5}}),
        "gate.max_recall_loss = -1 is too small; use 0.0 or more. gate.min_queries = 2.5 is "
        "not a whole number; use only digits.",
    ),
    (
        TRAINING,
        {**TRAIN, "image_url": "https://shop.example/1.jpg"},
        "image_url is not a parameter here; URLs are not fetched, send the image.",
    ),
    (TRAINING, {**TRAIN, "more": 1}, "more is not a parameter here; /docs lists the parameters."),
    (DELETE, {"keys": []}, "keys has 0 entries; use 1 or more."),
    (DELETE, {"keys": ["a", 3]}, "keys[1] must be a string (got 3); use a string."),
]


@pytest.mark.parametrize(("operation", "body", "message"), WRONG)
def test_a_wrong_parameter_is_named_with_its_cure(market, operation, body, message: str) -> None:
    method, path = operation.split()
    answer = market.client.request(method, path, json=body)
    found = assert_problem(answer, 422, "invalid-parameter")
    assert found["detail"] == message
    assert found["errors"][0]["name"] == message.split()[0]


def test_an_image_above_its_byte_limit_is_413(start_service, embedder, photos) -> None:
    limited = type(embedder)(limits=ImageLimits(max_bytes=1000))
    service = start_service(embedder=limited, max_upload_bytes=1000)
    data = photos[0] + bytes(2000)
    problem = assert_problem(service.search(data), 413, "image-too-many-bytes")
    assert f"{len(data):,}" in problem["detail"]
    assert "1,000" in problem["detail"]
