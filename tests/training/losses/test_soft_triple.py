import math

import pytest
import torch
from pytorch_metric_learning.losses import SoftTripleLoss as Reference
from pytorch_metric_learning.regularizers import SparseCentersRegularizer
from torch.nn import functional as F

from tests.training.losses.cases import CLASSES, DIM, batch, doubled, value
from training.losses.soft_triple import SoftTripleLoss


def loss_of(centres_per_class: int = 3, tau: float = 0.2) -> SoftTripleLoss:
    torch.manual_seed(1)
    return SoftTripleLoss(CLASSES, DIM, centres_per_class, tau=tau)


@pytest.mark.parametrize("count", [1, 3])
def test_it_is_the_formula_of_the_paper(count: int) -> None:
    loss, embeddings, labels = doubled(loss_of(count))
    w = F.normalize(loss.proxies.detach(), dim=1).numpy().reshape(CLASSES, count, DIM)
    total = 0.0
    for x, y in zip(embeddings.numpy(), labels.tolist(), strict=True):
        logits = []
        for c in range(CLASSES):
            weights = [math.exp(10 * float(x @ w[c, k])) for k in range(count)]
            s = sum(weights[k] * float(x @ w[c, k]) for k in range(count)) / sum(weights)
            logits.append(20 * (s - (0.1 if c == y else 0.0)))
        total += -math.log(math.exp(logits[y]) / sum(math.exp(z) for z in logits))
    spread = 0.0
    for c in range(CLASSES):
        for k in range(count):
            for other in range(k + 1, count):
                spread += math.sqrt(2 + 1e-5 - 2 * float(w[c, k] @ w[c, other]))
    spread /= max(CLASSES * count * (count - 1), 1)
    expected = total / len(labels) + 0.2 * spread
    assert value(loss, embeddings, labels).item() == pytest.approx(expected, rel=1e-9)


def test_it_equals_pytorch_metric_learning_with_its_regularizer() -> None:
    # Without weight_regularizer the reference has no term that joins centres; its 1e-5 is smaller.
    loss, (embeddings, labels) = loss_of(), batch()
    reference = Reference(
        CLASSES,
        DIM,
        centers_per_class=3,
        la=20,
        gamma=0.1,
        margin=0.1,
        weight_regularizer=SparseCentersRegularizer(CLASSES, 3),
        weight_reg_weight=0.2,
    )
    reference.fc.data = loss.proxies.data.T.clone()
    ours = value(loss, embeddings, labels)
    torch.testing.assert_close(ours, reference(embeddings, labels).detach(), rtol=1e-5, atol=1e-5)


def test_one_sharp_centre_is_chosen() -> None:
    torch.manual_seed(1)
    loss, (embeddings, labels) = SoftTripleLoss(CLASSES, DIM, 3, gamma=1e4, tau=0.0), batch()
    best = loss.cosines(embeddings).view(-1, CLASSES, 3).amax(dim=2)
    logits = 20 * (best - 0.1 * F.one_hot(labels, CLASSES))
    torch.testing.assert_close(value(loss, embeddings, labels), F.cross_entropy(logits, labels))


def test_the_regularizer_draws_the_centres_of_a_class_together() -> None:
    loss, (embeddings, labels) = loss_of(tau=100.0), batch()

    def spread() -> float:
        own = loss.centres().detach().view(CLASSES, 3, DIM)
        return float(torch.cdist(own, own).mean())

    before = spread()
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        loss(embeddings, labels).backward()
        optimizer.step()
    assert spread() < before
