"""The laws of a gallery on every engine; the oracle is numpy over all vectors."""

import math
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinlens.embedder.errors import (
    EngineUnavailableError,
    FilterError,
    GalleryCorruptError,
    GalleryNotFoundError,
    InvalidParameterError,
    ItemNotFoundError,
    KinlensError,
)
from kinlens.embedder.types import Hit
from kinlens.indexer.entries import Entry, Written
from kinlens.indexer.exchange.milvus_collection import Collection, Connection
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.filters.tree import (
    And,
    Equals,
    Exists,
    Filter,
    In,
    Not,
    Or,
    Range,
    StartsWith,
)
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.store import VectorStore
from kinlens.indexer.types import CANDIDATES, Boost, Grouping, SearchOptions, SortBy, boost_of
from kinlens.values import AttributeValue, values_in
from tests.indexer.conftest import Run, collections, failure, milvus_client, printed, published
from tests.indexer.oracle import (
    BUNDLE,
    DIM,
    Oracle,
    assert_groups,
    assert_hits,
    entry,
    ids_of,
    random_filter,
    same,
    shop,
    units,
)
from tests.support.milvus_server import MilvusFile, MilvusServer
from tests.support.seams import MilvusStore
from tests.support.waiting import until
from tests.tiny import encoded, photo


@pytest.fixture(scope="module")
def milvus_shop(milvus_server: MilvusServer) -> Iterator[MilvusStore]:
    """One gallery for all tests, since it takes seconds to make one."""
    store = published(milvus_server, "conformance")
    yield store
    store.close()


@pytest.fixture(scope="module")
def lite_shop(milvus_lite: MilvusFile) -> Iterator[MilvusStore]:
    """The same in milvus-lite."""
    store = published(milvus_lite, "conformance")
    yield store
    store.close()


MILVUS = [pytest.param("milvus", marks=pytest.mark.milvus), "lite"]


@pytest.fixture(params=["faiss", *MILVUS])
def store(request: pytest.FixtureRequest) -> VectorStore:
    if request.param == "faiss":
        gallery: Gallery = request.getfixturevalue("gallery")
        return gallery
    shop: MilvusStore = request.getfixturevalue(f"{request.param}_shop")
    shop.remove([item.key for item in shop.items()])
    return shop


@pytest.fixture
def server(request: pytest.FixtureRequest) -> MilvusServer | MilvusFile:
    """The server of the store of the test."""
    name = {"milvus": "milvus_server", "lite": "milvus_lite"}[request.node.callspec.params["store"]]
    server: MilvusServer | MilvusFile = request.getfixturevalue(name)
    return server


# Laws that one engine alone keeps; the table in docs/scaling.md gives the reasons.
faiss_alone = pytest.mark.parametrize("store", ["faiss"], indirect=True)
milvus_alone = pytest.mark.parametrize("store", MILVUS, indirect=True)
server_alone = pytest.mark.parametrize("store", MILVUS[:1], indirect=True)

FILTERS: list[Filter] = [
    Equals("colour", 'gr"een\\'),
    Not(Equals("colour", "red")),
    Not(In("price", (3, 4.5, -2, 7, 8.5))),
    Range("price", above=-1.5, below=6),
    Not(Range("price", at_least=0)),
    Range("colour", above="blue"),
    Not(And((Equals("colour", "red"), Not(Equals("sale", True))))),
    parse_filter('colour = "red" and (price < 4 or not sku in ("sku1", "sku2")) and sale = true'),
]
OPTIONS = [
    SearchOptions(),
    SearchOptions(min_score=0.2, offset=4),
    SearchOptions(distinct=True),
    SearchOptions(exact=True),
    SearchOptions(min_score=-0.1, offset=2, distinct=True, where=Not(Equals("colour", "red"))),
]


def stock(store: VectorStore, count: int = 120) -> Oracle:
    entries = shop(count)
    store.add(entries)
    return Oracle(store, entries)


def test_what_is_added_is_found_at_once_with_its_key_score_and_attributes(store) -> None:
    entries = shop(20)
    assert store.add(entries) == Written(added=20)
    assert store.size == 20
    [[hit]] = store.search(entries[3].vector[None], 1)
    assert hit == Hit(ids_of(store)["key3"], "key3", hit.score, entries[3].attributes)
    assert 1 - 1e-6 <= hit.score <= 1.0
    assert [len(hits) for hits in store.search(units(2), 500)] == [20, 20]
    assert store.search(units(1), 500, SearchOptions(offset=20)) == [[]]
    assert store.search(np.empty((0, DIM), np.float32), 3) == []


def test_searches_groups_and_filters_equal_brute_force(store: VectorStore) -> None:
    oracle, queries = stock(store), units(5, seed=9)
    for options in OPTIONS:
        for k in (1, 10):
            found = store.search(queries, k, options)
            for query, hits in zip(queries, found, strict=True):
                assert_hits(hits, oracle.hits(query, k, options))
    for where in FILTERS:
        options = SearchOptions(where=where)
        assert_hits(
            store.search(queries[:1], 200, options)[0], oracle.hits(queries[0], 200, options)
        )
    cases = [("sku", size, options) for options in OPTIONS for size in (1, 3)]
    cases += [("price", 2, SearchOptions()), ("sale", 2, SearchOptions())]
    for by, size, options in cases:
        grouping = Grouping(by, size)
        found_groups = store.search_groups(queries[:2], 8, grouping, options)
        for query, groups in zip(queries, found_groups, strict=False):
            assert_groups(groups, oracle.groups(query, 8, grouping, options))


PRICE = Boost("price", -0.15, low=0.0, high=10.0)
ORDERS = [
    SearchOptions(diversity=0.4),
    SearchOptions(boost=PRICE),
    SearchOptions(diversity=0.2, boost=PRICE),
    SearchOptions(diversity=0.3, min_score=-0.05, where=Equals("colour", "red"), exact=True),
]


def no_copies(count: int) -> list[Entry]:
    """Items of which no two are equal, so that rounding decides nothing."""
    return [replace(e, vector=v) for e, v in zip(shop(count), units(count, seed=3), strict=True)]


def reordered(
    query: np.ndarray, ranked: Sequence[tuple[float, Entry]], options: SearchOptions
) -> list[str]:
    """Keys of ranked hits in the order that the options define; PRICE alone may boost."""
    first = [e for _, e in ranked[:CANDIDATES]]
    asked = query.astype(np.float64)
    vectors = [e.vector.astype(np.float64) for e in first]
    relevance = [float(asked @ v) for v in vectors]
    if options.boost:
        prices = [e.attributes.get("price", 10.0) for e in first]
        scaled = [min(1.0, max(0.0, float(price) / 10)) for price in prices]
        relevance = [r - 0.15 * x for r, x in zip(relevance, scaled, strict=True)]
    alike = (np.array(vectors) @ np.array(vectors).T).tolist() if vectors else []
    left, d, placed = list(range(len(first))), options.diversity, list[int]()
    while left:
        placed.append(
            max(
                left,
                key=lambda i: (
                    (1 - d) * relevance[i]
                    - d * max((alike[i][j] for j in placed if d), default=0.0)
                ),
            )
        )
        left.remove(placed[-1])
    return [first[i].key for i in placed] + [e.key for _, e in ranked[CANDIDATES:]]


def test_another_order_is_that_of_its_definition(store: VectorStore) -> None:
    entries = no_copies(CANDIDATES + 60)
    store.add(entries)
    oracle = Oracle(store, entries)
    for query, options in product(units(2, seed=9), ORDERS):
        [hits] = store.search(query[None], len(entries), options)
        least = -2.0 if options.min_score is None else options.min_score
        ranked = [pair for pair in oracle.ranked(query, options) if pair[0] >= least]
        assert [hit.key for hit in hits] == reordered(query, ranked, options), options
        cosine = {e.key: score for score, e in ranked}
        scores = [cosine[hit.key] for hit in hits]
        assert [hit.score for hit in hits] == pytest.approx(scores, abs=1e-6)


def test_a_group_is_ranked_by_its_best_item(gallery) -> None:
    entries = no_copies(CANDIDATES - 20)
    gallery.add(entries)
    oracle, [query] = Oracle(gallery, entries), units(1, seed=5)
    best: dict[Any, tuple[float, Entry]] = {}
    for score, e in oracle.ranked(query, SearchOptions()):
        best.setdefault(e.attributes.get("sku", e.key), (score, e))
    for options in ORDERS[:3]:
        [found] = gallery.search_groups(query[None], 30, Grouping("sku"), options)
        expected = reordered(query, [*best.values()], options)[:30]
        assert [group.hits[0].key for group in found] == expected


def test_a_boost_scales_by_the_range_of_the_gallery_and_leaves_the_unknown_behind(gallery) -> None:
    vector = units(1)[0]
    prices = {"cheap": 1, "dear": 101, "middle": 26, "unknown": None}
    gallery.add([entry(k, vector, {} if p is None else {"price": p}) for k, p in prices.items()])

    def order(text: str) -> list[str]:
        options = SearchOptions(boost=boost_of(text))
        return [hit.key for hit in gallery.search(vector[None], 9, options)[0]]

    assert boost_of("a:b:0.1:-5:1e3") == Boost("a:b", 0.1, -5.0, 1000.0)
    assert order("price:0.1") == ["dear", "middle", "cheap", "unknown"]
    assert order("price:-0.1") == ["cheap", "middle", "dear", "unknown"]
    assert order("price:0.1:0:20") == ["dear", "middle", "cheap", "unknown"]  # two at the end
    assert order("price:-0.1:200:300") == ["cheap", "dear", "middle", "unknown"]
    gallery.update({"cheap": {"price": 50}, "dear": {"price": 50}, "middle": {"price": 50}})
    assert order("price:0.1") == ["cheap", "dear", "middle", "unknown"]  # no range, no boost


def test_only_a_known_number_boosts(gallery) -> None:
    wanted = SearchOptions(boost=boost_of("colour:0.1"))
    assert gallery.search(units(1), 5, wanted) == [[]]
    gallery.add(shop(20))
    for name in ("colour", "no such"):
        with pytest.raises(FilterError, match=f"no numeric attribute '{name}' to boost by"):
            gallery.search(units(1), 5, replace(wanted, boost=Boost(name, 0.1)))


def full_of_ties(draw: random.Random, count: int) -> list[Entry]:
    """Few different scores, contents and values of all kinds, some of them in a cluster."""
    corners = [*np.eye(DIM, dtype=np.float32)[:6], *-np.eye(DIM, dtype=np.float32)[:6]]
    values: dict[str, list[AttributeValue | None]] = {
        "text": ["a", "b", "c", None],
        "number": [1, 2.5, 0, None],
        "sale": [True, False, None],
    }
    weights = {name: [draw.choice([1, 30]) for _ in known] for name, known in values.items()}
    entries = []
    for number in range(count):
        drawn = {n: draw.choices(known, weights[n])[0] for n, known in values.items()}
        attributes = {name: value for name, value in drawn.items() if value is not None}
        content = draw.randrange(max(1, count // 2))  # its vector is that of its first item
        entries.append(entry(f"key{number}", corners[content % 12], attributes, str(content)))
    return entries


@pytest.mark.parametrize("count", [120, 5])
def test_ties_copies_and_clusters_are_ranked_as_by_brute_force(store, count: int) -> None:
    """Equal scores are ordered by number, wherever the engine cuts them off."""
    draw = random.Random(count)
    entries, cut = full_of_ties(draw, count), count * 3 // 4
    store.add(entries[:cut])
    if isinstance(store, Gallery):  # equal vectors in the segment and after it
        store.compact()
    store.add(entries[cut:])
    oracle, numbers = Oracle(store, entries), [*ids_of(store).values()]
    query = np.array([[0.5, 0.5, 0.5, 0.5] + [0] * (DIM - 4)], np.float32)
    for _ in range(100 if isinstance(store, Gallery) else 10):
        options = SearchOptions(
            min_score=draw.choice([None, None, -1.0, 0.0, 0.3, 1.0]),
            offset=draw.choice([0, 0, 1, 3, 200]),
            distinct=draw.random() < 0.5,
            exclude=frozenset(draw.sample(numbers, draw.choice([0, 0, 3, len(numbers) - 1]))),
        )
        k = draw.choice([1, 2, 4, 300])
        assert_hits(store.search(query, k, options)[0], oracle.hits(query[0], k, options))
        grouping = Grouping(draw.choice(sorted(store.schema())), draw.choice([1, 2, 50]))
        [groups] = store.search_groups(query, k, grouping, options)
        assert_groups(groups, oracle.groups(query[0], k, grouping, options))


def test_an_empty_gallery_has_a_name_and_answers_with_nothing(store: VectorStore) -> None:
    assert (store.dim, store.bundle_id, store.size) == (DIM, BUNDLE, 0)
    assert store.name
    assert store.page(0, 5) == (0, [], None)
    assert store.search(units(2), 3) == [[], []]
    assert store.search_groups(units(1), 3, Grouping("sku")) == [[]]
    assert list(store.items()) == []
    assert list(store.scan()) == []
    assert store.entries([]) == []
    assert store.remove(["key1"]) == 0


def test_each_entry_is_added_replaced_updated_or_left(store: VectorStore) -> None:
    old = shop(8)
    store.add(old)
    numbers = ids_of(store)
    fresh = units(2, seed=5)
    new = [
        old[0],
        entry("key1", fresh[0], {"colour": "blue"}, content="other content"),
        replace(old[2], attributes={"colour": "red", "price": 1.5}),
        replace(old[3], path="moved.png"),
        replace(old[4], vector=fresh[1]),  # equal sha256, another vector
        entry("key99", fresh[1]),
    ]
    rounded = replace(new[2], vector=new[2].vector + np.float32(1e-7))
    sent = [*new[:2], rounded, *new[3:]]
    assert store.add(sent) == Written(added=1, replaced=2, updated=2, unchanged=1)
    now = ids_of(store)
    assert store.size == 9
    kept = [now[f"key{n}"] == numbers[f"key{n}"] for n in range(8)]
    assert kept == [True, False, True, True, False, True, True, True]
    for expected, found in zip(new, store.entries([e.key for e in new]), strict=True):
        assert same(found, expected)
    everything = {e.key: e for e in old} | {e.key: e for e in new}
    oracle = Oracle(store, list(everything.values()))
    assert_hits(store.search(fresh[:1], 20)[0], oracle.hits(fresh[0], 20, SearchOptions()))


def test_vectors_need_no_sha256_and_one_sha256_hides_no_vector(store: VectorStore) -> None:
    """A writer without images may give no sha256, or the same placeholder to every vector."""
    vectors, axes = units(12), np.eye(DIM, dtype=np.float32)
    same = [Entry(f"same{n}", v, sha256="0" * 64) for n, v in enumerate((*vectors, *axes))]
    own = [Entry(f"own{n}", vector) for n, vector in enumerate(vectors)]
    copies = [Entry("own0 again", vectors[0]), replace(same[0], key="same0 again")]
    store.add([*same, *own, *copies, Entry("other", -vectors[0], attributes={"sku": "other"})])
    assert store.add(own) == Written(unchanged=12)
    assert len({item.sha256 for item in store.items()}) == 14
    keys = [*sorted(e.key for e in (*same, *own)), "other"]
    for query in (vectors[0], axes[0]):  # most axes have the score 0
        [hits] = store.search(query[None], 100, SearchOptions(distinct=True))
        [groups] = store.search_groups(
            query[None], 100, Grouping("sku"), SearchOptions(distinct=True)
        )
        for found in (hits, [group.hits[0] for group in groups]):
            names = [hit.key.removesuffix(" again") for hit in found]
            assert sorted(names, key=lambda name: (name == "other", name)) == keys
    assert store.add([replace(same[1], vector=vectors[2])]) == Written(replaced=1)
    assert store.entries(["same1"])[0].vector.tolist() == vectors[2].tolist()


def test_an_add_takes_away_only_attributes_whose_names_it_owns(store: VectorStore) -> None:
    one, two, three = units(3)
    store.add([entry("same", one, {"colour": "red", "price": 1}), entry("other", two, {"n": 2})])
    entries = [
        entry("same", one),
        entry("other", three, {"price": 5}, content="changed"),
        entry("new", two, {"n": 3}),
    ]
    written = store.add(entries, frozenset({"colour", "unheard"}))
    assert written == Written(added=1, replaced=1, updated=1)
    assert {e.key: e.attributes for e in store.entries(["same", "other", "new"])} == {
        "same": {"price": 1},
        "other": {"n": 2, "price": 5},
        "new": {"n": 3},
    }
    assert store.add(entries, frozenset()).unchanged == 3
    assert store.add(entries[:2]) == Written(updated=2)
    assert [dict(e.attributes) for e in store.entries(["same", "other"])] == [{}, {"price": 5}]


def test_attributes_are_updated_and_taken_away(store: VectorStore) -> None:
    entries = shop(10)
    store.add(entries)
    numbers = ids_of(store)
    changes: dict[str, Mapping[str, AttributeValue | None]] = {
        "key1": {"colour": "blue", "price": 99},
        "key2": {"sku": None, "sale": None},
        "key3": dict(entries[3].attributes),
    }
    assert store.update(changes) == 2
    assert ids_of(store) == numbers
    after = {e.key: e.attributes for e in store.entries(["key1", "key2", "key3"])}
    assert after["key1"] == {**entries[1].attributes, "colour": "blue", "price": 99}
    assert after["key2"].keys() == entries[2].attributes.keys() - {"sku", "sale"}
    assert after["key3"] == entries[3].attributes
    (hits,) = store.search(units(1), 20, SearchOptions(where=Equals("price", 99)))
    assert [hit.key for hit in hits] == ["key1"]
    (hits,) = store.search(units(1), 20, SearchOptions(where=Not(Equals("price", 99))))
    assert len(hits) == 9


def test_an_attribute_that_no_item_has_takes_the_type_of_its_next_value(store: VectorStore) -> None:
    one, two, three = units(3)
    store.add([entry("one", one, {"age": "12"}), entry("two", two, {"n": 1})])
    with pytest.raises(InvalidParameterError, match="'age' is a text"):
        store.update({"two": {"age": 5}})
    store.remove(["one"])
    assert store.update({"two": {"age": 5}}) == 1
    assert store.schema()["age"] == "number"
    with pytest.raises(InvalidParameterError, match="'age' is a number"):
        store.add([entry("three", three, {"age": "12"})])
    [hits] = store.search(one[None], 3, SearchOptions(where=Range("age", above=4)))
    assert [hit.key for hit in hits] == ["two"]
    store.update({"two": {"age": None}})
    assert store.add([entry("three", three, {"age": "12"})]) == Written(added=1)
    assert store.schema()["age"] == "text"
    with pytest.raises(InvalidParameterError, match="'age' is a text"):
        store.add([entry("a", one, {"age": "12"}), entry("b", two, {"age": 5})])


def test_a_removed_item_never_comes_back(store: VectorStore) -> None:
    entries = shop(30)
    store.add(entries)
    assert store.remove(["key3", "key4", "nobody"]) == 2
    assert store.remove(["key3", "key4"]) == 0
    assert store.size == 28
    kept = [e for e in entries if e.key not in ("key3", "key4")]
    oracle = Oracle(store, kept)
    query = entries[3].vector
    assert_hits(store.search(query[None], 40)[0], oracle.hits(query, 40, SearchOptions()))
    with pytest.raises(ItemNotFoundError, match="key3"):
        store.entries(["key1", "key3"])


@faiss_alone
def test_ids_grow_and_are_never_reused(store: Gallery) -> None:
    entries = shop(10)
    given: set[int] = set()
    for _ in range(3):
        store.add(entries)
        numbers = set(ids_of(store).values())
        assert min(numbers) > max(given, default=0)
        given |= numbers
        store.remove([e.key for e in entries])
        store.compact()
    assert len(given) == 30


@milvus_alone
def test_an_id_is_derived_from_key_and_content(store: VectorStore) -> None:
    store.add([entry("key", units(1)[0], content="old")])
    (old,) = ids_of(store).values()
    assert 0 <= old < 2**53
    store.add([entry("key", units(1)[0], content="new")])
    assert ids_of(store) != {"key": old}
    store.add([entry("key", units(1)[0], {"any": 1}, content="old")])
    assert ids_of(store) == {"key": old}


def test_items_whose_hashes_are_equal_get_ids_of_their_own(milvus_lite, monkeypatch) -> None:
    monkeypatch.setattr("kinlens.indexer.exchange.milvus_collection.ID_LIMIT", 256)
    entries, [other] = no_copies(160), units(1, seed=8)
    with closing(published(milvus_lite, "narrow", entries[:80], index="hnsw")) as store:
        assert store.add(entries[80:]) == Written(added=80)
        entries[0] = replace(entries[0], vector=other)
        entries[1] = entry("key1", entries[1].vector, content="other")
        assert store.add(entries) == Written(replaced=2, unchanged=158)
        ids = ids_of(store)
        assert len(set(ids.values())) == 160
        assert [store.item(ids[e.key]).key for e in entries] == [e.key for e in entries]
        hits = store.search(other[None], 200, SearchOptions(effort=200))[0]
        assert_hits(hits, Oracle(store, entries).hits(other, 200, SearchOptions()))
        assert store.remove_items([ids["key7"]]) == 1
        assert ids_of(store) == {key: number for key, number in ids.items() if key != "key7"}


CHANGES: list[Callable[[VectorStore], object]] = [
    lambda store: store.add([entry("new", units(1)[0])]),
    lambda store: store.add([entry("key1", units(1)[0], content="other")]),
    lambda store: store.update({"key1": {"price": 1000}}),
    lambda store: store.remove(["key1"]),
    lambda store: store.remove_where(Equals("sku", "one")),
]


def test_the_version_changes_with_every_change_and_with_nothing_else(store: VectorStore) -> None:
    entries = [*shop(10), entry("one", units(1)[0], {"sku": "one"})]
    store.add(entries)
    before, ids = store.version, ids_of(store)
    assert len(bytes.fromhex(before)) == 32
    store.search(units(1), 3)
    store.remove(["nobody"])
    store.update({})
    assert store.add([]) == Written()
    assert store.add(entries) == Written(unchanged=11)
    assert (store.version, ids_of(store)) == (before, ids)
    seen = {before}
    for change in CHANGES:
        change(store)
        assert store.version not in seen
        seen.add(store.version)


def test_a_score_is_the_cosine_also_of_vectors_that_were_not_quite_of_norm_one(store) -> None:
    near, far = units(2)
    store.add([entry("near", near * np.float32(1.0009)), entry("far", far * np.float32(0.9992))])
    [stored] = store.entries(["near"])
    assert float(np.linalg.norm(stored.vector.astype(np.float64))) == pytest.approx(1, abs=1e-6)
    [hits] = store.search(near[None] * np.float32(1.0005), 2)
    expected = [float(near @ near), float(near @ far)]
    assert [h.score for h in hits] == pytest.approx(expected, abs=1e-6)


QUERY = units(1)
BAD_QUERIES: dict[str, Any] = {
    r"shape \(1, 15\).*dimension 16": QUERY[:, :-1],
    "Query 1 has norm 2": np.vstack([QUERY, 2 * QUERY]),
    "Query 0 has norm nan": QUERY * np.nan,
    "Queries of type <U1": np.array([["a"] * DIM]),
    "Queries are not an array": [[1, 0], [1]],
}
BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "offset = -1": {"offset": -1},
    "effort = 0": {"effort": 0},
    "min_score = 1.1": {"min_score": 1.1},
    "min_score = 'x'": {"min_score": "x"},
    r"exclude = \[1\]": {"exclude": [1]},
}
WRONG = entry("wrong", QUERY[0])
BAD_ENTRIES: dict[str, dict[str, Any]] = {
    r"'wrong' has the shape \(3,\)": {"vector": QUERY[0, :3]},
    "'wrong' has NaN or infinity": {"vector": QUERY[0] + np.inf},
    "of type list": {"vector": [0.0] * DIM},
    r"'\.\./up' is not a valid key": {"key": "../up"},
    r"'a\\nb' is not a valid key": {"key": "a\nb"},
    r"'\\ud800' is not a valid key": {"key": "\ud800"},
    "'aaa.* is not a valid key": {"key": "a" * 1025},
    "None is not a valid key": {"key": None},
    "sha256 of 'wrong' is None": {"sha256": None},
    "invalid Unicode": {"path": "\udcff.png"},
}
REFUSED: dict[type[KinlensError], list[tuple[str, Callable[[VectorStore], object]]]] = {
    FilterError: [
        ("unheard", lambda s: s.search(QUERY, 3, SearchOptions(Equals("unheard", 1)))),
        ("unheard", lambda s: s.page(0, 5, Equals("unheard", 1))),
        ("colour", lambda s: s.search(QUERY, 3, SearchOptions(Equals("colour", 1)))),
        ("sale", lambda s: s.remove_where(Equals("sale", 1))),
        ("size", lambda s: s.update_where(Equals("size", 1), {"price": 1})),
        ("'no' to group by. Known are", lambda s: s.search_groups(QUERY, 3, Grouping("no"))),
    ],
    ItemNotFoundError: [
        ("nobody", lambda s: s.entries(["key1", "nobody"])),
        ("nobody", lambda s: s.update({"key1": {"price": 5}, "nobody": {}})),
    ],
    InvalidParameterError: [
        *((f"k = {k}", lambda s, k=k: s.search(QUERY, k)) for k in (0, True, 1.5)),
        *((text, lambda s, q=bad: s.search(q, 1)) for text, bad in BAD_QUERIES.items()),
        *(
            (text, lambda s, bad=bad: s.search(QUERY, 1, SearchOptions(**bad)))
            for text, bad in BAD_OPTIONS.items()
        ),
        ("size = 0", lambda s: s.search_groups(QUERY, 1, Grouping("sku", size=0))),
        ("sale", lambda s: s.update({"key1": {"sale": 1}})),
        ("price", lambda s: s.update_where(Equals("sale", True), {"price": "dear"})),
        ("price", lambda s: s.update({"key1": {"price": math.nan}})),
        ("price", lambda s: s.add([entry("a", QUERY[0]), entry("b", QUERY[0], {"price": "x"})])),
        ("wrong.*norm", lambda s: s.add([*shop(3), entry("wrong", np.ones(DIM, np.float32))])),
        ("wrong.*twice", lambda s: s.add([WRONG, *shop(3), WRONG])),
        *(
            (text, lambda s, bad=bad: s.add([replace(WRONG, **bad)]))
            for text, bad in BAD_ENTRIES.items()
        ),
        *(
            ("Give a list of", lambda s, keys=keys: s.remove(keys))
            for keys in ("key1", b"key1", [5], [None])
        ),
    ],
}


def test_what_is_refused_is_named_and_changes_nothing(store: VectorStore) -> None:
    store.add([*shop(20), entry("one", QUERY[0]), entry("other", -QUERY[0])])
    version = store.version
    for error, calls in REFUSED.items():
        for message, call in calls:
            with pytest.raises(error, match=message):
                call(store)
    assert (store.size, store.version) == (22, version)


def test_keys_attributes_and_paths_may_be_any_printable_text(store: VectorStore) -> None:
    texts = ["a b", 'q"uote', "apo'strophe", "back\\slash", "äöü/日本/😀.png", "%_*", "id in [1]"]
    entries = [
        entry(text, vector, {"colour": text})
        for text, vector in zip(texts, units(len(texts)), strict=True)
    ]
    store.add(entries)
    assert store.add(entries) == Written(unchanged=len(texts))
    for expected in entries:
        (found,) = store.entries([expected.key])
        assert same(found, expected)
        options = SearchOptions(where=Equals("colour", expected.key))
        assert [h.key for h in store.search(units(1), 9, options)[0]] == [expected.key]
    assert store.remove(texts) == len(texts)


def test_items_are_found_by_id_key_and_content(store: VectorStore) -> None:
    entries = shop(30)
    store.add(entries)
    stored = store.stored(["key3", "nobody", "key4"])
    assert {key: item.path for key, item in stored.items()} == {
        "key3": "key3.png",
        "key4": "key4.png",
    }
    number = stored["key3"].id
    assert store.item(number) == stored["key3"]
    contents = [entries[3].sha256, "0" * 64]
    assert store.contents(contents) == {entries[3].sha256}
    (vector,) = store.vectors_of_contents(contents).values()
    np.testing.assert_allclose(vector, entries[3].vector, atol=1e-6)
    assert store.remove_items([number, 2**62, -1]) == 1
    assert store.remove_items([number]) == 0
    for gone in (number, 2**63, -1):
        with pytest.raises(ItemNotFoundError, match=str(gone)):
            store.item(gone)
    store.remove(["key4"])  # key9 and key19 are its copies
    assert store.contents([entries[4].sha256, "0" * 64]) == {entries[4].sha256}
    store.remove(["key9", "key19"])
    assert store.contents([entries[4].sha256]) == set()


def test_items_are_read_with_their_vectors_in_one_state(store: VectorStore) -> None:
    entries = shop(12)
    store.add(entries)
    numbers = {key: item.id for key, item in store.stored([f"key{n}" for n in range(12)]).items()}
    asked = [numbers["key7"], numbers["key2"], 2**62, -1, numbers["key2"]]
    items, vectors = store.items_at(asked)
    assert [item.id for item in items] == sorted({numbers["key7"], numbers["key2"]})
    for item, vector in zip(items, vectors, strict=True):
        expected = entries[int(item.key.removeprefix("key"))].vector
        np.testing.assert_allclose(vector, expected, atol=1e-6)
        assert item == store.item(item.id)
    none, empty = store.items_at([2**62])
    assert (none, empty.shape) == ([], (0, store.dim))
    is_red = [entry.attributes.get("colour") == "red" for entry in entries]
    assert 0 < sum(is_red) < len(entries)
    assert store.page(0, 0, Equals("colour", "red")).total == sum(is_red)


def test_pages_are_in_the_order_of_ids(store: VectorStore) -> None:
    store.add([*shop(70), entry("other", units(1)[0], {"colour": "red"})])
    items = list(store.items())
    assert store.page(0, 100).items == items
    assert store.page(0, 30)[:2] == (71, items[:30])
    assert store.page(20, 30).items == items[20:50]
    assert store.page(71, 30)[:2] == store.page(10**9, 30)[:2] == (71, [])
    red = [i for i in items if i.attributes.get("colour") == "red" and i.key.startswith("key")]
    assert store.page(3, 5, Equals("colour", "red"), "key")[:2] == (len(red), red[3:8])
    assert store.page(0, 5, after=items[-1].id) == (71, [], store.page(0, 1).last)
    read, after = [], -1
    while found := store.page(0, 9, prefix="key", after=after).items:
        read, after = read + found, found[-1].id
        store.remove([found[-1].key])
    assert read == [item for item in items if item.key != "other"]


def test_the_values_of_attributes_are_counted(store: VectorStore) -> None:
    entries = shop(60)
    store.add(entries)
    facts = {one.name: one for one in store.attribute_facts()}
    for name in ("colour", "sale"):
        counts = Counter(e.attributes[name] for e in entries if name in e.attributes)
        assert dict(facts[name].values or ()) == counts
    prices = [e.attributes["price"] for e in entries if "price" in e.attributes]
    assert (facts["price"].minimum, facts["price"].maximum) == (min(prices), max(prices))
    assert (facts["price"].kind, facts["colour"].kind) == ("number", "text")
    store.remove([e.key for e in entries])
    facts = {one.name: one for one in store.attribute_facts()}
    assert (facts["colour"].values, facts["price"].maximum) == ((), None)


# What only a gallery on Milvus has: generations behind an alias, and a server to lose.


@pytest.mark.milvus
def test_a_searching_thread_sees_one_generation_or_the_other(milvus_server) -> None:
    def generation(number: int) -> list[Entry]:
        return [entry(f"{number}-{n}", v) for n, v in enumerate(units(30 + number, seed=number))]

    with closing(published(milvus_server, "swapped", generation(0))) as store:
        first = store.generation, store.version, store.created_at
        done, seen = threading.Event(), set[tuple[str, int]]()

        def search() -> None:
            while not done.is_set():
                keys = [hit.key for hit in store.search(units(1, seed=99), 100)[0]]
                assert len({key.split("-")[0] for key in keys}) == 1, keys
                seen.add((keys[0].split("-")[0], len(keys)))

        with ThreadPoolExecutor(1) as pool:
            searching = pool.submit(search)
            try:
                published(milvus_server, "swapped", generation(1)).close()
                until(lambda: searching.done() or len(seen) == 2)
            finally:
                done.set()
            searching.result()
        assert seen == {("0", 30), ("1", 31)}
        now = store.generation, store.version, store.created_at
        assert all(old != new for old, new in zip(first, now, strict=True))
        assert store.facts().version == store.version
        assert collections(milvus_server, "swapped") == [f"swapped_{store.generation}"]


@server_alone
def test_a_publication_that_fails_changes_nothing(store, milvus_server) -> None:
    store.add(shop(10))
    before, version = ids_of(store), store.version
    many = [entry(f"key{n}", vector) for n, vector in enumerate(units(5000))]
    for entries, message in (
        ([*many, entry("wrong", np.ones(DIM, np.float32))], "wrong"),
        ([*many, many[0]], "twice"),  # in another message to the server
    ):
        with pytest.raises(InvalidParameterError, match=message):
            published(milvus_server, store.name, entries)
    assert (ids_of(store), store.version) == (before, version)
    assert len(collections(milvus_server, store.name)) == 1


@pytest.mark.milvus
def test_an_index_of_clusters_is_exact_on_demand(milvus_server) -> None:
    entries, queries = shop(2000), units(20, seed=9)  # below 1,024 rows Milvus makes no index
    with closing(published(milvus_server, "large", entries, index="ivf-flat")) as store:
        (collection,) = collections(milvus_server, "large")
        with closing(milvus_client(milvus_server)) as there:
            assert there.describe_index(collection, "vector")["index_type"] == "IVF_FLAT"
        oracle = Oracle(store, entries)
        for where in (None, Not(Equals("colour", "red")), FILTERS[-1]):
            exact = SearchOptions(exact=True, where=where)
            for query, hits in zip(queries, store.search(queries, 10, exact), strict=True):
                assert_hits(hits, oracle.hits(query, 10, exact))
        best = [{key for _, key in oracle.hits(query, 10, SearchOptions())} for query in queries]
        found = {
            effort: [{hit.key for hit in hits} for hits in store.search(queries, 10, options)]
            for effort in (1, 10**6)
            for options in [SearchOptions(effort=effort)]
        }
        assert found[1] != found[10**6] == best


@milvus_alone
def test_the_server_reads_filters_as_python_does(store: MilvusStore) -> None:
    draw = random.Random(7)
    values: dict[str, list[Any]] = {
        'odd "name\\': ["", "a", "A", "q\"uo'te", "back\\slash", "new\nline", "%_", "äß", "😀"],
        "n.um[0]": [0, -1, 7, 7.0, 7.5, -3.25, 1e-7, 1e30, -(2**63), 2**63 - 1, 2**53 + 1, 0.1],
        "yes/no": [True, False],
    }
    stored = values | {"n.um[0]": [*values["n.um[0]"], 2**40]}
    entries = []
    for number, vector in enumerate(units(120)):
        names = draw.sample(list(stored), draw.randint(0, 3))
        attributes: dict[str, AttributeValue] = {name: draw.choice(stored[name]) for name in names}
        entries.append(entry(f"key{number}", vector, attributes))
    store.add(entries)
    query = units(1, seed=9)
    for _ in range(80):
        where = random_filter(draw, values, 3)
        found = {hit.key for hit in store.search(query, 200, SearchOptions(where=where))[0]}
        assert found == {e.key for e in entries if where.matches(e.attributes)}, where


def test_all_items_that_fit_are_changed_or_removed_and_no_other(store: VectorStore) -> None:
    store.add(shop(120))
    where, given = Range("price", at_least=3), {"price": 100, "colour": None, "new": True}
    expected = {item.key for item in store.items() if where.matches(item.attributes)}
    assert store.update_where(where, given) == len(expected)
    assert store.update_where(where, given) == 0
    for item in store.items():
        changed = item.attributes.get("price") == 100
        assert changed == (item.key in expected) == item.attributes.get("new", False)
        assert not (changed and "colour" in item.attributes)
    kept = ids_of(store).keys() - expected
    assert store.remove_where(Equals("price", 100)) == len(expected)
    assert store.remove_where(Equals("price", 100)) == 0
    assert ids_of(store).keys() == kept


@server_alone
def test_filters_and_attributes_may_be_as_large_as_their_limits(store: MilvusStore) -> None:
    entries = shop(40)
    store.add(entries)
    wide = Or(tuple(Equals("price", n / 2) for n in range(1000)))
    listed = In("price", tuple(n / 2 for n in range(10_000)))
    deep: Filter = Equals("colour", "red")
    for n in range(26):
        deep = Not(And((deep, Equals("price", n)))) if n % 2 else Or((deep, Equals("price", -n)))
    for where in (wide, listed, deep):
        (hits,) = store.search(units(1), 40, SearchOptions(where=where))
        assert {h.key for h in hits} == {e.key for e in entries if where.matches(e.attributes)}
    long = {f"a{n}": "x" * 4096 for n in range(17)}
    with pytest.raises(InvalidParameterError, match=r"attributes.*65536"):
        store.add([entry("key", QUERY[0], long)])
    for n in range(12):
        deep = Or((Not(deep), Equals("price", n)))
    with pytest.raises(FilterError, match="levels"):
        store.search(units(1), 1, SearchOptions(where=deep))


@server_alone
def test_two_processes_that_write_at_once_leave_one_item_for_each_key(store, milvus_server) -> None:
    with closing(MilvusStore.open(milvus_server.uri, store.name)) as other:

        def write(writer: MilvusStore, name: str) -> None:
            for n in range(5):
                entries = [replace(e, sha256=entry(f"{name}{n}", e.vector).sha256) for e in shop(8)]
                writer.add([replace(e, attributes={name: n}) for e in entries])

        with ThreadPoolExecutor(2) as pool:
            [*pool.map(write, (store, other), ("one", "two"))]
        assert sorted(item.key for item in store.items()) == sorted(e.key for e in shop(8))
        assert {"one", "two"} <= store.schema().keys()
        assert store.version == other.version


@milvus_alone
def test_a_foreign_collection_is_no_gallery(store, server) -> None:
    with closing(milvus_client(server)) as there:
        there.create_collection("foreign", dimension=4)
    for call in (partial(MilvusStore.open, server.uri), partial(published, server)):
        with pytest.raises(GalleryCorruptError, match="is not a gallery"):
            call("foreign")
    with pytest.raises(GalleryNotFoundError, match=r"nowhere.*import"):
        MilvusStore.open(server.uri, "nowhere")


@server_alone
def test_weaker_consistency_levels_see_writes_eventually(store, milvus_server) -> None:
    for number, level in enumerate(("Session", "Bounded", "Eventually")):
        with closing(MilvusStore.open(milvus_server.uri, store.name, consistency=level)) as other:
            store.add([entry(level, units(1)[0])])
            while len(other.search(units(1), 9)[0]) <= number:
                time.sleep(0.01)


@milvus_alone
def test_facets_and_sorted_pages_are_those_of_a_folder(store, gallery, monkeypatch) -> None:
    names, query = ["colour", "price", "sale", "sku"], units(2, seed=9)
    assert store.facets(["sku"]) == gallery.facets(["sku"])
    for one in (store, gallery):
        one.add(shop(60))
    for where, prefix in product(
        (None, Equals("colour", "red"), Equals("price", 99)), ("", "key1")
    ):
        for least in (None, 0.1):
            options = SearchOptions(where=where, min_score=least)
            given = names, query, options, prefix
            assert store.facets(*given) == gallery.facets(*given)
        for order in (SortBy("price"), SortBy("colour", descending=True)):
            pages = [one.page(3, 40, where, prefix, sort_by=order) for one in (store, gallery)]
            values = [[order.value_of(item.attributes) for item in page.items] for page in pages]
            assert (pages[0].total, values[0]) == (pages[1].total, values[1])
    everything = store.page(0, 60, sort_by=SortBy("sku")).items
    assert {item.key for item in everything} == {e.key for e in shop(60)}
    monkeypatch.setattr("kinlens.indexer.exchange.milvus_search.MAX_SORTED", 50)
    for call in (
        lambda: store.facets(names),
        lambda: store.facets(names, query, SearchOptions(min_score=-1.0)),
        lambda: store.page(0, 5, sort_by=SortBy("price")),
    ):
        with pytest.raises(InvalidParameterError, match=r"(60|more than 50) items.* Milvus"):
            call()
    assert store.facets(["sku"], options=SearchOptions(where=Equals("sale", True)))


SEVERAL: dict[str, list[Any]] = {
    'si"zes\\': ["S", "M", "q\"uo'te", "back\\slash", "new\nline", "%_", "äß😀", ""],
    "lengths": [0, -1, 7, 7.0, 2.5, -3.25, 1e30, -(2**63), 2**63 - 1, 2**53 + 1],
    "on": [True, False],
    "colour": ["red", "blue"],  # never several
}


def lists(count: int, seed: int = 0) -> list[Entry]:
    """Items with a list, one value, an empty list or nothing of three attributes."""
    draw, entries = random.Random(seed), []
    for number, vector in enumerate(units(count, seed)):
        attributes: dict[str, Any] = {"colour": draw.choice(SEVERAL["colour"])}
        for name in [*SEVERAL][:3]:
            one, many = draw.choice(SEVERAL[name]), draw.choices(SEVERAL[name], k=3)
            own = draw.choice([many, many[:1], one, [], None])
            attributes |= {} if own is None else {name: own}
        entries.append(entry(f"key{number}", vector, attributes))
    return entries


def check_lists(store: VectorStore, entries: Sequence[Entry], seed: int) -> None:
    """Filters, facets, groups and sorted pages equal a scan of each item."""
    oracle, draw, query = Oracle(store, entries), random.Random(seed), units(1, 5)
    names = [*SEVERAL][:3]
    for _ in range(8):
        where = random_filter(draw, SEVERAL, 2)
        options = SearchOptions(where=where)
        fitting = [e for _, e in oracle.ranked(query[0], options)]
        assert store.page(0, 0, where).total == len(fitting), where
        assert [h.key for h in store.search(query, 200, options)[0]] == [e.key for e in fitting]
        for name, facet in store.facets(names[:1] + names[2:], None, options).items():
            given = [{*values_in(e.attributes.get(name))} for e in fitting]
            assert dict(facet.values or ()) == Counter(v for own in given for v in own), where
            assert facet.missing == sum(not own for own in given)
    for by, size in product(names, (1, 3)):
        grouping, options = Grouping(by, size), SearchOptions(where=Exists("colour"))
        [groups] = store.search_groups(query, 9, grouping, options)
        assert_groups(groups, oracle.groups(query[0], 9, grouping, options))
    order = SortBy("lengths", descending=True)
    values = [order.value_of(e.attributes) for e in entries]
    known = sorted((v for v in values if v is not None), reverse=True)
    shown = store.page(0, len(entries), sort_by=order).items
    assert [order.value_of(item.attributes) for item in shown] == known + [None] * (
        len(entries) - len(known)
    )


def test_several_values_are_stored_filtered_counted_and_grouped(store: VectorStore) -> None:
    entries, (text, *_) = lists(120), SEVERAL
    entries[3] = replace(entries[3], attributes={text: "S", "lengths": [1, 2]})
    assert store.add(entries) == Written(added=120)
    assert store.add(entries) == Written(unchanged=120)
    for found, expected in zip(store.entries([e.key for e in entries]), entries, strict=True):
        assert same(found, expected)
    check_lists(store, entries, 1)
    facts = {fact.name: fact.kind for fact in store.attribute_facts()}
    assert [facts[name] for name in SEVERAL] == ["text", "number", "boolean", "text"]
    changes: dict[str, Any] = {
        "key1": {text: ["S", "S", "XL"], "colour": None},
        "key2": {text: "XL"},
        "key3": {text: None, "lengths": []},
    }
    assert [store.update(changes), store.update(changes)] == [3, 0]
    changed = store.stored([*changes])
    assert [item.attributes.get(text) for item in changed.values()] == [
        ("S", "S", "XL"),
        "XL",
        None,
    ]
    assert changed["key3"].attributes.keys().isdisjoint({text, "lengths"})
    now = {item.key: dict(item.attributes) for item in store.items()}
    where = Equals(text, "M")
    fitting = {key for key, own in now.items() if where.matches(own)}
    assert store.update_where(where, {text: ["L", 'gr"een\\']}) == len(fitting)
    now |= {key: now[key] | {text: ("L", 'gr"een\\')} for key in fitting}
    current = [replace(e, attributes=now[e.key]) for e in entries]
    check_lists(store, current, 2)
    assert store.remove_where(In(text, ("L", "XL"))) == len(fitting) + 2
    gone = fitting | {"key1", "key2"}
    check_lists(store, [e for e in current if e.key not in gone], 3)


def test_changes_by_two_spellings_of_a_key_are_both_made(store: VectorStore) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    store.add([entry(composed, QUERY[0], {"price": 1})])
    changes: dict[str, Any] = {composed: {"price": 2, "sku": "a"}, decomposed: {"sku": "b"}}
    assert [store.update(changes), store.update(changes)] == [1, 0]
    [item] = store.items()
    assert item.attributes == {"price": 2, "sku": "b"}


def test_members_with_several_values_do_not_hide_better_ones(store: VectorStore) -> None:
    """The last item is found for its second value, before the second best of its first value."""
    axes = np.eye(DIM, dtype=np.float32)

    def at(score: float, key: str, attributes: Mapping[str, Any]) -> Entry:
        return entry(key, score * axes[0] + math.sqrt(1 - score**2) * axes[1], attributes)

    entries = [at(0.99, "best", {"shade": "a"})]
    entries += [at(0.98 - n / 500, f"many{n}", {"shade": "b"}) for n in range(100)]
    entries += [at(0.6, "second", {"shade": "a"}), at(0.5, "last", {"shade": ["a", "c"]})]
    store.add(entries)
    grouping, expected = Grouping("shade", 2), Oracle(store, entries)
    [groups] = store.search_groups(axes[:1], 3, grouping)
    assert [hit.key for hit in groups[0].hits] == ["best", "second"]
    assert_groups(groups, expected.groups(axes[0], 3, grouping, SearchOptions()))


def test_one_list_among_single_values_changes_no_other_answer(store: VectorStore) -> None:
    """Also if it is the longest that Milvus stores, and after the item is gone."""
    entries = [entry(f"k{n}", v, {"price": n, "of": f"s{n}"}) for n, v in enumerate(units(30))]
    store.add(entries)
    long = entry("long", QUERY[0], {"price": [*range(40, 71), -0.5], "of": ["s7", "t"]})
    store.add([long])

    def check(now: Sequence[Entry]) -> None:
        ranges = [
            Range("price", below=20),
            Range("price", above=-2, at_most=0),
            StartsWith("of", "s"),
        ]
        for where in (*ranges, *map(Not, ranges), And((ranges[0], Not(ranges[1])))):
            found = store.search(QUERY, 100, SearchOptions(where=where))[0]
            assert {hit.key for hit in found} == {e.key for e in now if where.matches(e.attributes)}

    check([*entries, long])
    store.update({"long": {"price": 3, "of": None}})
    check([*entries, replace(long, attributes={"price": 3})])
    store.remove(["long"])
    check(entries)


@milvus_alone
def test_writers_at_the_same_time_keep_the_longest_list(store: MilvusStore, server) -> None:
    store.add(shop(2))
    with closing(Connection(server.uri)) as connection:
        before = Collection.current(connection, store.name, "Strong")
        store.update({"key0": {"lengths": [9, 9, 9, 9, 1]}})
        before.learn({"lengths": "number"}, {"2 lengths"})  # of a writer that read it earlier
    assert store.page(0, 0, Range("lengths", below=5)).total == 1


@milvus_alone
def test_what_a_gallery_on_milvus_does_not_support_is_refused_by_name(
    store: MilvusStore, server
) -> None:
    store.add(shop(20))
    version = store.version
    boost = Boost("price", 0.1)
    long: dict[str, Any] = {"sizes": [*range(33)]}
    limit = r"'sizes' of 'key\d+' has 33 values; the limit on Milvus is 32"
    refused: list[tuple[str, Callable[[], object]]] = [
        (limit, lambda: store.add([entry("key0", QUERY[0], long)])),
        (limit, lambda: store.update({"key0": long})),
        (limit, lambda: published(server, "long", [entry("key0", QUERY[0], long)])),
        (limit, lambda: store.update_where(Equals("sku", "sku0"), long)),
        (r"16,385.*16,384", lambda: store.search(QUERY, 16_000, SearchOptions(offset=385))),
        ("distinct = true", lambda: store.search(QUERY, 3, SearchOptions(near=0.9))),
        ("needs from and to", lambda: store.search(QUERY, 5, SearchOptions(boost=boost))),
    ]
    for message, call in refused:
        with pytest.raises(InvalidParameterError, match=message):
            call()
    assert store.version == version
    [hits] = store.search(QUERY, 16_384, SearchOptions(sort_by=SortBy("price")))
    prices = [hit.attributes["price"] for hit in hits if "price" in hit.attributes]
    assert prices == sorted(prices)
    assert len(hits) == 20


@pytest.mark.milvus
def test_a_gallery_moves_to_milvus_by_command_and_comes_back(
    run: Run, built: Path, shop: Path, tmp_path: Path, milvus_server: MilvusServer
) -> None:
    there = f"{milvus_server.uri.replace('http', 'milvus')}/moved"
    run("update", built, "f.gif", "--set", "price:number=5", "--set", "sizes:text[]=S|M")
    assert printed(run("import", built, "--out", there, "--json"))["items"] == 6
    ask = ("search", there, "--image", shop / "f.gif", "--bundle", "b", "-k", "1")
    assert run(*ask).stdout == "1.0000  f.gif  price=5, sizes=S|M\n"
    assert run("update", there, "cup/a.png", "--set", "price=7.5").stdout.startswith("1 of 1")
    (shop / "new.png").write_bytes(encoded(photo(99)))
    assert "1 added, 0 replaced" in run("add", there, shop, "--bundle", "b").stdout
    counted = run("remove", there, "--where", "price > 6", "--dry-run")
    assert counted.stdout == "1 items would be removed; 7 items in the gallery.\n"
    assert run("remove", there, "--where", "price > 6").stdout.startswith("1 items removed; 6")
    stats = printed(run("stats", there, "--json"))
    assert (stats["size"], stats["formats"]["PNG"]) == (6, 1)
    assert run("import", there, "--out", tmp_path / "back").exit_code == 0
    with closing(Gallery.open(tmp_path / "back")) as gallery:
        keys = {item.key for item in gallery.items()}
    assert ("new.png" in keys, "cup/a.png" in keys, len(keys)) == (True, False, 6)


# Without a server.


def test_a_wrong_name_address_or_installation_is_named(run, monkeypatch) -> None:
    pytest.importorskip("pymilvus", reason="pymilvus is not installed")
    for name in ("", "1shop", "my-shop", f"shop_{'0a' * 6}", "s" * 65, "a.b"):
        with pytest.raises(InvalidParameterError, match="is not a valid gallery name on Milvus"):
            MilvusStore.open("http://127.0.0.1:1", name)
    monkeypatch.setitem(sys.modules, "milvus_lite.server_manager", None)
    for uri in ("http://127.0.0.1:1", "nonsense", "http://127.0.0.1:99999", "shop.db"):
        with pytest.raises(EngineUnavailableError, match=uri):
            MilvusStore.open(uri, "shop", timeout_s=2)
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    assert "kinlens[milvus]" in failure(run("show", "milvus://127.0.0.1:1/shop", "key"))
