"""Batches without pairs, negatives or samples: no loss breaks on them."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.training.losses.cases import CLASSES, DIM, LOSSES, PROXY_LOSSES, make

PAIR_LOSSES = [name for name in LOSSES if name not in PROXY_LOSSES]


def step(loss: nn.Module, count: int, labels: list[int], seed: int = 0) -> Tensor:
    """Forward and backward; every gradient must be finite."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = F.normalize(torch.randn(count, DIM, generator=generator), dim=1).requires_grad_()
    torch.manual_seed(0)
    result: Tensor = loss(embeddings, torch.tensor(labels, dtype=torch.int64))
    result.backward()
    assert embeddings.grad is not None
    assert embeddings.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in loss.parameters())
    return result.detach()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "labels",
    [[], [2], [2, 2], [1, 3], [0, 1, 2, 3, 4], [3, 3, 3, 3], [0, 0, 1]],
    ids=["empty", "one", "one pair", "no pair", "all different", "one class", "single negative"],
)
def test_value_and_gradient_are_finite(name: str, labels: list[int]) -> None:
    assert torch.isfinite(step(make(name), len(labels), labels))


@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("labels", [[], [2]], ids=["empty", "one"])
def test_without_a_pair_a_loss_of_pairs_is_zero(name: str, labels: list[int]) -> None:
    loss = make(name)
    if hasattr(loss, "l2"):
        loss.l2 = 0.0
    assert step(loss, len(labels), labels) == 0


@pytest.mark.parametrize(
    "name", ["triplet", "triplet_all", "triplet_hard", "lifted_structure", "lifted_structure_all"]
)
@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [1, 1, 1]], ids=["no positive", "no negative"])
def test_a_loss_that_compares_both_kinds_needs_both(name: str, labels: list[int]) -> None:
    assert step(make(name), len(labels), labels) == 0


@pytest.mark.parametrize("name", ["proxy_anchor", "proxy_nca", "arcface"])
def test_an_empty_batch_costs_nothing_with_proxies(name: str) -> None:
    assert step(make(name), 0, []) == 0


def test_loss1_of_an_empty_batch_still_parts_the_proxies() -> None:
    loss = make("loss1")
    step(loss, 0, [])
    assert (loss.proxies.grad.norm(dim=1) > 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_equal_and_opposite_samples_have_a_finite_gradient(name: str) -> None:
    loss = make(name)
    rows = torch.eye(DIM)[[0, 0, 0, 0, 1]]
    embeddings = torch.cat([rows, -rows]).requires_grad_()
    with torch.no_grad():
        for parameter in loss.parameters():
            if parameter.ndim == 2:  # centres on top of the samples, equal ones among them
                parameter.copy_(torch.eye(DIM)[torch.arange(len(parameter)) % 2])
    torch.manual_seed(0)
    result = loss(embeddings, torch.tensor([0, 0, 1, 1, 2] * 2))
    result.backward()
    assert torch.isfinite(result)
    assert embeddings.grad is not None
    assert embeddings.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in loss.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_a_single_class_is_finite(name: str) -> None:
    kind = type(make(name))
    assert CLASSES > 1
    assert torch.isfinite(step(kind(1, DIM), 3, [0, 0, 0]))
