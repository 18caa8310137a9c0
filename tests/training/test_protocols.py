from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from embedder.errors import DatasetError, JobError
from tests.training.studies import images, some_job, some_split
from training.config.protocol import Protocol
from training.data.records import Split, labelled
from training.protocols import folds, hold_out, with_protocol, without_test


def names(split: Split) -> tuple[set[str], set[str]]:
    assert split.validation is not None
    return set(split.train.class_names), set(split.validation.class_names)


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.2, 0.05])
def test_holding_out_splits_the_train_classes_and_leaves_the_test_classes(fraction: float) -> None:
    split = some_split(train=40)
    held = hold_out(split, fraction)
    train, validation = names(held)
    assert len(validation) == round(40 * fraction)
    assert train | validation == set(split.train.class_names)
    assert not train & validation
    assert held.test is split.test


def test_an_image_keeps_its_class_and_labels_have_no_gaps() -> None:
    split = some_split(train=12)
    before = dict(zip(split.train.paths, split.train.labels, strict=True))
    held = hold_out(split, 0.25, seed=3)
    for part in (held.train, held.validation):
        assert part is not None
        assert sorted(set(part.labels)) == list(range(part.classes))
        for path, label in zip(part.paths, part.labels, strict=True):
            assert part.class_names[label] == split.train.class_names[before[path]]


def test_the_same_seed_holds_out_the_same_classes_and_another_does_not() -> None:
    split = some_split(train=30)
    assert hold_out(split, 0.2, 1).sha256() == hold_out(split, 0.2, 1).sha256()
    assert names(hold_out(split, 0.2, 1)) != names(hold_out(split, 0.2, 2))


@pytest.mark.parametrize(("classes", "count"), [(20, 10), (98, 10), (23, 7), (4, 2)])
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


def test_folds_mix_neighbours_and_depend_on_the_seed_alone() -> None:
    split = some_split(train=40)
    first = [names(part)[1] for part in folds(split, 10, seed=1)]
    assert first == [names(part)[1] for part in folds(split, 10, seed=1)]
    assert first != [names(part)[1] for part in folds(split, 10, seed=2)]
    in_order = [set(part) for part in np.array_split(list(split.train.class_names), 10)]
    assert first != in_order


def test_too_few_classes_are_refused_with_what_would_do() -> None:
    with pytest.raises(DatasetError, match=r"19 train classes; 10 folds need .* at most 9 folds"):
        folds(some_split(train=19), 10)
    with pytest.raises(DatasetError, match="leaves 1 to train on"):
        hold_out(some_split(train=3), 0.1)
    assert len(names(hold_out(some_split(train=4), 0.01))[1]) == 2


def test_validation_classes_of_single_images_are_refused() -> None:
    single = [(f"a{c}.png", f"a{c}") for c in range(8)]
    pairs = [(f"b{c}-{n}.png", f"b{c}") for c in range(2) for n in range(2)]
    split = Split(labelled(Path("nowhere"), single + pairs), images("z", 2))
    with pytest.raises(DatasetError, match=r"None of the 2 validation classes .* has 2 images"):
        folds(split, 5)


def test_validation_classes_of_the_data_set_are_not_mixed_with_ours() -> None:
    split = replace(some_split(), validation=images("v", 3))
    for take in (lambda: hold_out(split, 0.2), lambda: folds(split, 5)):
        with pytest.raises(DatasetError, match="comes with 3 validation classes"):
            take()


def test_fractions_and_counts_without_meaning_are_errors_of_the_caller() -> None:
    for fraction in (0.0, 1.0):
        with pytest.raises(ValueError, match="between 0 and 1"):
            hold_out(some_split(), fraction)
    with pytest.raises(ValueError, match="at least 2"):
        folds(some_split(), 1)


def test_the_protocol_of_a_job_says_what_is_held_out() -> None:
    split = some_split()
    assert with_protocol(split, Protocol()) is split
    held = with_protocol(split, Protocol(validation_fraction=0.2, validation_seed=4))
    assert held.sha256() == hold_out(split, 0.2, 4).sha256()


def test_without_test_images_nothing_is_left_to_look_at() -> None:
    split = without_test(hold_out(some_split(), 0.2))
    assert len(split.test) == 0
    assert split.test.classes == 0
    assert split.validation is not None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"choose_by": "validation"}, "validation_fraction = 0.1"),
        ({"choose_by": "test", "evaluate_test": "end"}, 'evaluate_test = "every"'),
        ({"choose_by": "luck"}, "protocol.choose_by"),
        ({"validation_fraction": 1.0}, "protocol.validation_fraction"),
    ],
)
def test_protocols_that_contradict_themselves_are_refused(
    table: dict[str, object], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        some_job(protocol=table)


def test_choosing_by_test_needs_its_flag() -> None:
    by_test = Protocol(choose_by="test")
    with pytest.raises(JobError, match="--choose-by-test"):
        by_test.require_flag(False)
    by_test.require_flag(True)
    Protocol().require_flag(False)
