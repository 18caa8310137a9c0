"""The queries that feedback stores are drawn, labelled and skipped, each once."""

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kinlens.service.access.keys import Limits
from tests.support.seams import FeedbackStore
from tests.support.servers import render
from tests.support.shops import Shop, assert_problem, sha256, start_shop
from tests.support.waiting import until
from tests.tiny import encoded

PRODUCTS = 12


@pytest.fixture(scope="module")
def photos() -> list[bytes]:
    """Photos of the first items of the gallery, other bytes than theirs."""
    return [encoded(render(number), "JPEG", quality=60) for number in range(4)]


@pytest.fixture
def shop(tmp_path: Path, photos: list[bytes]) -> Iterator[Shop]:
    """Two galleries; visitors of the first judged one answer to each photo."""
    shop = start_shop(tmp_path / "state", feedback="pictures")
    for number in range(2 * PRODUCTS):
        shop.put({f"{number}.png": encoded(render(number))}, product=number // 2)
    shop.create("other")
    shop.put({"0.png": encoded(render(0))}, "other", product=0)
    for number, data in enumerate(photos):
        judge(shop, data, "clicked" if number % 2 else "wrong")
    yield shop
    shop.close()


def judge(shop: Shop, data: bytes, action: str) -> None:
    fields = {"answer_id": shop.search(data).json()["answer_id"], "item": "3.png", "action": action}
    files = {"image": data}
    shop.client.post("/feedback", data=fields, files=files).raise_for_status()


def draw(shop: Shop, gallery: str = "shop") -> dict[str, object]:
    answer = shop.client.get(f"/galleries/{gallery}/golden/unlabelled").raise_for_status()
    found: dict[str, object] = answer.json()
    return found


def path(sha: object, gallery: str = "shop") -> str:
    return f"/galleries/{gallery}/golden/unlabelled/{sha}"


def test_every_kept_photo_is_drawn_until_it_was_labelled_or_skipped(shop, photos) -> None:
    """Whatever was clicked: a draw misses one of four photos 80 times with chance 1e-10."""
    assert {draw(shop)["sha256"] for _ in range(80)} == {sha256(data) for data in photos}
    until(lambda: draw(shop)["product"] == "product")  # which the service learns in the background
    for left in (4, 3, 2, 1):
        query = draw(shop)
        assert (query["left"], query["text"], query["product"]) == (left, None, "product")
        if left > 2:
            stored = shop.client.get(path(query["sha256"])).raise_for_status()
            assert stored.headers["cache-control"] == "no-store"
            label = {"label": json.dumps({"attribute": "product", "value": 0})}
            files = {"image": stored.content}
            shop.client.post(f"{shop.url}/golden", data=label, files=files).raise_for_status()
        assert shop.client.delete(path(query["sha256"])).status_code == 204
        assert_problem(shop.client.delete(path(query["sha256"])), 404, "unknown-item")
    assert draw(shop) == {"left": 0, "sha256": None, "text": None, "product": "product"}
    report = shop.client.post(f"{shop.url}/golden/run").json()
    assert (report["queries"], report["judged"], report["left_out"]) == (2, 2, 0)
    judge(shop, photos[0], "bought")
    assert draw(shop)["left"] == 0, "a query is never drawn again"
    judge(shop, encoded(render(9), "JPEG", quality=60), "bought")
    assert draw(shop)["left"] == 1


def test_a_query_that_is_given_back_is_drawn_again(shop, photos) -> None:
    """As by an undo on the admin page, whose reload forgets everything."""
    shas = [sha256(data) for data in photos]
    for sha in shas:
        shop.client.delete(path(sha)).raise_for_status()
    assert draw(shop)["left"] == 0
    for _ in range(2):  # a repeated request of a client whose connection broke
        assert shop.client.put(path(shas[1])).status_code == 204
    assert (draw(shop)["left"], draw(shop)["sha256"]) == (1, shas[1])
    shop.client.delete(path(shas[1])).raise_for_status()
    assert_problem(shop.client.put(path("0" * 64)), 404, "unknown-item")
    assert_problem(shop.client.put(path(shas[1], "other")), 404, "unknown-item")
    assert draw(shop)["left"] == 0


def test_one_of_several_people_may_label_a_query(shop, photos) -> None:
    """They drew the same one, at two services with one state folder."""
    sha = sha256(photos[0])
    with contextlib.closing(start_shop(shop.state, feedback="pictures")) as second:
        services = [shop, second] * 8
        with ThreadPoolExecutor(len(services)) as pool:
            found = pool.map(lambda one: one.client.delete(path(sha)).status_code, services)
            assert sorted(found) == [204] + [404] * (len(services) - 1)


def test_what_feedback_no_longer_stores_is_not_drawn(shop, photos) -> None:
    sha = sha256(photos[0])
    (shop.state / "feedback" / "pictures" / f"{sha}.jpg").unlink()
    assert draw(shop)["left"] == 3
    assert_problem(shop.client.get(path(sha)), 404, "unknown-item")
    assert_problem(shop.client.delete(path(sha)), 404, "unknown-item")
    shop.client.delete(path(sha256(photos[1]))).raise_for_status()
    with contextlib.closing(FeedbackStore(shop.state)) as store:
        store.clear("shop")
    assert draw(shop)["left"] == 0
    assert_problem(shop.client.get(path(sha256(photos[2]))), 404, "unknown-item")
    judge(shop, photos[1], "clicked")
    assert draw(shop)["left"] == 1, "nothing is remembered of what was deleted"


def test_a_gallery_shows_only_its_own_queries_and_only_to_keys_of_its_golden_set(
    shop, photos
) -> None:
    sha, keys = sha256(photos[0]), shop.running.runtime.keys
    assert draw(shop, "other")["left"] == 0
    for method in ("GET", "DELETE", "PUT"):
        answer = shop.client.request(method, path(sha, "other"))
        assert_problem(answer, 404, "unknown-item")

    def status(name: str, scope: str, **limits: Any) -> list[int]:
        secret = keys.create(name, [scope], limits=Limits(**limits))
        headers = {"Authorization": f"Bearer {secret}"}
        asked = (f"{shop.url}/golden/unlabelled", path(sha))
        return [shop.client.get(one, headers=headers).status_code for one in asked]

    assert status("till", "search") == [403, 403]
    assert status("staff", "write") == status("office", "admin") == [200, 200]
    assert status("own", "write", galleries=("shop",)) == [200, 200]
    assert status("foreign", "write", galleries=("other",)) == [404, 404]
    assert status("part", "write", galleries=("shop",), filter="product = 1") == [403, 403]


def test_photos_are_shown_only_while_the_service_stores_some(tmp_path: Path, photos) -> None:
    """The operator takes the setting back: what was stored before is hidden, and not lost."""
    shop = start_shop(tmp_path / "state", feedback="pictures")
    shop.put({"3.png": photos[0]})
    judge(shop, photos[1], "clicked")
    sha = sha256(photos[1])
    shop.close()
    for mode in ("pairs", "off"):
        shop = start_shop(tmp_path / "state", feedback=mode)
        drawn = shop.client.get(f"{shop.url}/golden/unlabelled")
        for answer in (drawn, shop.client.get(path(sha)), shop.client.delete(path(sha))):
            assert answer.status_code == 404
            assert "KINLENS_FEEDBACK=pictures" in answer.json()["detail"]
        shop.close()
    shop = start_shop(tmp_path / "state", feedback="pictures")
    assert draw(shop)["sha256"] == sha
    shop.close()
