"""Inside a search: shared calls of a model, and what caches accept."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tests.support.seams import Batcher, LruCache
from tests.support.waiting import until


def test_queued_images_share_a_call_and_a_bad_one_fails_alone() -> None:
    gate, entered, batches = threading.Event(), threading.Event(), []

    def embed(images: Any) -> Any:
        values = images[:, 0, 0, 0]
        batches.append(len(values))
        entered.set()
        assert gate.wait(10)
        if 13 in values:
            raise ValueError("a bad image")
        return values.astype(np.float32)[:, np.newaxis]

    def ask(value: int) -> float:
        return float(batcher.embed(np.full((1, 3, 2, 2), value, dtype=np.uint8)).item())

    batcher = Batcher(embed, batch_size=8, at_once=1)
    values = [*range(20, 29), 13]
    with ThreadPoolExecutor(len(values) + 1) as clients:
        first = clients.submit(ask, 0)
        assert entered.wait(10)
        *good, bad = [clients.submit(ask, value) for value in values]
        until(lambda: batcher.waiting == len(values))
        gate.set()
    assert [call.result() for call in (first, *good)] == [0, *values[:-1]]
    assert isinstance(bad.exception(), ValueError)
    assert batches[:2] == [1, 8]


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
