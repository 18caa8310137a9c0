"""Copies that follow a published gallery: first publication, changes, and effect on searches.

    python benchmarks/followers.py [--items 10000 100000 1000000] [--dim 128] [--followers 1 3]

One writer publishes to a folder on this machine. Each follower is a process with the copy, which
polls for snapshots continuously and searches at the same time. First it copies the whole gallery.
Then the writer adds `--changes` items in each of `--rounds`, and publishes. `lag` is the time from
the acknowledged change to the moment when every follower has it, publication included. The last
columns compare the searches of a follower during these rounds with searches before them.
`bare copy` is the named ceiling: the files of the gallery copied by the kernel, and synced.
"""

import contextlib
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from harness import heading, made_gallery, options, random_units, row

from kinlens.indexer.exchange.follow import Follower
from kinlens.indexer.exchange.publish import publish
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import Entry

K = 10


def main() -> None:
    asked = options(
        __doc__, items=[10_000, 100_000], dim=128, followers=[1, 3], rounds=20, changes=100
    )
    heading(
        "items",
        "followers",
        "publish, s",
        "copy, s",
        "of the bare copy",
        "sent MB",
        "sent per round, MB",
        "lag p50, s",
        "lag p95, s",
        "search p50 before, ms",
        "during, ms",
    )
    for items in asked.items:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            made_gallery(folder / "g", lambda n=items: random_units(n, asked.dim), items, asked.dim)
            for count in asked.followers:
                measure(folder, items, asked.dim, count, asked.rounds, asked.changes)


def measure(folder: Path, items: int, dim: int, count: int, rounds: int, changes: int) -> None:
    address, context = folder / f"published-{count}", multiprocessing.get_context("spawn")
    first = publish(folder / "g", str(address))
    bare_s = bare_copy(folder)
    pipes, processes = [], []
    for number in range(count):
        ours, theirs = context.Pipe()
        arguments = (str(address), folder / f"copy-{count}-{number}", dim, theirs)
        processes.append(context.Process(target=follow, args=arguments))
        processes[-1].start()
        pipes.append(ours)
    copied = [pipe.recv() for pipe in pipes]
    before = [pipe.recv() for pipe in pipes]
    lags, sent = [], []
    with contextlib.closing(Gallery.open(folder / "g")) as writer:
        for number in range(rounds):
            writer.add(entries(f"{count}-{number}", changes, dim))
            started = time.perf_counter()
            sent.append(publish(folder / "g", str(address)).uploaded_bytes)
            for pipe in pipes:
                pipe.send(writer.version)
            lags.append(max(pipe.recv() for pipe in pipes) - started)
    for pipe in pipes:
        pipe.send(None)
    during = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    row(
        items,
        count,
        first.elapsed_s,
        statistics.median(copied),
        f"{statistics.median(copied) / bare_s:.1f}",
        first.uploaded_bytes / 1e6,
        statistics.median(sent) / 1e6,
        *np.percentile(lags, [50, 95]),
        statistics.median(before),
        statistics.median(during),
    )


def bare_copy(folder: Path) -> float:
    """Seconds to copy the files of the gallery and sync them to the disk."""
    started = time.perf_counter()
    shutil.copytree(folder / "g", folder / "bare")
    for file in (folder / "bare").rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - started
    shutil.rmtree(folder / "bare")
    return seconds


def entries(name: str, count: int, dim: int) -> list[Entry]:
    vectors = next(random_units(count, dim, seed=abs(hash(name)) % 2**32))
    return [
        Entry(f"{name}-{n}", vector, f"{abs(hash((name, n))):064x}", {"n": n})
        for n, vector in enumerate(vectors)
    ]


def follow(address: str, folder: Path, dim: int, orders: Connection) -> None:
    """Copy, search, and follow; each order is the version to wait for, None means stop."""
    follower, query = Follower(address, folder), next(random_units(1, dim, seed=5))
    started = time.perf_counter()
    follower.update()
    orders.send(time.perf_counter() - started)
    with contextlib.closing(Gallery.open(folder)) as gallery:
        over, times = threading.Event(), searches(gallery, query, 200)
        orders.send(statistics.median(times[20:]))
        during: list[float] = []

        def search() -> None:
            while not over.is_set():
                during.extend(searches(gallery, query, 1))
                time.sleep(0.01)

        thread = threading.Thread(target=search)
        thread.start()
        while (version := orders.recv()) is not None:
            while gallery.version != version:
                follower.update()
            orders.send(time.perf_counter())
        over.set()
        thread.join()
        orders.send(statistics.median(during))


def searches(gallery: Gallery, query: np.ndarray, count: int) -> list[float]:
    """Milliseconds of each search."""
    found = []
    for _ in range(count):
        started = time.perf_counter()
        gallery.search(query, K)
        found.append(1e3 * (time.perf_counter() - started))
    return found


if __name__ == "__main__":
    main()
