"""Columns: they say of each row what its attributes say, in any mix of kinds and sizes."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinlens.embedder.errors import GalleryCorruptError, InvalidParameterError
from kinlens.indexer.columns import columns as columns_module
from kinlens.indexer.columns.columns import Chosen, Columns, ColumnsBuilder, write_columns
from kinlens.indexer.columns.match import rows_matching
from kinlens.indexer.filters.tree import Equals, In, Not
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import SearchOptions, no_checkpoint
from tests.indexer.oracle import bitmap, entry, random_filter, shop, units

TEXTS = ["red", "", "grün", "\0", "👟", "Z", "a", "ab", "\uffff", "\U00010000"]
NUMBERS = [0, 1, -1, 2.5, -0.0, 1e300, 2**63 - 1, -(2**63), 2**53 + 1, float(2**53), 0.1]
KINDS = {"colour": "text", "rare": "text", "sku": "text", "n": "number", "f": "number"} | {
    "price": "number",
    "sale": "boolean",
}


def items(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Attributes of all kinds: frequent and rare, of few values, of many, and each its own."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        own: dict[str, Any] = {"sku": f"sku {draw.random()}", "f": draw.choice([0.5, 1.25, 3.0])}
        if draw.random() < 0.8:
            own["colour"] = draw.choice(TEXTS)
        if draw.random() < 0.05:
            own["rare"] = draw.choice(TEXTS)
        if draw.random() < 0.9:
            own["n"] = draw.choice(NUMBERS)
        own["price"] = draw.randint(-500, 500)
        if number % 3:
            own["sale"] = draw.random() < 0.5
        found.append(own)
    return found


def built(path: Path, attributes: list[dict[str, Any]], batch: int) -> Columns:
    builder = ColumnsBuilder(len(attributes), KINDS)
    order = random.Random(0).sample(range(len(attributes)), len(attributes))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        builder.add(rows, [attributes[row] for row in rows])
    write_columns(path, builder.columns())
    return Columns.open(path, len(attributes))


@pytest.mark.parametrize("count", [1, 7, 8, 500])
@pytest.mark.parametrize("batch", [3, 1000])
def test_rows_that_match_are_those_whose_attributes_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, batch: int
) -> None:
    """In batches that are merged a few values at a time, as those of a large segment are."""
    monkeypatch.setattr(columns_module, "MERGED_AT_ONCE", 20)
    monkeypatch.setattr(columns_module, "CHUNK", 64)
    attributes = items(count)
    columns = built(tmp_path / "columns", attributes, batch)
    skus = [own["sku"] for own in attributes][:20]
    values = {"colour": [*TEXTS, "other"], "rare": TEXTS, "sku": [*skus, "sku 2"], "n": NUMBERS}
    values |= {"f": [0.5, 1.25, 3, 7], "price": [*range(-5, 5)], "sale": [True, False]}
    rng = random.Random(count)
    for _ in range(300):
        where = random_filter(rng, values)
        expected = [where.matches(own) for own in attributes]
        found = np.unpackbits(rows_matching(where, columns, no_checkpoint), bitorder="little")
        assert found[:count].astype(bool).tolist() == expected, where


def test_a_column_gives_back_its_values_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_module, "CHUNK", 64)
    attributes = items(400)
    columns = built(tmp_path / "columns", attributes, 90)
    chosen = np.random.default_rng(0).random(400) < 0.4
    rows = np.flatnonzero(chosen)
    for name in KINDS:
        column = columns.get(name)
        given = [own.get(name) for own in attributes]
        assert column.values_at(rows) == [[] if given[r] is None else [given[r]] for r in rows]
        own = [given[row] for row in rows if given[row] is not None]
        counts, present = column.counted(Chosen(bitmap(chosen), 400))
        assert present == len(own)
        assert counts.tolist() == [own.count(value) for value in column.values]
        assert column.present == sum(value is not None for value in given)
        assert column.counts.tolist() == [given.count(value) for value in column.values]
    assert columns.get("none") is None
    assert {*columns.names} == {*KINDS}


def test_a_file_that_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "columns"
    built(path, items(50), 50)
    good = path.read_bytes()
    for data in (b"", good[:-1], good[:4], b"x" * 100, good[:-8] + bytes(8)):
        path.write_bytes(data)
        with pytest.raises(GalleryCorruptError, match=r"columns is damaged.*--rebuild"):
            Columns.open(path, 50)
    length = int.from_bytes(good[-8:], "little")
    directory = json.loads(good[-8 - length : -8])
    for change in (
        {"codes": ["|u1", 10**9, 50]},
        {"codes": ["|u1", 0, 49]},
        {"numbers": ["x", 0, 1]},
    ):
        text = json.dumps(
            {"f": directory["f"] | {"arrays": directory["f"]["arrays"] | change}}
        ).encode()
        path.write_bytes(good[: -8 - length] + text + len(text).to_bytes(8, "little"))
        with pytest.raises(GalleryCorruptError, match=r"columns is damaged.*--rebuild"):
            Columns.open(path, 50).get("f")
    path.write_bytes(good)
    column = Columns.open(path, 50).get("f")
    codes = column.codes.copy()
    codes[7] = 200
    with pytest.raises(GalleryCorruptError, match=r"unknown values.*--rebuild"):
        replace(column, codes=codes).counted(Chosen(bitmap(np.ones(50, bool)), 50))


def test_pages_follow_each_other_in_the_order_of_numbers(gallery: Gallery) -> None:
    """With items that were held out to tune the index, removed ones, and later ones."""
    entries = shop(300)
    gallery.add(entries[:250])
    gallery.compact()
    gallery.remove(e.key for e in entries[:250:9])
    gallery.add(entries[250:])
    gallery.update(
        {e.key: {"sale": True} for e in entries[1:250:31] if e.key in gallery.stored([e.key])}
    )
    where = Equals("sale", True)
    expected = [item for item in gallery.items() if where.matches(item.attributes)]
    last = expected[-1].id
    for limit in (1, 7, 1000):
        for offset in (0, 3, 90, 400):
            for after in (-1, 5, expected[40].id, last):
                page = gallery.page(offset, limit, where, after=after)
                rest = [item for item in expected if item.id > after]
                assert (page.total, page.last) == (len(expected), last)
                assert page.items == rest[offset : offset + limit]


def test_threads_with_the_same_new_filter_evaluate_it_once(gallery: Gallery) -> None:
    gallery.add(shop(200))
    gallery.compact()
    started, calls = threading.Barrier(8), []

    def checkpoint() -> None:
        calls.append(threading.get_ident())

    def search(number: int) -> list[str]:
        started.wait(10)
        options = SearchOptions(where=Not(Equals("colour", "red")), checkpoint=checkpoint)
        return [hit.key for hit in gallery.search(units(1, 3), 5, options)[0]]

    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(search, range(8))]
    assert all(one == found[0] for one in found)
    # Each search looks up before it fetches, and one looks up before the condition.
    assert len(calls) == 8 + 1


def test_a_filter_that_was_cancelled_is_evaluated_by_the_next_search(gallery: Gallery) -> None:
    gallery.add(shop(100))
    gallery.compact()
    where = Equals("colour", "blue")

    def give_up() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        gallery.search(units(1), 5, SearchOptions(where=where, checkpoint=give_up))
    assert len(gallery.search(units(1), 5, SearchOptions(where=where))[0]) == 5


def test_a_facet_of_values_that_items_do_not_share_is_refused_by_name(gallery: Gallery) -> None:
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
    assert gallery.has_more("half", "7", 1)
    assert not gallery.has_more("half", "7", 2)
    assert gallery.product_counts("half", ["7", "none"]) == ({2: 5050}, {"7": 2})
