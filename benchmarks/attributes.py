"""Filters, facets, groups and attribute statistics of a large gallery: cold, warm, after a write.

    python benchmarks/attributes.py [--items 1000000] [--rounds 5] [--path DIR]

Nine attributes: texts with 8, 1,000 and a fifth as many values as items, and one (`sku`) with a
unique value per item; numbers with 100,000 and with 12 values; two booleans; and a list of one to
three of five sizes. Vectors have 16 dimensions and the index is flat, so that the rows measure the
attributes and not the search; groups exclude the time of a plain search. With --path the gallery is
kept there and reused.

    first          in a gallery that was just opened and has searched once
    again          the same query once more
    after a write  the same query after one item was changed

Medians over the rounds. The targets are those for 10 million items: a new filter 100 ms, eight
facets 300 ms and 50 ms again, three groups 30 ms, statistics after a write 100 ms. The last table:
one thread, or eight at the same time, use a new filter.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from harness import heading, made_gallery, options, random_units, row, timed_ms, verdict

from kinlens.embedder.errors import InvalidParameterError
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.types import Grouping, SearchOptions
from kinlens.values import AttributeValue

DIM = 16
COLOURS = ("red", "green", "blue", "black", "white", "grey", "pink", "brown")
SIZES = ("XS", "S", "M", "L", "XL")
FACETS = ["colour", "brand", "product", "price", "year", "sale", "new", "sizes"]
FILTERS = (
    "colour = 'red'",
    "10 <= price < 20",
    "sizes in ('S', 'M') and sale = true",
    "product = 'product 77'",
    "sku = 'SKU-000000777'",
    "sku starts with 'SKU-00000'",
    "not brand = 'brand 5' and (colour in ('red', 'blue') or price > 900)",
)
QUERY = np.eye(1, DIM, dtype=np.float32)


def main() -> None:
    asked = options(__doc__, items=1_000_000, rounds=5, path=None)
    with tempfile.TemporaryDirectory() as folder:
        path = asked.path or Path(folder, "gallery")
        if not (path / "CURRENT").exists():
            make(path, asked.items)
        with contextlib.closing(Gallery.open(path)) as gallery:
            gallery.search(QUERY, 10)
            plain = statistics.median(timed_ms(lambda: gallery.search(QUERY, 10)) for _ in range(9))
        heading("query", "first, ms", "again, ms", "after a write, ms")
        worst = 0.0
        for text in FILTERS:
            where = parse_filter(text)
            times = measured(path, lambda it, w=where: it.page(0, 10, w), asked.rounds)
            row(f"page: {text}", *times)
            worst = max(worst, times[0])
        wide = SearchOptions(where=parse_filter("sale = true"))
        facets = measured(path, lambda it: it.facets(FACETS), asked.rounds)
        row("eight facets", *facets)
        half = measured(path, lambda it: it.facets(FACETS, None, wide), asked.rounds)
        row("eight facets of half", *half)
        groups = measured(
            path, lambda it: it.search_groups(QUERY, 10, Grouping("sale")), asked.rounds
        )
        row("group_by, two groups of ten", *(max(0.0, one - plain) for one in groups))
        facts = measured(path, lambda it: it.attribute_facts(), asked.rounds)
        row("attribute facts", *facts)
        row("a facet of `sku`", *measured(path, refused, asked.rounds))
        heading("one new filter", "until all threads have it, ms")
        for threads in (1, 8):
            times_ms = [at_once(path, threads) for _ in range(asked.rounds)]
            row(f"{threads} at a time", statistics.median(times_ms))
        verdict("a new filter, worst, ms", worst, 100, at_most=True)
        verdict("eight facets of half, first, ms", half[0], 300, at_most=True)
        verdict("eight facets of half, again, ms", half[1], 50, at_most=True)
        verdict("group_by beyond a plain search, ms", max(groups) - plain, 30, at_most=True)
        verdict("attribute facts after a write, ms", facts[2], 100, at_most=True)


def make(path: Path, items: int) -> None:
    """Create the gallery, with attributes in random order."""
    rng = np.random.default_rng(0)
    colours, prices = rng.integers(len(COLOURS), size=items), rng.integers(100_000, size=items)
    products, sales = rng.integers(-(-items // 5), size=items), rng.integers(4, size=items)
    brands, sizes = rng.integers(1000, size=items), rng.integers(len(SIZES), size=items)

    def attributes(number: int) -> dict[str, AttributeValue]:
        first = int(sizes[number])
        return {
            "colour": COLOURS[colours[number]],
            "brand": f"brand {brands[number]}",
            "product": f"product {products[number]}",
            "price": float(prices[number]) / 100,
            "year": 2010 + number % 12,
            "sale": bool(sales[number] & 1),
            "new": bool(sales[number] & 2),
            "sizes": SIZES[first : first + 1 + number % 3],
            "sku": f"SKU-{number:09d}",
        }

    blocks = partial(random_units, items, DIM)
    made_gallery(path, blocks, items, DIM, attributes, settings=IndexSettings(kind="flat"))


def measured(path: Path, ask: Callable[[Gallery], object], rounds: int) -> list[float]:
    """Median milliseconds of a query: first, again, and after an item was changed."""
    times: list[list[float]] = []
    for number in range(rounds):
        with contextlib.closing(Gallery.open(path)) as gallery:
            gallery.search(QUERY, 10)
            first, again = (timed_ms(partial(ask, gallery)) for _ in range(2))
            gallery.update({"000000000": {"price": number + time.time() % 1}})
            times.append([first, again, timed_ms(partial(ask, gallery))])
    return [statistics.median(column) for column in zip(*times, strict=True)]


def refused(gallery: Gallery) -> None:
    with contextlib.suppress(InvalidParameterError):
        gallery.facets(["sku"])


def at_once(path: Path, threads: int) -> float:
    """Milliseconds until every thread has the result of one new filter."""
    where = parse_filter("not brand = 'brand 5' and (colour in ('red', 'blue') or price > 900)")
    with contextlib.closing(Gallery.open(path)) as gallery, ThreadPoolExecutor(threads) as pool:
        gallery.search(QUERY, 10)
        return timed_ms(lambda: [*pool.map(lambda _: gallery.page(0, 10, where), range(threads))])


if __name__ == "__main__":
    main()
