"""The laws of every flow, and its equality with zuko, an independent library, with our weights."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from zuko.transforms import (
    AffineTransform,
    ComposedTransform,
    CouplingTransform,
    DependentTransform,
    PermutationTransform,
    Transform,
)

from kinlens.training.parts.fields import Flow
from kinlens.training.regularizers.flows import Chain, ConditionalGlow, build_flow

KINDS = ["real_nvp", "nice", "glow"]


def flow_of(kind: str, dim: int, layers: int = 4, hidden: int = 8, clamp: float = 2.0) -> Chain:
    """A small flow of `layers` couplings, an even number."""
    if kind == "glow":
        return ConditionalGlow(dim, 3, blocks=layers // 2, layers=3, hidden=hidden, clamp=clamp)
    return build_flow(Flow(kind=kind, layers=layers, hidden=hidden, clamp=clamp), dim)


def trained_like(flow: Chain, scale: float = 0.3) -> Chain:
    """Give every weight a random value, so that no layer is the identity."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return flow.double()


def rows(count: int, dim: int) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def inputs(kind: str, count: int, dim: int) -> tuple[Tensor, ...]:
    """Points and, for a flow that has one, a condition of each."""
    return (rows(count, dim), rows(count, 3)) if kind == "glow" else (rows(count, dim),)


def coupling(dim: int, first_is_given: bool, elementwise: Callable[[Tensor], Transform]) -> object:
    """zuko's mask is true where a dimension is passed through; the first half has D // 2."""
    is_first = torch.arange(dim) < dim // 2
    meta = lambda given: DependentTransform(elementwise(given), 1)
    return CouplingTransform(meta, is_first if first_is_given else ~is_first)


def affine(raw_and_shift: Tensor, clamp: Callable[[Tensor], Tensor]) -> Transform:
    raw, shift = raw_and_shift.tensor_split(2, dim=-1)
    return AffineTransform(shift, clamp(raw).exp())


def by_tanh(raw: Tensor) -> Tensor:
    return 2.0 * torch.tanh(raw / 2.0)


def zukos(flow: Chain, dim: int, *condition: Tensor) -> Transform:
    """The same map with our networks."""
    parts: list[object] = []
    if isinstance(flow, ConditionalGlow):
        by_atan = lambda raw: 2.0 * 0.636 * torch.atan(raw)
        for block in flow.blocks:
            parts.append(PermutationTransform(block.order))
            for half, first_is_given in ((block.first, False), (block.second, True)):
                read = lambda x, f=half.conditioner: affine(
                    f(torch.hstack([x, *condition])), by_atan
                )
                parts.append(coupling(dim, first_is_given, read))
        return ComposedTransform(*parts)
    for number, layer in enumerate(flow.layers):
        read = lambda x, f=layer.conditioner: affine(f(x), by_tanh)
        parts.append(coupling(dim, number % 2 == 0, read))
    return ComposedTransform(*parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [5, 8])
def test_inverse_undoes_the_flow_and_the_determinant_is_that_of_its_jacobian(
    kind: str, dim: int
) -> None:
    flow, (x, *condition) = trained_like(flow_of(kind, dim, layers=6)), inputs(kind, 4, dim)
    output = flow(x, *condition)
    torch.testing.assert_close(flow.inverse(output.y, *condition), x)
    torch.testing.assert_close(flow(flow.inverse(x, *condition), *condition).y, x)
    whole = torch.autograd.functional.jacobian(lambda v: flow(v, *condition).y, x)  # (4, D, 4, D)
    jacobians = whole[range(4), :, range(4)]
    torch.testing.assert_close(torch.linalg.slogdet(jacobians).logabsdet, output.log_det)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_what_the_flow_makes_a_normal_distribution_of(kind: str) -> None:
    flow, (_, *condition) = trained_like(flow_of(kind, 4)), inputs(kind, 2000, 4)
    torch.manual_seed(0)
    noise = flow(flow.sample(2000, *condition), *condition).y
    assert noise.mean(0).abs().max() < 0.1
    torch.testing.assert_close(noise.T.cov(), torch.eye(4, dtype=torch.double), atol=0.1, rtol=0)


def test_only_the_last_layer_of_nice_changes_a_volume() -> None:
    flow = trained_like(flow_of("nice", 6))
    scales = flow(rows(3, 6)).log_scales
    assert not scales[:-1].any()
    assert scales[-1].abs().min() > 0


@pytest.mark.parametrize("kind", ["real_nvp", "glow"])
@pytest.mark.parametrize("dim", [5, 8])
def test_value_and_gradient_are_those_of_zuko(kind: str, dim: int) -> None:
    flow, (x, *condition) = trained_like(flow_of(kind, dim, layers=6)), inputs(kind, 4, dim)
    oracle, output = zukos(flow, dim, *condition), flow(x.requires_grad_(), *condition)
    expected, ladj = oracle.call_and_ladj(x)
    torch.testing.assert_close(output.y, expected)
    torch.testing.assert_close(output.log_det, ladj)
    assert (output.y - x).abs().min() > 0  # every dimension moves
    wanted = [x, *flow.parameters()]
    ours = torch.autograd.grad(output.y.square().sum() - output.log_det.sum(), wanted)
    theirs = torch.autograd.grad(expected.square().sum() - ladj.sum(), wanted)
    torch.testing.assert_close(ours, theirs)
    assert all(gradient.any() for gradient in ours)


@pytest.mark.parametrize(("kind", "layers"), [("real_nvp", 12), ("nice", 13)])
def test_a_new_flow_of_a_job_is_the_identity(kind: str, layers: int) -> None:
    z, flow = rows(3, 7).float(), build_flow(Flow(kind=kind), 7)
    output = flow(z)
    assert torch.equal(output.y, z)
    assert output.log_scales.shape == (layers, 3, 7)
    assert not output.log_scales.any()
