"""Memory of a service process under load, and of a build by number of items.

    python benchmarks/sizing.py [--backbones mobilenet_v2 resnet50] [--seconds 8]
    python benchmarks/sizing.py build [--items 10000 1000000]

**Service.** `kinlens-serve` with a network at 224 px in fp32 and a gallery of 10,000 items of 128
dimensions, loaded with new images by 16 busy connections. Memory is that of the service with all
its processes, in MB: `own` is memory that the kernel cannot reclaim (Pss_Anon), shared pages
counted once. The last column is the memory of one search thread: the difference of the first two
rows, divided by the difference of their search threads.

**Build.** Memory must not grow with the number of items read. One process per row, with two inputs:
entries with vectors (an import), and a CSV list of images (copies of 100 small images under as many
keys as there are items, with a model without cost, so that only the rest of the path is measured);
vectors have 16 dimensions. `peak` is the largest resident set of the process, `own` its largest
part that is not file cache (sampled every 20 ms). The growth is the difference in `own` to the
first size, divided by the difference in items. Targets: a million items take at most 300 MB more
than ten thousand, and at most 100 bytes each.
"""

import csv
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from harness import (
    fresh,
    heading,
    load,
    made_gallery,
    memory_mb,
    options,
    random_units,
    row,
    sample_images,
    serving,
)
from PIL import Image
from search import IMAGES, gallery, small_bundle

from kinlens.embedder.fake import FakeEmbedder
from kinlens.indexer.ingest.build import BuildSettings, build_gallery
from kinlens.indexer.ingest.embed import EmbedSettings
from kinlens.indexer.ingest.sources import csv_source

ITEMS, CONNECTIONS = 10_000, 16
DIM, FILES = 16, 100
FORMS = {
    "1 search thread": ("KINLENS_SEARCH_THREADS=1",),
    "4 search threads, as by default on two cores": ("KINLENS_SEARCH_THREADS=4",),
    "--workers 2": ("KINLENS_WORKERS=2",),
}


def main() -> None:
    args = options(
        __doc__, "part", part="service", backbones=["mobilenet_v2", "resnet50"], seconds=8.0,
        items=[10_000, 1_000_000],
    )  # fmt: skip
    if args.part == "build":
        builds(args.items)
        return
    with tempfile.TemporaryDirectory() as name:
        images = sample_images(Path(name) / "images", IMAGES)
        tables = [measured(Path(name) / trunk, trunk, images, args.seconds)
                  for trunk in args.backbones]  # fmt: skip
    heading("trunk", "form", "searches/s", "own MB", "MB per search thread")
    for table in tables:
        for cells in table:
            row(*cells)


def measured(folder: Path, backbone: str, images: Path, seconds: float) -> list[list[object]]:
    """A row for each form of the service."""
    folder.mkdir()
    bundle = small_bundle(folder, backbone)
    made = gallery(folder / "gallery", bundle, ITEMS)
    found: list[list[object]] = []
    for form, variables in FORMS.items():
        with serving(bundle, made, prefix=("env", *variables)) as server:
            load(server.url, images, CONNECTIONS, min(3, seconds))
            figures = load(server.url, images, CONNECTIONS, seconds, "--start", 100_000)
            found.append([backbone, form, figures["qps"], own_mb(server.pid), ""])
    found[1][-1] = (float(str(found[1][3])) - float(str(found[0][3]))) / 3
    return found


def own_mb(pid: int) -> float:
    """Memory of a process and its descendants, without file pages."""
    tasks = [*Path(f"/proc/{pid}/task").glob("*/children")]
    below = {int(child) for task in tasks for child in task.read_text().split()}
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return int(fields["Pss_Anon"].split()[0]) * 1024 / 1e6 + sum(map(own_mb, below))


# Builds


def builds(sizes: list[int]) -> None:
    """A row for each input and number of items."""
    heading("input", "items", "peak, MB", "own, MB", "bytes per additional item", "s")
    for part in (imports_only, entries, images):
        smallest = 0.0
        for items in sizes if part is not imports_only else (0,):
            seconds, peak, own = fresh(watched, part, items)
            more = 1e6 * (own - smallest) / max(1, items - sizes[0])
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
