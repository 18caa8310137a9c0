"""Cost of a gallery by size, and cost of keeping it up to date.

    python benchmarks/growth.py --sizes 10k 100k 1m --dims 128 --adds 5000
    python benchmarks/growth.py --sizes 10m --dims 128 --path DIR
    python benchmarks/growth.py --sizes 100k 1m --dims 128 --vector-type fp16 --parts build search

Vectors: benchmarks/clustered.py; each item has five attributes, one of them unique. With --path the
galleries are kept there and reused.

    build       seconds of an import, its peak memory, bytes on the disk by type
    write       bytes written to the disk for an added item, singly and in batches of 32, and the
                time of such an add
    search      recall@10 and p50 of one query, in a fresh process, and its memory
    filters     the same among 0.1 to 50 % of the items
    catch-up    --adds items are added, then a compaction updates the index while one thread
                searches; p50 and the longest search compared with before, and recall
    during      p99 of searches next to 40 writes per second, compared with that without, while the
                gallery compacts itself when it is due
    prices      up to 200,000 prices change; then new filters and facets, compared with before
    attributes  filters, facets, groups and statistics of attributes: in a gallery that was just
                opened and has searched once, the same again, and after a write
    columns     alone, without a gallery: the columns of that many items take 10,000 changed prices
                per second, in writes of 1,000, while a thread evaluates filters that are all new

Each figure is from one run on idle cores. The last lines fit a power law in the number of items to
each figure with three sizes or more.
"""

import contextlib
import json
import statistics
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from clustered import clustered_batches, clustered_queries, clusters_of
from harness import (
    count_of,
    fresh,
    heading,
    made_gallery,
    memory_mb,
    options,
    row,
    timed_ms,
    verdict,
)

from kinlens.embedder.types import Embeddings
from kinlens.indexer.catalog.vectors import RowIds
from kinlens.indexer.columns.columns import Columns
from kinlens.indexer.columns.match import rows_matching
from kinlens.indexer.entries import Entry
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.folder.layout import GalleryFolder
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.live.compaction import KEEP_REMOVED_S
from kinlens.indexer.types import Grouping, SearchOptions, VectorType
from kinlens.values import AttributeType, AttributeValue

PARTS = (
    "build", "write", "search", "filters", "catch-up", "during", "prices", "attributes", "columns",
)  # fmt: skip
COLOURS = ("red", "green", "blue", "black", "white", "grey", "pink", "brown")
FACETS = ["colour", "brand", "price", "sale"]
FILTERS = (
    "colour = 'red'",
    "10 <= price < 20",
    "sku = 'SKU-000000777'",
    "sku starts with 'SKU-00000'",
    "not brand = 'brand 5' and (colour in ('red', 'blue') or price > 900)",
)
SHARES = {"0.1 %": 1, "1 %": 10, "10 %": 100, "50 %": 500}
"""Upper limits of the price, which is uniform in 0 to 1000."""

RECALL_QUERIES, PLAIN = 200, SearchOptions()
WRITES_PER_S, PHASE_S, PHASES = 40, 10, 4
COLUMNS_S = 60
PRICES = 200_000
TYPES: dict[str, AttributeType] = {
    "colour": "text", "brand": "text", "price": "number", "sale": "boolean", "sku": "text",
}  # fmt: skip
Figures = dict[str, float]


def main() -> None:
    args = options(
        __doc__, sizes=["10k", "100k"], dims=[128], parts=list(PARTS[:7]), path=None,
        adds=100_000, vector_type="fp32",
    )  # fmt: skip
    found: dict[int, Figures] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for size, dim in product(args.sizes, args.dims):
            folder = args.path or Path(scratch)
            n, path = count_of(size), folder / f"{size}-{dim}-{args.vector_type}"
            found[n] = measured(path, n, dim, args)
            print(json.dumps({"items": n, "dim": dim, **found[n]}), flush=True)
    if len(found) > 2:
        heading("figure", "exponent")
        for name in next(iter(found.values())):
            values = [figures[name] for figures in found.values()]
            if all(value > 0 for value in values):
                row(name, float(np.polyfit(np.log([*found]), np.log(values), 1)[0]))


def measured(path: Path, n: int, dim: int, args: Namespace) -> Figures:
    if args.parts == ["columns"]:
        return fresh(repriced_columns, n)
    figures: Figures = {}
    if not (path / "CURRENT").exists():
        figures |= fresh(built, path, n, dim, args.vector_type)
    figures |= disk_mb(path)
    parts: dict[str, Callable[[], Figures]] = {
        "write": lambda: written(path, n, dim),
        "search": lambda: fresh(searched, path, n, dim),
        "filters": lambda: filtered(path, n, dim),
        "catch-up": lambda: caught_up(path, n, dim, args.adds),
        "during": lambda: during_writes(path, n, dim),
        "prices": lambda: repriced(path, n, dim),
        "attributes": lambda: attributed(path, n, dim),
    }
    for name, part in parts.items():
        if name in args.parts:
            figures |= part()
    return figures


def built(path: Path, n: int, dim: int, vector_type: VectorType) -> Figures:
    batches = partial(clustered_batches, n, dim)
    make = partial(made_gallery, path, batches, n, dim, attributes, vector_type=vector_type)
    return {"build, s": timed_ms(make) / 1e3, "build, peak MB": memory_mb()["VmHWM"]}


def attributes(number: int) -> dict[str, AttributeValue]:
    """Five attributes; `sku` is unique to the item."""
    return {
        "colour": COLOURS[number * 7919 % 8],
        "brand": f"brand {number * 104_729 % 1000}",
        "price": number * 15_485_863 % 100_000 / 100,
        "sale": number % 3 == 0,
        "sku": f"SKU-{number:09d}",
    }


def disk_mb(path: Path) -> Figures:
    """Disk use of the current generation, by purpose."""
    generation = GalleryFolder(path).current()
    total = {"catalogue, MB": 0.0, "vectors, MB": 0.0, "columns, MB": 0.0, "codes, MB": 0.0}
    kinds = {
        ".f32": "vectors, MB",
        ".f16": "vectors, MB",
        ".npy": "vectors, MB",
        ".faiss": "codes, MB",
    }
    for file in generation.rglob("*"):
        if file.is_file():
            kind = "columns, MB" if file.parent.name == "columns" else kinds.get(file.suffix)
            total[kind or "catalogue, MB"] += file.stat().st_blocks * 512 / 1e6
    return total


def later(n: int, dim: int, count: int) -> Iterator[Entry]:
    """Later items of the same products, under new keys."""
    began = time.time_ns()
    vectors = clusters_of(n, dim).draw(count, np.random.default_rng(began))
    for number, vector in enumerate(vectors):
        key = f"later {began} {number}"
        yield Entry(key, vector, f"{began + number:064x}", attributes(n + number))


def written(path: Path, n: int, dim: int) -> Figures:
    figures: Figures = {}
    with contextlib.closing(Gallery.open(path)) as gallery:
        for batch, count in ((1, 100), (32, 3200)):
            items = [*later(n, dim, count)]
            before, size = disk_writes(), gallery.size
            chunks = [items[start : start + batch] for start in range(0, count, batch)]
            times = [timed_ms(partial(gallery.add, chunk)) for chunk in chunks]
            assert gallery.size == size + count
            figures[f"a durable add of {batch}, p50, ms"] = statistics.median(times)
            figures[f"written for an item in batches of {batch}, KB"] = (
                (disk_writes() - before) / count / 1e3
            )
    return figures


def disk_writes() -> int:
    """Bytes that this process has written to the disk."""
    text = Path("/proc/self/io").read_text(encoding="ascii")
    return int(text.split("write_bytes: ")[1].split()[0])


def searched(path: Path, n: int, dim: int) -> Figures:
    before = memory_mb()
    started = time.perf_counter()
    with contextlib.closing(Gallery.open(path)) as gallery:
        queries = clustered_queries(n, dim)
        gallery.search(queries[:1], 10)
        first = time.perf_counter() - started
        times = [timed_ms(partial(gallery.search, query[None], 10)) for query in queries]
        after = memory_mb()
        return {
            "open and first search, s": first,
            "p50, ms": statistics.median(times),
            "memory, MB": after["RssAnon"] - before["RssAnon"],
            "recall@10": recall(gallery, queries),
        }


def filtered(path: Path, n: int, dim: int) -> Figures:
    figures: Figures = {}
    queries = clustered_queries(n, dim)[:RECALL_QUERIES]
    with contextlib.closing(Gallery.open(path)) as gallery:
        for share, below in SHARES.items():
            options = SearchOptions(where=parse_filter(f"price < {below}"))
            times = [timed_ms(partial(gallery.search, q[None], 10, options)) for q in queries]
            figures[f"{share}: first search, ms"] = times[0]
            figures[f"{share}: p50, ms"] = statistics.median(times[1:])
            figures[f"{share}: recall@10"] = recall(gallery, queries, options)
    return figures


def recall(gallery: Gallery, queries: Embeddings, options: SearchOptions = PLAIN) -> float:
    """The share of the true ten nearest neighbours that a search finds."""
    queries = queries[:RECALL_QUERIES]
    truth, _ = gallery.nearest(queries, 10, replace(options, exact=True))
    found, _ = gallery.nearest(queries, 10, options)
    return float((found >= truth[:, -1:] - 1e-6).mean())


@contextlib.contextmanager
def searching(gallery: Gallery, queries: Embeddings) -> Iterator[list[float]]:
    """The milliseconds of searches, one after the other by another thread, until the block ends."""
    times: list[float] = []
    over = threading.Event()

    def search() -> None:
        while not over.wait(0.005):
            query = queries[len(times) % len(queries)]
            times.append(timed_ms(partial(gallery.search, query[None], 10)))

    thread = threading.Thread(target=search, daemon=True)
    thread.start()
    yield times
    over.set()
    thread.join()


def caught_up(path: Path, n: int, dim: int, adds: int) -> Figures:
    """Search in this process, compact in another one, as on a host with two workers."""
    queries = clustered_queries(n, dim)
    with contextlib.closing(Gallery.open(path)) as gallery:
        started = time.perf_counter()
        items = [*later(n, dim, adds)]
        made = time.perf_counter() - started
        for start in range(0, adds, 1000):
            gallery.add(items[start : start + 1000])
        added = time.perf_counter() - started - made
        gallery.search(queries[:1], 10)
        quiet = [timed_ms(partial(gallery.search, query[None], 10)) for query in queries]
        with searching(gallery, queries) as during:
            elapsed = fresh(compacted, path)
        until = time.monotonic() + 60
        while gallery.facts().delta and time.monotonic() < until:
            gallery.search(queries[:1], 10)
            time.sleep(0.1)
        verdict(f"compaction after {adds:,} adds, s", elapsed, 60, at_most=True)
        ratio = statistics.median(during) / statistics.median(quiet)
        verdict("p50 during the compaction / before", ratio, 2, at_most=True)
        return {
            "adds per second in batches of 1,000": adds / added,
            "compaction, s": elapsed,
            "p50 before it, ms": statistics.median(quiet),
            "p50 during it, ms": statistics.median(during),
            "longest search during it, ms": max(during),
            "recall@10 after it": recall(gallery, queries),
        }


def during_writes(path: Path, n: int, dim: int) -> Figures:
    """Additions, changed prices and removals by one thread, in phases that alternate with none."""
    queries = clustered_queries(n, dim)
    times: dict[str, list[float]] = {"without": [], "during": []}
    entries = later(n, dim, PHASES * PHASE_S * WRITES_PER_S)
    with contextlib.closing(Gallery.open(path)) as gallery:
        gallery.compact_in_background()
        gallery.search(queries, 10)
        for _ in range(PHASES):
            for phase, found in times.items():
                began = time.monotonic()
                with searching(gallery, queries) as during:
                    for number in range(PHASE_S * WRITES_PER_S):
                        if phase == "during":
                            write(gallery, number, next(entries))
                        due = began + number / WRITES_PER_S
                        time.sleep(max(0.0, due - time.monotonic()))
                found += during
    before, after = (float(np.percentile(found, 99)) for found in times.values())
    verdict(f"p99 during {WRITES_PER_S} writes per second / without", after / before, 1.5, True)
    return {"p99 without writes, ms": before, "p99 during writes, ms": after}


def write(gallery: Gallery, number: int, entry: Entry) -> None:
    """One of four writes: two additions, a changed price, a removal."""
    kind = number % 4
    if kind == 2:
        gallery.update({f"{number:09d}": {"price": time.time() % 1000}})
    elif kind == 3:
        gallery.remove_items([gallery.last_id])
    else:
        gallery.add([entry])


def compacted(path: Path) -> float:
    """Seconds of a compaction."""
    with contextlib.closing(Gallery.open(path, load_index=False)) as gallery:
        return gallery.compact(keep_removed_s=KEEP_REMOVED_S).elapsed_s


def repriced(path: Path, n: int, dim: int) -> Figures:
    """Each new filter is the page of its first items; the index is not searched."""
    figures: Figures = {}
    prices = np.random.default_rng(0).integers(0, 100_000, min(n, PRICES)) / 100
    with contextlib.closing(Gallery.open(path)) as gallery:
        gallery.search(clustered_queries(n, dim)[:1], 10)

        def ask(when: str, least: int) -> None:
            filters = [parse_filter(f"{least} <= price < {least + step}") for step in range(1, 6)]
            pages = [partial(gallery.page, 0, 10, where) for where in filters]
            figures[f"a new filter {when}, ms"] = statistics.median(map(timed_ms, pages))
            figures[f"facets {when}, ms"] = timed_ms(partial(gallery.facets, FACETS))

        gallery.facets(FACETS)
        ask("before", 10)
        started = time.perf_counter()
        for start in range(0, len(prices), 10_000):
            some = enumerate(prices[start : start + 10_000].tolist(), start)
            gallery.update({f"{number:09d}": {"price": price} for number, price in some})
        figures["changed prices per second"] = len(prices) / (time.perf_counter() - started)
        ask("after", 30)
        assert gallery.needs_compaction() is None, "prices are no reason to write an index"
    verdict(
        "a new filter after the changes, ms", figures["a new filter after, ms"], 5, at_most=True
    )
    return figures


def repriced_columns(n: int) -> Figures:
    ids, rng, batch = np.arange(n), np.random.default_rng(0), 2**16
    now = Columns("", RowIds(ids, n - 1), 0, n, {})
    started = time.perf_counter()
    for start in range(0, n, batch):
        some = ids[start : start + batch]
        now = now.changed(some, [*map(attributes, some.tolist())], TYPES, 0, n)
    figures = {"columns from all attributes, s": time.perf_counter() - started}
    times: dict[str, list[float]] = {"without": [], "during": []}
    writes: list[float] = []
    over = threading.Event()

    def evaluate(found: list[float]) -> None:
        while not over.wait(0.005):
            low = rng.integers(0, 90_000) / 100
            where = parse_filter(f"{low} <= price < {low + 10}")
            found.append(timed_ms(partial(rows_matching, where, now)))

    late_s = 0.0
    for phase in ["without", "during"] * PHASES:
        over.clear()
        thread = threading.Thread(target=evaluate, args=(times[phase],), daemon=True)
        thread.start()
        began = time.monotonic()
        for number in range(1, 10 * COLUMNS_S // PHASES + 1):
            if phase == "during":
                some = np.unique(rng.integers(0, n, 1000))
                prices = (rng.integers(0, 100_000, 1000) / 100).tolist()
                pairs = zip(some.tolist(), prices, strict=False)
                changed = [{**attributes(item), "price": price} for item, price in pairs]
                started = time.perf_counter()
                now = now.changed(some, changed, TYPES, number, n)
                writes.append(1e3 * (time.perf_counter() - started))
            left_s = began + number / 10 - time.monotonic()
            time.sleep(max(0.0, left_s))
        late_s = max(late_s, -left_s)
        over.set()
        thread.join()
    before, during = (float(np.percentile(found, 99)) for found in times.values())
    verdict("10,000 changes per second are late at the end, s", late_s, 0.2, at_most=True)
    verdict("p99 of a new filter during them / without", during / before, 2, at_most=True)
    return figures | {
        "a new filter, p50, ms": statistics.median(times["without"]),
        "p99, ms": before,
        "p50 during the changes, ms": statistics.median(times["during"]),
        "p99 during the changes, ms": during,
        "1,000 changes, p50, ms": statistics.median(writes),
        "the longest, ms": max(writes),
        "own memory, MB": memory_mb()["RssAnon"],
    }


def attributed(path: Path, n: int, dim: int) -> Figures:
    """Milliseconds of each question, in a gallery that has only searched."""
    query = clustered_queries(n, dim)[:1]
    wide = SearchOptions(where=parse_filter("sale = true"))
    questions: dict[str, Callable[[Gallery], object]] = {
        "facets": lambda gallery: gallery.facets(FACETS),
        "facets of a third": lambda gallery: gallery.facets(FACETS, None, wide),
        "group_by and search": lambda gallery: gallery.search_groups(query, 10, Grouping("sale")),
        "attribute facts": lambda gallery: gallery.attribute_facts(),
    }
    for text in FILTERS:
        where = parse_filter(text)
        questions[f"page: {text}"] = partial(Gallery.page, offset=0, limit=10, where=where)
    figures: Figures = {}
    for name, ask in questions.items():
        with contextlib.closing(Gallery.open(path)) as gallery:
            gallery.search(query, 10)
            for when in ("first", "again", "after a write"):
                if when == "after a write":
                    gallery.update({"000000000": {"price": time.time() % 1}})
                figures[f"{name}: {when}, ms"] = timed_ms(partial(ask, gallery))
    return figures


if __name__ == "__main__":
    main()
