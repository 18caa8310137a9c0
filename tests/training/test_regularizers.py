"""Skewed mean, graph consistency and non-isotropy against their formulas, term by term."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.training.regularizers.graph_consistency import (
    GraphConsistencyRegularizer,
    graph_consistency,
)
from kinlens.training.regularizers.non_isotropy import NonIsotropyRegularizer
from kinlens.training.regularizers.skewed_mean import (
    SkewedMeanRegularizer,
    class_means,
    skewed_mean,
)

DIM = 6
SETTINGS: list[dict[str, object]] = [
    {"kind": "r1"},
    {"kind": "r1", "gamma": -16.0},
    {"kind": "r1", "gamma": 2.0, "delta": 0.1},
    {"kind": "r1", "hinge": True},
    {"kind": "r2"},
    {"kind": "r2", "exponent": 50.0},
    {"kind": "r2", "exponent": -3.0},
    {"kind": "r2", "exponent": 0.0},
    {"kind": "distance"},
    {"kind": "distance", "exponent": -4.0},
    {"kind": "distance", "exponent": 0.0},
    {"kind": "log_exp"},
    {"kind": "log_exp", "gamma": -16.0},
    {"kind": "log_exp", "hinge": True},
    {"kind": "hard", "pairs": 4},
    {"kind": "hard", "pairs": -4},
    {"kind": "hard"},
]


def skewed(kind: str = "r1", **settings: object) -> Callable[[Tensor], Tensor]:
    made = SkewedMeanRegularizer(kind=kind, **settings)
    return lambda centres: skewed_mean(centres, made)


def centres_of(count: int = 6, dim: int = 4, dtype: torch.dtype = torch.double) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return F.normalize(torch.randn(count, dim, generator=generator, dtype=dtype), dim=1)


def naive_skewed(centres: Tensor, settings: dict[str, object]) -> float:
    """Equations 5, 7, 8 and 10, from the cosines of all ordered pairs."""
    kind, gamma = settings["kind"], float(settings.get("gamma", 16.0))
    delta, lam = float(settings.get("delta", 0.55)), float(settings.get("exponent", 8.0))
    cosines = (centres @ centres.T).detach().numpy()
    rows = cosines[~np.eye(len(cosines), dtype=bool)].reshape(len(cosines), -1)
    if kind == "r1":
        sums = np.exp(gamma * (rows - delta)).sum(1) + bool(settings.get("hinge"))
        return np.log(sums).mean() / gamma
    if kind == "log_exp":
        mean = np.exp(gamma * (rows - delta)).mean()
        return np.log(mean + bool(settings.get("hinge"))) / gamma
    if kind == "hard":
        count = int(settings.get("pairs", 100))
        falling = np.sort(rows.flatten())[:: -2 if count > 0 else 2]  # each pair once
        return falling[: abs(count)].mean()
    if kind == "r2":
        return mean_of((1 + rows) / 2, lam)
    distances = np.sqrt(2 - 2 * rows)
    return -mean_of(distances, -lam)


def mean_of(values: np.ndarray, lam: float) -> float:
    return np.exp(np.log(values).mean()) if lam == 0 else (values**lam).mean() ** (1 / lam)


def named(settings: dict[str, object]) -> str:
    return " ".join(str(value) for value in settings.values())


@pytest.mark.parametrize("settings", SETTINGS, ids=named)
def test_the_skewed_mean_and_its_gradient_are_those_of_the_formula(
    settings: dict[str, object],
) -> None:
    centres = centres_of().requires_grad_()
    value = skewed(**settings)(centres)
    assert value.item() == pytest.approx(naive_skewed(centres, settings), rel=1e-9)
    assert torch.autograd.gradcheck(skewed(**settings), (centres,))
    for few in (centres[:0], centres[:1]):
        assert skewed(**settings)(few) == 0


def test_means_of_all_pairs_grow_from_the_smallest_cosine_to_the_largest() -> None:
    centres = centres_of(9)
    cosines = (centres @ centres.T)[*torch.triu_indices(9, 9, 1)]
    count = len(cosines)
    hard = [skewed("hard", pairs=k)(centres) for k in (-1, -5, -count, count, 5, 1)]
    limits = torch.stack([cosines.min(), cosines.mean(), cosines.max()])
    torch.testing.assert_close(torch.stack(hard)[[0, 3, 5]], limits)
    torch.testing.assert_close(hard[2], hard[3])
    smooth = [
        skewed("log_exp", gamma=gamma, delta=0.0)(centres)
        for gamma in (-5000.0, -20.0, -1e-6, 1e-6, 20.0, 5000.0)
    ]
    torch.testing.assert_close(torch.stack(smooth)[[0, 3, 5]], limits, rtol=0, atol=2e-3)
    for means in (hard, smooth):
        assert torch.stack(means).diff().min() > -1e-12


def test_the_hard_mean_moves_only_the_centres_of_its_pairs() -> None:
    centres = centres_of(9).requires_grad_()
    for pairs, chosen in ((1, torch.argmax), (-1, torch.argmin)):
        cosines = (centres @ centres.T).detach()
        cosines.fill_diagonal_(cosines[0, 1])
        pair = divmod(int(chosen(cosines)), 9)
        (gradient,) = torch.autograd.grad(skewed("hard", pairs=pairs)(centres), [centres])
        assert gradient.norm(dim=1).nonzero().flatten().tolist() == sorted(pair)


def test_a_subset_touches_only_its_centres() -> None:
    centres = centres_of(20).requires_grad_()
    torch.manual_seed(5)
    chosen = torch.randperm(20)[:4]
    torch.manual_seed(5)
    value = skewed("distance", subset=4)(centres)
    torch.testing.assert_close(value, skewed("distance")(centres[chosen]))
    value.backward()
    touched = centres.grad.norm(dim=1).nonzero().flatten()
    assert touched.tolist() == sorted(chosen.tolist())


@pytest.mark.parametrize("settings", SETTINGS, ids=named)
def test_gradients_of_the_skewed_mean_are_finite_everywhere(settings: dict[str, object]) -> None:
    point, others = (centres_of(count, dtype=torch.float32) for count in (1, 2))
    for rows in ([point, point, -point, others], [point, point], [point, -point]):
        raw = torch.cat(rows).requires_grad_()
        value = skewed(**settings)(raw)
        value.backward()
        assert value.isfinite()
        assert raw.grad.isfinite().all()


def test_class_means_are_unit_means_in_order_of_label() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = F.normalize(torch.randn(7, 4, generator=generator), dim=1).requires_grad_()
    labels = torch.tensor([4, 9, 4, 2, 9, 4, 2])
    means = class_means(embeddings, labels)
    for row, label in zip(means, (2, 4, 9), strict=True):
        total = sum(e for e, y in zip(embeddings, labels.tolist(), strict=True) if y == label)
        torch.testing.assert_close(row, total / total.norm())
    means.square()[:, 0].sum().backward()
    assert (embeddings.grad.norm(dim=1) > 0).all()


def consistency(**settings: object) -> Callable[[Tensor, Tensor], Tensor]:
    made = GraphConsistencyRegularizer(**settings)
    return lambda first, second: graph_consistency(first, second, made)


def draws(classes: int = 3, each: int = 2, dim: int = 5) -> tuple[Tensor, Tensor]:
    """Two draws of unit vectors around the same centres."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.double)
    centres = F.normalize(normal(classes, dim), dim=1).repeat_interleave(each, dim=0)
    first, second = F.normalize(centres + 0.3 * normal(2, classes * each, dim), dim=2)
    return first, second


def naive_consistency(first: Tensor, second: Tensor, sigma: float, form: str) -> float:
    """Equations 1 and 3 of the paper."""

    def graph(x: np.ndarray) -> np.ndarray:
        return np.exp(-((x[:, None] - x) ** 2).sum(axis=2) / sigma)

    x1, x2 = first.detach().numpy(), second.detach().numpy()
    if form == "graph":
        return ((graph(x1) - graph(x2)) ** 2).sum()
    return np.linalg.norm(graph(x1) @ x1 - graph(x2) @ x2)


@pytest.mark.parametrize("form", ["bound", "graph"])
@pytest.mark.parametrize("sigma", [0.5, 3.0])
def test_graph_consistency_and_its_gradient_are_those_of_the_formula(
    form: str, sigma: float
) -> None:
    first, second = (x.requires_grad_() for x in draws())
    value = consistency(sigma=sigma, form=form)(first, second)
    assert value.item() == pytest.approx(naive_consistency(first, second, sigma, form), rel=1e-12)
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


def batch(count: int = 8, dim: int = DIM) -> tuple[Tensor, Tensor]:
    """Unit embeddings and the unit centres of their classes, two samples each."""
    generator = torch.Generator().manual_seed(1)
    unit = lambda *shape: F.normalize(torch.randn(shape, generator=generator), dim=-1)
    return unit(count, dim), unit(math.ceil(count / 2), dim).repeat_interleave(2, dim=0)[:count]


def regularizer(exponentiate: bool = True, noise: float = 0.0) -> NonIsotropyRegularizer:
    torch.manual_seed(0)
    shape = {"blocks": 2, "hidden": 16, "layers": 3}
    return NonIsotropyRegularizer(DIM, exponentiate=exponentiate, noise=noise, **shape)


def naive_likelihood(
    nir: NonIsotropyRegularizer, embeddings: Tensor, centres: Tensor
) -> list[float]:
    """The NLL of each sample, with the determinant of the whole Jacobian."""
    found = []
    for e, p in zip(embeddings, centres, strict=True):
        residual = lambda x, p=p: nir.flow(x[None], p[None]).y[0]
        jacobian = torch.autograd.functional.jacobian(residual, e)
        z = residual(e)
        found.append(float((0.5 * z @ z - torch.linalg.slogdet(jacobian).logabsdet).detach()))
    return found


@pytest.mark.parametrize("exponentiate", [True, False])
def test_non_isotropy_and_its_gradient_are_those_of_the_formula(exponentiate: bool) -> None:
    nir, given = regularizer(exponentiate).double(), [x.double() for x in batch()]
    terms = naive_likelihood(nir, *given)
    expected = sum(math.exp(nll) if exponentiate else nll for nll in terms) / len(terms)
    assert float(nir.around(*given).detach()) == pytest.approx(expected, rel=1e-9)
    assert torch.autograd.gradcheck(nir.around, [x.requires_grad_() for x in given])


def test_a_batch_of_outliers_gives_a_finite_value_and_finite_gradients() -> None:
    nir, (embeddings, centres) = regularizer(), batch()
    far = (200 * embeddings).requires_grad_()
    assert float(nir.negative_log_likelihood(far, centres).detach().max()) > 1000
    value = nir.around(far, centres)
    value.backward()
    assert value.dtype == torch.float32
    assert value.isfinite()
    for parameter in (far, *nir.parameters()):
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().sum() > 0


def test_noise_joins_the_embeddings_in_training_alone() -> None:
    nir, exact, given = regularizer(noise=0.1), regularizer(), batch()
    assert not torch.equal(nir.around(*given), nir.around(*given))
    assert torch.equal(nir.eval().around(*given), exact.around(*given))
