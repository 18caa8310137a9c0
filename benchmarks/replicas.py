"""The queueing model of docs/scaling.md compared with one and two running replicas.

    python benchmarks/replicas.py [--seconds 20] [--loads 0.3 0.5 0.7]

A replica is `kinlens-serve` on a core of its own (taskset), with a gallery in a folder, MobileNetV2
at 224 px and new images. Measured first: `S`, a second divided by the searches per second of one
replica with eight busy connections, and the variation of the time of a single search (`cs2`,
variance over squared mean). Then searches arrive at random (Poisson) from an open loop,
round-robin to R replicas, so that the times between two at one of them vary by `ca2` = 1 / R. The
model is that of the page for one core (Kingman): a replica that is busy for the share `load`
answers after S + S load / (1 - load) (ca2 + cs2) / 2, with the load of the searches that arrived.
The error is that of the mean. The load process shares the cores: its 0.4 ms per request is why two
replicas do not reach twice the searches of one.
"""

import asyncio
import contextlib
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from harness import heading, load, options, row, sample_images, serving, skip
from load import Connection, Load
from search import IMAGES, gallery, small_bundle

ITEMS, CONNECTIONS = 10_000, 8


def main() -> None:
    args = options(__doc__, seconds=20.0, loads=[0.3, 0.5, 0.7])
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2 or shutil.which("taskset") is None:
        skip("needs two cores and taskset")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as running:
        folder = Path(name)
        images, bundle = (
            sample_images(folder / "images", IMAGES),
            small_bundle(folder, "mobilenet_v2"),
        )
        made = gallery(folder / "gallery", bundle, ITEMS)
        files = [path.read_bytes() for path in sorted(images.glob("*.jpg"))]
        replicas = (serving(bundle, made, prefix=("taskset", "-c", f"{core}")) for core in cores)
        urls = [running.enter_context(replica).url for replica in replicas]
        for url in urls:
            load(url, images, CONNECTIONS, min(2, args.seconds))
        busiest = min(5, args.seconds)
        qps = [load(url, images, CONNECTIONS, busiest, "--start", 10_000)["qps"] for url in urls]
        service_s = 1 / statistics.mean(qps)
        alone = asyncio.run(offered(urls[:1], files, 0.05 / service_s, args.seconds))
        varies = (statistics.pstdev(alone) / statistics.mean(alone)) ** 2
        print(f"S {1e3 * service_s:.1f} ms, alone {1e3 * statistics.mean(alone):.1f} ms, ", end="")
        print(f"cs2 {varies:.2f}")
        heading("replicas", "offered load", "searches/s", "model ms", "measured ms", "error")
        for count in (1, 2):
            for share in args.loads:
                rate = count * share / service_s
                found = asyncio.run(offered(urls[:count], files, rate, args.seconds))
                busy = len(found) / args.seconds / count * service_s
                waits = busy / (1 - busy) * (1 / count + varies) / 2
                model, mean = 1e3 * service_s * (1 + waits), 1e3 * statistics.mean(found)
                error = f"{model / mean - 1:+.0%}"
                row(count, share, len(found) / args.seconds, model, mean, error)


async def offered(
    urls: list[str], files: list[bytes], rate: float, seconds: float, kind: type[Load] = Load
) -> list[float]:
    """Seconds of each search of a random arrival process with `rate` per second, open loop."""
    starts = (random.randrange(10**12) for _ in urls)
    loads = [kind(url.removeprefix("http://"), files, start=start)
             for url, start in zip(urls, starts, strict=False)]  # fmt: skip
    free: list[list[Connection]] = [[] for _ in loads]

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


if __name__ == "__main__":
    main()
