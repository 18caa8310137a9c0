"""Both cache levels: what a key holds, what bounds hold, what is believed when read."""

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

from embedder.types import Hit
from service.cache import Cache, LruCache, answer_key, embedding_key
from service.payloads import (
    decode_hits,
    decode_vector,
    encode_hits,
    encode_vector,
    seal,
    unseal,
)

VALUES = {"class": "ä", "1": "1", "stock": 2**53 + 1, "price": 1.0, "half": 0.5, "sale": True}
HITS = [Hit(3, "a.jpg", 0.9, VALUES), Hit(1, "ü.jpg", -0.2, {"sale": False, "stock": 0})]


class DictStore:
    """A shared level in a dictionary."""

    state = "up"

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    async def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    async def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    async def start(self) -> None: ...

    async def close(self) -> None: ...


def read(cache: Cache, key: str, dim: int = 2) -> Any:
    return asyncio.run(cache.get("embedding", key, lambda value: decode_vector(value, dim)))


def write(cache: Cache, key: str, payload: bytes) -> None:
    async def main() -> None:
        cache.set(key, payload)
        await cache.close()

    asyncio.run(main())


def vector(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


def test_the_least_recently_used_entry_goes_first() -> None:
    cache = LruCache(max_entries=2, max_bytes=1000)
    cache.set("a", b"1")
    cache.set("b", b"2")
    cache.get("a")
    cache.set("c", b"3")
    assert cache.get("b") is None
    assert (cache.get("a"), cache.get("c")) == (b"1", b"3")


def test_bytes_are_bounded_and_counted_through_any_sequence() -> None:
    cache = LruCache(max_entries=100, max_bytes=64)
    rng = np.random.default_rng(0)
    kept: dict[str, int] = {}
    for _ in range(500):
        key, size = str(rng.integers(20)), int(rng.integers(0, 80))
        cache.set(key, bytes(size))
        kept[key] = size
        assert cache.size_bytes <= 64
    alive = {key: size for key, size in kept.items() if cache.get(key) is not None}
    assert cache.size_bytes == sum(len(key) + size for key, size in alive.items())
    assert len(cache) == len(alive)


def test_a_value_above_the_bound_is_not_kept_and_pushes_nothing_out() -> None:
    cache = LruCache(max_entries=9, max_bytes=10)
    cache.set("a", b"123")
    cache.set("b", b"456")
    cache.set("big", bytes(8))
    assert (cache.get("a"), cache.get("b"), cache.get("big")) == (b"123", b"456", None)
    cache.set("a", bytes(10))
    assert cache.get("a") is None  # not the old value either
    assert cache.size_bytes == 4


def test_a_cache_of_no_entries_keeps_nothing() -> None:
    cache = LruCache(max_entries=0, max_bytes=1000)
    cache.set("a", b"1")
    assert cache.get("a") is None


def test_every_part_of_a_request_changes_the_key_of_its_answer() -> None:
    parts: list[list[Any]] = [
        ["bundle", "bundle2"],
        ["shop", "shop:v1", "shop%3Av1"],
        ["v1", "v2"],
        ["digest", "digest2"],
        [1, 11],
        [None, 0.0, 0.5],
    ]
    combinations = list(itertools.product(*parts))
    assert len({answer_key(*parts) for parts in combinations}) == len(combinations)
    assert embedding_key("b1", "d") != embedding_key("b2", "d")


def test_a_value_of_the_shared_level_is_read_once_and_then_local() -> None:
    store, seen = DictStore(), []
    key = embedding_key("bundle", "digest")
    write(Cache(LruCache(9, 999), store), key, encode_vector(vector(0.6, 0.8)))
    cache = Cache(LruCache(9, 999), store)
    cache.observe(lambda kind, level: seen.append((kind, level)))
    assert read(cache, key) == pytest.approx([0.6, 0.8])
    store.values.clear()
    assert read(cache, key) == pytest.approx([0.6, 0.8])
    assert read(cache, "other") is None
    assert seen == [("embedding", "redis"), ("embedding", "local"), ("embedding", "miss")]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"garbage",
        encode_vector(vector(0.6, 0.8, 0.0)),
        encode_vector(vector(np.nan, 1.0)),
        encode_vector(vector(np.inf, 0.0)),
        encode_vector(vector(3.0, 4.0)),
    ],
    ids=["empty", "text", "too long", "nan", "inf", "not unit"],
)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_wrong_value_of_the_shared_level_counts_as_missing(payload: bytes, sealed: bool) -> None:
    store, seen = DictStore(), []
    store.values["key"] = seal("key", payload) if sealed else payload
    cache = Cache(LruCache(9, 999), store)
    cache.observe(lambda kind, level: seen.append(level))
    assert read(cache, "key") is None
    assert seen == ["invalid"]


def test_a_value_fits_only_under_the_key_it_was_made_for() -> None:
    sealed = seal("key of bundle a", b"payload")
    assert unseal("key of bundle a", sealed) == b"payload"
    with pytest.raises(ValueError, match="seal"):
        unseal("key of bundle b", sealed)
    with pytest.raises(ValueError, match="seal"):
        unseal("key of bundle a", sealed[:-1] + b"x")


def test_hits_and_vectors_survive_the_way_to_bytes_and_back() -> None:
    assert decode_hits(encode_hits(HITS), k=2) == HITS
    assert decode_hits(encode_hits([]), k=1) == []
    for before, after in zip(HITS, decode_hits(encode_hits(HITS), k=2), strict=True):
        # 1, 1.0 and True are equal in Python
        assert [*map(type, after.attributes.values())] == [*map(type, before.attributes.values())]
    original = vector(0.6, -0.8)
    assert (decode_vector(encode_vector(original), 2) == original).all()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{}",
        b"[1]",
        b'[{"id": 1}]',
        b'[{"id": "1", "key": "a", "score": 0.5, "attributes": {}}]',
        b'[{"id": -1, "key": "a", "score": 0.5, "attributes": {}}]',
        b'[{"id": 1, "key": "a", "score": NaN, "attributes": {}}]',
        b'[{"id": 1, "key": "a", "score": 7.0, "attributes": {}}]',
        b'[{"id": 1, "key": "a", "score": 0.5, "attributes": {}, "more": 1}]',
        b'[{"id": 1, "key": "a", "score": 0.5, "attributes": {"class": null}}]',
        b'[{"id": 1, "key": "a", "score": 0.5, "attributes": {"class": ["a"]}}]',
        encode_hits(HITS[::-1]),
        encode_hits([*HITS, HITS[-1]]),
        b"\x80\x04\x95",
    ],
)
def test_stored_hits_that_do_not_fit_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode_hits(payload, k=2)
