"""Both cache levels: what a key holds, what bounds hold, what is believed when read."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from embedder.types import Hit
from indexer.types import Group
from service.search.cache import answer_key, decode_vector, encode_vector, seal
from service.search.query import HitRenderer, checked_results, encode_results
from tests.support.seams import Cache, Lookup, LruCache, embedding_key

VALUES = {"class": "ä", "1": "1", "stock": 2**53 + 1, "price": 1.0, "half": 0.5, "sale": True}
HITS = [Hit(3, "a.jpg", 0.9, VALUES), Hit(1, "ü.jpg", -0.2, {"sale": False, "stock": 0})]


class DictStore:
    """A shared level in a dictionary."""

    state = "up"

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls: list[list[str]] = []

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        self.calls.append(list(keys))
        return [self.values.get(key) for key in keys]

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def start(self) -> None: ...

    def close(self) -> None: ...


def read(cache: Cache, key: str, dim: int = 2) -> Any:
    return cache.get(Lookup("embedding", key, lambda value: decode_vector(value, dim)))


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


def test_every_part_of_a_request_changes_the_key_of_its_answer() -> None:
    parts: list[list[Any]] = [
        ["bundle", "bundle2"],
        ["fp32", "int8"],
        ["shop", "shop:g1", "shop%3Ag1"],
        ["g1", "g2"],
        ["digest", "digest2"],
    ]
    combinations = list(itertools.product(*parts))
    assert len({answer_key(*parts) for parts in combinations}) == len(combinations)


def test_bundle_precision_content_and_box_change_the_key_of_a_vector() -> None:
    parts: list[list[Any]] = [
        ["b1", "b2"],
        ["fp32", "int8"],
        ["d1", "d2"],
        [None, (0.0, 0.0, 0.5, 1.0), (0.0, 0.0, 1.0, 0.5)],
    ]
    combinations = list(itertools.product(*parts))
    assert len({embedding_key(*parts) for parts in combinations}) == len(combinations)


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


SHOWN = HitRenderer("/galleries/shop/items/", "/image?version=0123456789ab", None)
GROUPS = [Group("shoes", 0.9, HITS[:1]), Group(None, -0.2, HITS[1:])]
GOOD = encode_results(SHOWN, HITS, None, match=True)


def test_results_are_kept_as_the_json_that_is_sent() -> None:
    assert checked_results(GOOD, 2, SHOWN) == GOOD
    [first, second] = json.loads(GOOD)["hits"]
    assert (first["id"], first["key"], first["score"]) == (3, "a.jpg", 0.9)
    assert first["image"] == "/galleries/shop/items/3/image?version=0123456789ab"
    assert second["key"] == "ü.jpg"
    # 1, 1.0 and True are equal in Python
    kinds = {name: type(value) for name, value in first["attributes"].items()}
    assert kinds == {name: type(value) for name, value in VALUES.items()}
    assert first["attributes"] == VALUES
    grouped = encode_results(SHOWN, [], GROUPS, match=True)
    assert checked_results(grouped, 2, SHOWN) == grouped
    assert [group["value"] for group in json.loads(grouped)["groups"]] == ["shoes", None]
    empty = encode_results(SHOWN, [], None, match=False)
    assert checked_results(empty, 1, SHOWN) == empty


def changed(**fields: Any) -> bytes:
    results = json.loads(GOOD)
    results["hits"][0].update(fields)
    return json.dumps(results).encode()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{}",
        b"[1]",
        b"\x80\x04\x95",
        changed(id="3"),
        changed(id=-3),
        changed(id=4),
        changed(score=7.0),
        changed(score=float("nan")),
        changed(score=-0.5),
        changed(probability=2.0),
        changed(more=1),
        changed(attributes={"class": None}),
        changed(attributes={"class": ["a"]}),
        changed(image="https://elsewhere.example/3"),
        changed(image="/galleries/shop/items/3/image?version=ba9876543210"),
        GOOD.replace(b'"count":2', b'"count":1'),
        encode_results(SHOWN, HITS[::-1], None, match=True),
        encode_results(SHOWN, [*HITS, HITS[-1]], None, match=True),
        encode_results(SHOWN, [], GROUPS[::-1], match=True),
        encode_results(SHOWN, HITS, GROUPS, match=True),
        encode_results(
            HitRenderer("/galleries/other/items/", SHOWN.suffix, None), HITS, None, match=True
        ),
    ],
)
def test_stored_results_that_do_not_fit_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        checked_results(payload, 2, SHOWN)
