"""KoLeo: the logarithm of the distance to the nearest neighbour in the batch."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.training.regularizers.koleo import KoLeoRegularizer


def unit(count: int, dim: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return F.normalize(torch.randn(count, dim, generator=generator, dtype=torch.float64), dim=1)


def value(x: Tensor) -> Tensor:
    return KoLeoRegularizer()(x, torch.zeros(len(x)))


def test_it_is_the_mean_logarithm_of_the_nearest_distances() -> None:
    x = unit(9)
    naive = 0.0
    for i in range(9):
        distances = [math.dist(x[i].tolist(), x[j].tolist()) for j in range(9) if j != i]
        naive -= math.log(min(distances) + 1e-8) / 9
    assert float(value(x)) == pytest.approx(naive, abs=1e-12)


def test_its_gradient_pushes_nearest_neighbours_apart() -> None:
    x = unit(2).requires_grad_()
    value(x).backward()
    moved = F.normalize(x.detach() - 1e-3 * x.grad, dim=1)
    assert (moved[0] - moved[1]).norm() > (x[0] - x[1]).norm()
    assert value(moved) < value(x)


def test_equal_and_single_embeddings_have_a_finite_value_and_gradient() -> None:
    for x in (unit(1), unit(1).repeat(3, 1), unit(0)):
        x.requires_grad_()
        found = value(x)
        found.backward()
        assert found.isfinite()
        assert x.grad.isfinite().all()
