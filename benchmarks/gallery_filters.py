"""Searches among the items that a filter leaves, from one in a thousand to every second."""

import time
from collections.abc import Mapping

import numpy as np
from gallery_make import K, buckets
from gallery_report import Report, Target
from gallery_truth import Positions, recall
from numpy.typing import NDArray

from embedder.types import Embeddings
from indexer.filters.tree import Range
from indexer.gallery import Gallery
from indexer.types import SearchOptions

QUERIES = 200
_BELOW = {"0.1 %": 1, "1 %": 10, "10 %": 100, "50 %": 500}
_RECALL = Target(0.98)


def selections(n: int) -> dict[str, NDArray[np.bool_]]:
    """Which items each filter leaves."""
    bucket = buckets(n)
    return {name: bucket < below for name, below in _BELOW.items()}


def measure_filters(
    gallery: Gallery, queries: Embeddings, truth: Mapping[str, Positions], report: Report
) -> None:
    """Report recall@10 and latency of full hits on one thread, and what a new filter costs."""
    for name, below in _BELOW.items():
        options = SearchOptions(where=Range("bucket", at_least=0, below=below))
        seconds, rows = [], []
        for row in range(QUERIES):
            started = time.perf_counter()
            hits = gallery.search(queries[row : row + 1], K, options)[0]
            seconds.append(time.perf_counter() - started)
            found = [int(hit.key) for hit in hits]
            rows.append(found + [-1] * (K - len(found)))
        report.add(f"filter {name}: recall@{K}", recall(np.array(rows), truth[name]), "", _RECALL)
        report.add(f"filter {name}: p50", 1000 * float(np.median(seconds[1:])), "ms")
        report.add(f"filter {name}: first search", 1000 * seconds[0], "ms")
