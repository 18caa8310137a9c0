"""What every loss has in common, also on batches without pairs, negatives or samples."""

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.embedder.errors import TrainingError
from kinlens.training.losses.base import MetricLoss, ProxyLoss
from tests.training.losses.cases import CASES, CLASSES, DIM, PAIR_CASES, PROXY_CASES, batch, make

LONG = bool(os.environ.get("KINLENS_LONG_TESTS"))
EVERY = pytest.mark.parametrize("name", CASES)


@EVERY
def test_the_gradient_is_that_of_the_value_and_reaches_every_parameter(name: str) -> None:
    loss, (embeddings, labels) = make(name).double(), batch()

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return loss(x, labels)

    given = embeddings.double().requires_grad_()
    # The short form compares both along a direction drawn at random, not entry by entry.
    assert torch.autograd.gradcheck(seeded, (given,), fast_mode=not LONG)
    seeded(given).backward()
    assert given.grad.norm() > 0
    for parameter in loss.parameters():
        assert parameter.grad.isfinite().all()
        assert (parameter.grad.reshape(len(parameter), -1).norm(dim=1) > 0).all()


@pytest.mark.parametrize("name", PROXY_CASES)
def test_a_label_that_is_no_class_is_refused(name: str) -> None:
    for label in (-1, CLASSES):
        embeddings, labels = batch()
        labels[3] = label
        with pytest.raises(TrainingError, match=rf"label {label} is not in 0\.\.4.*from 0"):
            make(name)(embeddings, labels)


def step(loss: MetricLoss, labels: list[int], embeddings: Tensor | None = None) -> float:
    """Forward and backward; the value and every gradient must be finite."""
    if embeddings is None:
        generator = torch.Generator().manual_seed(0)
        embeddings = F.normalize(torch.randn(len(labels), DIM, generator=generator), dim=1)
    embeddings.requires_grad_()
    torch.manual_seed(0)
    result = loss(embeddings, torch.tensor(labels, dtype=torch.int64))
    result.backward()
    assert result.isfinite()
    assert embeddings.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in loss.parameters())
    return result.item()


@EVERY
def test_value_and_gradient_are_finite_for_any_batch(name: str) -> None:
    for labels in ([], [2], [2, 2], [1, 3], [0, 1, 2, 3, 4], [3, 3, 3, 3], [0, 0, 1]):
        step(make(name), labels)
    if name in PROXY_CASES:
        step(make(name, classes=1), [0, 0, 0])


@EVERY
def test_equal_and_opposite_samples_have_a_finite_gradient(name: str) -> None:
    loss, rows = make(name), torch.eye(DIM)[[0, 0, 0, 0, 1]]
    with torch.no_grad():
        for parameter in loss.parameters():
            if parameter.ndim == 2:  # centres on top of the samples, equal ones among them
                parameter.copy_(torch.eye(DIM)[torch.arange(len(parameter)) % 2])
    step(loss, [0, 0, 1, 1, 2] * 2, torch.cat([rows, -rows]))


@pytest.mark.parametrize("name", [*PAIR_CASES, "proxy_anchor", "proxy_nca", "arcface"])
def test_a_batch_with_nothing_to_compare_costs_nothing(name: str) -> None:
    without_norms = {"l2": 0.0} if name.startswith("n_pair") else {}
    assert step(make(name, **without_norms), []) == 0
    if name in PAIR_CASES:
        assert step(make(name, **without_norms), [2]) == 0
    if name.startswith(("triplet", "lifted")):  # they compare both kinds
        assert step(make(name), [0, 1, 2, 3]) == 0
        assert step(make(name), [1, 1, 1]) == 0


@pytest.mark.parametrize("name", PROXY_CASES)
def test_the_centre_of_a_sample_is_the_nearest_of_its_class_with_gradient(name: str) -> None:
    loss, (embeddings, labels) = make(name), batch()
    assert isinstance(loss, ProxyLoss)
    centres, of_class = loss.centres(), loss.centre_labels()
    torch.testing.assert_close(centres.norm(dim=1), torch.ones(len(centres)))
    assert of_class.unique().tolist() == list(range(CLASSES))
    chosen = loss.centre_of(embeddings, labels)
    for x, y, centre in zip(embeddings, labels, chosen, strict=True):
        own = centres[of_class == y]
        torch.testing.assert_close(centre, own[(own @ x).argmax()])
    (chosen @ torch.arange(1.0, DIM + 1)).sum().backward()
    touched = of_class[loss.proxies.grad.norm(dim=1) > 0]
    assert touched.unique().tolist() == labels.unique().tolist()
