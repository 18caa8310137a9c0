"""What every loss has in common, also on batches without pairs, negatives or samples."""

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.embedder.errors import TrainingError
from kinlens.training.losses.base import MetricLoss, ProxyLoss
from tests.training.losses.cases import (
    CASES,
    CLASSES,
    DIM,
    DRAWING,
    PAIR_CASES,
    PROXY_CASES,
    batch,
    make,
    value,
)

LONG = bool(os.environ.get("KINLENS_LONG_TESTS"))
EVERY = pytest.mark.parametrize("name", CASES)
WITH_PROXIES = pytest.mark.parametrize("name", PROXY_CASES)


def proxy_loss(name: str, **options: object) -> ProxyLoss:
    loss = make(name, **options)
    assert isinstance(loss, ProxyLoss)
    return loss


@EVERY
def test_the_gradient_reaches_every_parameter_and_the_samples(name: str) -> None:
    loss, (embeddings, labels) = make(name), batch()
    embeddings.requires_grad_()
    loss(embeddings, labels).backward()
    for parameter in loss.parameters():
        assert parameter.grad.isfinite().all()
        reached = parameter.grad.reshape(len(parameter), -1).norm(dim=1) > 0
        # A beta per class moves only with pairs of the class, and two classes have none.
        assert reached.sum() == (CLASSES - 2 if name == "margin per_class" else len(parameter))
    assert embeddings.grad.isfinite().all()
    assert embeddings.grad.norm() > 0
    if name == "proxy_anchor":
        assert (embeddings.grad.norm(dim=1) > 0).all()


@EVERY
def test_the_gradient_is_that_of_the_value(name: str) -> None:
    loss, (embeddings, labels) = make(name).double(), batch()

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return loss(x, labels)

    given = embeddings.double().requires_grad_()
    # The short form compares both along a direction drawn at random, not entry by entry.
    assert torch.autograd.gradcheck(seeded, (given,), fast_mode=not LONG)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {*DRAWING, "n_pair one_per_class"}))
def test_a_loss_is_invariant_to_the_order_of_the_batch(name: str) -> None:
    loss, (embeddings, labels) = make(name), batch()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(
        value(loss, embeddings[order], labels[order]), value(loss, embeddings, labels)
    )


@pytest.mark.parametrize("name", DRAWING)
def test_the_seed_decides_which_negatives_are_drawn(name: str) -> None:
    loss, (embeddings, labels) = make(name), batch(30)
    assert value(loss, embeddings, labels, seed=3) == value(loss, embeddings, labels, seed=3)
    assert value(loss, embeddings, labels, seed=3) != value(loss, embeddings, labels, seed=4)


@EVERY
def test_a_loss_computes_in_float32_or_wider_whatever_the_autocast(name: str) -> None:
    loss, (embeddings, labels) = make(name), batch()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        given = embeddings.to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = value(loss, given, labels)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, value(loss, given.float(), labels), rtol=0, atol=0)
    wide = value(loss, embeddings.double(), labels)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), value(loss, embeddings, labels), rtol=1e-4, atol=1e-5)
    assert {p.dtype for p in loss.parameters()} <= {torch.float32}


@pytest.mark.parametrize("name", [*PROXY_CASES, "margin per_class"])
@pytest.mark.parametrize("label", [-1, CLASSES])
def test_a_label_that_is_no_class_is_refused(name: str, label: int) -> None:
    loss, (embeddings, labels) = make(name), batch()
    labels[3] = label
    with pytest.raises(TrainingError, match=rf"label {label} is not in 0\.\.4.*from 0"):
        loss(embeddings, labels)
    if isinstance(loss, ProxyLoss):
        with pytest.raises(TrainingError, match=r"not in 0\.\.4"):
            loss.centre_of(embeddings, labels)


@pytest.mark.parametrize("name", DRAWING)  # the others are compared with their formula
def test_descent_brings_samples_to_their_class(name: str) -> None:
    loss, (rows, labels) = make(name), batch(24)
    labels = labels.clamp(max=2)
    points = rows.clone().requires_grad_()

    def right() -> int:
        unit = F.normalize(points.detach(), dim=1)
        nearest = (unit @ unit.T).fill_diagonal_(-2).argmax(dim=1)
        return int((labels[nearest] == labels).sum())

    before = right()
    optimizer = torch.optim.Adam([points, *loss.parameters()], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        loss(F.normalize(points, dim=1), labels).backward()
        optimizer.step()
    assert before < 12
    assert right() >= 18  # of 24


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


@WITH_PROXIES
def test_a_single_class_is_finite(name: str) -> None:
    step(make(name, classes=1), [0, 0, 0])


@WITH_PROXIES
def test_centres_are_unit_rows_with_a_label_each(name: str) -> None:
    loss = proxy_loss(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        centres, labels = loss.centres(), loss.centre_labels()
    torch.testing.assert_close(centres.norm(dim=1), torch.ones(len(centres)))
    per_class = CASES[name].get("centres_per_class", 1)
    assert labels.tolist() == [label for label in range(CLASSES) for _ in range(per_class)]
    assert loss.class_centres().shape == (CLASSES, DIM)


@WITH_PROXIES
def test_the_centre_of_a_sample_is_the_nearest_of_its_class_with_gradient(name: str) -> None:
    loss, (embeddings, labels) = proxy_loss(name), batch()
    chosen = loss.centre_of(embeddings, labels)
    for x, y, centre in zip(embeddings, labels, chosen, strict=True):
        own = loss.centres()[loss.centre_labels() == y]
        torch.testing.assert_close(centre, own[(own @ x).argmax()])
    (chosen @ torch.arange(1.0, DIM + 1)).sum().backward()
    touched = loss.centre_labels()[loss.proxies.grad.norm(dim=1) > 0]
    assert touched.unique().tolist() == labels.unique().tolist()
