import json
from pathlib import Path

import pytest
import torch
from torch import nn

import training.trainer as trainer
from embedder.errors import CheckpointError, TrainingError
from tests.training.jobs import Silent, small_job
from training.checkpoint import FILE, load_checkpoint
from training.config import Job, Runtime
from training.data.load import load_split
from training.data.records import Split
from training.report import write_report
from training.schedule import rate
from training.trainer import create_run, fit, parameter_groups


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data") / "products"


def run(job: Job, folder: Path, resume: bool = False) -> tuple[Split, list[dict[str, float]]]:
    folder.mkdir(exist_ok=True)
    split = load_split(job.data)
    return split, fit(job, split, folder, Silent(), resume)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = load_checkpoint(folder)
    return {**checkpoint.net, **{f"objective.{k}": v for k, v in checkpoint.objective.items()}}


def test_training_lowers_the_loss_and_raises_recall_on_its_classes(
    products: Path, tmp_path: Path
) -> None:
    _, history = run(small_job(products, epochs=8), tmp_path)
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]
    assert set(history[-1]) >= {"epoch", "loss", "seconds", "images_per_s", "R@1", "R@2"}


def test_four_epochs_equal_two_and_a_resumed_two_bit_for_bit(
    products: Path, tmp_path: Path
) -> None:
    job = small_job(products, epochs=4)
    run(job, tmp_path / "whole")
    stopped = job.model_copy(
        update={"optimizer": job.optimizer.model_copy(update={"max_steps": 4})}
    )
    run(stopped, tmp_path / "parts")  # 3 steps an epoch: stops inside the second
    assert load_checkpoint(tmp_path / "parts").epoch == 2
    (tmp_path / "parts" / FILE).unlink()
    half = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"max_steps": 6})})
    run(half, tmp_path / "parts")
    run(job, tmp_path / "parts", resume=True)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


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


def test_criteria_run_in_float32_under_bf16(products: Path, tmp_path: Path) -> None:
    job = small_job(products, epochs=1)
    job = job.model_copy(update={"runtime": job.runtime.model_copy(update={"precision": "bf16"})})
    run(job, tmp_path)
    assert all(v.dtype in (torch.float32, torch.int64) for v in weights(tmp_path).values())


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
    with pytest.raises(CheckpointError, match="trained on other images"):
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
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == [1, 2]
    assert list((tmp_path / "tensorboard").iterdir())
    page = write_report(tmp_path, job, split, history).read_text()
    assert "| 2 |" in page
    assert "determinant" in page
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
