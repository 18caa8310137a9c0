"""Inside a search: shared calls of a model, and what caches accept."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kinlens.embedder.manifest import FP32, Mode
from tests.support.seams import Batcher, LruCache, answer_key, embedding_key
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
