import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kinlens.embedder.errors import CheckpointError, DatasetError, JobError, TrainingError
from kinlens.training.checkpoint import FILE, load_checkpoint, load_chosen, seed_everything
from kinlens.training.commands.jobs import load_images, with_settings
from kinlens.training.config.job import Job, parse_job
from kinlens.training.config.settings import Optimizer, Runtime, rate
from kinlens.training.data.load import load_split
from kinlens.training.data.protocol import with_protocol
from kinlens.training.data.records import Split
from kinlens.training.device import autocast, choose_device, on_device, tuned
from kinlens.training.evaluation.evaluate import embed
from kinlens.training.folder import Result, read_result
from kinlens.training.runner import run_job
from kinlens.training.state import create_run
from kinlens.training.trainer import fit, train_step
from tests.training.jobs import Silent, Stopping, small_job


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data") / "products"


def run(
    job: Job, folder: Path, resume: bool = False, listener: Silent | None = None
) -> tuple[Split, list[dict[str, float]]]:
    folder.mkdir(exist_ok=True)
    split = load_split(job.data)
    return split, fit(job, split, folder, listener or Silent(), resume)


def changed(job: Job, **tables: dict[str, object]) -> Job:
    content = job.as_dict()
    for name, values in tables.items():
        content[name] |= values
    return parse_job(content)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = load_checkpoint(folder)
    return {**checkpoint.net, **{f"objective.{k}": v for k, v in checkpoint.objective.items()}}


def same_weights(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def log_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class Finished:
    job: Job
    split: Split
    folder: Path
    result: Result
    seen: Silent


def finish(job: Job, folder: Path) -> Finished:
    split, seen = with_protocol(load_split(job.data), job.protocol), Silent()
    return Finished(job, split, folder, run_job(job, split, folder, seen), seen)


@pytest.fixture(scope="module")
def finished(products: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of two epochs of three steps, in a folder that tests leave as it is."""
    job = changed(small_job(products, epochs=2), runtime={"tensorboard": True})
    return finish(job, tmp_path_factory.mktemp("finished"))


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Finished:
    """The finished run in a folder that a test may change."""
    return replace(finished, folder=shutil.copytree(finished.folder, tmp_path / "copy"))


def test_training_lowers_the_loss(products: Path, weights: Path, tmp_path: Path) -> None:
    job = small_job(products, weights=weights, epochs=10, lr_trunk=3e-4, lr_head=3e-3)
    _, history = run(job, tmp_path)
    assert history[-1]["loss"] < 0.9 * history[0]["loss"]
    assert set(history[-1]) >= {"epoch", "seconds", "images_per_s", "R@1", "R@2", "lipschitz_max"}


@pytest.fixture(scope="module")
def four_epochs(
    products: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Job, Path, list[dict[str, float]]]:
    """A job of four epochs of 3 steps with all that a run remembers, its run and its history."""
    job = small_job(products, epochs=4, average=0.9)
    tables = job.as_dict()["regularizers"]
    tables["determinant"]["share"] = 0.2
    start = {"projection": "trunk", "proxies": "class_means"}
    job = changed(job, regularizers=tables, start=start)
    folder = tmp_path_factory.mktemp("whole")
    _, history = run(job, folder)
    return job, folder, history


@pytest.mark.parametrize("stop_after_steps", [6, 8])  # between two epochs, and inside one
def test_four_epochs_equal_two_and_a_resumed_two_bit_for_bit(
    four_epochs: tuple[Job, Path, list[dict[str, float]]], tmp_path: Path, stop_after_steps: int
) -> None:
    job, folder, whole_history = four_epochs
    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path, listener=Stopping(stop_after_steps + 1))
    assert load_checkpoint(tmp_path).epoch == 2
    _, history = run(job, tmp_path, resume=True)
    assert same_weights(folder, tmp_path)
    assert [row["R@1"] for row in history] == [row["R@1"] for row in whole_history]
    epochs = [line["epoch"] for line in log_of(tmp_path) if line["kind"] == "epoch"]
    assert epochs == [1, 2, 3, 4]


def test_a_run_resumes_with_its_own_feedback_alone(products: Path, tmp_path: Path) -> None:
    job = small_job(products, epochs=3)
    train = load_split(job.data).train
    names = [f"{name}.jpg" for name in train.class_names]
    items = [train.paths[row] for row in np.unique(train.labels, return_index=True)[1]]
    rows = [f"{name},,{item},clicked" for name, item in zip(names, items, strict=True)]
    rows += [f"{names[0]},,{items[1]},wrong"]
    reported = tmp_path / "reported"
    reported.mkdir()
    (reported / "pairs.csv").write_text("\n".join(["query,query_key,item,action", *rows]))
    for name, item in zip(names, items, strict=True):
        (reported / name).write_bytes((products / item).read_bytes())
    job = changed(job, data={"feedback": [str(reported)]})
    run_job(job, load_split(job.data), tmp_path / "whole", Silent())
    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path / "parts", listener=Stopping(5))
    split, _ = run(job, tmp_path / "parts", resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    run(changed(job, data={"feedback": []}), tmp_path / "without")
    assert not same_weights(tmp_path / "whole", tmp_path / "without")
    report = (tmp_path / "whole" / "report.md").read_text()
    assert "- feedback: 3 query image(s) join 3 train class(es); 1 pair(s) of" in report
    listed = (tmp_path / "whole" / "feedback.csv").read_text().splitlines()
    assert listed[1:] == [
        f"{reported / name},{reported / name},{own}"
        for name, own in zip(names, train.class_names, strict=True)
    ]
    (reported / "pairs.csv").write_text("\n".join(["query,query_key,item,action", *rows[:-1]]))
    with pytest.raises(DatasetError, match="was trained with other feedback"):
        run(job, tmp_path / "parts", resume=True)
    shutil.rmtree(reported)  # a model is tested and exported without it
    later = load_images(with_settings(job, None, ("data.",)))
    later.require(load_checkpoint(tmp_path / "whole").split_sha256, "the run")
    assert later.sha256() == split.sha256()


@pytest.mark.parametrize(
    ("tables", "error", "message"),
    [
        (
            {"optimizer": {"lr_trunk": 0.5}, "runtime": {"workers": 1}},
            CheckpointError,
            r"optimizer.lr_trunk = 0.001, now 0.5\. Resume with",
        ),
        ({"data": {"split_seed": 5}}, DatasetError, "trained on another split of the images"),
    ],
    ids=["settings", "images"],
)
def test_resuming_with_others_is_refused_and_changes_nothing(
    copied: Finished, tables: dict[str, Any], error: type[Exception], message: str
) -> None:
    files = [path for path in copied.folder.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    with pytest.raises(error, match=message):
        run(changed(copied.job, **tables), copied.folder, resume=True)
    assert {path: path.read_bytes() for path in files} == before


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork of a threaded process
@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_test_image_stops_before_training(tmp_path: Path, workers: int) -> None:
    job = changed(small_job(tmp_path / "products"), runtime={"workers": workers})
    split = load_split(job.data)
    damaged = tmp_path / "products" / split.test.paths[0]
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-200])
    with pytest.raises(DatasetError, match=f"^{re.escape(str(damaged))}: .*truncated") as error:
        fit(job, split, tmp_path, Silent())
    assert "\n" not in str(error.value)
    assert f"`kinlens-train data doctor {tmp_path / 'products'}` lists all" in str(error.value)
    assert not (tmp_path / FILE).exists()


def test_only_the_same_seed_gives_the_same_weights(finished: Finished, tmp_path: Path) -> None:
    for seed in (0, 1):
        run(finished.job.model_copy(update={"seed": seed}), tmp_path / str(seed))
        assert same_weights(tmp_path / str(seed), finished.folder) == (seed == 0)


def test_criteria_and_flows_run_in_float32_under_bf16(products: Path) -> None:
    job = changed(small_job(products), runtime={"precision": "bf16"})
    state = create_run(job, 3)
    seen: dict[str, torch.dtype] = {}

    def remember(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            seen[name] = output.dtype

        return hook

    watched = {
        "trunk": next(m for m in state.net.trunk.modules() if isinstance(m, nn.Conv2d)),
        "projection": state.net.projection,
        "first": state.net.flow.layers[0].conditioner[0],
        "second": state.objective.determinant.second_flow.layers[0].conditioner[0],
        "loss": state.objective.loss,
    }
    for name, module in watched.items():
        module.register_forward_hook(remember(name))
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    wide = dict.fromkeys(("projection", "first", "second", "loss"), torch.float32)
    with autocast(job.runtime, state.device):
        state.objective(state.net, state.net.features(images), torch.arange(4) % 3)
        assert seen == {"trunk": torch.bfloat16, **wide}
        seen.clear()
        assert state.net(images).dtype == torch.float32
        assert seen["first"] == torch.float32


def test_figures_are_those_of_float32_whatever_the_steps_compute_in(products: Path) -> None:
    job = small_job(products)
    images = load_split(job.data).test
    net = create_run(job, 3).net
    found = {
        precision: embed(net, images, changed(job, runtime={"precision": precision}))
        for precision in ("fp32", "bf16", "auto")
    }
    assert found["fp32"].dtype == np.float32
    assert np.array_equal(found["bf16"], found["fp32"])
    assert np.array_equal(found["auto"], found["fp32"])


def test_the_trunk_rests_while_it_warms_up(products: Path, tmp_path: Path) -> None:
    job = small_job(products, epochs=1, warmup_epochs=1, weight_decay=0)
    run(job, tmp_path)
    trained = weights(tmp_path)
    seed_everything(job.seed)
    fresh = dict(create_run(job, 3).net.named_parameters())
    rest = {name for name, value in fresh.items() if torch.equal(value, trained[name])}
    assert {name for name in fresh if name.startswith("trunk")} <= rest
    assert "projection.weight" not in rest


def test_a_loss_that_is_not_finite_stops_the_run(products: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"loss is (nan|inf) at step"):
        run(small_job(products, epochs=3, lr_trunk=1e30, lr_head=1e30), tmp_path)


@pytest.mark.parametrize("part", ["total", "gradient_norm"])
def test_a_step_that_is_not_finite_moves_nothing(products: Path, part: str) -> None:
    run = create_run(small_job(products), 3)
    before = {n: p.detach().clone() for n, p in run.net.named_parameters()}
    if part == "total":
        with torch.no_grad():
            run.objective.loss.proxies[0] = torch.inf
    else:
        run.net.projection.weight.register_hook(lambda gradient: gradient * torch.nan)
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    parts = train_step(run, run.begin_epoch(trunk_frozen=False), images, torch.arange(6) % 3, 10)
    assert not parts[part].isfinite()
    assert parts["total"].isfinite() == (part != "total")
    assert all(torch.equal(before[n], p) for n, p in run.net.named_parameters())


def test_numbers_are_read_off_a_gpu_some_steps_later_and_none_is_lost(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kinlens.training.trainer.READ_EVERY_STEPS", {"cpu": 2})
    seen = Silent()
    run(finished.job, tmp_path, listener=seen)
    assert log_of(tmp_path)[-1]["loss"] == log_of(finished.folder)[-1]["loss"]
    assert len(seen.steps) == 6


@pytest.mark.parametrize("content", [b"", b"damaged"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        load_checkpoint(tmp_path / "nowhere")


def test_cuda_asked_for_and_absent_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(TrainingError, match="torch sees no GPU"):
        choose_device(Runtime(device="cuda"))


def test_a_run_folder_holds_log_curves_result_and_report(finished: Finished) -> None:
    folder, result = finished.folder, finished.result
    assert [line["epoch"] for line in log_of(folder) if line["kind"] == "epoch"] == [1, 2]
    assert list((folder / "tensorboard").iterdir())
    page = (folder / "report.md").read_text()
    assert "| 2 |" in page
    assert "regularizers: determinant" in page
    assert f"| lipschitz_mean | {result.figures['lipschitz_mean']:.3f} |" in page
    assert "no epoch was chosen by its test recall" in page
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert read_result(folder) == result
    assert set(result.figures) >= {"R@1", "R@2", "MAP@R", "NMI", "F1", "uniformity", "density"}


def test_a_finished_run_is_not_trained_again_and_finds_other_recalls(copied: Finished) -> None:
    again = finish(copied.job, copied.folder)
    assert again.result == copied.result
    other = finish(parse_job(copied.job.as_dict() | {"recall_at": [1, 3]}), copied.folder)
    assert other.result.figures["R@1"] == copied.result.figures["R@1"]
    assert "R@3" in other.result.figures
    assert not again.seen.steps + other.seen.steps


def test_a_folder_is_held_by_one_living_process(products: Path, tmp_path: Path) -> None:
    hold = "import sys; from pathlib import Path; from kinlens.training.folder import exclusive\n"
    hold += "with exclusive(Path(sys.argv[1])): print(flush=True); input()"
    words = [sys.executable, "-c", hold, str(tmp_path)]
    job = small_job(products)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(JobError, match="Another training is running in"):
            finish(job, tmp_path)
        other.kill()
    assert not (tmp_path / FILE).exists()
    assert finish(job, tmp_path).result.figures


def validated(products: Path) -> Job:
    settings = {"validation_fraction": 0.5, "choose_by": "validation", "evaluate_test": "end"}
    job = small_job(products, epochs=3, lr_trunk=1e-2)
    return changed(job, data={"products": 10}, protocol=settings)


def test_best_validated_epoch_is_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = finish(validated(tmp_path / "products"), tmp_path / "run")
    job, folder, result, seen = done.job, done.folder, done.result, done.seen
    scores = [row["validation R@1"] for row in seen.rows]
    assert result.best_epoch == 1 + scores.index(max(scores))
    assert result.validation["R@1"] == max(scores)
    assert not any("R@1" in row for row in seen.rows), "test classes were looked at while training"
    assert load_chosen(folder).epoch == result.best_epoch
    assert result.figures["R@1"] >= 0
    assert "the best R@1 on validation classes" in (folder / "report.md").read_text()

    def stopped(*_: object, **__: object) -> dict[str, float]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kinlens.training.trainer.evaluate", stopped)
        with pytest.raises(KeyboardInterrupt):
            finish(job, tmp_path / "parts")
    parts = finish(job, tmp_path / "parts").result
    assert parts.best_epoch == result.best_epoch
    assert parts.figures == result.figures
    assert parts.validation == result.validation


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"recall_at": [2]}, "R@1 chooses the model"),
        ({"runtime": {"eval_every_epochs": 0}}, "compares epochs"),
    ],
)
def test_bad_choices_are_refused(tmp_path: Path, tables: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message):
        parse_job(validated(tmp_path).as_dict() | tables)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork of a threaded process
def test_random_draws_resume_with_any_workers(products: Path, tmp_path: Path) -> None:
    regularizers = {
        "skewed_mean": {"subset": 2, "kind": "mhe1"},
        "non_isotropy": {"blocks": 1, "hidden": 4, "layers": 2, "fit_epochs": 3},
        "graph_consistency": {},
    }
    sampling = {"kind": "paired", "per_class": 1}
    job = changed(small_job(products, epochs=4), regularizers=regularizers, sampling=sampling)
    run(job, tmp_path / "whole")
    for workers in (0, 1):
        folder, same = tmp_path / f"parts-{workers}", changed(job, runtime={"workers": workers})
        with pytest.raises(KeyboardInterrupt):
            run(same, folder, listener=Stopping(7))
        run(same, folder, resume=True)
        assert same_weights(tmp_path / "whole", folder), workers


def test_fitting_the_flow_of_nir_changes_nothing_else(products: Path, tmp_path: Path) -> None:
    alone = small_job(products, regularized=False)
    run(alone, tmp_path / "alone")
    without = weights(tmp_path / "alone")
    for fit_epochs in (0, 1):
        nir = {"blocks": 1, "hidden": 4, "layers": 2, "fit_epochs": fit_epochs}
        run(changed(alone, regularizers={"non_isotropy": nir}), tmp_path / f"nir-{fit_epochs}")
        fitted = weights(tmp_path / f"nir-{fit_epochs}")
        untouched = all(torch.equal(without[name], fitted[name]) for name in without)
        assert untouched == (fit_epochs == 1)


def test_how_often_a_run_is_evaluated_changes_nothing(products: Path, tmp_path: Path) -> None:
    """With a loss that mines at random, statistics that move, and a flow to look at."""
    job = parse_job(small_job(products, epochs=2).as_dict() | {"loss": {"name": "margin"}})
    run(job, tmp_path / "often")
    run(changed(job, runtime={"eval_every_epochs": 0}), tmp_path / "last")
    run(changed(job, protocol={"evaluate_test": "never"}), tmp_path / "never")
    assert same_weights(tmp_path / "often", tmp_path / "last")
    assert same_weights(tmp_path / "often", tmp_path / "never")


@pytest.mark.parametrize(
    ("schedule", "middle"), [("constant", 1.0), ("linear", 0.5), ("cosine", 0.5)]
)
def test_schedules_start_at_1_and_fall_as_named(schedule: str, middle: float) -> None:
    settings = Optimizer(schedule=schedule, epochs=5)
    assert rate(settings, 0, 2) == 1.0
    assert rate(settings, 5, 2) == pytest.approx(middle)
    assert rate(settings, 10, 2) == pytest.approx(1.0 if schedule == "constant" else 0.0)
    late = Optimizer(schedule=schedule, epochs=6, decay_start=0.5)
    assert rate(late, 6, 2) == 1.0
    assert rate(late, 9, 2) == pytest.approx(middle)


def test_steps_fall_every_so_many_epochs_or_at_milestones() -> None:
    every = Optimizer(schedule="step", step_epochs=2, gamma=0.1)
    assert [rate(every, 10 * epoch, 10) for epoch in range(5)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01]
    )
    assert rate(every, 19, 10) == 1
    listed = Optimizer(schedule="step", step_epochs=(1, 4), gamma=0.5)
    assert [rate(listed, 10 * epoch, 10) for epoch in range(5)] == [1, 0.5, 0.5, 0.5, 0.25]


CPU = torch.device("cpu")


def test_batches_stay_in_order_and_none_is_lost() -> None:
    batches = [(torch.full((2, 3), n), torch.tensor([n, n])) for n in range(5)]
    found = [int(labels[0]) for _, labels in on_device(batches, CPU)]
    assert found == [0, 1, 2, 3, 4]


def test_what_steps_set_for_the_process_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[int, int]] = []
    monkeypatch.setattr("kinlens.training.device._set_malloc", options.append)
    with pytest.raises(KeyboardInterrupt), tuned(CPU):
        raise KeyboardInterrupt
    kept, back = options
    assert kept.keys() == back.keys()
    before = torch.backends.cudnn.benchmark
    with tuned(torch.device("cuda")):
        assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark == before
