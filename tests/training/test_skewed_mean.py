from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.training.config.settings import SkewedMean
from kinlens.training.regularizers.skewed_mean import (
    class_means,
    skewed_mean,
)

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
    {"kind": "uniform_face"},
    {"kind": "mhe0"},
    {"kind": "mhe1"},
    {"kind": "mhe2"},
]


def skewed(kind: str = "r1", **settings: object) -> Callable[[Tensor], Tensor]:
    made = SkewedMean(kind=kind, **settings)
    return lambda centres: skewed_mean(centres, made)


def centres_of(count: int = 6, dim: int = 4, dtype: torch.dtype = torch.double) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return F.normalize(torch.randn(count, dim, generator=generator, dtype=dtype), dim=1)


def naive(centres: Tensor, settings: dict[str, object]) -> float:
    """Equations 8 and 10 and the energies, from the cosines of all ordered pairs."""
    kind, gamma = settings["kind"], float(settings.get("gamma", 16.0))
    delta, lam = float(settings.get("delta", 0.55)), float(settings.get("exponent", 8.0))
    cosines = (centres @ centres.T).detach().numpy()
    rows = cosines[~np.eye(len(cosines), dtype=bool)].reshape(len(cosines), -1)
    if kind == "r1":
        sums = np.exp(gamma * (rows - delta)).sum(1) + bool(settings.get("hinge"))
        return np.log(sums).mean() / gamma
    if kind == "r2":
        return mean_of((1 + rows) / 2, lam)
    distances = np.sqrt(2 - 2 * rows)
    if kind == "distance":
        return -mean_of(distances, -lam)
    if kind == "mhe0":
        return -np.log(distances).mean()
    return (distances ** (-2.0 if kind == "mhe2" else -1.0)).mean()


def mean_of(values: np.ndarray, lam: float) -> float:
    return np.exp(np.log(values).mean()) if lam == 0 else (values**lam).mean() ** (1 / lam)


def named(settings: dict[str, object]) -> str:
    return " ".join(str(value) for value in settings.values())


@pytest.mark.parametrize("settings", SETTINGS, ids=named)
def test_value_and_gradient_are_those_of_the_formula(settings: dict[str, object]) -> None:
    centres = centres_of().requires_grad_()
    value = skewed(**settings)(centres)
    assert value.item() == pytest.approx(naive(centres, settings), rel=1e-9)
    assert torch.autograd.gradcheck(skewed(**settings), (centres,))
    for few in (centres[:0], centres[:1]):
        assert skewed(**settings)(few) == 0


def test_a_subset_touches_only_its_centres() -> None:
    centres = centres_of(20).requires_grad_()
    torch.manual_seed(5)
    chosen = torch.randperm(20)[:4]
    torch.manual_seed(5)
    value = skewed("mhe1", subset=4)(centres)
    torch.testing.assert_close(value, skewed("mhe1")(centres[chosen]))
    value.backward()
    touched = centres.grad.norm(dim=1).nonzero().flatten()
    assert touched.tolist() == sorted(chosen.tolist())


@pytest.mark.parametrize("settings", SETTINGS, ids=named)
def test_gradients_are_finite_everywhere(settings: dict[str, object]) -> None:
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
