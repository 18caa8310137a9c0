"""The two losses that the benchmark proposes."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.training.losses.cases import CLASSES, batch, doubled, make, value
from training.losses import proxy_separation
from training.losses.proxy_separation import push_apart


@pytest.mark.parametrize("name", ["loss1", "loss2", "loss2_mean"])
def test_it_is_the_formula_of_the_benchmark(name: str) -> None:
    loss, embeddings, labels = doubled(make(name))
    w = F.normalize(loss.proxies.detach(), dim=1).numpy()
    samples, y = embeddings.numpy(), labels.tolist()
    pull = push = 0.0
    for c in range(CLASSES):
        own = [x for x, label in zip(samples, y, strict=True) if label == c]
        pull += math.log(1 + sum(math.exp(-32 * (float(w[c] @ x) - 0.1)) for x in own))
        inner = 0.0
        for other in range(CLASSES):
            if other == c:
                continue
            alike = float(w[c] @ w[other])
            if name != "loss1":
                alike = sum(float(w[c] @ x) * float(x @ w[other]) for x in samples)
            if name == "loss2_mean":
                alike /= len(samples)
            inner += math.exp(32 * (alike + 0.1))
        push += math.log(1 + inner)
    expected = pull / len(set(y)) + push / CLASSES
    assert value(loss, embeddings, labels).item() == pytest.approx(expected, rel=1e-9)


def test_the_push_in_parts_equals_the_push_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = F.normalize(torch.randn(7, 4, dtype=torch.float64), dim=1).requires_grad_()
    whole = push_apart(rows, 32.0, 0.1)
    (gradient,) = torch.autograd.grad(whole, rows)
    monkeypatch.setattr(proxy_separation, "CHUNK", 3)
    parts = push_apart(rows, 32.0, 0.1)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts, rows)[0], gradient)


def test_descent_parts_the_proxies() -> None:
    loss: nn.Module = make("loss1")

    def closest() -> float:
        cosines = loss.centres() @ loss.centres().T
        return float(cosines.detach().fill_diagonal_(-1).max())

    embeddings, labels = batch()
    before = closest()
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        loss(embeddings[:0], labels[:0]).backward()
        optimizer.step()
    assert closest() < before


def test_sums_over_a_large_batch_do_not_overflow() -> None:
    loss = make("loss2")
    embeddings, labels = batch(1000)
    assert torch.isfinite(value(loss, embeddings, labels))
