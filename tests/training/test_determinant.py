import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kinlens.training.parts.fields import Flow
from kinlens.training.regularizers import determinant
from kinlens.training.regularizers.determinant import (
    DeterminantRegularizer,
    augment,
    local_lipschitz,
)
from kinlens.training.regularizers.flows import RealNVP, build_flow

DIM = 6
LABELS = torch.arange(8) // 2


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
    output = regularizer(features(), LABELS, first)
    assert float(output.r_first) == float(output.r_second) == pytest.approx(math.log(2))
    assert float(output.penalty.detach()) == pytest.approx(0.0, abs=1e-7)


PENALTIES = [{"penalty": name} for name in ("r", "log_det", "frobenius", "lipschitz")]


@pytest.mark.parametrize("settings", [{"depth": "mean"}, *PENALTIES], ids=str)
def test_the_penalty_presses_one_flow_down_and_the_other_up(settings: dict[str, str]) -> None:
    regularizer, first = duel(lambda1=0.3, lambda2=0.7, **settings)
    z = features()
    torch.manual_seed(1)
    before = regularizer(z, LABELS, first)
    expected = 0.3 * before.r_first - 0.7 * before.r_second
    torch.testing.assert_close(before.penalty.detach(), expected)
    before.penalty.backward()
    with torch.no_grad():
        for flow in (first, regularizer.second_flow):
            for parameter in flow.parameters():
                parameter -= 0.05 * parameter.grad
    torch.manual_seed(1)
    after = regularizer(z, LABELS, first)
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
    torch.testing.assert_close(
        regularizer(z, LABELS[:3], first).r_first, (1 + diagonal).log().mean()
    )


def jacobians(flow: RealNVP, z: Tensor, create_graph: bool = False) -> Tensor:
    """The Jacobian at each row: (B, D) to (B, D, D)."""
    whole = torch.autograd.functional.jacobian(lambda v: flow(v).y, z, create_graph)
    return whole[range(len(z)), :, range(len(z))]


def test_power_iteration_finds_the_largest_singular_value_and_its_gradient() -> None:
    flow, z = duel(stir=0.3)[1].double(), features(3).double()
    measured = local_lipschitz(flow, z, steps=500)
    exact = torch.linalg.svdvals(jacobians(flow, z, create_graph=True))[:, 0]
    torch.testing.assert_close(measured, exact)
    assert (local_lipschitz(flow, z, steps=3) <= exact).all()
    weights = [layer.conditioner[0].weight for layer in flow.layers[:3]]
    ours, theirs = (torch.autograd.grad(value.sum(), weights) for value in (measured, exact))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_other_penalties_are_those_of_the_exact_jacobian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinant, "_PENALTY_STEPS", 300)
    z = features(2)
    for name in ("log_det", "frobenius", "lipschitz"):
        regularizer, flow = duel(stir=0.3, penalty=name, eps=0.0)  # added points are the samples
        exact = jacobians(flow, z)
        lengths = z.norm(dim=1) / flow(z).y.norm(dim=1)
        expected = {
            "log_det": 2 * torch.linalg.slogdet(exact).logabsdet.mean() / DIM,
            "frobenius": exact.square().sum((1, 2)).mean() / DIM,
            "lipschitz": (torch.linalg.svdvals(exact)[:, 0] * lengths).log1p().mean(),
        }[name]
        draws = 400 if name == "frobenius" else 1
        values = [regularizer(z, LABELS[:2], flow).r_first for _ in range(draws)]
        torch.testing.assert_close(
            torch.stack(values).mean(), expected, rtol=0.1 if draws > 1 else 1e-3, atol=0
        )


def test_r_falls_while_the_lipschitz_constant_rises() -> None:
    """R ignores shifts: a flow that minimises R alone stretches some directions."""
    torch.manual_seed(0)
    regularizer = DeterminantRegularizer(32, lambda1=1.0, lambda2=0.0)
    flow, z, labels = build_flow(Flow(), 32), 5 * F.normalize(torch.randn(8, 32), dim=1), LABELS
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        output = regularizer(z, labels, flow)
        output.penalty.backward()
        optimizer.step()
    assert float(output.r_first) < 0.01
    assert float(local_lipschitz(flow, z).detach().max()) > 2


def test_a_constant_scale_lowers_r_but_moves_no_cosine_and_no_stretch() -> None:
    _, flow = duel(stir=0)
    for layer in flow.layers:
        nn.init.constant_(layer.conditioner[-1].bias[: DIM // 2], -1.0)  # of log-scales
    z = features()
    y = flow(z).y
    torch.testing.assert_close(F.normalize(y, dim=1), F.normalize(z, dim=1))
    values = {}
    for name in ("r", "lipschitz"):
        regularizer, _ = duel(penalty=name)
        values[name] = float(regularizer(z, LABELS, flow).r_first)
    assert values["r"] < 0.2
    assert values["lipschitz"] == pytest.approx(math.log(2), rel=1e-5)


def test_neighbours_of_the_same_class() -> None:
    z = features()
    points = augment(z, eps=1.0, labels=LABELS)
    torch.testing.assert_close(points, z[[1, 0, 3, 2, 5, 4, 7, 6]])
    alone = augment(z, neighbours=2, labels=LABELS).view(8, 2, DIM)[:, 1]
    torch.testing.assert_close(alone, z)  # no second other image of a class
