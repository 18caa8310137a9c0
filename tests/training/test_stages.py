"""Frozen first stages of a trunk, and rates that fall toward the image."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kinlens.embedder.errors import JobError
from kinlens.training.checkpoint import load_checkpoint
from kinlens.training.config.job import Job, parse_job
from kinlens.training.data.load import load_split
from kinlens.training.models.backbones import build_trunk, stages_of
from kinlens.training.state import create_run, parameter_groups
from kinlens.training.trainer import fit
from tests.training.jobs import Silent, Stopping, calibrated_weights, small_job, step_job

RESNET = "timm:test_resnet"


def sizes(name: str) -> list[int]:
    stages = stages_of(name, build_trunk(name, "none"))
    return [sum(parameter.numel() for parameter in stage) for stage in stages]


@pytest.mark.parametrize(
    ("name", "same"), [("mobilenet_v2", "mobilenetv2_100"), ("resnet50", "resnet50")]
)
def test_the_stages_of_torchvision_are_those_of_timm(name: str, same: str) -> None:
    assert sizes(name) == sizes(f"timm:{same}")


def test_every_parameter_is_in_one_stage_and_networks_without_stages_are_refused() -> None:
    trunk = build_trunk("timm:tf_efficientnet_lite2", "none")
    stages = stages_of("timm:tf_efficientnet_lite2", trunk)
    assert len(stages) == 8
    assert sorted(map(id, chain.from_iterable(stages))) == sorted(map(id, trunk.parameters()))
    with pytest.raises(JobError, match=r"bn_inception has no stages .* Use mobilenet_v2, resnet50"):
        stages_of("bn_inception", build_trunk("bn_inception", "none"))
    with pytest.raises(JobError, match=r"frozen_stages = 5, and timm:test_resnet has 5 stages"):
        create_run(step_job({}, model=model(frozen_stages=5)), 4)


def model(**settings: Any) -> dict[str, Any]:
    return {"backbone": RESNET, "weights": "none", "dim": 16, **settings}


@pytest.mark.parametrize("batch_norm", ["train", "folded"])
def test_frozen_stages_and_their_statistics_stay_and_the_others_learn(
    tmp_path: Path, batch_norm: str
) -> None:
    path = calibrated_weights(tmp_path / "weights.pth", lambda: build_trunk(RESNET, "none").network)
    job = changed(tmp_path, frozen_stages=2, batch_norm=batch_norm, weights=str(path))
    torch.manual_seed(job.seed)
    before = create_run(job, 3).net
    after = trained(job, tmp_path)
    frozen = {id(parameter) for stage in stages(before)[:2] for parameter in stage}
    names = {name for name, x in before.trunk.named_parameters() if id(x) in frozen}
    layers = {name.rpartition(".")[0] for name in names}
    same = {
        name
        for name, value in before.trunk.state_dict().items()
        if torch.equal(value, after[f"trunk.{name}"])
    }
    assert {x for x in before.trunk.state_dict() if x.rpartition(".")[0] in layers} <= same
    assert any("running_mean" in name for name in same) == (batch_norm == "train")
    shifts = [getattr(x, "bias", None) for x in before.trunk.modules() if isinstance(x, nn.Conv2d)]
    assert any(x is not None and x.any() for x in shifts) == (batch_norm == "folded")
    learns = {name for name, x in before.trunk.named_parameters() if x.requires_grad}
    assert learns
    assert not learns & (names | same)


def stages(net: Any) -> list[list[torch.nn.Parameter]]:
    return stages_of(net.backbone, net.trunk)


def changed(folder: Path, stage_decay: float = 1.0, **settings: Any) -> Job:
    content = small_job(folder / "products", regularized=False, epochs=4).as_dict()
    content["model"] |= {"backbone": RESNET, **settings}
    content["optimizer"] |= {"stage_decay": stage_decay, "average": 0.9, "warmup_epochs": 1}
    return parse_job(content)


def trained(job: Job, folder: Path, stop: int | None = None) -> dict[str, Tensor]:
    (folder / "run").mkdir(exist_ok=True)
    split = load_split(job.data)
    if stop is not None:
        with pytest.raises(KeyboardInterrupt):
            fit(job, split, folder / "run", Stopping(stop))
    fit(job, split, folder / "run", Silent(), resume=stop is not None)
    return load_checkpoint(folder / "run").net


def test_a_resumed_run_with_frozen_stages_and_rates_is_the_same_bit_for_bit(
    tmp_path: Path,
) -> None:
    job = changed(tmp_path, frozen_stages=1, stage_decay=0.5)
    whole = trained(job, tmp_path)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "products").symlink_to(tmp_path / "products")
    parts = trained(job, tmp_path / "again", stop=8)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_each_stage_learns_at_the_rate_of_the_next_one_times_the_factor() -> None:
    rates = {"lr_trunk": 1e-3, "lr_head": "x10", "stage_decay": 0.5}
    job = step_job({}, model=model(frozen_stages=2, batch_norm="train"), optimizer=rates)
    run = create_run(job, 4)
    groups = parameter_groups(job, run.net, run.objective)
    found = [group for group in groups if group["name"] == "trunk"]
    assert [group["lr"] for group in found] == [0.25e-3, 0.5e-3, 1e-3]
    for group, stage in zip(found, stages(run.net)[2:], strict=True):
        assert [id(x) for x in group["params"]] == [id(x) for x in stage]
    (head,) = (group["lr"] for group in groups if group["name"] == "head")
    assert head == pytest.approx(1e-2)
    plain = step_job({}, model=model(batch_norm="train"))
    run = create_run(plain, 4)
    assert [g["name"] for g in parameter_groups(plain, run.net, run.objective)].count("trunk") == 1
