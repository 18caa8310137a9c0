import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import training.trainer as trainer
from embedder.errors import CheckpointError, DatasetError, TrainingError
from tests.training.jobs import Silent, calibrated_weights, small_job
from training.checkpoint import FILE, load_checkpoint
from training.config.job import Job, parse_job
from training.config.optimizer import Runtime
from training.data.load import load_split
from training.data.records import Split
from training.report import write_report
from training.schedule import rate
from training.trainer import create_run, fit, parameter_groups


class Stopping(Silent):
    """Presses Ctrl-C at a given step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.last = step

    def step_done(self, parts: dict[str, float]) -> None:
        super().step_done(parts)
        if len(self.steps) == self.last:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data") / "products"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated_weights(tmp_path_factory.mktemp("weights") / "calibrated.pth")


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


def test_training_lowers_the_loss(products: Path, calibrated: Path, tmp_path: Path) -> None:
    job = small_job(products, weights=calibrated, epochs=8, lr_trunk=3e-4, lr_head=3e-3)
    _, history = run(job, tmp_path)
    assert history[-1]["loss"] < 0.9 * history[0]["loss"]
    assert set(history[-1]) >= {"epoch", "seconds", "images_per_s", "R@1", "R@2", "lipschitz_max"}


@pytest.mark.parametrize("stop_after_steps", [6, 8])  # between two epochs, and inside one
def test_four_epochs_equal_two_and_a_resumed_two_bit_for_bit(
    products: Path, tmp_path: Path, stop_after_steps: int
) -> None:
    job = small_job(products, epochs=4)  # 3 steps an epoch
    _, whole_history = run(job, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path / "parts", listener=Stopping(stop_after_steps + 1))
    assert load_checkpoint(tmp_path / "parts").epoch == 2
    _, history = run(job, tmp_path / "parts", resume=True)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert [row["R@1"] for row in history] == [row["R@1"] for row in whole_history]
    epochs = [line["epoch"] for line in log_of(tmp_path / "parts") if line["kind"] == "epoch"]
    assert epochs == [1, 2, 3, 4]


def log_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_resuming_with_other_settings_is_refused_and_changes_nothing(
    products: Path, tmp_path: Path
) -> None:
    job = small_job(products)
    run(job, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = changed(job, optimizer={"lr_trunk": 0.5}, runtime={"workers": 1})
    with pytest.raises(CheckpointError, match=r"optimizer.lr_trunk = 0.001, now 0.5\. Resume with"):
        run(other, tmp_path, resume=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork of a threaded process
@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_one_line_and_costs_no_finished_epoch(
    tmp_path: Path, workers: int
) -> None:
    job = changed(small_job(tmp_path / "products"), runtime={"workers": workers})
    split = load_split(job.data)
    damaged = tmp_path / "products" / split.test.paths[0]
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-200])
    with pytest.raises(DatasetError, match=f"^{re.escape(str(damaged))}: .*truncated") as error:
        fit(job, split, tmp_path, Silent())
    assert "\n" not in str(error.value)
    assert load_checkpoint(tmp_path).epoch == 1


def test_the_same_seed_gives_the_same_weights_and_another_does_not(
    products: Path, tmp_path: Path
) -> None:
    job = small_job(products, epochs=1)
    run(job, tmp_path / "a")
    run(job, tmp_path / "b")
    run(job.model_copy(update={"seed": 1}), tmp_path / "c")
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)


def test_a_step_moves_trunk_head_proxies_and_both_flows(products: Path) -> None:
    job = small_job(products)
    split = load_split(job.data)
    state = create_run(job, split.train.classes)
    assert [group["name"] for group in state.optimizer.param_groups] == [
        "trunk", "head", "proxies", "flows",
    ]  # fmt: skip
    rates = job.optimizer
    assert [group["lr"] for group in state.optimizer.param_groups] == [
        rates.lr_trunk, rates.lr_head, rates.lr_proxies, rates.lr_flows,
    ]  # fmt: skip
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    terms = state.objective(state.net, images, torch.arange(6) % split.train.classes)
    terms.total.backward()
    groups = {g["name"]: g["params"] for g in state.optimizer.param_groups}
    assert all(
        any(p.grad is not None and p.grad.abs().sum() > 0 for p in parameters)
        for parameters in groups.values()
    )
    assert terms.parts.keys() == {"loss", "determinant", "r_first", "r_second"}


def test_a_parameter_that_no_group_holds_is_an_error(products: Path) -> None:
    job = small_job(products)
    state = create_run(job, 3)
    state.objective.forgotten = nn.Parameter(torch.zeros(1))
    with pytest.raises(TrainingError, match="forgotten is in no optimizer group"):
        parameter_groups(job, state.net, state.objective)


def test_separate_proxies_are_a_second_set(products: Path) -> None:
    job = small_job(products)
    content = job.as_dict()
    content["regularizers"]["determinant"]["proxies"] = "separate"
    objective = create_run(Job.model_validate(content), 3).objective
    assert objective.second_loss is not None
    names = dict(objective.named_parameters())
    assert "loss.proxies" in names
    assert "second_loss.proxies" in names


def test_criteria_and_flows_run_in_float32_under_bf16(products: Path) -> None:
    job = changed(small_job(products), runtime={"precision": "bf16"})
    state = create_run(job, 3)
    seen: dict[str, torch.dtype] = {}

    def remember(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            seen[name] = output.dtype

        return hook

    watched = {
        "trunk": state.net.trunk[0][0][0],
        "projection": state.net.projection,
        "first": state.net.flow.layers[0].conditioner[0],
        "second": state.objective.determinant.second_flow.layers[0].conditioner[0],
        "loss": state.objective.loss,
    }
    for name, module in watched.items():
        module.register_forward_hook(remember(name))
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    wide = dict.fromkeys(("projection", "first", "second", "loss"), torch.float32)
    with trainer.autocast(job.runtime, state.device):
        state.objective(state.net, images, torch.arange(4) % 3)
        assert seen == {"trunk": torch.bfloat16, **wide}
        seen.clear()
        assert state.net(images).dtype == torch.float32
        assert seen["first"] == torch.float32


def test_the_trunk_rests_while_it_warms_up(products: Path, tmp_path: Path) -> None:
    job = small_job(products, epochs=1, warmup_epochs=1, weight_decay=0)
    start = create_run(job, 3)
    torch.manual_seed(0)
    run(job, tmp_path)
    trained = weights(tmp_path)
    trunk = {n: p for n, p in start.net.named_parameters() if n.startswith("trunk")}
    trainer.seed_everything(job.seed)
    fresh = dict(create_run(job, 3).net.named_parameters())
    assert all(torch.equal(fresh[name], trained[name]) for name in trunk)
    assert not torch.equal(fresh["projection.weight"], trained["projection.weight"])


def test_a_loss_that_is_not_finite_stops_the_run(products: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"loss is (nan|inf) at step"):
        run(small_job(products, epochs=3, lr_trunk=1e30, lr_head=1e30), tmp_path)


def test_resuming_on_other_images_is_refused(products: Path, tmp_path: Path) -> None:
    job = small_job(products)
    run(job, tmp_path)
    other = job.model_copy(update={"data": job.data.model_copy(update={"split_seed": 5})})
    with pytest.raises(DatasetError, match="trained on another split of the images"):
        run(other, tmp_path, resume=True)


@pytest.mark.parametrize("content", [b"", b"damaged"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or no checkpoint"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="No checkpoint at"):
        load_checkpoint(tmp_path / "nowhere")


def test_cuda_asked_for_and_absent_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(TrainingError, match="torch sees no GPU"):
        trainer.choose_device(Runtime(device="cuda"))


def test_a_run_folder_holds_log_curves_and_report(products: Path, tmp_path: Path) -> None:
    job = small_job(products, epochs=2)
    job = job.model_copy(update={"runtime": job.runtime.model_copy(update={"tensorboard": True})})
    split, history = run(job, tmp_path)
    lines = log_of(tmp_path)
    assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == [1, 2]
    assert list((tmp_path / "tensorboard").iterdir())
    page = write_report(tmp_path, job, split, history).read_text()
    assert "| 2 |" in page
    assert "determinant" in page
    assert "local Lipschitz constant" in page
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("schedule", "middle"), [("constant", 1.0), ("linear", 0.5), ("cosine", 0.5)]
)
def test_schedules_start_at_1_and_fall_as_named(schedule: str, middle: float) -> None:
    assert rate(schedule, 0, 10) == 1.0
    assert rate(schedule, 5, 10) == pytest.approx(middle)
    assert rate(schedule, 6, 12, decay_start=0.5) == 1.0
    assert rate(schedule, 9, 12, decay_start=0.5) == pytest.approx(middle)
    assert rate(schedule, 10, 10) == pytest.approx(1.0 if schedule == "constant" else 0.0)
