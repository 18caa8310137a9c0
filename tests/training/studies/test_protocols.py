import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.errors import CheckpointError, DatasetError, JobError
from kinlens.training.config.job import Job
from kinlens.training.config.settings import Protocol
from kinlens.training.data.protocol import folds, hold_out, with_protocol, without_test
from kinlens.training.data.records import Split, labelled
from kinlens.training.folder import RESULT
from kinlens.training.studies.crossval import cross_validate, scores
from tests.training.jobs import Silent
from tests.training.studies.runs import FakeRunner, images, some_job, some_split


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
def test_contradictory_protocols_are_refused(table: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message):
        some_job(protocol=table)


def by_classes(job: Job, split: Split) -> dict[str, float]:
    """A score that differs from fold to fold."""
    assert split.validation is not None
    return {"R@1": 50.0 + int(split.validation.class_names[0][1:])}


def test_a_report_has_every_fold_and_mean_and_deviation_of_the_test(tmp_path: Path) -> None:
    runner = FakeRunner(by_classes)
    found = cross_validate(some_job(), some_split(), tmp_path, Silent(), runner=runner)
    values = [fold.figures["R@1"] for fold in found]
    assert len(values) == 10
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    assert scores(found)["R@1"] == pytest.approx({"mean": mean, "std": deviation})
    assert scores(found)["R@2"] == {"mean": 90.0, "std": 0.0}
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["scores"] == scores(found)
    assert len(content["folds"]) == 10
    page = (tmp_path / "report.md").read_text()
    assert f"| mean ± std |  |  | {mean:.2f} ± {deviation:.2f} | 90.00 ± 0.00 |" in page
    assert "test classes chose nothing" in page
    assert page.count("\n| ") == 10 + 2


def test_each_fold_is_chosen_on_validation_and_tested_at_its_end(tmp_path: Path) -> None:
    runner = FakeRunner(by_classes)
    split = some_split()
    cross_validate(some_job(), split, tmp_path, Silent(), count=5, runner=runner)
    assert [folder.name for _, _, folder in runner.calls] == [f"fold-{n:02d}" for n in range(5)]
    validated = []
    for job, part, _ in runner.calls:
        assert job.protocol.choose_by == "validation"
        assert job.protocol.evaluate_test == "end"
        assert part.test is split.test
        assert part.sha256() == with_protocol(split, job.protocol).sha256()
        validated += part.validation.class_names
    assert sorted(validated) == sorted(split.train.class_names)


def test_finished_folds_are_not_trained_again(tmp_path: Path) -> None:
    class Interrupted(FakeRunner):
        def __call__(self, *arguments):
            if len(self.calls) == 3:
                raise KeyboardInterrupt
            return super().__call__(*arguments)

    job, split = some_job(), some_split()
    first, second, whole = Interrupted(by_classes), FakeRunner(by_classes), FakeRunner(by_classes)
    with pytest.raises(KeyboardInterrupt):
        cross_validate(job, split, tmp_path / "a", Silent(), count=5, runner=first)
    listener = Silent()
    found = cross_validate(job, split, tmp_path / "a", listener, 5, runner=second)
    states = [sentence.split(": ")[1] for sentence in listener.sentences]
    assert states == ["already finished"] * 3 + ["training"] * 2
    assert [folder.name for _, _, folder in second.calls] == ["fold-03", "fold-04"]
    assert found == cross_validate(job, split, tmp_path / "b", Silent(), 5, runner=whole)


def test_another_job_split_or_seed_is_refused_in_the_same_folder(tmp_path: Path) -> None:
    runner = FakeRunner(by_classes)

    def run(job: Job | None = None, split: Split | None = None, seed: int = 0) -> object:
        chosen = job or some_job(), split or some_split()
        return cross_validate(*chosen, tmp_path, Silent(), 5, seed, runner=runner)

    run()
    with pytest.raises(JobError, match=r"job.loss.margin = 0.1, now 0.2"):
        run(some_job(loss={"name": "proxy_anchor", "margin": 0.2}))
    with pytest.raises(JobError, match="split_sha256"):
        run(split=some_split(train=21))
    with pytest.raises(JobError, match="seed = 0, now 1"):
        run(seed=1)
    run(some_job(description="other words", runtime={"workers": 0}))
    assert len(runner.calls) == 5
    with pytest.raises(JobError, match="lacks 1"):
        run(some_job(recall_at=[2]))


def test_a_result_of_another_job_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    runner = FakeRunner(by_classes)
    cross_validate(some_job(), some_split(), tmp_path, Silent(), 5, runner=runner)
    path = tmp_path / "fold-02" / RESULT
    content = json.loads(path.read_text())
    content["job"]["optimizer"]["epochs"] = 7
    path.write_text(json.dumps(content))
    with pytest.raises(JobError, match=r"fold-02 has .* optimizer.epochs = 7, now 30"):
        cross_validate(some_job(), some_split(), tmp_path, Silent(), 5, runner=runner)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        cross_validate(some_job(), some_split(), tmp_path, Silent(), 5, runner=runner)
