"""Speed of a gallery compared with raw FAISS, hnswlib and usearch, for 10,000 to 10M items.

    python benchmarks/gallery.py --sizes 10k 100k 1m
    python benchmarks/gallery.py --sizes 10m --dims 128

Vectors: benchmarks/clustered.py. The ceiling is raw FAISS: the gallery's own index file, read into
memory and searched with its tuned parameters, in rounds that alternate with the gallery's.
`nearest` returns scores and item numbers, as FAISS does; `search` also fetches keys and attributes.
One query runs on one thread, a batch on all cores. hnswlib and usearch search with the smallest ef
that reaches the gallery's recall@10, or 0.98 if the gallery is exact; they need the extra `bench`.
Memory, filters, changes and compaction are in benchmarks/growth.py.

On 2 cores 10k and 100k take minutes, 1m and 10m about half an hour each.
"""

import contextlib
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    recall_at,
    timed_ms,
)

from kinlens.embedder.machine import core_count
from kinlens.embedder.types import Embeddings
from kinlens.indexer.catalog.vectors import ROWS, VECTORS
from kinlens.indexer.folder.layout import GalleryFolder
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.index_types import INDEX_TYPES
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.index.segment import INDEX, SEGMENTS, read_segment_manifest
from kinlens.indexer.types import Ids, SearchOptions

K, BATCH, RECALL = 10, 256, 0.98
SINGLE, BATCHES = 100, 2
"""Calls of a contestant in each round."""

LARGEST_PEERS = 128_000_000  # coordinates of all vectors
EFFORTS = (10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 1024)
Figures = dict[str, object]


@dataclass(frozen=True)
class Contestant:
    """`search` answers queries (Q, D); `use` gets the number of threads before a round."""

    search: Callable[[Embeddings], object]
    recall: float
    use: Callable[[int], object] = faiss.omp_set_num_threads
    facts: str = ""


def main() -> None:
    args = options(__doc__, sizes=["10k", "100k"], dims=[128, 512], rounds=11, index="auto")
    figures: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="gallery-benchmark-") as name:
        for size, dim in product(args.sizes, args.dims):
            path, n = Path(name, f"{size}x{dim}"), count_of(size.lower())
            found = figures[f"{size} x {dim}"] = {}
            found["build from vectors, s"] = fresh(build, path, n, dim, IndexSettings(args.index))
            for figure, value in measured(path, n, dim, args.rounds):
                found[figure] = value
                print(f"{size} x {dim}: {figure}: {value}", flush=True)
    columns(figures)


def build(path: Path, n: int, dim: int, settings: IndexSettings) -> float:
    """The seconds that it takes."""
    make = partial(made_gallery, path, partial(clustered_batches, n, dim), n, dim)
    return timed_ms(partial(make, settings=settings)) / 1e3


def measured(path: Path, n: int, dim: int, rounds: int) -> Iterator[tuple[str, object]]:
    """Recall, latencies and QPS of all contestants, in turns, so that noise affects all of them."""
    (segment,) = (GalleryFolder(path).current() / SEGMENTS).iterdir()
    manifest = read_segment_manifest(segment)
    yield "index", f"{manifest.kind}, effort {manifest.effort}, k_factor {manifest.k_factor}"
    queries = clustered_queries(n, dim)
    with contextlib.closing(Gallery.open(path)) as gallery:
        truth = nearest_of_all(n, dim, queries)
        exact = gallery.nearest(queries, K, SearchOptions(exact=True))[1]
        assert recall_at(exact, truth) > 0.999, "an exact search differs from plain FAISS"
        contestants = {"raw FAISS": of_faiss(path, segment, queries, truth)}
        contestants |= of_gallery(gallery, queries, truth)
        if n * dim <= LARGEST_PEERS:
            least = min(contestants["nearest"].recall, RECALL)
            contestants |= of_peers(n, dim, queries, truth, least)
        for name, one in contestants.items():
            yield f"recall@{K}, {name} (target {RECALL})", one.recall
            if one.facts:
                yield name, one.facts
        single = [queries[at : at + 1] for at in range(SINGLE)]
        batches = [queries[at * BATCH :][:BATCH] for at in range(BATCHES)]
        for label, calls, threads in (
            ("one query", single, 1),
            (f"batches of {BATCH}", batches, core_count()),
        ):
            found = in_rounds(contestants, calls, threads, rounds)
            sums = {name: [sum(times) for times in each] for name, each in found.items()}
            for name, times in found.items():
                if threads == 1:
                    yield f"{label}, {name}: p50, ms", float(np.median(times))
                    yield f"{label}, {name}: p99, ms", float(np.percentile(times, 99))
                else:
                    yield f"{label}, {name}: QPS", 1e3 * BATCH / float(np.mean(times))
                if name != "raw FAISS":
                    relative = ratio(sums["raw FAISS"], sums[name])
                    yield f"{label}: {name} / raw FAISS, QPS", relative


def nearest_of_all(n: int, dim: int, queries: Embeddings) -> Ids:
    """Item numbers (Q, K) of the nearest vectors, without a gallery."""
    scores, numbers, start = np.empty((len(queries), 0)), np.empty((len(queries), 0), int), 1
    for batch in clustered_batches(n, dim):
        found = faiss.knn(queries, batch, K, faiss.METRIC_INNER_PRODUCT)
        scores, numbers = np.hstack([scores, found[0]]), np.hstack([numbers, found[1] + start])
        best = np.argsort(-scores, axis=1)[:, :K]
        scores, numbers = (np.take_along_axis(x, best, axis=1) for x in (scores, numbers))
        start += len(batch)
    return numbers


def in_rounds(
    contestants: Mapping[str, Contestant], calls: Sequence[Embeddings], threads: int, rounds: int
) -> dict[str, list[list[float]]]:
    """Milliseconds by contestant, round and call."""
    found: dict[str, list[list[float]]] = {name: [] for name in contestants}

    def search(name: str) -> None:
        one = contestants[name]
        one.use(threads)
        one.search(calls[-1])  # refills the caches after the previous contestant
        found[name].append([timed_ms(partial(one.search, each)) for each in calls])

    in_turns({name: partial(search, name) for name in contestants}, rounds)
    return found


def of_gallery(
    gallery: Gallery, queries: Embeddings, truth: Ids
) -> Iterator[tuple[str, Contestant]]:
    """The gallery twice: only scores and item numbers, and full hits with attributes.

    `search` may fetch more than it returns, so an approximate index can find other items for it.
    """
    by_nearest = gallery.nearest(queries, K)[1]
    by_search = np.array([[hit.id for hit in row] for row in gallery.search(queries, K)])
    yield "nearest", Contestant(lambda q: gallery.nearest(q, K), recall_at(by_nearest, truth))
    yield "search", Contestant(lambda q: gallery.search(q, K), recall_at(by_search, truth))


def of_faiss(path: Path, segment: Path, queries: Embeddings, truth: Ids) -> Contestant:
    """Raw FAISS, with the gallery's index file in memory and its tuned parameters."""
    manifest = read_segment_manifest(segment)
    # Rows are in the order of item numbers, since a build leaves no gaps.
    (rows,) = (GalleryFolder(path).current() / VECTORS).glob(f"*/{ROWS['fp32']}")
    index = faiss.IndexFlatIP(manifest.dim)
    index.add(np.fromfile(rows, np.float32).reshape(-1, manifest.dim))
    codes = None
    if INDEX in manifest.files:
        codes = faiss.read_index(str(segment / INDEX))
        index = faiss.IndexRefine(codes, index)
    parameters = INDEX_TYPES[manifest.kind].search_parameters(
        getattr(codes, "nlist", 0), manifest.size, manifest.tuned, K
    )
    search = partial(index.search, k=K, params=parameters)
    return Contestant(search, recall_at(search(queries)[1] + 1, truth))


def of_peers(
    n: int, dim: int, queries: Embeddings, truth: Ids, least: float
) -> Iterator[tuple[str, Contestant]]:
    """hnswlib and usearch, each with the smallest ef that reaches the recall `least`."""
    vectors = np.concatenate([*clustered_batches(n, dim)])
    for name, make in (("hnswlib", hnswlib_of), ("usearch", usearch_of)):
        if importlib.util.find_spec(name) is None:
            print(f"skipped: {name} needs the extra `bench`")
            continue
        started = time.perf_counter()
        search, use, set_ef = make(vectors)
        seconds = time.perf_counter() - started
        use(core_count())
        for ef in EFFORTS:
            set_ef(ef)
            reached = recall_at(np.asarray(search(queries)).astype(np.int64) + 1, truth)
            if reached >= least:
                break
        yield name, Contestant(search, reached, use, f"built in {seconds:.1f} s, ef {ef}")


Peer = tuple[Callable[[Embeddings], object], Callable[[int], object], Callable[[int], object]]
"""Functions to search for positions, to set the number of threads, and to set ef."""


def hnswlib_of(vectors: Embeddings) -> Peer:
    """M 16 and ef_construction 200, as in its documentation."""
    import hnswlib

    index = hnswlib.Index(space="ip", dim=vectors.shape[1])
    index.init_index(max_elements=len(vectors), M=16, ef_construction=200, random_seed=0)
    index.set_num_threads(core_count())
    index.add_items(vectors)
    return lambda q: index.knn_query(q, K)[0], index.set_num_threads, index.set_ef


def usearch_of(vectors: Embeddings) -> Peer:
    """Its defaults, in full precision."""
    from usearch.index import Index

    index, threads = Index(ndim=vectors.shape[1], metric="ip", dtype="f32"), [1]
    index.add(np.arange(len(vectors)), vectors, threads=core_count())
    return (
        lambda q: index.search(q, K, threads=threads[0]).keys,
        lambda count: threads.__setitem__(0, count),
        lambda ef: setattr(index, "expansion_search", ef),
    )


if __name__ == "__main__":
    main()
