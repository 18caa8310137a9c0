"""The model of docs/scaling.md, compared with measurements.

    python benchmarks/scaling.py replicas [--seconds 20]    one and two replicas with new images
    python benchmarks/scaling.py cache [--seconds 20]       replicas whose images repeat (Zipf)
    python benchmarks/scaling.py followers [--rounds 60]    age of the copies of a gallery
    python benchmarks/scaling.py milvus [--items 10000 100000 1000000] [--uri http://HOST:PORT]
    python benchmarks/scaling.py predict                    1 to 64 replicas, 10M to 1B vectors

**Replicas.** A replica is `kinlens-serve` on a core of its own (taskset), with a gallery in a
folder and MobileNetV2 at 224 px. `S` is a second divided by the searches per second of one replica
with eight busy connections, `cs2` the variance of a single search over its squared mean. Searches
then arrive at random (Poisson) from an open loop, round-robin to R replicas, so times between two
at one of them vary by `ca2` = 1 / R. A replica that is busy for the share `load` answers after
S + S load / (1 - load) (ca2 + cs2) / 2, with the load of the searches that arrived. The load
process shares the cores: its 0.4 ms per request is why two replicas do not reach twice the searches
of one.

**Cache.** Image popularity follows Zipf's law: the i-th most popular one has a chance proportional
to i^-s. Hits of an LRU cache of C entries follow from Che's approximation. A search is a hit or a
miss, each of its own time, so the mean and the variance of the mixture enter the same queueing
model (Kingman for one core; Allen and Cunneen with Sakasegawa's exponent for more).

**Followers.** A change waits for half an interval of the writer and half an interval of the
follower on average, and then for one publication and one update.

**Milvus.** A search waits for a fixed time and reads a share of all vectors: W = a + b N. `a` and
`b` come from the two smallest galleries, and predict the largest one.
"""

import asyncio
import contextlib
import itertools
import math
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import numpy as np
from clustered import clustered_batches, clustered_queries
from followers import entries
from harness import (
    heading,
    load,
    made_gallery,
    options,
    random_units,
    row,
    sample_images,
    serving,
    skip,
)
from load import Connection as Socket
from load import Load
from milvus_speed import K, entry, own_server
from search import IMAGES, gallery, small_bundle

from kinlens.indexer.exchange.follow import Follower
from kinlens.indexer.exchange.milvus import MilvusStore
from kinlens.indexer.exchange.publish import publish
from kinlens.indexer.gallery import Gallery

VARIED = (0.5, 1.5)
"""Factors on the interval after which a follower polls again, as in the service."""

ITEMS, CONNECTIONS = 10_000, 8
EXPONENT, ASKED, ENTRIES = 1.0, 2_000, 200
"""Exponent of Zipf's law; number of images; entries of the cache of a replica, two per search."""


# The model


def popularity(images: int, exponent: float) -> np.ndarray:
    """The chance (N,) of each image, the most popular first."""
    weights = np.arange(1, images + 1, dtype=float) ** -exponent
    return weights / weights.sum()


def hit_share(images: int, exponent: float, entries: int) -> float:
    """The share of searches whose image an LRU cache of `entries` has (Che, Tung and Wang 2002)."""
    if entries >= images:
        return 1.0
    chances = popularity(images, exponent)
    low, high = 0.0, 1.0
    while np.sum(-np.expm1(-chances * high)) < entries:
        high *= 2
    for _ in range(60):  # bisection for the time until an unused entry is evicted
        middle = (low + high) / 2
        is_long = np.sum(-np.expm1(-chances * middle)) >= entries
        low, high = (low, middle) if is_long else (middle, high)
    return float(np.sum(chances * -np.expm1(-chances * high)))


@dataclass(frozen=True)
class Work:
    """CPU seconds of a search, and their squared coefficient of variation."""

    mean_s: float
    varies: float


def mixed(share: float, hit: Work, miss: Work) -> Work:
    """The work of a search with this share of hits."""
    mean = share * hit.mean_s + (1 - share) * miss.mean_s
    square = share * hit.mean_s**2 * (1 + hit.varies)
    square += (1 - share) * miss.mean_s**2 * (1 + miss.varies)
    return Work(mean, square / mean**2 - 1)


def answer_s(work: Work, busy: float, replicas: int, cores: int = 1) -> float:
    """Mean seconds of an answer, for random searches distributed round-robin to the replicas."""
    power = math.sqrt(2 * (cores + 1)) - 1
    waits = busy**power / (1 - busy) / cores * (1 / replicas + work.varies) / 2
    return work.mean_s * (1 + waits)


def copy_age_s(every: float, follow: float, publish_s: float, update_s: float) -> float:
    """Mean seconds from a change to its appearance in a copy."""
    varied = 1 + (VARIED[1] - VARIED[0]) ** 2 / 12  # a long interval catches more changes
    return (every + publish_s + varied * follow) / 2 + publish_s + update_s


def line(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """a and b of y = a + b x through two points."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return first[1] - slope * first[0], slope


# Measurements


@dataclass
class Same(Load):
    """Sends the same images again."""

    def __post_init__(self) -> None:
        self.repeat = True


@dataclass
class Popular(Load):
    """Sends images by Zipf's law."""

    def __post_init__(self) -> None:
        chances = popularity(ASKED, EXPONENT)
        drawn = np.random.default_rng(self.start % 2**32).choice(ASKED, 100_000, p=chances)
        files = self.images
        self.images = [files[n % len(files)] + b"%016d" % n for n in drawn.tolist()]
        self.repeat = True


@contextlib.contextmanager
def two_replicas(**environment: str) -> Iterator[tuple[Path, list[str], list[bytes]]]:
    """A folder, the addresses of two replicas on a core each, and images to search with."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2 or shutil.which("taskset") is None:
        skip("needs two cores and taskset")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as running:
        folder = Path(name)
        images = sample_images(folder / "images", IMAGES)
        bundle = small_bundle(folder, "mobilenet_v2")
        made = gallery(folder / "gallery", bundle, ITEMS)
        os.environ |= environment
        services = [serving(bundle, made, prefix=("taskset", "-c", f"{core}")) for core in cores]
        urls = [running.enter_context(service).url for service in services]
        yield folder, urls, [path.read_bytes() for path in sorted(images.glob("*.jpg"))]


def replicas(seconds: float, loads: list[float]) -> None:
    """One and two replicas with new images."""
    with two_replicas() as (folder, urls, files):
        work = work_of(urls, folder, files, seconds, Load)
        print(f"S {1e3 * work.mean_s:.1f} ms, cs2 {work.varies:.2f}")
        heading("replicas", "offered load", "searches/s", "model ms", "measured ms", "error")
        for count, busy in itertools.product((1, 2), loads):
            rate = count * busy / work.mean_s
            found = asyncio.run(offered(urls[:count], files, rate, seconds))
            row(count, busy, len(found) / seconds, *compared(found, work, count, seconds))


def cache(seconds: float, loads: list[float]) -> None:
    """One and two replicas with images that repeat."""
    with two_replicas(KINLENS_CACHE_MAX_ENTRIES=str(ENTRIES)) as (folder, urls, files):
        hit = work_of(urls[:1], folder, files[:1], seconds, Same)
        miss = work_of(urls[:1], folder, files, seconds, Load)
        print(f"hit {1e3 * hit.mean_s:.2f} ms, miss {1e3 * miss.mean_s:.2f} ms")
        heading("replicas", "offered load", "searches/s", "hits, model", "hits", "model ms",
                "measured ms", "error")  # fmt: skip
        share = hit_share(ASKED, EXPONENT, ENTRIES // 2)  # an answer and a vector each
        work = mixed(share, hit, miss)
        for count, busy in itertools.product((1, 2), loads):
            rate = count * busy / work.mean_s
            asyncio.run(offered(urls[:count], files, rate, seconds / 2, Popular))  # fills the cache
            before = hits_of(urls[:count])
            found = asyncio.run(offered(urls[:count], files, rate, seconds, Popular))
            hits, asked = np.subtract(hits_of(urls[:count]), before)
            row(count, busy, len(found) / seconds, f"{share:.0%}", f"{hits / asked:.0%}",
                *compared(found, work, count, seconds))  # fmt: skip


def compared(found: list[float], work: Work, count: int, seconds: float) -> tuple[object, ...]:
    """Milliseconds of the model and of the measurement, and the error of the model."""
    came = len(found) / seconds / count * work.mean_s
    model, mean = 1e3 * answer_s(work, came, count), 1e3 * statistics.mean(found)
    return model, mean, f"{model / mean - 1:+.0%}"


async def offered(
    urls: list[str], files: list[bytes], rate: float, seconds: float, kind: type[Load] = Load
) -> list[float]:
    """Seconds of each search of a random arrival process with `rate` per second, open loop."""
    starts = (random.randrange(10**12) for _ in urls)
    loads = [kind(url.removeprefix("http://"), files, start=start)
             for url, start in zip(urls, starts, strict=False)]  # fmt: skip
    free: list[list[Socket]] = [[] for _ in loads]

    async def ask(number: int) -> None:
        pool = free[number]
        connection = pool.pop() if pool else await loads[number].connected()
        await loads[number].ask(connection)
        pool.append(connection)

    ends, tasks = time.monotonic() + seconds, [asyncio.create_task(ask(0))]
    while time.monotonic() < ends:
        await asyncio.sleep(random.expovariate(rate))
        tasks.append(asyncio.create_task(ask(len(tasks) % len(loads))))
    await asyncio.gather(*tasks)
    for connection in (connection for pool in free for connection in pool):
        connection[1].close()
    assert not any(status != "200" for one in loads for status in one.statuses)
    return [latency for one in loads for latency in one.latencies]


def work_of(
    urls: list[str], folder: Path, files: list[bytes], seconds: float, kind: type[Load]
) -> Work:
    """Work of a search: the mean from busy connections, the variation from single searches."""
    images = folder / kind.__name__
    images.mkdir()
    for number, data in enumerate(files):
        (images / f"{number:04d}.jpg").write_bytes(data)
    flags = ["--repeat"] if kind is Same else ["--start", 10_000]
    for url in urls:
        load(url, images, CONNECTIONS, min(2, seconds), *flags)
    busiest = min(5, seconds)
    mean_s = 1 / statistics.mean(load(u, images, CONNECTIONS, busiest, *flags)["qps"] for u in urls)
    alone = asyncio.run(offered(urls[:1], files, 0.05 / mean_s, min(20, seconds), kind))
    return Work(mean_s, (statistics.pstdev(alone) / statistics.mean(alone)) ** 2)


def hits_of(urls: list[str]) -> tuple[float, float]:
    """Searches answered from a cache, and all searches, by the metrics of the replicas."""
    found = asked = 0.0
    for url in urls:
        for text in httpx.get(f"{url}/metrics").text.splitlines():
            if text.startswith('kinlens_cache_lookups_total{kind="answer"'):
                count = float(text.split()[-1])
                asked += count
                found += count * ('level="miss"' not in text)
    return found, asked


def followers(rounds: int, items: int, dim: int = 128) -> None:
    """One and three copies: the age of a change when each of them has it."""
    heading("items", "followers", "every, s", "follow, s", "publish ms", "update ms", "model s",
            "measured s", "error")  # fmt: skip
    for count, pace in itertools.product((1, 3), (0.5, 2.0)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            made_gallery(folder / "g", lambda: random_units(items, dim), items, dim)
            publish_ms, update_ms, ages = aged(folder, count, pace, rounds, dim)
            model = copy_age_s(pace, pace, publish_ms / 1e3, update_ms / 1e3)
            mean = statistics.mean(ages)
            row(items, count, pace, pace, publish_ms, update_ms, model, mean,
                f"{model / mean - 1:+.0%}")  # fmt: skip


def aged(
    folder: Path, count: int, pace: float, rounds: int, dim: int
) -> tuple[float, float, list[float]]:
    """Milliseconds of a publication and of an update, and the age of each change at each copy."""
    address, context = str(folder / "published"), multiprocessing.get_context("spawn")
    publish(folder / "g", address)
    pipes, processes = [], []
    for number in range(count):
        ours, theirs = context.Pipe()
        arguments = (address, folder / f"copy-{number}", pace, theirs)
        processes.append(context.Process(target=copying, args=arguments))
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    over, published = threading.Event(), []

    def keep_publishing() -> None:
        while not over.wait(pace):
            report = publish(folder / "g", address)
            if report.uploaded_bytes:
                published.append(1e3 * report.elapsed_s)

    thread = threading.Thread(target=keep_publishing)
    thread.start()
    changed: list[tuple[int, float]] = []
    with contextlib.closing(Gallery.open(folder / "g")) as writer:
        for number in range(rounds):
            time.sleep(random.uniform(0, 2 * pace))
            writer.add(entries(f"{number}", 10, dim))
            changed.append((writer.size, time.time()))
        time.sleep(2 * pace + 1)
    over.set()
    thread.join()
    ages, updates = [], []
    for pipe in pipes:
        pipe.send(None)
        seen, took = pipe.recv()
        updates += took
        ages += [
            min(at for size, at in seen if size >= wanted) - since for wanted, since in changed
        ]
    for process in processes:
        process.join()
    return statistics.median(published), statistics.median(updates), ages


def copying(address: str, folder: Path, pace: float, orders: Connection) -> None:
    """Follow until the order to stop, and report when the copy had which size."""
    follower = Follower(address, folder)
    follower.update()
    seen, updates = [], []
    with contextlib.closing(Gallery.open(folder)) as opened:
        orders.send(None)
        while not orders.poll(random.uniform(*VARIED) * pace):
            started = time.perf_counter()
            if follower.update():
                updates.append(1e3 * (time.perf_counter() - started))
                seen.append((opened.size, time.time()))
    orders.recv()
    orders.send((seen, updates))


def milvus(items: list[int], dim: int, uri: str, searches: int = 100) -> None:
    """The wait for Milvus by the size of the gallery, at `Bounded`."""
    heading("items", "index", "published, s", "W measured, ms", "W by a line, ms", "error")
    found: list[tuple[float, float]] = []
    with contextlib.nullcontext(uri) if uri else own_server() as address:
        for count in items:
            vectors = itertools.chain.from_iterable(clustered_batches(count, dim))
            rows = (entry(number, vector) for number, vector in enumerate(vectors))
            started = time.perf_counter()
            with contextlib.closing(
                MilvusStore.publish(address, "bench", rows, dim=dim, bundle_id="b" * 64)
            ) as made:
                index = made.index_text()
            seconds, query = time.perf_counter() - started, clustered_queries(count, dim, queries=1)
            with contextlib.closing(
                MilvusStore.open(address, "bench", consistency="Bounded", timeout_s=60)
            ) as store:
                times = []
                for _ in range(searches + 5):
                    started = time.perf_counter()
                    store.search(query, K)
                    times.append(1e3 * (time.perf_counter() - started))
            measured, model, error = statistics.median(times[5:]), "", ""
            if len(found) >= 2:
                start, slope = line(found[-2], found[-1])
                model = start + slope * count
                error = f"{model / measured - 1:+.0%}"
            found.append((count, measured))
            row(count, index, seconds, measured, model, error)


# Predictions


def predict() -> None:
    """1 to 64 replicas at a load of 0.7, and Milvus from 10 million to a billion vectors."""
    heading("replicas of 4 cores", "hits", "searches/s", "mean ms")
    hit, miss = Work(0.002, 0.03), Work(0.0143, 0.03)
    for share, replicas in itertools.product((0.0, 0.5), (1, 2, 4, 8, 16, 32, 64)):
        work = mixed(share, hit, miss)
        row(replicas, f"{share:.0%}", int(0.7 * 4 * replicas / work.mean_s),
            1e3 * answer_s(work, 0.7, replicas, cores=4))  # fmt: skip


def main() -> None:
    asked = options(
        __doc__, "part", part="predict", seconds=20.0, loads=[0.3, 0.5, 0.7], rounds=40,
        items=[10_000, 100_000], dim=512, uri="",
    )  # fmt: skip
    if asked.part in ("replicas", "cache"):
        {"replicas": replicas, "cache": cache}[asked.part](asked.seconds, asked.loads)
    elif asked.part == "followers":
        followers(asked.rounds, asked.items[0])
    elif asked.part == "milvus":
        milvus(asked.items, asked.dim, asked.uri)
    else:
        predict()


if __name__ == "__main__":
    main()
