"""Embedding on a Ray cluster compared with a bare loop on the same cores.

    python benchmarks/cluster.py [--images 20000] [--backbone mobilenet_v2] [--shard-size 256]
                                 [--kill]

Ceiling: one thread per core reads, decodes, preprocesses and embeds the same files with the same
bundle in batches of 32, and keeps nothing. `embed` is timed from its first finished shard to its
last, without the start of Ray, which is printed as well. Target: 0.9 of the ceiling. Memory is the
resident set of all actors, after a fifth and the maximum later: it must not grow.
With `--kill` an actor is killed (SIGKILL) at half of the shards, and every vector is compared with
the output of `kinlens-index build`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from harness import BIN, heading, kinlens, options, row, sample_images, verdict
from search import small_bundle

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.machine import core_count
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.shards import VectorShards

BATCH, FILES = 32, 500


def main() -> None:
    args = options(__doc__, images=20_000, backbone="mobilenet_v2", shard_size=256, kill=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = small_bundle(folder, args.backbone)
        files = sorted(sample_images(folder / "images", FILES).iterdir())
        lines = (f"k{n},{file.name}" for n, file in enumerate(islice(cycle(files), args.images)))
        listed = folder / "images" / "list.csv"
        listed.write_text("\n".join(["key,path", *lines]) + "\n")
        bare = bare_loop(bundle, [*islice(cycle(files), min(args.images, 4000))])
        half = args.images // args.shard_size // 2 if args.kill else 0
        rate, start_s, memory = embedded(listed, bundle, folder / "vectors", args.shard_size, half)
        different = compared(folder, listed, bundle) if args.kill else None
        again = bare_loop(bundle, [*islice(cycle(files), min(args.images, 4000))])
        size = VectorShards(str(folder / "vectors")).manifest.images
    heading("", "images/s", "")
    row("bare loop, before and after", bare, again)
    row("embed on Ray", rate, f"{size:,} images, {start_s:.0f} s to the first shard")
    row("actors, MB after a fifth and maximum", memory[0], memory[1])
    if different is not None:
        row("vectors different from build, after a kill", different, f"of {size:,}")
    verdict("embed / bare loop", rate / ((bare + again) / 2), 0.9)


def bare_loop(bundle: Path, files: list[Path]) -> float:
    """Images per second."""
    embedder = OnnxEmbedder.open(Bundle.open(bundle), SessionSettings(threads=1))

    def work(some: list[Path]) -> None:
        embedder.embed(np.stack([embedder.preprocess(file.read_bytes()) for file in some]))

    parts = [files[start : start + BATCH] for start in range(0, len(files), BATCH)]
    work(parts[0])
    started = time.perf_counter()
    with ThreadPoolExecutor(core_count()) as cores:
        list(cores.map(work, parts))
    return len(files) / (time.perf_counter() - started)


def compared(folder: Path, listed: Path, bundle: Path) -> int:
    """The number of vectors that differ in any bit from a build without Ray."""
    flat = "--index", "flat"
    kinlens("index", "build", "--csv", listed, "--bundle", bundle, "--out", folder / "built", *flat)
    kinlens("index", "import", folder / "vectors", "--out", folder / "imported", *flat)
    built, imported = (Gallery.open(folder / name) for name in ("built", "imported"))
    with contextlib.closing(built), contextlib.closing(imported):
        known = {e.key: e.vector.tobytes() for batch in built.scan() for e in batch}
        found = {e.key: e.vector.tobytes() for batch in imported.scan() for e in batch}
    return sum(known.get(key) != vector for key, vector in found.items()) + len(known) - len(found)


def embedded(
    listed: Path, bundle: Path, out: Path, shard_size: int, kill_at: int
) -> tuple[float, float, tuple[float, float]]:
    """Images per second between the first and the last shard, seconds to the first, and memory."""
    words = ("--bundle", bundle, "--out", out, "--shard-size", shard_size)
    seen: list[tuple[float, int, float]] = []  # time, shards, MB of all actors
    killed: list[int] = []
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.wait(0.5):
            there = len(list(out.glob("parts/*.parquet")))
            seen.append((time.perf_counter(), there, actors_mb()))
            if kill_at and there >= kill_at and not killed:
                killed.append(actors()[0])
                os.kill(killed[0], signal.SIGKILL)

    watcher = threading.Thread(target=watch)
    started = time.perf_counter()
    watcher.start()
    subprocess.run(
        [str(BIN / "kinlens-index"), "embed", str(listed), *map(str, words)],
        check=True,
        stdout=sys.stderr,
    )
    is_done.set()
    watcher.join()
    first = next(one for one in seen if one[1])
    last = max(seen, key=lambda one: (one[1], -one[0]))
    rate = (last[1] - first[1]) * shard_size / (last[0] - first[0])
    later = [one[2] for one in seen if one[1] >= last[1] / 5]
    return rate, first[0] - started, (later[0], max(later))


def actors() -> list[int]:
    """The process ids of the actors on this machine."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cmdline").read_bytes().startswith(b"ray::MapWorker"):
                found.append(int(entry.name))
    return found


def actors_mb() -> float:
    """The resident set of all actors."""
    total = 0.0
    for pid in actors():
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += sum(float(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return total / 1024


if __name__ == "__main__":
    main()
