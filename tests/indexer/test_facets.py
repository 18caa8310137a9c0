"""Counts of attribute values, against a naive count over every item; and damaged columns."""

import json
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kinlens.embedder.errors import InvalidParameterError
from kinlens.indexer.entries import Entry
from kinlens.indexer.filters.tree import Equals, Filter, In, Not, Or, Range
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.types import MAX_COUNTED_VALUES, Facet, SearchOptions
from tests.indexer.oracle import Oracle, clumped, entry, shop, units

NAMES = ("colour", "sku", "price", "sale", "weight")
WHERE: list[Filter | None] = [
    None,
    Equals("colour", "red"),
    Not(Equals("sale", True)),
    Or((Range("price", above=3), Equals("sku", "sku1"))),
    Equals("colour", "no such colour"),
]


def stock(count: int, seed: int = 0) -> list[Entry]:
    """Items of a shop, most with a weight of their own and a text that few share."""
    draw = np.random.default_rng(seed)
    entries = []
    for number, one in enumerate(shop(count, seed)):
        attributes = {**one.attributes, "label": f"label {int(draw.integers(count // 2 + 1))}"}
        if number % 6:
            attributes["weight"] = float(np.exp(draw.normal(0, 3)))
        entries.append(replace(one, attributes=attributes))
    return entries


def check(facet: Facet, entries: Sequence[Entry], name: str) -> None:
    """It equals a count of these items one by one."""
    given = [e.attributes[name] for e in entries if name in e.attributes]
    assert facet.missing == len(entries) - len(given)
    counts = Counter(given)
    is_number = bool(given) and not isinstance(given[0], str | bool)
    if is_number and len(counts) > 20:
        assert facet.values is None
        check_bins(facet.bins, given)
        return
    ranked = sorted(counts.items(), key=lambda pair: (not is_number and -pair[1], pair[0]))
    shown = ranked[:MAX_COUNTED_VALUES]
    assert facet.bins is None
    assert list(facet.values or ()) == shown
    assert facet.other == len(given) - sum(count for _, count in shown)


def check_bins(bins: Sequence[tuple[float, float, int]], given: Sequence[Any]) -> None:
    assert 1 <= len(bins) <= 20
    for number, (low, high, count) in enumerate(bins):
        is_last = number == len(bins) - 1
        assert is_last or high == bins[number + 1][0]
        assert count == sum(low <= v < high or (is_last and v == high) for v in given)
    assert sum(count for _, _, count in bins) == len(given)


def check_all(gallery: Gallery, entries: Sequence[Entry], query: np.ndarray) -> None:
    oracle, known = Oracle(gallery, entries), gallery.schema()
    names = [name for name in (*NAMES, "label") if name in known]
    for where in WHERE:
        for least in (None, 0.1, 0.99):
            excluded = frozenset(list(oracle.numbers.values())[:3]) if least else frozenset()
            options = SearchOptions(where=where, min_score=least, exclude=excluded)
            fitting = [e for s, e in oracle.ranked(query[0], options) if s >= (least or -2)]
            found = gallery.facets(names, query, options)
            assert list(found) == names
            for name in names:
                check(found[name], fitting, name)


def test_counts_equal_a_naive_count_after_any_changes(gallery) -> None:
    """With filters, thresholds, removed items and missing attributes; before and after an index."""
    rng, query = np.random.default_rng(0), units(1, 7)
    truth = {e.key: e for e in stock(150)}
    gallery.add(truth.values())
    check_all(gallery, [*truth.values()], query)
    for step in range(8):
        chosen = [f"key{n}" for n in rng.choice(150, 12, replace=False)]
        known = [key for key in chosen if key in truth]
        match step % 4:
            case 0:
                gallery.remove(known)
                truth = {key: e for key, e in truth.items() if key not in chosen}
            case 1:
                changes = {"colour": f"new {step}", "weight": step + 0.25, "sale": None}
                gallery.update(dict.fromkeys(known, changes))
                for key in known:
                    left = {**truth[key].attributes, **changes}
                    own = {name: v for name, v in left.items() if v is not None}
                    truth[key] = replace(truth[key], attributes=own)
            case 2:
                gallery.compact()
            case _:
                new = [replace(e, key=f"late{step}-{e.key}") for e in stock(20, step)]
                gallery.add(new)
                truth |= {e.key: e for e in new}
        check_all(gallery, [*truth.values()], query)
    [counts] = gallery.facets(["sale"], None, SearchOptions(where=WHERE[2]), "late").values()
    late = [e for e in truth.values() if e.key[:4] == "late" and WHERE[2].matches(e.attributes)]
    check(counts, late, "sale")
    few = dict([*truth.items()][-7:])
    gallery.remove(truth.keys() - few.keys())
    gallery.compact()  # leaves few of many numbers
    check_all(gallery, [*few.values()], query)


def test_each_value_and_bin_is_a_filter_that_leaves_as_many(gallery) -> None:
    entries = stock(200)
    gallery.add(entries)
    found = gallery.facets(["label", "weight"])
    for value, count in (found["label"].values or ())[:5]:
        assert gallery.page(0, 1, Equals("label", value)).total == count
    *bins, (low, high, last) = found["weight"].bins or ()
    assert {end - start for start, end, _ in bins} == {high - low}
    for start, end, count in bins:
        assert gallery.page(0, 1, Range("weight", at_least=start, below=end)).total == count
    assert gallery.page(0, 1, Range("weight", at_least=low, at_most=high)).total == last


def test_above_a_threshold_an_index_counts_what_a_search_without_end_lists(gallery) -> None:
    """Few are taken from its candidates, more are compared one by one."""
    vectors = clumped(4000)
    entries = [entry(f"key{n}", v, {"tens": n % 10, "n": n}, str(n)) for n, v in enumerate(vectors)]
    gallery.add(entries)
    gallery.compact(IndexSettings(kind="ivf-pq"))
    gallery.remove(f"key{n}" for n in range(0, 4000, 9))
    left = [e for n, e in enumerate(entries) if n % 9]
    oracle, query = Oracle(gallery, left), vectors[1:2]
    for least, where in ((0.8, None), (-0.2, None), (0.8, Range("n", below=900)), (-1, None)):
        for exact in (False, True):
            options = SearchOptions(min_score=least, where=where, exact=exact)
            fitting = [e for s, e in oracle.ranked(query[0], options) if s >= least]
            found = gallery.facets(["tens", "n"], query, options)
            check(found["tens"], fitting, "tens")
            check(found["n"], fitting, "n")
            [hits] = gallery.search(query, 5000, options)
            assert len(hits) == len(fitting)


@pytest.mark.parametrize(
    "numbers",
    [
        [0.1 * n for n in range(31)],
        [10**18 + n for n in range(25)],
        [-1.7e308, 1.7e308, *range(30)],
        [3e-308 * n for n in range(40)],
        [-(2**63), 2**63 - 1, *range(0, 100, 3)],
    ],
)
def test_any_numbers_have_a_histogram(gallery, numbers: list[float]) -> None:
    vectors = units(len(numbers))
    gallery.add(
        entry(f"key{n}", v, {"n": x}) for n, (v, x) in enumerate(zip(vectors, numbers, strict=True))
    )
    check_bins(gallery.facets(["n"])["n"].bins or (), numbers)


def test_a_damaged_checkpoint_is_named_and_the_catalogue_read_instead(gallery, caplog) -> None:
    gallery.add(stock(120))
    gallery.compact()
    expected = gallery.facets(NAMES)
    [path] = gallery.generation_folder.glob("columns/*.bin")
    good = path.read_bytes()
    length = int.from_bytes(good[-16:-8], "little")
    directory = json.loads(good[-16 - length : -16])
    directory["columns"]["colour"]["arrays"]["codes"] = ["|u1", 10**9, 120]  # beyond the end
    text = json.dumps(directory).encode()
    ends = len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(8, "little")
    beyond = good[: -16 - length] + text + ends
    flipped = bytes([good[0] ^ 1]) + good[1:]
    for data in (b"", good[:-1], b"x" * 100, flipped, beyond):
        path.write_bytes(data)
        caplog.clear()
        with closing(Gallery.open(gallery.path)) as opened:
            assert opened.facets(NAMES) == expected
        assert "is damaged" in caplog.text


def test_a_filter_that_was_cancelled_is_evaluated_by_the_next_search(gallery) -> None:
    gallery.add(shop(100))
    gallery.compact()
    where = Equals("colour", "blue")

    def give_up() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        gallery.search(units(1), 5, SearchOptions(where=where, checkpoint=give_up))
    assert len(gallery.search(units(1), 5, SearchOptions(where=where))[0]) == 5


def test_a_facet_of_values_that_items_do_not_share_is_refused_by_name(gallery) -> None:
    vectors = units(10_100)
    gallery.add(
        entry(f"k{n}", vector, {"sku": f"sku{n}", "half": f"{n // 2}"})
        for n, vector in enumerate(vectors)
    )
    gallery.compact()
    with pytest.raises(InvalidParameterError, match=r"'sku'.*has a different value"):
        gallery.facets(["half", "sku"])
    facts = {one.name: one.values for one in gallery.attribute_facts()}
    assert facts["sku"] is None
    assert len(facts["half"] or ()) == 50
    assert gallery.page(0, 1, In("sku", ("sku7", "sku9", "none"))).total == 2
