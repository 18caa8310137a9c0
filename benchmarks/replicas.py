"""The queueing model of docs/scaling.md beside one and two replicas that run.

    python benchmarks/replicas.py [--seconds 20] [--loads 0.3 0.5 0.7]

A replica is `kinlens-serve` on a core of its own (taskset), with a gallery in a folder, MobileNetV2
at 224 px and new images. Measured first: `S`, a second divided by the searches that one replica
answers in it when eight connections ask without a pause, and `T`, the mean time of a search that
comes alone. Then searches come at random (Poisson) from an open loop, in turn to each replica, so
many that a replica is busy for the share `load`: the model says T + S load / (1 - load), M/M/1, as
the page does for one core. The error is that of the mean. The load shares the cores: its part a
request, about 0.4 ms, is what keeps two replicas from twice the searches of one.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from load import Load, parse
from running import BIN, free_port, started
from search import gallery, load, pictures, small_bundle

from embedder.session import OnnxEmbedder

ITEMS = 10_000
CONNECTIONS = 8


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images, bundle = pictures(folder), small_bundle(folder, "mobilenet_v2")
        made = gallery(folder / "gallery", OnnxEmbedder.open(bundle), ITEMS)
        files = [path.read_bytes() for path in sorted(images.glob("*.jpg"))]
        with contextlib.ExitStack() as running:
            urls = [running.enter_context(replica(core, bundle, made)) for core in (0, 1)]
            for url in urls:
                load(url, images, CONNECTIONS, 2)
            most = [load(url, images, CONNECTIONS, 5, "--start", "10000")[0].qps for url in urls]
            service_s = 1 / statistics.mean(most)
            alone_s = statistics.mean(
                asyncio.run(offered(urls[:1], files, 0.05 / service_s, options.seconds, "alone"))
            )
            print(f"S {1e3 * service_s:.1f} ms, T {1e3 * alone_s:.1f} ms")
            print("replicas  load  searches/s  model ms  measured ms  error")
            for count in (1, 2):
                for share in options.loads:
                    rate = count * share / service_s
                    tag = f"{count} {share}"
                    found = asyncio.run(offered(urls[:count], files, rate, options.seconds, tag))
                    model = 1e3 * (alone_s + service_s * share / (1 - share))
                    mean = 1e3 * statistics.mean(found)
                    print(
                        f"{count:8}  {share:4.2f}  {len(found) / options.seconds:10.1f}  "
                        f"{model:8.1f}  {mean:11.1f}  {model / mean - 1:+5.0%}",
                        flush=True,
                    )


@contextlib.contextmanager
def replica(core: int, bundle: Path, made: Path) -> Iterator[str]:
    """The URL of a service that has one core."""
    port = free_port()
    words = ["--bundle", bundle, "--gallery", f"g={made}", "--port", port, "--log-level", "info"]
    command = ["taskset", "-c", str(core), BIN / "kinlens-serve", *map(str, words)]
    with started(command, f"http://127.0.0.1:{port}") as url:
        yield url


async def offered(
    urls: list[str], files: list[bytes], rate: float, seconds: float, tag: str
) -> list[float]:
    """Seconds of each search of those that come at random, `rate` a second, whatever is waiting."""
    source = random.Random(tag)
    hosts = [url.removeprefix("http://").split(":") for url in urls]
    loads = [
        Load(host, int(port), files, repeat=False, ends=0, start=source.randrange(10**12))
        for host, port in hosts
    ]
    free: list[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = [[] for _ in loads]
    found: list[float] = []

    async def ask(number: int) -> None:
        began, pool = time.perf_counter(), free[number]
        one = loads[number]
        connection = pool.pop() if pool else await asyncio.open_connection(one.host, one.port)
        reader, writer = connection
        writer.write(one.next_request())
        status, length = parse(await reader.readuntil(b"\r\n\r\n"))
        await reader.readexactly(length)
        assert status == "200", status
        found.append(time.perf_counter() - began)
        pool.append(connection)

    ends, asked = time.monotonic() + seconds, []
    while time.monotonic() < ends:
        await asyncio.sleep(source.expovariate(rate))
        asked.append(asyncio.create_task(ask(len(asked) % len(loads))))
    await asyncio.gather(*asked)
    for _, writer in (connection for pool in free for connection in pool):
        writer.close()
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20, help="of each row")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    return parser.parse_args()


if __name__ == "__main__":
    main()
