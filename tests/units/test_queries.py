"""A query is a value: equal questions have one digest; a probability is a least score."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from indexer.filters.text import parse_filter
from indexer.types import Grouping
from service.search.query import UNREACHABLE, Query, least_score, score_of, views_of
from tests.support.market import CALIBRATION

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


def calibrated(slope: float, intercept: float) -> object:
    return CALIBRATION.model_copy(update={"slope": slope, "intercept": intercept})


@pytest.mark.parametrize("slope", [0.0, 1e-6, 1.0, 20.0, 500.0])
@pytest.mark.parametrize("intercept", [-30.0, -3.0, 0.0, 3.0])
def test_the_score_is_the_least_that_has_the_probability(slope: float, intercept: float) -> None:
    calibration = calibrated(slope, intercept)
    for probability in (0.0, 1e-9, 0.1, 0.5, 0.9, 1 - 1e-9, 1.0):
        score = score_of(calibration, probability)
        if score is None:
            assert calibration.probability(np.array(-1.0)) >= probability
        elif score == UNREACHABLE:
            assert calibration.probability(np.array(1.0)) < probability
        else:
            below = np.nextafter(np.float32(score), np.float32(-1))
            assert calibration.probability(np.array(score)) >= probability
            assert calibration.probability(np.array(below)) < probability


def test_the_probability_of_a_hit_lets_this_hit_pass() -> None:
    for score in np.random.default_rng(0).uniform(-1, 1, 200).astype(np.float32):
        likely = float(CALIBRATION.probability(np.array(score)))
        least = least_score(None, likely, CALIBRATION)
        assert least is None or least <= score
