import pytest
import torch
from torch import Tensor

from training.flows.coupling import AffineCoupling
from training.flows.real_nvp import RealNVP


def trained_like(flow: torch.nn.Module, scale: float = 0.3) -> torch.nn.Module:
    """Give every weight a random value, so that no layer is the identity."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return flow.double()


def rows(count: int, dim: int) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("dim", [2, 5, 8])
def test_the_inverse_undoes_the_flow(dim: int) -> None:
    flow = trained_like(RealNVP(dim, layers=6, hidden=16))
    z = rows(7, dim)
    torch.testing.assert_close(flow.inverse(flow(z).y), z, atol=1e-5, rtol=0)
    torch.testing.assert_close(flow(flow.inverse(z)).y, z, atol=1e-5, rtol=0)


@pytest.mark.parametrize("transform_first", [False, True])
def test_the_scales_of_a_layer_are_the_diagonal_of_its_jacobian(transform_first: bool) -> None:
    layer = trained_like(AffineCoupling(5, 8, clamp=2.0, transform_first=transform_first))
    z = rows(4, 5)
    _, log_scale = layer(z)
    for row, logs in zip(z, log_scale, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda x: layer(x[None])[0][0], row)
        torch.testing.assert_close(jacobian.diagonal().log(), logs)


def test_log_det_is_that_of_the_jacobian() -> None:
    flow = trained_like(RealNVP(6, layers=5, hidden=16))
    z = rows(4, 6)
    for row, log_det in zip(z, flow(z).log_det, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda x: flow(x[None]).y[0], row)
        torch.testing.assert_close(torch.linalg.slogdet(jacobian).logabsdet, log_det)


def test_a_new_flow_is_the_identity() -> None:
    z = rows(3, 6).float()
    output = RealNVP(6, layers=12)(z)
    assert torch.equal(output.y, z)
    assert output.log_scales.shape == (12, 3, 6)
    assert not output.log_scales.any()


def test_two_layers_transform_every_dimension() -> None:
    flow = trained_like(RealNVP(5, layers=2, hidden=8))
    assert (flow(rows(3, 5)).log_scales.abs().sum(dim=(0, 1)) > 0).all()


def test_scales_stay_inside_the_clamp() -> None:
    flow = trained_like(RealNVP(4, layers=3, hidden=8, clamp=0.5), scale=20.0)
    assert flow(rows(9, 4)).log_scales.abs().max() <= 0.5


def test_a_batch_equals_its_rows() -> None:
    flow = trained_like(RealNVP(6, layers=4, hidden=8))
    z = rows(5, 6)
    singles = torch.cat([flow(row[None]).y for row in z])
    torch.testing.assert_close(flow(z).y, singles)


@pytest.mark.parametrize(("dim", "clamp"), [(1, 2.0), (4, 0.0)])
def test_impossible_shapes_are_refused(dim: int, clamp: float) -> None:
    with pytest.raises(ValueError, match=r"at least 2|larger than 0"):
        AffineCoupling(dim, 4, clamp, transform_first=False)
