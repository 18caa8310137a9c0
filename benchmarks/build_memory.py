"""Memory of a build: it must not grow with what was read.

    python benchmarks/build_memory.py [--items 10000,1000000]

Two ways in, each in a process of its own at each size: entries with vectors (an import), and a CSV
list of images (a build; copies of 100 small pictures under as many keys as there are items, with a
model that costs nothing, so that the rest of the way is what is measured). Vectors have 16 numbers.

`peak` is the largest resident set of the process, `own` its largest part that is not file cache
(RssAnon, looked at every 20 ms). The ceiling is the process that does nothing but import the
modules. What grows is the difference between the sizes, over their difference in items.
"""

import argparse
import csv
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from embedder.fake import FakeEmbedder
from indexer.ingest.build import BuildSettings, build_gallery, import_gallery
from indexer.ingest.embed import EmbedSettings
from indexer.ingest.sources import csv_source
from indexer.types import Dump, Entry

DIM = 16
PICTURES = 100
_BLOCK = 10_000
MB = 1e6


def entries(count: int) -> Iterator[Entry]:
    """Items with a key, a path, two attributes and a vector each."""
    random = np.random.default_rng(0)
    for start in range(0, count, _BLOCK):
        vectors = random.standard_normal((min(_BLOCK, count - start), DIM)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        for number, vector in enumerate(vectors, start):
            digest = hashlib.sha256(b"%d" % number).hexdigest()
            attributes = {"class": f"class {number % 1000}", "price": number % 977 / 4}
            yield Entry(f"shop/{digest[:12]}", vector, digest, attributes, f"{number}.png", "PNG")


def make_list(folder: Path, count: int) -> Path:
    """A CSV list of `count` keys of a few pictures."""
    for number in range(PICTURES):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    file = folder / "list.csv"
    with file.open("w", newline="", encoding="utf-8") as text:
        rows = csv.writer(text)
        rows.writerow(["key", "path", "class", "price:number"])
        for number in range(count):
            row = (f"shop/{number:09d}", f"{number % PICTURES}.png", f"class {number % 1000}")
            rows.writerow([*row, number % 977 / 4])
    return file


def own_bytes() -> int:
    """Memory of this process that is not file cache."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def measure(way: str, count: int, folder: Path) -> dict[str, float]:
    """In this process: seconds, and the peaks in MB."""
    most, is_done = own_bytes(), threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_done.wait(0.02):
            most = max(most, own_bytes())

    file = make_list(folder, count) if way == "images" else None
    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    if way == "entries":
        facts = {"name": "shop", "bundle_id": "b" * 64}
        import_gallery(Dump(facts, DIM, count, lambda: entries(count)), folder / "gallery")
    elif file is not None:
        settings = BuildSettings(embed=EmbedSettings(batch_size=512))
        build_gallery(csv_source(file), FakeEmbedder(dim=DIM), folder / "gallery", settings)
    seconds = time.perf_counter() - started
    is_done.set()
    watcher.join()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak": peak / MB, "own": most / MB}


def in_process(way: str, count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--way", way, "--count", str(count), "--in", folder]
        made = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(made.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--items", default="10000,1000000")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.count, options.folder)))
        return
    sizes = [int(size) for size in options.items.split(",")]
    print("| way in | items | peak MB | own MB | bytes an item more | seconds |")
    print("|---|---|---|---|---|---|")
    nothing = in_process("nothing", 0)
    print(f"| nothing (modules loaded) | 0 | {nothing['peak']:.0f} | {nothing['own']:.0f} | | |")
    for way in ("entries", "images"):
        least: dict[str, float] | None = None
        for size in sizes:
            found = in_process(way, size)
            grown = ""
            if least is not None:
                grown = f"{(found['own'] - least['own']) * MB / (size - sizes[0]):.0f}"
            least = least or found
            print(
                f"| {way} | {size:,} | {found['peak']:.0f} | {found['own']:.0f} | {grown} "
                f"| {found['seconds']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
