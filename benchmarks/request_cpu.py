"""Cost of one search for the service itself: CPU time per request, and modules that it uses.

    python benchmarks/request_cpu.py [--rounds 5] [--seconds 6] [--against OTHER_CHECKOUT]

A fake model without cost (a random projection), a real gallery of 10,000 x 128, generated images of
about 8 KB, 8 connections, every file new, no Redis, the default log level. The figure is the CPU
time of the service's process and of its decoding processes, from /proc, per answered request. With
--against the service of another checkout is measured too, in turns, so that both see the same
machine. Target: at most 3.6 ms; the service of November 2026, with four hops between threads and
processes, took 5.3.

Then, with every thread traced, the modules of `service/` whose functions run for an answer: the
files a reader has to open to follow it. Of two searches the second counts, to exclude start-up.
Target: at most 15 for a form with one image, where that service had 45.
"""

import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import httpx
import uvicorn
from harness import (
    free_port,
    load,
    made_gallery,
    options,
    random_units,
    sample_images,
    started,
    verdict,
)

from kinlens.embedder.fake import FakeEmbedder
from kinlens.indexer.gallery import Gallery
from kinlens.service.app import create_app
from kinlens.service.http.server import config_of, listen, serve_on
from kinlens.service.observe.logs import configure_logs
from kinlens.service.settings import Settings

HERE = Path(__file__).resolve()
CONNECTIONS, FILES = 8, 64
ITEMS, DIM = 10_000, 128


def main() -> None:
    asked = options(__doc__, rounds=5, seconds=6.0, against=list[str](), serve=-1, gallery=None)
    if asked.serve >= 0:
        serve(asked.serve, asked.gallery)
        return
    trees = [HERE.parents[1], *(Path(tree).resolve() for tree in asked.against)]
    found: dict[Path, list[float]] = {tree: [] for tree in trees}
    with tempfile.TemporaryDirectory() as name:
        images = sample_images(Path(name, "images"), FILES, is_drawn=True)
        bundle_id = FakeEmbedder(dim=DIM).bundle_id
        batches = lambda: random_units(ITEMS, DIM)
        made = made_gallery(Path(name, "g"), batches, ITEMS, DIM, bundle_id=bundle_id)
        for _ in range(asked.rounds):
            for tree in trees:
                found[tree].append(cost_ms(tree, made, images, asked.seconds))
        for tree, costs in found.items():
            middle = statistics.median(costs)
            print(f"{middle:.2f} ms CPU per search ({min(costs):.2f} to {max(costs):.2f})  {tree}")
        verdict("ms of CPU per search", statistics.median(found[trees[0]]), 3.6, at_most=True)
        print_modules(made, [path.read_bytes() for path in sorted(images.iterdir())])


def cost_ms(tree: Path, made: Path, images: Path, seconds: float) -> float:
    """Milliseconds of CPU per answer of the service of `tree`."""
    port = free_port()
    command = [sys.executable, HERE, "--serve", str(port), "--gallery", made]
    with started(command, port, PYTHONPATH=str(tree)) as server:
        load(server.url, images, CONNECTIONS, 1.0)  # warm
        pids = [server.pid, *children(server.pid)]
        before = sum(map(cpu_s, pids))
        found = load(server.url, images, CONNECTIONS, seconds, "--start", 10**6)
        assert not found["errors"], found
        return 1e3 * (sum(map(cpu_s, pids)) - before) / found["sent"]


def serve(port: int, made: Path) -> None:
    """Run the service of the checkout on PYTHONPATH, with a fake model."""
    settings = Settings(port=port)
    configure_logs(settings.log_level)
    app = create_app(settings, FakeEmbedder(dim=DIM), {"g": Gallery.open(made)})
    serve_on(app, listen(settings.host, settings.port), settings)


def children(pid: int) -> list[int]:
    """The processes that `pid` started."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for one in threads for child in (one / "children").read_text().split()]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def print_modules(made: Path, files: list[bytes]) -> None:
    """Print the modules used by three kinds of searches, in a service of this process."""
    seen: set[str] = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_globals.get("__name__", ""))

    configure_logs("warning")
    threading.setprofile(look)
    settings = Settings(search_threads=1, recall_sample=0)
    listener = listen("127.0.0.1", 0)
    app = create_app(settings, FakeEmbedder(dim=DIM), {"g": Gallery.open(made)})
    server = uvicorn.Server(config_of(app, settings))
    serving = threading.Thread(target=server.run, args=([listener],))
    serving.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    while not server.started:
        serving.join(0.05)

    def search(number: int) -> httpx.Response:
        return httpx.post(f"{url}/search", files={"image": files[number]}, data={"k": 20})

    calls: dict[str, Callable[[], httpx.Response]] = {
        "a form, one image": lambda: search(1),
        "the same again, from the cache": lambda: search(1),
        "an item, as JSON": lambda: httpx.post(f"{url}/search", json={"positives": ["000000007"]}),
    }
    search(0)
    for text, call in calls.items():
        seen.clear()
        call().raise_for_status()
        passed = sorted(name for name in seen if name.startswith("service."))
        names = ", ".join(name.removeprefix("service.") for name in passed)
        print(f"{len(passed):3} modules of service/  {text}: {names}")
    server.should_exit = True
    serving.join()


if __name__ == "__main__":
    main()
