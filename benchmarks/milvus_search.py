"""What a search on Milvus costs a replica, by size of the gallery and level of consistency.

    python benchmarks/milvus_search.py [--items 10000 100000] [--dim 512] [--uri http://HOST:PORT]

Without --uri a server of the package `milvus` is started here, with its own clock (200 ms). Vectors
are random, so that clusters help less than in a shop. docs/scaling.md uses the figures.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np

from indexer.exchange.milvus import MilvusStore
from indexer.types import Consistency, Entry
from tests.support import milvus_server
from tests.support.milvus_server import MilvusServer

K = 20
CLIENTS = 4


def entries(number: int, dim: int) -> Iterator[Entry]:
    """Random unit vectors."""
    rng = np.random.default_rng(0)
    for start in range(0, number, 1_000):
        vectors = rng.standard_normal((min(1_000, number - start), dim)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        for row, vector in enumerate(vectors, start):
            yield Entry(f"{row}", vector, f"{row:064x}", {"number": row})


def times_ms(work: Callable[[], object], repeats: int) -> np.ndarray:
    """How long each call takes."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        found.append(1e3 * (time.perf_counter() - started))
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--uri")
    asked = parser.parse_args()
    server, uri = None, asked.uri
    if uri is None:
        milvus_server.FASTER.clear()
        server = MilvusServer(Path(tempfile.mkdtemp()), Path(tempfile.gettempdir()) / "milvus")
        server.start()
        uri = server.uri
    try:
        print("items, level: search p50, p95 ms; searches/s of", CLIENTS, "threads; put of one ms")
        for number in asked.items:
            measure(uri, number, asked.dim)
    finally:
        if server is not None:
            server.kill()


def measure(uri: str, number: int, dim: int) -> None:
    """Publish a gallery of so many items, search it and change it."""
    started = time.perf_counter()
    MilvusStore.publish(uri, "bench", entries(number, dim), dim=dim, bundle_id="b" * 64).close()
    print(f"{number:,} items of length {dim} published in {time.perf_counter() - started:.0f} s")
    query = next(iter(entries(1, dim))).vector[np.newaxis]
    levels: tuple[Consistency, ...] = ("Strong", "Bounded")
    for level in levels:
        store = MilvusStore.open(uri, "bench", consistency=level)

        def search(store: MilvusStore = store) -> object:
            return store.search(query, K)

        times_ms(search, 5)
        alone = times_ms(search, 50)
        with ThreadPoolExecutor(CLIENTS) as clients:
            begun = time.perf_counter()
            list(clients.map(lambda _, one=search: one(), range(50 * CLIENTS)))
            rate = 50 * CLIENTS / (time.perf_counter() - begun)
        new = count(number + (level == "Bounded") * 100)

        def put(store: MilvusStore = store, new: Iterator[int] = new) -> object:
            key = next(new)
            return store.add([Entry(f"{key}", query[0], f"{key:064x}", {"number": key})])

        put_ms = np.median(times_ms(put, 10))
        p50, p95 = np.percentile(alone, [50, 95])
        print(f"{number:,}, {level}: {p50:.1f}, {p95:.1f} ms; {rate:.0f}/s; {put_ms:.0f} ms")
        store.close()


if __name__ == "__main__":
    main()
