"""A gallery on the GPU: every index type there compared with the CPU, in one run on one machine.

    python benchmarks/gallery_gpu.py [--rows 1000000 10000000] [--dims 512]

Ceiling: flat compares with all vectors, so its recall is 1; the others must be faster at theirs.
Each index is tuned to a recall of 0.98 at 10 on the device that searches it, with held-out queries;
recall is then measured with others. The last rows are the same gallery without a GPU.
"""

import gc
import time
from functools import partial

import numpy as np
from clustered import clustered_batches, clustered_queries
from harness import heading, options, recall_at, row, skip, timed_ms

from kinlens.embedder.errors import PlanError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.index.faiss import SegmentIndex
from kinlens.indexer.index.gpu import gpu_memory, why_no_gpu
from kinlens.indexer.index.index_types import Effort
from kinlens.indexer.index.plan import IndexSettings, plan_index
from kinlens.indexer.index.tune import tune
from kinlens.indexer.types import Ids

BATCHES = (1, 32, 1024)
QUERIES, K, TARGET = 2048, 10, 0.98


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
    base = np.concatenate([*clustered_batches(n, dim)])
    queries = clustered_queries(n, dim, QUERIES)
    held_out, others = queries[:1000], queries[1000:]
    print(f"\n{n:,} x {dim}", flush=True)
    rates = (f"QPS at {size}" for size in BATCHES)
    heading("index", "effort", "build s", "copy s", "GPU MB", "recall@10", *rates)
    truth: Ids | None = None
    for kind in ("flat", "ivf-pq"):
        try:
            plan = plan_index(*base.shape, IndexSettings(kind, None, "cuda", TARGET))
        except PlanError as error:
            print(f"\n{kind}: {error}\n")
            continue
        started = time.perf_counter()
        index = SegmentIndex.build(plan, base)
        build_s = time.perf_counter() - started
        for device in ("GPU", "CPU"):  # each is tuned where it is searched
            copy_s = 0.0
            if device == "GPU":
                copy_s = (
                    timed_ms(partial(index.use_gpu, f"The index {kind}", plan.parameters)) / 1e3
                )
            effort = tune(index, held_out, TARGET, K).effort
            if truth is None:
                truth = index.exact(others, K)[1]
            found = index.search(others, K, effort)[1]
            gpu = index.gpu
            taken = gpu.gpu_mb if gpu is not None and index.is_on_gpu else 0.0
            recall = float(recall_at(found, truth))
            qps = (rate(index, effort, others, size, seconds) for size in BATCHES)
            name, tuned = f"{kind} on the {device}", f"{effort.value} x {effort.k_factor}"
            row(name, tuned, build_s, copy_s, taken, recall, *qps)
            if gpu is not None and gpu.reason:
                print(f"\n{name}: {gpu.reason}\n")
            index.close()
        gc.collect()


def rate(
    index: SegmentIndex, effort: Effort, queries: Embeddings, size: int, seconds: float
) -> float:
    """Queries per second, one batch after the other."""
    batches = [queries[at : at + size] for at in range(0, len(queries) - size + 1, size)]
    index.search(batches[0], K, effort)
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        index.search(batches[done % len(batches)], K, effort)
        done += 1
    return done * size / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
