"""Products: items with several views, ranked by their best view, page by page."""

from typing import Any

import pytest

from tests.support.market import COUNT, found, photo, post, text_of
from tests.support.shops import assert_problem, sha256, start_shop

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


def test_a_product_is_put_with_several_images_and_found_once(tmp_path) -> None:
    shop = start_shop(tmp_path / "state")
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
    shop.running.close()


def test_an_item_needs_exactly_one_product_or_a_key(tmp_path) -> None:
    shop = start_shop(tmp_path / "state")
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
    shop.running.close()
