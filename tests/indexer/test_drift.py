"""Drift: false alarms at most at the stated rate, alarms for other queries, and the withdrawal."""

import numpy as np
import pytest

from kinlens.embedder.errors import InvalidParameterError
from kinlens.indexer.gallery import Gallery
from kinlens.quality.calibration import REBUILT, REBUILT_ITEMS
from kinlens.quality.calibrator import Calibrator
from kinlens.quality.drift import COUNTED, FALSE_ALARMS, DriftTest
from kinlens.quality.golden import GoldenSet
from kinlens.quality.guarantee import Choices
from tests.indexer.oracle import units
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
    calibrator.fit_guarantee(lambda product: asked(60), Choices(by="kind"))
    fitted = calibrator.guarantee()
    assert (calibrator.withdrawn(), other.withdrawn()) == ("", "")
    vectors = units(600, 1)
    # Copies of items do not count, nor does the same query again.
    assert not any(calibrator.observe(fitted, 1.0, vector) for vector in vectors)
    assert not any(calibrator.observe(fitted, 0.1, vectors[0]) for _ in range(500))
    assert any(calibrator.observe(fitted, 0.1, vector) for vector in vectors[:100])
    for each in (calibrator, other, Calibrator(gallery)):  # other processes, and a restart
        with pytest.raises(InvalidParameterError, match="differ from the labelled ones"):
            each.guarantee()
        assert "differ" in (each.withdrawn() or "")
    calibrator.fit()  # the probabilities alone
    assert "differ" in (calibrator.withdrawn() or "")
    calibrator.fit_golden(lambda product: asked(60))
    assert calibrator.withdrawn() == ""
    assert calibrator.guarantee().by == "kind"


def test_only_the_last_queries_are_known_again() -> None:
    test = DriftTest([0.7] * 20)
    names = [f"{number}".encode() for number in range(COUNTED + 1)]
    for name in (*names, *names[1:]):
        test.add(0.7, name)
    assert test.queries == COUNTED + 1
    test.add(0.7, names[0])  # forgotten, as only the last are known
    assert test.queries == COUNTED + 2


def test_another_generation_or_product_ends_a_guarantee_and_keeps_the_choices(
    gallery: Gallery,
) -> None:
    stocked(gallery)
    choices = Choices(by="kind", is_split=True, confidence=0.9)
    Calibrator(gallery).fit_guarantee(lambda product: asked(60), choices)
    [file] = gallery.path.glob("**/calibration.json")
    file.unlink()  # as in a new generation
    calibrator = Calibrator(gallery)
    assert calibrator.withdrawn() == REBUILT
    calibrator.fit_if_outdated()
    with pytest.raises(InvalidParameterError, match="is another one"):
        calibrator.guarantee()
    calibrator.fit_golden(lambda product: asked(60))
    assert calibrator.withdrawn() == ""
    kept = calibrator.guarantee()
    assert (kept.by, kept.is_split, kept.confidence) == ("kind", True, 0.9)
    calibrator.fit("kind")
    assert calibrator.withdrawn() == REBUILT


@pytest.mark.parametrize("from_items", [False, True])
def test_a_rebuild_without_labels_alarms_only_for_items_that_were_judged(
    gallery: Gallery, from_items: bool
) -> None:
    stocked(gallery)
    golden, calibrator = GoldenSet(gallery.path), Calibrator(gallery)
    calibrator.fit_golden(lambda product: asked(60))
    golden.remove(query.sha256 for query in golden.queries())
    assert calibrator.withdrawn() is None
    if from_items:
        calibrator.fit_guarantee(None, Choices())
        assert calibrator.withdrawn() == ""
    [file] = gallery.path.glob("**/calibration.json")
    file.unlink()  # as in a new generation
    calibrator = Calibrator(gallery)
    assert calibrator.withdrawn() == (REBUILT_ITEMS if from_items else None)
    calibrator.fit_guarantee(None, Choices())
    assert calibrator.withdrawn() == ""


def test_a_golden_set_that_cannot_be_read_now_is_no_alarm(gallery: Gallery) -> None:
    stocked(gallery)
    calibrator = Calibrator(gallery)
    calibrator.fit_golden(lambda product: asked(60))
    whole = calibrator.guarantee()
    file = GoldenSet(gallery.path).file
    data = file.read_bytes()
    file.write_bytes(b"no database" * 100)
    assert calibrator.withdrawn() == ""
    assert Calibrator(gallery).guarantee() == whole
    calibrator.fit("kind")  # another product
    assert calibrator.withdrawn() is None
    file.write_bytes(data)
    assert calibrator.withdrawn() == REBUILT


def test_a_calibration_that_cannot_be_read_is_logged(
    gallery: Gallery, caplog: pytest.LogCaptureFixture
) -> None:
    stocked(gallery)
    Calibrator(gallery).fit_golden(lambda product: asked(60))
    [file] = gallery.path.glob("**/calibration.json")
    file.write_text("{}")
    assert Calibrator(gallery).stored() is None
    assert f"{file} cannot be read" in caplog.text


def test_a_gallery_that_was_not_changed_is_not_read_again(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request and each scrape asks; an outdated guarantee must not cost more than a valid."""
    stocked(gallery)
    calibrator = Calibrator(gallery)
    calibrator.fit_golden(lambda product: asked(60))
    reads, read = [], gallery.items_at
    monkeypatch.setattr(gallery, "items_at", lambda ids: reads.append(1) or read(ids))
    for count in (0, 60):
        gallery.remove([f"k{n}" for n in range(count)])
        reads.clear()
        for _ in range(5):
            assert bool(calibrator.withdrawn()) is (count > 0)
        assert len(reads) == 1
