"""From a probability to a score: the least one that has it, whatever the calibration."""

import numpy as np
import pytest

from embedder.errors import InvalidParameterError
from service.search.answer import UNREACHABLE, least_score, score_of
from tests.support.market import CALIBRATION


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


def test_the_stricter_of_both_counts_and_without_any_there_is_none() -> None:
    assert least_score(None, None, None) is None
    assert least_score(0.3, None, None) == 0.3
    assert least_score(0.9, 0.5, CALIBRATION) == 0.9
    assert least_score(0.1, 0.5, CALIBRATION) == pytest.approx(0.5)
    assert least_score(0.1, 0.0, CALIBRATION) == 0.1


def test_a_probability_without_calibration_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"min_probability = 0\.5"):
        least_score(None, 0.5, None)
    with pytest.raises(
        InvalidParameterError, match=r"has none \(Only 2 classes\)\. Send min_score"
    ):
        least_score(None, 0.5, None, "Only 2 classes.")
