"""Memory of a build: it must not grow with the number of items read.

    python benchmarks/memory.py [--items 10000 1000000]

One process per row. A build has two inputs: entries with vectors (an import), and a CSV list of
images (copies of 100 small images under as many keys as there are items, with a model without
cost, so that only the rest of the path is measured); vectors have 16 dimensions. `peak` is the
largest resident set of the process, `own` its largest part that is not file cache (sampled every
20 ms), both above a process that only imported the modules. The growth is the difference in `own`
to the first size, divided by the difference in items.
"""

import csv
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from harness import fresh, heading, made_gallery, memory_mb, options, random_units, row
from PIL import Image

from kinlens.embedder.fake import FakeEmbedder
from kinlens.indexer.ingest.build import BuildSettings, build_gallery
from kinlens.indexer.ingest.embed import EmbedSettings
from kinlens.indexer.ingest.sources import csv_source

DIM, FILES = 16, 100


def main() -> None:
    args = options(__doc__, items=[10_000, 1_000_000])
    heading("input", "items", "peak, MB", "own, MB", "bytes per additional item", "s")
    for part in (imports_only, entries, images):
        smallest = 0.0
        for items in args.items if part is not imports_only else (0,):
            seconds, peak, own = fresh(watched, part, items)
            more = 1e6 * (own - smallest) / max(1, items - args.items[0])
            row(part.__name__, items, peak, own, more if smallest else "", seconds)
            smallest = smallest or own


def watched(work: Callable[[int, Path], object], items: int) -> tuple[float, float, float]:
    """Seconds, and in MB the peak of this process and of its own memory."""
    seen, is_done = [memory_mb()["RssAnon"]], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.02):
            seen.append(memory_mb()["RssAnon"])

    with tempfile.TemporaryDirectory() as folder:
        watcher = threading.Thread(target=watch)
        watcher.start()
        started = time.perf_counter()
        work(items, Path(folder))
        seconds = time.perf_counter() - started
        is_done.set()
        watcher.join()
    return seconds, memory_mb()["VmHWM"], max(seen)


def imports_only(_items: int, _folder: Path) -> None:
    """Only load the modules."""


def entries(items: int, folder: Path) -> None:
    """Entries with two attributes and a vector each."""
    made_gallery(
        folder / "gallery",
        lambda: random_units(items, DIM),
        items,
        DIM,
        lambda number: {"class": f"class {number % 1000}", "price": number % 977 / 4},
    )


def images(items: int, folder: Path) -> None:
    """A CSV list of `items` keys of a few images."""
    for number in range(FILES):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    with (folder / "list.csv").open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow(["key", "path", "class", "price:number"])
        for number in range(items):
            name, file = f"shop/{number:09d}", f"{number % FILES}.png"
            rows.writerow([name, file, f"class {number % 1000}", number % 977 / 4])
    settings = BuildSettings(embed=EmbedSettings(batch_size=512))
    source = csv_source(folder / "list.csv")
    build_gallery(source, FakeEmbedder(dim=DIM), folder / "gallery", settings)


if __name__ == "__main__":
    main()
