"""A gallery compared with the embedded vector databases zvec and LanceDB: filters and changes.

    python benchmarks/databases.py --sizes 100k 1m

Vectors: benchmarks/clustered.py. Each item has a price, uniform in 0 to 1000; filters on it match
0.1, 1, 10 and 50 % of the items. The databases are configured as their documents say: zvec with an
HNSW index and an inverted index with ranges, LanceDB with IVF-PQ, refined, and scalar indexes; a
gallery plans its index (exact up to 200 MB of vectors), and once more has HNSW. Each database
searches with the smallest effort that reaches recall@10 of 0.98 without a filter. Contestants take
turns; one query runs at a time, with the threads that each chooses, and returns keys and prices.

An update changes one price, an addition inserts one item, and the next search finds it. A gallery
has then synced the change to the disk; zvec does so at a `flush`, which is measured as well.

They need `pip install zvec lancedb`. On 2 cores 100k takes minutes, 1m three quarters of an hour.
"""

import contextlib
import importlib.util
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from clustered import clustered_batches, clustered_queries
from harness import columns, count_of, in_turns, made_gallery, options, timed_ms
from numpy.typing import NDArray

from kinlens.embedder.types import Embeddings
from kinlens.indexer.entries import Entry
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.types import SearchOptions

K, RECALL, QUERIES, CHANGES = 10, 0.98, 100, 50
LIMITS = {"no filter": None, "0.1 %": 1, "1 %": 10, "10 %": 100, "50 %": 500}
"""Upper limits of the price, by the share of items below."""
EFFORTS = (10, 20, 40, 80, 160, 320, 640, 1280)
BATCH = 1000
PARTITIONS = 256  # of LanceDB, at most
Vector = NDArray[np.float32]


class Store(Protocol):
    """Items are numbered from 0."""

    def search(self, query: Vector, below: int | None) -> Sequence[int]: ...
    def update(self, number: int, price: float) -> None: ...
    def add(self, number: int, vector: Vector) -> None: ...
    def sync(self) -> None: ...


def main() -> None:
    args = options(__doc__, sizes=["100k"], dims=[128], rounds=5)
    figures: dict[str, dict[str, object]] = {}
    for size, dim in itertools.product(args.sizes, args.dims):
        with tempfile.TemporaryDirectory(prefix="database-benchmark-") as folder:
            for name, found in measured(Path(folder), count_of(size), dim, args.rounds).items():
                figures[f"{size} x {dim}, {name}"] = found
    columns(figures)


def measured(folder: Path, n: int, dim: int, rounds: int) -> dict[str, dict[str, object]]:
    """Recall, latencies and times to build, by contestant."""
    queries = clustered_queries(n, dim)[:QUERIES]
    vectors = np.concatenate([*clustered_batches(n, dim)])
    truth = {share: best_of_all(vectors, queries, below) for share, below in LIMITS.items()}
    figures: dict[str, dict[str, object]] = {}
    stores: dict[str, Store] = {}
    with contextlib.ExitStack() as opened:
        for name, make in CONTESTANTS.items():
            if importlib.util.find_spec(name.split()[0]) is None:
                print(f"skipped: {name} is not installed")
                continue
            made: list[Any] = []
            seconds = (
                timed_ms(
                    lambda make=make, made=made, name=name: made.append(  # type: ignore[misc]
                        make(folder / name, vectors)
                    )
                )
                / 1e3
            )
            stores[name] = made[0]
            opened.callback(made[0].close)
            figures[name] = {"build, s": seconds, "effort": tuned(made[0], queries, truth)}
            print(f"{name}: {figures[name]}", flush=True)
        for share, below in LIMITS.items():
            for name, store in stores.items():
                found = [store.search(query, below) for query in queries]
                figures[name][f"{share}: recall@{K}"] = recall(found, truth[share])
            calls = {
                name: [partial(store.search, query, below) for query in queries]
                for name, store in stores.items()
            }
            for name, p50 in p50_of(calls, rounds).items():
                figures[name][f"{share}: p50, ms"] = p50
        new = clustered_queries(n, dim)[QUERIES:]
        for what, change in (
            ("update", lambda store, number: store.update(number, 0.5 + number % 7)),
            ("update, synced", lambda store, number: store.update(number, 0.5) or store.sync()),
            ("add", lambda store, number: store.add(n + number, new[number % len(new)])),
        ):
            numbers = itertools.count()
            calls = {
                name: [partial(change, store, next(numbers)) for _ in range(CHANGES * rounds)]
                for name, store in stores.items()
            }
            for name, times in calls.items():
                figures[name][f"{what}: p50, ms"] = statistics.median(map(timed_ms, times))
    return figures


def p50_of(calls: dict[str, list[Callable[[], object]]], rounds: int) -> dict[str, float]:
    """The median milliseconds of the calls of each contestant, in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}

    def run(name: str) -> None:
        times[name] += map(timed_ms, calls[name])

    in_turns({name: partial(run, name) for name in calls}, rounds)
    return {name: statistics.median(each) for name, each in times.items()}


def price_of(number: int) -> float:
    return number * 15_485_863 % 100_000 / 100


def best_of_all(vectors: Embeddings, queries: Embeddings, below: int | None) -> list[set[int]]:
    """The numbers of the nearest items of each query."""
    prices = np.arange(len(vectors)) * 15_485_863 % 100_000 / 100
    numbers = np.flatnonzero(prices < (np.inf if below is None else below))
    scores = queries @ vectors[numbers].T
    return [set(numbers[np.argsort(-row)[:K]].tolist()) for row in scores]


def recall(found: Sequence[Sequence[int]], truth: Sequence[set[int]]) -> float:
    pairs = zip(found, truth, strict=True)
    return statistics.mean(len(best & {*own}) / max(1, len(best)) for own, best in pairs)


def tuned(store: Any, queries: Embeddings, truth: dict[str, list[set[int]]]) -> object:
    """Set the smallest effort that reaches the recall, and return it."""
    if isinstance(store, OfKinlens):
        return store.facts
    for effort in EFFORTS:
        store.effort = effort
        found = [store.search(query, None) for query in queries]
        if recall(found, truth["no filter"]) >= RECALL:
            break
    return store.effort


class OfKinlens:
    def __init__(self, path: Path, vectors: Embeddings, index: str = "auto") -> None:
        prices, settings = lambda n: {"price": price_of(n)}, IndexSettings(index)
        made_gallery(path, lambda: [vectors], *vectors.shape, prices, settings=settings)
        self.gallery = Gallery.open(path)
        segment = self.gallery.facts().segment
        self.facts = "" if segment is None else f"{segment.kind}, {segment.effort}"
        self.close = self.gallery.close
        self.options = {
            below: SearchOptions(where=None if below is None else parse_filter(f"price < {below}"))
            for below in LIMITS.values()
        }

    def search(self, query: Vector, below: int | None) -> list[int]:
        [hits] = self.gallery.search(query[None], K, self.options[below])
        return [int(hit.key) for hit in hits]

    def update(self, number: int, price: float) -> None:
        self.gallery.update({f"{number:09d}": {"price": price}})

    def add(self, number: int, vector: Vector) -> None:
        self.gallery.add([Entry(f"{number:09d}", vector, attributes={"price": 5.0})])

    def sync(self) -> None: ...


class OfZvec:
    effort = 300  # its default

    def __init__(self, path: Path, vectors: Embeddings) -> None:
        import zvec

        self.zvec = zvec
        ranges = zvec.InvertIndexParam(enable_range_optimization=True)
        index = zvec.HnswIndexParam(metric_type=zvec.MetricType.IP)
        schema = zvec.CollectionSchema(
            "items",
            [zvec.FieldSchema("price", zvec.DataType.DOUBLE, index_param=ranges)],
            [zvec.VectorSchema("vector", zvec.DataType.VECTOR_FP32, vectors.shape[1], index)],
        )
        self.items = zvec.create_and_open(str(path), schema)
        for start in range(0, len(vectors), BATCH):
            self.items.insert([*self.documents(start, vectors[start : start + BATCH])])
        self.items.optimize()

    def documents(self, start: int, vectors: Embeddings) -> Iterator[Any]:
        for number, vector in enumerate(vectors, start):
            fields = {"price": price_of(number)}
            yield self.zvec.Doc(id=str(number), vectors={"vector": vector.tolist()}, fields=fields)

    def search(self, query: Vector, below: int | None) -> list[int]:
        param = self.zvec.HnswQueryParam(ef=self.effort)
        asked = self.zvec.Query("vector", vector=query.tolist(), param=param)
        where = None if below is None else f"price < {below}"
        found = self.items.query(asked, topk=K, filter=where, output_fields=["price"])
        return [int(document.id) for document in found]

    def update(self, number: int, price: float) -> None:
        self.items.update(self.zvec.Doc(id=str(number), fields={"price": price}))

    def add(self, number: int, vector: Vector) -> None:
        self.items.insert([*self.documents(number, vector[None])])

    def sync(self) -> None:
        self.items.flush()

    close = sync


class OfLance:
    effort = 20  # its default

    def __init__(self, path: Path, vectors: Embeddings) -> None:
        import lancedb
        import pyarrow
        from lancedb.index import BTree

        self.arrow = pyarrow
        starts = range(0, len(vectors), 100 * BATCH)
        batches = (self.table_of(at, vectors[at : at + 100 * BATCH]) for at in starts)
        self.items = lancedb.connect(str(path)).create_table("items", next(batches))
        for batch in batches:
            self.items.add(batch)
        parts = min(PARTITIONS, max(1, len(vectors) // 4096))
        self.items.create_index(metric="dot", vector_column_name="vector", num_partitions=parts)
        for column in ("price", "number"):
            self.items.create_index(column, config=BTree())

    def table_of(self, start: int, vectors: Embeddings) -> Any:
        numbers = np.arange(start, start + len(vectors))
        flat = self.arrow.array(vectors.ravel())
        return self.arrow.table(
            {
                "number": numbers,
                "price": [price_of(number) for number in numbers.tolist()],
                "vector": self.arrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1]),
            }
        )

    def search(self, query: Vector, below: int | None) -> list[int]:
        asked = self.items.search(query).distance_type("dot").limit(K)
        asked = asked.nprobes(self.effort).refine_factor(max(10, self.effort // 4))
        asked = asked.select(["number", "price", "_distance"])
        if below is not None:
            asked = asked.where(f"price < {below}", prefilter=True)
        found: list[int] = asked.to_arrow()["number"].to_pylist()
        return found

    def update(self, number: int, price: float) -> None:
        self.items.update(where=f"number = {number}", values={"price": price})

    def add(self, number: int, vector: Vector) -> None:
        self.items.add(self.table_of(number, vector[None]))

    def sync(self) -> None: ...

    def close(self) -> None:
        self.items.optimize()


CONTESTANTS: dict[str, Callable[[Path, Embeddings], Any]] = {
    "kinlens": OfKinlens,
    "kinlens hnsw": partial(OfKinlens, index="hnsw"),
    "zvec": OfZvec,
    "lancedb": OfLance,
}

if __name__ == "__main__":
    main()
