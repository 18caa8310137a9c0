import numpy as np
import pytest

from training.export.separation import roc_area


def pairs(
    count: int, shift: float, seed: int = 0, classes: int = 20
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    right = rng.random(count) < 0.3
    scores = rng.standard_normal(count).round(1) + shift * right
    return scores, right, rng.integers(1, 4, count), rng.integers(0, classes, count)


def test_the_area_is_that_of_all_pairs_of_a_right_and_a_wrong_one() -> None:
    scores, right, weights, classes = pairs(300, 0.5)
    positive, negative = scores[right][:, None], scores[~right]
    above = (positive > negative) + 0.5 * (positive == negative)
    weight = weights[right][:, None] * weights[~right]
    expected = (above * weight).sum() / weight.sum()
    assert roc_area(scores, right, weights, classes).value == pytest.approx(expected, abs=1e-12)


def test_a_weight_counts_as_so_many_pairs() -> None:
    scores, right, weights, classes = pairs(200, 1.0)
    repeated = [np.repeat(array, weights) for array in (scores, right, np.ones(200), classes)]
    np.testing.assert_allclose(
        roc_area(scores, right, weights, classes), roc_area(*repeated), rtol=1e-12
    )


def test_scores_that_separate_have_an_area_of_1_without_doubt() -> None:
    scores, right, weights, classes = pairs(200, 100.0)
    assert roc_area(scores, right, weights, classes) == pytest.approx((1, 1, 1))


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(200):
        area = roc_area(*pairs(400, 0.0, seed, classes=40))
        covered += area.low <= 0.5 <= area.high
    # 190 expected, with a standard deviation of 3.1; the normal interval of 40 classes is a bit low
    assert 176 <= covered <= 199


def test_pairs_of_a_class_that_all_agree_make_the_interval_wider() -> None:
    scores, right, weights, _ = pairs(2000, 0.3)
    rng = np.random.default_rng(1)
    kind = rng.integers(0, 10, 2000)
    moved = scores + np.where(right, rng.standard_normal(10)[kind], 0.0)
    alike = roc_area(moved, right, weights, kind)
    apart = roc_area(moved, right, weights, np.arange(2000))
    assert alike.value == pytest.approx(apart.value)
    assert alike.high - alike.low > 2 * (apart.high - apart.low)
