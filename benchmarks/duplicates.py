"""Time of near-duplicate search in a gallery compared with a bare FAISS self-join.

    python benchmarks/duplicates.py [--items 100000] [--dims 128 512] [--rounds 3]

The gallery contains clustered vectors (benchmarks/clustered.py), one in twenty of which has a near
copy: the same vector with noise, cosine about 0.998. The self-join is `IndexFlatIP.search` with all
vectors at once, 11 neighbours each, on all cores; `near_groups` does the same through the gallery's
own index, reads every vector from the catalogue, and makes groups. Both run in turns; a figure is
the median of the rounds in CPU seconds, so that other load on the machine matters less. Found:
planted pairs that are in one group. Memory: growth of the peak of the process while the groups are
made.
"""

import contextlib
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import faiss
import numpy as np
from clustered import clustered
from harness import columns, fresh, in_turns, made_gallery, memory_mb, options, ratio

from kinlens.embedder.machine import core_count
from kinlens.embedder.types import Embeddings
from kinlens.indexer.checks.duplicates import K, near_groups
from kinlens.indexer.gallery import Gallery

LEAST, COPIED = 0.99, 20


def main() -> None:
    args = options(__doc__, items=100_000, dims=[128, 512], rounds=3)
    columns(
        {f"{args.items:,} x {n}": fresh(measured, args.items, n, args.rounds) for n in args.dims}
    )


def measured(items: int, dim: int, rounds: int) -> dict[str, float | str]:
    """The figures of one gallery."""
    vectors = with_copies(items, dim)
    with tempfile.TemporaryDirectory() as folder:
        path = made_gallery(Path(folder, "g"), lambda: [vectors], items, dim)
        with contextlib.closing(Gallery.open(path)) as gallery:
            before = memory_mb()["VmHWM"]
            groups = near_groups(gallery, LEAST)
            grown = memory_mb()["VmHWM"] - before
            bare = faiss.IndexFlatIP(dim)
            bare.add(vectors)
            faiss.omp_set_num_threads(core_count())
            calls = {
                "near": partial(near_groups, gallery, LEAST),
                "bare": partial(bare.search, vectors, K + 1),
            }
            seconds = in_turns(calls, rounds, time.process_time)
            keys = {item.id: int(item.key) for item in gallery.items()}
            segment = gallery.facts().segment
    where = {keys[number]: position for position, group in enumerate(groups) for number, _ in group}
    copies = items // COPIED
    found = sum(n in where and where[n] == where.get(items - copies + n) for n in range(copies))
    return {
        "index": segment.kind if segment else "none",
        "bare self-join, s of CPU": statistics.median(seconds["bare"]),
        "`near_groups`, s of CPU": statistics.median(seconds["near"]),
        "ratio": ratio(seconds["near"], seconds["bare"]),
        "groups": len(groups),
        "planted pairs found": found / copies,
        "memory above the open gallery, MB": grown,
    }


def with_copies(items: int, dim: int) -> Embeddings:
    """Unit vectors (N, D); those at the end are copies of the first, with noise."""
    copies = items // COPIED
    vectors, _ = clustered(items - copies, dim)
    noise = np.random.default_rng(1).standard_normal((copies, dim)).astype(np.float32)
    near = vectors[:copies] + 0.06 * noise / np.sqrt(dim)
    near /= np.linalg.norm(near, axis=1, keepdims=True)
    return np.concatenate([vectors, near])


if __name__ == "__main__":
    main()
