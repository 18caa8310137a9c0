"""How many modules of `indexer/` one call passes: what a reader has to open to follow it.

    python benchmarks/gallery_hops.py

No times: each call is traced once, after one that warms it up. Threads are traced too.
"""

import contextlib
import io
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
from PIL import Image

from embedder.fake import FakeEmbedder
from indexer.filters.text import parse_filter
from indexer.gallery import Gallery
from indexer.ingest.build import build_gallery
from indexer.ingest.sources import folder_source
from indexer.types import Entry, SearchOptions

DIM, ITEMS, IMAGES = 128, 10_000, 24


def modules_passed(call: Callable[[], object]) -> list[str]:
    """The modules of `indexer/` whose functions ran."""
    seen: set[str] = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_globals.get("__name__", ""))

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(name for name in seen if name.startswith("indexer."))


def entries(first: int, count: int) -> list[Entry]:
    """Random items."""
    vectors = np.random.default_rng(first).standard_normal((count, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return [
        Entry(f"k{first + n}", vector, f"{first + n:064x}", {"price": n})
        for n, vector in enumerate(vectors)
    ]


def main() -> None:
    """Print a table."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        root = Path(folder)
        gallery = Gallery.create(root / "gallery", name="g", bundle_id="b", dim=DIM)
        gallery.add(entries(0, ITEMS))
        gallery.compact()
        query = entries(0, 1)[0].vector[None]
        cheap = SearchOptions(where=parse_filter("price < 50"))
        (root / "images").mkdir()
        for n in range(IMAGES):
            pixels = np.random.default_rng(n).integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "images" / f"{n}.png")
        calls: dict[str, Callable[[], object]] = {
            "search, warm, flat": lambda: gallery.search(query, 10),
            "search with a filter": lambda: gallery.search(query, 10, cheap),
            "stored, one row": lambda: gallery.stored(["k7"]),
            "add, one item": lambda: gallery.add(entries(gallery.size, 1)),
            "compaction": lambda: gallery.compact(),
            "build of images": lambda: build_gallery(
                folder_source(root / "images"), FakeEmbedder(), root / "built"
            ),
        }
        print("| call | modules | which |\n|---|---|---|")
        for name, call in calls.items():
            call()
            passed = [module.removeprefix("indexer.") for module in modules_passed(call)]
            print(f"| {name} | {len(passed)} | {', '.join(passed)} |")
        gallery.close()


if __name__ == "__main__":
    main()
