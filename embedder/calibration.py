"""Convert the scores of a search to probabilities. The export, a gallery and a golden set all fit
the curve defined here. Uses numpy only.

Shapes: T searches, C candidates per search, F features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from kinlens.embedder.errors import CalibrationError

CANDIDATES = 20
"""Number of best hits per search that enter the curve one by one. All other items share one
term."""

TEN = 10
"""Number of best hits by which a fit is judged."""

MIN_WRONG = 100
"""Minimum number of wrong hits among the ten best of all searches; below it no curve is fitted."""

MIN_SEARCHES = 50
"""Minimum number of searches with a right candidate; below it no curve is fitted."""

_BINS = 15
_STEPS = 200
_STEEPEST = 1e4
_RIDGE = 1e-8  # keeps parameters finite that the searches do not determine

Scores = NDArray[np.floating]
Numbers = NDArray[np.float64]
Right = NDArray[np.bool_]


class Curve(BaseModel):
    r"""Distributes the probability of a search over the products that it found.

    Product j has :math:`n_j` of the C candidates; the best of them has the score :math:`s_j`. The
    best candidate of all has the score :math:`s_1`, the last one :math:`s_C`. :math:`\pi` is the
    prior probability that the searched product is absent from the gallery. With

    .. math::
        w_j &= (1 - \pi) \, n_j^b \, e^{a s_j} \\
        w_\text{below} &= (1 - \pi) \, e^{a s_C + c} \\
        w_\text{absent} &= \pi \, e^{d + e s_1 + f s_C}

    product j is the searched one with the probability :math:`w_j / \sum w`, so the probabilities
    of all products never exceed 1. The items of a product share its probability in proportion to
    :math:`e^{a s_i}`. `slope` is a, `hits` b, `below` c (the product has a rank beyond C), `absent`
    d, `absent_best` e, `absent_last` f.

    References:
        Conditional logit analysis of qualitative choice behavior (McFadden 1974)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    slope: float = Field(gt=0, allow_inf_nan=False)
    hits: float = Field(allow_inf_nan=False)
    below: float = Field(allow_inf_nan=False)
    absent: float = Field(allow_inf_nan=False)
    absent_best: float = Field(allow_inf_nan=False)
    absent_last: float = Field(allow_inf_nan=False)

    def shares(
        self, scores: Scores, products: NDArray[np.integer], count: int, prior: float
    ) -> Numbers:
        """The share of the probability of each item (N,).

        The shares of the candidates do not depend on the further items. Further items of products
        without a candidate get, together, at most the share of all items below the candidates.

        Args:
            scores: (N,) cosines, each item once: first the candidates, the `CANDIDATES` best items
                of the whole gallery, best first; then further items.
            products: (N,) a number for the product of each item.
            count: number of candidates; below `CANDIDATES` if the gallery has no more items.
            prior: probability that the product is absent, in [0, 1].
        """
        if not count or prior >= 1:  # an empty gallery, or a product that is surely absent
            return np.zeros(len(scores))
        first, further = scores[:count], scores[count:]
        known, best, product, hits = np.unique(
            products[:count], return_index=True, return_inverse=True, return_counts=True
        )
        inside = np.exp(self.slope * (first - first[best][product]))
        inside /= np.bincount(product, inside)[product]
        with np.errstate(divide="ignore"):
            absent = np.log(prior) + self.absent
        absent += self.absent_best * first[0] + self.absent_last * first[-1]
        below = self.slope * first[-1] + self.below if count >= CANDIDATES else -np.inf
        logits = np.append(self.slope * first[best] + self.hits * np.log(hits), below)
        beyond = np.where(np.isin(products[count:], known), -np.inf, self.slope * further)
        top = max(logits.max() + np.log1p(-prior), absent)
        scale = np.log1p(-prior) - top
        weights, rest = np.exp(logits + scale), np.exp(beyond + scale)
        if rest.sum() > weights[-1]:
            rest *= weights[-1] / rest.sum()
        total = weights.sum() + np.exp(absent - top)
        shares: Numbers = np.append(inside * weights[product], rest) / total
        return shares


@dataclass(frozen=True, slots=True)
class Searches:
    """Results of searches with known answers, to fit a curve to.

    Attributes:
        scores: (T, C) of the best hits, best first; -inf if the gallery has no more items.
        products: (T, C) a number for the product of each hit.
        right: (T, C) whether the hit shows the searched product.
        absent: (T,) whether the searched product was excluded from the gallery.
        handicap: (T,) ln(v / (v - 1)) if the query is one of the v images of its product, because
            a new photo would find v of them; 0 for other queries.
    """

    scores: Numbers
    products: NDArray[np.int64]
    right: Right
    absent: Right
    handicap: Numbers

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, chosen: NDArray[np.generic]) -> "Searches":
        return Searches(*(getattr(self, name)[chosen] for name in self.__slots__))

    @classmethod
    def joined(cls, parts: Sequence["Searches"]) -> "Searches":
        """Concatenate searches."""
        return cls(*(np.concatenate([getattr(p, n) for p in parts]) for n in cls.__slots__))

    @property
    def wrong(self) -> int:
        """Number of wrong hits among the ten best, over searches for present products.

        For an absent product every hit is wrong, which is no evidence that products look alike.
        """
        present, ten = ~self.absent, slice(0, TEN)
        wrong = ~self.right[present, ten] & np.isfinite(self.scores[present, ten])
        return int(wrong.sum())

    def probabilities(self, curve: Curve, prior: float) -> Numbers:
        """Probability that each hit is right (T, C): the share of its product; 0 without a hit."""
        likely = np.zeros(self.scores.shape)
        counts = np.isfinite(self.scores).sum(axis=1)
        for row, count in enumerate(counts.tolist()):
            products = self.products[row, :count]
            shares = curve.shares(self.scores[row, :count], products, count, prior)
            _, product = np.unique(products, return_inverse=True)
            likely[row, :count] = np.bincount(product, shares)[product] if count else 0.0
        return likely

    def error(self, curve: Curve, prior: float) -> tuple[float, float]:
        """The expected calibration error of the best hit, and that of the ten best hits."""
        likely, found = self.probabilities(curve, prior), np.isfinite(self.scores)
        best, ten = (slice(None), slice(0, 1)), (slice(None), slice(0, TEN))
        first, all_ten = (
            calibration_error(likely[part][found[part]], self.right[part][found[part]])
            for part in (best, ten)
        )
        return first, all_ten


def fit_curve(searches: Searches) -> Curve:
    """Fit a curve by maximum likelihood, with Newton's method.

    The first step fits the shares of present products, the second step the absence of a product.
    The second step gives absent and present products equal weight.

    Raises: CalibrationError with the reason, if there are too few searches or a higher score does
        not make a hit more likely right.
    """
    present = ~searches.absent
    findable = int((searches.right.any(axis=1) & present).sum())
    if searches.wrong < MIN_WRONG or findable < MIN_SEARCHES:
        cure = "Add products that look alike, or label harder photos as a golden set"
        if findable < MIN_SEARCHES:
            cure = "Add products, or more images of each"
        raise CalibrationError(
            f"{len(searches):,} searches gave {findable:,} right answers and {searches.wrong:,} "
            f"wrong hits among the ten best; at least {MIN_SEARCHES} and {MIN_WRONG} are needed. "
            f"{cure}"
        )
    is_used = searches.absent | searches.right.any(axis=1) | np.isfinite(searches.scores[:, -1])
    used = searches[is_used]
    lowest = np.where(np.isfinite(used.scores), used.scores, np.inf).min(axis=1)
    features, possible, outcome = _present(used, lowest)
    offsets = possible.copy()
    offsets[:, :-1] -= np.where(used.right, used.handicap[:, None], 0.0)
    there = ~used.absent
    share = np.full(there.sum(), 1 / max(len(used), 1))
    found = _most_likely(
        features[there], offsets[there], outcome[there], share, np.array([20.0, 0.0, 0.0])
    )
    if not 0 < found[0] < _STEEPEST:
        raise CalibrationError(
            "A higher score does not make a hit more likely right. Train the model longer, or on "
            "images that are more similar to these"
        )
    # The second step: the outcomes are "present", as for a photo that is not in the gallery, and
    # "absent".
    logits = features @ found + possible
    top = logits.max(axis=1)
    present = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    is_absent = np.stack([there, used.absent], axis=1)
    weights = is_absent @ (0.5 / np.maximum(is_absent.sum(axis=0), 1))
    signs = np.stack([np.ones(len(used)), used.scores[:, 0], lowest], axis=1)
    absence = _most_likely(
        np.stack([np.zeros_like(signs), signs], axis=1),
        np.stack([present, np.zeros(len(used))], axis=1),
        is_absent,
        weights,
        np.array([found[0] * float(np.median(used.scores[:, 0])), 0.0, 0.0]),
    )
    return Curve(**dict(zip(Curve.model_fields, [*found.tolist(), *absence.tolist()], strict=True)))


def _present(searches: Searches, lowest: Numbers) -> tuple[Numbers, Numbers, Right]:
    """The outcomes if the product is present: each found product, then "below the candidates".

    Returns features (T, C + 1, 3), offsets (T, C + 1), which are -inf for an impossible outcome,
    and the outcomes that occurred (T, C + 1). `lowest` (T,) are the scores of the last candidates.
    """
    is_hit = np.isfinite(searches.scores)
    same = searches.products[:, :, None] == searches.products[:, None]
    same &= is_hit[:, :, None] & is_hit[:, None]  # (T, C, C): two hits of one product
    is_best = is_hit & ~np.tril(same, -1).any(axis=2)
    hits = np.where(is_best, same.sum(axis=2), 1)
    products = np.stack(
        [np.where(is_best, searches.scores, 0.0), np.log(hits), np.zeros(hits.shape)], axis=2
    )
    below = np.stack([lowest, np.zeros(len(lowest)), np.ones(len(lowest))], axis=1)
    features = np.concatenate([products, below[:, None]], axis=1)
    is_possible = np.append(is_best, is_hit[:, -1:], axis=1)
    right = searches.right & is_best
    outcome = np.append(right, ~right.any(axis=1, keepdims=True), axis=1)
    return features, np.where(is_possible, 0.0, -np.inf), outcome


def _shares(logits: Numbers) -> Numbers:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: Numbers = weights / weights.sum(axis=1, keepdims=True)
    return shares


def _most_likely(
    features: Numbers, offsets: Numbers, outcome: Right, weights: Numbers, start: Numbers
) -> Numbers:
    """The parameters (F,) with which a conditional logit makes the outcomes most likely.

    If several outcomes of a search occurred, their probabilities are added. The Hessian of the
    denominator bounds the full Hessian, so each step increases the likelihood.

    Args:
        features: (T, J, F) of J possible outcomes per search.
        offsets: (T, J); -inf for an impossible outcome.
        outcome: (T, J); true for the outcomes that occurred.
        weights: (T,) of the searches.
    """
    masked = np.where(outcome, 0.0, -np.inf)

    def likelihood(theta: Numbers) -> tuple[float, Numbers, Numbers]:
        logits = features @ theta + offsets
        true = logits + masked
        top, top_true = logits.max(axis=1), true.max(axis=1)
        total = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
        right = top_true + np.log(np.exp(true - top_true[:, None]).sum(axis=1))
        value = weights @ (right - total) - _RIDGE * (theta @ theta)
        return float(value), _shares(logits), _shares(true)

    theta, (value, shares, true) = start, likelihood(start)
    for _ in range(_STEPS):
        mean = np.einsum("tj,tjf->tf", shares, features)
        slope = np.einsum("t,tj,tjf->f", weights, true - shares, features) - 2 * _RIDGE * theta
        spread = np.einsum("t,tj,tjf,tjg->fg", weights, shares, features, features, optimize=True)
        spread -= np.einsum("t,tf,tg->fg", weights, mean, mean)
        step = np.linalg.solve(spread + 2 * _RIDGE * np.eye(len(theta)), slope)
        for _ in range(30):
            better = likelihood(theta + step)
            if better[0] >= value:
                break
            step = step / 2
        else:
            break
        gained = better[0] - value
        theta, (value, shares, true) = theta + step, better
        if gained < 1e-9:
            break
    return theta


def calibration_error(probabilities: Numbers, right: Right) -> float:
    """Expected calibration error: mean |probability - share of right hits| over 15 equal bins."""
    if not len(right):
        return 0.0
    order = np.argsort(probabilities, kind="stable")
    gaps = [
        abs(probabilities[part].mean() - right[part].mean()) * len(part)
        for part in np.array_split(order, _BINS)
        if len(part)
    ]
    return float(sum(gaps) / len(order))


class Threshold(BaseModel):
    """Minimum scores for a given rate of false matches; accept a hit if `score >=` the threshold.

    Attributes:
        false_matches: the rate, between 0 and 1.
        pair_score: this share of all pairs of images of different classes reaches it (the false
            match rate of a one-to-one comparison).
        search_score: this share of the searches for an absent class has a hit that reaches it (the
            rate of a one-to-many search). It holds for galleries of about `gallery_images` images;
            larger galleries need a higher score.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    false_matches: float = Field(gt=0, lt=1)
    pair_score: float
    search_score: float


class ViewsCurve(BaseModel):
    """A curve for galleries with about `products` products and `views` images of each.

    `wrong_hits` is the number of wrong hits among the ten best of the fitted searches.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    views: int = Field(ge=1)
    products: int = Field(ge=1)
    wrong_hits: int = Field(ge=MIN_WRONG)
    curve: Curve


FEWEST, MOST = 0.25, 2.0
"""Range in which a curve is used, as the number of products relative to those it was fitted on."""

NEAREST = 1.5
"""A curve is used if the number of images per product differs by at most this factor."""


class Calibration(BaseModel):
    """The meaning of scores on held-out images: thresholds, and a curve per number of views.

    Attributes:
        split: the split of the held-out images.
        gallery_images, classes: number of images and of their classes, none of them trained on.
        negative_pairs: number of pairs of different classes.
    """

    # Bundles of earlier versions contain other keys, which their ids cover.
    model_config = ConfigDict(frozen=True, extra="allow")

    thresholds: tuple[Threshold, ...]
    split: Literal["validation", "test"]
    gallery_images: int = Field(ge=1)
    queries: int = Field(ge=1)
    negative_pairs: int = Field(ge=1)
    classes: int | None = Field(default=None, ge=2, exclude_if=lambda classes: classes is None)
    curves: tuple[ViewsCurve, ...] = Field(default=(), exclude_if=lambda curves: not curves)

    def curve_for(self, products: int, views: float) -> Curve:
        """The curve for a gallery of `products` products with `views` images each, on average.

        Raises: CalibrationError with the reason, if no curve was fitted on similar galleries.
        """
        if not self.curves:
            raise CalibrationError("The bundle has no curve. Export the model again")
        near = min(self.curves, key=lambda one: abs(log(one.views / max(views, 1.0))))
        if not near.views / NEAREST <= max(views, 1.0) <= near.views * NEAREST:
            fitted = ", ".join(str(one.views) for one in self.curves)
            raise CalibrationError(
                f"The gallery has {views:.1f} images per product; the curves of the bundle are "
                f"for {fitted}. Label a golden set"
            )
        if not FEWEST * near.products <= products <= MOST * near.products:
            raise CalibrationError(
                f"The gallery has {products:,} products; the curve of the bundle is valid for "
                f"{FEWEST * near.products:.0f} to {MOST * near.products:.0f}. Label a golden set"
            )
        return near.curve
