import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.training.config.settings import NonIsotropy
from kinlens.training.regularizers.non_isotropy import (
    LARGEST_EXPONENT,
    NonIsotropyRegularizer,
    bounded_exp,
)

DIM = 6
EXPONENTIATE = pytest.mark.parametrize("exponentiate", [True, False])


def batch(count: int = 8, dim: int = DIM, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Unit embeddings and the unit centres of their classes, two samples each."""
    generator = torch.Generator().manual_seed(seed)
    unit = lambda *shape: F.normalize(torch.randn(shape, generator=generator), dim=-1)
    return unit(count, dim), unit(math.ceil(count / 2), dim).repeat_interleave(2, dim=0)[:count]


def regularizer(exponentiate: bool = True, dim: int = DIM) -> NonIsotropyRegularizer:
    torch.manual_seed(0)
    settings = NonIsotropy(exponentiate=exponentiate, blocks=2, hidden=16, layers=3)
    return NonIsotropyRegularizer(settings, dim)


def naive(nir: NonIsotropyRegularizer, embeddings: Tensor, centres: Tensor) -> list[float]:
    """The NLL of each sample, with the determinant of the whole Jacobian."""
    found = []
    for e, p in zip(embeddings, centres, strict=True):
        residual = lambda x, p=p: nir.flow(x[None], p[None]).y[0]
        jacobian = torch.autograd.functional.jacobian(residual, e)
        z = residual(e)
        found.append(float((0.5 * z @ z - torch.linalg.slogdet(jacobian).logabsdet).detach()))
    return found


@EXPONENTIATE
def test_it_is_the_formula_of_the_paper(exponentiate: bool) -> None:
    nir, (embeddings, centres) = regularizer(exponentiate), batch()
    terms = naive(nir, embeddings, centres)
    expected = sum(math.exp(nll) if exponentiate else nll for nll in terms) / len(terms)
    assert float(nir(embeddings, centres).detach()) == pytest.approx(expected, rel=1e-5)


@EXPONENTIATE
def test_the_gradient_reaches_embeddings_centres_and_flow(exponentiate: bool) -> None:
    nir, (embeddings, centres) = regularizer(exponentiate), batch()
    embeddings.requires_grad_()
    centres.requires_grad_()
    nir(embeddings, centres).backward()
    for inputs in (embeddings, centres):
        assert (inputs.grad.norm(dim=1) > 0).all()
    for name, parameter in nir.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


@EXPONENTIATE
def test_while_its_flow_is_fitted_the_gradient_reaches_the_flow_alone(exponentiate: bool) -> None:
    nir, (embeddings, centres) = regularizer(exponentiate), batch()
    embeddings.requires_grad_()
    centres.requires_grad_()
    acting = nir(embeddings, centres)
    nir.fitting = True
    value = nir(embeddings, centres)
    value.backward()
    torch.testing.assert_close(value, acting)
    assert embeddings.grad is None
    assert centres.grad is None
    for name, parameter in nir.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


def test_the_exponential_neither_overflows_nor_loses_its_gradient() -> None:
    exponents = torch.tensor([-5.0, 0.0, 29.9, 30.1, 1000.0], requires_grad=True)
    values = bounded_exp(exponents)
    values.sum().backward()
    torch.testing.assert_close(values[:3], exponents[:3].exp())
    assert (values.diff() > 0).all()
    assert values.isfinite().all()
    assert values[4].item() == pytest.approx(math.exp(30) * 971, rel=1e-5)
    assert exponents.grad[3:].tolist() == pytest.approx([math.exp(LARGEST_EXPONENT)] * 2, rel=1e-5)


def test_a_batch_of_outliers_gives_a_finite_value_and_finite_gradients() -> None:
    nir, (embeddings, centres) = regularizer(), batch()
    far = (200 * embeddings).requires_grad_()
    assert float(nir.negative_log_likelihood(far, centres).detach().max()) > 1000
    value = nir(far, centres)
    value.backward()
    assert value.dtype == torch.float32
    assert value.isfinite()
    for parameter in (far, *nir.parameters()):
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_it_computes_in_float32_whatever_the_autocast(dtype: torch.dtype) -> None:
    nir, (embeddings, centres) = regularizer(), batch()
    embeddings, centres = embeddings.to(dtype), centres.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = nir(embeddings, centres)
    assert value.dtype == torch.float32
    assert torch.equal(value, nir(embeddings.float(), centres.float()))
    assert {parameter.dtype for parameter in nir.parameters()} == {torch.float32}


@EXPONENTIATE
def test_an_empty_batch_gives_zero(exponentiate: bool) -> None:
    value = regularizer(exponentiate)(torch.zeros(0, DIM), torch.zeros(0, DIM))
    value.backward()
    assert float(value.detach()) == 0.0


def test_noise_gives_the_likelihood_an_upper_bound() -> None:
    """Without noise the flow makes the embeddings of one class as likely as it wants."""
    dim, noise, found = 4, 0.1, {}
    embeddings, centres = batch(256, dim)
    for sigma in (0.0, noise):
        torch.manual_seed(0)
        settings = NonIsotropy(exponentiate=False, noise=sigma, blocks=2, hidden=16, layers=3)
        nir = NonIsotropyRegularizer(settings, dim)
        optimizer = torch.optim.Adam(nir.parameters(), lr=1e-2)
        values = []
        for _ in range(300):
            optimizer.zero_grad()
            value = nir(embeddings[:1].expand(256, -1), centres[:1].expand(256, -1))
            value.backward()
            optimizer.step()
            values.append(value.detach())
        found[sigma] = float(torch.stack(values[-20:]).mean())
    bound = dim * (0.5 + math.log(noise))
    assert found[0.0] < bound - 1, "the flow passes the bound when there is no noise"
    assert bound - 0.3 <= found[noise] <= bound + 1
