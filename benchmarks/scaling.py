"""Milvus by size and consistency level, for docs/scaling.md.

    python benchmarks/scaling.py [--items 10000 100000] [--dim 512] [--uri http://HOST:PORT]

A search waits for a fixed time and reads a share of all vectors, so with an exact index it takes
a + b N: two rows at `Bounded` give the line. Without --uri the server is that of the package
`milvus`, on the same cores, with its default time tick.
"""

import contextlib
import importlib.util
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from clustered import clustered_batches, clustered_queries
from harness import heading, options, row, skip, timed_ms

from kinlens.indexer.entries import Entry
from kinlens.indexer.exchange.milvus import MilvusStore
from kinlens.indexer.exchange.milvus_load import import_to_milvus
from kinlens.indexer.types import Consistency, GalleryExport

K, CLIENTS = 20, 4
LEVELS: tuple[Consistency, ...] = ("Strong", "Bounded")


def main() -> None:
    asked = options(__doc__, items=[10_000, 100_000], dim=512, searches=50, uri="")
    heading("items", "level", "index", "published, s", "search p50, ms", "p95",
            f"QPS of {CLIENTS}", "put, ms")  # fmt: skip
    with contextlib.nullcontext(asked.uri) if asked.uri else own_milvus() as address:
        for count in asked.items:
            measured(address, count, asked.dim, asked.searches)


@contextlib.contextmanager
def own_milvus() -> Iterator[str]:
    """The address of a Milvus with default settings, stopped at the end of the block."""
    if importlib.util.find_spec("milvus") is None:
        skip("needs --uri, or the group `milvus-server`, which is for Linux on x86-64")
    from tests.support import milvus_server

    milvus_server.FASTER.clear()
    with tempfile.TemporaryDirectory() as folder:
        server = milvus_server.MilvusServer(Path(folder), Path(tempfile.gettempdir()) / "milvus")
        server.start()
        try:
            yield server.uri
        finally:
            server.kill()


def measured(address: str, count: int, dim: int, searches: int) -> None:
    """Searches and changes of a published gallery, by consistency level."""

    def rows() -> Iterator[Entry]:
        vectors = itertools.chain.from_iterable(clustered_batches(count, dim))
        return itertools.starmap(milvus_entry, enumerate(vectors))

    started = time.perf_counter()
    dump = GalleryExport({"name": "bench", "bundle_id": "b" * 64}, dim, count, rows)
    import_to_milvus(dump, address, "bench").close()
    published = time.perf_counter() - started
    query, numbers = clustered_queries(count, dim, queries=1), itertools.count(count)
    for level in LEVELS:
        store = MilvusStore.open(address, "bench", consistency=level, timeout_s=60)
        figures = of_store(store, query, numbers, searches)
        row(count, level, store.index_text(), published, *figures)
        store.close()


def of_store(
    store: MilvusStore, query: np.ndarray, numbers: Iterator[int], searches: int
) -> tuple[float, ...]:
    """Milliseconds of a search, p50 and p95; searches per second of CLIENTS; p50 of a change."""
    ask = partial(timed_ms, partial(store.search, query, K))
    alone = [ask() for _ in range(5 + searches)][5:]
    with ThreadPoolExecutor(CLIENTS) as clients:
        many = partial(list, clients.map(lambda _: ask(), range(searches * CLIENTS)))
        elapsed_s = timed_ms(many) / 1e3
    puts = [timed_ms(lambda: store.add([milvus_entry(next(numbers), query[0])])) for _ in range(10)]
    rate = searches * CLIENTS / elapsed_s
    return *np.percentile(alone, [50, 95]).tolist(), rate, statistics.median(puts)


def milvus_entry(number: int, vector: np.ndarray) -> Entry:
    return Entry(f"{number}", vector, f"{number:064x}", {"number": number})


if __name__ == "__main__":
    main()
