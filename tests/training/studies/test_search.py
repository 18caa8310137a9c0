import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kinlens.embedder.errors import JobError
from kinlens.training.config.job import Job, load_job
from kinlens.training.config.layers import JOBS
from kinlens.training.data.records import Split, hold_out
from kinlens.training.studies.validation import (
    Plan,
    Trial,
    job_for,
    load_space,
    parse_space,
    search,
)
from tests.training.jobs import Silent
from tests.training.studies.runs import SHOP, FakeRunner, some_job, some_split

SPACE = {
    "loss": {"margin": {"low": 0.0, "high": 1.0}},
    "optimizer": {
        "lr_trunk": {"low": 1e-6, "high": 1e-2, "log": True},
        "batch_size": {"low": 10, "high": 100, "step": 10},
        "schedule": {"values": ["linear", "cosine"]},
    },
}


def plan(trials: int = 6, **options: Any) -> Plan:
    return Plan(parse_space(SPACE), trials, **options)


def by_margin(job: Job, split: Split) -> dict[str, float]:
    """Best at margin 0.4."""
    return {"R@1": 100 - 100 * abs(job.loss.margin - 0.4)}


class Raising(FakeRunner):
    """Raises in its n-th run, counted from 1."""

    def __init__(self, error: BaseException, at: int) -> None:
        super().__init__(by_margin)
        self._error, self._at = error, at

    def __call__(self, *arguments: Any) -> Any:
        result = super().__call__(*arguments)
        if self._at == len(self.calls):
            raise self._error
        return result


def tried(folder: Path, runner: FakeRunner, count: int = 6, **options: Any) -> Trial:
    """A search of the margin and three settings of the optimizer."""
    return search(some_job(), some_split(), plan(count, **options), folder, Silent(), runner)


def values(runner: FakeRunner) -> list[tuple[object, ...]]:
    return [
        (j.loss.margin, j.optimizer.lr_trunk, j.optimizer.batch_size, j.optimizer.schedule)
        for j, _, _ in runner.calls
    ]


def test_values_lie_in_the_space_and_the_best_trial_is_a_job_that_tests_once(
    tmp_path: Path,
) -> None:
    runner, split = FakeRunner(by_margin), some_split()
    base, space = some_job(optimizer={"epochs": 40}, **SHOP), plan(12, trial_epochs=3, fraction=0.3)
    best = search(base, split, space, tmp_path, Silent(), runner)
    assert len(runner.calls) == 12
    for margin, rate, batch, schedule in values(runner):
        assert 0 <= margin <= 1
        assert 1e-6 <= rate <= 1e-2
        assert batch in range(10, 101, 10)
        assert schedule in ("linear", "cosine")
    for job, part, _ in runner.calls:
        assert len(part.test) == 0
        assert part.validation.class_names == hold_out(split, 0.3).validation.class_names
        assert job.optimizer.epochs == 3
        assert job.protocol.choose_by == "validation"
        assert job.protocol.evaluate_test == "never"
        assert job.protocol.validation_fraction == 0.3
    scores = [by_margin(job, split)["R@1"] for job, split, _ in runner.calls]
    assert best.score == max(scores) > 80
    assert best.number == scores.index(max(scores))
    job = load_job(tmp_path / "best.toml")
    assert job.loss.margin == best.values["loss.margin"]
    assert job.optimizer.lr_trunk == best.values["optimizer.lr_trunk"]
    assert job.optimizer.epochs == 40
    assert job.protocol.evaluate_test == "end"
    assert job.protocol.choose_by == "validation"
    assert job.protocol.validation_fraction == 0.3


def test_a_search_that_was_stopped_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    first = Raising(KeyboardInterrupt(), at=5)
    whole, second, other = (FakeRunner(by_margin) for _ in range(3))
    best = tried(tmp_path / "whole", whole, 12)
    with pytest.raises(KeyboardInterrupt):
        tried(tmp_path / "parts", first, 12)
    assert tried(tmp_path / "parts", second, 12) == best
    assert values(first)[:4] + values(second) == values(whole)
    assert second.calls[0][2].name == "trial-004"
    tried(tmp_path / "parts", second, 13)
    assert second.calls[-1][2].name == "trial-012"
    tried(tmp_path / "other", other, 2, seed=1)
    assert values(other) != values(whole)[:2]


def test_a_trial_that_fails_is_kept_with_its_reason_and_the_search_goes_on(tmp_path: Path) -> None:
    listener, runner = Silent(), Raising(RuntimeError("the GPU | is <b>full"), at=2)
    search(some_job(), some_split(), plan(4), tmp_path, listener, runner)
    assert listener.sentences[1].startswith("trial 2 of 4: loss.margin = 0.")
    trials = json.loads((tmp_path / "trials.json").read_text())
    assert [trial["score"] is None for trial in trials] == [False, True, False, False]
    assert trials[1]["reason"] == "RuntimeError: the GPU | is <b>full"
    assert trials[0]["best_epoch"] == 2
    assert "Traceback" in (tmp_path / "trial-001" / "failure.txt").read_text()
    page = (tmp_path / "report.md").read_text()
    assert "failed: RuntimeError: the GPU \\| is &lt;b&gt;full" in page
    assert "no trial saw a test class" in page


def test_a_grid_has_every_combination_once_in_an_order_of_its_seed(tmp_path: Path) -> None:
    space = parse_space(
        {
            "loss": {"margin": {"low": 0.0, "high": 0.3, "step": 0.1}},
            "optimizer": {
                "batch_size": {"low": 10, "high": 30, "step": 10},
                "schedule": {"values": ["linear", "cosine"]},
            },
        }
    )

    def points(folder: str, trials: int, seed: int = 0) -> list[tuple[object, ...]]:
        runner = FakeRunner(by_margin)
        plan = Plan(space, trials, seed=seed, sampler="grid")
        search(some_job(), some_split(), plan, tmp_path / folder, Silent(), runner)
        return [(margin, *rest) for margin, _, *rest in values(runner)]

    whole = points("whole", 1000)
    kinds = product((0.0, 0.1, 0.2, 0.3), (10, 20, 30), ("linear", "cosine"))
    assert sorted(whole) == sorted(kinds)
    assert points("parts", 10) + points("parts", 1000) == whole
    assert points("other", 1000, seed=1) != whole
    endless = Plan(parse_space({"loss": {"margin": {"low": 0.0, "high": 1.0}}}), sampler="grid")
    with pytest.raises(JobError, match=r"loss\.margin.*has no steps"):
        search(some_job(), some_split(), endless, tmp_path / "endless", Silent())


@pytest.mark.parametrize(
    ("path", "best"),
    [
        ("proxy-anchor", {"margin": 0.1, "alpha": 32}),
        ("multi-similarity", {"margin": 0.8, "alpha": 18, "beta": 76, "epsilon": 0.4}),
        ("soft-triple", {"margin": 0.4, "scale": 78, "tau": 0.4}),
    ],
)
def test_shipped_spaces_are_of_their_loss_and_have_what_the_benchmark_found(
    tmp_path: Path, path: str, best: dict[str, float]
) -> None:
    file, runner = JOBS / "spaces" / f"{path}.toml", FakeRunner(by_margin)
    job, space = load_job(job_for("cub-proxy-anchor", file)), load_space(file)
    search(job, some_split(), Plan(space, 3, sampler="grid"), tmp_path, Silent(), runner)
    assert {one.loss.name for one, _, _ in runner.calls} == {path.replace("-", "_")}
    for name, value in best.items():
        words = space[f"loss.{name}"]
        assert words["low"] <= value <= words["high"]
        steps = (value - words["low"]) / words["step"]
        assert steps == pytest.approx(round(steps))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss.margni = {low = 0.0, high = 1.0}", "did you mean 'margin'"),
        ("lossy.margin = {low = 0.0, high = 1.0}", "no table 'lossy'"),
        ('data.root = {values = ["a", "b"]}', "data.root cannot be searched"),
        ("loss.margin = {low = 2.0, high = 1.0}", "low <= high"),
        ("loss.margin = {low = 0.0, high = 1.0, log = true}", "low > 0.*log=True"),
        ("loss.margin = {low = 0.0, high = 1.0, step = 0.3}", "not divisible by `step`"),
        ("loss.margin = {values = []}", r"loss\.margin.*one or more"),
        ("[space]\nloss.margin = 0.3", r"loss\.margin.*give a range"),
        ("", "has no setting"),
        ("a = = b", "not valid TOML"),
    ],
)
def test_a_space_without_meaning_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(JobError, match=f"(?s){message}"):
        search(some_job(), some_split(), Plan(load_space(path)), tmp_path / "out", Silent())
    assert not (tmp_path / "out").exists()


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(JobError, match=r"pip install 'kinlens\[search\]'"):
        parse_space(SPACE)
