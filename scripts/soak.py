"""Hours under load: searches, changes, rebuilds, faults, killed decoders; memory must stay.

    make soak HOURS=1              or: python scripts/soak.py --hours 1 [--workers 2]

Starts redis-server (if it is installed) and kinlens-serve with a model of random weights, then all
at once: searches with new and repeated pictures, crops, filters, likes and damaged files; items
added and deleted; galleries rebuilt and reloaded; every half minute a fault in turn (Redis paused,
Redis killed, a decoding process killed). At the end: requests by status, wrong answers, and the
slope of memory of the whole process tree after its first third, with the spread of resampled ones.

Exit code 1 if an answer was wrong or unexpected, or if memory grows for certain by more than the
limit.
"""

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import statistics
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
from demo_steps import BIN, free_port, kinlens, say, serve

SEARCHERS = 3
SAMPLE_S = 5.0
FAULT_S = 30.0
REBUILD_S = 60.0
RESAMPLES = 500
EXPECTED = {200, 422, 429, 503}


@dataclass
class Tally:
    """What happened, from all threads."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str, status: int) -> None:
        """Count an answer; one that nothing explains is wrong."""
        with self.lock:
            self.statuses[f"{what} {status}"] += 1
            if status not in EXPECTED:
                self.wrong.append(f"{what} was answered with {status}")

    def fault(self, text: str) -> None:
        """Note an answer that is wrong."""
        with self.lock:
            self.wrong.append(text)


@dataclass(frozen=True)
class Shop:
    """The service under load and what it was made of."""

    url: str
    key: str
    images: list[Path]
    process: "subprocess.Popen[bytes]"
    redis: "Redis | None"
    folder: Path

    def client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, timeout=60, headers=headers)


class Redis:
    """A redis-server of our own that can be paused, killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self.start()

    def start(self) -> None:
        """Start it; it answers a moment later."""
        words = ["--port", self.port, "--bind", "127.0.0.1", "--save", "", "--dir", self._folder]
        command = ["redis-server", *map(str, words), "--maxmemory", "64mb"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        """End it without a goodbye."""
        self.process.kill()
        self.process.wait()


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as name, shop(Path(name), options.workers) as found:
        tally = run(found, 3600 * options.hours)
    return report(tally, options.limit_mb_per_hour)


def run(shop: Shop, seconds: float) -> Tally:
    """Everything at once, for so long."""
    tally, over = Tally(), threading.Event()
    jobs: list[Callable[[Shop, Tally, threading.Event], None]] = [searches] * SEARCHERS
    jobs += [changes, rebuilds, faults, samples]
    threads = [threading.Thread(target=job, args=(shop, tally, over)) for job in jobs]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and shop.process.poll() is None:
        time.sleep(min(60.0, max(0.0, ends - time.monotonic())))
        print(f"  {dict(sorted(tally.statuses.items()))}", flush=True)
    over.set()
    for thread in threads:
        thread.join(120)
    if shop.process.poll() is not None:
        tally.fault(f"the service ended with {shop.process.returncode}")
    return tally


def searches(shop: Shop, tally: Tally, over: threading.Event) -> None:
    """One search after another; a picture of the gallery must find itself."""
    rng = random.Random(threading.get_ident())
    with shop.client() as client:
        for number in itertools.count():
            if over.is_set():
                return
            path = rng.choice(shop.images)
            data = path.read_bytes()
            kind = rng.choice(("again", "new", "crop", "filter", "damaged", "like"))
            fields: dict[str, str] = {"k": "5"}
            if kind == "new":
                data += str(number).encode() + rng.randbytes(4)
            elif kind == "crop":
                fields["crop"] = "0.1,0.1,0.8,0.8"
            elif kind == "filter":
                fields["filter"] = f'class = "{path.parent.name}"'
            elif kind == "like":
                fields["positive"] = path.relative_to(shop.folder / "images").as_posix()
            elif kind == "damaged":
                data = data[: len(data) // 2]
            with _requests(tally, kind):
                answer = client.post("/search", data=fields, files={"image": data})
                tally.count(kind, answer.status_code)
                if answer.status_code == 200:
                    _check(kind, path, answer.json(), tally)


def _check(kind: str, path: Path, answer: dict[str, object], tally: Tally) -> None:
    keys = [hit["key"] for hit in answer["hits"]]  # type: ignore[attr-defined]
    name = f"{path.parent.name}/{path.name}"
    if kind in ("again", "new", "filter") and name not in keys:
        tally.fault(f"{kind}: {name} did not find itself but {keys[:3]}")
    if kind == "damaged":
        tally.fault(f"{kind}: half of {name} was answered")
    if kind == "like" and name in keys:
        tally.fault(f"{kind}: {name} was liked and found all the same")


def changes(shop: Shop, tally: Tally, over: threading.Event) -> None:
    """Add an item, find it, delete it, never find it again."""
    with shop.client() as client:
        for number in itertools.count():
            if over.wait(0.2):
                return
            key, data = f"soak/{number}", shop.images[number % len(shop.images)].read_bytes()
            data += f"soak {number}".encode()
            fields = {"key": key, "attributes": '{"class": "soak"}'}
            with _requests(tally, "change"):
                put = client.put("/galleries/live/items", data=fields, files={"image": data})
                tally.count("put", put.status_code)
                if put.status_code != 200:
                    continue
                if key not in _found(client, data, tally):
                    tally.fault(f"{key} was acknowledged and is not found")
                gone = client.delete("/galleries/live/items", params={"key": key})
                tally.count("delete", gone.status_code)
                if gone.status_code == 200 and key in _found(client, data, tally):
                    tally.fault(f"{key} was deleted and is found")


def _found(client: httpx.Client, data: bytes, tally: Tally) -> list[str]:
    fields = {"k": "3", "gallery": "live"}
    for _ in range(20):
        answer = client.post("/search", data=fields, files={"image": data})
        tally.count("find", answer.status_code)
        if answer.status_code == 200:
            return [hit["key"] for hit in answer.json()["hits"]]
        time.sleep(0.5)
    raise httpx.TransportError("no answer in twenty tries")


def rebuilds(shop: Shop, tally: Tally, over: threading.Event) -> None:
    """Build the read-only gallery again, beside the service, which reloads it."""
    while not over.wait(REBUILD_S):
        done = subprocess.run(build_command(shop.folder), capture_output=True, text=True)
        if done.returncode:
            tally.fault(f"rebuild: {done.stderr[-200:]}")


def faults(shop: Shop, _tally: Tally, over: threading.Event) -> None:
    """A fault in turn; the service has to get over it by itself."""
    for number in itertools.count():
        if over.wait(FAULT_S):
            return
        if number % 3 == 2:
            for pid in decoders(shop.process.pid)[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif shop.redis is not None and number % 3 == 0:
            shop.redis.process.send_signal(signal.SIGSTOP)
            over.wait(3)
            shop.redis.process.send_signal(signal.SIGCONT)
        elif shop.redis is not None:
            shop.redis.kill()
            over.wait(3)
            shop.redis.start()


def samples(shop: Shop, tally: Tally, over: threading.Event) -> None:
    """Memory of the process tree, every few seconds."""
    started = time.monotonic()
    while not over.wait(SAMPLE_S):
        tally.memory.append((time.monotonic() - started, tree_mb(shop.process.pid)))


def tree(pid: int) -> list[int]:
    """A process and all that it started."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def decoders(pid: int) -> list[int]:
    """The decoding processes of a service."""
    named = []
    for child in tree(pid)[1:]:
        with contextlib.suppress(OSError):
            if b"service.decoding" in Path(f"/proc/{child}/cmdline").read_bytes():
                named.append(child)
    return named


def tree_mb(pid: int) -> float:
    """Private and proportional memory of the tree, in MB, without pages of files."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    total += int(line.split()[1])
    return total / 1024


def slope(points: list[tuple[float, float]]) -> float:
    """MB an hour: the median over pairs of points, so that single peaks do not count."""
    pairs = [
        (b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if b[0] > a[0]
    ]
    return 3600 * statistics.median(pairs)


def report(tally: Tally, limit: float) -> int:
    """Print what was found; 1 if it is not good."""
    say("answers")
    for what, count in sorted(tally.statuses.items()):
        print(f"  {what:14} {count:8,}")
    for text in tally.wrong[:20]:
        print(f"  WRONG: {text}")
    kept = tally.memory[len(tally.memory) // 3 :]
    grows = False
    if len(kept) >= 12:
        step = max(1, len(kept) // 100)
        points = kept[::step]
        middle = slope(points)
        rng = random.Random(0)
        blocks = [slope(sorted(rng.choices(points, k=len(points)))) for _ in range(RESAMPLES // 5)]
        low, high = sorted(blocks)[len(blocks) // 40], sorted(blocks)[-1 - len(blocks) // 40]
        say(f"memory {kept[0][1]:.0f} MB, at the end {kept[-1][1]:.0f} MB")
        print(f"  slope {middle:+.1f} MB an hour, resampled 95 %: {low:+.1f} to {high:+.1f}")
        grows = low > limit
    else:
        print("  too short for a slope of memory")
    good = not tally.wrong and not grows
    say("held" if good else "did NOT hold")
    return 0 if good else 1


@contextlib.contextmanager
def _requests(tally: Tally, what: str) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        tally.fault(f"{what}: {type(error).__name__} {error}")


@contextlib.contextmanager
def shop(folder: Path, workers: int) -> Iterator[Shop]:
    """Pictures, model, gallery, key, Redis and a service, all below `folder`."""
    images, bundle, state = folder / "images", folder / "bundle", folder / "state"
    kinlens(
        "train", "data", "render", str(images), "--products", "20", "--views", "10",
        "--size-px", "160",
    )  # fmt: skip
    plain = ("--backbone", "mobilenet_v2", "--weights", "none", "--size-px", "96")
    kinlens("train", "export", "--out", str(bundle), *plain, "--resize-px", "96")
    subprocess.run(build_command(folder), check=True)
    command = [BIN / "kinlens-serve", "keys", "create", "soak", "--scope", "admin"]
    made = subprocess.run(
        [*command, "--state", str(state)], check=True, capture_output=True, text=True
    )
    key = next(word for word in made.stdout.split() if word.startswith("kl_"))
    redis = Redis(folder) if shutil.which("redis-server") else None
    port = free_port()
    flags = ["--bundle", str(bundle), "--gallery", f"shop={folder / 'gallery'}"]
    flags += ["--state", str(state), "--workers", str(workers)]
    if redis is not None:
        flags += ["--redis-url", f"redis://127.0.0.1:{redis.port}/0"]
    process = serve(port, *flags)
    try:
        found = Shop(
            f"http://127.0.0.1:{port}", key, sorted(images.rglob("*.jpg")), process, redis, folder
        )
        with found.client() as client:
            client.post("/galleries", json={"name": "live"}).raise_for_status()
        yield found
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        if redis is not None:
            redis.kill()


def build_command(folder: Path) -> list[str]:
    """Build the gallery, or build it again."""
    words = ["build", folder / "images", "--bundle", folder / "bundle", "--out", folder / "gallery"]
    return [str(BIN / "kinlens-index"), *map(str, words)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit-mb-per-hour", type=float, default=5.0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
