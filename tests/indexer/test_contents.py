"""What a gallery holds: pages of items, the spread of attribute values, contents."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from embedder.errors import FilterError
from indexer.catalog.read import next_text
from indexer.filters.text import parse_filter
from indexer.gallery import Gallery
from indexer.types import MAX_COUNTED_VALUES, Entry

DIM = 4
COLOURS = ("red", "green", "blue")


def entry(number: int) -> Entry:
    vector = np.eye(DIM, dtype=np.float32)[number % DIM]
    attributes = {
        "colour": COLOURS[number % 3 if number % 7 else 0],
        "price": number / 2,
        "sale": number % 4 == 0,
        "size": number % 5,
        "product": f"p{number // 2}",
    }
    return Entry(
        f"{'shoes' if number % 2 else 'hats'}/{number:03d}", vector, f"{number:064x}", attributes
    )


ENTRIES = [entry(number) for number in range(120)]


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    gallery = Gallery.create(tmp_path / "g", name="g", bundle_id="b", dim=DIM)
    gallery.add(ENTRIES)
    yield gallery
    gallery.close()


def test_pages_put_together_are_all_items_in_the_order_of_their_numbers(gallery) -> None:
    pages = [gallery.page(offset, 50) for offset in range(0, 151, 50)]
    assert [page.total for page in pages] == [120] * 4
    keys = [item.key for page in pages for item in page.items]
    assert keys == [one.key for one in ENTRIES]


@pytest.mark.parametrize("text", [None, "price < 20"])
@pytest.mark.parametrize("prefix", ["", "shoes/"])
def test_pages_by_number_hold_every_item_although_those_read_are_removed(
    gallery, prefix: str, text
) -> None:
    where = None if text is None else parse_filter(text)
    expected = [
        one.key
        for one in ENTRIES
        if one.key.startswith(prefix) and (where is None or where.matches(one.attributes))
    ]
    keys: list[str] = []
    page = gallery.page(0, 7, where, prefix)
    last = page.last
    while page.items:
        keys += [item.key for item in page.items]
        gallery.remove([item.key for item in page.items])
        page = gallery.page(0, 7, where, prefix, after=page.items[-1].id)
        assert page.total == len(expected) - len(keys)
        assert page.last == (last if page.items else None)
    assert keys == expected


def test_a_page_after_a_number_leaves_out_the_offset_from_there(gallery) -> None:
    ids = [item.id for item in gallery.items()]
    for prefix in ("", "s", "h"):
        first = gallery.page(0, 120, None, prefix).items
        after = first[9].id
        page = gallery.page(2, 3, None, prefix, after)
        assert [item.id for item in page.items] == [item.id for item in first[12:15]]
    assert gallery.page(0, 5, after=ids[-1]).items == []
    assert gallery.page(0, 5, after=2**63 - 1).items == []


@pytest.mark.parametrize("prefix", ["shoes/", "shoes/00", "hats/119", "", "s", "z"])
@pytest.mark.parametrize("text", [None, "price < 20", 'colour = "red" and sale = true'])
def test_a_page_holds_what_fits_the_filter_and_the_prefix(gallery, prefix: str, text) -> None:
    where = None if text is None else parse_filter(text)
    expected = [
        one.key
        for one in ENTRIES
        if one.key.startswith(prefix) and (where is None or where.matches(one.attributes))
    ]
    page = gallery.page(3, 10, where, prefix)
    assert page.total == len(expected)
    assert [item.key for item in page.items] == expected[3:13]


def test_a_prefix_is_compared_letter_by_letter_also_at_the_ends_of_unicode(tmp_path) -> None:
    gallery = Gallery.create(tmp_path / "g", name="g", bundle_id="b", dim=DIM)
    keys = ["a", "ab", "a%", "A", "b", "\ud7ffx", "\ue000", "\U0010ffff", "\U0010ffffz", "é", "e"]
    gallery.add(
        [Entry(key, np.eye(DIM, dtype=np.float32)[0], f"{n:064x}") for n, key in enumerate(keys)]
    )
    for prefix in (*keys, "a\0", "\x00"):
        found = {item.key for item in gallery.page(0, 200, prefix=prefix).items}
        assert found == {key for key in keys if key.startswith(prefix)}, repr(prefix)
    gallery.close()


def test_the_next_text_is_above_every_text_with_the_prefix() -> None:
    assert next_text("ab") == "ac"
    assert next_text("\ud7ff") == "\ue000"
    assert next_text("a\U0010ffff") == "b"
    assert next_text("\U0010ffff") is None


def test_a_page_of_an_unknown_attribute_is_refused(gallery) -> None:
    with pytest.raises(FilterError, match="brand"):
        gallery.page(0, 10, parse_filter('brand = "x"'))


def test_the_facts_of_attributes_are_what_counting_all_items_gives(gallery) -> None:
    facts = {one.name: one for one in gallery.attribute_facts()}
    assert facts.keys() == ENTRIES[0].attributes.keys()
    for name in ("colour", "sale", "size"):
        counted = Counter(one.attributes[name] for one in ENTRIES)
        expected = sorted(counted.items(), key=lambda pair: (-pair[1], pair[0]))
        assert list(facts[name].values) == expected
    assert len(facts["product"].values) == MAX_COUNTED_VALUES
    assert {count for _, count in facts["product"].values} == {2}
    assert all(type(value) is bool for value, _ in facts["sale"].values)
    assert (facts["price"].values, facts["price"].minimum, facts["price"].maximum) == (
        None,
        0,
        59.5,
    )
    assert (facts["colour"].minimum, facts["colour"].maximum) == (None, None)
    assert [facts[name].kind for name in ("colour", "price", "sale")] == [
        "text",
        "number",
        "boolean",
    ]


def test_the_facts_of_attributes_follow_a_change(gallery) -> None:
    before = gallery.attribute_facts()
    assert gallery.attribute_facts() is before
    gallery.remove([one.key for one in ENTRIES])
    facts = {one.name: one for one in gallery.attribute_facts()}
    assert facts["colour"].values == ()
    assert (facts["price"].minimum, facts["price"].maximum) == (None, None)


def test_a_content_is_held_until_its_last_item_is_removed(gallery) -> None:
    twin = Entry("twin", ENTRIES[5].vector, ENTRIES[5].sha256)
    gallery.add([twin])
    contents = [ENTRIES[5].sha256, ENTRIES[6].sha256, "f" * 64]
    assert gallery.held(contents) == set(contents[:2])
    gallery.remove([ENTRIES[5].key, ENTRIES[6].key])
    assert gallery.held(contents) == {ENTRIES[5].sha256}
    gallery.remove(["twin"])
    assert gallery.held(contents) == set()
