"""Cost of a search on Milvus for a replica, by size of the gallery and consistency level.

    python benchmarks/milvus_search.py [--items 10000 100000] [--dim 512] [--uri http://HOST:PORT]

Without --uri a server of the package `milvus` is started here, with its default time tick (200 ms).
Vectors are random, so clusters help less than in a shop. docs/scaling.md uses the figures.
"""

import contextlib
import importlib.util
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count
from pathlib import Path

import numpy as np
from harness import heading, options, random_units, row, skip, timed_ms

from kinlens.indexer.exchange.milvus import MilvusStore
from kinlens.indexer.types import Consistency, Entry
from tests.support import milvus_server

K, CLIENTS = 20, 4
LEVELS: tuple[Consistency, ...] = ("Strong", "Bounded")


def main() -> None:
    args = options(__doc__, items=[10_000, 100_000], dim=512, searches=50, uri="")
    if not args.uri and importlib.util.find_spec("milvus") is None:
        skip("needs --uri, or the group `milvus-server`, which is for Linux on x86-64")
    with contextlib.nullcontext(args.uri) if args.uri else own_server() as uri:
        heading(
            "items",
            "level",
            "published, s",
            "search p50, ms",
            "p95",
            f"QPS of {CLIENTS}",
            "put, ms",
        )
        for number in args.items:
            measure(uri, number, args.dim, args.searches)


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


def measure(uri: str, items: int, dim: int, searches: int) -> None:
    """Publish a gallery of `items` items, search it and change it."""
    vectors = chain.from_iterable(random_units(items, dim))
    entries = (entry(number, vector) for number, vector in enumerate(vectors))
    started = time.perf_counter()
    MilvusStore.publish(uri, "bench", entries, dim=dim, bundle_id="b" * 64).close()
    published, new = time.perf_counter() - started, count(items)
    query = next(random_units(1, dim))
    for level in LEVELS:
        with contextlib.closing(MilvusStore.open(uri, "bench", consistency=level)) as store:

            def search(_: int = 0, store: MilvusStore = store) -> float:
                return timed_ms(lambda: store.search(query, K))

            def put(store: MilvusStore = store) -> float:
                return timed_ms(lambda: store.add([entry(next(new), query[0])]))

            alone = [search() for _ in range(5 + searches)][5:]
            with ThreadPoolExecutor(CLIENTS) as clients:
                begun = time.perf_counter()
                list(clients.map(search, range(searches * CLIENTS)))
                rate = searches * CLIENTS / (time.perf_counter() - begun)
            put_ms = float(np.median([put() for _ in range(10)]))
            row(items, level, published, *np.percentile(alone, [50, 95]), rate, put_ms)


if __name__ == "__main__":
    main()
