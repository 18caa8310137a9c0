"""Drift: false alarms at most at the stated rate, alarms for other queries, and the withdrawal."""

import numpy as np
import pytest

from kinlens.embedder.errors import InvalidParameterError
from kinlens.indexer.gallery import Gallery
from kinlens.quality.calibration import REBUILT
from kinlens.quality.calibrator import Calibrator
from kinlens.quality.drift import FALSE_ALARMS, DriftTest
from tests.indexer.test_guarantee import asked, stocked

RUNS, QUERIES = 200, 1_000


def alarm(labels: int, rng: np.random.Generator, mean: float, spread: float) -> int | None:
    """The number of queries until the alarm, for scores around `mean`, labelled ones around 0.6."""
    test = DriftTest(rng.normal(0.6, 0.1, labels).tolist(), rng.random)
    scores = rng.normal(mean, spread, QUERIES).tolist()
    return next((count for count, score in enumerate(scores, 1) if test.add(score)), None)


@pytest.mark.parametrize("labels", [20, 300])
def test_false_alarms_are_as_rare_as_stated(labels: int) -> None:
    rng = np.random.default_rng(0)
    found = sum(alarm(labels, rng, 0.6, 0.1) is not None for _ in range(RUNS))
    assert found <= 3 * FALSE_ALARMS * RUNS  # more of them by chance: 0.5 %


def test_equal_scores_are_no_drift() -> None:
    rng = np.random.default_rng(0)
    test = DriftTest([0.7] * 20, rng.random)
    assert not any(test.add(0.7) for _ in range(QUERIES))


@pytest.mark.parametrize(("mean", "spread"), [(0.5, 0.1), (0.7, 0.1), (0.6, 0.04), (0.6, 0.2)])
def test_other_scores_give_an_alarm_soon(mean: float, spread: float) -> None:
    rng = np.random.default_rng(0)
    found = [alarm(300, rng, mean, spread) for _ in range(20)]
    assert None not in found
    assert np.median([count or QUERIES for count in found]) < 100


def test_drift_after_many_usual_queries_gives_an_alarm() -> None:
    rng = np.random.default_rng(0)
    test = DriftTest(rng.normal(0.6, 0.1, 300).tolist(), rng.random)
    assert not any(test.add(score) for score in rng.normal(0.6, 0.1, 10_000).tolist())
    assert any(test.add(score) for score in rng.normal(0.5, 0.1, 150).tolist())


def test_an_alarm_withdraws_the_guarantee_until_it_is_fitted_again(gallery: Gallery) -> None:
    stocked(gallery)
    calibrator, other = Calibrator(gallery), Calibrator(gallery)
    assert calibrator.withdrawn() is None
    calibrator.fit_guarantee(lambda product: asked(60), "kind")
    fitted = calibrator.guarantee()
    assert (calibrator.withdrawn(), other.withdrawn()) == ("", "")
    assert not any(calibrator.observe(fitted, 1.0) for _ in range(500))  # copies do not count
    alarms = (calibrator.observe(fitted, 0.1) for _ in range(100))
    assert any(alarms)
    for each in (calibrator, other, Calibrator(gallery)):  # other processes, and a restart
        with pytest.raises(InvalidParameterError, match="differ from the labelled ones"):
            each.guarantee()
        assert "differ" in (each.withdrawn() or "")
    calibrator.fit()  # the probabilities alone
    assert "differ" in (calibrator.withdrawn() or "")
    calibrator.fit_golden(lambda product: asked(60))
    assert calibrator.withdrawn() == ""
    assert calibrator.guarantee().by == "kind"


def test_a_rebuilt_gallery_reports_that_it_had_a_guarantee(gallery: Gallery) -> None:
    stocked(gallery)
    calibrator = Calibrator(gallery)
    calibrator.fit(no_guarantee=REBUILT)
    assert calibrator.withdrawn() == REBUILT
    with pytest.raises(InvalidParameterError, match="was rebuilt"):
        calibrator.guarantee()
    calibrator.fit_golden(lambda product: asked(60))
    assert calibrator.withdrawn() == ""
