import pytest
import torch

from tests.training.flow_cases import KINDS, flow_of, rows, trained_like, triangular_layers
from training.config.settings import Flow
from training.flows import NICE, AffineCoupling, RealNVP, build_flow

FLOWS = pytest.mark.parametrize("kind", KINDS)
IDENTITIES = pytest.mark.parametrize("kind", ["real_nvp", "nice"])


@FLOWS
@pytest.mark.parametrize("dim", [2, 5, 8])
def test_the_inverse_undoes_the_flow(kind: str, dim: int) -> None:
    flow = trained_like(flow_of(kind, dim, layers=6, hidden=16))
    z = rows(7, dim)
    torch.testing.assert_close(flow.inverse(flow(z).y), z, atol=1e-5, rtol=0)
    torch.testing.assert_close(flow(flow.inverse(z)).y, z, atol=1e-5, rtol=0)


@FLOWS
@pytest.mark.parametrize("dim", [31, 64])
def test_the_inverse_is_exact_to_1e_5_in_float32_too(kind: str, dim: int) -> None:
    torch.manual_seed(0)
    flow = flow_of(kind, dim, layers=12, hidden=32)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    z = torch.nn.functional.normalize(rows(7, dim).float())
    y = flow(z).y
    assert (y - z).abs().max() > 0.01
    torch.testing.assert_close(flow.inverse(y), z, atol=1e-5, rtol=0)


@FLOWS
@pytest.mark.parametrize("dim", [5, 6])
def test_the_scales_of_a_layer_are_the_diagonal_of_its_triangular_jacobian(
    kind: str, dim: int
) -> None:
    flow = trained_like(flow_of(kind, dim))
    z = rows(3, dim)
    log_scales = flow(z).log_scales
    layers = list(triangular_layers(flow, z))
    assert len(log_scales) == len(layers)
    for (layer, x), logs in zip(layers, log_scales, strict=True):
        for row, log in zip(x, logs, strict=True):
            jacobian = torch.autograd.functional.jacobian(lambda v, f=layer: f(v[None])[0][0], row)
            torch.testing.assert_close(jacobian.diagonal().log(), log)
            torch.testing.assert_close(torch.linalg.slogdet(jacobian).logabsdet, log.sum())


@FLOWS
@pytest.mark.parametrize("dim", [5, 6])
def test_log_det_is_that_of_the_jacobian(kind: str, dim: int) -> None:
    flow = trained_like(flow_of(kind, dim, layers=6, hidden=16))
    z = rows(4, dim)
    for row, log_det in zip(z, flow(z).log_det, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda x: flow(x[None]).y[0], row)
        torch.testing.assert_close(torch.linalg.slogdet(jacobian).logabsdet, log_det)
        assert log_det.abs() > 1e-3


@IDENTITIES
def test_a_new_flow_is_the_identity(kind: str) -> None:
    z = rows(3, 7).float()
    output = build_flow(Flow(kind=kind), 7)(z)
    assert torch.equal(output.y, z)
    assert output.log_scales.shape == (12 + (kind == "nice"), 3, 7)
    assert not output.log_scales.any()


@FLOWS
def test_two_couplings_move_every_dimension(kind: str) -> None:
    flow = trained_like(flow_of(kind, 5, layers=2))
    z = rows(3, 5)
    output = flow(z)
    assert (output.y != z).all()
    assert (output.log_scales.abs().sum(dim=(0, 1)) > 0).all()


@FLOWS
def test_the_gradient_reaches_every_parameter_and_the_input(kind: str) -> None:
    flow = trained_like(flow_of(kind, 5))
    z = rows(9, 5).requires_grad_()
    output = flow(z)
    (output.y.square().sum() - output.log_det.sum()).backward()
    for name, parameter in flow.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
    assert (z.grad != 0).all()


@FLOWS
def test_scales_stay_inside_the_clamp(kind: str) -> None:
    flow = trained_like(flow_of(kind, 4, clamp=0.5), scale=20.0)
    largest = flow(rows(9, 4)).log_scales.abs().max()
    assert 0.45 < largest <= 0.5


@FLOWS
def test_a_batch_equals_its_rows(kind: str) -> None:
    flow = trained_like(flow_of(kind, 6))
    z = rows(5, 6)
    singles = torch.cat([flow(row[None]).y for row in z])
    torch.testing.assert_close(flow(z).y, singles)


@FLOWS
def test_the_dtype_of_a_flow_is_kept(kind: str) -> None:
    flow = flow_of(kind, 6)
    assert flow(rows(2, 6).float()).log_scales.dtype == torch.float32
    output = flow.double()(rows(2, 6))
    assert (output.y.dtype, output.log_scales.dtype) == (torch.float64, torch.float64)


def test_additive_couplings_keep_volume_and_the_last_layer_alone_changes_it() -> None:
    flow = trained_like(NICE(6, layers=4, hidden=8))
    log_scales = flow(rows(3, 6)).log_scales
    assert not log_scales[:-1].any()
    assert (log_scales[-1] == log_scales[-1, 0]).all()
    assert log_scales[-1].all()


@pytest.mark.parametrize(("kind", "cls"), [("real_nvp", RealNVP), ("nice", NICE)])
def test_a_flow_is_built_by_its_name(kind: str, cls: type[torch.nn.Module]) -> None:
    flow = build_flow(Flow(kind=kind, layers=3, hidden=8, clamp=1.5), 6)
    torch.manual_seed(0)
    assert isinstance(flow, cls)
    expected = cls(6, layers=3, hidden=8, clamp=1.5).state_dict()
    found = flow.state_dict()
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in expected.items()}


@FLOWS
@pytest.mark.parametrize(("dim", "clamp"), [(1, 2.0), (4, 0.0), (4, float("nan"))])
def test_impossible_shapes_are_refused(kind: str, dim: int, clamp: float) -> None:
    with pytest.raises(ValueError, match=r"at least 2|larger than 0"):
        flow_of(kind, dim, clamp=clamp)


def test_a_coupling_of_the_first_half_leaves_the_second() -> None:
    layer = trained_like(AffineCoupling(5, 8, clamp=2.0, transform_first=True))
    x = rows(3, 5)
    y, log_scale = layer(x)
    assert torch.equal(y[:, 2:], x[:, 2:])
    assert (y[:, :2] != x[:, :2]).all()
    assert not log_scale[:, 2:].any()
