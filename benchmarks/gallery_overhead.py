"""What a gallery adds to FAISS: a single query, the rows of its hits, and batches.

    python benchmarks/gallery_overhead.py [--rounds 31] [--json figures.json]

`raw` is the gallery's own index, opened with FAISS alone and searched with its tuned parameters;
`nearest` gives scores and numbers, as FAISS does; `search` fetches keys and attributes as well.
Each round lets the three take turns over the same queries, in random order; a figure is the median
over the rounds of a difference, or ratio, of medians. Single queries, which run on one thread, are
timed by what that thread has worked, so that neighbours on the machine count less. "Undisturbed":
the difference of the least rounds, which neighbours that empty the caches have spared.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import faiss
import numpy as np
from clustered import clustered

from embedder.machine import core_count
from embedder.types import Embeddings
from indexer.gallery import Gallery
from indexer.index.plan import IndexSettings
from indexer.index.segment import INDEX, VECTORS, read_manifest
from indexer.types import Entry

K, BATCH = 10, 256
NEAREST_US, SEARCH_US, BATCH_PART = 25.0, 70.0, 0.97
SETTINGS = ((10_000, 128, "flat"), (10_000, 512, "flat"), (50_000, 128, "ivf-pq"))
_SINGLE, _BATCHES = 100, 4  # calls of each contestant in a round

Call = Callable[[Embeddings], object]


def made(folder: Path, n: int, dim: int, kind: str) -> tuple[Gallery, Embeddings]:
    """A compacted gallery of `n` items with one attribute, and queries that are not in it."""
    vectors, queries = clustered(n, dim)
    gallery = Gallery.create(folder, name="overhead", bundle_id="b", dim=dim)
    gallery.add(
        Entry(f"{row:09d}", vector, f"{row:064x}", {"bucket": row % 1000})
        for row, vector in enumerate(vectors)
    )
    gallery.compact(IndexSettings(kind=kind))
    gallery.nearest(queries[:1], K)
    return gallery, queries


def raw_faiss(folder: Path) -> faiss.Index:
    """The index of the gallery's one segment, as FAISS itself opens it."""
    segment = next(folder.glob("versions/*/segments/*/segment.json")).parent
    manifest = read_manifest(segment)
    flat = faiss.IndexFlatIP(manifest.dim)
    flat.add(np.load(segment / VECTORS))
    if INDEX not in manifest.files:
        return flat
    codes = faiss.read_index(str(segment / INDEX))
    codes.nprobe = manifest.effort
    index = faiss.IndexRefine(codes, flat)
    index.k_factor = manifest.k_factor
    return index


def median_s(call: Call, asked: Sequence[Embeddings], clock: Callable[[], float]) -> float:
    """Median time of a call in seconds; the first only takes the caches back."""
    call(asked[0])
    seconds = []
    for queries in asked:
        started = clock()
        call(queries)
        seconds.append(clock() - started)
    return statistics.median(seconds)


def rounds_of(
    calls: dict[str, Call], asked: Sequence[Embeddings], each: int, rounds: int, threads: int
) -> dict[str, list[float]]:
    """Median times of each contestant, by round."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        some = [asked[(number * each + turn) % len(asked)] for turn in range(each)]
        for name in random.sample(list(calls), len(calls)):
            faiss.omp_set_num_threads(threads)
            clock = time.thread_time if len(asked[0]) == 1 else time.perf_counter
            found[name].append(median_s(calls[name], some, clock))
    return found


def measured(folder: Path, n: int, dim: int, kind: str, rounds: int) -> dict[str, float]:
    """The figures of one gallery."""
    gallery, queries = made(folder, n, dim, kind)
    index = raw_faiss(folder)
    calls: dict[str, Call] = {
        "raw": lambda some: index.search(some, K),
        "nearest": lambda some: gallery.nearest(some, K),
        "search": lambda some: gallery.search(some, K),
    }
    ours, theirs = gallery.nearest(queries, K)[0], index.search(queries, K)[0]
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    single = rounds_of(calls, [query[None] for query in queries], _SINGLE, rounds, threads=1)
    wrapped = np.concatenate([queries, queries[:BATCH]])
    batches = [wrapped[start : start + BATCH] for start in range(0, len(queries), BATCH)]
    many = rounds_of(calls, batches, _BATCHES, rounds, threads=core_count())
    gallery.close()

    def added(one: str, other: str) -> float:
        pairs = zip(single[one], single[other], strict=True)
        return 1e6 * statistics.median(after - before for after, before in pairs)

    def least(one: str, other: str) -> float:
        return 1e6 * (min(single[one]) - min(single[other]))

    def part(name: str) -> float:
        pairs = zip(many["raw"], many[name], strict=True)
        return statistics.median(raw / own for raw, own in pairs)

    return {
        "one query, raw FAISS, us": 1e6 * statistics.median(single["raw"]),
        f"`nearest` adds to it, us (at most {NEAREST_US:.0f})": added("nearest", "raw"),
        f"`search` adds to `nearest`, us (at most {SEARCH_US:.0f})": added("search", "nearest"),
        "`nearest` adds, undisturbed": least("nearest", "raw"),
        "`search` adds, undisturbed": least("search", "nearest"),
        f"batches of {BATCH}: `nearest` of raw FAISS (at least {BATCH_PART})": part("nearest"),
        f"batches of {BATCH}: `search` of raw FAISS": part("search"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    figures = {}
    for n, dim, kind in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            name = f"{n // 1000}k x {dim}, {kind}"
            figures[name] = measured(Path(folder) / "g", n, dim, kind, arguments.rounds)
    print(f"| | {' | '.join(figures)} |\n|{'---|' * (1 + len(figures))}")
    for row in next(iter(figures.values())):
        print(f"| {row} | {' | '.join(f'{found[row]:.3g}' for found in figures.values())} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
