from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.training.config.settings import GraphConsistency
from kinlens.training.regularizers.graph_consistency import graph_consistency


def consistency(**settings: object) -> Callable[[Tensor, Tensor], Tensor]:
    made = GraphConsistency(**settings)
    return lambda first, second: graph_consistency(first, second, made)


def draws(classes: int = 3, each: int = 2, dim: int = 5) -> tuple[Tensor, Tensor]:
    """Two draws of unit vectors around the same centres."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.double)
    centres = F.normalize(normal(classes, dim), dim=1).repeat_interleave(each, dim=0)
    first, second = F.normalize(centres + 0.3 * normal(2, classes * each, dim), dim=2)
    return first, second


def naive(first: Tensor, second: Tensor, sigma: float, form: str) -> float:
    """Equations 1 and 3 of the paper."""

    def graph(x: np.ndarray) -> np.ndarray:
        return np.exp(-((x[:, None] - x) ** 2).sum(axis=2) / sigma)

    x1, x2 = first.detach().numpy(), second.detach().numpy()
    if form == "graph":
        return ((graph(x1) - graph(x2)) ** 2).sum()
    return np.linalg.norm(graph(x1) @ x1 - graph(x2) @ x2)


@pytest.mark.parametrize("form", ["bound", "graph"])
@pytest.mark.parametrize("sigma", [0.5, 3.0])
def test_value_and_gradient_are_those_of_the_formula(form: str, sigma: float) -> None:
    first, second = (x.requires_grad_() for x in draws())
    value = consistency(sigma=sigma, form=form)(first, second)
    assert value.item() == pytest.approx(naive(first, second, sigma, form), rel=1e-12)
    assert torch.autograd.gradcheck(consistency(sigma=sigma, form=form), (first, second))


@pytest.mark.parametrize("form", ["bound", "graph"])
def test_identical_draws_give_0_with_a_finite_gradient(form: str) -> None:
    first = draws()[0].float().requires_grad_()
    second = first.detach().clone().requires_grad_()
    value = consistency(form=form)(first, second)
    value.backward()
    assert float(value.detach()) == 0
    assert not first.grad.any()
    assert not second.grad.any()
