"""Filters: what they mean, their written forms, and what is refused."""

import random

import pytest

from kinlens.embedder.errors import FilterError
from kinlens.indexer.columns import chunks, columns, match
from kinlens.indexer.filters.json import filter_from_json
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.filters.tree import And, Equals, Exists, Filter, In, Not, Or, Range, StartsWith
from kinlens.indexer.live import attributes as live
from kinlens.indexer.types import SearchOptions
from kinlens.values import AttributeValue
from tests.indexer.oracle import entry, random_filter, units

TEXTS = ["red", "", 'a "b" \\ c\n\t\r', "it's", "grün", "\0", "👟", "true", "1", "Z", "a"]
TEXTS += ["\U0010ffff", "a\U0010ffffz"]
# Without subnormal numbers: onnxruntime makes them 0 in every thread that has run a model.
NUMBERS = [0, 1, -1, 2.5, -0.0, 1e300, 3e-308, 2**63 - 1, -(2**63), 2**53 + 1, float(2**53), 0.1]
VALUES = {"text": TEXTS, "number": NUMBERS, "boolean": [True, False]}
SCHEMA = {
    "colour": "text",
    "price": "number",
    "sale": "boolean",
    "size, (EU) `x`": "number",
    "and": "text",
    "true": "boolean",
    "a.b-c_1": "number",
    "größe": "text",
}
KNOWN = {name: VALUES[kind] for name, kind in SCHEMA.items()}
A, B, C = Equals("a", 1), Equals("b", 2), Equals("c", 3)


def as_json(where: Filter) -> dict[str, object]:
    if isinstance(where, And | Or):
        return {type(where).__name__.lower(): [as_json(part) for part in where.parts]}
    if isinstance(where, Not):
        return {"not": as_json(where.part)}
    if isinstance(where, Equals):
        return {where.name: where.value}
    if isinstance(where, In):
        return {where.name: {"in": list(where.values)}}
    if isinstance(where, Exists):
        return {where.name: {"exists": True}}
    if isinstance(where, StartsWith):
        return {where.name: {"starts with": where.start}}
    signs = {"at_least": ">=", "above": ">", "at_most": "<=", "below": "<"}
    return {where.name: {signs[limit]: value for limit, value in where.limits}}


def as_text(where: Filter) -> str:
    if isinstance(where, And | Or):
        return f" {type(where).__name__.lower()} ".join(f"({as_text(p)})" for p in where.parts)
    if isinstance(where, Not):
        return f"not ({as_text(where.part)})"
    name = "`" + where.name.replace("`", "``") + "`"
    if isinstance(where, Equals):
        return f"{name} = {literal(where.value)}"
    if isinstance(where, In):
        return f"{name} in ({', '.join(map(literal, where.values))})"
    if isinstance(where, Exists):
        return f"{name} exists"
    if isinstance(where, StartsWith):
        return f"{name} starts with {literal(where.start)}"
    signs = {"at_least": "<=", "above": "<", "at_most": "<=", "below": "<"}
    lower, upper = (
        [(signs[limit], literal(value)) for limit, value in where.limits if limit in pair]
        for pair in (("at_least", "above"), ("at_most", "below"))
    )
    return "".join(
        [*(f"{value} {sign} " for sign, value in lower), name]
        + [f" {sign} {value}" for sign, value in upper]
    )


def literal(value: AttributeValue) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    return '"' + value.replace("\\", r"\\").replace('"', r"\"") + '"'


def test_the_text_and_json_forms_mean_the_same_as_the_classes() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        where = random_filter(rng, KNOWN)
        text = as_text(where)
        again = parse_filter(text)
        assert (again, hash(again)) == (where, hash(where))
        if "`and`" not in text:  # a name that only the text form can have
            assert filter_from_json(as_json(where)) == where


def test_a_gallery_finds_exactly_the_items_that_match(gallery, monkeypatch) -> None:
    """Also in columns of many chunks, whose values are sorted several times."""
    monkeypatch.setattr(columns, "MIN_LATER", 20)
    for module in (chunks, columns, match, live):
        monkeypatch.setattr(module, "CHUNK", 64)
    rng = random.Random(2)
    entries = []
    for number in range(300):
        names = [name for name in SCHEMA if rng.random() < 0.6]
        attributes = {name: rng.choice(KNOWN[name]) for name in names}
        attributes["sku"] = f"sku {number}"
        entries.append(entry(f"k{number}", units(1)[0], attributes))
    gallery.add(entries)
    assert gallery.schema() == {**SCHEMA, "sku": "text"}
    known = {**KNOWN, "sku": [f"sku {number}" for number in range(0, 400, 9)]}
    gallery.remove(f"k{number}" for number in range(1, 300, 7))
    for _ in range(2):
        for _ in range(100):
            where = random_filter(rng, known)
            expected = [item for item in gallery.items() if where.matches(item.attributes)]
            assert gallery.page(0, 5000, where).items == expected, as_text(where)
        gallery.compact()


def test_a_filter_may_be_its_text_wherever_python_takes_one(gallery) -> None:
    gallery.add(entry(f"k{n}", units(9)[n], {"price": n}) for n in range(9))
    cheap = SearchOptions(where="price < 3")
    assert cheap == SearchOptions(where=parse_filter("price < 3"))
    [hits] = gallery.search(units(1), 9, cheap)
    assert {hit.key for hit in hits} == {"k0", "k1", "k2"}
    assert gallery.page(0, 9, "price < 3").total == 3
    assert sum(n for _, n in gallery.facets(["price"], None, cheap)["price"].values) == 3
    [facts] = gallery.attribute_facts("price < 3")
    assert facts.maximum == 2
    assert gallery.update_where("price < 3", {"sale": True}, within="price < 5") == 3
    assert gallery.remove(["k0", "k8"], within="sale = true") == 1
    assert gallery.remove_where("sale = true or price > 6") == 4
    for wrong, message in (("price <", "cannot be parsed"), (5, r"where = 5 must be a text")):
        with pytest.raises(FilterError, match=message):
            SearchOptions(where=wrong)
        with pytest.raises(FilterError, match=message):
            gallery.page(0, 1, wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a == 1", Equals("a", 1)),
        ("a != 'x'", Not(Equals("a", "x"))),
        ("a not in (1, 2)", Not(In("a", (1, 2)))),
        ("1 < a <= 2.5", Range("a", above=1, at_most=2.5)),
        ("3 >= a > 2", Range("a", above=2, at_most=3)),
        ("'x' = a", Equals("a", "x")),
        ("a = -1e-3", Equals("a", -0.001)),
        ("`a``b` = 1", Equals("a`b", 1)),
        ("a = 1 or b = 2 and not c = 3", Or((A, And((B, Not(C)))))),
        ("(a = 1 and b = 2) and c = 3", And((And((A, B)), C))),
        (r"a = 'it\'s \n \\'", Equals("a", "it's \n \\")),
    ],
)
def test_text_means(text: str, expected: Filter) -> None:
    assert parse_filter(text) == expected


def test_kinds_never_compare_and_a_condition_on_a_missing_attribute_is_false() -> None:
    for leaf in (Equals("a", 1), In("a", (1,)), Range("a", at_least=1)):
        assert not leaf.matches({"b": 1})
        assert Not(leaf).matches({"b": 1})
    values: list[AttributeValue] = [True, 1, "1"]
    for wanted in values:
        for value in values:
            same = type(value) is type(wanted)
            assert Equals("a", wanted).matches({"a": value}) is same
            assert In("a", (wanted,)).matches({"a": value}) is same
            assert (Equals("a", wanted) == Equals("a", value)) is same
            assert (In("a", (wanted,)) == In("a", (value,))) is same
    assert not Range("a", at_least=0).matches({"a": True})
    assert Equals("a", 1) == Equals("a", 1.0)


@pytest.mark.parametrize(
    ("text", "position", "expected"),
    [
        ("", 0, "an attribute"),
        ("a = red", 4, 'Expected a value such as "red" or 12.5'),
        ("(a = 1", 6, "Expected ')'"),
        ("a = 1)", 5, "Expected the end"),
        ("a = 1 b = 2", 6, "'and' or 'or' or the end"),
        ("a not 5", 6, "Expected 'in'"),
        ("a = 'x", 4, "Expected a value"),
        ("b = 1 and a in (1, 'x')", 10, "values of one type"),
        ("b = 1 and a < true", 10, "only with ="),
        (f"a = {'9' * 5000}", 0, "64 bits"),
        ("a starts with 5", 0, "must be a text"),
        ("a starts 'x'", 9, "Expected 'with'"),
        ("1 < a > 2", 2, "5 <= name <= 9"),
        (f"`{'a' * 129}` = 1", 0, "1 to 128 printable"),
    ],
)
def test_malformed_text_is_refused_with_its_position(
    text: str, position: int, expected: str
) -> None:
    with pytest.raises(FilterError, match=f"at position {position}\\b") as caught:
        parse_filter(text)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({}, "$"),
        ("a = 1", "$"),
        ({"a": None}, "$.a"),
        ({"a": {"~": 1}}, "$.a"),
        ({"a": {"in": "xyz"}}, "$.a.in"),
        ({"a": {"<": None}}, "$.a"),
        ({"a": {">": 1, "<": "b"}}, "$.a"),
        ({"a": float("nan")}, "$.a"),
        ({"a": 2**63}, "$.a"),
        ({"a": "\ud800"}, "$.a"),
        ({"not": 3}, "$.not"),
        ({"and": [{"b": 1}, {"or": [{"a": 1}, 1]}]}, "$.and[1].or[1]"),
    ],
)
def test_malformed_json_is_refused_with_its_place(value: object, place: str) -> None:
    with pytest.raises(FilterError) as caught:
        filter_from_json(value)
    assert f"at {place}" in str(caught.value)


def test_depth_and_size_are_limited_however_the_filter_is_made() -> None:
    leaf = Equals("a", 1)
    deep: Filter = leaf
    nested: object = {"a": 1}
    for _ in range(63):
        deep, nested = Not(deep), {"not": nested}
    assert parse_filter("not " * 63 + "a = 1") == deep == filter_from_json(nested)
    for make in (
        lambda: Not(deep),
        lambda: parse_filter("not " * 64 + "a = 1"),
        lambda: filter_from_json({"not": nested}),
        lambda: parse_filter("not " * 40_000 + "a = 1"),
    ):
        with pytest.raises(FilterError, match=r"levels of and, or, not, the limit is 64"):
            make()
    with pytest.raises(FilterError, match=r"1,001 conditions, the limit is 1,000"):
        Or((leaf,) * 1001)
    with pytest.raises(FilterError, match=r"12,000 values"):
        And((In("a", tuple(range(6000))), In("b", tuple(range(6000)))))
    with pytest.raises(FilterError, match=r"characters, the limit is 200,000"):
        parse_filter(" " * 200_001)
    nested = {"a": 1}
    for _ in range(5000):
        nested = {"and": [nested]}
    with pytest.raises(FilterError, match="more than 64 levels"):
        filter_from_json(nested)
    with pytest.raises(FilterError, match="it ends"):
        parse_filter("(" * 50_000)


@pytest.mark.parametrize(
    ("text", "schema", "message"),
    [
        ("not (price = 1 or color = 'red')", None, "no attribute 'color'. Known are 'colour', 'p"),
        ("price = 'red'", None, "'price' is a number, but 'red' is a text"),
        ("sale in (1, 0)", None, "'sale' is a boolean, but 1 is a number"),
        ("price = 1", {}, "No item of this gallery has attributes"),
        ("a = 1", {f"name{n}": "text" for n in range(100)}, "and 80 more"),
        ("size exists", None, "no attribute 'size' to look for"),
        ("price starts with 'x'", None, "'price' is a number"),
    ],
)
def test_a_filter_is_checked_against_the_attributes_of_the_gallery(
    text: str, schema: dict[str, str] | None, message: str
) -> None:
    known = {"colour": "text", "price": "number", "sale": "boolean"}
    parse_filter("colour = 'a' and price < 3 and sale = true").check(known)
    with pytest.raises(FilterError, match=message):
        parse_filter(text).check(known if schema is None else schema)
