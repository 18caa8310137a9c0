import numpy as np
import pytest

import kinlens.training.export.calibration as calibration_module
from kinlens.embedder.calibration import CANDIDATES, Searches
from kinlens.embedder.errors import CalibrationError
from kinlens.embedder.types import Embeddings
from kinlens.training.export.calibration import (
    FALSE_MATCHES,
    MIN_CLASSES,
    candidates_of,
    fit_calibration,
    least_score,
    roc_area,
    search,
)


def clouds(
    classes: int = 30, images: int = 12, noise: float = 0.35, seed: int = 0, dim: int = 16
) -> tuple[Embeddings, np.ndarray]:
    """Unit vectors around the centre of their class, in a random order."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((classes, dim))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    labels = rng.permutation(np.repeat(np.arange(classes), images))
    vectors = centres[labels] + noise * rng.standard_normal((len(labels), dim))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit.astype(np.float32), labels


def test_thresholds_have_their_false_match_rates_on_the_pairs() -> None:
    embeddings, labels = clouds()
    found = fit_calibration(embeddings, labels, "validation")
    scores = (embeddings @ embeddings.T)[np.triu_indices(len(labels), 1)]
    wrong = (labels[:, None] != labels)[np.triu_indices(len(labels), 1)]
    assert found.negative_pairs == wrong.sum()
    assert tuple(t.false_matches for t in found.thresholds) == FALSE_MATCHES
    for threshold in found.thresholds:
        rate = (scores[wrong] >= threshold.pair_score).mean()
        assert rate == pytest.approx(threshold.false_matches, abs=2 / wrong.sum())


def test_thresholds_of_a_search_hold_for_classes_that_are_absent() -> None:
    embeddings, labels = clouds()
    found = fit_calibration(embeddings, labels, "validation")
    best = []
    for query, label in zip(embeddings, labels, strict=True):
        gallery = embeddings[labels != label]  # the query's class is not in it
        best.append((gallery @ query).max())
    for threshold in found.thresholds:
        rate = (np.array(best) >= threshold.search_score).mean()
        # Two images that are the best wrong hit of each other tie, so a step may be two of them.
        assert rate == pytest.approx(threshold.false_matches, abs=2.5 / len(labels))
        assert threshold.search_score > threshold.pair_score


def test_of_tied_scores_a_threshold_lets_none_pass_beyond_its_share() -> None:
    wrong = np.full(50, 0.5, np.float32)
    assert 0.5 < least_score(wrong, 0.1) < 0.5001


def test_hits_are_the_nearest_others() -> None:
    embeddings, labels = clouds(classes=5, images=4)
    hits = search(embeddings, labels, np.array([3, 7]))
    for row, query in enumerate((3, 7)):
        others = np.setdiff1d(np.arange(20), query)
        scores = embeddings[others] @ embeddings[query]
        order = np.argsort(-scores)[hits.ranks - 1]
        same = labels[others] == labels[query]
        np.testing.assert_allclose(hits.scores[row], scores[order], atol=1e-6)
        np.testing.assert_array_equal(hits.right[row], same[order])
        assert hits.best_wrong[row] == pytest.approx(scores[~same].max(), abs=1e-6)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = clouds(classes=20, images=6)
    whole = fit_calibration(*data, split="test")
    monkeypatch.setattr(calibration_module, "BLOCK", 1000)
    parts = fit_calibration(*data, split="test")
    for one, other in zip(parts.curves, whole.curves, strict=True):
        assert one.curve.model_dump() == pytest.approx(other.curve.model_dump(), rel=1e-3)
    assert parts.thresholds[0].pair_score == pytest.approx(whole.thresholds[0].pair_score, abs=1e-6)


def test_many_images_are_sampled_by_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, labels = clouds(classes=40)
    whole = fit_calibration(embeddings, labels, "test")
    monkeypatch.setattr(calibration_module, "MAX_QUERIES", 200)
    monkeypatch.setattr(calibration_module, "MAX_PAIRS", 30_000)
    found = fit_calibration(embeddings, labels, "test")
    assert found == fit_calibration(embeddings, labels, "test")
    assert found != fit_calibration(embeddings, labels, "test", seed=1)
    assert (found.queries, found.gallery_images) == (200, len(labels))
    assert 0.95 * 30_000 < found.negative_pairs < 30_000
    for one, all_pairs in zip(found.thresholds, whole.thresholds, strict=True):
        assert one.pair_score == pytest.approx(all_pairs.pair_score, abs=0.05)


@pytest.mark.parametrize(
    ("labels", "embeddings", "reason"),
    [
        (np.zeros(6, np.int64), clouds(2, 3)[0], "1 of 1 classes have two"),
        (np.arange(40), clouds(4, 10)[0], "0 of 40 classes have two images or more"),
        (clouds(15)[1], clouds(15)[0], f"15 of 15 .* at least {MIN_CLASSES} are needed"),
        (np.repeat(np.arange(20), 3), np.ones((60, 1), np.float32), "its lower end must"),
        (clouds(20)[1], clouds(240, 1, seed=3)[0], "all pairs the area under the ROC curve is 0"),
    ],
)
def test_what_cannot_be_calibrated_says_why(
    labels: np.ndarray, embeddings: Embeddings, reason: str
) -> None:
    with pytest.raises(CalibrationError, match=reason):
        fit_calibration(embeddings, labels, "validation")


def test_scores_that_separate_all_pairs_but_not_the_best_hits_are_not_calibrated() -> None:
    # Five worlds of eight classes each: a score identifies the world, but no class within it.
    worlds, labels = clouds(classes=5, images=96, noise=0.05)
    order = np.argsort(labels, kind="stable")
    inside = np.tile(np.random.default_rng(1).permutation(np.repeat(np.arange(8), 12)), 5)
    classes = labels[order] * 8 + inside
    with pytest.raises(CalibrationError, match="among the 10 best hits the area under the ROC"):
        fit_calibration(worlds[order], classes, "test")


def test_a_class_of_one_image_asks_nothing() -> None:
    embeddings, labels = clouds(classes=20)
    alone = np.append(labels, 99)
    found = fit_calibration(np.vstack((embeddings, embeddings[:1])), alone, "test")
    assert (found.queries, found.gallery_images) == (len(labels), len(labels) + 1)


def test_there_is_a_curve_for_each_number_of_views_that_enough_classes_have() -> None:
    found = fit_calibration(*clouds(classes=30, images=6), split="test")
    assert [(one.views, one.products) for one in found.curves] == [(1, 30), (2, 30), (4, 30)]
    assert all(one.wrong_hits >= 100 for one in found.curves)


@pytest.mark.parametrize("views", [1, 2, 4, 8])
@pytest.mark.parametrize("absent", [0.0, 0.2, 0.5])
def test_probabilities_hold_for_any_views_and_absence(views: int, absent: float) -> None:
    found = fit_calibration(*clouds(classes=100, images=20, seed=0), split="validation")
    # The same centres come from the same law; none of these images was fitted on.
    embeddings, labels = clouds(classes=100, images=20, seed=1)
    shuffled = [np.flatnonzero(labels == name) for name in range(100)]
    gallery = np.concatenate([images[:views] for images in shuffled])
    queries = np.concatenate([images[views:] for images in shuffled])
    present, masked = candidates_of(embeddings, labels, queries, gallery)
    cut = round(absent * len(queries))
    asked = Searches.joined([masked[np.arange(cut)], present[np.arange(cut, len(queries))]])
    curve = found.curve_for(100, views)
    best, ten = asked.error(curve, absent)
    assert max(best, ten) < 0.1
    # A curve for one image of a product does not know what several hits of one are worth.
    if views == 8 and not absent:
        assert asked.error(found.curve_for(100, 1), absent)[0] > 2 * best


def test_candidates_are_the_nearest_and_without_the_class_the_nearest_others() -> None:
    embeddings, labels = clouds(classes=9, images=5)
    gallery, queries = np.arange(5, 45), np.arange(5)
    present, masked = candidates_of(embeddings, labels, queries, gallery)
    for row, query in enumerate(queries):
        scores = embeddings[gallery] @ embeddings[query]
        np.testing.assert_allclose(present.scores[row], np.sort(scores)[::-1][:CANDIDATES], 1e-5)
        others = scores[labels[gallery] != labels[query]]
        np.testing.assert_allclose(masked.scores[row], np.sort(others)[::-1][:CANDIDATES], 1e-5)
    assert not masked.right.any()
    assert masked.absent.all()
    assert not present.absent.any()


# The area under the ROC curve


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
