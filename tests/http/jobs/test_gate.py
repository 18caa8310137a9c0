"""The gate of a retraining: it tests with images that the new model was not trained on."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import Entry
from kinlens.service.jobs.params import Gate
from kinlens.service.jobs.rebuild import Verdict, judge
from kinlens.service.jobs.train import Seen, seen_by, unseen_in
from tests.support.seams import compare

DIM = 24
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


def run_folder(folder: Path, numbers: list[int]) -> Seen | None:
    """The record of a run that trained on images with these numbers, in other folders."""
    rows = ["key,path,class"]
    for number in numbers:
        path = f"{number % CLASSES:05d}-x/{number}.jpg"
        (folder / "data" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "data" / path).write_bytes(photo(number))
        rows.append(f"{path},{path},{number % CLASSES:05d}-x")
    (folder / "train.csv").write_text("\n".join(rows) + "\n")
    return seen_by(folder, folder / "data", folder / "feedback")


def of_trained_classes() -> list[int]:
    return [number for number in range(CLASSES * EACH) if number % CLASSES in TRAINED]


def verdict(old: Gallery, new: Gallery, seen: Seen | None, gate: Gate) -> Verdict:
    fair = unseen_in(old, "class", seen)
    return judge(compare(old, new, asked=fair.keys), gate, fair.clause)


def test_a_model_that_memorised_its_classes_is_refused(before, memorised, tmp_path) -> None:
    everything = compare(before, memorised)
    assert judge(everything, Gate()).passed, "asked with all, it looks better"
    found = verdict(before, memorised, run_folder(tmp_path, of_trained_classes()), Gate())
    assert not found.passed
    assert ", the gate allows 0.0000" in found.reason
    assert "on 72 images of 6 classes, classes that the new model was not" in found.reason


def test_the_limits_of_the_gate_decide(before, memorised, tmp_path) -> None:
    seen = run_folder(tmp_path, of_trained_classes())
    assert verdict(before, memorised, seen, Gate(max_recall_loss=0.9, min_queries=72)).passed
    refused = verdict(before, memorised, seen, Gate(max_recall_loss=0.9, min_recall_at_1=0.99))
    assert not refused.passed
    few = verdict(before, before, seen, Gate(min_queries=73))
    assert not few.passed
    assert "72 images of 6 classes" in few.reason
    assert "the gate requires 73" in few.reason


def test_unseen_images_of_trained_classes_are_asked(before, memorised, tmp_path) -> None:
    half = list(range(CLASSES * EACH // 2))
    seen = run_folder(tmp_path, half)
    fair = unseen_in(before, "class", seen)
    assert fair.keys == {f"{n}" for n in range(CLASSES * EACH // 2, CLASSES * EACH)}
    assert "on others of their class" in verdict(before, memorised, seen, Gate()).reason


def test_trained_images_of_the_golden_set_are_excluded(before, tmp_path) -> None:
    half = of_trained_classes()
    trained = {hashlib.sha256(photo(number)).hexdigest() for number in half}
    assert unseen_in(before, "class", run_folder(tmp_path, half)).seen == trained
    (tmp_path / "feedback/pictures").mkdir(parents=True)
    (tmp_path / "feedback/pictures" / f"{'f' * 64}.jpg").write_bytes(b"rendered, smaller")
    assert unseen_in(before, "class", run_folder(tmp_path, half)).seen == {*trained, "f" * 64}
    assert unseen_in(before, "class", None).seen is None, "everything counts as trained on"


def test_without_a_training_list_the_gate_refuses(before, memorised, tmp_path) -> None:
    assert seen_by(tmp_path, tmp_path, tmp_path / "feedback") is None
    assert not verdict(before, memorised, None, Gate(min_queries=0)).passed


def test_a_wilson_interval_is_that_of_the_textbook(before) -> None:
    same = compare(before, before, asked={f"{n}" for n in range(10)})
    assert same.change_interval == (0, 0)
    # Its ends solve |p - x| = 1.96 sqrt(x (1 - x) / n).
    part = same.new.recall_at_1
    for end in same.new.recall_at_1_interval:
        if 0 < end < 1:
            assert abs(part - end) == pytest.approx(1.96 * np.sqrt(end * (1 - end) / 10), abs=1e-4)
