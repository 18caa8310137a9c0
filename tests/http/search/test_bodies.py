"""How a search is sent, how much it may ask for, and what each content type refuses."""

import json
from typing import Any

import pytest

from tests.support.market import keys, picture, post, start_market, text_of
from tests.support.shops import assert_problem

GOOD = text_of(picture(4))


FIELDS: dict[str, Any] = {
    "k": 3,
    "offset": 1,
    "min_score": -0.5,
    "filter": "price >= 2",
    "group_by": "product",
    "group_score": "mean",
    "group_size": 2,
    "distinct": True,
    "exact": True,
}


def comparable(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    del answer["timings_ms"], answer["cached"]
    return answer


def test_a_form_a_raw_body_and_json_mean_the_same(market) -> None:
    as_text = {name: str(value).lower() for name, value in FIELDS.items()}
    crop = "0.1,0.1,0.8,0.8"
    form = market.client.post(
        "/search", files={"image": ("a.png", picture(4))}, data={**as_text, "crop": crop}
    )
    raw = market.client.post(
        "/search",
        content=picture(4),
        headers={"content-type": "image/png"},
        params={**as_text, "crop": crop},
    )
    images = [{"data": GOOD, "crops": [[0.1, 0.1, 0.8, 0.8]]}]
    as_json = post(market, {"images": images, **FIELDS})
    assert comparable(form) == comparable(raw) == comparable(as_json)
    assert len(as_json.json()["groups"]) == 3


def test_a_query_string_adds_to_a_form_but_says_nothing_twice(market) -> None:
    files = {"image": ("a.png", picture(4))}
    assert market.client.post("/search?k=2", files=files).json()["count"] == 2
    twice = market.client.post("/search?k=2", files=files, data={"k": "3"})
    assert "k is given twice" in assert_problem(twice, 422, "invalid-parameter")["detail"]
    twice = market.client.post("/search?k=2", json={"images": [{"data": GOOD}], "k": 3})
    assert "k is given twice" in assert_problem(twice, 422, "invalid-parameter")["detail"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "video/x"])
def test_another_content_type_is_415_and_names_the_three(market, kind: str) -> None:
    response = market.client.post("/search", content=picture(4), headers={"content-type": kind})
    detail = assert_problem(response, 415, "unsupported-media-type")["detail"]
    for name in ("multipart/form-data", "image/*", "application/octet-stream", "application/json"):
        assert name in detail


def test_octet_stream_and_a_content_type_with_parameters_are_read(market) -> None:
    for kind in ("application/octet-stream", "image/PNG; name=x", "IMAGE/webp"):
        response = market.client.post(
            "/search?k=1", content=picture(4), headers={"content-type": kind}
        )
        assert keys(response.json()) == ["004.png"]


def test_a_data_url_is_base64_too(market) -> None:
    answer = post(market, {"images": [{"data": f"data:image/png;base64,{GOOD}"}], "k": 1}).json()
    assert keys(answer) == ["004.png"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("http://169.254.169.254/latest", "loaded from addresses"),
        ("https://shop.example/a.png", "loaded from addresses"),
        ("file:///etc/passwd", "loaded from addresses"),
        ("  FTP://x/a.png", "loaded from addresses"),
        ("data:image/png,abc", "not base64"),
        ("/etc/passwd!", "not base64"),
        (GOOD + "\n", "not base64"),
        (GOOD[:-3], "not base64"),
        ("ä", "not base64"),
        (7, "no text"),
        (None, "no text"),
    ],
)
def test_what_is_not_base64_is_refused_and_no_address_is_followed(
    market, data: Any, says: str
) -> None:
    problem = assert_problem(post(market, {"images": [{"data": data}]}), 422, "invalid-parameter")
    assert says in problem["detail"]
    assert problem["errors"][0]["name"] == "images[0].data"


def test_a_field_that_is_null_is_as_if_it_were_not_there(market) -> None:
    names = ("gallery", "k", "offset", "min_score", "min_probability", "filter", "group_by")
    nulls = post(market, {"images": [{"data": GOOD}], **dict.fromkeys((*names, "group_size"))})
    assert comparable(nulls) == comparable(post(market, {"images": [{"data": GOOD}]}))


def test_empty_base64_is_an_empty_image(market) -> None:
    assert_problem(post(market, {"images": [{"data": ""}]}), 400, "empty-image")


BAD: dict[str, Any] = {
    "no image": ({}, "image is missing"),
    "negatives alone": ({"negatives": ["000.png"]}, "image is missing"),
    "unknown field": ({"images": [{"data": GOOD}], "min-score": 1}, "min-score is no parameter"),
    "unknown in image": ({"images": [{"data": GOOD, "url": "x"}]}, "images[0].url is no parameter"),
    "k true": ({"images": [{"data": GOOD}], "k": True}, "k = True"),
    "k half": ({"images": [{"data": GOOD}], "k": 2.5}, "k = 2.5"),
    "k list": ({"images": [{"data": GOOD}], "k": [1]}, "k = [1]"),
    "offset -1": ({"images": [{"data": GOOD}], "offset": -1}, "offset = -1"),
    "reach": ({"images": [{"data": GOOD}], "k": 10, "offset": 9_995}, "offset + k = 10,005"),
    "groups": (
        {"images": [{"data": GOOD}], "k": 200, "group_by": "product", "group_size": 100},
        "k * group_size = 20,000",
    ),
    "min_score 2": ({"images": [{"data": GOOD}], "min_score": 2}, "a number from -1 to 1"),
    "min_probability": ({"images": [{"data": GOOD}], "min_probability": 1.5}, "from 0 to 1"),
    "combine": ({"images": [{"data": GOOD}], "combine": "sum"}, "'mean' or 'separate'"),
    "group_score": ({"images": [{"data": GOOD}], "group_score": "max"}, "'best' or 'mean'"),
    "filter": ({"images": [{"data": GOOD}], "filter": 3}, "filter = 3 is neither"),
    "images": ({"images": [{"data": GOOD}] * 33}, "33 images are more than the limit of 32"),
    "crops": (
        {"images": [{"data": GOOD, "crops": [[0, 0, 1, 1]] * 17}]},
        "17 crops of an image are more than the limit of 16",
    ),
    "crop outside": ({"images": [{"data": GOOD, "crops": [[0.9, 0, 0.5, 1]]}]}, "leaves the image"),
    "crop of three": ({"images": [{"data": GOOD, "crops": [[0, 0, 1]]}]}, "four finite numbers"),
    "crop of words": ({"images": [{"data": GOOD, "crops": ["a,b,c,d"]}]}, "left,top,width,height"),
    "crop of null": ({"images": [{"data": GOOD, "crops": [None]}]}, "left,top,width,height"),
    "key no text": ({"positives": [7]}, "positives[0]"),
    "images no list": ({"images": 7}, "images"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_bad_field_is_named_with_its_value_and_what_to_send(market, name: str) -> None:
    body, says = BAD[name]
    problem = assert_problem(post(market, body), 422, "invalid-parameter")
    assert says in problem["detail"]
    assert problem["errors"]
    assert GOOD[:50] not in json.dumps(problem)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"7", b'{"k": NaN}', b'{"gallery": "\\ud800"}', b"\xff", b"[" * 10_000],
)
def test_a_body_that_is_no_json_object_is_400(market, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = market.client.post("/search", content=body, headers=headers)
    assert_problem(response, 400, "bad-request")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--x",
        b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\nabc',
        b"--x\r\nContent-Type: a\r\n\r\nabc\r\n--x--\r\n",
        b'--x\r\nContent-Disposition: form-data; name="k"\r\n\r\n\xff\r\n--x--\r\n',
        b'--x\r\nContent-Disposition: form-data; name="\xff"\r\n\r\n3\r\n--x--\r\n',
        b"--x\r\n" + b"a: b\r\n" * 1_000 + b"\r\n\r\n--x--\r\n",
        b'--x\r\nContent-Disposition: form-data; name="k"\r\n\r\n3\r\n' * 1_001 + b"--x--\r\n",
    ],
)
def test_a_broken_form_is_400(market, body: bytes) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    response = market.client.post("/search", content=body, headers=headers)
    assert_problem(response, 400, "bad-request")


def test_a_form_may_hold_what_looks_like_its_boundary(market) -> None:
    data = picture(4) + b"\r\n--boundar\r\n--" * 10
    files = {"image": ("a.png", data)}
    assert keys(market.client.post("/search", files=files, data={"k": "1"}).json()) == ["004.png"]


def test_a_smaller_limit_of_the_settings_is_in_the_message_and_in_the_document(tmp_path) -> None:
    shop = start_market(tmp_path, max_images=2, max_crops=1, max_batch_queries=3)
    try:
        answer = post(shop.running, {"images": [{"data": GOOD}] * 3})
        assert "limit of 2" in assert_problem(answer, 422, "invalid-parameter")["detail"]
        batch = post(shop.running, {"queries": [{"images": [{"data": GOOD}]}] * 4}, "/search/batch")
        assert "limit is 3" in assert_problem(batch, 422, "invalid-parameter")["detail"]
        paths = shop.client.get("/openapi.json").json()["paths"]
        content = paths["/search"]["post"]["requestBody"]["content"]
        schema = content["application/json"]["schema"]["properties"]
        assert schema["images"]["maxItems"] == 2
        assert schema["images"]["items"]["properties"]["crops"]["maxItems"] == 1
        batch = paths["/search/batch"]["post"]["requestBody"]["content"]
        assert batch["application/json"]["schema"]["properties"]["queries"]["maxItems"] == 3
    finally:
        shop.close()


IMAGE = {"data": text_of(picture(1))}
CROPS = [[0, 0, 1, 0.5 + n / 100] for n in range(16)]


def images(count: int, crops: int = 0) -> list[dict[str, Any]]:
    return [{**IMAGE, "crops": CROPS[:crops]}] * count


def refusal(response: Any) -> str:
    return str(assert_problem(response, 422, "invalid-parameter")["detail"])


def test_apart_there_are_as_many_queries_and_hits_as_in_a_batch(market) -> None:
    body: dict[str, Any] = {"images": images(5, 13), "combine": "separate"}
    assert "65 queries in all; the limit is 64" in refusal(post(market, body))
    body["images"] = images(4, 16)
    assert "128,000 hits in all" in refusal(post(market, body | {"k": 2_000}))
    grouped = {"k": 100, "group_by": "colour", "group_size": 20}
    assert "128,000 hits in all" in refusal(post(market, body | grouped))
    assert len(post(market, body | {"k": 1}).json()["answers"]) == 64
    parts: list[Any] = [("image", ("a.png", picture(1)))] * 5
    parts += [("crop", (None, ",".join(map(str, crop)))) for crop in CROPS[:13]]
    form = market.client.post("/search", files=[*parts, ("combine", (None, "separate"))])
    assert "65 queries" in refusal(form)


def test_all_views_of_a_request_count_together(market) -> None:
    assert "272 images and crops in all; the limit is 256" in refusal(
        post(market, {"images": images(17, 16)})
    )
    queries = [{"images": images(8, 16), "k": 1}] * 3
    assert "384 images and crops in all" in refusal(
        post(market, {"queries": queries}, "/search/batch")
    )
    queries = [{"images": images(17, 16)}, {"images": images(1), "k": 1}]
    answers = post(market, {"queries": queries}, "/search/batch").json()["answers"]
    assert [answer["status"] for answer in answers] == [422, 200]
    parts: list[Any] = [("image", ("a.png", picture(1)))] * 17
    parts += [("crop", (None, ",".join(map(str, crop)))) for crop in CROPS]
    assert "272 images" in refusal(market.client.post("/search", files=parts))
    assert "272 images" in refusal(market.client.post("/search/batch", files=parts))
