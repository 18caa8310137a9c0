import numpy as np
import pytest

from kinlens.embedder.calibration import Searches
from kinlens.embedder.errors import CalibrationError
from kinlens.embedder.types import Embeddings
from kinlens.training.bundles.calibration import (
    FALSE_MATCHES,
    MIN_CLASSES,
    candidates_of,
    fit_calibration,
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
    scores = np.where(labels[:, None] == labels, -1, embeddings @ embeddings.T)
    best = scores.max(axis=1)  # the query's class is not in the gallery
    for threshold in found.thresholds:
        rate = (best >= threshold.search_score).mean()
        # Two images that are the best wrong hit of each other tie, so a step may be two of them.
        assert rate == pytest.approx(threshold.false_matches, abs=2.5 / len(labels))
        assert threshold.search_score > threshold.pair_score


@pytest.mark.parametrize(
    ("labels", "embeddings", "reason"),
    [
        (np.zeros(6, np.int64), clouds(2, 3)[0], "1 of 1 classes have two"),
        (np.arange(40), clouds(4, 10)[0], "0 of 40 classes have two images or more"),
        (clouds(15)[1], clouds(15)[0], f"15 of 15 .* at least {MIN_CLASSES} are needed"),
    ],
)
def test_what_cannot_be_calibrated_says_why(
    labels: np.ndarray, embeddings: Embeddings, reason: str
) -> None:
    with pytest.raises(CalibrationError, match=reason):
        fit_calibration(embeddings, labels, "validation")


def test_there_is_a_curve_for_each_number_of_views_that_enough_classes_have() -> None:
    embeddings, labels = clouds(classes=30, images=6)
    alone = np.append(labels, 99)  # a class of one image asks nothing
    found = fit_calibration(np.vstack((embeddings, embeddings[:1])), alone, "test")
    assert (found.queries, found.gallery_images) == (len(labels), len(labels) + 1)
    assert [(one.views, one.products) for one in found.curves][1:] == [(2, 30), (4, 30)]
    assert all(one.wrong_hits >= 100 for one in found.curves)


def test_probabilities_hold_for_any_views_and_absence() -> None:
    found = fit_calibration(*clouds(classes=100, images=20, seed=0), split="validation")
    # The same centres come from the same law; none of these images was fitted on.
    embeddings, labels = clouds(classes=100, images=20, seed=1)
    shuffled = [np.flatnonzero(labels == name) for name in range(100)]
    for views in (1, 2, 8):
        gallery = np.concatenate([images[:views] for images in shuffled])
        queries = np.concatenate([images[views:] for images in shuffled])
        present, masked = candidates_of(embeddings, labels, queries, gallery)
        curve = found.curve_for(100, views)
        for absent in (0.0, 0.5):
            cut = round(absent * len(queries))
            rows = np.arange(len(queries))
            asked = Searches.joined([masked[rows[:cut]], present[rows[cut:]]])
            assert max(asked.error(curve, absent)) < 0.1, (views, absent)
            # A curve for one image of a product does not know what several hits of one are worth.
            if views == 8 and not absent:
                of_one = asked.error(found.curve_for(100, 1), absent)
                assert of_one[0] > 2 * asked.error(curve, absent)[0]


def test_a_model_that_separates_nothing_is_sure_of_nothing() -> None:
    embeddings, labels = clouds(classes=40, images=10)
    labels = np.random.default_rng(0).permutation(labels)
    found = fit_calibration(embeddings, labels, "validation")
    shuffled = [np.flatnonzero(labels == name) for name in range(40)]
    for one in found.curves:
        gallery = np.concatenate([images[: one.views] for images in shuffled])
        queries = np.concatenate([images[one.views :] for images in shuffled])
        present, _ = candidates_of(embeddings, labels, queries, gallery)
        assert present.probabilities(one.curve, 0.0).max() < 0.2
