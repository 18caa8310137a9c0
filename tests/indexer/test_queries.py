"""Queries of a search: what is refused, what becomes of them, and queries made of items."""

import numpy as np
import pytest

from embedder.errors import InvalidParameterError
from indexer.live.ranking import check_search
from indexer.types import SearchOptions, combined_query


def unit(*values: float) -> np.ndarray:
    vector = np.array([values], np.float32)
    return vector / np.linalg.norm(vector)


def test_one_liked_item_is_the_query_itself() -> None:
    liked = unit(3, 4)
    np.testing.assert_allclose(combined_query(liked, liked[:0]), liked[0], atol=1e-7)


def test_a_combined_query_is_near_what_is_liked_and_far_from_what_is_not() -> None:
    combined = combined_query(np.vstack([unit(1, 0, 0), unit(0, 1, 0)]), unit(0, 1, 1))
    expected = unit(1, 1 - 0.5**0.5, -(0.5**0.5))[0]
    np.testing.assert_allclose(combined, expected, atol=1e-6)
    assert combined.dtype == np.float32


@pytest.mark.parametrize(
    ("liked", "disliked", "message"),
    [
        (np.empty((0, 2), np.float32), unit(1, 0), "No liked items"),
        (np.vstack([unit(1, 0), unit(-1, 0)]), np.empty((0, 2), np.float32), "2 liked and 0 dis"),
        (np.vstack([unit(1, 0), unit(0, 1), unit(0, -1), unit(-1, 0)]), unit(0, 1), None),
    ],
)
def test_likes_that_cancel_or_are_missing_are_refused(
    liked: np.ndarray, disliked: np.ndarray, message: str | None
) -> None:
    if message is None:
        np.testing.assert_allclose(combined_query(liked, disliked), [0, -1], atol=1e-6)
    else:
        with pytest.raises(InvalidParameterError, match=message):
            combined_query(liked, disliked)


@pytest.mark.parametrize(
    ("k", "options", "queries", "message"),
    [
        (0, SearchOptions(), unit(1, 0), "k = 0"),
        (True, SearchOptions(), unit(1, 0), "k = True"),
        (1.5, SearchOptions(), unit(1, 0), "k = 1.5"),
        (1, SearchOptions(offset=-1), unit(1, 0), "offset = -1"),
        (1, SearchOptions(effort=0), unit(1, 0), "effort = 0"),
        (1, SearchOptions(min_score=1.1), unit(1, 0), "min_score = 1.1"),
        (1, SearchOptions(min_score="x"), unit(1, 0), "min_score = 'x'"),  # type: ignore[arg-type]
        (1, SearchOptions(exclude=[1]), unit(1, 0), r"exclude = \[1\]"),  # type: ignore[arg-type]
        (1, SearchOptions(min_score=float("nan")), unit(1, 0), "min_score = nan"),
        (1, SearchOptions(), unit(1, 0, 0), r"shape \(1, 3\).*dimension 2"),
        (1, SearchOptions(), unit(1, 0)[0], r"shape \(2,\).*dimension 2"),
        (1, SearchOptions(), np.array([[1, 0], [1, 1]]), "Query 1 has norm 1.414"),
        (1, SearchOptions(), np.array([[np.nan, 1]]), "Query 0 has norm nan"),
        (1, SearchOptions(), np.zeros((1, 2)), "Query 0 has norm 0"),
        (1, SearchOptions(), np.array([["a", "b"]]), "Queries of type <U1"),
        (1, SearchOptions(), np.array([[None, 1]]), "Queries of type object"),
        (1, SearchOptions(), [[1, 0], [1]], "Queries are not an array"),
    ],
)
def test_a_search_out_of_range_is_refused(
    k: int, options: SearchOptions, queries: np.ndarray, message: str
) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        check_search(k, options, 2, queries)


def test_queries_come_back_in_the_form_that_engines_need() -> None:
    queries = check_search(np.int64(3), SearchOptions(), 2, np.asfortranarray(np.eye(2)))  # type: ignore[arg-type]
    assert queries.dtype == np.float32
    assert queries.flags.c_contiguous
    assert check_search(1, SearchOptions(), 2, np.empty((0, 2), np.float32)).shape == (0, 2)


def test_a_query_that_is_nearly_of_norm_one_is_made_so_and_others_keep_every_bit() -> None:
    queries = np.vstack([unit(3, 4), unit(1, 2) * np.float32(1.0009)])
    before = queries.copy()
    checked = check_search(1, SearchOptions(), 2, queries)
    np.testing.assert_array_equal(queries, before)
    np.testing.assert_array_equal(checked[0], queries[0])
    assert np.linalg.norm(checked[1].astype(np.float64)) == pytest.approx(1, abs=1e-7)
