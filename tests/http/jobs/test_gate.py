"""The gate of a retraining: it asks about classes that neither model was trained on."""

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinlens.embedder.seen import Seen
from kinlens.indexer.entries import Entry
from kinlens.indexer.gallery import Gallery
from kinlens.quality.gate import Gate, Questions, Verdict, fair_questions, judge
from tests.support.seams import compare

DIM = 24
NOTHING = Seen.of()
CLASSES, EACH = 12, 12
TRAINED = frozenset(range(0, CLASSES, 2))


def photo(number: int) -> bytes:
    return f"picture {number}".encode()


def gallery(path: Path, trained_noise: float, other_noise: float) -> Gallery:
    """Vectors with this much noise in trained and in other classes."""
    made = Gallery.create(path, name="shop", bundle_id=path.name, dim=DIM)
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((CLASSES, DIM))
    entries = []
    for number in range(CLASSES * EACH):
        of = number % CLASSES
        noise = trained_noise if of in TRAINED else other_noise
        vector = centres[of] + noise * rng.standard_normal(DIM)
        vector = (vector / np.linalg.norm(vector)).astype(np.float32)
        content = hashlib.sha256(photo(number)).hexdigest()
        entries.append(Entry(f"{number}", vector, content, {"class": f"kind {of}"}))
    made.add(entries)
    return made


@pytest.fixture
def before(tmp_path: Path) -> Gallery:
    return gallery(tmp_path / "before", 1.2, 1.2)


@pytest.fixture
def memorised(tmp_path: Path) -> Gallery:
    """Perfect on what it was trained on, worse than before elsewhere."""
    return gallery(tmp_path / "memorised", 0.1, 1.7)


def of_classes(numbers: Collection[int]) -> list[int]:
    return [number for number in range(CLASSES * EACH) if number % CLASSES in numbers]


def seen(numbers: Collection[int] = (), images: Collection[int] = ()) -> Seen:
    """The record of a model that was trained on these classes and these images."""
    contents = (hashlib.sha256(photo(number)).hexdigest() for number in images)
    return Seen.of((f"kind {number}" for number in numbers), contents)


def verdict(
    old: Gallery,
    new: Gallery,
    learnt: Seen | None,
    before: Seen | None = NOTHING,
    **gate: Any,
) -> Verdict:
    fair = fair_questions(old, "class", before, learnt)
    return judge(compare(old, new, asked=fair.keys), Gate(**gate), fair)


def test_a_model_that_memorised_its_classes_is_refused(before, memorised) -> None:
    everything = compare(before, memorised)
    assert judge(everything, Gate(), Questions()).passed, "asked with all, it looks better"
    found = verdict(before, memorised, seen(TRAINED))
    assert found.passed is False
    assert ", the gate allows 0.0000" in found.reason
    assert "on 72 images of 6 classes, classes that neither model was trained on" in found.reason


def test_classes_that_only_the_old_model_knows_are_not_asked(before, memorised) -> None:
    """The old model memorised half of the classes, the new one learnt a few others."""
    found = verdict(memorised, before, seen({1}), seen(TRAINED), min_queries=40)
    assert found.passed, found.reason
    assert "on 60 images of 5 classes" in found.reason
    assert not judge(compare(memorised, before), Gate(), Questions()).passed, "biased"


def test_renamed_classes_and_regrouped_images_count_as_trained_on(before) -> None:
    """One image is enough: its class has another name now, or it was moved to another class."""
    names_of_old = Seen.of(["an old name"], [hashlib.sha256(photo(3)).hexdigest()])
    fair = fair_questions(before, "class", names_of_old, seen({4}, [17]))
    assert fair.keys == {f"{n}" for n in of_classes(set(range(CLASSES)) - {3, 4, 5})}
    assert seen({1}).has_class("kind 1")
    assert Seen.of(["Caf\u00e9"]).has_class("Cafe\u0301"), "as macOS names folders"


def test_the_limits_of_the_gate_decide(before, memorised) -> None:
    assert verdict(before, memorised, seen(TRAINED), max_recall_loss=0.9, min_queries=72).passed
    refused = verdict(before, memorised, seen(TRAINED), max_recall_loss=0.9, min_recall_at_1=0.99)
    assert refused.passed is False


@pytest.mark.parametrize(
    ("classes", "gate", "needed"),
    [
        (6, {"min_queries": 73}, "there are 72 images of 6 classes"),
        (5, {}, "50 images of 6 classes are needed"),
        (1, {"min_queries": 12}, "12 images of 2 classes are needed"),
        (0, {"min_queries": 0}, "1 images of 1 classes are needed"),
    ],
)
def test_with_too_few_classes_a_person_decides(
    before, classes: int, gate: dict[str, int], needed: str
) -> None:
    found = verdict(before, before, seen(range(classes, CLASSES)), **gate)
    assert found.passed is None
    assert needed in found.reason


def test_without_a_record_of_both_models_a_person_decides(before, memorised) -> None:
    for learnt, known in ((None, NOTHING), (seen(TRAINED), None)):
        found = verdict(before, memorised, learnt, known, min_queries=0)
        assert found.passed is None
        assert "does not record" in found.reason


def test_a_wilson_interval_is_that_of_the_textbook(before) -> None:
    same = compare(before, before, asked={f"{n}" for n in range(10)})
    assert same.change_interval == (0, 0)
    # Its ends solve |p - x| = 1.96 sqrt(x (1 - x) / n).
    part = same.new.recall_at_1
    for end in same.new.recall_at_1_interval:
        if 0 < end < 1:
            assert abs(part - end) == pytest.approx(1.96 * np.sqrt(end * (1 - end) / 10), abs=1e-4)
