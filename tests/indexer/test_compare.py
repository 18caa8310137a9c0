"""Compare: what the answers of two models are worth, by a class attribute."""

from pathlib import Path

import numpy as np
import pytest

from indexer.gallery import Gallery
from indexer.types import Entry
from tests.support.seams import compare

DIM = 16


def gallery(path: Path, noise: float, classes: int = 10, each: int = 6) -> Gallery:
    """`classes` clusters of `each` items; much noise mixes them up."""
    made = Gallery.create(path, name="shop", bundle_id=f"{noise}", dim=DIM)
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((classes, DIM))
    entries = []
    for n in range(classes * each):
        vector = centres[n % classes] + noise * rng.standard_normal(DIM)
        vector = (vector / np.linalg.norm(vector)).astype(np.float32)
        entries.append(Entry(f"{n}", vector, f"{n:064x}", {"class": n % classes, "colour": f"{n}"}))
    made.add(entries)
    made.compact()
    return made


@pytest.fixture
def good(tmp_path: Path) -> Gallery:
    return gallery(tmp_path / "good", 0.01)


@pytest.fixture
def bad(tmp_path: Path) -> Gallery:
    return gallery(tmp_path / "bad", 3.0)


def test_a_gallery_compared_with_itself_is_equal_and_overlaps_fully(good: Gallery) -> None:
    found = compare(good, good, k=5)
    assert found.overlap_at_k == 1
    assert found.old.recall_at_1 == found.new.recall_at_1 == found.old.recall_at_k == 1
    assert (found.queries, found.judged, found.old.items) == (60, 60, 60)
    assert found.old.ms_per_query is not None
    assert found.old.ms_per_query > 0


def test_the_worse_model_has_the_lower_recall_and_other_answers(
    good: Gallery, bad: Gallery
) -> None:
    found = compare(good, bad, k=5)
    assert found.old.recall_at_1 == 1
    assert found.new.recall_at_1 is not None
    assert found.new.recall_at_1 < 0.7
    assert found.new.recall_at_k is not None
    assert found.new.recall_at_1 <= found.new.recall_at_k
    assert found.overlap_at_k is not None
    assert found.overlap_at_k < 0.8
    assert (found.old.bundle_id, found.new.bundle_id) == ("0.01", "3.0")


def test_the_query_itself_is_no_answer(tmp_path: Path) -> None:
    alone = gallery(tmp_path / "alone", 0.01, classes=10, each=1)
    found = compare(alone, alone)
    assert found.judged == 0  # nobody has another item of its class
    assert found.old.recall_at_1 is None
    assert found.overlap_at_k == 1


def test_without_the_attribute_nothing_is_judged(good: Gallery, bad: Gallery) -> None:
    found = compare(good, bad, "brand")
    assert (found.judged, found.new.recall_at_1) == (0, None)
    assert found.queries == 60
    assert compare(good, bad, "colour").judged == 0


def test_a_sample_is_the_same_each_time_and_of_items_that_both_have(
    good: Gallery, bad: Gallery
) -> None:
    bad.remove([str(n) for n in range(30)])
    found = compare(good, bad, sample=20)
    assert found.queries == 20
    assert compare(good, bad, sample=1000).queries == 30
    again = compare(good, bad, sample=20)
    assert again.new.recall_at_1 == found.new.recall_at_1
    assert again.overlap_at_k == found.overlap_at_k


def test_galleries_without_items_are_compared_without_an_error(tmp_path: Path) -> None:
    empty = Gallery.create(tmp_path / "empty", name="shop", bundle_id="b", dim=DIM)
    found = compare(empty, empty)
    assert (found.queries, found.overlap_at_k, found.new.items) == (0, None, 0)
