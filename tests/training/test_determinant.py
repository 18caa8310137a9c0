import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.training.config.settings import Determinant, Flow
from kinlens.training.models.flows import NICE, RealNVP, build_flow
from kinlens.training.regularizers.determinant import (
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


def augmented(z: Tensor, labels: Tensor, **settings: object) -> Tensor:
    """The points that `augment` adds, without those that are none."""
    points, real = augment(z, labels, Determinant(**settings))
    return points[real]


KINDS = pytest.mark.parametrize("kind", ["real_nvp", "nice"])


def duel(
    kind: str = "real_nvp", **settings: object
) -> tuple[DeterminantRegularizer, RealNVP | NICE]:
    torch.manual_seed(0)
    shape = Flow(kind=kind, layers=4, hidden=8)
    regularizer = DeterminantRegularizer(Determinant(flow=shape, **settings), DIM)
    first = build_flow(shape, DIM)
    with torch.no_grad():
        for flow in (first, regularizer.second_flow):
            for parameter in flow.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return regularizer, first


@KINDS
@pytest.mark.parametrize("depth", ["composed", "mean"])
def test_r_of_an_untrained_flow_is_log_2(kind: str, depth: str) -> None:
    z, labels = features()
    shape = Flow(kind=kind, layers=4, hidden=8)
    regularizer = DeterminantRegularizer(Determinant(flow=shape, depth=depth), DIM)
    output = regularizer(z, labels, build_flow(shape, DIM))
    assert float(output.r_first) == pytest.approx(math.log(2))
    assert float(output.r_second) == pytest.approx(math.log(2))
    assert float(output.penalty.detach()) == pytest.approx(0.0, abs=1e-7)


@KINDS
@pytest.mark.parametrize("depth", ["composed", "mean", "sum"])
def test_the_penalty_presses_one_flow_down_and_the_other_up(kind: str, depth: str) -> None:
    regularizer, first = duel(kind, lambda1=0.3, lambda2=0.7, depth=depth)
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
                if kind == "real_nvp" or parameter is flow.scaling.raw:
                    parameter -= 0.05 * parameter.grad
    after = regularizer(z, labels, first)
    assert float(after.r_first) < before[0]
    assert float(after.r_second) > before[1]


def test_the_penalty_presses_the_last_layer_of_nice_and_nothing_else() -> None:
    regularizer, first = duel("nice")
    z, labels = features()
    z.requires_grad_()
    regularizer(z, labels, first).penalty.backward()
    for flow, sign in ((first, 1), (regularizer.second_flow, -1)):
        assert (sign * flow.scaling.raw.grad > 0).all()
        assert all(parameter.grad is None for parameter in flow.layers.parameters())
    assert z.grad is None


@KINDS
def test_the_gradient_reaches_both_flows_and_the_features(kind: str) -> None:
    regularizer, first = duel(kind)
    z, labels = features()
    z.requires_grad_()
    output = regularizer(z, labels, first)
    (output.penalty + output.first.sum() + output.second.sum()).backward()
    for parameter in (*first.parameters(), *regularizer.parameters()):
        assert parameter.grad.abs().sum() > 0
    assert (z.grad.norm(dim=1) > 0).all()


@KINDS
def test_the_composed_diagonal_is_the_jacobian_of_independent_dimensions(kind: str) -> None:
    _, flow = duel(kind)
    with torch.no_grad():
        for layer in flow.layers:
            layer.conditioner[-1].weight.zero_()  # scales and shifts are then biases
    z, _ = features(1)
    jacobian = torch.autograd.functional.jacobian(lambda v: flow(v[None]).y[0], z[0])
    torch.testing.assert_close(flow(z).log_diagonal[0].exp(), jacobian.diagonal())
    torch.testing.assert_close(jacobian, torch.diag(jacobian.diagonal()))


def test_the_composed_diagonal_has_the_gradient_of_12_layers_where_their_mean_has_one() -> None:
    z, labels = features()
    gradients = {}
    for depth in ("composed", "mean", "sum"):
        torch.manual_seed(0)
        shape = Flow(layers=12, hidden=8)
        regularizer = DeterminantRegularizer(Determinant(flow=shape, depth=depth), DIM)
        flow = build_flow(shape, DIM)  # the identity
        regularizer(z, labels, flow).penalty.backward()
        gradients[depth] = [parameter.grad for parameter in flow.parameters()]
    for composed, mean, total in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(composed, 12 * mean)
        torch.testing.assert_close(composed, total)
    assert any(gradient.abs().sum() > 0 for gradient in gradients["composed"])


def test_augmented_points_lie_between_a_sample_and_its_nearest_neighbour() -> None:
    z = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 0.0]])
    labels = torch.tensor([0, 1, 0])
    points = augmented(z, labels)
    torch.testing.assert_close(points, torch.tensor([[0.4, 0.0], [0.6, 0.0], [3.4, 0.0]]))
    beyond = augmented(z, labels, direction="beyond")
    torch.testing.assert_close(beyond[0], torch.tensor([-0.4, 0.0]))


def test_tangent_steps_are_orthogonal_to_the_sample_and_end_in_its_tangent_hyperplane() -> None:
    z, labels = features()
    z = z.double()
    between = augmented(z, labels)
    tangent = augmented(z, labels, direction="tangent")
    step, chord = tangent - z, between - z
    torch.testing.assert_close((step * z).sum(1), torch.zeros(len(z)).double())
    assert (step.norm(dim=1) > 0).all()
    radial = (chord * z).sum(1, keepdim=True) * z / z.square().sum(1, keepdim=True)
    torch.testing.assert_close(step, chord - radial)
    assert (tangent.norm(dim=1) >= 5).all()
    assert (between.norm(dim=1) < 5).all()


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"direction": "between"}, 6),
        ({"direction": "beyond"}, 6),
        ({"direction": "tangent"}, 6),
        ({"same_class": True}, 2),  # the sample alone in its class adds nothing
    ],
)
def test_r_is_taken_at_samples_and_added_points(settings: dict[str, object], count: int) -> None:
    settings = {"neighbours": 2, **settings}
    z, labels = features(3)[0], torch.tensor([0, 1, 0])
    regularizer, first = duel(**settings)
    added = augmented(z, labels, **settings)
    assert len(added) == count
    expected = log_scale_penalty(first(torch.cat([z, added])).log_diagonal[None]).mean()
    torch.testing.assert_close(regularizer(z, labels, first).r_first, expected.detach())


@KINDS
def test_the_lipschitz_diagnostic_is_the_largest_singular_value(kind: str) -> None:
    _, flow = duel(kind)
    z, _ = features(3)
    measured = local_lipschitz(flow, z)
    for row, value in zip(z, measured, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda v: flow(v[None]).y[0], row)
        torch.testing.assert_close(torch.linalg.svdvals(jacobian)[0], value)
