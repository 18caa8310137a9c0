import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.training.config.settings import GraphConsistency
from kinlens.training.regularizers.graph_consistency import graph_consistency

FORMS = ("bound", "graph")


def consistency(**settings: object) -> Callable[[Tensor, Tensor], Tensor]:
    made = GraphConsistency(**settings)
    return lambda first, second: graph_consistency(first, second, made)


def draws(
    classes: int = 3,
    each: int = 2,
    dim: int = 5,
    spread: float = 0.3,
    dtype: torch.dtype = torch.double,
) -> tuple[Tensor, Tensor]:
    """Two draws of unit vectors around the same centres."""
    generator = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(classes, dim, generator=generator, dtype=dtype), dim=1)
    centres = centres.repeat_interleave(each, dim=0)
    noise = torch.randn(2, classes * each, dim, generator=generator, dtype=dtype)
    first, second = F.normalize(centres + spread * noise, dim=2)
    return first, second


def naive(first: Tensor, second: Tensor, sigma: float, form: str) -> float:
    """Equations 1 and 3 of the paper, term by term."""

    def graph(x: list[list[float]]) -> list[list[float]]:
        return [
            [math.exp(-sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) / sigma) for q in x]
            for p in x
        ]

    x1, x2 = first.tolist(), second.tolist()
    s1, s2 = graph(x1), graph(x2)
    n, dim = len(x1), len(x1[0])
    total = 0.0
    for i in range(n):
        if form == "graph":
            total += sum((s1[i][j] - s2[i][j]) ** 2 for j in range(n))
            continue
        for d in range(dim):
            moved1 = sum(s1[i][j] * x1[j][d] for j in range(n))
            moved2 = sum(s2[i][j] * x2[j][d] for j in range(n))
            total += (moved1 - moved2) ** 2
    return total if form == "graph" else math.sqrt(total)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_it_equals_the_formula_of_the_paper(form: str, sigma: float) -> None:
    first, second = draws()
    value = consistency(sigma=sigma, form=form)(first, second)
    assert float(value) == pytest.approx(naive(first, second, sigma, form), rel=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_identical_draws_give_0_with_a_finite_gradient(form: str, dtype: torch.dtype) -> None:
    first = draws()[0].to(dtype).requires_grad_()
    second = first.detach().clone().requires_grad_()
    value = consistency(form=form)(first, second)
    value.backward()
    assert float(value.detach()) == 0
    for x in (first, second):
        assert (x.grad == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_reaches_both_draws_and_is_that_of_differences(form: str) -> None:
    first, second = (x.requires_grad_() for x in draws())
    assert torch.autograd.gradcheck(consistency(form=form), (first, second))
    consistency(form=form)(first, second).backward()
    for x in (first, second):
        assert (x.grad.norm(dim=1) > 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_it_is_computed_in_float32_whatever_the_autocast(form: str) -> None:
    first, second = draws(dtype=torch.float32)
    expected = consistency(form=form)(first, second)
    with torch.autocast("cpu", torch.bfloat16):
        value = consistency(form=form)(first, second)
        low = consistency(form=form)(first.bfloat16(), second.bfloat16())
    assert value.dtype == low.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=0, atol=0)
    torch.testing.assert_close(low, expected, rtol=0.1, atol=0)


def test_no_images_give_0_that_is_connected_to_the_graph() -> None:
    nothing = torch.zeros(0, 4, requires_grad=True)
    for form in FORMS:
        value = consistency(form=form)(nothing, torch.zeros(0, 4))
        value.backward()
        assert float(value.detach()) == 0
