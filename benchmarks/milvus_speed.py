"""Milvus: speed of a load, and the cost of a search for a replica.

    python benchmarks/milvus_speed.py publish [--items 100000] [--dim 512] [--rounds 2]
    python benchmarks/milvus_speed.py search [--items 10000 100000] [--dim 512] [--uri http://HOST:PORT]

**Publish** compares the earlier method, one process that inserts pages of up to 16 MB, with
`kinlens-index import`; both then make an exact index. `rows` is the time of the inserts, `index`
the time to create the index and load it. `client` and `server` are CPU seconds during the inserts:
no client can reduce the server's part.

**Search** measures by size of the gallery and consistency level; docs/scaling.md uses the figures.
Vectors are random, so clusters help less than in a shop.

The server is that of the package `milvus`, on the same cores, with its default time tick (200 ms).
"""

import contextlib
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count
from pathlib import Path

import numpy as np
from harness import heading, options, random_units, row, skip, timed_ms

from kinlens.embedder.machine import core_count
from kinlens.indexer.exchange.milvus import MilvusStore
from kinlens.indexer.exchange.milvus_collection import (
    Collection,
    Connection,
    MilvusFacts,
    batches,
    row_of,
)
from kinlens.indexer.exchange.milvus_index import planned
from kinlens.indexer.exchange.milvus_load import load
from kinlens.indexer.types import Consistency, Entry
from tests.support import milvus_server

K, CLIENTS = 20, 4
LEVELS: tuple[Consistency, ...] = ("Strong", "Bounded")


def main() -> None:
    args = options(
        __doc__, "part", part="search", items=[10_000, 100_000], dim=512, rounds=2, searches=50,
        uri="",
    )  # fmt: skip
    if not args.uri and importlib.util.find_spec("milvus") is None:
        skip("needs --uri, or the group `milvus-server`, which is for Linux on x86-64")
    with contextlib.nullcontext(args.uri) if args.uri else own_server() as uri:
        if args.part == "publish":
            publish(uri, args.items[-1], args.dim, args.rounds)
            return
        heading("items", "level", "published, s", "search p50, ms", "p95", f"QPS of {CLIENTS}",
                "put, ms")  # fmt: skip
        for items in args.items:
            search(uri, items, args.dim, args.searches)


def entries(items: int, dim: int) -> Iterator[Entry]:
    """Items with random vectors."""
    vectors = chain.from_iterable(random_units(items, dim))
    return (entry(number, vector) for number, vector in enumerate(vectors))


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """The address of a server started by this benchmark, with default settings."""
    milvus_server.FASTER.clear()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(tempfile.gettempdir()) / "milvus"
        server = milvus_server.MilvusServer(Path(folder), cache)
        server.start()
        try:
            yield server.uri
        finally:
            server.kill()


def entry(number: int, vector: np.ndarray) -> Entry:
    return Entry(f"{number}", vector, f"{number:064x}", {"number": number})


def search(uri: str, items: int, dim: int, searches: int) -> None:
    """Publish a gallery of `items` items, search it and change it."""
    started = time.perf_counter()
    MilvusStore.publish(uri, "bench", entries(items, dim), dim=dim, bundle_id="b" * 64).close()
    published, new = time.perf_counter() - started, count(items)
    query = next(random_units(1, dim))
    for level in LEVELS:
        with contextlib.closing(MilvusStore.open(uri, "bench", consistency=level)) as store:

            def one(_: int = 0, store: MilvusStore = store) -> float:
                return timed_ms(lambda: store.search(query, K))

            def put(store: MilvusStore = store) -> float:
                return timed_ms(lambda: store.add([entry(next(new), query[0])]))

            alone = [one() for _ in range(5 + searches)][5:]
            with ThreadPoolExecutor(CLIENTS) as clients:
                begun = time.perf_counter()
                list(clients.map(one, range(searches * CLIENTS)))
                rate = searches * CLIENTS / (time.perf_counter() - begun)
            put_ms = float(np.median([put() for _ in range(10)]))
            row(items, level, published, *np.percentile(alone, [50, 95]), rate, put_ms)


def publish(uri: str, items: int, dim: int, rounds: int) -> None:
    """The table of ways to load a gallery."""
    made, cores = [*entries(items, dim)], core_count()
    peer = "one process, pages of 16 MB"
    ways: dict[str, Callable[[Collection], object]] = {
        peer: lambda to: one_process(to, made),
        "one process, resumable": lambda to: several(to, made, 1),
        f"{cores} processes": lambda to: several(to, made, cores),
    }
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    with contextlib.closing(Connection(uri)) as connection:
        server = str(connection.call("get_server_version"))
        for number in range(rounds):
            for name, fill in ways.items():
                generation = f"{abs(hash((name, number))) % 16**12:012x}"
                found[name].append(timed(connection, server, items, dim, generation, fill))
    print(f"server {server}, {items:,} x {dim}")
    heading("", "rows, s", "client, s", "server, s", "index, s", "items/s", "times the peer")
    totals = {name: statistics.median(sum(one[:2]) for one in times)
              for name, times in found.items()}  # fmt: skip
    for name, times in found.items():
        rows_s, index_s, client_s, server_s = map(statistics.median, zip(*times, strict=True))
        gain = f"{totals[peer] / totals[name]:.2f}"
        row(name, rows_s, client_s, server_s, index_s, items / totals[name], gain)


def timed(
    connection: Connection,
    server: str,
    items: int,
    dim: int,
    generation: str,
    fill: Callable[[Collection], object],
) -> tuple[float, ...]:
    """Seconds of the inserts and of the index, and CPU seconds of client and server."""
    facts = MilvusFacts(
        name="bench",
        generation=generation,
        bundle_id="b" * 64,
        dim=dim,
        created_at="2026-01-01T00:00:00.000+00:00",
    )
    made = Collection.create(connection, facts)
    client, busy, started = cpu_s(), server_s(), time.perf_counter()
    fill(made)
    client, busy = cpu_s() - client, server_s() - busy
    rows_s, started = time.perf_counter() - started, time.perf_counter()
    made.make_index(planned(items, dim, "flat", None, server), server)
    assert made.strong().count() == items
    index_s = time.perf_counter() - started
    connection.call("drop_collection", made.collection)
    return rows_s, index_s, client, busy


def cpu_s() -> float:
    """CPU time of this process and its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def server_s() -> float:
    """CPU seconds of the server."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if "run\0standalone" in (process / "cmdline").read_text():
                fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def one_process(made: Collection, rows: list[Entry]) -> None:
    for batch in batches(rows, made.page_rows):
        made.connection.call("insert", made.collection, [row_of(e, e.vector) for e in batch])


def several(made: Collection, rows: list[Entry], processes: int) -> None:
    load(made, rows, None, "", processes, False, lambda _: None)


if __name__ == "__main__":
    main()
