"""What every loss has in common, also on batches without pairs, negatives or samples."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embedder.errors import TrainingError
from tests.training.losses.cases import (
    CLASSES,
    DIM,
    LOSSES,
    ORDERLESS,
    PROXY_LOSSES,
    batch,
    make,
    value,
)

BY_CLASS = [name for name in LOSSES if hasattr(make(name), "proxies")] + ["margin_per_class"]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_a_finite_scalar(name: str) -> None:
    result = value(make(name), *batch())
    assert result.shape == ()
    assert torch.isfinite(result)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_reaches_every_parameter_and_the_samples(name: str) -> None:
    loss, (embeddings, labels) = make(name), batch()
    embeddings.requires_grad_()
    loss(embeddings, labels).backward()
    for parameter in loss.parameters():
        assert parameter.grad.isfinite().all()
        reached = parameter.grad.reshape(len(parameter), -1).norm(dim=1) > 0
        # A beta per class moves only with pairs of the class, and two classes have none.
        assert reached.sum() == (CLASSES - 2 if name == "margin_per_class" else len(parameter))
    assert embeddings.grad.isfinite().all()
    assert embeddings.grad.norm() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_value(name: str) -> None:
    loss, (embeddings, labels) = make(name).double(), batch()
    embeddings = embeddings.double().requires_grad_()

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        result = loss(x, labels)
        assert isinstance(result, Tensor)
        return result

    assert torch.autograd.gradcheck(seeded, (embeddings,))


@pytest.mark.parametrize("name", ORDERLESS)
def test_a_loss_is_invariant_to_the_order_of_the_batch(name: str) -> None:
    loss, (embeddings, labels) = make(name), batch()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(
        value(loss, embeddings[order], labels[order]), value(loss, embeddings, labels)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_computes_in_float32_whatever_the_autocast(name: str, dtype: torch.dtype) -> None:
    loss, (embeddings, labels) = make(name), batch()
    given = embeddings.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = value(loss, given, labels)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, value(loss, given.float(), labels), rtol=0, atol=0)
    assert {p.dtype for p in loss.parameters()} <= {torch.float32}


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_changes_a_loss_only_a_little(name: str) -> None:
    loss, (embeddings, labels) = make(name), batch()
    half = value(loss, embeddings.bfloat16(), labels)
    torch.testing.assert_close(half, value(loss, embeddings, labels), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_float64_stays_float64_and_agrees_with_float32(name: str) -> None:
    loss, (embeddings, labels) = make(name), batch()
    wide = value(loss, embeddings.double(), labels)
    assert wide.dtype == torch.float64
    assert {p.dtype for p in loss.parameters()} <= {torch.float32}
    torch.testing.assert_close(wide.float(), value(loss, embeddings, labels), rtol=1e-4, atol=1e-5)
    wider = value(loss.double(), embeddings, labels)
    assert wider.dtype == (torch.float64 if list(loss.parameters()) else torch.float32)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_says_whether_it_wants_unit_vectors(name: str) -> None:
    assert make(name).normalized is (name not in ("n_pair", "n_pair_one_per_class"))


@pytest.mark.parametrize("name", LOSSES)
def test_mismatched_shapes_are_refused(name: str) -> None:
    embeddings, labels = batch()
    with pytest.raises(ValueError, match=r"\(14, 6\) and \(1,\)"):
        make(name)(embeddings, labels[:1])


@pytest.mark.parametrize("name", BY_CLASS)
@pytest.mark.parametrize("label", [-1, CLASSES])
def test_a_label_that_is_no_class_is_refused(name: str, label: int) -> None:
    embeddings, labels = batch()
    labels[3] = label
    with pytest.raises(TrainingError, match=rf"label {label} is not in 0\.\.4.*from 0"):
        make(name)(embeddings, labels)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_restored_by_its_state(name: str) -> None:
    loss = make(name)
    torch.manual_seed(8)
    other: nn.Module = LOSSES[name]()
    other.load_state_dict(loss.state_dict())
    embeddings, labels = batch(dim=DIM)
    torch.testing.assert_close(
        value(other, embeddings, labels), value(loss, embeddings, labels), rtol=0, atol=0
    )


# One pair per class ignores all but six of these samples.
@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"n_pair_one_per_class"}))
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
        loss(F.normalize(points, dim=1) if loss.normalized else points, labels).backward()
        optimizer.step()
    assert before < 12
    assert right() >= 18  # of 24; a loss with proxies may be content before all are


PAIR_LOSSES = [name for name in LOSSES if name not in PROXY_LOSSES]


def step(loss: nn.Module, count: int, labels: list[int], seed: int = 0) -> Tensor:
    """Forward and backward; every gradient must be finite."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = F.normalize(torch.randn(count, DIM, generator=generator), dim=1).requires_grad_()
    torch.manual_seed(0)
    result: Tensor = loss(embeddings, torch.tensor(labels, dtype=torch.int64))
    result.backward()
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
    assert embeddings.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in loss.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_a_single_class_is_finite(name: str) -> None:
    kind = type(make(name))
    assert CLASSES > 1
    assert torch.isfinite(step(kind(1, DIM), 3, [0, 0, 0]))
