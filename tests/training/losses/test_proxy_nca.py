import math

import pytest
import torch
from pytorch_metric_learning.losses import ProxyNCALoss as Reference
from torch.nn import functional as F

from tests.training.losses.cases import CLASSES, DIM, doubled, value
from training.losses.proxy_nca import ProxyNCALoss


def loss_of(scale: float = 1.0) -> ProxyNCALoss:
    torch.manual_seed(1)
    return ProxyNCALoss(CLASSES, DIM, scale)


@pytest.mark.parametrize("scale", [0.5, 1.0, 9.0])
def test_it_is_the_formula_of_the_paper_without_the_own_proxy_below(scale: float) -> None:
    loss, embeddings, labels = doubled(loss_of(scale))
    proxies = F.normalize(loss.proxies.detach(), dim=1).numpy()
    total = 0.0
    for x, y in zip(embeddings.numpy(), labels.tolist(), strict=True):
        similar = [math.exp(-scale * float(((x - p) ** 2).sum())) for p in proxies]
        total += -math.log(similar[y] / (sum(similar) - similar[y]))
    assert value(loss, embeddings, labels).item() == pytest.approx(total / len(labels), rel=1e-9)


def test_pytorch_metric_learning_has_the_own_proxy_below_which_is_softplus_of_ours() -> None:
    loss, embeddings, labels = doubled(loss_of())
    reference = Reference(CLASSES, DIM)
    reference.proxies.data = loss.proxies.data.clone()
    for i in range(len(labels)):
        row, label = embeddings[i : i + 1], labels[i : i + 1]
        torch.testing.assert_close(
            F.softplus(value(loss, row, label)), reference(row, label).detach()
        )


def test_a_sample_whose_probability_underflows_still_counts() -> None:
    # Two samples on a wrong proxy at scale 64: the probability e^-256 is 0 in float32.
    loss = ProxyNCALoss(2, 4, scale=64.0)
    with torch.no_grad():
        loss.proxies.copy_(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]))
    embeddings = torch.tensor([[-1.0, 0, 0, 0], [1.0, 0, 0, 0]]).requires_grad_()
    result = loss(embeddings, torch.tensor([0, 1]))
    assert result.item() == pytest.approx(256.0)
    result.backward()
    assert embeddings.grad is not None
    assert (embeddings.grad.norm(dim=1) > 0).all()
