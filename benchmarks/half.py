"""Vectors in half precision compared with float32: disk, recall, and search time.

    python benchmarks/half.py [--rows 100000 1000000] [--dims 128 512]

Two galleries of the same items, each tuned to a recall of 0.98 at 10. Recall of the gallery's own
index, and of an exact search in it, is measured against the neighbours of the vectors before
rounding, with queries that are in no gallery. Searches are single ones, in turns, with all data in
the page cache.
"""

import contextlib
import statistics
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from clustered import clustered
from harness import heading, in_turns, made_gallery, options, ratio, row

from kinlens.embedder.types import Embeddings
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.faiss import compare
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.index.tune import recall_at
from kinlens.indexer.types import SearchOptions

K, QUERIES, TYPES = 10, 500, ("fp32", "fp16")


def main() -> None:
    args = options(__doc__, rows=[100_000, 1_000_000], dims=[128, 512], rounds=5)
    for n in args.rows:
        for dim in args.dims:
            compared(n, dim, args.rounds)


def compared(n: int, dim: int, rounds: int) -> None:
    """A table of both galleries."""
    base, queries = clustered(n, dim, queries=QUERIES)
    truth = compare(queries, K, base, np.arange(n))[1]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        galleries = {}
        for type_ in TYPES:
            path = made_gallery(
                Path(name, type_),
                lambda: [base],
                n,
                dim,
                settings=IndexSettings(),
                vector_type=type_,
            )
            galleries[type_] = stack.enter_context(contextlib.closing(Gallery.open(path)))
        turns = {type_: partial(search_all, one, queries) for type_, one in galleries.items()}
        seconds = in_turns(turns, rounds, warm_up=1)
        print(f"\n{n:,} x {dim}", flush=True)
        heading("vectors", "index", "disk, MB", "recall@10", "exact", "ms per search", "ratio")
        for type_, gallery in galleries.items():
            size = sum(f.stat().st_size for f in Path(name, type_).rglob("*") if f.is_file())
            found = gallery.nearest(queries, K)[1] - 1
            exact = gallery.nearest(queries, K, SearchOptions(exact=True))[1] - 1
            location = gallery.index_location()
            row(
                type_,
                location.kind if location else "",
                size / 2**20,
                float(recall_at(found, truth)),
                float(recall_at(exact, truth)),
                1e3 * statistics.median(seconds[type_]) / QUERIES,
                ratio(seconds[type_], seconds["fp32"]),
            )


def search_all(gallery: Gallery, queries: Embeddings) -> None:
    """A search for each query."""
    for row_number in range(len(queries)):
        gallery.nearest(queries[row_number : row_number + 1], K)


if __name__ == "__main__":
    main()
