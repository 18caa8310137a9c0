"""Skewed-mean regularization: push class centres apart, the nearest pairs or the farthest."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.config.settings import SkewedMean

_ENERGIES = {"uniform_face": 1, "mhe0": 0, "mhe1": 1, "mhe2": 2}
_SMALLEST_DISTANCE = 1e-3
_SMALLEST_SIMILARITY = 1e-6
_SMALLEST_SUM = 1e-4


class SkewedMeanRegularizer(nn.Module):
    r"""A smooth skewed mean over all pairs of class centres, to be minimised.

    With s_ij the cosine and d_ij the Euclidean distance of centres p_i and p_j, C centres:

    .. math::
        \text{r1} &= \operatorname{mean}_i \frac{1}{\gamma_3}
            \log \sum_{j \ne i} e^{\gamma_3 (s_{ij} - \delta_3)} \\
        \text{r2} &= \Bigl(\operatorname{mean}_{i \ne j}
            \bigl(\tfrac{1 + s_{ij}}{2}\bigr)^\lambda\Bigr)^{1/\lambda} \\
        \text{distance} &= -\Bigl(\operatorname{mean}_{i \ne j} d_{ij}^{-\lambda}\Bigr)^{-1/\lambda}

    "distance" has a minus sign because its mean distance is to grow: its values lie in [-2, 0].

    Which pairs are pushed: a pair's weight is proportional to exp(gamma s) within its row in r1, to
    ((1 + s) / 2)^(lambda - 1) in r2, to d^(-lambda - 1) in "distance". So the nearest pairs with
    gamma > 0, with lambda > 1 in r2 and with lambda > -1 in "distance"; the farthest with
    gamma < 0, lambda < 1 and lambda < -1. The energies below know the nearest only. Warning: pushed
    alone, far pairs can gather the centres at two opposite points (r2 with lambda = 0 does).

    Presets, monotone transforms of M = -distance: "uniform_face" and "mhe1" = mean 1/d = 1/M with
    lambda = 1; "mhe2" = mean 1/d^2 = 1/M^2 with lambda = 2; "mhe0" = mean -log d = -log M with
    lambda = 0. They use neither gamma, delta nor exponent.

    **Readings.** The paper gives neither gamma3 nor lambda: 16 and 8 here, which follow the nearest
    few of some hundred centres. Its eq. 10 gives UniformFace as lambda = -1, which as printed is
    the mean distance; the inverse distance is lambda = 1, as here. R1 is printed for one centre i;
    here its mean. R2 needs positive numbers, hence (1 + s) / 2. The paper's energies are of the
    squared distance, those of Liu et al. of the distance, as here. **As printed, delta3 only shifts
    R1 and has no gradient**, though the paper reports that its choice matters; `hinge` adds 1 to
    the sum, the soft form of the constraint s_ij < delta3 which the paper derives R1 from, so that
    centres farther apart than that are let alone. The row of a centre then pushes with the part
    S / (1 + S) of its force, S = sum_j exp(gamma3 (s_ij - delta3)). Proxies start unrelated, with
    S near (C - 1) exp(-gamma3 delta3): gamma3 = log(C - 1) / delta3, some 10 for 100 classes, makes
    that 1 and the part a half, where gamma3 = 16 leaves 7 % and less. R1 is a mean over centres, so
    beside a loss whose gradient is spread over fewer its weight has to be 10 and more.

    Centres nearer than 0.001 count as 0.001 apart and similarities below 1e-6 as 1e-6: they do not
    push, where the formula would have an infinite gradient.

    References:
        Skewed-mean regularization, eq. 5 (K-skewed mean), 7 (its smooth forms), 8 (R1, R2) and 10
        (distance); ICLR 2023 submission "Compact Bilinear Pooling via General Bilinear Projection",
        https://openreview.net/forum?id=7bcrAxy00Jw
        UniformFace (Duan et al., 2019), CVPR. Learning towards Minimum Hyperspherical Energy (Liu
        et al., 2018), https://arxiv.org/abs/1805.09298

    Args:
        settings: `kind`, which of the above; `gamma`, gamma3 of r1, not 0, as +-inf the greatest or
            smallest similarity, less delta3; `delta`, delta3 of r1, best near 0.55 on CUB and 0.45
            on Cars196 in the paper; `exponent`, lambda of r2 and "distance", any number: 0 is the
            geometric mean, +-inf a single pair; `subset`, m, a random subset of so many centres at
            each call: O(m^2) instead of O(C^2); `hinge`, see above, needs gamma > 0.
    """

    def __init__(self, settings: SkewedMean) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, centres: Tensor) -> Tensor:
        """Unit centres (C, D) to a scalar, in float32 or wider; fewer than two centres give 0."""
        centres = centres.to(torch.promote_types(centres.dtype, torch.float32))
        if len(centres) < 2:
            return centres.sum() * 0.0
        if self.settings.subset is not None and self.settings.subset < len(centres):
            chosen = torch.randperm(len(centres))[: self.settings.subset]
            centres = centres[chosen.to(centres.device)]  # (m, D)
        with torch.autocast(centres.device.type, enabled=False):
            similarities = _others(centres @ centres.T)  # (m, m - 1)
            return self._of(similarities)

    def _of(self, similarities: Tensor) -> Tensor:
        if self.settings.kind == "r1":
            return self._r1(similarities)
        if self.settings.kind == "r2":
            halves = ((1 + similarities) / 2).clamp(min=_SMALLEST_SIMILARITY)
            return power_mean(halves.flatten(), self.settings.exponent)
        distances = (2 - 2 * similarities).clamp(min=_SMALLEST_DISTANCE**2).sqrt().flatten()
        if self.settings.kind == "distance":
            return -power_mean(distances, -self.settings.exponent)
        order = _ENERGIES[self.settings.kind]
        return (distances**-order).mean() if order else -distances.log().mean()

    def _r1(self, similarities: Tensor) -> Tensor:
        if math.isinf(self.settings.gamma):
            rows = similarities.amax(1) if self.settings.gamma > 0 else similarities.amin(1)
            return rows.mean() - self.settings.delta
        exponents = self.settings.gamma * (similarities - self.settings.delta)
        if self.settings.hinge:
            exponents = F.pad(exponents, (0, 1))  # exp(0) = 1 joins the sum
        return torch.logsumexp(exponents, dim=1).mean() / self.settings.gamma


def log_exp_mean(values: Tensor, lam: float) -> Tensor:
    r"""(1/lam) log mean exp(lam s) of values (N,), for any lam.

    Between the smallest value (lam = -inf) and the largest (+inf), the arithmetic mean at lam = 0;
    it grows with lam. Exact to rounding also near lam = 0, and without overflow.

    Raises:
        ValueError: without values, or if lam is not a number.
    """
    if not values.numel() or math.isnan(lam):
        raise ValueError(f"a mean with lam {lam} of {values.numel()} values is not defined")
    if lam == 0:
        return values.mean()
    extreme = values.amax() if lam > 0 else values.amin()
    if math.isinf(lam):
        return extreme
    extreme = extreme.detach()
    exponents = lam * (values - extreme)  # (N,), at most 0
    # log mean exp is close to 0 for small exponents: there log1p and expm1 keep its digits.
    less_one = torch.expm1(exponents).mean()
    near = torch.log1p(less_one.clamp(min=-0.5))
    far = torch.logsumexp(exponents, dim=0) - math.log(len(exponents))
    return extreme + torch.where(less_one > -0.5, near, far) / lam


def power_mean(values: Tensor, lam: float) -> Tensor:
    """(mean s^lam)^(1/lam) of positive values (N,), for any lam; the geometric mean at lam = 0.

    It is the log-exp mean of log s, exponentiated, with the same limits and the same stability.

    Raises:
        ValueError: without values, or if lam is not a number.
    """
    return log_exp_mean(values.log(), lam).exp()


def class_means(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Unit means of the classes in a batch: (B, D) and (B,) to (classes present, D), by label.

    The centres of losses that have no proxies. Gradients flow to every embedding.
    """
    embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    present = torch.unique(labels)  # (P,)
    member = (present[:, None] == labels[None, :]).to(embeddings.dtype)  # (P, B)
    with torch.autocast(embeddings.device.type, enabled=False):
        return F.normalize(member @ embeddings, dim=1, eps=_SMALLEST_SUM)


def _others(square: Tensor) -> Tensor:
    """A square matrix without its diagonal: (m, m) to (m, m - 1), row by row."""
    m = len(square)
    return square.flatten()[1:].view(m - 1, m + 1)[:, :-1].reshape(m, m - 1)
