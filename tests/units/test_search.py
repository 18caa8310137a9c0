"""Inside a search: shared calls of a model, and what caches accept."""

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kinlens.embedder.manifest import FP32, Mode
from kinlens.embedder.types import Hit
from kinlens.indexer.types import Group
from tests.support.seams import (
    Batcher,
    HitRenderer,
    LruCache,
    answer_key,
    embedding_key,
    encode_results,
)
from tests.support.waiting import until

WAIT_S = 10.0
BAD = 13


class Model:
    """The vector of an image is its first pixel; calls wait for `gate`, and 13 is refused."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.batches: list[list[int]] = []

    def embed(self, images: Any) -> Any:
        values = images[:, 0, 0, 0]
        self.batches.append(values.tolist())
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        if BAD in values:
            raise ValueError("a bad image")
        return values.astype(np.float32)[:, np.newaxis]


def images(*values: int) -> Any:
    return np.stack([np.full((3, 2, 2), value, dtype=np.uint8) for value in values])


def clients(model: Model, batcher: Batcher, values: list[int]) -> list[Any]:
    """What each of many threads gets, all of which wait while the first call is held."""
    with ThreadPoolExecutor(len(values) + 1) as threads:
        first = threads.submit(batcher.embed, images(0))
        assert model.entered.acquire(timeout=WAIT_S)
        calls = [threads.submit(batcher.embed, images(value)) for value in values]
        until(lambda: batcher.waiting == len(values))
        model.gate.set()
        assert first.result() == [[0]]
        return [call.exception() or call.result().item() for call in calls]


def test_queued_images_share_a_call_and_a_bad_one_fails_alone() -> None:
    model = Model()
    batcher = Batcher(model.embed, batch_size=8, at_once=1)
    values = list(range(20, 29))
    *good, bad = clients(model, batcher, [*values, BAD])
    assert good == values
    assert isinstance(bad, ValueError)
    assert [len(batch) for batch in model.batches[:2]] == [1, 8]


def test_the_local_cache_evicts_the_least_recently_used() -> None:
    cache = LruCache(max_entries=5, max_bytes=200)
    kept: dict[str, bytes] = {}  # the least recently used first
    rng = np.random.default_rng(0)
    for _ in range(2_000):
        key, size = str(rng.integers(10)), int(rng.integers(0, 90)) if rng.random() < 0.9 else 200
        if rng.random() < 0.5:
            assert cache.get(key) == kept.get(key)
            if key in kept:
                kept[key] = kept.pop(key)
            continue
        cache.set(key, bytes(size))
        kept.pop(key, None)
        if size < 200:
            kept[key] = bytes(size)
        while len(kept) > 5 or sum(map(len, (*kept, *kept.values()))) > 200:
            del kept[next(iter(kept))]
        assert cache.size_bytes == sum(map(len, (*kept, *kept.values())))
        assert len(cache) == len(kept)


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        (answer_key, [["shop", "shop:g1", "shop%3Ag1"], ["g1", "g2"], ["d1", "d2"]]),
        (embedding_key, [["d1", "d2"], [None, (0.0, 0.0, 0.5, 1.0), (0.0, 0.0, 1.0, 0.5)]]),
    ],
)
def test_every_part_of_a_request_changes_its_cache_key(key: Any, parts: list[Any]) -> None:
    modes = [FP32, Mode("openvino", "bf16"), Mode("openvino", "fp32")]
    combinations = list(itertools.product(["b1", "b2"], modes, *parts))
    assert len({key(*parts) for parts in combinations}) == len(combinations)


VALUES = {"class": "ä", "1": "1", "stock": 2**53 + 1, "price": 1.0, "half": 0.5, "sale": True}
HITS = [Hit(3, "a.jpg", 0.9, VALUES), Hit(1, "ü.jpg", -0.2, {"sale": False, "stock": 0})]
SHOWN = HitRenderer("/galleries/shop/items/", "/image?version=0123456789ab")
GROUPS = [Group("shoes", 0.9, HITS[:1]), Group(None, -0.2, HITS[1:])]
GOOD = encode_results(SHOWN, HITS, None, match=True)


def test_the_cached_format_has_a_versioned_prefix() -> None:
    assert answer_key("b", FP32, "g", "1", "q").startswith("kinlens:3:a:")
    kept, grouped = json.loads(GOOD), json.loads(encode_results(SHOWN, [], GROUPS, match=True))
    names = {"count", "match", "no_match_probability", "hits", "groups"}
    assert kept.keys() == grouped.keys() == names
    hit = {"id", "key", "score", "probability", "attributes", "image"}
    assert kept["hits"][0].keys() == grouped["groups"][0]["hits"][0].keys() == hit
    assert grouped["groups"][0].keys() == {"value", "score", "probability", "hits"}
    # 1, 1.0 and True are equal in Python
    assert list(map(repr, kept["hits"][0]["attributes"].items())) == list(map(repr, VALUES.items()))
