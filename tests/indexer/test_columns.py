"""Columns: damage is named, and what they cannot count; tests of filters compare what they say."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kinlens.embedder.errors import GalleryCorruptError, InvalidParameterError
from kinlens.indexer.columns.columns import Chosen, Columns
from kinlens.indexer.filters.tree import Equals, In
from kinlens.indexer.index.segment import read_manifest
from kinlens.indexer.types import SearchOptions
from tests.indexer.conftest import segment_of
from tests.indexer.oracle import bitmap, entry, shop, units


def test_a_file_that_is_damaged_is_refused_by_name(gallery) -> None:
    gallery.add(shop(120))
    gallery.compact()
    path = segment_of(gallery.path) / "columns.bin"
    good, count = path.read_bytes(), read_manifest(path.parent).size
    length = int.from_bytes(good[-8:], "little")
    directory = json.loads(good[-8 - length : -8])
    directory["colour"]["arrays"]["codes"] = ["|u1", 10**9, count]  # beyond the end
    text = json.dumps(directory).encode()
    beyond = good[: -8 - length] + text + len(text).to_bytes(8, "little")
    for data in (b"", good[:-1], b"x" * 100, beyond):
        path.write_bytes(data)
        with pytest.raises(GalleryCorruptError, match=r"columns\.bin is damaged.*--rebuild"):
            Columns.open(path, count).get("colour")
    path.write_bytes(good)
    column = Columns.open(path, count).get("colour")
    codes = column.codes.copy()
    codes[7] = 200
    with pytest.raises(GalleryCorruptError, match=r"unknown values.*--rebuild"):
        replace(column, codes=codes).counted(Chosen(bitmap(np.ones(count, bool)), count))


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
