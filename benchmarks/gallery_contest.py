"""Who searches the same vectors: the gallery, raw FAISS on the gallery's own index file, peers."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import faiss
import numpy as np
from clustered import clustered_batches
from gallery_make import K, Setting, segment_folder
from gallery_truth import Positions, recall

from embedder.machine import core_count
from embedder.types import Embeddings
from indexer.gallery import Gallery
from indexer.index.kinds import KINDS
from indexer.index.segment import IDS, INDEX, VECTORS, read_manifest

FIRST_NUMBER = 1
"""The number of the first item of a gallery; the others follow in the order they were made in."""

_EFFORTS = (10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 1024)


@dataclass(frozen=True)
class Contestant:
    """`search` answers queries (Q, D); `use` is told the number of threads before a round."""

    name: str
    search: Callable[[Embeddings], object]
    use: Callable[[int], object]
    recall: float
    build_s: float | None = None
    effort: int | None = None


def of_gallery(gallery: Gallery, queries: Embeddings, truth: Positions) -> list[Contestant]:
    """The gallery twice: scores and numbers alone, and full hits with attributes.

    `search` may fetch more than it returns, so an approximate index can find other items for it.
    """
    hits = gallery.search(queries, K)
    for hit in (hit for row in hits for hit in row):
        if hit.id != int(hit.key) + FIRST_NUMBER:
            raise SystemExit(f"item {hit.id} has the key {hit.key}: numbers do not follow keys")
    by_search = np.array([[int(hit.key) for hit in row] for row in hits])
    by_nearest = gallery.nearest(queries, K)[1] - FIRST_NUMBER
    return [
        Contestant(
            "nearest",
            lambda q: gallery.nearest(q, K),
            lambda _: None,
            recall(by_nearest, truth),
        ),
        Contestant(
            "search", lambda q: gallery.search(q, K), lambda _: None, recall(by_search, truth)
        ),
    ]


def of_faiss(setting: Setting, queries: Embeddings, truth: Positions) -> Contestant:
    """FAISS alone, with the gallery's index file in memory and its tuned parameters."""
    folder = segment_folder(setting)
    manifest = read_manifest(folder)
    index = faiss.IndexFlatIP(manifest.dim)
    index.add(np.load(folder / VECTORS))
    codes = None
    if INDEX in manifest.files:
        codes = faiss.read_index(str(folder / INDEX))
        index = faiss.IndexRefine(codes, index)
    nlist = getattr(codes, "nlist", 0)
    kind = KINDS[manifest.kind]
    asked = kind.search_parameters(nlist, manifest.size, manifest.tuned, K)
    positions = np.load(folder / IDS) - FIRST_NUMBER
    found = positions[index.search(queries, K, params=asked)[1]]
    return Contestant(
        "raw FAISS",
        lambda q: index.search(q, K, params=asked),
        faiss.omp_set_num_threads,
        recall(found, truth),
    )


def peers(
    setting: Setting, queries: Embeddings, truth: Positions, least: float
) -> Iterator[Contestant]:
    """hnswlib and usearch, each with the smallest ef that reaches the recall `least`."""
    for make in (of_hnswlib, of_usearch):
        started = time.perf_counter()
        search, use, set_ef = make(setting)
        build_s = time.perf_counter() - started
        use(core_count())
        for ef in _EFFORTS:
            set_ef(ef)
            reached = recall(np.asarray(search(queries)).astype(np.int64), truth)
            if reached >= least:
                break
        yield Contestant(make.__name__.removeprefix("of_"), search, use, reached, build_s, ef)


Peer = tuple[Callable[[Embeddings], object], Callable[[int], object], Callable[[int], object]]
"""How to search for positions, to set the number of threads, to set ef."""


def of_hnswlib(setting: Setting) -> Peer:
    """M 16 and ef_construction 200, as its documentation has them."""
    import hnswlib

    index = hnswlib.Index(space="ip", dim=setting.dim)
    index.init_index(max_elements=setting.n, M=16, ef_construction=200, random_seed=0)
    index.set_num_threads(core_count())
    for batch in clustered_batches(setting.n, setting.dim):
        index.add_items(batch)
    return lambda q: index.knn_query(q, K)[0], index.set_num_threads, index.set_ef


def of_usearch(setting: Setting) -> Peer:
    """Its defaults, in full precision."""
    from usearch.index import Index

    index = Index(ndim=setting.dim, metric="ip", dtype="f32")
    start = 0
    for batch in clustered_batches(setting.n, setting.dim):
        index.add(np.arange(start, start + len(batch)), batch, threads=core_count())
        start += len(batch)
    threads = [1]

    def search(queries: Embeddings) -> object:
        return index.search(queries, K, threads=threads[0]).keys

    def use(count: int) -> None:
        threads[0] = count

    def set_ef(ef: int) -> None:
        index.expansion_search = ef

    return search, use, set_ef
