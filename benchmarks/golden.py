"""Effect of a golden set run on searches: their latency during a run, and without it.

    python benchmarks/golden.py [--rounds 8] [--queries 60]

A service in this process with two search threads, a model that sleeps 20 ms per image, a gallery of
10,000 x 128 and generated images of about 8 KB, every file new. One client searches repeatedly
while a golden set is run, then as often without a run. Both alternate, since other load on the
machine varies. Target: the median of the rounds' ratios of medians is at most 1.25, since a run has
one image in the model at a time.
"""

import statistics
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count
from pathlib import Path

import httpx
import uvicorn
from harness import (
    heading,
    made_gallery,
    options,
    random_units,
    ratio,
    row,
    sample_images,
    timed_ms,
    verdict,
)

from kinlens.embedder.fake import FakeEmbedder
from kinlens.golden import Label
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.golden import GoldenSet, NewQuery
from kinlens.service.app import create_app
from kinlens.service.http.server import config_of, listen
from kinlens.service.observe.logs import configure_logs
from kinlens.service.settings import Settings

ITEMS, DIM, FILES = 10_000, 128, 64
DELAY_S = 0.02


def main() -> None:
    asked = options(__doc__, rounds=8, queries=60)
    embedder = FakeEmbedder(dim=DIM, delay_s=DELAY_S)
    with tempfile.TemporaryDirectory() as name:
        images = sample_images(Path(name, "images"), FILES, is_drawn=True)
        files = [path.read_bytes() for path in sorted(images.iterdir())]
        batches = lambda: random_units(ITEMS, DIM)
        made = made_gallery(Path(name, "g"), batches, ITEMS, DIM, bundle_id=embedder.bundle_id)
        new = [
            NewQuery(files[n % FILES] + b"golden%d" % n, Label(keys=(f"{n:09d}",)))
            for n in range(asked.queries)
        ]
        GoldenSet(made).add(new, Gallery.open(made))
        settings = Settings(
            galleries=(f"g={made}",), search_threads=2, recall_sample=0, anonymous_scopes=("admin",)
        )
        configure_logs("warning")
        listener = listen("127.0.0.1", 0)
        server = uvicorn.Server(config_of(create_app(settings, embedder), settings))
        serving = threading.Thread(target=server.run, args=([listener],))
        serving.start()
        while not server.started:
            serving.join(0.05)
        measure(f"http://127.0.0.1:{listener.getsockname()[1]}", files, asked.rounds)
        server.should_exit = True
        serving.join()


def measure(url: str, files: list[bytes], rounds: int) -> None:
    """Search during a run and without one, in turns."""
    client, sent = httpx.Client(base_url=url, timeout=120), count()

    def search_ms() -> float:
        number = next(sent)
        image = files[number % FILES] + b"%d" % number
        return timed_ms(lambda: client.post("/search", files={"image": image}).raise_for_status())

    during: list[list[float]] = []
    alone: list[list[float]] = []
    with client, ThreadPoolExecutor(1) as pool:
        for _ in range(20):  # warm
            search_ms()
        for _ in range(rounds):
            run = pool.submit(httpx.post, f"{url}/galleries/g/golden/run", timeout=120)
            during.append([])
            while not run.done():
                during[-1].append(search_ms())
            run.result().raise_for_status()
            alone.append([search_ms() for _ in during[-1]])
    heading("one client, two search threads, 20 ms per image", "p50, ms", "p95, ms")
    for name, sides in (("searches alone", alone), ("during a golden set run", during)):
        times = [*chain.from_iterable(sides)]
        row(name, statistics.median(times), statistics.quantiles(times, n=20)[-1])
    medians = [[*map(statistics.median, sides)] for sides in (during, alone)]
    verdict("median ratio of the rounds", ratio(*medians), 1.25, at_most=True)


if __name__ == "__main__":
    main()
