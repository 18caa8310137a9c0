import math

import pytest
import torch
from torch.nn import functional as F

from training.regularizers.skewed_mean import (
    class_means,
    k_skewed_mean,
    log_exp_mean,
    power_mean,
)

VALUES = torch.tensor([0.2, 1.5, 0.7, 3.0, 0.4], dtype=torch.double)


def mean_of(values: list[float], lam: float) -> float:
    return (sum(v**lam for v in values) / len(values)) ** (1 / lam)


def test_the_k_skewed_mean_is_that_of_the_largest_or_smallest() -> None:
    assert float(k_skewed_mean(VALUES, 1)) == 3.0
    assert float(k_skewed_mean(VALUES, -1)) == pytest.approx(0.2)
    assert float(k_skewed_mean(VALUES, 2)) == pytest.approx((3.0 + 1.5) / 2)
    assert float(k_skewed_mean(VALUES, -3)) == pytest.approx((0.2 + 0.4 + 0.7) / 3)
    for k in (5, -5):
        torch.testing.assert_close(k_skewed_mean(VALUES, k), VALUES.mean())
    for k in (0, 6, -6):
        with pytest.raises(ValueError, match=rf"k is {k}, .* 5 values"):
            k_skewed_mean(VALUES, k)


@pytest.mark.parametrize("mean", [log_exp_mean, power_mean])
def test_the_limits_of_the_smooth_means(mean: object) -> None:
    middle = VALUES.mean() if mean is log_exp_mean else VALUES.log().mean().exp()
    for lam, expected in ((0.0, middle), (math.inf, VALUES.max()), (-math.inf, VALUES.min())):
        torch.testing.assert_close(mean(VALUES, lam), expected)
    for lam in (1e-12, -1e-12):
        torch.testing.assert_close(mean(VALUES, lam), middle)
    torch.testing.assert_close(mean(VALUES, 1e6), VALUES.max(), rtol=1e-5, atol=0)
    torch.testing.assert_close(mean(VALUES, -1e6), VALUES.min(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("mean", [log_exp_mean, power_mean])
def test_the_smooth_means_grow_with_lambda_and_reach_every_skewed_mean(mean: object) -> None:
    grid = torch.linspace(-60, 60, 481).tolist()
    means = torch.stack([mean(VALUES, lam) for lam in grid])
    assert (means.diff() > 0).all()
    for k in (2, 3, 4, 5, -4, -3, -2):
        assert means[0] < k_skewed_mean(VALUES, k) < means[-1]


@pytest.mark.parametrize("lam", [-7.0, -1.0, -0.01, 0.01, 1.0, 2.0, 7.0])
def test_the_smooth_means_are_their_formulas(lam: float) -> None:
    values = VALUES.tolist()
    exponential = math.log(sum(math.exp(lam * v) for v in values) / len(values)) / lam
    assert float(log_exp_mean(VALUES, lam)) == pytest.approx(exponential, rel=1e-10)
    assert float(power_mean(VALUES, lam)) == pytest.approx(mean_of(values, lam), rel=1e-10)


@pytest.mark.parametrize("lam", [0.0, 1e-30, 1e-7, 1e-3, 1.0, 50.0, 1e4, 1e30, math.inf])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("mean", [log_exp_mean, power_mean])
def test_the_means_are_stable_in_float32(mean: object, lam: float, sign: float) -> None:
    values = (100 * VALUES).float().requires_grad_()
    result = mean(values, sign * lam)
    result.backward()
    exact = mean(100 * VALUES, sign * lam)
    torch.testing.assert_close(result.detach().double(), exact, rtol=1e-5, atol=0)
    assert values.grad is not None
    assert values.grad.isfinite().all()
    assert (values.grad >= 0).all()
    if mean is log_exp_mean:
        assert float(values.grad.sum()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("mean", [log_exp_mean, power_mean])
def test_the_gradient_of_the_means_is_that_of_differences(mean: object) -> None:
    for lam in (-9.0, -0.5, 0.0, 1e-3, 0.5, 9.0):
        assert torch.autograd.gradcheck(
            lambda v, lam=lam: mean(v, lam), VALUES.clone().requires_grad_()
        )


def test_one_value_among_very_many_decides_a_maximum() -> None:
    values = torch.zeros(3_000_000)
    values[5] = 1.0
    exact = 1 - math.log(3_000_000) / 100  # float32 has no digits for 1 - 1 / N
    assert float(log_exp_mean(values, 100.0)) == pytest.approx(exact, rel=1e-4)


def test_means_without_meaning_are_refused() -> None:
    for mean in (log_exp_mean, power_mean):
        with pytest.raises(ValueError, match="lam nan of 5 values"):
            mean(VALUES, math.nan)
        with pytest.raises(ValueError, match="of 0 values"):
            mean(torch.zeros(0), 1.0)


def test_class_means_are_unit_means_in_order_of_label() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = F.normalize(torch.randn(7, 4, generator=generator), dim=1).requires_grad_()
    labels = torch.tensor([4, 9, 4, 2, 9, 4, 2])
    means = class_means(embeddings, labels)
    for row, label in zip(means, (2, 4, 9), strict=True):
        total = sum(e for e, y in zip(embeddings, labels.tolist(), strict=True) if y == label)
        torch.testing.assert_close(row, total / total.norm())
    means.square()[:, 0].sum().backward()
    assert embeddings.grad is not None
    assert (embeddings.grad.norm(dim=1) > 0).all()


def test_class_means_of_no_or_opposing_images_are_finite() -> None:
    assert class_means(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)).shape == (0, 4)
    point = torch.tensor([[0.6, 0.0, -0.8]])
    pair = torch.cat([point, -point]).requires_grad_()
    means = class_means(pair, torch.tensor([3, 3]))
    means.sum().backward()
    assert (means == 0).all()
    assert pair.grad is not None
    assert pair.grad.isfinite().all()
