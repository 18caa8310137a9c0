"""The laws of every flow, and its equality with zuko, an independent library, with our weights."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnxruntime
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

from kinlens.training.config.settings import Flow
from kinlens.training.models.flows import NICE, Chain, ConditionalGlow, RealNVP, build_flow

FLOWS = pytest.mark.parametrize("kind", ["real_nvp", "nice", "glow"])
DIMS = pytest.mark.parametrize("dim", [5, 8])


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


def triangular_layers(
    flow: Chain, z: Tensor, *condition: Tensor
) -> Iterator[tuple[nn.Module, Tensor]]:
    """Each layer and its input, less the permutations between."""
    for part in flow.chain():
        z = z[:, part.order] if hasattr(part, "order") else z
        for layer in part.chain() if hasattr(part, "chain") else [part]:
            yield layer, z
            z = layer(z, *condition).y


@FLOWS
@pytest.mark.parametrize("dim", [5, 6])
def test_the_scales_of_a_layer_are_the_diagonal_of_its_jacobian(kind: str, dim: int) -> None:
    flow, (z, *condition) = trained_like(flow_of(kind, dim)), inputs(kind, 3, dim)
    log_scales = flow(z, *condition).log_scales
    layers = list(triangular_layers(flow, z, *condition))
    assert len(log_scales) == len(layers)
    for (layer, x), logs in zip(layers, log_scales, strict=True):
        for i, log in enumerate(logs):
            given = [c[i : i + 1] for c in condition]
            of_row = lambda v, f=layer, c=given: f(v[None], *c).y[0]
            jacobian = torch.autograd.functional.jacobian(of_row, x[i])
            torch.testing.assert_close(jacobian.diagonal().log(), log)
            torch.testing.assert_close(torch.linalg.slogdet(jacobian).logabsdet, log.sum())


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
    additive = isinstance(flow, NICE)
    for number, layer in enumerate(flow.layers):
        read = lambda x, f=layer.conditioner: (
            AdditiveTransform(f(x)) if additive else affine(f(x), by_tanh)
        )
        parts.append(coupling(dim, number % 2 == 0, read))
    if additive:
        factors = by_tanh(flow.scaling.raw).exp()
        scaling = AffineTransform(torch.zeros_like(factors), factors)
        parts.append(DependentTransform(scaling, 1))
    return ComposedTransform(*parts)


@FLOWS
@DIMS
def test_a_flow_is_zukos_whose_inverse_undoes_it(kind: str, dim: int) -> None:
    flow, (x, *condition) = trained_like(flow_of(kind, dim, layers=6)), inputs(kind, 4, dim)
    oracle, output = zukos(flow, dim, *condition), flow(x, *condition)
    expected, ladj = oracle.call_and_ladj(x)
    torch.testing.assert_close(output.y, expected)
    torch.testing.assert_close(output.log_det, ladj)
    torch.testing.assert_close(oracle.inv(output.y), x, atol=1e-5, rtol=0)
    assert (output.y - x).abs().min() > 0  # every dimension moves


@pytest.mark.parametrize(("kind", "cls"), [("real_nvp", RealNVP), ("nice", NICE)])
def test_a_new_flow_of_a_job_is_the_identity(kind: str, cls: type[Chain]) -> None:
    z, flow = rows(3, 7).float(), build_flow(Flow(kind=kind), 7)
    output = flow(z)
    assert isinstance(flow, cls)
    assert torch.equal(output.y, z)
    assert output.log_scales.shape == (12 + (kind == "nice"), 3, 7)
    assert not output.log_scales.any()


@FLOWS
def test_the_gradient_reaches_every_parameter_and_the_input(kind: str) -> None:
    flow, (z, *condition) = trained_like(flow_of(kind, 5)), inputs(kind, 9, 5)
    z.requires_grad_()
    output = flow(z, *condition)
    (output.y.square().sum() - output.log_det.sum()).backward()
    for name, parameter in flow.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
    assert (z.grad != 0).all()


@FLOWS
def test_scales_stay_inside_the_clamp(kind: str) -> None:
    flow = trained_like(flow_of(kind, 4, clamp=0.5), scale=20.0)
    largest = flow(*inputs(kind, 9, 4)).log_scales.abs().max()
    assert 0.45 < largest <= 0.5


def test_nice_runs_in_onnx_at_any_batch_size(tmp_path: Path) -> None:
    """As Real-NVP does in the bundles of test_export.py; GLOW is not exported."""
    flow = trained_like(flow_of("nice", 7)).float().eval()
    with torch.no_grad():
        torch.onnx.export(
            flow, (rows(2, 7).float(),), tmp_path / "flow.onnx", dynamo=True, external_data=False,
            opset_version=20, dynamic_shapes=({0: torch.export.Dim("n", min=1)},), verbose=False,
        )  # fmt: skip
    session = onnxruntime.InferenceSession(
        tmp_path / "flow.onnx", providers=["CPUExecutionProvider"]
    )
    (name,) = [node.name for node in session.get_inputs()]
    for count in (1, 3, 7):
        z = rows(count, 7).float()
        with torch.no_grad():
            expected = flow(z)
        for ours, theirs in zip(expected, session.run(None, {name: z.numpy()}), strict=True):
            torch.testing.assert_close(torch.from_numpy(theirs), ours, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("dim", "count"), [(128, 1_402_880), (512, 2_635_520)])
def test_the_size_of_glow_is_that_of_the_authors(dim: int, count: int) -> None:
    flow = ConditionalGlow(dim, dim)
    assert sum(parameter.numel() for parameter in flow.parameters()) == count
    assert sum(isinstance(module, nn.Linear) for module in flow.modules()) == 80


def test_glow_has_the_permutations_of_the_authors() -> None:
    np.random.seed(7)
    before = np.random.get_state()
    torch.manual_seed(0)
    flow = ConditionalGlow(16, 16, layers=2, hidden=4)
    after = torch.get_rng_state()
    for then, now in zip(before, np.random.get_state(), strict=True):
        assert np.array_equal(then, now)
    torch.manual_seed(0)
    for module in flow.modules():
        if isinstance(module, nn.Linear):
            fresh = nn.Linear(module.in_features, module.out_features)
            assert torch.equal(fresh.weight, module.weight)
    assert torch.equal(torch.get_rng_state(), after)
    for number in range(5):
        np.random.seed(number)
        stored = flow.state_dict()[f"blocks.{number}.order"].tolist()
        assert stored == np.random.permutation(16).tolist()


def test_the_condition_of_glow_acts_in_every_coupling() -> None:
    flow, (x, condition) = trained_like(flow_of("glow", 6)), inputs("glow", 4, 6)
    log_scales = flow(x, condition).log_scales  # (4, 4, 6)
    moved = flow(x, condition + 0.1).log_scales
    assert ((log_scales != moved) == (log_scales != 0)).all()
    assert ((log_scales != 0).sum(dim=2) == 3).all()
