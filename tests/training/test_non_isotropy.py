import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.training.config.settings import NonIsotropy
from kinlens.training.regularizers.non_isotropy import (
    NonIsotropyRegularizer,
)

DIM = 6


def batch(count: int = 8, dim: int = DIM) -> tuple[Tensor, Tensor]:
    """Unit embeddings and the unit centres of their classes, two samples each."""
    generator = torch.Generator().manual_seed(1)
    unit = lambda *shape: F.normalize(torch.randn(shape, generator=generator), dim=-1)
    return unit(count, dim), unit(math.ceil(count / 2), dim).repeat_interleave(2, dim=0)[:count]


def regularizer(exponentiate: bool = True, noise: float = 0.0) -> NonIsotropyRegularizer:
    torch.manual_seed(0)
    shape = {"blocks": 2, "hidden": 16, "layers": 3}
    settings = NonIsotropy(exponentiate=exponentiate, noise=noise, **shape)
    return NonIsotropyRegularizer(settings, DIM)


def naive(nir: NonIsotropyRegularizer, embeddings: Tensor, centres: Tensor) -> list[float]:
    """The NLL of each sample, with the determinant of the whole Jacobian."""
    found = []
    for e, p in zip(embeddings, centres, strict=True):
        residual = lambda x, p=p: nir.flow(x[None], p[None]).y[0]
        jacobian = torch.autograd.functional.jacobian(residual, e)
        z = residual(e)
        found.append(float((0.5 * z @ z - torch.linalg.slogdet(jacobian).logabsdet).detach()))
    return found


@pytest.mark.parametrize("exponentiate", [True, False])
def test_value_and_gradient_are_those_of_the_formula(exponentiate: bool) -> None:
    nir, given = regularizer(exponentiate).double(), [x.double() for x in batch()]
    terms = naive(nir, *given)
    expected = sum(math.exp(nll) if exponentiate else nll for nll in terms) / len(terms)
    assert float(nir(*given).detach()) == pytest.approx(expected, rel=1e-9)
    assert torch.autograd.gradcheck(nir, [x.requires_grad_() for x in given])


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


def test_noise_joins_the_embeddings_in_training_alone() -> None:
    nir, exact, given = regularizer(noise=0.1), regularizer(), batch()
    assert not torch.equal(nir(*given), nir(*given))
    assert torch.equal(nir.eval()(*given), exact(*given))
