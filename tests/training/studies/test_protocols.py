import statistics
from pathlib import Path

import pytest

from kinlens.embedder.errors import DatasetError, JobError
from kinlens.training.config.job import Job
from kinlens.training.config.settings import Protocol
from kinlens.training.data.records import Split, folds, hold_out, with_protocol
from kinlens.training.studies.validation import cross_validate, scores
from tests.training.jobs import Silent
from tests.training.studies.runs import SHOP, FakeRunner, some_job, some_split

HELD_OUT = {"choose_by": "validation", "validation_fraction": 0.5}


def names(split: Split) -> tuple[set[str], set[str]]:
    assert split.validation is not None
    return set(split.train.class_names), set(split.validation.class_names)


@pytest.mark.parametrize("fraction", [0.05, 0.3])
def test_holding_out_splits_the_train_classes_and_leaves_the_test_classes(fraction: float) -> None:
    split = some_split(train=40)
    before = dict(zip(split.train.paths, split.train.labels, strict=True))
    held = hold_out(split, fraction, 1)
    train, validation = names(held)
    assert len(validation) == round(40 * fraction)
    assert train | validation == set(split.train.class_names)
    assert not train & validation
    assert held.test is split.test
    for part in (held.train, held.validation):
        assert part is not None
        assert sorted(set(part.labels)) == list(range(part.classes))
        for path, label in zip(part.paths, part.labels, strict=True):
            assert part.class_names[label] == split.train.class_names[before[path]]
    assert hold_out(split, fraction, 1).sha256() == held.sha256()
    assert names(hold_out(split, fraction, 2)) != names(held)
    protocol = Protocol(validation_fraction=fraction, validation_seed=1)
    assert with_protocol(split, protocol).sha256() == held.sha256()
    assert with_protocol(split, Protocol()) is split


@pytest.mark.parametrize(("classes", "count"), [(40, 10), (23, 7), (4, 2)])
def test_every_class_is_validated_exactly_once(classes: int, count: int) -> None:
    split = some_split(train=classes)
    parts = folds(split, count)
    validated = [name for part in parts for name in names(part)[1]]
    assert sorted(validated) == sorted(split.train.class_names)
    sizes = [len(names(part)[1]) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    for part in parts:
        train, validation = names(part)
        assert train | validation == set(split.train.class_names)
        assert part.test is split.test
    if classes == 40:
        assert [part.sha256() for part in folds(split, count)] == [p.sha256() for p in parts]
        assert folds(split, count, seed=2)[0].sha256() != parts[0].sha256()
        # Neighbours in the list, which are often alike, are mixed.
        assert names(parts[0])[1] != set(split.train.class_names[:4])


def test_too_few_classes_or_images_are_refused_with_what_would_do() -> None:
    with pytest.raises(DatasetError, match=r"19 train classes; 10 folds need .* at most 9 folds"):
        folds(some_split(train=19), 10)
    with pytest.raises(DatasetError, match="leaves 1 to train on"):
        hold_out(some_split(train=3), 0.1)
    assert len(names(hold_out(some_split(train=4), 0.01))[1]) == 2
    with pytest.raises(DatasetError, match=r"None of the 4 validation classes .* has 2 images"):
        folds(some_split(train=20, per_class=1), 5)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"protocol": {"choose_by": "validation"}}, "validation_fraction = 0.1"),
        ({"protocol": {"choose_by": "test", "evaluate_test": "end"}}, 'evaluate_test = "every"'),
        ({"protocol": {"choose_by": "luck"}}, "protocol.choose_by"),
        ({"protocol": HELD_OUT, "recall_at": [2]}, "R@1 chooses the model"),
        ({"protocol": HELD_OUT, "runtime": {"eval_every_epochs": 0}}, "compares epochs"),
        ({"start": {"proxies": "class_means"}, "loss": {"name": "triplet"}}, "has no proxies"),
        ({"start": {"projection": "trunk"}, "model": {"dim": None}}, r"set model\.dim"),
        ({"model": {"frozen_trunk": True, "dim": None}}, "need a projection; set dim"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tables: dict[str, object], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        some_job(**tables)


def by_classes(job: Job, split: Split) -> dict[str, float]:
    """A score that differs from fold to fold."""
    assert split.validation is not None
    return {"R@1": 50.0 + int(split.validation.class_names[0][1:])}


def test_each_fold_is_chosen_on_validation_and_tested_at_its_end(tmp_path: Path) -> None:
    runner, split = FakeRunner(by_classes), some_split()
    found = cross_validate(some_job(**SHOP), split, tmp_path, Silent(), runner=runner)
    assert [folder.name for _, _, folder in runner.calls] == [f"fold-{n:02d}" for n in range(10)]
    validated = []
    for job, part, _ in runner.calls:
        assert job.protocol.choose_by == "validation"
        assert job.protocol.evaluate_test == "end"
        assert part.test is split.test
        assert part.sha256() == with_protocol(split, job.protocol).sha256()
        validated += part.validation.class_names
    assert sorted(validated) == sorted(split.train.class_names)
    values = [fold.figures["R@1"] for fold in found]
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    assert scores(found)["R@1"] == pytest.approx({"mean": mean, "std": deviation})
    assert scores(found)["R@2"] == {"mean": 90.0, "std": 0.0}
    page = (tmp_path / "report.md").read_text()
    assert f"| mean ± std |  |  | {mean:.2f} ± {deviation:.2f} | 90.00 ± 0.00 |" in page
    assert "test classes chose nothing" in page
    assert page.count("\n| ") == 10 + 2
