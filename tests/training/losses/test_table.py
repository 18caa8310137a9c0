"""From the `loss` table of a job to the loss."""

from typing import Any

import pytest
import torch

from kinlens.embedder.errors import JobError
from kinlens.training.config.job import Loss, parse_job
from kinlens.training.losses.base import ProxyLoss
from kinlens.training.losses.table import LOSSES, WITH_PROXIES, build_loss
from tests.training.losses.cases import CLASSES, DIM, batch, value


def settings(**loss: Any) -> Loss:
    return parse_job({"name": "x", "data": {"kind": "folder", "root": "."}, "loss": loss}).loss


@pytest.mark.parametrize("name", LOSSES)
def test_the_name_in_a_job_gives_its_loss_with_its_own_defaults(name: str) -> None:
    found = settings(name=name)
    loss = build_loss(found, CLASSES, DIM)
    assert found.name == name
    assert isinstance(loss, LOSSES[name])
    assert torch.isfinite(value(loss, *batch()))
    assert isinstance(loss, ProxyLoss) is (name in WITH_PROXIES)
    assert settings(**found.model_dump()) == found


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "nothing"}, "loss: .*'nothing'.*'contrastive'.*'loss2'"),
        ({"name": "arcface", "margin_degrees": 90}, "loss.arcface.margin_degrees: .*less than 90"),
        ({"name": "triplet", "mining": "easy"}, "'all', 'semi_hard', 'hard' or 'distance_weigh"),
        ({"name": "proxy_nca", "scales": 0.1}, "scales: unknown key; did you mean 'scale'"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        settings(**wrong)
