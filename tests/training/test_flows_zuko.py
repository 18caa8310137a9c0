"""Our couplings against those of zuko, an independent flow library, with our weights."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from zuko.transforms import (
    AdditiveTransform,
    AffineTransform,
    ComposedTransform,
    CouplingTransform,
    DependentTransform,
    PermutationTransform,
    Transform,
)

from tests.training.flow_cases import rows, trained_like
from training.flows import NICE, GlowBlock, RealNVP

DIMS = pytest.mark.parametrize("dim", [5, 8])


def coupling(dim: int, first_is_given: bool, elementwise: Callable[[Tensor], Transform]) -> object:
    """zuko's mask is true where a dimension is passed through; the first half has D // 2."""
    is_first = torch.arange(dim) < dim // 2
    meta = lambda given: DependentTransform(elementwise(given), 1)
    return CouplingTransform(meta, is_first if first_is_given else ~is_first)


def affine(raw_and_shift: Tensor, clamp: Callable[[Tensor], Tensor]) -> Transform:
    raw, shift = raw_and_shift.tensor_split(2, dim=-1)
    return AffineTransform(shift, clamp(raw).exp())


def real_nvp(flow: RealNVP) -> Transform:
    clamp = lambda raw: 2.0 * torch.tanh(raw / 2.0)
    return ComposedTransform(
        *(
            coupling(flow.dim, number % 2 == 0, lambda x, f=layer.conditioner: affine(f(x), clamp))
            for number, layer in enumerate(flow.layers)
        )
    )


def nice(flow: NICE) -> Transform:
    couplings = [
        coupling(flow.dim, number % 2 == 0, lambda x, f=layer.conditioner: AdditiveTransform(f(x)))
        for number, layer in enumerate(flow.layers)
    ]
    factors = (2.0 * torch.tanh(flow.scaling.raw / 2.0)).exp()
    scaling = AffineTransform(torch.zeros_like(factors), factors)
    return ComposedTransform(*couplings, DependentTransform(scaling, 1))


def glow_block(block: GlowBlock, dim: int, condition: Tensor) -> Transform:
    clamp = lambda raw: 2.0 * 0.636 * torch.atan(raw)

    def step(network: nn.Module, first_is_given: bool) -> object:
        return coupling(
            dim,
            first_is_given,
            lambda x: affine(network(torch.hstack([x, condition])), clamp),
        )

    return ComposedTransform(
        PermutationTransform(block.order),
        step(block.first.conditioner, first_is_given=False),
        step(block.second.conditioner, first_is_given=True),
    )


def assert_equal(y: Tensor, log_det: Tensor, back: Tensor, oracle: Transform, x: Tensor) -> None:
    """Compare y, log |det| and the inverse of a point that the flow did not give."""
    expected, ladj = oracle.call_and_ladj(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(log_det, ladj)
    torch.testing.assert_close(back, oracle.inv(x))
    assert (y - x).abs().max() > 0.01
    assert log_det.abs().max() > 0.01


@DIMS
def test_real_nvp_is_zukos(dim: int) -> None:
    flow, x = trained_like(RealNVP(dim, layers=5, hidden=8)), rows(4, dim)
    output = flow(x)
    assert_equal(output.y, output.log_det, flow.inverse(x), real_nvp(flow), x)


@DIMS
def test_nice_is_zukos(dim: int) -> None:
    flow, x = trained_like(NICE(dim, layers=5, hidden=8)), rows(4, dim)
    output = flow(x)
    assert_equal(output.y, output.log_det, flow.inverse(x), nice(flow), x)


@DIMS
def test_a_block_of_glow_is_zukos(dim: int) -> None:
    block = trained_like(GlowBlock(dim, 3, layers=4, hidden=8, clamp=2.0, seed=2))
    x, condition = rows(4, dim), rows(4, 3)
    y, log_scales = block(x, condition)
    back = block.inverse(x, condition)
    oracle = glow_block(block, dim, condition)
    assert_equal(y, log_scales.sum(dim=(0, 2)), back, oracle, x)
