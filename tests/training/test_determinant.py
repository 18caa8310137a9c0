import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from training.flows.real_nvp import RealNVP
from training.regularizers.determinant import (
    DeterminantRegularizer,
    augment,
    local_lipschitz,
    log_scale_penalty,
)

DIM = 6


def features(count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z = 5 * F.normalize(torch.randn(count, DIM, generator=generator), dim=1)
    return z, torch.arange(count) % 3


def duel(**settings: object) -> tuple[DeterminantRegularizer, RealNVP]:
    torch.manual_seed(0)
    regularizer = DeterminantRegularizer(DIM, layers=4, hidden=8, **settings)
    first = RealNVP(DIM, layers=4, hidden=8)
    with torch.no_grad():
        for flow in (first, regularizer.second_flow):
            for parameter in flow.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return regularizer, first


def test_r_of_an_untrained_flow_is_log_2() -> None:
    z, labels = features()
    regularizer = DeterminantRegularizer(DIM, layers=4, hidden=8)
    output = regularizer(z, labels, RealNVP(DIM, layers=4, hidden=8))
    assert float(output.r_first) == pytest.approx(math.log(2))
    assert float(output.r_second) == pytest.approx(math.log(2))
    assert float(output.penalty.detach()) == pytest.approx(0.0, abs=1e-7)


def test_r_is_equation_7_on_the_jacobian_of_each_layer() -> None:
    _, flow = duel()
    z, _ = features(3)
    r = log_scale_penalty(flow(z).log_scales)  # (L, B)
    x = z
    for number, layer in enumerate(flow.layers):
        for b, row in enumerate(x):
            jacobian = torch.autograd.functional.jacobian(lambda v, f=layer: f(v[None])[0][0], row)
            expected = torch.log(jacobian.diagonal() + 1).mean()
            torch.testing.assert_close(r[number, b], expected)
        x, _ = layer(x)


def test_the_penalty_presses_one_flow_down_and_the_other_up() -> None:
    regularizer, first = duel(lambda1=0.3, lambda2=0.7)
    second = regularizer.second_flow
    z, labels = features()
    output = regularizer(z, labels, first)
    expected = 0.3 * output.r_first - 0.7 * output.r_second
    torch.testing.assert_close(output.penalty.detach(), expected)
    output.penalty.backward()
    before = (float(output.r_first), float(output.r_second))
    with torch.no_grad():
        for flow in (first, second):
            for parameter in flow.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * parameter.grad
    after = regularizer(z, labels, first)
    assert float(after.r_first) < before[0]
    assert float(after.r_second) > before[1]


def test_the_gradient_reaches_both_flows_and_the_features() -> None:
    regularizer, first = duel()
    z, labels = features()
    z.requires_grad_()
    output = regularizer(z, labels, first)
    (output.penalty + output.first.sum() + output.second.sum()).backward()
    for parameter in (*first.parameters(), *regularizer.parameters()):
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0
    assert z.grad is not None
    assert (z.grad.norm(dim=1) > 0).all()


def test_the_branches_are_unit_vectors_of_the_batch_alone() -> None:
    regularizer, first = duel(neighbours=3)
    z, labels = features()
    output = regularizer(z, labels, first)
    torch.testing.assert_close(output.first, F.normalize(first(z).y, dim=1))
    torch.testing.assert_close(output.second, F.normalize(regularizer.second_flow(z).y, dim=1))


def test_summing_over_layers_multiplies_by_their_number() -> None:
    z, labels = features()
    mean, first = duel()
    total, _ = duel(normalize_depth=False)
    torch.testing.assert_close(total(z, labels, first).r_first, 4 * mean(z, labels, first).r_first)


def test_augmented_points_lie_between_a_sample_and_its_nearest_neighbour() -> None:
    z = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 0.0]])
    labels = torch.tensor([0, 1, 0])
    points = augment(z, labels, eps=0.4, neighbours=1, same_class=False)
    torch.testing.assert_close(points, torch.tensor([[0.4, 0.0], [0.6, 0.0], [3.4, 0.0]]))
    beyond = augment(z, labels, eps=-0.4, neighbours=1, same_class=False)
    torch.testing.assert_close(beyond[0], torch.tensor([-0.4, 0.0]))


def test_neighbours_can_be_limited_to_the_same_class() -> None:
    z = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 0.0]])
    points = augment(z, torch.tensor([0, 1, 0]), eps=0.5, neighbours=2, same_class=True)
    torch.testing.assert_close(points, torch.tensor([[2.5, 0.0], [2.5, 0.0]]))


def test_a_single_sample_has_no_neighbour() -> None:
    assert len(augment(torch.ones(1, 2), torch.zeros(1), 0.4, 1, same_class=False)) == 0


def test_the_lipschitz_diagnostic_is_the_largest_singular_value() -> None:
    _, flow = duel()
    z, _ = features(3)
    measured = local_lipschitz(flow, z)
    for row, value in zip(z, measured, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda v: flow(v[None]).y[0], row)
        torch.testing.assert_close(torch.linalg.svdvals(jacobian)[0], value)


def test_pressing_r_down_contracts_volume() -> None:
    _, flow = duel()
    z, _ = features(16)
    before = flow(z).log_det.mean()
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        log_scale_penalty(flow(z).log_scales).mean().backward()
        optimizer.step()
    assert flow(z).log_det.mean() < before
