"""A query is a value: equal questions have one digest, different ones never."""

from dataclasses import fields, replace
from typing import Any

from indexer.filters.text import parse_filter
from indexer.types import Grouping
from service.search.query import Query, views_of

IMAGE, OTHER = b"one image", b"another image"
QUERY = Query(views_of(IMAGE), positives=("a", "b"), negatives=("c",))
CHANGES: dict[str, list[Any]] = {
    "views": [
        (),
        views_of(OTHER),
        views_of(IMAGE, [(0.0, 0.0, 0.5, 1.0)]),
        views_of(IMAGE, [(0.0, 0.0, 1.0, 0.5)]),
        views_of(IMAGE) + views_of(OTHER),
        views_of(IMAGE) + views_of(IMAGE),
    ],
    "positives": [(), ("a",), ("a", "b", "c"), ("ab",)],
    "negatives": [(), ("b",), ("c", "d")],
    "like": [0, 7],
    "generation": ["0123456789ab"],
    "k": [1, 21],
    "offset": [1],
    "min_score": [0.0, 0.5],
    "min_probability": [0.0, 0.5],
    "where": [parse_filter("a = 1"), parse_filter("a = true"), parse_filter("a = '1'")],
    "grouping": [Grouping("a"), Grouping("b"), Grouping("a", "mean"), Grouping("a", "best", 2)],
    "distinct": [True],
    "exact": [True],
}


def test_every_field_but_the_gallery_changes_the_digest() -> None:
    changed = [replace(QUERY, **{name: new}) for name, news in CHANGES.items() for new in news]
    digests = {query.digest for query in (QUERY, *changed)}
    assert len(digests) == len(changed) + 1
    assert CHANGES.keys() | {"gallery"} == {field.name for field in fields(Query)}
    assert replace(QUERY, gallery="shop").digest == QUERY.digest  # it is in the key by itself


def test_the_same_question_written_otherwise_has_the_same_digest() -> None:
    views = views_of(IMAGE) + views_of(OTHER)
    assert Query(views).digest == Query(views[::-1]).digest
    assert replace(QUERY, positives=("b", "a")).digest == QUERY.digest
    assert Query(min_score=0.0).digest == Query(min_score=-0.0).digest == Query(min_score=0).digest
    one, other = (parse_filter(text) for text in ("a = 1 and b = 2", "((a == 1) and (b=2))"))
    assert Query(where=one).digest == Query(where=other).digest


def test_a_query_is_split_into_one_for_each_view_and_keeps_the_rest() -> None:
    boxes = [(0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 0.5, 1.0)]
    query = Query(views_of(IMAGE, boxes) + views_of(OTHER), positives=("a",), k=3)
    apart = query.apart()
    assert [each.views for each in apart] == [(view,) for view in query.views]
    assert all(replace(each, views=query.views) == query for each in apart)
    assert Query(positives=("a",)).apart() == [Query(positives=("a",))]
