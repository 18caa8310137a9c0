"""Attributes with several values, such as sizes; and dates: texts in the order of time."""

import json
import random
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kinlens.calls import json_of
from kinlens.embedder.errors import FilterError, InvalidParameterError, SourceError
from kinlens.indexer.checks.verify import check_files
from kinlens.indexer.entries import Entry, parse_value
from kinlens.indexer.exchange.parquet import export_gallery
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.filters.tree import Equals, Filter, Range
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import import_gallery
from kinlens.indexer.ingest.foreign import read_export
from kinlens.indexer.ingest.sources import csv_changes, csv_source
from kinlens.indexer.ingest.tables import parse_values, split_kind
from kinlens.indexer.types import Boost, GalleryExport, Grouping, SearchOptions, SortBy, sort_by_of
from kinlens.values import AttributeValue, date_text
from tests.indexer.oracle import BUNDLE, Oracle, entry, ids_of, random_filter, shop, units

SIZES = ["S", "M", "L", "XL"]
VALUES = {"sizes": [*SIZES, "none"], "lengths": [1, 2.5, 3, 40], "colour": ["red", "blue"]}


def stock(count: int = 120, seed: int = 0) -> list[Entry]:
    """Items with no size, one or several; with lists, single values and empty lists."""
    draw = random.Random(seed)
    entries = []
    for one in shop(count, seed):
        own: dict[str, Any] = {**one.attributes}
        own["sizes"] = draw.choice([draw.sample(SIZES, draw.randint(0, 4)), draw.choice(SIZES)])
        if draw.random() < 0.7:
            own["lengths"] = [draw.choice([1, 2.5, 3, 40]) for _ in range(draw.randint(1, 3))]
        entries.append(replace(one, attributes=own))
    return entries


def check_all(gallery: Gallery, entries: list[Entry], seed: int) -> None:
    """Filters, facets, groups and pages equal a scan of each item."""
    oracle, rng, query = Oracle(gallery, entries), random.Random(seed), units(1, 5)
    for _ in range(25):
        where = random_filter(rng, VALUES, 2)
        options = SearchOptions(where=where, distinct=rng.random() < 0.5)
        fitting = [e for _, e in oracle.ranked(query[0], options)]
        assert gallery.page(0, 1, where).total == len(fitting), where
        hits = gallery.search(query, 10, options)[0]
        assert [h.key for h in hits] == [key for _, key in oracle.hits(query[0], 10, options)]
        for name in ("sizes", "lengths"):
            counts = dict(
                gallery.facets([name], None, SearchOptions(where=where))[name].values or ()
            )
            given = [e.attributes[name] for e in fitting if name in e.attributes]
            each = [v for own in given for v in ({*own} if isinstance(own, tuple) else {own})]
            assert counts == {value: each.count(value) for value in each}
        grouping = Grouping("sizes", rng.choice([1, 3]))
        [groups] = gallery.search_groups(query, 9, grouping, options)
        expected = oracle.groups(query[0], 9, grouping, options)
        assert [(g.value, [h.key for h in g.hits]) for g in groups] == [
            (value, keys) for value, _, keys in expected
        ]


def test_several_values_are_filtered_counted_and_grouped_after_any_changes(gallery) -> None:
    truth = {e.key: e for e in stock()}
    gallery.add(truth.values())
    check_all(gallery, [*truth.values()], 1)
    gallery.compact()
    check_all(gallery, [*truth.values()], 2)
    changes: dict[str, Any] = {"key1": ["S", "S", "XL"], "key2": "M", "key3": None, "key4": []}
    changes = {key: {"sizes": value} for key, value in changes.items()}
    gallery.update(changes)
    sizes = [item.attributes.get("sizes") for item in gallery.stored([*changes]).values()]
    assert sizes == [("S", "S", "XL"), "M", None, None]
    gallery.remove(["key7", "key8"])
    gallery.add([entry("new", units(1, 77)[0], {"sizes": ["XXL", "M"]})])
    current = {item.key: item.attributes for item in gallery.items()}
    late = [
        replace(truth.get(key, entry("new", units(1, 77)[0])), attributes=own)
        for key, own in current.items()
    ]
    check_all(gallery, late, 3)
    gallery.compact()
    check_all(gallery, late, 4)
    check_files(gallery.path)


def test_an_empty_list_is_no_value_and_one_value_lies_between_both_limits(gallery) -> None:
    one = entry("a", units(1)[0], {"n": [1, 9], "tags": []})
    assert dict(one.attributes) == {"n": (1, 9)}
    gallery.add([one, entry("b", units(2)[1], {"n": [4, 5]})])
    assert gallery.add([one]).unchanged == 1
    assert gallery.schema() == {"n": "number"}
    found = gallery.page(0, 9, Range("n", at_least=3, at_most=6)).items
    assert [item.key for item in found] == ["b"]


def test_lists_travel_through_parquet_and_csv(gallery, tmp_path) -> None:
    gallery.add(stock(60))
    file = tmp_path / "shop.parquet"
    export_gallery(gallery, file, {"name": "shop", "bundle_id": BUNDLE})
    import_gallery(read_export(file), tmp_path / "copy")
    with closing(Gallery.open(tmp_path / "copy")) as copy:
        assert ids_of(copy).keys() == ids_of(gallery).keys()
        for mine, other in zip(gallery.items(), copy.items(), strict=True):
            assert mine.attributes == other.attributes
    table = tmp_path / "list.csv"
    (tmp_path / "a.png").write_bytes(b"")
    table.write_text(
        "key,path,sizes:text[],n:number[],on:boolean[]\n"
        "a,a.png,S|M,1|2.5,true|false\n"
        'b,a.png,"[""S|M"", ""L""]","[1, 2]",[true]\n'
        "c,a.png,S|M|,,\n"
        "d,a.png,,,\n"
    )
    rows = {record.key: dict(record.attributes) for record in csv_source(table).records()}
    assert rows == {
        "a": {"sizes": ("S", "M"), "n": (1, 2.5), "on": (True, False)},
        "b": {"sizes": ("S|M", "L"), "n": (1, 2), "on": (True,)},
        "c": {"sizes": ("S", "M")},
        "d": {},
    }
    changes = tmp_path / "changes.csv"
    changes.write_text("key,sizes:text[]\nkey1,XL\nkey2,\n")
    gallery.update(csv_changes(changes, gallery.schema())[1])
    stored = gallery.stored(["key1", "key2"])
    assert stored["key1"].attributes["sizes"] == ("XL",)
    assert "sizes" not in stored["key2"].attributes
    table.write_text("key,path,n:number[]\na,a.png,[1;2]\n")
    with pytest.raises(SourceError, match=r"list\.csv:2: column n .*expected values such as S\|M"):
        [*csv_source(table).records()]


def sorted_by(gallery: Gallery, order: SortBy, where: Filter | None) -> list[str]:
    """The naive order: by the lowest or highest value, then by number; items without one last."""
    items = [item for item in gallery.items() if where is None or where.matches(item.attributes)]
    known = [item for item in items if order.value_of(item.attributes) is not None]
    known.sort(key=lambda item: order.value_of(item.attributes), reverse=order.descending)
    return [item.key for item in known] + [item.key for item in items if item not in known]


def test_lists_of_items_are_sorted_by_an_attribute(gallery) -> None:
    entries = stock(150)
    for step in range(3):
        gallery.add([replace(e, key=f"{step}-{e.key}") for e in entries])
        if step == 1:
            gallery.compact()
            gallery.remove([f"0-key{n}" for n in range(0, 150, 7)])
            gallery.update({"0-key1": {"price": None}, "0-key2": {"price": 3.25, "sizes": ["A"]}})
        for name in ("price", "sizes", "lengths", "sale"):
            for descending in (False, True):
                order = SortBy(name, descending)
                for where in (None, Equals("colour", "red"), Range("price", above=100)):
                    expected = sorted_by(gallery, order, where)
                    for offset, limit in ((0, 9), (5, 40), (0, 1000)):
                        page = gallery.page(offset, limit, where, sort_by=order)
                        keys = [item.key for item in page.items]
                        assert keys == expected[offset : offset + limit], (name, descending, where)
                        assert page.total == len(expected)


@pytest.mark.parametrize("count", [255, 256])
def test_any_number_of_values_is_sorted_from_both_ends(gallery, count: int) -> None:
    """255 values take the codes 1 to 255 of one byte."""
    numbers = [n // 2 for n in range(2 * count)]
    gallery.add(entry(f"k{n}", v, {"n": numbers[n]}) for n, v in enumerate(units(2 * count)))
    gallery.compact()
    for order, expected in ((SortBy("n"), "k0"), (SortBy("n", True), f"k{2 * count - 2}")):
        assert [item.key for item in gallery.page(0, 1, sort_by=order).items] == [expected]
    with pytest.raises(InvalidParameterError, match=r"10,001; at most 10,000 items are sorted"):
        gallery.page(10_000, 1, sort_by=SortBy("n"))


def test_a_boost_takes_the_preferred_of_several_values(gallery) -> None:
    vector = units(1)[0]
    for key, sizes in (("low", [1, 2]), ("high", [2, 9]), ("one", 5), ("none", [])):
        gallery.add([entry(key, vector, {"sizes": sizes, "n": 1}, content=key)])
    for weight, best in ((0.1, "high"), (-0.1, "low")):
        [hits] = gallery.search(vector[None], 4, SearchOptions(boost=Boost("sizes", weight)))
        assert hits[0].key == best


MOMENTS = [
    date(2026, 11, 24),
    datetime(2026, 11, 25, 0, 30, tzinfo=timezone(timedelta(hours=2))),  # still the 24th in UTC
    date(2026, 11, 25),
    datetime(2026, 11, 25, 10, 30),
    datetime(2026, 11, 25, 10, 30, 1, 5, tzinfo=UTC),
]
TEXTS = [
    "2026-11-24",
    "2026-11-24T22:30:00Z",
    "2026-11-25",
    "2026-11-25T10:30:00Z",
    "2026-11-25T10:30:01Z",
]


def test_texts_of_dates_are_in_the_order_of_time() -> None:
    assert [date_text(moment) for moment in MOMENTS] == TEXTS
    assert json_of({"added": MOMENTS[1], "seen": [MOMENTS[0]]}) == (
        '{"added": "2026-11-24T22:30:00Z", "seen": ["2026-11-24"]}'
    )


class Colour(Enum):
    RED = "red"


OF_OTHER_LIBRARIES: dict[str, tuple[Any, AttributeValue]] = {
    "int64": (np.int64(3), 3),
    "float32": (np.float32(9.9), 9.9),
    "float64": (np.float64(0.1), 0.1),
    "bool": (np.bool_(True), True),
    "str": (np.str_("x"), "x"),
    "decimal": (Decimal("9.90"), 9.9),
    "whole decimal": (Decimal("9.00"), 9),
    "fraction": (Fraction(1, 4), 0.25),
    "enum": (Colour.RED, "red"),
    "date": (date(2026, 1, 2), "2026-01-02"),
    "datetime64[D]": (np.datetime64("2026-01-02"), "2026-01-02"),
    "datetime64[ns]": (np.datetime64("2026-01-02T03:04:05", "ns"), "2026-01-02T03:04:05Z"),
    "timestamp": (pd.Timestamp("2026-01-02 03:04:05", tz="Europe/Berlin"), "2026-01-02T02:04:05Z"),
    "array": (np.array([1, 2]), (1, 2)),
    "series": (pd.Series(["b", "a"]), ("b", "a")),
    "set": ({"b", "a"}, ("a", "b")),
    "list": ([np.float32(0.1), Decimal(2)], (0.1, 2)),
}
MISSING = (float("nan"), np.float32("nan"), Decimal("NaN"), pd.NaT, pd.NA, np.datetime64("NaT"))


def test_values_of_numpy_pandas_and_the_standard_library_are_stored_alike(tmp_path: Path) -> None:
    """What the client sends for a value is what the library stores for it."""
    gallery = Gallery.create(tmp_path / "g", name="g", bundle_id=BUNDLE, dim=2)
    for key, (given, stored) in OF_OTHER_LIBRARIES.items():
        vector = np.array([1, 0], np.float32)
        gallery.add([Entry(key, vector, attributes={key: given})])
        gallery.update({key: {f"{key} changed": given}})
        [item] = gallery.entries([key])
        values = [item.attributes[key], item.attributes[f"{key} changed"]]
        assert [(type(value), value) for value in values] == [(type(stored), stored)] * 2
        assert json.loads(json_of({"a": given}))["a"] == (
            [*stored] if isinstance(stored, tuple) else stored
        )
    for value in (*MISSING, np.timedelta64(1, "s"), b"x", None):
        with pytest.raises(InvalidParameterError, match=r"Omit|must be a string"):
            gallery.add([Entry("k", np.array([1, 0], np.float32), attributes={"a": value})])
    gallery.close()


def test_a_column_of_dates_is_read_checked_and_written_in_utc() -> None:
    name, typed = split_kind("added:date")
    assert (name, typed.kind) == ("added", "text")
    assert typed.value_of(" 2026-11-25T00:30+02:00 ") == TEXTS[1]
    assert typed.value_of("2026-11-25T10:30Z") == TEXTS[3]
    assert parse_values("2026-11-24|2026-11-25", "date") == (TEXTS[0], TEXTS[2])
    assert split_kind("seen:date[]")[1].value_of('["2026-11-24"]') == (TEXTS[0],)
    for wrong in ("25.11.2026", "2026-13-01", "yesterday", "20261"):
        with pytest.raises(ValueError, match="expected a date such as 2026-11-25"):
            parse_value(wrong, "date")
    with pytest.raises(ValueError, match="text, number, boolean, date"):
        split_kind("added:day")


def test_dates_are_filtered_and_sorted_from_python_and_parquet(tmp_path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    entries = [
        Entry(f"k{n}", vector, f"{n:064x}", {"added": moment})
        for n, (vector, moment) in enumerate(zip(units(5), MOMENTS, strict=True))
    ]
    facts = {"name": "shop", "bundle_id": "b" * 64}
    path = tmp_path / "shop"
    import_gallery(GalleryExport(facts, entries[0].vector.shape[0], 5, lambda: iter(entries)), path)
    with closing(Gallery.open(path)) as gallery:
        page = gallery.page(0, 9, parse_filter('"2026-11-24T12" <= added < "2026-11-25T10:30:00Z"'))
        assert [item.key for item in page.items] == ["k1", "k2"]
        last = gallery.page(0, 2, sort_by=SortBy("added", descending=True))
        assert [item.key for item in last.items] == ["k4", "k3"]
        export_gallery(gallery, tmp_path / "shop.parquet", facts)
    table = pq.read_table(tmp_path / "shop.parquet")
    place = table.schema.get_field_index("attribute.added")
    moments = [datetime.fromisoformat(text).replace(tzinfo=UTC) for text in TEXTS]
    stamped = table.set_column(
        place, "attribute.added", pa.array(moments, pa.timestamp("us", "UTC"))
    )
    pq.write_table(stamped, tmp_path / "stamped.parquet")
    found = [
        entry.attributes["added"] for entry in read_export(tmp_path / "stamped.parquet").entries()
    ]
    assert found[1:2] + found[3:] == TEXTS[1:2] + TEXTS[3:]


def test_hits_and_groups_are_sorted_by_an_attribute(gallery: Gallery) -> None:
    gallery.add(stock(300))
    query = units(1, 9)
    for order in (SortBy("price"), SortBy("sizes", descending=True)):
        best = gallery.search(query, 200)[0]
        [found] = gallery.search(query, 200, SearchOptions(sort_by=order))
        values = [order.value_of(hit.attributes) for hit in best]
        known = sorted((v for v in values if v is not None), reverse=order.descending)
        shown = [order.value_of(hit.attributes) for hit in found]
        assert shown == known + [None] * values.count(None)
        assert {hit.key for hit in found} == {hit.key for hit in best}
        assert gallery.search(query, 10, SearchOptions(sort_by=order, offset=20))[0] == found[20:30]
    groups = gallery.search_groups(
        query, 5, Grouping("sku"), SearchOptions(sort_by=SortBy("price"))
    )
    prices = [group.hits[0].attributes.get("price") for group in groups[0]]
    assert prices == sorted(prices)
    for options in (
        SearchOptions(sort_by=SortBy("price"), diversity=0.1),
        SearchOptions(sort_by=SortBy("price"), boost=Boost("price", 0.1)),
    ):
        with pytest.raises(InvalidParameterError, match="sort_by cannot be combined"):
            gallery.search(query, 5, options)
    with pytest.raises(FilterError, match="no attribute 'weight' to sort by"):
        gallery.search(query, 5, SearchOptions(sort_by=SortBy("weight")))
    assert (sort_by_of("price"), sort_by_of("a:b:desc"), sort_by_of("price:asc")) == (
        SortBy("price"),
        SortBy("a:b", True),
        SortBy("price"),
    )
