import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kinlens.training.config.job import load_job
from kinlens.training.config.settings import SkewedMean
from kinlens.training.losses.table import build_loss
from kinlens.training.regularizers.skewed_mean import class_means, power_mean, skewed_mean

Regularizer = Callable[[Tensor], Tensor]

SETTINGS: list[dict[str, object]] = [
    {"kind": "r1"},
    {"kind": "r1", "gamma": -16.0},
    {"kind": "r1", "gamma": 2.0, "delta": 0.1},
    {"kind": "r1", "hinge": True},
    {"kind": "r2"},
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


def skewed(kind: str = "r1", **settings: object) -> Regularizer:
    made = SkewedMean(kind=kind, **settings)
    return lambda centres: skewed_mean(centres, made)


def centres_of(count: int = 6, dim: int = 4, dtype: torch.dtype = torch.double) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return F.normalize(torch.randn(count, dim, generator=generator, dtype=dtype), dim=1)


def naive(centres: Tensor, settings: dict[str, object]) -> float:
    """Equations 8 and 10 and the energies, term by term."""
    kind, gamma = settings["kind"], float(settings.get("gamma", 16.0))
    delta, lam = float(settings.get("delta", 0.55)), float(settings.get("exponent", 8.0))
    points = centres.tolist()
    rows = []
    for i, p in enumerate(points):
        others = [q for j, q in enumerate(points) if j != i]
        rows.append([sum(a * b for a, b in zip(p, q, strict=True)) for q in others])
    if kind == "r1":
        one = 1.0 if settings.get("hinge") else 0.0
        sums = [one + sum(math.exp(gamma * (s - delta)) for s in row) for row in rows]
        return sum(math.log(x) / gamma for x in sums) / len(rows)
    pairs = [s for row in rows for s in row]
    if kind == "r2":
        halves = [(1 + s) / 2 for s in pairs]
        return mean_of(halves, lam)
    distances = [math.sqrt(2 - 2 * s) for s in pairs]
    if kind == "distance":
        return -mean_of(distances, -lam)
    if kind == "mhe0":
        return sum(-math.log(d) for d in distances) / len(distances)
    return sum(d ** (-2 if kind == "mhe2" else -1) for d in distances) / len(distances)


def mean_of(values: list[float], lam: float) -> float:
    if lam == 0:
        return math.prod(values) ** (1 / len(values))
    return (sum(v**lam for v in values) / len(values)) ** (1 / lam)


def named(settings: dict[str, object]) -> str:
    return " ".join(str(value) for value in settings.values())


def gradient(regularizer: Regularizer, centres: Tensor) -> Tensor:
    """Of the regularizer, along the sphere: (C, D)."""
    raw = centres.clone().requires_grad_()
    regularizer(F.normalize(raw, dim=1)).backward()
    return raw.grad


@pytest.mark.parametrize("settings", SETTINGS, ids=named)
def test_value_and_gradient_are_those_of_the_formula(settings: dict[str, object]) -> None:
    centres = centres_of().requires_grad_()
    value = skewed(**settings)(centres)
    assert value.item() == pytest.approx(naive(centres, settings), rel=1e-9)
    assert torch.autograd.gradcheck(skewed(**settings), (centres,))
    for few in (centres[:0], centres[:1]):
        assert skewed(**settings)(few) == 0


def test_a_subset_touches_only_its_centres() -> None:
    centres = centres_of(20)
    torch.manual_seed(5)
    touched = [gradient(skewed("mhe1", subset=4), centres).norm(dim=1) > 0 for _ in range(3)]
    assert [int(one.sum()) for one in touched] == [4, 4, 4]
    assert not torch.equal(touched[0], touched[1])
    torch.manual_seed(5)
    chosen = torch.randperm(20)[:4]
    assert touched[0][chosen].all()
    torch.manual_seed(5)
    value = skewed("mhe1", subset=4)(centres)
    torch.testing.assert_close(value, skewed("mhe1")(centres[chosen]))


@pytest.mark.parametrize("settings", SETTINGS, ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_everywhere(settings: dict[str, object], dtype: torch.dtype) -> None:
    point = centres_of(1, dtype=dtype)
    for centres in (
        torch.cat([point, point, -point, centres_of(2, dtype=dtype)]),
        torch.cat([point, point]),
        torch.cat([point, -point]),
    ):
        raw = centres.clone().requires_grad_()
        value = skewed(**settings)(raw)
        value.backward()
        assert value.isfinite()
        assert raw.grad.isfinite().all()


@pytest.mark.parametrize("settings", SETTINGS, ids=named)
def test_it_is_computed_in_float32_whatever_the_autocast(settings: dict[str, object]) -> None:
    centres = centres_of(dtype=torch.float32)
    regularizer = skewed(**settings)
    expected = regularizer(centres)
    with torch.autocast("cpu", torch.bfloat16):
        value = regularizer(centres)
        low = regularizer(centres.bfloat16())
    assert value.dtype == low.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=0, atol=0)
    torch.testing.assert_close(low, expected, rtol=0.05, atol=0.02)
    exact = skewed(**settings)(centres.double())
    assert exact.dtype == torch.float64
    torch.testing.assert_close(expected.double(), exact, rtol=1e-4, atol=1e-5)


def unit_rows(*shape: int) -> Tensor:
    return F.normalize(torch.randn(*shape), dim=-1)


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("cub-skewed-mean", 100),
        ("cars196-skewed-mean", 98),
        ("cars196-half-skewed-mean", 88),
        ("sop-skewed-mean", 11_318),
        ("in-shop-skewed-mean", 3997),
    ],
)
def test_the_hinge_of_the_jobs_acts_on_new_proxies(name: str, classes: int) -> None:
    """At least a third of what is pushed without it, and no less than 1 % of the loss's push."""
    job = load_job(name)
    torch.manual_seed(0)
    loss = build_loss(job.loss, classes, 512)
    embeddings, labels = unit_rows(90, 512), torch.randint(0, classes, (90,))
    of_loss = pushes(loss, loss(embeddings, labels))
    settings = job.regularizers.skewed_mean
    found = []
    for hinge in (True, False):
        torch.manual_seed(1)
        found.append(
            skewed_mean(loss.class_centres(), settings.model_copy(update={"hinge": hinge}))
        )
    hinged, free = (pushes(loss, value) for value in found)
    assert hinged > free / 3
    assert settings.weight * hinged > 0.01 * of_loss


def pushes(loss: nn.Module, value: Tensor) -> float:
    """The norm of the gradient of `value` at the proxies of `loss`."""
    (gradient,) = torch.autograd.grad(value, loss.proxies, retain_graph=True)
    return float(gradient.norm())


VALUES = torch.tensor([0.2, 1.5, 0.7, 3.0, 0.4], dtype=torch.double)


@pytest.mark.parametrize("lam", [0.0, 1e-3, 1.0, 50.0, 1e4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_power_mean_is_stable_in_float32(lam: float, sign: float) -> None:
    values = (100 * VALUES).float().requires_grad_()
    result = power_mean(values, sign * lam)
    result.backward()
    exact = power_mean(100 * VALUES, sign * lam)
    torch.testing.assert_close(result.detach().double(), exact, rtol=1e-3, atol=0)
    assert values.grad.isfinite().all()
    assert (values.grad >= 0).all()


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
