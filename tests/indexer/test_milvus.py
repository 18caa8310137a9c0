"""What only a gallery on Milvus has: generations behind an alias, and a server to lose."""

import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedder.errors import (
    BundleMismatchError,
    EngineUnavailableError,
    FilterError,
    GalleryCorruptError,
    GalleryNotFoundError,
    InvalidParameterError,
)
from embedder.types import AttributeValue
from indexer.exchange.milvus import Consistency
from indexer.filters.tree import And, Equals, Filter, In, Not, Or, Range
from indexer.types import Entry, Grouping, SearchOptions
from tests.indexer.milvus_server import MilvusServer, started_server
from tests.indexer.oracle import DIM, Oracle, assert_groups, assert_hits, entry, ids_of, shop, units
from tests.support.seams import MilvusStore

BUNDLE = "b" * 64
milvus = pytest.mark.milvus


@pytest.fixture(scope="module")
def shared(milvus_server: MilvusServer) -> Iterator[MilvusStore]:
    """One gallery for all tests, since it takes seconds to make one."""
    with closing(published(milvus_server, "peculiar")) as store:
        yield store


@pytest.fixture
def store(shared: MilvusStore) -> MilvusStore:
    """An empty gallery."""
    shared.remove([item.key for item in shared.items()])
    return shared


def published(
    server: MilvusServer, name: str, entries: list[Entry] | None = None, bundle_id: str = BUNDLE
) -> MilvusStore:
    return MilvusStore.publish(server.uri, name, entries or [], dim=DIM, bundle_id=bundle_id)


def client(server: MilvusServer) -> Any:
    from pymilvus import MilvusClient

    return MilvusClient(uri=server.uri, timeout=10)


def collections(server: MilvusServer, name: str) -> list[str]:
    with closing(client(server)) as there:
        return [known for known in there.list_collections() if known.startswith(f"{name}_")]


@milvus
def test_a_searching_thread_sees_one_generation_or_the_other(milvus_server: MilvusServer) -> None:
    def generation(number: int) -> list[Entry]:
        vectors = units(30 + number, seed=number)
        return [
            entry(f"{number}-{n}", vector, {"made": number}) for n, vector in enumerate(vectors)
        ]

    store = published(milvus_server, "swapped", generation(0))
    first = store.generation, store.version, store.created_at
    done, failures = threading.Event(), list[BaseException]()
    seen: set[tuple[str, int]] = set()

    def search() -> None:
        query = units(1, seed=99)
        try:
            while not done.is_set():
                keys = [hit.key for hit in store.search(query, 100)[0]]
                assert len({key.split("-")[0] for key in keys}) == 1, keys
                seen.add((keys[0].split("-")[0], len(keys)))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=search)
    thread.start()
    try:
        published(milvus_server, "swapped", generation(1)).close()
    finally:
        done.set()
        thread.join()
    assert failures == []
    assert seen == {("0", 30), ("1", 31)}
    now = store.generation, store.version, store.created_at
    assert all(old != new for old, new in zip(first, now, strict=True))
    assert store.facts().version == store.version
    assert collections(milvus_server, "swapped") == [f"swapped_{store.generation}"]
    store.close()


@milvus
def test_a_publication_that_fails_changes_nothing(
    store: MilvusStore, milvus_server: MilvusServer
) -> None:
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


@milvus
def test_a_generation_of_another_bundle_is_not_searched_by_who_opened_the_old_one(
    milvus_server: MilvusServer,
) -> None:
    with closing(published(milvus_server, "model", shop(5))) as store:
        published(milvus_server, "model", shop(6), bundle_id="c" * 64).close()
        with pytest.raises(BundleMismatchError, match=r"c{12}.*b{12}"):
            store.search(units(1), 3)


@milvus
def test_a_large_gallery_gets_an_index_that_is_exact_on_demand(
    milvus_server: MilvusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.exchange.milvus.EXACT_BELOW", 100)
    entries = shop(2000)  # below 1,024 rows Milvus makes no index
    store = published(milvus_server, "large", entries)
    (collection,) = collections(milvus_server, "large")
    with closing(client(milvus_server)) as there:
        assert there.describe_index(collection, "vector")["index_type"] == "IVF_FLAT"
    oracle, queries = Oracle(store, entries), units(20, seed=9)
    exact = SearchOptions(exact=True, where=Not(Equals("colour", "red")))
    for query, hits in zip(queries, store.search(queries, 10, exact), strict=True):
        assert_hits(hits, oracle.hits(query, 10, exact))

    def recall(options: SearchOptions) -> float:
        found = store.search(queries, 10, options)
        best = [{key for _, key in oracle.hits(query, 10, SearchOptions())} for query in queries]
        pairs = zip(found, best, strict=True)
        return float(np.mean([len({h.key for h in hits} & keys) / 10 for hits, keys in pairs]))

    assert recall(SearchOptions(effort=1)) < recall(SearchOptions(effort=10**6)) == 1.0
    store.close()


def random_filter(draw: random.Random, values: dict[str, list[Any]], depth: int = 0) -> Filter:
    if depth < 3 and draw.random() < 0.5:
        parts = tuple(random_filter(draw, values, depth + 1) for _ in range(draw.randint(2, 3)))
        return draw.choice([And(parts), Or(parts), Not(parts[0])])
    name = draw.choice(list(values))
    known = values[name]
    if draw.random() < 0.3:
        return In(name, tuple(draw.choices(known, k=draw.randint(1, 4))))
    if draw.random() < 0.5 and name != "yes/no":
        limit = draw.choice(["at_least", "above", "at_most", "below"])
        return Range(name, **{limit: draw.choice(known)})
    return Equals(name, draw.choice(known))


@milvus
def test_the_server_reads_filters_as_python_does(store: MilvusStore) -> None:
    draw = random.Random(7)
    values: dict[str, list[Any]] = {
        'odd "name\\': [
            "",
            "a",
            "A",
            "b",
            "q\"uo'te",
            "back\\slash",
            "new\nline",
            "%_",
            "äß",
            "😀",
        ],
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
    for _ in range(150):
        where = random_filter(draw, values)
        found = {hit.key for hit in store.search(query, 200, SearchOptions(where=where))[0]}
        assert found == {e.key for e in entries if where.matches(e.attributes)}, where


@milvus
def test_a_filter_as_large_as_they_may_be_is_answered(store: MilvusStore) -> None:
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
        grouping = Grouping("sku", "mean")
        found = store.search_groups(units(1), 40, grouping, SearchOptions(where=where))
        assert_groups(
            found[0],
            Oracle(store, entries).groups(units(1)[0], 40, grouping, SearchOptions(where=where)),
        )
    for n in range(12):
        deep = Or((Not(deep), Equals("price", n)))
    with pytest.raises(FilterError, match="levels"):
        store.search(units(1), 1, SearchOptions(where=deep))


@milvus
def test_two_processes_that_write_at_once_leave_one_item_for_each_key(
    store: MilvusStore, milvus_server: MilvusServer
) -> None:
    with closing(MilvusStore.open(milvus_server.uri, store.name)) as other:

        def write(writer: MilvusStore, name: str) -> None:
            for n in range(5):
                entries = [replace(e, sha256=entry(f"{name}{n}", e.vector).sha256) for e in shop(8)]
                writer.add([replace(e, attributes={name: n}) for e in entries])

        threads = [
            threading.Thread(target=write, args=pair) for pair in ((store, "one"), (other, "two"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(item.key for item in store.items()) == sorted(e.key for e in shop(8))
        assert {"one", "two"} <= store.schema().keys()
        assert store.version == other.version


@milvus
@pytest.mark.parametrize("level", ["Session", "Bounded", "Eventually"])
def test_weaker_levels_see_writes_in_the_end(
    store: MilvusStore, milvus_server: MilvusServer, level: Consistency
) -> None:
    with closing(MilvusStore.open(milvus_server.uri, store.name, consistency=level)) as other:
        store.add(shop(5))
        while len(other.search(units(1), 9)[0]) < 5:
            time.sleep(0.01)


@milvus
def test_galleries_are_told_apart_by_name_and_bundle(
    store: MilvusStore, milvus_server: MilvusServer
) -> None:
    uri = milvus_server.uri
    with pytest.raises(GalleryNotFoundError, match=r"nowhere.*import"):
        MilvusStore.open(uri, "nowhere")
    with pytest.raises(BundleMismatchError, match=r"b{12}.*c{12}"):
        MilvusStore.open(uri, store.name, expected_bundle_id="c" * 64)
    with closing(client(milvus_server)) as there:
        there.create_collection("foreign", dimension=4)
    with pytest.raises(GalleryCorruptError, match="something else"):
        MilvusStore.open(uri, "foreign")
    with pytest.raises(GalleryCorruptError, match="something else"):
        published(milvus_server, "foreign")


@milvus
def test_what_exceeds_the_limits_of_milvus_is_refused(store: MilvusStore) -> None:
    long = {f"a{n}": "x" * 4096 for n in range(17)}
    with pytest.raises(InvalidParameterError, match=r"attributes.*65536"):
        store.add([entry("key", units(1)[0], long)])
    with pytest.raises(InvalidParameterError, match=r"16,385.*16,384"):
        store.search(units(1), 16_000, SearchOptions(offset=385))
    assert store.search(units(1), 16_384) == [[]]


@pytest.mark.parametrize("name", ["", "1shop", "my-shop", f"shop_{'0a' * 6}", "s" * 65, "a.b"])
def test_a_name_that_milvus_cannot_have_is_refused_before_asking(name: str) -> None:
    with pytest.raises(InvalidParameterError, match="cannot be a gallery on Milvus"):
        MilvusStore.open("http://127.0.0.1:1", name)


@pytest.mark.parametrize(
    "uri", ["http://127.0.0.1:1", "nonsense", "http://127.0.0.1:99999", "shop.db"]
)
def test_a_wrong_address_is_named(uri: str) -> None:
    pytest.importorskip("pymilvus", reason="pymilvus is not installed")
    with pytest.raises(EngineUnavailableError, match=uri):
        MilvusStore.open(uri, "shop", timeout_s=2)


def test_without_pymilvus_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(EngineUnavailableError, match=r"kinlens\[milvus\]"):
        MilvusStore.open("http://127.0.0.1:1", "shop")


@milvus
def test_a_killed_server_is_an_error_and_what_it_had_acknowledged_is_there_afterwards(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    entries = shop(30)
    for server in started_server(request, tmp_path):
        with closing(published(server, "shop")) as made:
            made.add(entries)
            made.remove(["key0"])
        with closing(MilvusStore.open(server.uri, "shop", timeout_s=2)) as store:
            version = store.version
            server.kill()
            with pytest.raises(EngineUnavailableError, match="does not answer"):
                store.search(units(1), 3)
            with pytest.raises(EngineUnavailableError, match="does not answer"):
                store.add(entries)
            server.restart()
        with closing(MilvusStore.open(server.uri, "shop")) as store:
            assert ids_of(store).keys() == {e.key for e in entries[1:]}
            assert store.version == version
