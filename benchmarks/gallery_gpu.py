"""A gallery on the GPU: every index type there compared with the CPU, in one run on one machine.

    python benchmarks/gallery_gpu.py [--rows 1000000 10000000] [--dims 512]

Ceiling: flat compares with all vectors, so its recall is 1; the others must be faster at theirs.
Each index is tuned to a recall of 0.98 at 10 on the device that searches it, with held-out queries;
recall is then measured with others. The last rows are the same gallery without a GPU.
"""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from clustered import clustered
from harness import heading, options, row, skip

from kinlens.embedder.errors import PlanError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.index.faiss import SegmentIndex
from kinlens.indexer.index.gpu import gpu_memory, why_no_gpu
from kinlens.indexer.index.index_types import Effort
from kinlens.indexer.index.plan import IndexSettings, Plan, plan_index
from kinlens.indexer.index.tune import recall_at, tune

BATCHES = (1, 32, 1024)
QUERIES, K, TARGET = 2048, 10, 0.98
T = TypeVar("T")


@dataclass
class Contender:
    """An index that is ready for searches."""

    name: str
    index: SegmentIndex
    effort: Effort
    build_s: float
    load_s: float


def main() -> None:
    args = options(__doc__, rows=[1_000_000, 10_000_000], dims=[512], seconds=3.0)
    if why := why_no_gpu():
        skip(why)
    memory = gpu_memory()
    print(f"GPU with {memory.free_mb:,.0f} of {memory.total_mb:,.0f} MB free; target {TARGET}")
    for n in args.rows:
        for dim in args.dims:
            compare(n, dim, args.seconds)


def compare(n: int, dim: int, seconds: float) -> None:
    """A table of all indexes over one gallery."""
    base, queries = clustered(n, dim, queries=QUERIES)
    held_out, others = queries[:1000], queries[1000:]
    print(f"\n{n:,} x {dim}", flush=True)
    rates = (f"QPS at {size}" for size in BATCHES)
    heading("index", "effort", "build s", "copy s", "GPU MB", "recall@10", *rates)
    truth = None
    for one in contenders(base, held_out):
        if truth is None:
            truth = one.index.exact(others, K)[1]
        found = one.index.search(others, K, one.effort)[1]
        gpu = one.index.gpu
        taken = gpu.gpu_mb if gpu is not None and one.index.is_on_gpu else 0.0
        effort = f"{one.effort.value} x {one.effort.k_factor}"
        qps = (rate(one, others, size, seconds) for size in BATCHES)
        recall = float(recall_at(found, truth))
        row(one.name, effort, one.build_s, one.load_s, taken, recall, *qps)
        if gpu is not None and gpu.reason:
            print(f"\n{one.name}: {gpu.reason}\n")
        one.index.close()
        gc.collect()


def contenders(base: Embeddings, held_out: Embeddings) -> Iterator[Contender]:
    """Each index, built after the previous one is freed; each on the GPU, then on the CPU."""
    for kind in ("flat", "ivf-pq", "cagra"):
        try:
            plan = plan_index(*base.shape, IndexSettings(kind, None, "cuda", TARGET))
        except PlanError as error:
            print(f"\n{kind}: {error}\n")
            continue
        index, build_s = timed(lambda plan=plan: SegmentIndex.build(plan, base))  # type: ignore[misc]
        yield on_gpu(index, plan, held_out, build_s)
        index.close()
        on_cpu = tune(index, held_out, TARGET, K)
        yield Contender(f"{kind} on the CPU", index, on_cpu.effort, build_s, 0.0)


def on_gpu(index: SegmentIndex, plan: Plan, held_out: Embeddings, build_s: float) -> Contender:
    """The index with a copy on the GPU, tuned there."""
    _, load_s = timed(lambda: index.use_gpu(f"The index {plan.kind}", plan.parameters))
    tuned = tune(index, held_out, TARGET, K)
    return Contender(f"{plan.kind} on the GPU", index, tuned.effort, build_s, load_s)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def rate(one: Contender, queries: Embeddings, size: int, seconds: float) -> float:
    """Queries per second, one batch after the other."""
    batches = [queries[at : at + size] for at in range(0, len(queries) - size + 1, size)]
    one.index.search(batches[0], K, one.effort)
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        one.index.search(batches[done % len(batches)], K, one.effort)
        done += 1
    return done * size / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
