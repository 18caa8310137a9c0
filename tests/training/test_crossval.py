import json
import statistics
from pathlib import Path

import pytest

from embedder.errors import CheckpointError, JobError
from tests.training.jobs import Silent, small_job
from tests.training.studies import FakeRunner, some_job, some_split
from training.config.job import Job, parse_job
from training.crossval import cross_validate
from training.data.load import load_split
from training.data.records import Split
from training.result import RESULT


def by_classes(job: Job, split: Split) -> dict[str, float]:
    """A score that differs from fold to fold."""
    assert split.validation is not None
    return {"R@1": 50.0 + int(split.validation.class_names[0][1:])}


def test_scores_are_mean_and_sample_deviation_of_the_test_figures(tmp_path: Path) -> None:
    runner = FakeRunner(by_classes)
    found = cross_validate(some_job(), some_split(), tmp_path, Silent(), runner=runner)
    values = [fold.figures["R@1"] for fold in found.folds]
    assert len(values) == 10
    assert found.scores()["R@1"] == (statistics.fmean(values), statistics.stdev(values))
    assert found.scores()["R@2"] == (90.0, 0.0)


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
    seen: list[bool] = []
    found = cross_validate(
        job, split, tmp_path / "a", Silent(), 5, runner=second, on_fold=lambda *f: seen.append(f[2])
    )
    assert seen == [True, True, True, False, False]
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


def test_a_result_of_another_job_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    runner = FakeRunner(by_classes)
    cross_validate(some_job(), some_split(), tmp_path, Silent(), 5, runner=runner)
    path = tmp_path / "fold-02" / RESULT
    content = json.loads(path.read_text())
    content["job"]["optimizer"]["epochs"] = 7
    path.write_text(json.dumps(content))
    with pytest.raises(JobError, match=r"fold-02 holds .* optimizer.epochs = 7, now 30"):
        cross_validate(some_job(), some_split(), tmp_path, Silent(), 5, runner=runner)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        cross_validate(some_job(), some_split(), tmp_path, Silent(), 5, runner=runner)


def test_the_report_holds_every_fold_and_the_protocol(tmp_path: Path) -> None:
    runner = FakeRunner(by_classes)
    found = cross_validate(some_job(), some_split(), tmp_path, Silent(), runner=runner)
    content = json.loads((tmp_path / "report.json").read_text())
    mean, deviation = found.scores()["R@1"]
    assert content["scores"]["R@1"] == {"mean": mean, "std": deviation}
    assert len(content["folds"]) == 10
    page = (tmp_path / "report.md").read_text()
    assert f"| mean ± std |  |  | {mean:.2f} ± {deviation:.2f} | 90.00 ± 0.00 |" in page
    assert "no epoch was chosen by test recall" in page
    assert page.count("\n| ") == 10 + 2


def test_a_job_without_recall_at_1_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="lacks 1"):
        cross_validate(some_job(recall_at=[2]), some_split(), tmp_path, Silent())
    assert not list(tmp_path.iterdir())


def test_real_folds_train_choose_and_test(tmp_path: Path) -> None:
    content = small_job(tmp_path / "products", regularized=False).as_dict()
    content["data"] |= {"products": 10, "train_fraction": 0.6}
    job = parse_job(content)
    split = load_split(job.data)
    found = cross_validate(job, split, tmp_path / "out", Silent(), count=2)
    assert len(found.folds) == 2
    for fold in found.folds:
        assert fold.chosen_by == "validation"
        assert 0 <= fold.figures["R@1"] <= 100
        assert 0 <= fold.validation["R@1"] <= 100
    assert cross_validate(job, split, tmp_path / "out", Silent(), count=2) == found
