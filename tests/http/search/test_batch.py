"""Several searches in one request, each with its own outcome; items with several views."""

from typing import Any

import pytest

from kinlens.embedder.preprocess import windows
from tests.support.market import COUNT, found, keys, photo, post, text_of
from tests.support.shops import assert_problem, sha256, start_shop

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


CROPS = ((0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 0.5, 1.0))
PARTS = [(1, None), (2, CROPS[0]), (2, CROPS[1])]
"""What is looked for: an image, and two crops of another."""


def asked(**fields: Any) -> dict[str, Any]:
    crops = [list(crop) for crop in CROPS]
    images = [{"data": text_of(photo(3))}, {"data": text_of(photo(8)), "crops": crops}]
    return {"images": images, "k": COUNT, **fields}


@pytest.fixture(scope="module")
def alone(market) -> list[dict[str, Any]]:
    """The score of every item for each part, as a search for that part alone has it."""
    images = asked()["images"]
    parts = [images[0], *({**images[1], "crops": [list(crop)]} for crop in CROPS)]
    queries = [{"images": [part], "k": COUNT} for part in parts]
    answers = post(market, {"queries": queries}, "/search/batch").json()["answers"]
    hits = [each["answer"]["hits"] for each in answers]
    assert [len(each) for each in hits] == [COUNT] * len(PARTS)
    return [{hit["key"]: hit for hit in each} for each in hits]


def best_part(alone: list[dict[str, Any]], key: str) -> tuple[float, dict[str, Any]]:
    number = max(range(len(PARTS)), key=lambda n: alone[n][key]["score"])
    image, crop = PARTS[number]
    return alone[number][key]["score"], {"image": image, "crop": crop and list(crop)}


def test_an_item_counts_with_its_best_view(market, alone) -> None:
    hits = post(market, asked(combine="best")).json()["hits"]
    assert {hit["key"] for hit in hits} == alone[0].keys()
    for hit in hits:
        assert (hit["score"], hit["view"]) == best_part(alone, hit["key"])
    assert hits == sorted(hits, key=lambda hit: (-hit["score"], hit["id"]))
    again = post(market, asked(combine="best")).json()
    assert (again["cached"], again["hits"]) == (True, hits)
    assert "view" not in post(market, asked()).json()["hits"][0]


def test_windows_are_crops_that_nobody_has_to_send(market) -> None:
    data, crops = text_of(photo(8)), [list(box or (0, 0, 1, 1)) for box in windows()]
    by_hand = post(market, {"images": [{"data": data, "crops": crops}], "combine": "best"}).json()
    found = post(market, {"images": [{"data": data, "crops": "auto"}]}).json()
    for hit, expected in zip(found["hits"], by_hand["hits"], strict=True):
        crop = hit["view"]["crop"] or [0, 0, 1, 1]  # null is the whole image
        assert (hit["key"], hit["score"], crop) == (
            expected["key"],
            expected["score"],
            expected["view"]["crop"],
        )
    files = [("image", ("a.png", photo(8)))]
    form = market.client.post("/search", files=files, data={"crop": "auto"}).json()
    assert form["hits"] == found["hits"]
    batch = market.client.post(BATCH, files=files, data={"crop": "auto"}).json()
    assert batch["answers"][0]["answer"]["hits"] == found["hits"]
    many = [{"images": [{"data": data, "crops": "auto"}]}] * 64
    refused = assert_problem(post(market, {"queries": many}, BATCH), 422, "invalid-parameter")
    assert f"{64 * len(crops)} images and crops in total; the limit is 256" in refused["detail"]


def test_products_are_ranked_by_their_best_image_on_every_page(market, alone) -> None:
    products: dict[str, float] = {}
    for key, hit in alone[0].items():
        product, (score, _) = hit["attributes"]["product"], best_part(alone, key)
        products[product] = max(score, products.get(product, -1.0))
    expected = sorted(products.items(), key=lambda each: -each[1])
    fields = {"combine": "best", "group_by": "product"}
    for size in (1, 4, COUNT):
        pages = [
            post(market, asked(**fields | {"k": size, "offset": start})).json()["groups"]
            for start in range(0, len(products), size)
        ]
        groups = [group for page in pages for group in page]
        assert [(group["value"], group["score"]) for group in groups] == expected
        for group in groups:
            assert (group["score"], group["view"]) == best_part(alone, group["hits"][0]["key"])


def test_a_threshold_and_a_filter_apply_to_the_best_view(market, alone) -> None:
    ranked = sorted((best_part(alone, key)[0] for key in alone[0]), reverse=True)
    least = ranked[3]
    hits = post(market, asked(combine="best", min_score=least)).json()["hits"]
    assert [hit["score"] for hit in hits] == ranked[:4]
    past = post(market, asked(combine="best", min_score=least, offset=4, k=2)).json()
    assert (past["count"], past["match"]) == (0, True)
    red = post(market, asked(combine="best", filter='colour = "red"')).json()["hits"]
    assert len(red) == COUNT // 3


def test_a_product_is_put_with_several_images_and_found_once(tmp_path, closes) -> None:
    shop = closes(start_shop(tmp_path / "state"))
    for product in ("boot", "hat"):
        first = 0 if product == "boot" else 3
        parts: list[Any] = [("image", (f"{n}.png", photo(first + n))) for n in range(3)]
        parts.append(("product", (None, product)))
        answer = shop.client.put(f"{shop.url}/items", files=parts).json()
        assert answer["added"] == 3
        assert shop.client.put(f"{shop.url}/items", files=parts).json()["unchanged"] == 3
    sent = {"product": "hat", "items": [{"data": text_of(photo(6))}]}
    added = shop.client.put(f"{shop.url}/items", json=sent).json()
    assert [item["key"] for item in added["items"]] == [f"hat/{sha256(photo(6))[:16]}"]
    groups = found(shop.running, photo(4), group_by="product", group_size=9)["groups"]
    assert [group["value"] for group in groups] == ["hat", "boot"]
    assert [len(group["hits"]) for group in groups] == [4, 3]
    assert groups[0]["hits"][0]["key"] == f"hat/{sha256(photo(4))[:16]}"


def test_an_item_needs_exactly_one_product_or_a_key(tmp_path, closes) -> None:
    shop = closes(start_shop(tmp_path / "state"))
    image: list[Any] = [("image", ("x.png", photo(0)))]
    for more, message in (
        ([], "send one key for each image, or a product"),
        ([("product", (None, ""))], "an empty one"),
        ([("product", (None, "a")), ("product", (None, "b"))], "has 2 products"),
        ([("product", (None, "a")), ("attributes", (None, '{"product": "b"}'))], "Send one of"),
    ):
        response = shop.client.put(f"{shop.url}/items", files=image + more)
        assert message in assert_problem(response, 422, "invalid-parameter")["detail"]
    assert shop.put_json([{"key": "", "data": text_of(photo(0))}]).status_code == 422
    response = shop.put_json([{"data": text_of(photo(0))}])
    assert "has no key" in assert_problem(response, 422, "invalid-parameter")["detail"]
