import math

import pytest
import torch

from tests.training.losses.cases import batch, doubled, value
from training.losses.binomial_deviance import BinomialDevianceLoss


def test_it_is_the_formula_of_the_paper() -> None:
    loss, embeddings, labels = doubled(BinomialDevianceLoss())
    x, y = embeddings.numpy(), labels.tolist()
    total = 0.0
    for i in range(len(y)):
        for j in range(len(y)):
            if i == j:
                continue
            s = 1 if y[i] == y[j] else 0
            eta = 1 if s == 1 else 25
            total += math.log(1 + math.exp(-(2 * s - 1) * 2 * (float(x[i] @ x[j]) - 0.5) * eta))
    assert value(loss, embeddings, labels).item() == pytest.approx(total / len(y), rel=1e-9)


def test_at_beta_a_pair_costs_log_two() -> None:
    embeddings = torch.tensor([[1.0, 0.0], [0.5, math.sqrt(0.75)]])
    for labels in ([0, 0], [0, 1]):
        result = value(BinomialDevianceLoss(beta=0.5), embeddings, torch.tensor(labels))
        assert result.item() == pytest.approx(math.log(2), abs=1e-5)


def test_large_costs_do_not_overflow() -> None:
    embeddings, labels = batch()
    assert torch.isfinite(value(BinomialDevianceLoss(negative_cost=1e4), embeddings, labels))
