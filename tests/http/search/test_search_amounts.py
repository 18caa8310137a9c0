"""How much one search may ask for, however it is sent, and what is worked out once."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from indexer.filters.tree import In, Range
from tests.support.market import picture, post, start_market, text_of
from tests.support.shops import assert_problem

IMAGE = {"data": text_of(picture(1))}
CROPS = [[0, 0, 1, 0.5 + n / 100] for n in range(16)]


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    shop = start_market(tmp_path_factory.mktemp("market") / "state")
    yield shop.running
    shop.close()


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


def test_a_long_filter_is_digested_once_and_off_the_event_loop(
    market, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def spy(where: In | Range) -> str:
        threads.append(threading.current_thread().name)
        return where.name

    for condition in (In, Range):
        monkeypatch.setattr(condition, "__repr__", spy)
    where = {"colour": {"in": [f"x{n}" for n in range(5_000)]}}
    for body in (
        {"images": images(1), "filter": where},
        {"images": images(4, 4), "filter": where, "combine": "separate"},
    ):
        threads.clear()
        assert post(market, body).status_code == 200
        assert len(threads) == 1
        assert threads[0].startswith(("asyncio_", "kinlens-"))
    threads.clear()
    short = market.client.get(
        "/galleries/shop/items/1/similar", params={"filter": "price >= 0", "k": 1}
    )
    assert short.status_code == 200
    assert [name.startswith("kinlens-") for name in threads] == [True]
