"""Attributes in columns: right after any changes, and apart from the index."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from threading import Event, Semaphore
from typing import Any

import numpy as np
import pytest

from kinlens.indexer.catalog.vectors import RowIds
from kinlens.indexer.columns import chunks, columns, match
from kinlens.indexer.entries import Entry
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.live import attributes, keeper
from kinlens.indexer.types import Grouping, SearchOptions, SortBy
from kinlens.values import AttributeType, AttributeValue, values_in
from tests.indexer.conftest import faults, segment_of
from tests.indexer.oracle import entry, units

FILTERS = [
    "price < 40",
    "price >= 20 and price < 90",
    'colour = "red" or price > 80',
    'not (colour = "red")',
    'sizes = "m"',
    'colour = "blue" and not (sizes = "s")',
    "extra exists",
    'name starts with "n1"',
]
NAMES = ("price", "colour", "sizes", "name", "extra")


def drawn(rng: np.random.Generator, step: int) -> dict[str, Any]:
    """Random attributes, some of them missing, of a growing number of values."""
    sizes = [str(size) for size in rng.choice(["s", "m", "l", "xl"], int(rng.integers(4)), False)]
    given: dict[str, Any] = {
        "price": int(rng.integers(100)) + float(rng.choice([0, 0.5, step / 64])),
        "colour": str(rng.choice(["red", "blue", f"colour {step}"])),
        "name": f"n{int(rng.integers(3))} of many {int(rng.integers(2000))}",
    }
    left = {name: value for name, value in given.items() if rng.random() < 0.8}
    if sizes:
        left["sizes"] = tuple(sizes)
    if step > 6 and rng.random() < 0.1:  # an attribute that no item had before
        left["extra"] = bool(rng.random() < 0.5)
    return left


def check(gallery: Gallery, truth: dict[str, Entry], rng: np.random.Generator) -> None:
    """Pages, searches, facets, sorted pages and groups equal those of a look at each item."""
    known, items = gallery.schema(), list(gallery.items())
    assert {i.key: dict(i.attributes) for i in items} == {
        key: dict(own.attributes) for key, own in truth.items()
    }
    vectors = np.stack([truth[item.key].vector for item in items])
    query = units(1, int(rng.integers(1000)))
    for text in rng.choice(FILTERS, 3, replace=False).tolist():
        where = parse_filter(text)
        if not set(NAMES) & set(known) >= {name for name in NAMES if name in text}:
            continue
        fit = [item for item in items if where.matches(item.attributes)]
        assert [i.key for i in gallery.page(0, 5000, where).items] == [i.key for i in fit], text
        [hits] = gallery.search(query, 5, SearchOptions(where=where, exact=True))
        scores = sorted(
            (float(vectors[n] @ query[0]) for n, i in enumerate(items) if i in fit), reverse=True
        )
        np.testing.assert_allclose([hit.score for hit in hits], scores[:5], atol=1e-5)
        for name in {"colour", "sizes"} & set(known):
            facet = gallery.facets([name], None, SearchOptions(where=where))[name]
            given = [values_in(item.attributes.get(name)) for item in fit]
            assert facet.missing == sum(not own for own in given)
            assert dict(facet.values or ()) == Counter(value for own in given for value in own)
    if "price" in known:
        for descending in (False, True):
            order = SortBy("price", descending)
            found = gallery.page(0, 30, sort_by=order).items
            priced = [i for i in items if "price" in i.attributes]
            priced.sort(key=lambda i: i.attributes["price"], reverse=descending)
            rest = [i for i in items if "price" not in i.attributes]
            assert [i.key for i in found] == [i.key for i in [*priced, *rest][:30]]
    if "colour" in known:
        [groups] = gallery.search_groups(query, len(items), Grouping("colour", 1))
        colours = {i.attributes["colour"] for i in items if "colour" in i.attributes}
        assert {g.value for g in groups if g.value is not None} == colours


@pytest.mark.parametrize("seed", range(4))
def test_attributes_are_right_after_any_changes_compactions_and_openings(
    gallery, monkeypatch, seed: int
) -> None:
    for module in (chunks, columns, match, attributes):
        monkeypatch.setattr(module, "CHUNK", 64)
    monkeypatch.setattr(columns, "MIN_LATER", 8)
    rng = np.random.default_rng(seed)
    truth: dict[str, Entry] = {}
    count = 0
    with ExitStack() as opened:
        other = opened.enter_context(closing(Gallery.open(gallery.path)))  # like another process
        for step in range(24):
            chosen = [str(key) for key in rng.permutation([*truth])[:20]]
            kind = int(rng.integers(7)) if truth else 0
            if kind <= 1:
                vectors = units(30, int(rng.integers(10**6)))
                new = [
                    entry(f"k{count + n}", vector, drawn(rng, step), f"{seed} {count + n}")
                    for n, vector in enumerate(vectors)
                ]
                count += len(new)
                gallery.add(new)
                truth |= {one.key: one for one in new}
            elif kind == 2:
                changes = {key: drawn(rng, step) for key in chosen}
                for key, change in changes.items():
                    own = {**dict.fromkeys(NAMES), **change}
                    gallery.update({key: own})
                    truth[key] = replace(truth[key], attributes=change)
            elif kind == 3:
                gallery.remove(chosen)
                if step % 2:
                    gallery.restore(chosen[:10])
                    chosen = chosen[10:]
                truth = {key: own for key, own in truth.items() if key not in chosen}
            elif kind == 4:
                gallery.compact(keep_removed_s=float(rng.choice([0, 1000])))
            elif kind == 5:
                other.close()
                other = opened.enter_context(closing(Gallery.open(gallery.path)))
            else:
                with closing(Gallery.open(gallery.path)) as writer:
                    writer.update({key: {"price": step + 0.125} for key in chosen})
                for key in chosen:
                    left = {**truth[key].attributes, "price": step + 0.125}
                    truth[key] = replace(truth[key], attributes=left)
            if truth:
                check(gallery if step % 3 else other, truth, rng)
        check(gallery, truth, rng)
        check(other, truth, rng)


def test_a_changed_attribute_writes_nothing_of_an_index_and_makes_no_compaction_due(
    gallery, monkeypatch
) -> None:
    vectors = units(3000)
    gallery.add(entry(f"k{n}", v, {"price": n % 7}, str(n)) for n, v in enumerate(vectors))
    gallery.compact(IndexSettings(kind="ivf-pq"))
    folder = segment_of(gallery.path)
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert "columns.bin" not in before
    monkeypatch.setattr("kinlens.indexer.live.upkeep._SMALL_DELTA", 100)
    assert gallery.update({f"k{n}": {"price": n + 0.5} for n in range(3000)}) == 3000
    assert gallery.needs_compaction() is None
    assert gallery.page(0, 1, "price > 2000").total == 1000
    again = [
        entry(f"k{n}", v, {"price": n + 0.5, "of": "7"}, str(n)) for n, v in enumerate(vectors)
    ]
    assert gallery.add(again).updated == 3000
    assert gallery.update_where("of = '7'", {"sizes": ("S", "M")}) == 3000
    assert gallery.retype_attribute("of", "number") == 3000
    assert gallery.drop_attribute("sizes") == 3000
    assert gallery.schema() == {"price": "number", "of": "number"}
    assert gallery.page(0, 1, "of = 7").total == 3000
    assert gallery.needs_compaction() is None
    assert segment_of(gallery.path) == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_a_changed_value_copies_one_chunk_of_its_own_column(monkeypatch) -> None:
    """A write has all attributes of the items that it touches; most of them are as before."""
    for module in (chunks, columns, match, attributes):
        monkeypatch.setattr(module, "CHUNK", 64)
    types: dict[str, AttributeType] = {"price": "number", "brand": "text", "tags": "text"}
    given: list[dict[str, AttributeValue]] = [
        {"price": n % 40, "brand": f"b{n % 7}", "tags": (f"t{n % 3}", "all")} for n in range(300)
    ]
    empty = columns.Columns("", RowIds(np.arange(300), 299), 0, 300, {})
    before = empty.changed(np.arange(300), given, types, 1, 300)
    given[70]["price"] = 1000
    after = before.changed(np.array([3, 70, 200]), [given[n] for n in (3, 70, 200)], types, 2, 300)
    copied = {
        (name, index)
        for name, column in after.columns.items()
        for index in range(after.chunks)
        if column.chunk(index) is not before.columns[name].chunk(index)
    }
    assert copied == {("price", 1)}
    assert after.columns["price"].values_at(np.array([69, 70, 71])) == [[29], [1000], [31]]
    assert before.columns["price"].values_at(np.array([70])) == [[30]]


def test_the_values_of_erased_items_leave_the_columns(gallery) -> None:
    gallery.add(entry(f"k{n}", v, {"name": f"secret {n}"}) for n, v in enumerate(units(20)))
    gallery.compact()
    gallery.remove(["k3"])
    gallery.compact()
    [file] = gallery.generation_folder.glob("columns/*.bin")
    assert b"secret 2" in file.read_bytes()
    assert b"secret 3" not in file.read_bytes()
    assert gallery.facets(["name"])["name"].missing == 0


@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_condition_does_not_match_items_without_a_value_of_many(
    gallery, monkeypatch, is_reopened: bool
) -> None:
    """One chunk has more values than a byte counts, the next one fewer, and gaps."""
    for module in (chunks, columns, match, attributes):
        monkeypatch.setattr(module, "CHUNK", 512)
    vectors = units(1024)
    gallery.add([entry(f"a{n}", vectors[n], {"price": n % 400}) for n in range(512)])
    gallery.compact()
    gallery.page(0, 1, "price >= 0")
    some = [{"price": n % 100} if n % 2 else {} for n in range(512)]
    gallery.add([entry(f"b{n}", vectors[512 + n], own) for n, own in enumerate(some)])
    if is_reopened:
        gallery.compact()
        path = gallery.path
        gallery.close()
        gallery = Gallery.open(path)
    for text, count in (("price >= 0", 768), ("price exists", 768), ("not price exists", 256)):
        assert gallery.page(0, 1, text).total == count, text


def test_filters_of_another_process_survive_the_erasure_of_all_items(gallery) -> None:
    with closing(Gallery.open(gallery.path)) as other:
        gallery.add([entry(f"a{n}", vector, {"n": n}) for n, vector in enumerate(units(20))])
        assert other.page(0, 5, "n >= 0").total == 20
        gallery.remove([f"a{n}" for n in range(20)])
        assert other.page(0, 5, "n >= 0").total == 0
        gallery.compact()
        for one in (gallery, other, other):
            assert one.page(0, 5, "n >= 0").total == 0


def test_values_that_no_item_has_any_more_count_for_nothing(gallery, monkeypatch) -> None:
    monkeypatch.setattr(attributes, "_MANY", 50)
    vectors = units(300)
    gallery.add([entry(f"a{n}", vectors[n], {"status": f"old {n}"}) for n in range(300)])
    gallery.compact()
    gallery.update({f"a{n}": {"status": f"new {n % 3}"} for n in range(300)})
    counts = dict(gallery.facets(["status"])["status"].values)
    assert counts == {f"new {n}": 100 for n in range(3)}
    gallery.compact()
    [file] = gallery.generation_folder.glob("columns/*.bin")
    assert b"old 7" not in file.read_bytes()


def test_only_a_search_with_a_filter_waits_for_the_changes_of_another_process(
    gallery, monkeypatch
) -> None:
    vectors = units(50)
    gallery.add([entry(f"a{n}", vectors[n], {"price": 1}) for n in range(50)])
    is_applying, may_go_on = Event(), Event()
    apply = columns.Columns.changed

    def changed(*arguments: Any) -> columns.Columns:
        is_applying.set()
        assert may_go_on.wait(60)
        return apply(*arguments)

    with closing(Gallery.open(gallery.path)) as other, ThreadPoolExecutor(2) as pool:
        assert other.page(0, 1, "price = 1").total == 50
        gallery.update({"a7": {"price": 2}})
        monkeypatch.setattr(columns.Columns, "changed", changed)
        filtered = pool.submit(other.page, 0, 1, "price = 2")
        try:
            assert is_applying.wait(60)
            [hits] = pool.submit(other.search, vectors[7:8], 1).result(60)
            assert hits[0].key == "a7"
            assert not filtered.done()
        finally:
            may_go_on.set()
        assert filtered.result(60).total == 1


def test_columns_are_stored_in_the_background_once_although_a_write_comes_between(
    gallery, monkeypatch
) -> None:
    """Also if several processes have the gallery open."""
    monkeypatch.setattr(keeper, "_MIN_CHANGES", 100)
    vectors, stored, rounds = units(400), [], Semaphore(0)
    gallery.add([entry(f"a{n}", vectors[n], {"price": n}) for n in range(400)])
    gallery.compact()
    gallery.update({f"a{n}": {"price": n + 1} for n in range(400)})

    def write_between(point: str) -> None:
        if point == "columns: before rename":
            stored.append(point)
            with closing(Gallery.open(gallery.path)) as other:
                other.update({f"a{len(stored)}": {"price": 1000}})
            assert gallery.page(0, 1, "price = 1000").total == len(stored)

    def needs_compaction() -> None:  # the first step of each round
        rounds.release()

    with faults(write_between), closing(Gallery.open(gallery.path)) as second:
        for one in (gallery, second):
            assert one.page(0, 1, "price >= 0").total == 400
        for one in (gallery, second):
            monkeypatch.setattr(one, "needs_compaction", needs_compaction)
            background = one.compact_in_background()
            for _ in range(3):
                assert rounds.acquire(timeout=60)
                background.nudge()
        assert len(stored) == 1
        for one in (gallery, second):
            assert one.page(0, 1, "price = 1000").total == 1


def test_a_writer_deletes_the_parts_of_an_unfinished_checkpoint(gallery) -> None:
    gallery.add([entry("a", units(1)[0], {"price": 1})])
    gallery.compact()
    part = gallery.generation_folder / "columns" / ".stage-of-a-killed-process"
    part.mkdir()
    with closing(Gallery.open(gallery.path)) as writer:
        assert part.is_dir()
        writer.update({"a": {"price": 2}})
        assert not part.exists()
