"""The mean of a loss over the whole embeddings and their first numbers."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kinlens.embedder.errors import JobError
from kinlens.training import matryoshka
from kinlens.training.losses.base import MetricLoss
from kinlens.training.state import create_run
from tests.training.jobs import step_job
from tests.training.losses.cases import CASES, DIM, PROXY_CASES, batch, make


def seeded(loss: MetricLoss, x: Tensor, labels: Tensor, *dims: int) -> Tensor:
    torch.manual_seed(3)
    return matryoshka(loss, x, labels, dims)


@pytest.mark.parametrize("name", CASES)
def test_at_the_whole_length_alone_it_is_the_loss(name: str) -> None:
    loss, (x, labels) = make(name), batch()
    torch.manual_seed(3)
    plain = loss(x if not loss.normalized else F.normalize(x, dim=1), labels)
    assert seeded(loss, x, labels) == seeded(loss, x, labels, DIM) == plain


@pytest.mark.parametrize("name", PROXY_CASES)
def test_it_is_the_mean_over_losses_with_cut_proxies_and_reaches_these(name: str) -> None:
    loss, (x, labels) = make(name), batch()
    values = []
    for n in (2, 4, DIM):
        small = copy.deepcopy(loss)
        small.proxies = nn.Parameter(loss.proxies[:, :n].detach())
        torch.manual_seed(3)
        values.append(small(F.normalize(x[:, :n], dim=1), labels))
    found = seeded(loss, x, labels, 4, 2)
    torch.testing.assert_close(found, torch.stack(values).mean())
    found.backward()
    assert (loss.proxies.grad.abs().sum(0) > 0).all()


def test_a_loss_of_any_length_is_given_the_first_numbers_as_they_are() -> None:
    x, labels = 3 * batch()[0], batch()[1]

    class Length(MetricLoss):
        normalized = False

        def value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
            return embeddings.square().sum()

    expected = (x[:, :2].square().sum() + x.square().sum()) / 2
    torch.testing.assert_close(matryoshka(Length(), x, labels, [2]), expected)


def test_a_job_cuts_at_most_the_whole_embedding() -> None:
    def total(*dims: int) -> Tensor:
        torch.manual_seed(0)
        run = create_run(step_job({}, loss={"name": "proxy_anchor", "matryoshka": dims}), 4)
        x = torch.randn(8, run.net.dim)
        return run.objective(run.net, x, torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])).total

    assert total() == total(16) != total(8)
    with pytest.raises(JobError, match=r"loss.matryoshka = \[4, 17\] .* above model.dim = 16\."):
        total(4, 17)
