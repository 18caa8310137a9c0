"""Queries per second and latencies, all contestants in turn, so that noise hits all of them."""

import random
import statistics
import time
from collections.abc import Sequence

import numpy as np
from gallery_contest import Contestant
from gallery_report import Report, Target

from embedder.machine import core_count
from embedder.types import Embeddings

BATCH = 256
ROUNDS = 11
_ROUND_S = 0.4
_CEILING = "raw FAISS"
_OURS = "nearest"
_LEAST_OF_CEILING = Target(0.95)

Seconds = dict[str, list[list[float]]]
"""Of each contestant, of each round, of each call."""


def compare(contestants: Sequence[Contestant], queries: Embeddings, report: Report) -> None:
    """Report QPS, p50 and p99 of single queries on one thread, and QPS of batches on all."""
    single = measure(contestants, [queries[i : i + 1] for i in range(len(queries))], 1)
    for name, rounds in single.items():
        latencies = 1000 * np.concatenate(rounds)
        report.add(f"one query, {name}: QPS", 1000 / float(latencies.mean()))
        report.add(f"one query, {name}: p50", float(np.percentile(latencies, 50)), "ms")
        report.add(f"one query, {name}: p99", float(np.percentile(latencies, 99)), "ms")
    _ratios("one query", single, report)
    wrapped = np.concatenate([queries, queries[:BATCH]])
    batches = [wrapped[i : i + BATCH] for i in range(0, len(queries), BATCH)]
    many = measure(contestants, batches, core_count())
    for name, rounds in many.items():
        report.add(f"batches of {BATCH}, {name}: QPS", BATCH / float(np.concatenate(rounds).mean()))
    _ratios(f"batches of {BATCH}", many, report)


def measure(
    contestants: Sequence[Contestant], calls: Sequence[Embeddings], threads: int
) -> Seconds:
    """Time the same calls for everyone, in rounds of random order."""
    slowest = 0.0
    for contestant in contestants:
        contestant.use(threads)
        contestant.search(calls[0])
        slowest = max(slowest, sum(_timed(contestant, calls[:5])) / min(5, len(calls)))
    count = min(max(int(_ROUND_S / slowest), 2 if threads > 1 else 50), 200)
    seconds: Seconds = {contestant.name: [] for contestant in contestants}
    for number in range(ROUNDS):
        chosen = [calls[(number * count + i) % len(calls)] for i in range(count)]
        for contestant in random.sample(list(contestants), len(contestants)):
            contestant.use(threads)
            contestant.search(chosen[-1])  # takes the caches back from whoever ran before
            seconds[contestant.name].append(_timed(contestant, chosen))
    return seconds


def _timed(contestant: Contestant, calls: Sequence[Embeddings]) -> list[float]:
    seconds = []
    for queries in calls:
        started = time.perf_counter()
        contestant.search(queries)
        seconds.append(time.perf_counter() - started)
    return seconds


def _ratios(name: str, seconds: Seconds, report: Report) -> None:
    ceiling = [sum(round_) for round_ in seconds[_CEILING]]
    for contestant, rounds in seconds.items():
        if contestant != _CEILING:
            pairs = zip(ceiling, rounds, strict=True)
            ratio = statistics.median(raw / sum(round_) for raw, round_ in pairs)
            target = _LEAST_OF_CEILING if contestant == _OURS else None
            report.add(f"{name}, {contestant}: of raw FAISS's QPS", ratio, "", target)
