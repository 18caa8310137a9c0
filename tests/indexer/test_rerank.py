"""Another order of the first hits, compared with plain Python.

The law that it equals its definition is run for every engine, in test_conformance.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from kinlens.embedder.errors import FilterError
from kinlens.indexer.filters.tree import Equals
from kinlens.indexer.types import (
    CANDIDATES,
    Boost,
    Entry,
    Grouping,
    SearchOptions,
    VectorStore,
    boost_of,
)
from tests.indexer.oracle import Oracle, entry, shop, units

PRICE = Boost("price", -0.15, low=0.0, high=10.0)
ORDERS = [
    SearchOptions(diversity=0.4),
    SearchOptions(boost=PRICE),
    SearchOptions(diversity=0.2, boost=PRICE),
    SearchOptions(diversity=0.3, min_score=-0.05, where=Equals("colour", "red"), exact=True),
]


def no_copies(count: int) -> list[Entry]:
    """Items of which no two are equal, so that rounding decides nothing."""
    return [replace(e, vector=v) for e, v in zip(shop(count), units(count, seed=3), strict=True)]


def reordered(
    query: np.ndarray, ranked: Sequence[tuple[float, Entry]], options: SearchOptions
) -> list[str]:
    """Keys of ranked hits in the order that the options define; PRICE alone may boost."""
    first = [e for _, e in ranked[:CANDIDATES]]
    asked = query.astype(np.float64)
    vectors = [e.vector.astype(np.float64) for e in first]
    relevance = [float(asked @ v) for v in vectors]
    if options.boost:
        prices = [e.attributes.get("price", 10.0) for e in first]
        scaled = [min(1.0, max(0.0, float(price) / 10)) for price in prices]
        relevance = [r - 0.15 * x for r, x in zip(relevance, scaled, strict=True)]
    alike = (np.array(vectors) @ np.array(vectors).T).tolist() if vectors else []
    left, d, placed = list(range(len(first))), options.diversity, list[int]()
    while left:
        placed.append(
            max(
                left,
                key=lambda i: (
                    (1 - d) * relevance[i]
                    - d * max((alike[i][j] for j in placed if d), default=0.0)
                ),
            )
        )
        left.remove(placed[-1])
    return [first[i].key for i in placed] + [e.key for _, e in ranked[CANDIDATES:]]


def check_order(store: VectorStore, count: int, orders: Sequence[SearchOptions]) -> None:
    entries = no_copies(count)
    store.add(entries)
    oracle = Oracle(store, entries)
    for query, options in product(units(2, seed=9), orders):
        [hits] = store.search(query[None], count, options)
        least = -2.0 if options.min_score is None else options.min_score
        ranked = [pair for pair in oracle.ranked(query, options) if pair[0] >= least]
        assert [hit.key for hit in hits] == reordered(query, ranked, options), options
        cosine = {e.key: score for score, e in ranked}
        scores = [cosine[hit.key] for hit in hits]
        assert [hit.score for hit in hits] == pytest.approx(scores, abs=1e-6)


def test_a_group_is_ranked_by_its_best_item(gallery) -> None:
    entries = no_copies(CANDIDATES - 20)
    gallery.add(entries)
    oracle, [query] = Oracle(gallery, entries), units(1, seed=5)
    best: dict[Any, tuple[float, Entry]] = {}
    for score, e in oracle.ranked(query, SearchOptions()):
        best.setdefault(e.attributes.get("sku", e.key), (score, e))
    for options in ORDERS[:3]:
        [found] = gallery.search_groups(query[None], 30, Grouping("sku"), options)
        expected = reordered(query, [*best.values()], options)[:30]
        assert [group.hits[0].key for group in found] == expected


def test_a_boost_scales_by_the_range_of_the_gallery_and_leaves_the_unknown_behind(gallery) -> None:
    vector = units(1)[0]
    prices = {"cheap": 1, "dear": 101, "middle": 26, "unknown": None}
    gallery.add([entry(k, vector, {} if p is None else {"price": p}) for k, p in prices.items()])

    def order(text: str) -> list[str]:
        options = SearchOptions(boost=boost_of(text))
        return [hit.key for hit in gallery.search(vector[None], 9, options)[0]]

    assert boost_of("a:b:0.1:-5:1e3") == Boost("a:b", 0.1, -5.0, 1000.0)
    assert order("price:0.1") == ["dear", "middle", "cheap", "unknown"]
    assert order("price:-0.1") == ["cheap", "middle", "dear", "unknown"]
    assert order("price:0.1:0:20") == ["dear", "middle", "cheap", "unknown"]  # two at the end
    assert order("price:-0.1:200:300") == ["cheap", "dear", "middle", "unknown"]
    gallery.update({"cheap": {"price": 50}, "dear": {"price": 50}, "middle": {"price": 50}})
    assert order("price:0.1") == ["cheap", "dear", "middle", "unknown"]  # no range, no boost


def test_only_a_known_number_boosts(gallery) -> None:
    wanted = SearchOptions(boost=boost_of("colour:0.1"))
    assert gallery.search(units(1), 5, wanted) == [[]]
    gallery.add(shop(20))
    for name in ("colour", "no such"):
        with pytest.raises(FilterError, match=f"no numeric attribute '{name}' to boost by"):
            gallery.search(units(1), 5, replace(wanted, boost=Boost(name, 0.1)))
