import numpy as np
import pytest
from pydantic import ValidationError

from embedder.calibration import Calibration
from tests.embedder.bundles import CALIBRATION


def test_the_probability_is_the_logistic_of_the_score() -> None:
    scores = np.array([[0.0, 0.25], [0.5, 1.0]], dtype=np.float32)
    expected = 1 / (1 + np.exp(-(12 * scores.astype(np.float64) - 6)))
    np.testing.assert_allclose(CALIBRATION.probability(scores), expected, rtol=1e-12)
    assert CALIBRATION.probability(np.array([0.5]))[0] == 0.5


def test_no_scores_give_no_probabilities() -> None:
    assert CALIBRATION.probability(np.empty((0,), np.float32)).shape == (0,)


@pytest.mark.parametrize("change", [{"slope": -1.0}, {"slope": np.inf}, {"intercept": np.nan}])
def test_a_curve_that_falls_or_is_not_finite_is_no_calibration(change: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Calibration.model_validate(CALIBRATION.model_dump() | change)


def test_a_calibration_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        CALIBRATION.slope = 1.0
