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


def test_a_job_that_names_no_loss_has_proxy_anchor() -> None:
    job = parse_job({"name": "x", "data": {"kind": "folder", "root": "."}})
    assert job.loss == settings(name="proxy_anchor")
    assert job.as_dict()["loss"] == {"name": "proxy_anchor", "alpha": 32.0, "margin": 0.1}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "nothing"}, "loss: .*'nothing'.*'contrastive'.*'loss2'"),
        ({"name": "arcface", "scale": 0}, "loss.arcface.scale: .*greater than 0"),
        ({"name": "arcface", "margin_degrees": 90}, "margin_degrees: .*less than 90"),
        ({"name": "contrastive", "margin": 1.5}, "less than or equal to 1"),
        ({"name": "triplet", "mining": "easy"}, "'all', 'semi_hard', 'hard' or 'distance_weigh"),
        ({"name": "soft_triple", "centres_per_class": 0}, "greater than or equal to 1"),
        ({"name": "proxy_nca", "scales": 0.1}, "scales: unknown key; did you mean 'scale'"),
        ({"name": "n_pair", "l2": -1}, "loss.n_pair.l2: .*greater than or equal to 0"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        settings(**wrong)
