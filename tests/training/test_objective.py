from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.embedder.errors import JobError
from kinlens.training.state import Run, create_run, parameter_groups
from tests.training.jobs import step_job
from tests.training.ranks import NIR, REGULARIZERS

BATCH, CLASSES = 8, 4


def features(run: Run) -> tuple[Tensor, Tensor]:
    images = torch.randint(0, 256, (BATCH, 3, 32, 32), dtype=torch.uint8)
    return run.net.features(images), torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])


@pytest.mark.parametrize("name", REGULARIZERS)
def test_the_total_is_loss_and_weighted_penalties_and_reaches_every_group(
    weights: Path, name: str
) -> None:
    torch.manual_seed(0)
    run = create_run(step_job(REGULARIZERS[name], weights), CLASSES)
    terms = run.objective(run.net, *features(run))
    watched = {"r_first", "r_second", "feature_norm"}
    expected = sum(value for part, value in terms.parts.items() if part not in watched)
    torch.testing.assert_close(terms.total.detach(), torch.as_tensor(expected))
    wanted = run.job.regularizers.wanted().keys()
    assert terms.parts.keys() - watched == {"loss"} | wanted
    terms.total.backward()
    for group in run.optimizer.param_groups:
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in group["params"]), group


def test_the_authors_of_nir_weight_the_loss_beside_it(weights: Path) -> None:
    tables = {"non_isotropy": {**NIR, "loss_weight": 0.25, "weight": 2.0}}
    run = create_run(step_job(tables, weights), CLASSES)
    terms = run.objective(run.net, *features(run))
    expected = 0.25 * terms.parts["loss"] + terms.parts["non_isotropy"]
    torch.testing.assert_close(terms.total.detach(), expected)


def test_nir_is_fitted_first_and_then_regularizes(weights: Path) -> None:
    torch.manual_seed(0)
    tables, random = {"non_isotropy": {**NIR, "fit_epochs": 2}}, {"kind": "random"}
    loss = {"name": "soft_triple"}
    run = create_run(step_job(tables, weights, loss=loss, sampling=random), CLASSES)
    x, labels = features(run)

    def gradients(value: Tensor) -> list[Tensor]:
        kept = [x, run.objective.loss.proxies, *run.objective.non_isotropy.parameters()]
        return list(torch.autograd.grad(value, kept, retain_graph=True, materialize_grads=True))

    of_loss = gradients(run.objective.loss(F.normalize(x, dim=1), labels))
    for epoch in (0, 1):
        run.objective.begin_epoch(epoch)
        found = gradients(run.objective(run.net, x, labels).total)
        torch.testing.assert_close(found[:2], of_loss[:2])
        assert all(gradient.abs().sum() > 0 for gradient in found[2:])
    run.objective.begin_epoch(2)
    found = gradients(run.objective(run.net, x, labels).total)
    for with_nir, alone in zip(found[:2], of_loss[:2], strict=True):
        assert (with_nir - alone).norm() > 0.01 * alone.norm()


@pytest.mark.parametrize(
    ("sampling", "regularizers", "draws"),
    [
        ({"kind": "paired", "per_class": 2}, {"graph_consistency": {}}, 2),
        ({"kind": "paired", "per_class": 2, "draws": 1}, {"graph_consistency": {}}, 1),
        ({"kind": "random"}, {}, 1),
        ({"kind": "random", "draws": 2}, {}, 2),
    ],
)
def test_the_loss_is_the_mean_over_the_draws_of_the_sampling_whatever_regularizes(
    weights: Path, sampling: dict[str, Any], regularizers: dict[str, Any], draws: int
) -> None:
    run = create_run(step_job(regularizers, weights, sampling=sampling), CLASSES)
    x, labels = features(run)
    embeddings, loss = F.normalize(x, dim=1), run.objective.loss
    parts = zip(embeddings.chunk(draws), labels.chunk(draws), strict=True)
    expected = sum(loss(*part) for part in parts) / draws
    torch.testing.assert_close(run.objective(run.net, x, labels).parts["loss"], expected.detach())
    other = loss(embeddings, labels) if draws == 2 else loss(embeddings[:4], labels[:4])
    assert not torch.isclose(expected, other)


def test_flows_of_regularizers_and_proxies_have_their_own_rates(weights: Path) -> None:
    rates = {"lr_trunk": 1e-5, "lr_head": "x10", "lr_proxies": "x4000", "lr_flows": "x50"}
    decay = {"weight_decay": 4e-4, "weight_decay_criterion": 0.0}
    settings = step_job(REGULARIZERS["non_isotropy"], weights, optimizer=rates | decay)
    run = create_run(settings, CLASSES)
    groups = {g["name"]: g for g in parameter_groups(settings, run.net, run.objective)}
    assert {name: g["lr"] for name, g in groups.items()} == pytest.approx(
        {"trunk": 1e-5, "head": 1e-4, "proxies": 0.04, "flows": 5e-4}
    )
    assert {name: g["weight_decay"] for name, g in groups.items()} == {
        "trunk": 4e-4, "head": 4e-4, "proxies": 0.0, "flows": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tables", "loss", "message"),
    [
        ({"skewed_mean": {"gamma": 0}}, "proxy_anchor", "gamma must not be 0"),
        ({"skewed_mean": {"pairs": 0}}, "proxy_anchor", "pairs must not be 0"),
        ({"skewed_mean": {"gamma": -4, "hinge": True}}, "proxy_anchor", "above 0 with hinge"),
        ({"non_isotropy": {}}, "triplet", "non_isotropy acts on proxies"),
        ({"skewed_mean": {}}, "margin", 'without centres = "batch"'),
        ({"graph_consistency": {}}, "proxy_anchor", 'sampling.kind = "paired"'),
    ],
)
def test_regularizers_that_do_not_fit_the_job_are_refused(
    tables: dict[str, Any], loss: str, message: str
) -> None:
    with pytest.raises(JobError, match=message):
        step_job(tables, loss={"name": loss}, sampling={"kind": "random"})


def test_the_skewed_mean_of_the_batch_needs_no_proxies(weights: Path) -> None:
    tables = {"skewed_mean": {"centres": "batch"}}
    run = create_run(step_job(tables, weights, loss={"name": "triplet"}), CLASSES)
    assert run.objective(run.net, *features(run)).parts["skewed_mean"].abs() > 0
