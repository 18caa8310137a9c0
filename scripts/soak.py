"""Hours of load: searches, changes, rebuilds, faults, killed decoders; memory must not grow.

    make soak HOURS=1              or: python scripts/soak.py --hours 1

Starts redis-server (if installed) and kinlens-serve with a model of random weights, then runs all
of these concurrently: searches with new and repeated images, crops, filters, likes and damaged
files; adding and deleting items; rebuilding, reloading and compacting galleries; every half minute
a fault (Redis paused, Redis killed, a decoding process killed). At the end it prints requests by
status, wrong answers, and the memory slope of the whole process tree after its first third, with
its range.

Exit code 1 if an answer was wrong or unexpected, if more than 1 in 20 requests was refused, if the
service did not become ready again, or if memory certainly grows by more than the limit. Runs of
less than half an hour print the slope without judging it.
"""

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from scipy import stats

from kinlens.calls import ImageSearchOptions
from kinlens.client import Client
from kinlens.errors import ClientError, ProblemError
from tests.support.own_process import OwnProcess, command_of, own_process
from tests.support.servers import RedisServer

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from harness import BIN, kinlens, tree, tree_mb

JUDGED_S = 1200.0
"""Minimum duration of the last two thirds for their slope to count."""

MOST_REFUSED = 0.05
READY_S, JOB_S = 60.0, 120.0
SEARCHERS, DECODER = 3, "kinlens.service.encoding"
KINDS = ("again", "new", "crop", "filter", "damaged", "like")
EXPECTED, REFUSED = {200, 422, 429, 503}, {429, 503}
SMALL_CACHE = {"cache_max_bytes": 2_000_000}
"""Small enough that the cache is full, and stop growing, after the first minutes."""

LOG = Path(".kinlens/soak.log")
MEDIANS = 32
Points = list[tuple[float, float]]
"""Pairs of seconds and MB."""


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as name:
        try:
            with open_shop(Path(name), options) as shop:
                tally = run(shop, 3600 * options.hours, options.period_s)
        except (subprocess.SubprocessError, ClientError) as error:
            print(f"soak: {error}", file=sys.stderr)
            return 1
    if status := shop.service.process.returncode:
        tally.fault(f"the service exited with status {status}; its log is {LOG}")
    return report(tally, options.limit_mb_per_hour)


# The service, and its parts: images, model, gallery, key and Redis


@dataclass(frozen=True)
class Shop:
    """A running service; `images` are the images of its gallery `shop`, below `root`."""

    service: OwnProcess
    key: str
    root: Path
    images: list[Path]
    build: list[str]
    redis: RedisServer | None

    def client(self, retries: int = 0) -> Client:
        """A client with the key of an administrator."""
        return Client(self.service.url, key=self.key, timeout_s=60, retries=retries)

    def name(self, image: Path) -> str:
        """The key of an image in the gallery."""
        return image.relative_to(self.root).as_posix()


@contextlib.contextmanager
def open_shop(folder: Path, options: argparse.Namespace) -> Iterator[Shop]:
    """Create images, model, gallery, key, Redis and a service; it must stop cleanly."""
    root = (options.images or folder / "images").resolve()
    bundle = (options.bundle or folder / "bundle").resolve()
    gallery, state = folder / "gallery", folder / "state"
    if options.images is None:
        sizes = ("--products", 20, "--views", 10, "--size-px", 160)
        kinlens("train", "data", "render", root, *sizes)
    if options.bundle is None:
        plain = ("--backbone", "mobilenet_v2", "--weights", "none")
        sizes = ("--size-px", 96, "--resize-px", 96)
        kinlens("train", "export", "--out", bundle, *plain, *sizes)
    words = ("build", root, "--bundle", bundle, "--out", gallery)
    build = [str(BIN / "kinlens-index"), *map(str, words)]
    subprocess.run(build, check=True)
    command = [BIN / "kinlens-serve", "keys", "create", "soak", "--scope", "admin"]
    made = subprocess.run([*command, "--state", state], check=True, capture_output=True, text=True)
    key = next(word for word in made.stdout.split() if word.startswith("kl_"))
    images = sorted(path for path in root.rglob("*") if path.suffix in (".jpg", ".png"))
    LOG.parent.mkdir(exist_ok=True)
    flags = ("--bundle", str(bundle), "--gallery", f"shop={gallery}", "--state", str(state))
    with contextlib.ExitStack() as running:
        redis = RedisServer(folder) if shutil.which("redis-server") else None
        print("Redis runs, and is paused and killed" if redis else "no Redis: it is not installed")
        if redis is not None:
            redis.start()
            running.callback(redis.kill)
        settings = SMALL_CACHE | {"redis_url": redis.url if redis else ""}
        started = own_process(LOG, *flags, may_be_killed=True, **settings)
        service = running.enter_context(started)
        shop = Shop(service, key, root, images, build, redis)
        with shop.client() as client:
            client.create_gallery("live")
        yield shop


# The concurrent load, and the checks of its answers


@dataclass
class Tally:
    """Results of all threads. `period` is the number of seconds between faults."""

    period: float
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: Points = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str, status: int) -> None:
        """Count an answer; an unexpected status is a fault."""
        with self.lock:
            self.statuses[what, status] += 1
        if status not in EXPECTED:
            self.fault(f"{what} returned status {status}")

    def fault(self, text: str) -> None:
        """Record a wrong answer."""
        with self.lock:
            self.wrong.append(text)

    @contextlib.contextmanager
    def request(self, what: str) -> Iterator[None]:
        """A block with a request that must be answered; its status is counted."""
        try:
            yield
        except ProblemError as error:
            self.count(what, error.status)
        except ClientError as error:
            self.fault(f"{what}: {type(error).__name__} {error}")
        else:
            self.count(what, 200)


def run(shop: Shop, seconds: float, period: float) -> Tally:
    """Run all threads for `seconds`, then check that the service is ready."""
    tally = Tally(period)
    jobs: list[Callable[[Shop, Tally], None]] = [searches] * SEARCHERS
    jobs += [changes, rebuilds, faults, samples]
    threads = [threading.Thread(target=to_the_end, args=(job, shop, tally)) for job in jobs]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0 and shop.service.process.poll() is None:
        time.sleep(min(60.0, left))
        mb = tally.memory[-1][1] if tally.memory else 0
        counts = f"{tally.statuses.total():,} answers, {len(tally.wrong)} wrong"
        print(f"  {counts}, {mb:.0f} MB", flush=True)
    tally.over.set()
    for thread in threads:
        thread.join(120)
        if thread.is_alive():
            tally.fault("a request hangs")
    deadline, is_ready = time.monotonic() + READY_S, False
    while not is_ready and time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            is_ready = httpx.get(f"{shop.service.url}/ready", timeout=60).status_code == 200
        time.sleep(0.5)
    if not is_ready:
        tally.fault(f"not ready {READY_S:g} s after the load")
    return tally


def to_the_end(job: Callable[[Shop, Tally], None], shop: Shop, tally: Tally) -> None:
    """Run a job of the load; if it breaks, the soak fails."""
    try:
        job(shop, tally)
    except Exception as error:
        tally.fault(f"{job.__name__} ended early: {error!r}")
        raise


def searches(shop: Shop, tally: Tally) -> None:
    """Search in a loop; an image of the gallery must find itself."""
    rng = random.Random(threading.get_ident())
    with shop.client() as client:
        while not tally.over.is_set():
            kind, image = rng.choice(KINDS), rng.choice(shop.images)
            data, name = image.read_bytes(), shop.name(image)
            options: ImageSearchOptions = {"k": 5, "gallery": "shop"}
            if kind == "new":
                data += os.urandom(12)
            elif kind == "crop":
                options["crops"] = [(0.1, 0.1, 0.8, 0.8)]
            elif kind == "filter":
                options["filter"] = f'class = "{image.parent.name}"'
            elif kind == "like":
                options["positives"] = [name]
            elif kind == "damaged":
                data = data[: len(data) // 2]
            with tally.request(kind):
                keys = [hit.key for hit in client.search(data, **options).hits]
                if kind in ("again", "new", "filter") and name not in keys:
                    tally.fault(f"{kind}: {name} did not find itself but {keys[:3]}")
                if kind == "damaged":
                    tally.fault(f"{kind}: got only half of {name}")
                if kind == "like" and name in keys:
                    tally.fault(f"{kind}: {name} was liked, but is in the answer")


def changes(shop: Shop, tally: Tally) -> None:
    """Add an item, find it, delete it, never find it again."""
    with shop.client(retries=5) as client:
        for number in itertools.count():
            if tally.over.wait(0.2):
                return
            key = f"soak/{number}"
            data = shop.images[number % len(shop.images)].read_bytes() + key.encode()
            with tally.request("put"):
                client.put("live", key, data, {"class": "soak"})
                if key not in _found(client, data, tally):
                    tally.fault(f"{key} was acknowledged, but is not found")
                with tally.request("delete"):
                    client.remove_item("live", key)
                    if key in _found(client, data, tally):
                        tally.fault(f"{key} was deleted, but is found")


def _found(client: Client, data: bytes, tally: Tally) -> list[str]:
    keys = [hit.key for hit in client.search(data, k=3, gallery="live").hits]
    tally.count("find", 200)
    return keys


def rebuilds(shop: Shop, tally: Tally) -> None:
    """Rebuild one gallery next to the service, which reloads it; compact the other by a job.

    Removed items stay in memory until then, or until 10,000 further changes.
    """
    with shop.client(retries=5) as client:
        while not tally.over.wait(2 * tally.period):
            done = subprocess.run(shop.build, capture_output=True, text=True)
            tally.count("rebuild", 503 if done.returncode else 200)
            if done.returncode:
                tally.fault(f"rebuild: {done.stderr[-200:]}")
            with tally.request("compact"):
                client.wait(client.compact("live"), timeout_s=JOB_S)


def faults(shop: Shop, tally: Tally) -> None:
    """Inject faults in rotation; the service must recover automatically."""
    for number in itertools.count():
        if tally.over.wait(tally.period):
            return
        if number % 3 == 2:
            # One of them is the fork server of the others.
            decoders = [p for p in tree(shop.service.pid) if DECODER in command_of(p)]
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(random.choice(decoders), signal.SIGKILL)
        elif shop.redis is not None and number % 3 == 0:
            shop.redis.send(signal.SIGSTOP)
            tally.over.wait(tally.period / 5)
            shop.redis.send(signal.SIGCONT)
        elif shop.redis is not None:
            shop.redis.kill()
            tally.over.wait(tally.period / 5)
            shop.redis.start()


def samples(shop: Shop, tally: Tally) -> None:
    """Sample the memory of the process tree every few seconds."""
    started = time.monotonic()
    while not tally.over.wait(tally.period / 6):
        tally.memory.append((time.monotonic() - started, tree_mb(shop.service.pid)))


# Memory, and the confidence that it grows


def slope(points: Points) -> tuple[float, float, float]:
    """MB an hour, and the range in which 99 % of such runs would have it.

    Theil and Sen: the median over all pairs of points. Each is the median of its neighbours, since
    memory a few seconds apart is correlated, and single peaks do not count.
    """
    groups = np.array_split(np.array(points), min(len(points), MEDIANS))
    seconds, mb = np.array([(g[:, 0].mean(), np.median(g[:, 1])) for g in groups]).T
    found = stats.theilslopes(mb, seconds, alpha=0.99)
    return 3600 * found.slope, 3600 * found.low_slope, 3600 * found.high_slope


# The report


def report(tally: Tally, limit: float) -> int:
    """Print the results; 1 if there was a failure."""
    for what in (*KINDS, "put", "delete", "find"):
        if not any(tally.statuses[what, status] for status in (200, 422)):
            tally.fault(f"no {what} request was answered")
    refused = sum(n for (_, status), n in tally.statuses.items() if status in REFUSED)
    if refused > MOST_REFUSED * tally.statuses.total():
        tally.fault(f"{refused / tally.statuses.total():.0%} of all requests were refused")
    print("\n== answers")
    for (what, status), count in sorted(tally.statuses.items()):
        print(f"  {what:10} {status} {count:8,}")
    for text in tally.wrong[:20]:
        print(f"  WRONG: {text}")
    is_good = not tally.wrong and not _grows(tally, limit)
    print("\n== passed" if is_good else "\n== FAILED")
    return 0 if is_good else 1


def _grows(tally: Tally, limit: float) -> bool:
    """Whether memory certainly grows by more than `limit` MB an hour."""
    kept = tally.memory[len(tally.memory) // 3 :]
    if len(kept) < 12:
        print("  too short for a memory slope")
        return False
    growth, low, high = slope(kept)
    is_judged = kept[-1][0] - kept[0][0] >= JUDGED_S
    print(f"\n== memory {kept[0][1]:.0f} MB, at the end {kept[-1][1]:.0f} MB")
    print(f"  slope {growth:+.1f} MB an hour, range {low:+.1f} to {high:+.1f}", end="")
    print("" if is_judged else " (not judged: too short)")
    return is_judged and low > limit


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--period-s", type=float, default=30.0, help="seconds between faults")
    parser.add_argument("--limit-mb-per-hour", type=float, default=5.0)
    parser.add_argument("--images", type=Path, help="folders of images; default: rendered")
    parser.add_argument("--bundle", type=Path, help="a model bundle; default: random weights")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
