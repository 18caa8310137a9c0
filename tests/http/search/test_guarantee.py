"""Guaranteed sets and decisions over HTTP: what they hold, when they are cut or withdrawn."""

import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from kinlens.client import Client, Query
from kinlens.errors import InvalidError
from tests.support.market import COUNT, found, photo, post, start_market, text_of
from tests.support.servers import render
from tests.support.shops import Shop, assert_problem
from tests.support.waiting import until
from tests.tiny import encoded


def near(number: int, quality: int) -> bytes:
    """A photo of an item, with other bytes than its own image."""
    return encoded(render(number), "JPEG", quality=quality)


def label(shop: Shop, data: bytes, text: dict[str, Any]) -> None:
    files = {"image": ("query.png", data, "image/png")}
    sent = {"label": json.dumps(text)}
    shop.client.post(f"{shop.url}/golden", files=files, data=sent).raise_for_status()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A market with labelled photos: 38 of its products, and 6 of others."""
    shop = start_market(tmp_path_factory.mktemp("guarded"))
    for number in range(COUNT):
        for quality in (30, 50, 70):
            product = {"attribute": "product", "value": f"p{number // 2}"}
            label(shop, near(number, quality), product)
    for number in (80, 81):  # which are unlike any photo of their product
        label(shop, photo(number), {"attribute": "product", "value": "p0"})
    for number in range(60, 66):
        label(shop, photo(number), {"no_match": True})
    shop.client.post(f"{shop.url}/golden/run").raise_for_status()
    yield shop.running
    shop.close()


def test_an_answer_has_the_set_and_the_labelled_queries_behind_it(guarded) -> None:
    answer = found(guarded, near(3, 60), guarantee=0.9, accept=0.5, k=5)
    facts = answer["guarantee"]
    assert (facts["level"], facts["queries"], facts["source"]) == (0.9, 38, "golden")
    assert (facts["product"], facts["holds"], facts["cut"]) == ("product", True, None)
    assert facts["groups"][0]["value"] == "p1"
    assert facts["groups"][0]["key"] in ("002.png", "003.png")
    assert facts["none"] is True  # 9 labelled absent products are needed, there are 6
    assert (facts["accept"], facts["confidence"]) == (0.5, 0.95)
    assert answer["accepted"] is True
    alone = found(guarded, near(3, 60), accept=0.5)
    assert [group["value"] for group in alone["guarantee"]["groups"]] == ["p1"]
    assert (alone["guarantee"]["holds"], alone["guarantee"]["level"]) == (None, None)
    plain = found(guarded, near(3, 60))
    assert "guarantee" not in plain
    assert "accepted" not in plain


def test_the_description_has_what_a_page_may_ask_for(guarded, market) -> None:
    def offered(service: Any) -> tuple[float | None, float | None]:
        gallery = service.client.get("/galleries/shop").json()
        return gallery["guarantee"], gallery["accept"]

    assert offered(guarded) == (0.95, None)  # there are 38 labels, and 59 are needed to accept
    assert offered(market) == (None, None)


def test_a_set_that_k_or_a_filter_cuts_is_not_guaranteed(guarded) -> None:
    whole = found(guarded, photo(70), guarantee=0.97, k=6)["guarantee"]
    assert len(whole["groups"]) > 1
    cut = found(guarded, photo(70), guarantee=0.97, k=1)["guarantee"]
    assert (cut["holds"], cut["cut"]) == (False, "k")
    assert cut["groups"] == whole["groups"][:1]
    best = whole["groups"][0]["value"]
    answer = found(guarded, photo(70), guarantee=0.97, accept=0.5, filter=f'product != "{best}"')
    assert (answer["guarantee"]["holds"], answer["guarantee"]["cut"]) == (False, "filter")
    assert best not in [group["value"] for group in answer["guarantee"]["groups"]]
    assert answer["accepted"] is False
    same = found(guarded, near(3, 60), guarantee=0.9, filter='product = "p1"')["guarantee"]
    assert (same["holds"], [group["value"] for group in same["groups"]]) == (True, ["p1"])


def test_forms_batches_and_the_client_ask_for_the_same(guarded) -> None:
    body = found(guarded, near(5, 60), guarantee=0.9, accept=0.5)
    files = {"image": ("q.png", near(5, 60), "image/png")}
    sent = {"guarantee": "0.9", "accept": "0.5"}
    form = guarded.client.post("/search", files=files, data=sent).json()
    assert (form["guarantee"], form["accepted"]) == (body["guarantee"], body["accepted"])
    with Client(guarded.url) as client:
        answer = client.search(near(5, 60), guarantee=0.9, accept=0.5)
        assert answer.guarantee.model_dump() == body["guarantee"]
        assert answer.accepted is body["accepted"]
        batch = client.search_batch([Query(near(5, 60), {"guarantee": 0.9})])
        assert batch.answers[0].answer.guarantee.holds


def test_what_is_asked_is_part_of_the_key_of_a_cached_answer(guarded) -> None:
    for sent in ({}, {"guarantee": 0.9}, {"guarantee": 0.8}, {"accept": 0.5}, {"accept": 0.6}):
        first, again = (found(guarded, near(7, 61), **sent) for _ in range(2))
        assert (first["cached"], again["cached"]) == (False, True)
        for answer in (first, again):
            facts = answer.get("guarantee") or {}
            assert facts.get("level") == sent.get("guarantee")
            assert facts.get("accept") == sent.get("accept")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"positives": ["000.png"]}, "one whole image"),
        ({"images": [{"data": text_of(photo(1)), "crops": [[0, 0, 0.5, 1]]}]}, "one whole image"),
        ({"images": [{"data": text_of(photo(1)), "crops": "auto"}]}, "one whole image"),
        ({"images": [{"data": text_of(photo(n))} for n in (1, 2)]}, "one whole image"),
        *(
            (option, "Omit offset, sort_by, diversity, boost, exact, min_score")
            for option in (
                {"offset": 1},
                {"sort_by": "price"},
                {"boost": "price:0.1"},
                {"diversity": 0.3},
                {"exact": True},
                {"min_score": 0.1},
                {"min_probability": 0.1},
            )
        ),
        ({"guarantee": 1.0}, "guarantee = 1.0"),
        ({"guarantee": 0.0}, "guarantee = 0.0"),
        ({"accept": 1e-17}, "accept = 1e-17"),
        ({"accept": 0.99991}, "use 0.9999 or less"),
        ({"guarantee": 0.99}, "needs at least 99 labelled queries"),
        ({"accept": 0.99}, "299 accepted without an error are needed for 99 % at 95 % confidence"),
    ],
)
def test_what_cannot_be_guaranteed_is_422(guarded, more: dict[str, Any], reason: str) -> None:
    body = {"images": [{"data": text_of(photo(1))}], "guarantee": 0.9, **more}
    problem = post(guarded, body).json()
    assert problem["status"] == 422
    assert reason in json.dumps(problem)


def test_a_batch_and_the_client_refuse_another_order_too(guarded) -> None:
    with Client(guarded.url) as client:
        with pytest.raises(InvalidError, match="Omit offset"):
            client.search(near(5, 60), accept=0.5, sort_by="price")
        [answer] = client.search_batch([Query(near(5, 60), {"accept": 0.5, "offset": 1})]).answers
        assert (answer.status, "Omit offset" in str(answer.problem)) == (422, True)


def test_other_options_leave_the_set_and_the_first_hit_as_they_are(guarded) -> None:
    plain = found(guarded, near(3, 60), guarantee=0.9, accept=0.5)
    for more in ({"distinct": True}, {"distinct": "near"}, {"facets": ["price"]}, {"fields": []}):
        answer = found(guarded, near(3, 60), guarantee=0.9, accept=0.5, **more)
        assert answer["guarantee"] == plain["guarantee"]
        assert answer["hits"][0]["key"] == plain["hits"][0]["key"]
    grouped = found(guarded, near(3, 60), accept=0.5, group_by="product")
    assert grouped["groups"][0]["value"] == grouped["guarantee"]["groups"][0]["value"]


def test_a_gallery_without_labelled_queries_names_the_cure(market) -> None:
    body = {"images": [{"data": text_of(photo(1))}], "guarantee": 0.9}
    problem = assert_problem(post(market, body), 422, "invalid-parameter")
    assert "golden add" in problem["detail"]
    assert "golden run" in problem["detail"]


def test_a_guarantee_is_withdrawn_after_many_changes_until_it_is_run_again(tmp_path: Path) -> None:
    shop = start_market(tmp_path / "state")
    for number in range(COUNT):
        label(shop, near(number, 50), {"keys": [f"{number:03d}.png"]})
    shop.client.post(f"{shop.url}/golden/run").raise_for_status()
    with Client(shop.running.url) as client:
        assert client.search(near(1, 60), guarantee=0.8).guarantee.holds
        shop.put({"new.png": photo(40)}, product="p9")
        assert client.search(near(1, 60), guarantee=0.8).guarantee.holds
        shop.put({f"new{n}.png": photo(41 + n) for n in range(3)}, product="p9")
        with pytest.raises(InvalidError, match="other items"):
            client.search(near(1, 60), guarantee=0.8)
        assert client.search(near(1, 60)).hits
        client.run_golden("shop")
        assert client.search(near(1, 60), guarantee=0.8).guarantee.queries == COUNT
    shop.close()


def test_without_any_label_nothing_is_guaranteed_and_nothing_is_withdrawn(tmp_path: Path) -> None:
    shop = start_market(tmp_path / "state")
    for number in range(COUNT):
        label(shop, near(number, 50), {"keys": [f"{number:03d}.png"]})
    shop.client.post(f"{shop.url}/golden/run").raise_for_status()
    assert found(shop.running, near(1, 60), guarantee=0.8)["guarantee"]["holds"]
    for query in shop.client.get(f"{shop.url}/golden").json()["queries"]:
        shop.client.delete(f"{shop.url}/golden/{query['sha256']}").raise_for_status()
    body = {"images": [{"data": text_of(near(1, 60))}], "guarantee": 0.8}
    problem = assert_problem(post(shop.running, body), 422, "invalid-parameter")
    assert "no golden set" in problem["detail"]
    facts = shop.gallery()
    assert (facts["guarantee"], facts["guarantee_withdrawn"]) == (None, None)
    metrics = shop.running.client.get("/metrics").text
    assert "kinlens_guarantee_withdrawn{" not in metrics
    shop.close()


def test_other_queries_withdraw_the_guarantee_until_it_is_run_again(tmp_path: Path) -> None:
    shop = start_market(tmp_path / "state")
    for number in range(COUNT):
        for quality in (30, 50):
            label(shop, near(number, quality), {"keys": [f"{number:03d}.png"]})
    shop.client.post(f"{shop.url}/golden/run").raise_for_status()
    service = shop.running

    def withdrawn() -> float:
        service.client.get("/metrics").raise_for_status()
        return service.metric("kinlens_guarantee_withdrawn", gallery="shop")

    with Client(service.url) as client:
        for k in range(1, 101):  # a query counts once, whatever else is asked with it
            client.search(photo(100), guarantee=0.8, k=k)
        assert shop.gallery()["guarantee_withdrawn"] is None
        assert shop.gallery()["guarantee"] == 0.95
        assert withdrawn() == 0
        with structlog.testing.capture_logs() as events:
            for number in range(100, 200):
                body = {"images": [{"data": text_of(photo(number))}], "guarantee": 0.8}
                if (answer := post(service, body)).status_code != 200:
                    break
            problem = assert_problem(answer, 422, "invalid-parameter")
            assert "differ from the labelled ones" in problem["detail"]
            assert 105 < number < 180
        assert [e["gallery"] for e in events if e["event"] == "guarantee withdrawn"] == ["shop"]
        assert client.search(photo(100)).hits
        assert "differ from the labelled ones" in shop.gallery()["guarantee_withdrawn"]
        assert shop.gallery()["guarantee"] is None
        until(lambda: withdrawn() == 1)
        client.run_golden("shop")
        assert client.search(near(1, 60), guarantee=0.8).guarantee.holds
        assert shop.gallery()["guarantee_withdrawn"] is None
        until(lambda: withdrawn() == 0)
    shop.close()
