import numpy as np
import pytest
from pydantic import ValidationError

from embedder.calibration import (
    NEAR,
    SAME_PICTURE,
    SMALLEST_GALLERY,
    Calibration,
    Threshold,
    near_score,
)
from tests.embedder.bundles import CALIBRATION


def test_the_probability_is_the_logistic_of_the_score() -> None:
    scores = np.array([[0.0, 0.25], [0.5, 1.0]], dtype=np.float32)
    expected = 1 / (1 + np.exp(-(12 * scores.astype(np.float64) - 6)))
    np.testing.assert_allclose(CALIBRATION.probability(scores), expected, rtol=1e-12)
    assert CALIBRATION.probability(np.array([0.5]))[0] == 0.5
    steep = CALIBRATION.model_copy(update={"slope": 1e6})
    assert steep.probability(np.array([-1.0, 1.0])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("change", [{"slope": -1.0}, {"slope": np.inf}, {"intercept": np.nan}])
def test_a_curve_that_falls_or_is_not_finite_is_no_calibration(change: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Calibration.model_validate(CALIBRATION.model_dump() | change)


RANKED = CALIBRATION.model_copy(update={"rank_slope": 0.5, "size_slope": 0.8})


def test_a_hit_further_down_or_in_a_larger_gallery_is_less_likely_right() -> None:
    scores = np.full(100, 0.6)
    ranked = RANKED.probability(scores, np.arange(1, 101))
    assert (np.diff(ranked) < 0).all()
    assert ranked[0] == RANKED.probability(np.array(0.6))
    odds = ranked / (1 - ranked)
    np.testing.assert_allclose(odds, odds[0] * np.arange(1.0, 101.0) ** -0.5)
    tailed = RANKED.model_copy(update={"tail_slope": 2.0}).probability(scores, np.arange(1, 101))
    falls = (np.arange(21.0, 121.0) / 21) ** -2
    np.testing.assert_allclose(tailed / (1 - tailed), odds * falls)
    sizes = [float(RANKED.for_gallery(n).probability(np.array(0.6))) for n in (10, 40, 80, 8000)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] == ranked[0]
    assert sizes[2] / (1 - sizes[2]) == pytest.approx(2**-0.8 * odds[0])


def test_a_gallery_smaller_than_any_that_was_fitted_on_counts_as_the_smallest() -> None:
    fitted = RANKED.gallery_images // SMALLEST_GALLERY
    assert RANKED.for_gallery(0) == RANKED.for_gallery(1) == RANKED.for_gallery(fitted)


def test_without_the_newer_slopes_rank_and_size_change_nothing() -> None:
    scores = np.linspace(-1, 1, 9)
    np.testing.assert_array_equal(
        CALIBRATION.for_gallery(10**6).probability(scores, np.arange(1, 10)),
        CALIBRATION.probability(scores),
    )


def test_an_older_calibration_is_written_as_it_was_read() -> None:
    added = {"rank_slope", "tail_slope", "size_slope", "classes", "auc", "auc_of_hits"}
    older = CALIBRATION.model_dump(mode="json")
    assert not added & older.keys()
    assert older["calibration_error"] is None
    assert Calibration.model_validate(older).model_dump(mode="json") == older
    newer = RANKED.model_dump(mode="json")
    assert (newer["rank_slope"], newer["size_slope"]) == (0.5, 0.8)
    assert Calibration.model_validate(newer) == RANKED


def test_items_are_near_from_the_score_that_has_the_probability_and_one_picture_always_is() -> None:
    least = near_score(CALIBRATION)
    assert CALIBRATION.probability(np.array([least, least - 1e-3])).tolist() == pytest.approx(
        [NEAR, NEAR], abs=1e-3
    )
    assert near_score(CALIBRATION, 0.5) == pytest.approx(0.5)
    larger = [near_score(RANKED.for_gallery(n)) for n in (40, 400, 10**6)]
    assert larger == sorted(larger)
    assert larger[-1] == SAME_PICTURE
    assert near_score(CALIBRATION, 1.0) == 1.0, "a probability that is asked for stands"
    assert near_score(CALIBRATION, 0.0) == -1.0
    close = Threshold(false_matches=1e-3, pair_score=0.975, search_score=0.99)
    crowded = RANKED.for_gallery(10**6).model_copy(update={"thresholds": (close,)})
    assert near_score(crowded) == 0.975, "other products are as like as copies are elsewhere"
