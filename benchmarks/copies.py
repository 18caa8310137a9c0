"""What an image that many items share, such as a placeholder, costs a search.

    python benchmarks/copies.py --sizes 120k --share 0.5
    python benchmarks/copies.py --sizes 1m --share 0.05 --index ivf-pq
    python benchmarks/copies.py --sizes 20k --share 0.5 --index hnsw --resaved

A share of the items has the same image; with --resaved, in a file of its own each, with equal
pixels and so an equal vector. Queries are usual ones (benchmarks/clustered.py) or close
to that image, in turns. Each kind of search is compared with its usual query, and with a usual
query without options. At last, what hiding a removed item costs in 10 million of which a share are
pairs of copies, without searches.
"""

import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from clustered import clustered_batches, clustered_queries
from harness import count_of, heading, options, ratio, row, timed_ms, verdict

from kinlens.embedder.types import Embeddings
from kinlens.indexer.bits import empty_bits, put_bits
from kinlens.indexer.entries import Entry
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.copies import Copies
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.ingest.build import import_gallery
from kinlens.indexer.types import GalleryExport, Grouping, Ids, SearchOptions

K, ADDED, TARGET = 20, 2000, 3.0
MANY = 10_000_000
BRANDS = 500


def main() -> None:
    args = options(
        __doc__, sizes=["120k"], dim=128, share=0.5, rounds=30, index="auto", resaved=False
    )
    for size in args.sizes:
        n = count_of(size)
        with tempfile.TemporaryDirectory(prefix="copies-benchmark-") as name:
            path = Path(name, "gallery")
            facts = {"name": "g", "bundle_id": "b" * 64}
            entries = partial(items, n, args.dim, args.share, args.resaved)
            dump = GalleryExport(facts, args.dim, n, entries)
            import_gallery(dump, path, settings=IndexSettings(args.index))
            with contextlib.closing(Gallery.open(path)) as gallery:
                head(f"{n:,} items, {args.share:.0%} share an image")
                compared(gallery, n, args.dim, args.rounds)
                gallery.add([*itertools.islice(entries(start=n), ADDED)])
                head(f"with {ADDED:,} later items")
                compared(gallery, n, args.dim, args.rounds)
    removals(args.share, args.rounds)


def removals(share: float, rounds: int) -> None:
    """Compare what a removal hides: by its own content, and by all copies."""
    rng = np.random.default_rng(0)
    pairs = np.sort(rng.permutation(MANY)[: int(MANY * share / 2) * 2].reshape(2, -1), axis=0)
    firsts = np.tile(pairs[0], 2)
    copies = Copies.from_array(np.stack([firsts, pairs.ravel()]), MANY)
    tombstones = empty_bits(MANY)
    calls: dict[str, Callable[[Ids], object]] = {
        "its contents": lambda rows: copies.hidden_by(rows, tombstones),
        "all copies": lambda _: copies.folded(~tombstones),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        rows = pairs[number % 2, number : number + 1]
        put_bits(tombstones, rows, True)
        for name, call in calls.items():
            call(rows[:0])  # what is made once, when a segment is opened
            times[name].append(timed_ms(partial(call, rows)))
    heading(f"a removal in {MANY:,} items, {share:.0%} of them copies", "ms")
    for name, own in times.items():
        row(name, statistics.median(own))


def head(title: str) -> None:
    """Print the head of a table of `compared`."""
    heading(title, "usual, ms", "close, ms", "close / usual", "close / usual plain search")


def items(n: int, dim: int, share: float, resaved: bool, start: int = 0) -> Iterator[Entry]:
    """Items with keys from `start` on. Those of the shared image have one file, or one each."""
    shared = placeholder(n, dim)
    rng = np.random.default_rng(start)
    vectors = itertools.chain.from_iterable(clustered_batches(n, dim))
    for number, vector in enumerate(vectors, start):
        is_shared = rng.random() < share
        image = 0 if is_shared and not resaved else 1 + number
        found = shared if is_shared else vector
        yield Entry(f"{number:09d}", found, f"{image:064x}", {"brand": f"brand {number % BRANDS}"})


def placeholder(n: int, dim: int) -> Embeddings:
    """The vector (D,) of the image that items share."""
    return clustered_queries(n, dim)[-1]


def compared(gallery: Gallery, n: int, dim: int, rounds: int) -> None:
    """Time usual queries and queries close to the shared image, in turns."""
    near = placeholder(n, dim) + 0.02 * np.random.default_rng(1).standard_normal((rounds, dim))
    close = (near / np.linalg.norm(near, axis=1, keepdims=True)).astype(np.float32)
    usual = clustered_queries(n, dim)[:rounds]
    where = parse_filter("brand starts with 'brand 1'")
    asks: dict[str, Callable[[Embeddings], object]] = {
        "search": lambda q: gallery.search(q, K),
        "filtered": lambda q: gallery.search(q, K, SearchOptions(where=where)),
        "distinct": lambda q: gallery.search(q, K, SearchOptions(distinct=True)),
        "near": lambda q: gallery.search(q, K, SearchOptions(near=0.99)),
        "groups": lambda q: gallery.search_groups(q, K, Grouping("brand")),
        "distinct groups": lambda q: gallery.search_groups(
            q, K, Grouping("brand"), SearchOptions(distinct=True)
        ),
    }
    times: dict[tuple[str, bool], list[float]] = {(name, x): [] for name in asks for x in (0, 1)}
    for number in range(rounds):
        for name, ask in asks.items():
            for is_close, queries in enumerate((usual, close)):
                ask_one = partial(ask, queries[number : number + 1])
                times[name, bool(is_close)].append(timed_ms(ask_one))
    base = times["search", False]
    for name in asks:
        usual_ms, close_ms = times[name, False], times[name, True]
        row(
            name,
            statistics.median(usual_ms),
            statistics.median(close_ms),
            ratio(close_ms, usual_ms),
            ratio(close_ms, base),
        )
    for name in ("search", "distinct", "near", "groups"):
        share = ratio(times[name, True], times[name, False])
        verdict(f"{name}, close / usual", share, TARGET, at_most=True)


if __name__ == "__main__":
    main()
