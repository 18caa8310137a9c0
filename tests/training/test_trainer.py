import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from kinlens.embedder.errors import CheckpointError, DatasetError, JobError, TrainingError
from kinlens.training.checkpoint import FILE, Epoch, Figures, load_checkpoint, load_chosen
from kinlens.training.config.job import Job, parse_job
from kinlens.training.config.settings import Optimizer, Runtime, rate
from kinlens.training.data.load import load_split
from kinlens.training.data.records import Split, with_protocol
from kinlens.training.device import autocast, choose_device
from kinlens.training.evaluation.evaluate import embed
from kinlens.training.folder import Result, read_result, replace_text
from kinlens.training.library.sources import load_images, with_settings
from kinlens.training.report.log import ConsoleListener, epoch_bar
from kinlens.training.runner import run_job
from kinlens.training.state import create_run
from kinlens.training.trainer import fit, train_step
from tests.training.jobs import Silent, Stopping, small_job


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data") / "products"


def run(
    job: Job, folder: Path, resume: bool = False, listener: Silent | None = None
) -> tuple[Split, list[Epoch]]:
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


def epochs_of(folder: Path) -> list[Epoch]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "epoch"]


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


@pytest.fixture(scope="module")
def four_epochs(
    products: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Job, Path, list[Epoch]]:
    """A job of four epochs of 3 steps with all that draws or is remembered; its run and history."""
    job = small_job(products, epochs=4, average=0.9)
    tables = job.as_dict()["regularizers"]
    tables["determinant"]["share"] = 0.2
    tables["skewed_mean"] = {"subset": 2, "kind": "distance"}
    tables["non_isotropy"] = {"blocks": 1, "hidden": 4, "layers": 2, "fit_epochs": 3}
    tables["graph_consistency"] = {}
    job = changed(
        job,
        regularizers=tables,
        start={"projection": "trunk", "proxies": "class_means"},
        sampling={"kind": "paired", "per_class": 1},
    )
    folder = tmp_path_factory.mktemp("whole")
    _, history = run(job, folder)
    return job, folder, history


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork of a threaded process
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 1])
def test_four_epochs_equal_two_and_a_resumed_two_bit_for_bit(
    four_epochs: tuple[Job, Path, list[Epoch]], tmp_path: Path, workers: int
) -> None:
    job, folder, whole_history = four_epochs
    job = changed(job, runtime={"workers": workers})
    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path, listener=Stopping(8))  # inside the third epoch
    assert load_checkpoint(tmp_path).epoch == 2
    _, history = run(job, tmp_path, resume=True)
    assert same_weights(folder, tmp_path)
    assert [one.figures for one in history] == [one.figures for one in whole_history]
    assert [row["epoch"] for row in epochs_of(tmp_path)] == [1, 2, 3, 4]


def test_files_have_a_row_of_figures_for_each_epoch_as_in_versions_0_1_and_0_2() -> None:
    means = {"epoch": 2.0, "loss": 0.5, "seconds": 3.0, "images_per_s": 40.0}
    terms = {"share determinant": 0.1, "scale determinant": 2.0, "reach determinant": 0.01}
    row = {**means, **terms, "validation R@1": 70.0, "R@1": 60.0, "gain low": -1.0}
    epoch = Epoch.of(row)
    assert epoch.figures == Figures({"R@1": 60.0, "gain low": -1.0}, {"R@1": 70.0})
    assert epoch.shares == {"determinant": 0.1}
    assert epoch.row() == row


def test_a_run_learns_its_feedback_and_resumes_with_it_alone(
    finished: Finished, products: Path, tmp_path: Path
) -> None:
    train = finished.split.train
    names = [f"{name}.jpg" for name in train.class_names]
    items = [train.paths[row] for row in np.unique(train.labels, return_index=True)[1]]
    rows = ["query,query_key,item,action", f"{names[0]},,{items[1]},wrong"]
    reported, folder = tmp_path / "reported", tmp_path / "run"
    reported.mkdir()
    for name, item in zip(names, items, strict=True):
        rows.append(f"{name},,{item},clicked")
        shutil.copy(products / item, reported / name)
    (reported / "pairs.csv").write_text("\n".join(rows))
    job = changed(finished.job, data={"feedback": [str(reported)]})
    run_job(job, load_split(job.data), folder, Silent())
    assert not same_weights(folder, finished.folder)
    report = (folder / "report.md").read_text()
    assert "- feedback: 3 query image(s) join 3 train class(es)" in report
    listed = [line.split(",")[1:] for line in (folder / "feedback.csv").read_text().splitlines()]
    paths = [str(reported / name) for name in names]
    assert listed[1:] == [list(pair) for pair in zip(paths, train.class_names, strict=True)]
    (reported / "pairs.csv").write_text("\n".join(rows[:-1]))
    with pytest.raises(DatasetError, match="was trained with other feedback"):
        run(job, folder, resume=True)
    shutil.rmtree(reported)  # a model is tested and exported without it
    later = load_images(with_settings(job, (), ("data.",)))
    later.require(load_checkpoint(folder).split_sha256, "the run")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"optimizer": {"lr_trunk": 0.5}, "runtime": {"workers": 1}},
            r"optimizer.lr_trunk = 0.001, now 0.5\. Resume with",
        ),
        ({"data": {"split_seed": 5}}, "trained on another split of the images"),
    ],
    ids=["settings", "images"],
)
def test_resuming_with_others_is_refused_and_changes_nothing(
    copied: Finished, tables: dict[str, Any], message: str
) -> None:
    files = [path for path in copied.folder.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    with pytest.raises((CheckpointError, DatasetError), match=message):
        run(changed(copied.job, **tables), copied.folder, resume=True)
    assert {path: path.read_bytes() for path in files} == before


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork of a threaded process
def test_a_damaged_test_image_stops_before_training(tmp_path: Path) -> None:
    job = changed(small_job(tmp_path / "products"), runtime={"workers": 1})
    split = load_split(job.data)
    damaged = tmp_path / "products" / split.test.paths[0]
    damaged.write_bytes(damaged.read_bytes()[:-200])
    with pytest.raises(DatasetError, match=f"^{re.escape(str(damaged))}: .*truncated") as error:
        fit(job, split, tmp_path, Silent())
    assert "\n" not in str(error.value)
    assert f"`kinlens-train data doctor {tmp_path / 'products'}` lists all" in str(error.value)
    assert not (tmp_path / FILE).exists()


def test_criteria_and_flows_run_in_float32_under_bf16(products: Path) -> None:
    job = changed(small_job(products), runtime={"precision": "bf16"})
    state = create_run(job, 3)
    seen: dict[str, torch.dtype] = {}
    for name, module in {
        "trunk": next(m for m in state.net.trunk.modules() if isinstance(m, nn.Conv2d)),
        "projection": state.net.projection,
        "first": state.net.flow.layers[0].conditioner[0],
        "second": state.objective.determinant.second_flow.layers[0].conditioner[0],
        "loss": state.objective.loss,
    }.items():
        module.register_forward_hook(
            lambda _, i, output, name=name: seen.update({name: output.dtype})
        )
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    wide = dict.fromkeys(("projection", "first", "second", "loss"), torch.float32)
    with autocast(job.runtime, state.device):
        state.objective(state.net, state.net.features(images), torch.arange(4) % 3)
        assert seen == {"trunk": torch.bfloat16, **wide}
        assert state.net(images).dtype == torch.float32


@pytest.mark.parametrize(("has_amx", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_trains_in_bf16_if_it_has_amx(
    has_amx: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = {"avx512_bf16": True, "amx_bf16": has_amx}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    factors = torch.ones(2, 2)
    with autocast(Runtime(), torch.device("cpu")):
        assert (factors @ factors).dtype == expected


def test_figures_are_those_of_float32_whatever_the_steps_compute_in(products: Path) -> None:
    job = small_job(products)
    images, net = load_split(job.data).test, create_run(job, 3).net
    precisions = ({"precision": name} for name in ("fp32", "bf16", "auto"))
    wide, *others = (embed(net, images, changed(job, runtime=one)) for one in precisions)
    assert wide.dtype == np.float32
    assert all(np.array_equal(found, wide) for found in others)


def test_the_trunk_rests_while_it_warms_up(products: Path, tmp_path: Path) -> None:
    job = small_job(products, epochs=1, warmup_epochs=1, weight_decay=0)
    run(job, tmp_path)
    trained = weights(tmp_path)
    torch.manual_seed(job.seed)
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
        run.objective.loss.proxies.data[0] = torch.inf
    else:
        run.net.projection.weight.register_hook(lambda gradient: gradient * torch.nan)
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    parts = train_step(run, run.begin_epoch(trunk_frozen=False), images, torch.arange(6) % 3, 10)
    assert not parts[part].isfinite()
    assert all(torch.equal(before[n], p) for n, p in run.net.named_parameters())


def test_numbers_are_read_off_a_gpu_some_steps_later_and_none_is_lost(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kinlens.training.trainer.READ_EVERY_STEPS", {"cpu": 2})
    seen = Silent()
    run(finished.job, tmp_path, listener=seen)
    assert epochs_of(tmp_path)[-1]["loss"] == epochs_of(finished.folder)[-1]["loss"]
    assert len(seen.steps) == 6
    assert same_weights(tmp_path, finished.folder)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no run"):
        load_checkpoint(tmp_path)
    (tmp_path / FILE).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        load_checkpoint(tmp_path)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_text(tmp_path / FILE, "old")
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(TrainingError, match=r"No space left.*Free disk space"):
        replace_text(tmp_path / FILE, "new")
    assert (tmp_path / FILE).read_text() == "old"
    assert [*tmp_path.iterdir()] == [tmp_path / FILE]


def test_cuda_asked_for_and_absent_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(TrainingError, match="torch sees no GPU"):
        choose_device(Runtime(device="cuda"))


def test_a_run_folder_holds_log_curves_result_and_report(finished: Finished) -> None:
    folder, result = finished.folder, finished.result
    assert [row["epoch"] for row in epochs_of(folder)] == [1, 2]
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
    # The verdict names the folder, and the run was copied.
    assert again.result == replace(copied.result, verdict=again.result.verdict)
    other = finish(parse_job(copied.job.as_dict() | {"recall_at": [1, 3]}), copied.folder)
    assert other.result.figures["R@1"] == copied.result.figures["R@1"]
    assert "R@3" in other.result.figures
    assert not again.seen.steps + other.seen.steps


def test_a_folder_is_held_by_one_living_process(products: Path, tmp_path: Path) -> None:
    hold = "import sys; from pathlib import Path; from kinlens.training.folder import exclusive\n"
    hold += "with exclusive(Path(sys.argv[1])): print(flush=True); input()"
    words = [sys.executable, "-c", hold, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(JobError, match="Another training is running in"):
            finish(small_job(products), tmp_path)
        other.kill()
    assert not (tmp_path / FILE).exists()


def test_the_best_validated_epoch_is_tested_also_after_a_stop_before_it_was_validated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"validation_fraction": 0.5, "choose_by": "validation", "evaluate_test": "end"}
    job = small_job(tmp_path / "products", epochs=3, lr_trunk=1e-2)
    job = changed(job, data={"products": 10}, protocol=settings)
    folder = tmp_path / "run"

    def stopped(*_: object, **__: object) -> dict[str, float]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kinlens.training.trainer.evaluate", stopped)
        with pytest.raises(KeyboardInterrupt):
            finish(job, folder)
    done = finish(job, folder)
    rows = done.seen.rows
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert not any("R@1" in row for row in rows), "test classes were looked at while training"
    scores = [row["validation R@1"] for row in rows]
    assert done.result.best_epoch == load_chosen(folder).epoch == 1 + scores.index(max(scores))
    assert done.result.validation["R@1"] == max(scores)
    assert done.result.figures["R@1"] >= 0
    assert "the best R@1 on validation classes" in (folder / "report.md").read_text()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant"}, {0: 1, 6: 1, 12: 1}),
        ({"schedule": "linear"}, {0: 1, 6: 0.5, 12: 0}),
        ({"schedule": "cosine"}, {0: 1, 6: 0.5, 12: 0}),
        ({"schedule": "linear", "decay_start": 0.5}, {6: 1, 9: 0.5}),
        ({"schedule": "step", "step_epochs": 2, "gamma": 0.5}, {3: 1, 4: 0.5, 7: 0.5, 8: 0.25}),
        (
            {"schedule": "step", "step_epochs": (1, 4), "gamma": 0.5},
            {1: 1, 2: 0.5, 7: 0.5, 8: 0.25},
        ),
    ],
)
def test_schedules_start_at_1_and_fall_as_named(
    settings: dict[str, Any], expected: dict[int, float]
) -> None:
    found = {step: rate(Optimizer(epochs=6, **settings), step, 2) for step in expected}
    assert found == pytest.approx(expected)


def test_the_time_left_is_that_of_the_current_training(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter(range(0, 600, 60))
    with epoch_bar() as bar:
        listener = ConsoleListener(bar, lambda: next(seconds))
        for epoch in (0, 1, 0, 1):  # a fold, then the whole run; each clock call is a minute later
            listener.epoch_started(epoch, 5, 10)
            listener.epoch_done({"epoch": epoch + 1, "loss": 1, "seconds": 60, "images_per_s": 1})
    lines = [line for line in capsys.readouterr().err.splitlines() if "left" in line]
    assert [line.rpartition("about ")[2] for line in lines] == ["4 min left", "3 min left"] * 2
