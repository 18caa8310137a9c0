"""Performance of a gallery compared with raw FAISS, hnswlib and usearch, for 10,000 to 10M items.

    python benchmarks/gallery.py --sizes 10k 100k 1m --parts speed peers filters
    python benchmarks/gallery.py --sizes 10m --dims 128 --parts speed filters
    python benchmarks/gallery.py --sizes 100k 1m --dims 128 --parts half

Vectors: benchmarks/clustered.py. The ceiling is raw FAISS: the gallery's own index file, read into
memory and searched with its tuned parameters, in rounds that alternate with the gallery's.
`nearest` returns scores and item numbers, as FAISS does; `search` also fetches keys and attributes.
One query runs on one thread, a batch on all cores. hnswlib and usearch search with the smallest ef
that reaches the gallery's recall@10, or 0.98 if the gallery is exact. Memory, opening, changes and
compaction are in benchmarks/growth.py.

The parts:

    speed       recall of held-out queries against exact search, latency and throughput
    peers       hnswlib and usearch for comparison, if the extra `bench` is installed
    filters     searches among 0.1 to 50 % of the items, one thread
    half        the same items in half precision: disk, recall, and time of single searches in turns

On 2 cores 10k and 100k take minutes, 1m and 10m about half an hour each.
"""

import contextlib
import importlib.util
import random
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import faiss
import numpy as np
from clustered import clustered_batches, clustered_queries
from harness import (
    columns,
    count_of,
    fresh,
    in_turns,
    made_gallery,
    options,
    ratio,
    timed_ms,
)
from numpy.typing import NDArray

from kinlens.embedder.machine import core_count
from kinlens.embedder.types import Embeddings
from kinlens.indexer.catalog.vectors import ROWS, VECTORS
from kinlens.indexer.filters.tree import Range
from kinlens.indexer.folder.layout import GalleryFolder
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.index_types import INDEX_TYPES
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.index.segment import INDEX, read_manifest
from kinlens.indexer.live.compaction import SEGMENTS
from kinlens.indexer.types import SearchOptions, VectorType

K, BATCH, RECALL = 10, 256, 0.98
PARTS = ("speed", "peers", "filters", "half")
BUCKETS = 1000
FILTERS = {"0.1 %": 1, "1 %": 10, "10 %": 100, "50 %": 500}
FILTER_QUERIES, HALF_QUERIES = 200, 500
ROUND_S = 0.4
LARGEST_PEERS = 128_000_000  # coordinates of all vectors
EFFORTS = (10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 1024)
Figures = dict[str, object]
Positions = NDArray[np.int64]
"""Positions of items in insertion order, (Q, k); -1 for none."""


@dataclass(frozen=True)
class Setting:
    """A gallery of `n` vectors of `dim` dimensions in a folder of its own."""

    n: int
    dim: int
    folder: Path
    index: IndexSettings

    @property
    def segment(self) -> Path:
        """The segment of the build; a compaction replaces it."""
        (folder,) = (GalleryFolder(self.folder).current() / SEGMENTS).iterdir()
        return folder

    @property
    def rows(self) -> Path:
        """The file of its vectors, in the order of item numbers; a build leaves no gaps."""
        (file,) = (GalleryFolder(self.folder).current() / VECTORS).glob(f"*/{ROWS['fp32']}")
        return file


@dataclass(frozen=True)
class Contestant:
    """`search` answers queries (Q, D); `use` gets the number of threads before a round."""

    search: Callable[[Embeddings], object]
    recall: float
    use: Callable[[int], object] = faiss.omp_set_num_threads
    facts: str = ""


def main() -> None:
    args = options(
        __doc__, sizes=["10k", "100k"], dims=[128, 512], parts=list(PARTS), rounds=11,
        index="auto",
    )  # fmt: skip
    figures: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="gallery-benchmark-") as name:
        for size, dim in product(args.sizes, args.dims):
            place = Path(name, f"{size}x{dim}")
            setting = Setting(count_of(size.lower()), dim, place, IndexSettings(args.index))
            found = figures[f"{size} x {dim}"] = {}
            for figure, value in measured(setting, args):
                found[figure] = value
                print(f"{size} x {dim}: {figure}: {value}", flush=True)
    columns(figures)


def measured(setting: Setting, args: Namespace) -> Iterator[tuple[str, object]]:
    """All figures of one gallery."""
    seconds = fresh(build, setting)
    manifest = read_manifest(setting.segment)
    yield "index", f"{manifest.kind}, effort {manifest.effort}, k_factor {manifest.k_factor}"
    yield "build from vectors, s", seconds
    queries = clustered_queries(setting.n, setting.dim)
    with contextlib.closing(Gallery.open(setting.folder)) as gallery:
        if "speed" in args.parts:
            yield from speed(setting, gallery, queries, args)
        if "filters" in args.parts:
            yield from filtered(setting, gallery, queries[:FILTER_QUERIES])
        if "half" in args.parts:
            yield from halved(setting, gallery, queries[:HALF_QUERIES], args.rounds)


def build(setting: Setting, vector_type: VectorType = "fp32") -> float:
    """The seconds that it takes."""
    n, dim = setting.n, setting.dim
    bucket = buckets(n)
    started = time.perf_counter()
    made_gallery(
        setting.folder,
        partial(clustered_batches, n, dim),
        n,
        dim,
        lambda number: {"bucket": int(bucket[number])},
        settings=setting.index,
        vector_type=vector_type,
    )
    return time.perf_counter() - started


def buckets(n: int) -> NDArray[np.int16]:
    """The attribute `bucket` of every item: uniform in 0..999."""
    return np.random.default_rng((n, BUCKETS)).integers(0, BUCKETS, n, dtype=np.int16)


# Searches


def speed(
    setting: Setting, gallery: Gallery, queries: Embeddings, args: Namespace
) -> Iterator[tuple[str, object]]:
    """Recall, latencies and QPS of all contestants, in turns, so that noise affects all of them."""
    truth = true_neighbours(setting, queries)
    contestants = {"raw FAISS": of_faiss(setting, queries, truth)}
    contestants |= of_gallery(gallery, queries, truth)
    if "peers" in args.parts and setting.n * setting.dim <= LARGEST_PEERS:
        contestants |= of_peers(setting, queries, truth, min(contestants["nearest"].recall, RECALL))
    for name, one in contestants.items():
        yield f"recall@{K}, {name} (target {RECALL})", one.recall
        if one.facts:
            yield name, one.facts
    single = [queries[i : i + 1] for i in range(len(queries))]
    clock = rounds_of(contestants, single, 1, args.rounds)
    for name, rounds in clock.items():
        latencies = 1e3 * np.concatenate(rounds)
        yield f"one query, {name}: p50, ms", float(np.percentile(latencies, 50))
        yield f"one query, {name}: p99, ms", float(np.percentile(latencies, 99))
    yield from of_ceiling("one query", clock)
    wrapped = np.concatenate([queries, queries[:BATCH]])
    batches = [wrapped[i : i + BATCH] for i in range(0, len(queries), BATCH)]
    clock = rounds_of(contestants, batches, core_count(), args.rounds)
    for name, rounds in clock.items():
        yield f"batches of {BATCH}, {name}: QPS", BATCH / float(np.concatenate(rounds).mean())
    yield from of_ceiling(f"batches of {BATCH}", clock)


Rounds = dict[str, list[list[float]]]
"""Seconds by contestant, round and call."""


def rounds_of(
    contestants: Mapping[str, Contestant], calls: list[Embeddings], threads: int, rounds: int
) -> Rounds:
    """The same calls for everyone in rounds of random order."""
    slowest = 0.0
    for one in contestants.values():
        one.use(threads)
        one.search(calls[0])
        slowest = max(slowest, timed_ms(partial(one.search, calls[0])) / 1e3)
    count = min(max(int(ROUND_S / slowest), 2 if threads > 1 else 50), 200)
    found: Rounds = {name: [] for name in contestants}
    for number in range(rounds):
        chosen = [calls[(number * count + i) % len(calls)] for i in range(count)]
        for name in random.sample(list(contestants), len(contestants)):
            one = contestants[name]
            one.use(threads)
            one.search(chosen[-1])  # refills the caches after the previous contestant
            found[name].append([timed_ms(partial(one.search, q)) / 1e3 for q in chosen])
    return found


def of_ceiling(name: str, rounds: Rounds) -> Iterator[tuple[str, float]]:
    """QPS relative to raw FAISS, the median of the rounds."""
    sums = {who: [sum(each) for each in found] for who, found in rounds.items()}
    for who in sums:
        if who != "raw FAISS":
            yield f"{name}: {who} / raw FAISS, QPS", ratio(sums["raw FAISS"], sums[who])


def of_gallery(
    gallery: Gallery, queries: Embeddings, truth: Positions
) -> Iterator[tuple[str, Contestant]]:
    """The gallery twice: only scores and item numbers, and full hits with attributes.

    `search` may fetch more than it returns, so an approximate index can find other items for it.
    """
    by_nearest = gallery.nearest(queries, K)[1] - 1  # item numbers start at 1
    by_search = np.array([[int(hit.key) for hit in row] for row in gallery.search(queries, K)])
    yield "nearest", Contestant(lambda q: gallery.nearest(q, K), recall(by_nearest, truth))
    yield "search", Contestant(lambda q: gallery.search(q, K), recall(by_search, truth))


def of_faiss(setting: Setting, queries: Embeddings, truth: Positions) -> Contestant:
    """Raw FAISS, with the gallery's index file in memory and its tuned parameters."""
    manifest = read_manifest(setting.segment)
    index = faiss.IndexFlatIP(manifest.dim)
    index.add(np.fromfile(setting.rows, np.float32).reshape(-1, manifest.dim))
    codes = None
    if INDEX in manifest.files:
        codes = faiss.read_index(str(setting.segment / INDEX))
        index = faiss.IndexRefine(codes, index)
    parameters = INDEX_TYPES[manifest.kind].search_parameters(
        getattr(codes, "nlist", 0), manifest.size, manifest.tuned, K
    )
    found = index.search(queries, K, params=parameters)[1]
    return Contestant(lambda q: index.search(q, K, params=parameters), recall(found, truth))


def of_peers(
    setting: Setting, queries: Embeddings, truth: Positions, least: float
) -> Iterator[tuple[str, Contestant]]:
    """hnswlib and usearch, each with the smallest ef that reaches the recall `least`."""
    for name, make in (("hnswlib", hnswlib_of), ("usearch", usearch_of)):
        if importlib.util.find_spec(name) is None:
            print(f"skipped: {name} needs the extra `bench`")
            continue
        started = time.perf_counter()
        search, use, set_ef = make(setting)
        seconds = time.perf_counter() - started
        use(core_count())
        for ef in EFFORTS:
            set_ef(ef)
            reached = recall(np.asarray(search(queries)).astype(np.int64), truth)
            if reached >= least:
                break
        yield name, Contestant(search, reached, use, f"built in {seconds:.1f} s, ef {ef}")


Peer = tuple[Callable[[Embeddings], object], Callable[[int], object], Callable[[int], object]]
"""Functions to search for positions, to set the number of threads, and to set ef."""


def hnswlib_of(setting: Setting) -> Peer:
    """M 16 and ef_construction 200, as in its documentation."""
    import hnswlib

    index = hnswlib.Index(space="ip", dim=setting.dim)
    index.init_index(max_elements=setting.n, M=16, ef_construction=200, random_seed=0)
    index.set_num_threads(core_count())
    for _, batch in numbered(setting):
        index.add_items(batch)
    return lambda q: index.knn_query(q, K)[0], index.set_num_threads, index.set_ef


def usearch_of(setting: Setting) -> Peer:
    """Its defaults, in full precision."""
    from usearch.index import Index

    index, threads = Index(ndim=setting.dim, metric="ip", dtype="f32"), [1]
    for start, batch in numbered(setting):
        index.add(np.arange(start, start + len(batch)), batch, threads=core_count())
    return (
        lambda q: index.search(q, K, threads=threads[0]).keys,
        lambda count: threads.__setitem__(0, count),
        lambda ef: setattr(index, "expansion_search", ef),
    )


def numbered(setting: Setting) -> Iterator[tuple[int, Embeddings]]:
    """The vectors in parts, each with the position of its first."""
    start = 0
    for batch in clustered_batches(setting.n, setting.dim):
        yield start, batch
        start += len(batch)


def true_neighbours(
    setting: Setting, queries: Embeddings, among: NDArray[np.bool_] | None = None
) -> Positions:
    """The true best items, or those of a set, found by exact search, batch by batch."""
    scores = np.full((len(queries), K), -np.inf, np.float32)
    found = np.full((len(queries), K), -1, np.int64)
    for start, batch in numbered(setting):
        rows = np.arange(len(batch))
        if among is not None:
            rows = np.flatnonzero(among[start : start + len(batch)])
        if len(rows):
            best, near = faiss.knn(
                queries, batch[rows], min(K, len(rows)), metric=faiss.METRIC_INNER_PRODUCT
            )
            best = np.concatenate([scores, best], axis=1)
            near = np.concatenate([found, start + rows[near]], axis=1)
            order = np.argsort(-best, axis=1, kind="stable")[:, :K]
            scores = np.take_along_axis(best, order, axis=1)
            found = np.take_along_axis(near, order, axis=1)
    return found


def recall(found: Positions, truth: Positions) -> float:
    """The share of the true neighbours that was found."""
    pairs = zip(found, truth, strict=True)
    hits = sum(len(np.intersect1d(row, true[true >= 0])) for row, true in pairs)
    return hits / int((truth >= 0).sum())


def filtered(
    setting: Setting, gallery: Gallery, queries: Embeddings
) -> Iterator[tuple[str, object]]:
    """recall@10 and latency of full hits on one thread, and the cost of a new filter."""
    for name, below in FILTERS.items():
        truth = true_neighbours(setting, queries, buckets(setting.n) < below)
        filtering = SearchOptions(where=Range("bucket", at_least=0, below=below))
        times, rows = [], []
        for number in range(len(queries)):
            started = time.perf_counter()
            hits = gallery.search(queries[number : number + 1], K, filtering)[0]
            times.append(1e3 * (time.perf_counter() - started))
            found = [int(hit.key) for hit in hits]
            rows.append(found + [-1] * (K - len(found)))
        yield f"filter {name}: recall@{K} (target {RECALL})", recall(np.array(rows), truth)
        yield f"filter {name}: p50, ms", statistics.median(times[1:])
        yield f"filter {name}: first search, ms", times[0]


def halved(
    setting: Setting, gallery: Gallery, queries: Embeddings, rounds: int
) -> Iterator[tuple[str, object]]:
    """Both vector types; recall is against the neighbours of the vectors before rounding."""
    half = replace(setting, folder=setting.folder.with_name(f"{setting.folder.name}-fp16"))
    fresh(build, half, "fp16")
    truth = true_neighbours(setting, queries)
    with contextlib.closing(Gallery.open(half.folder)) as other:
        both = {"fp32": (setting, gallery), "fp16": (half, other)}
        each = lambda one: [one.nearest(query[None], K) for query in queries]
        turns = {name: partial(each, one) for name, (_, one) in both.items()}
        seconds = in_turns(turns, rounds, warm_up=1)
        for name, (where, one) in both.items():
            size = sum(f.stat().st_size for f in where.folder.rglob("*") if f.is_file())
            exact = one.nearest(queries, K, SearchOptions(exact=True))[1] - 1
            yield f"{name}: disk, MB", size / 2**20
            yield f"{name}: recall@{K}", recall(one.nearest(queries, K)[1] - 1, truth)
            yield f"{name}: of an exact search", recall(exact, truth)
            yield f"{name}: ms per search", 1e3 * statistics.median(seconds[name]) / len(queries)
    yield "fp16 / fp32, time of a search", ratio(seconds["fp16"], seconds["fp32"])


if __name__ == "__main__":
    main()
