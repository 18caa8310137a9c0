"""A gallery on the GPU: flat and CAGRA beside the CPU's index, in one run on one machine.

    python benchmarks/gallery_gpu.py [--rows 100000 1000000] [--dims 128 512]

Ceiling: GPU flat compares with everything, so its recall is 1; CAGRA has to be faster at its
recall. Each index is tuned to a recall of 0.98 at 10 on held-out queries; recall is then measured
on other queries. The graph of CAGRA is brought back, and the CPU answers with it.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from clustered import clustered
from harness import heading, options, row, skip

from embedder.types import Embeddings
from indexer.index.faiss import SegmentIndex
from indexer.index.gpu import gpu_memory_mb, why_no_gpu
from indexer.index.kinds import Effort
from indexer.index.plan import IndexSettings, plan_index
from indexer.index.tune import recall_at, tune

BATCHES = (1, 32, 1024)
QUERIES, K, TARGET = 2048, 10, 0.98
SECONDS = 3.0
T = TypeVar("T")


@dataclass
class Contender:
    """An index that is ready to be searched."""

    name: str
    index: SegmentIndex
    effort: Effort
    build_s: float
    tune_s: float


def main() -> None:
    asked = options(__doc__, rows=[100_000, 1_000_000], dims=[128, 512])
    if why := why_no_gpu():
        skip(why)
    print(f"GPU with {gpu_memory_mb():,.0f} MB; recall target {TARGET} at {K}", flush=True)
    for n in asked.rows:
        for dim in asked.dims:
            compare(n, dim)


def compare(n: int, dim: int) -> None:
    """A table of all indexes over one gallery."""
    base, queries = clustered(n, dim, queries=QUERIES)
    held_out, others = queries[:1000], queries[1000:]
    print(f"\n{n:,} x {dim}")
    rates = (f"QPS at {size}" for size in BATCHES)
    heading("index", "effort", "build s", "tune s", "recall@10", *rates)
    truth = None
    for one in contenders(base, held_out):
        if truth is None:
            truth = one.index.exact(others, K)[1]
        found = one.index.search(others, K, one.effort)[1]
        effort = f"{one.effort.value} x {one.effort.k_factor}"
        qps = (rate(one, others, size) for size in BATCHES)
        row(one.name, effort, one.build_s, one.tune_s, float(recall_at(found, truth)), *qps)
        one.index.close()


def contenders(base: Embeddings, held_out: Embeddings) -> Iterator[Contender]:
    """Each index, built when the one before is done with; CAGRA on the GPU, then on the CPU."""
    yield made("CPU", "auto", "cpu", base, held_out)
    yield made("GPU", "flat", "cuda", base, held_out)
    cagra = made("GPU", "cagra", "cuda", base, held_out)
    yield cagra
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "index.faiss"

        def brought_back() -> SegmentIndex:
            cagra.index.save(path)
            return SegmentIndex.open("cagra", base, path)

        exported, export_s = timed(brought_back)
        tuned, tune_s = timed(lambda: tune(exported, held_out, TARGET, K))
        yield Contender("CAGRA on the CPU", exported, tuned.effort, export_s, tune_s)
        scores, positions = exported.search(held_out, K, tuned.effort)
        products = np.einsum("qd,qkd->qk", held_out, exported.vectors(positions))
        first = exported.exact(held_out, 1)[1]
        print(
            f"\nCAGRA back on the CPU: scores off by {np.abs(scores - products).max():.1e} at "
            f"most, first neighbour right for {(positions[:, :1] == first).mean():.4f} of the "
            "queries"
        )


def made(where: str, kind: str, device: str, base: Embeddings, held_out: Embeddings) -> Contender:
    """Build and tune an index."""
    plan = plan_index(*base.shape, IndexSettings(kind, None, device, TARGET))
    index, build_s = timed(lambda: SegmentIndex.build(plan, base))
    tuned, tune_s = timed(lambda: tune(index, held_out, TARGET, K))
    return Contender(f"{where} {plan.kind}", index, tuned.effort, build_s, tune_s)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def rate(one: Contender, queries: Embeddings, size: int) -> float:
    """Queries a second, one batch after the other, for some seconds."""
    batches = [queries[at : at + size] for at in range(0, len(queries) - size + 1, size)]
    one.index.search(batches[0], K, one.effort)
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        one.index.search(batches[done % len(batches)], K, one.effort)
        done += 1
    return done * size / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
