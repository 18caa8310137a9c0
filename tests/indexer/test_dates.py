"""Dates are texts in the order of time, from wherever they come."""

from contextlib import closing
from datetime import UTC, date, datetime, timedelta, timezone

import pytest

from kinlens.calls import json_of
from kinlens.indexer.exchange.parquet import export_gallery, read_dump
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import import_gallery
from kinlens.indexer.ingest.sources import parse_value, parse_values, split_kind
from kinlens.indexer.types import Entry, GalleryExport, SortBy
from kinlens.values import date_text
from tests.indexer.oracle import units

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
        entry.attributes["added"] for entry in read_dump(tmp_path / "stamped.parquet").entries()
    ]
    assert found[1:2] + found[3:] == TEXTS[1:2] + TEXTS[3:]
