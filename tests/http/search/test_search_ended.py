"""A search that nobody waits for any more gives its thread back soon."""

import hashlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import indexer.live.search as searching
from embedder.fake import FakeEmbedder
from indexer.gallery import Gallery
from indexer.types import Entry
from tests.support.shops import Shop, assert_problem, start_shop

COUNT = 6000
LIMIT_S = 1.0
PAUSE_S = 0.2


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    state, embedder = tmp_path_factory.mktemp("large") / "state", FakeEmbedder()
    vectors = np.random.default_rng(0).standard_normal((COUNT, embedder.dim)).astype("f4")
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    gallery = Gallery.create(
        state / "galleries" / "shop", name="shop", bundle_id=embedder.bundle_id, dim=embedder.dim
    )
    gallery.add(
        Entry(f"k{n}", v, hashlib.sha256(b"%d" % n).hexdigest(), {"class": "shoes"})
        for n, v in enumerate(vectors)
    )
    gallery.close()
    limits = {"request_timeout_ms": int(LIMIT_S * 1e3), "lanes": 2}
    served = start_shop(state, embedder, create=False, **limits)
    yield served
    served.close()


def search(shop: Shop, key: str, **more: Any) -> Any:
    return shop.client.post("/search", json={"positives": [key], "k": 3} | more)


def test_searches_for_groups_that_are_too_slow_do_not_hold_the_threads_of_others(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, read = [], searching._Groups._scored_members

    def slow(self: Any, *asked: Any) -> Any:
        blocks.append(threading.get_ident())
        time.sleep(PAUSE_S)
        return read(self, *asked)

    monkeypatch.setattr(searching, "_BLOCK", COUNT // 300)
    monkeypatch.setattr(searching._Groups, "_scored_members", slow)
    grouped = {"group_by": "class", "group_score": "mean"}
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(search(shop, "k1", **grouped)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer in answers:
        assert_problem(answer, 503, "deadline-exceeded")
    monkeypatch.undo()
    assert search(shop, "k2").status_code == 200
    assert len(blocks) < 30, "all 300 blocks of both would take a minute"


def test_the_same_search_with_time_enough_answers(shop: Shop) -> None:
    answer = search(shop, "k1", group_by="class", group_score="mean")
    assert answer.status_code == 200, answer.text
    [group] = answer.json()["groups"]
    assert (group["value"], len(group["hits"])) == ("shoes", 1)
