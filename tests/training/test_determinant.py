import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.training.fields import Flow
from kinlens.training.regularizers.determinant import (
    DeterminantRegularizer,
    augment,
    local_lipschitz,
)
from kinlens.training.regularizers.flows import RealNVP, build_flow

DIM = 6


def features(count: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 5 * F.normalize(torch.randn(count, DIM, generator=generator), dim=1)


def augmented(z: Tensor, **settings: object) -> Tensor:
    return augment(z, **settings)


def duel(stir: float = 0.1, **settings: object) -> tuple[DeterminantRegularizer, RealNVP]:
    """The regularizer and flow 1, both moved off the identity by `stir`."""
    torch.manual_seed(0)
    shape = Flow(layers=4, hidden=8)
    regularizer = DeterminantRegularizer(DIM, flow=shape, **settings)
    first = build_flow(shape, DIM)
    with torch.no_grad():
        for parameter in (*first.parameters(), *regularizer.parameters()):
            parameter.add_(stir * torch.randn_like(parameter))
    return regularizer, first


@pytest.mark.parametrize("depth", ["composed", "mean"])
def test_r_of_an_untrained_flow_is_log_2(depth: str) -> None:
    regularizer, first = duel(stir=0, depth=depth)
    output = regularizer(features(), first)
    assert float(output.r_first) == float(output.r_second) == pytest.approx(math.log(2))
    assert float(output.penalty.detach()) == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("depth", ["composed", "mean"])
def test_the_penalty_presses_one_flow_down_and_the_other_up(depth: str) -> None:
    regularizer, first = duel(lambda1=0.3, lambda2=0.7, depth=depth)
    z = features()
    before = regularizer(z, first)
    expected = 0.3 * before.r_first - 0.7 * before.r_second
    torch.testing.assert_close(before.penalty.detach(), expected)
    before.penalty.backward()
    with torch.no_grad():
        for flow in (first, regularizer.second_flow):
            for parameter in flow.parameters():
                parameter -= 0.05 * parameter.grad
    after = regularizer(z, first)
    assert float(after.r_first) < float(before.r_first)
    assert float(after.r_second) > float(before.r_second)


def test_the_composed_diagonal_is_the_jacobian_of_independent_dimensions() -> None:
    _, flow = duel()
    with torch.no_grad():
        for layer in flow.layers:
            layer.conditioner[-1].weight.zero_()  # scales and shifts are then biases
    z = features(1)
    jacobian = torch.autograd.functional.jacobian(lambda v: flow(v[None]).y[0], z[0])
    torch.testing.assert_close(flow(z).log_diagonal[0].exp(), jacobian.diagonal())
    torch.testing.assert_close(jacobian, torch.diag(jacobian.diagonal()))


def test_augmented_points_lie_between_a_sample_and_its_nearest_neighbour() -> None:
    z = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 0.0]])
    points = augmented(z)
    torch.testing.assert_close(points, torch.tensor([[0.4, 0.0], [0.6, 0.0], [3.4, 0.0]]))
    beyond = augmented(z, direction="beyond")
    torch.testing.assert_close(beyond[0], torch.tensor([-0.4, 0.0]))


def test_tangent_steps_are_chords_without_their_radial_part() -> None:
    z = features()
    chord, step = (augmented(z, direction=name) - z for name in ("between", "tangent"))
    radial = (chord * z).sum(1, keepdim=True) * z / z.square().sum(1, keepdim=True)
    torch.testing.assert_close(step, chord - radial)
    assert (step.norm(dim=1) > 0).all()


def test_r_is_taken_at_samples_and_added_points() -> None:
    settings = {"neighbours": 2, "direction": "tangent"}
    z = features(3)
    regularizer, first = duel(**settings)
    added = augmented(z, **settings)
    assert len(added) == 6
    diagonal = first(torch.cat([z, added])).log_diagonal.detach().exp()
    torch.testing.assert_close(regularizer(z, first).r_first, (1 + diagonal).log().mean())


def test_the_lipschitz_diagnostic_is_the_largest_singular_value() -> None:
    _, flow = duel()
    z = features(3)
    measured = local_lipschitz(flow, z)
    for row, value in zip(z, measured, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda v: flow(v[None]).y[0], row)
        torch.testing.assert_close(torch.linalg.svdvals(jacobian)[0], value)
