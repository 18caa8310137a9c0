"""What only a gallery on Milvus has: generations behind an alias, one writer, a server to lose."""

import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedder.errors import (
    BundleMismatchError,
    EngineUnavailableError,
    FilterError,
    GalleryBusyError,
    GalleryCorruptError,
    GalleryError,
    GalleryNotFoundError,
    InvalidParameterError,
)
from embedder.types import AttributeValue
from indexer.exchange import (
    milvus_generation,
    milvus_schema,
    milvus_search,
    milvus_state,
    milvus_view,
)
from indexer.exchange.milvus_filters import expression
from indexer.exchange.milvus_schema import clusters, page_rows
from indexer.exchange.milvus_state import State, new_mark, read_state, write_state
from indexer.filters.tree import And, Equals, Filter, In, Not, Or, Range
from indexer.types import Entry, Grouping, SearchOptions
from tests.indexer.milvus_server import MilvusServer, started_server
from tests.indexer.oracle import DIM, Oracle, assert_groups, assert_hits, entry, ids_of, shop, units
from tests.support.seams import Connection, MilvusStore

BUNDLE = "b" * 64
milvus = pytest.mark.milvus


@pytest.fixture(scope="module")
def shared(milvus_server: MilvusServer) -> Iterator[MilvusStore]:
    """One gallery for all tests, since it takes seconds to make one."""
    store = MilvusStore.create(milvus_server.uri, "peculiar", dim=DIM, bundle_id=BUNDLE)
    yield store
    store.close()


@pytest.fixture
def store(shared: MilvusStore) -> MilvusStore:
    """An empty gallery."""
    shared.remove([item.key for item in shared.items()])
    return shared


@pytest.fixture
def connection(milvus_server: MilvusServer) -> Iterator[Connection]:
    with closing(Connection(milvus_server.uri)) as connection:
        yield connection


def collections_of(connection: Connection, name: str) -> list[str]:
    return [known for known in connection.call("list_collections") if known.startswith(name)]


def set_state(connection: Connection, name: str, **changes: object) -> State:
    """Change the state as another process would."""
    collection, state = read_state(connection, name)
    state = state.model_copy(update=changes)
    write_state(connection, collection, state)
    return state


@milvus
def test_a_searching_thread_sees_one_generation_or_the_other(store: MilvusStore) -> None:
    def generation(number: int) -> list[Entry]:
        vectors = units(30 + number, seed=number)
        return [entry(f"{number}-{n}", vector) for n, vector in enumerate(vectors)]

    store.add(generation(0))
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
        for number in (1, 2):
            assert store.rebuild(generation(number)) == 30 + number
    finally:
        done.set()
        thread.join()
    assert failures == []
    assert seen <= {("0", 30), ("1", 31), ("2", 32)}
    assert len(seen) >= 2


@milvus
def test_a_rebuild_replaces_everything_and_leaves_one_collection(
    store: MilvusStore, connection: Connection, milvus_server: MilvusServer
) -> None:
    store.add(shop(40))
    highest, version = max(ids_of(store).values()), store.version
    entries = [entry(f"new{n}", v, {"made": "now"}) for n, v in enumerate(units(25, seed=3))]
    progress: list[int] = []
    with closing(MilvusStore.open(milvus_server.uri, store.name)) as other:
        assert store.rebuild(entries, progress.append) == 25
        assert sum(progress) == 25
        oracle, query = Oracle(other, entries), units(1, seed=9)
        assert_hits(other.search(query, 40)[0], oracle.hits(query[0], 40, SearchOptions()))
        assert other.version != version
        assert other.schema() == {"made": "text"}
    assert min(ids_of(store).values()) > highest
    assert len(collections_of(connection, store.name)) == 1


@milvus
def test_a_rebuild_that_fails_changes_nothing(store: MilvusStore, connection: Connection) -> None:
    store.add(shop(10))
    before, version = ids_of(store), store.version
    collections = collections_of(connection, store.name)
    twice = [*shop(10), entry("wrong", np.ones(DIM, np.float32))]
    with pytest.raises(InvalidParameterError, match="wrong"):
        store.rebuild(twice)
    assert (ids_of(store), store.version) == (before, version)
    assert collections_of(connection, store.name) == collections
    store.add(shop(11))


@milvus
def test_a_key_twice_is_refused_also_across_batches(
    store: MilvusStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(milvus_generation, "page_rows", lambda dim: 4)
    with pytest.raises(InvalidParameterError, match=r"key1.*twice"):
        store.rebuild([*shop(10), shop(2)[1]])


@milvus
def test_a_large_gallery_gets_an_index_that_is_exact_on_demand(
    store: MilvusStore, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(milvus_schema, "_EXACT_BELOW", 100)
    entries = shop(2000)  # below 1,024 rows Milvus makes no index
    store.rebuild(entries)
    (collection,) = collections_of(connection, store.name)
    assert connection.call("describe_index", collection, "vector")["index_type"] == "IVF_FLAT"
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
    monkeypatch.undo()
    store.rebuild([])


@milvus
def test_answers_do_not_depend_on_the_limits_of_the_server(
    store: MilvusStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, value in (
        (milvus_search, "TOP_K", 7),
        (milvus_search, "_AT_ONCE", 14),
        (milvus_view, "page_rows", lambda dim: 5),
        (milvus_view, "_LOOKUP", 3),
    ):
        monkeypatch.setattr(module, name, value)
    entries = shop(60)
    store.add(entries)
    store.remove([f"key{n}" for n in range(20, 45)])  # a gap in the numbers
    kept = entries[:20] + entries[45:]
    oracle, queries = Oracle(store, kept), units(4, seed=9)
    options = SearchOptions(where=Not(Equals("colour", "red")))
    for query, hits in zip(queries, store.search(queries, 30, options), strict=True):
        assert_hits(hits, oracle.hits(query, 30, options))
    for query, hits in zip(queries, store.search(queries, 100), strict=True):
        assert_hits(hits, oracle.hits(query, 100, SearchOptions()))
    grouping = Grouping("sku", "mean", 2)
    for query, groups in zip(queries, store.search_groups(queries, 9, grouping), strict=True):
        assert_groups(groups, oracle.groups(query, 9, grouping, SearchOptions()))
    assert [len(batch) for batch in store.scan(9)] == [9, 9, 9, 8]


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


def test_an_expression_is_a_balanced_tree() -> None:
    where = Or(tuple(Equals("n", number) for number in range(1000)))
    depth = deepest = 0
    for sign in expression(where):
        depth += {"(": 1, ")": -1}.get(sign, 0)
        deepest = max(deepest, depth)
    assert depth == 0
    assert deepest <= 12


@milvus
def test_while_another_process_writes_changes_are_refused_and_searches_go_on(
    store: MilvusStore, connection: Connection
) -> None:
    entries = shop(5)
    store.add(entries)
    set_state(connection, store.name, writer="someone", since=time.time(), changing=True)
    for change in (
        lambda: store.add([entry("new", units(1)[0])]),
        lambda: store.update({"key1": {"price": 1}}),
        lambda: store.remove(["key1"]),
        lambda: store.rebuild([]),
    ):
        with pytest.raises(GalleryBusyError, match="Another process is writing"):
            change()
    assert len(store.search(units(1), 9)[0]) == 5
    assert store.version != store.version
    set_state(connection, store.name, writer=None, changing=False)


@milvus
def test_the_mark_of_a_writer_that_died_is_taken_over(
    store: MilvusStore, connection: Connection
) -> None:
    store.add(shop(5))
    version = store.version
    long_ago = time.time() - milvus_state.LEASE_S - 1
    set_state(connection, store.name, writer="dead", since=long_ago, changing=True, next_id=10**6)
    assert store.add(shop(5)).unchanged == 5
    now = store.version
    assert now == store.version != version
    store.add([entry("new", units(1)[0])])
    assert ids_of(store)["new"] >= 10**6


@milvus
def test_a_writer_that_was_overtaken_while_it_looked_gives_up(
    store: MilvusStore, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_slowly(*arguments: Any) -> Any:
        set_state(connection, store.name, change=new_mark())
        return plan_add(*arguments)

    plan_add = sys.modules["indexer.exchange.milvus_changes"].plan_add
    monkeypatch.setattr("indexer.exchange.milvus_engine.plan_add", plan_slowly)
    with pytest.raises(GalleryBusyError):
        store.add(shop(5))
    assert store.size == 0


@milvus
def test_a_long_change_renews_its_mark(
    store: MilvusStore, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = threading.Event()

    def send_slowly(*arguments: Any) -> None:
        first = read_state(connection, store.name)[1].since
        while read_state(connection, store.name)[1].since == first:
            time.sleep(0.01)
        renewed.set()
        send(*arguments)

    send = sys.modules["indexer.exchange.milvus_changes"].send
    monkeypatch.setattr("indexer.exchange.milvus_engine.send", send_slowly)
    monkeypatch.setattr(milvus_state, "LEASE_S", 0.3)
    store.add(shop(5))
    assert renewed.is_set()
    assert read_state(connection, store.name)[1].writer is None


@milvus
def test_an_older_row_that_a_dead_writer_left_goes_with_the_next_change(
    store: MilvusStore, connection: Connection
) -> None:
    old, new = units(2)
    store.add([entry("key", old, content="old")])
    (collection,) = collections_of(connection, store.name)
    state = set_state(connection, store.name, next_id=10**7)
    row = milvus_schema.entry_row(10**7 - 1, entry("key", new, content="new"), new)
    connection.call("insert", collection, [row])
    assert store.size == 2
    assert [e.sha256 for e in store.entries(["key"])] == [entry("key", new, content="new").sha256]
    assert store.add([entry("key", new, content="new")]).unchanged == 1
    assert list(ids_of(store).values()) == [state.next_id - 1]


@milvus
def test_a_gallery_that_changes_cannot_be_scanned(
    store: MilvusStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(milvus_view, "page_rows", lambda dim: 5)
    store.add(shop(20))
    batches = store.scan(2)
    next(batches)
    store.remove(["key19"])
    with pytest.raises(GalleryBusyError, match="changed while it was read"):
        list(batches)


@milvus
def test_known_contents_lend_their_vectors(store: MilvusStore) -> None:
    entries = shop(10)
    store.add(entries)
    found = store.vectors_of_contents([entries[2].sha256, "0" * 64])
    assert found.keys() == {entries[2].sha256}
    np.testing.assert_allclose(found[entries[2].sha256], entries[2].vector, atol=1e-6)
    stored = store.stored(["key3", "nobody"])
    assert [item.path for item in stored.values()] == ["key3.png"]
    assert store.item(stored["key3"].id) == stored["key3"]


@milvus
def test_bounded_consistency_sees_writes_in_the_end(
    store: MilvusStore, milvus_server: MilvusServer
) -> None:
    with closing(MilvusStore.open(milvus_server.uri, store.name, consistency="Bounded")) as other:
        store.add(shop(5))
        while len(other.search(units(1), 9)[0]) < 5:
            time.sleep(0.01)


@milvus
def test_galleries_are_told_apart_by_name_and_bundle(
    store: MilvusStore, milvus_server: MilvusServer, connection: Connection
) -> None:
    uri = milvus_server.uri
    with pytest.raises(GalleryNotFoundError, match="nowhere"):
        MilvusStore.open(uri, "nowhere")
    with pytest.raises(BundleMismatchError, match=r"b{12}.*c{12}"):
        MilvusStore.open(uri, store.name, expected_bundle_id="c" * 64)
    with pytest.raises(GalleryError, match="already"):
        MilvusStore.create(uri, store.name, dim=DIM, bundle_id=BUNDLE)
    connection.call("create_collection", "foreign", dimension=4)
    with pytest.raises(GalleryCorruptError, match="something else"):
        MilvusStore.open(uri, "foreign")
    assert len(collections_of(connection, store.name)) == 1


@milvus
def test_a_dropped_gallery_is_gone_and_its_name_is_free(milvus_server: MilvusServer) -> None:
    for _ in range(2):
        MilvusStore.create(milvus_server.uri, "brief", dim=4, bundle_id=BUNDLE).close()
        MilvusStore.drop(milvus_server.uri, "brief")
    with pytest.raises(GalleryNotFoundError, match="brief"):
        MilvusStore.open(milvus_server.uri, "brief")


@milvus
def test_what_milvus_cannot_store_is_refused_by_name(
    store: MilvusStore, milvus_server: MilvusServer
) -> None:
    long = {f"a{n}": "x" * 4096 for n in range(17)}
    with pytest.raises(InvalidParameterError, match=r"attributes of 'key' has .* 65,536"):
        store.add([entry("key", units(1)[0], long)])
    with pytest.raises(InvalidParameterError, match="2 to 32,768"):
        MilvusStore.create(milvus_server.uri, "thin", dim=1, bundle_id=BUNDLE)


@pytest.mark.parametrize("name", ["", "1shop", "my-shop", "shop_12", "s" * 65, "a.b"])
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
        with closing(MilvusStore.create(server.uri, "shop", dim=DIM, bundle_id=BUNDLE)) as made:
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


def test_pages_stay_below_the_limit_of_a_request() -> None:
    for dim in (2, 128, 2048, 32_768):
        assert page_rows(dim) * 4 * dim <= 32 * 2**20
        assert page_rows(dim) >= 1


def test_small_galleries_are_searched_exactly() -> None:
    assert clusters(0) == clusters(199_999) == 0
    assert clusters(1_000_000) == 4000
