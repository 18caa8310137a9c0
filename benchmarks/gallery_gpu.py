"""A gallery on the GPU: flat and CAGRA beside the CPU's index, in one run on one machine.

Ceiling: GPU flat compares with everything, so its recall is 1; CAGRA has to be faster at its
recall. Each index is tuned to a recall of 0.98 at 10 on held-out queries; recall is then measured
on other queries. The graph of CAGRA is brought back, and the CPU answers with it.

    python benchmarks/gallery_gpu.py [ROWS ...]

ROWS: 100000 and 1000000 if not given, each with 128 and 512 dimensions. Ends with exit code 1
where FAISS finds no GPU.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from clustered import clustered

from embedder.types import Embeddings
from indexer.index.faiss import SegmentIndex
from indexer.index.gpu import gpu_memory_mb, why_no_gpu
from indexer.index.kinds import Effort
from indexer.index.plan import plan_index
from indexer.index.tune import recall_at, tune
from indexer.types import Ids

ROWS = (100_000, 1_000_000)
DIMS = (128, 512)
BATCHES = (1, 32, 1024)
QUERIES = 2048
SECONDS = 3.0
TARGET = 0.98
K = 10


@dataclass
class Contender:
    """An index that is ready to be searched."""

    name: str
    index: SegmentIndex
    effort: Effort
    build_s: float
    tune_s: float


def main() -> None:
    if why := why_no_gpu():
        print(f"Nothing was measured. {why}", file=sys.stderr)
        raise SystemExit(1)
    print(f"GPU with {gpu_memory_mb():,.0f} MB; recall target {TARGET} at {K}", flush=True)
    for n in [int(word) for word in sys.argv[1:]] or ROWS:
        for dim in DIMS:
            compare(n, dim)


def compare(n: int, dim: int) -> None:
    """Print a table of all indexes over one gallery."""
    base, queries = clustered(n, dim, queries=QUERIES)
    held_out, fresh = queries[:1000], queries[1000:]
    print(f"\n## {n:,} x {dim}\n")
    columns = ["index", "effort", "build s", "tune s", "recall@10"]
    columns += [f"QPS at {size}" for size in BATCHES]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    truth: Ids | None = None
    for contender in contenders(base, held_out):
        if truth is None:
            truth = contender.index.exact(fresh, K)[1]
        print_row(contender, fresh, truth)
        contender.index.close()


def contenders(base: Embeddings, held_out: Embeddings) -> Iterator[Contender]:
    """Each index, built when the one before is done with; CAGRA on the GPU, then on the CPU."""
    yield made("CPU", "auto", "cpu", base, held_out)
    yield made("GPU", "flat", "cuda", base, held_out)
    cagra = made("GPU", "cagra", "cuda", base, held_out)
    yield cagra
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "index.faiss"
        started = time.perf_counter()
        cagra.index.save(path)
        exported = SegmentIndex.open("cagra", base, path)
        export_s = time.perf_counter() - started
        started = time.perf_counter()
        tuned = tune(exported, held_out, TARGET, K)
        tune_s = time.perf_counter() - started
        yield Contender("CAGRA on the CPU", exported, tuned.effort, export_s, tune_s)
        print_agreement(exported, tuned.effort, held_out)


def made(where: str, kind: str, device: str, base: Embeddings, held_out: Embeddings) -> Contender:
    """Build and tune an index."""
    plan = plan_index(*base.shape, kind=kind, device=device, target_recall=TARGET)
    started = time.perf_counter()
    index = SegmentIndex.build(plan, base)
    build_s = time.perf_counter() - started
    started = time.perf_counter()
    tuned = tune(index, held_out, TARGET, K)
    tune_s = time.perf_counter() - started
    return Contender(f"{where} {plan.kind}", index, tuned.effort, build_s, tune_s)


def print_row(contender: Contender, fresh: Embeddings, truth: Ids) -> None:
    found = contender.index.search(fresh, K, contender.effort)[1]
    effort = f"{contender.effort.value} x {contender.effort.k_factor}"
    cells = [contender.name, effort, f"{contender.build_s:.1f}", f"{contender.tune_s:.1f}"]
    cells.append(f"{recall_at(found, truth):.4f}")
    cells += [f"{rate(contender, fresh, size):,.0f}" for size in BATCHES]
    print(f"| {' | '.join(cells)} |", flush=True)


def rate(contender: Contender, fresh: Embeddings, size: int) -> float:
    """Queries a second, one batch after the other, for some seconds."""
    batches = [fresh[start : start + size] for start in range(0, len(fresh) - size + 1, size)]
    contender.index.search(batches[0], K, contender.effort)
    done = 0
    started = time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        contender.index.search(batches[done % len(batches)], K, contender.effort)
        done += 1
    return done * size / (time.perf_counter() - started)


def print_agreement(exported: SegmentIndex, effort: Effort, queries: Embeddings) -> None:
    """Whether the graph that came back gives exact scores and the true first neighbours."""
    scores, positions = exported.search(queries, K, effort)
    products = np.einsum("qd,qkd->qk", queries, exported.vectors(positions))
    first = exported.exact(queries, 1)[1]
    print(
        f"\nCAGRA back on the CPU: scores off by {np.abs(scores - products).max():.1e} at most, "
        f"first neighbour right for {(positions[:, :1] == first).mean():.4f} of the queries",
        flush=True,
    )


if __name__ == "__main__":
    main()
