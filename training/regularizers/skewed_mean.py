"""Skewed-mean regularization: separate class centres, mainly the nearest or the farthest pairs."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from kinlens.training.losses.base import MetricLoss, ProxyLoss
from kinlens.training.parts.fields import Finite, Positive
from kinlens.training.regularizers.base import Regularizer

_SMALLEST_DISTANCE = 1e-3  # nearer centres do not push: the formulas' gradients are infinite there
_SMALLEST_SIMILARITY = 1e-6
_SMALLEST_SUM = 1e-4
_SHARP, _POWER = ("r1", "log_exp"), ("r2", "distance")
_READ_BY = {
    "gamma": _SHARP, "delta": _SHARP, "hinge": _SHARP, "exponent": _POWER, "pairs": ("hard",),
}  # fmt: skip
_HINGED = "set hinge = true, since it only shifts the mean"


class SkewedMeanRegularizer(Regularizer):
    """Skewed mean of the class centres of a batch, or of all proxies, see `skewed_mean`.

    Args:
        weight: weight of the regularizer.
        kind: form of the mean. `r1` and `log_exp` read `gamma`, `delta` and `hinge`; `r2` and
            `distance` read `exponent`; `hard` reads `pairs`.
        gamma: sharpness: above 0 the nearest pairs of centres dominate, below 0 the farthest; not
            0.
        delta: cosine of two centres; has no effect without `hinge`.
        exponent: exponent of the power mean.
        pairs: K, the number of nearest pairs of centres, or below 0 of farthest ones; not 0.
        subset: number of centres drawn at each step; none: all. Memory grows with its square.
        hinge: push only centres nearer to each other than about `delta`; needs a `gamma` above 0.
        centres: the proxies of the loss, or the class means of the batch for a loss without
            proxies.
    """

    needs = {"proxies": 'centres = "batch"'}

    def __init__(
        self,
        weight: Positive = 1.0,
        kind: Literal["r1", "r2", "distance", "log_exp", "hard"] = "r1",
        gamma: Finite = 16.0,
        delta: Finite = 0.55,
        exponent: Finite = 8.0,
        pairs: int = 100,
        subset: Annotated[int, Field(ge=2)] | None = None,
        hinge: bool = False,
        centres: Literal["proxies", "batch"] = "proxies",
    ) -> None:
        super().__init__()
        self.weight, self.kind, self.gamma, self.delta = weight, kind, gamma, delta
        self.exponent, self.pairs, self.subset = exponent, pairs, subset
        self.hinge, self.centres = hinge, centres

    @classmethod
    def check(cls, options: Any) -> None:
        if options.gamma == 0 or (options.hinge and options.gamma < 0):
            raise ValueError("gamma must not be 0, and above 0 with hinge = true")
        if options.pairs == 0:
            raise ValueError("pairs must not be 0: above 0 the nearest, below 0 the farthest")

    @classmethod
    def needs_with(cls, options: Any) -> Mapping[str, str]:
        return cls.needs if options.centres == "proxies" else {}

    @classmethod
    def idle(cls, options: Any) -> Mapping[str, str]:
        found = {
            name: f"set kind = {' or '.join(map(repr, kinds))}"
            for name, kinds in _READ_BY.items()
            if options.kind not in kinds
        }
        return found if "hinge" in found or options.hinge else {**found, "delta": _HINGED}

    def sites(self, loss: nn.Module) -> list[Tensor]:
        return [loss.proxies] if self.centres == "proxies" and isinstance(loss, ProxyLoss) else []

    def forward(self, embeddings: Tensor, labels: Tensor, loss: MetricLoss | None = None) -> Tensor:
        if self.centres == "batch":
            return skewed_mean(class_means(embeddings, labels), self)
        assert isinstance(loss, ProxyLoss)  # see `needs`
        return skewed_mean(loss.class_centres(), self)


def skewed_mean(centres: Tensor, settings: SkewedMeanRegularizer) -> Tensor:
    r"""A smooth skewed mean over all pairs of class centres, to be minimised.

    With s_ij the cosine and d_ij the Euclidean distance of centres p_i and p_j, unit rows (C, D):

    .. math::
        \text{r1} &= \operatorname{mean}_i \frac{1}{\gamma_3}
            \log \sum_{j \ne i} e^{\gamma_3 (s_{ij} - \delta_3)} \\
        \text{r2} &= \Bigl(\operatorname{mean}_{i \ne j}
            \bigl(\tfrac{1 + s_{ij}}{2}\bigr)^\lambda\Bigr)^{1/\lambda} \\
        \text{distance} &=
            -\Bigl(\operatorname{mean}_{i \ne j} d_{ij}^{-\lambda}\Bigr)^{-1/\lambda} \\
        \text{log\_exp} &= \frac{1}{\gamma_3}
            \log \operatorname{mean}_{i \ne j} e^{\gamma_3 (s_{ij} - \delta_3)} \\
        \text{hard} &= M_{[K]} = \text{mean of the K largest } s_{ij},\ i < j
            \text{ (K < 0: of the |K| smallest)}

    `log_exp` is r1 over all pairs at once, the smooth form of `hard`: it grows with gamma from the
    smallest cosine to the largest. With fewer pairs than K, `hard` is the mean of all. "distance"
    has a minus sign because its mean distance should grow; values are in [-2, 0].

    The nearest pairs dominate for gamma > 0, for lambda > 1 in r2 and lambda > -1 in "distance";
    the farthest pairs for gamma < 0, lambda < 1 and lambda < -1. Warning: if only far pairs are
    pushed, the centres may gather at two opposite points (with r2 and lambda = 0 they do).

    With lambda = 1, 0 and 2, "distance" orders centres as the energies of UniformFace and MHE-1,
    of MHE-0 and of MHE-2 do: mean 1/d, mean -log d and mean 1/d^2 are monotone transforms of it.

    As printed, delta3 only shifts R1 and has no gradient; `hinge` adds 1 to the sum, the soft form
    of the constraint s_ij < delta3 that R1 is derived from. docs/methods/regularizers.md
    has other readings.

    `subset` draws m centres at each call: O(m^2), not O(C^2). The scalar is in float32 or wider;
    fewer than two centres give 0.

    References:
        Skewed-mean regularization, eq. 5 (K-skewed mean), 7 (its smooth forms; over all pairs:
        section 3.4), 8 (R1, R2) and 10 (distance); ICLR 2023 submission
        "Compact Bilinear Pooling via General Bilinear Projection",
        https://openreview.net/forum?id=7bcrAxy00Jw
        UniformFace (Duan et al., 2019), CVPR. Learning towards Minimum Hyperspherical Energy (Liu
        et al., 2018), https://arxiv.org/abs/1805.09298
    """
    centres = centres.to(torch.promote_types(centres.dtype, torch.float32))
    if len(centres) < 2:
        return centres.sum() * 0.0
    if settings.subset is not None and settings.subset < len(centres):
        chosen = torch.randperm(len(centres))[: settings.subset]
        centres = centres[chosen.to(centres.device)]  # (m, D)
    with torch.autocast(centres.device.type, enabled=False):
        similarities = _others(centres @ centres.T)  # (m, m - 1)
        if settings.kind == "hard":
            return _hard_mean(similarities, settings.pairs)
        if settings.kind in ("r1", "log_exp"):
            exponents = settings.gamma * (similarities - settings.delta)  # (m, m - 1)
            if settings.kind == "log_exp":
                exponents = exponents.reshape(1, -1) - math.log(exponents.numel())
            sums = torch.logsumexp(exponents, dim=1)
            if settings.hinge:
                sums = F.softplus(sums)  # log(1 + e^x)
            return sums.mean() / settings.gamma
        if settings.kind == "r2":
            halves = ((1 + similarities) / 2).clamp(min=_SMALLEST_SIMILARITY)
            return power_mean(halves.flatten(), settings.exponent)
        distances = (2 - 2 * similarities).clamp(min=_SMALLEST_DISTANCE**2).sqrt().flatten()
        return -power_mean(distances, -settings.exponent)


def _hard_mean(similarities: Tensor, pairs: int) -> Tensor:
    """Mean of the largest (pairs > 0) or smallest (< 0) entries (m, m - 1), each pair once."""
    rows, columns = torch.triu_indices(*similarities.shape, device=similarities.device)
    values = similarities[rows, columns]  # (m (m - 1) / 2,), those of i < j
    return values.topk(min(abs(pairs), len(values)), largest=pairs > 0).values.mean()


def power_mean(values: Tensor, lam: float) -> Tensor:
    """(mean s^lam)^(1/lam) of positive values (N,); the geometric mean at lam = 0."""
    logs = values.log()
    if abs(lam) < 1e-3:  # the geometric mean; the formula would divide rounding errors by lam
        return logs.mean().exp()
    return ((torch.logsumexp(lam * logs, dim=0) - math.log(len(logs))) / lam).exp()


def class_means(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Unit means of the classes in a batch, (B, D) and (B,) to (P, D), by label, with gradient."""
    embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    present = torch.unique(labels)  # (P,)
    member = (present[:, None] == labels[None, :]).to(embeddings.dtype)  # (P, B)
    with torch.autocast(embeddings.device.type, enabled=False):
        return F.normalize(member @ embeddings, dim=1, eps=_SMALLEST_SUM)


def _others(square: Tensor) -> Tensor:
    """A square matrix without its diagonal: (m, m) to (m, m - 1), row by row."""
    m = len(square)
    return square.flatten()[1:].view(m - 1, m + 1)[:, :-1].reshape(m, m - 1)
