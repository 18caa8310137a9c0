"""The laws of a curve: shares of one whole, and a fit that finds the truth."""

from collections.abc import Sequence

import numpy as np
import pytest

from kinlens.embedder.calibration import (
    CANDIDATES,
    MIN_WRONG,
    Curve,
    Searches,
    ViewsCurve,
    fit_curve,
)
from kinlens.embedder.errors import CalibrationError
from tests.embedder.bundles import CALIBRATION

CURVE = Curve(slope=30.0, hits=0.5, below=1.0, absent=12.0, absent_best=5.0, absent_last=6.0)


def naive_weights(
    curve: Curve, scores: list[float], products: list[int], prior: float
) -> tuple[dict[int, float], float, float]:
    """The formula of the docstring, term by term: of the products, "below", and "absent"."""
    weights = {}
    for product in set(products):
        own = [score for score, other in zip(scores, products, strict=True) if other == product]
        weight = len(own) ** curve.hits * np.exp(curve.slope * max(own))
        weights[product] = (1 - prior) * weight
    below = (1 - prior) * np.exp(curve.slope * scores[-1] + curve.below)
    if len(scores) < CANDIDATES:
        below = 0.0
    ends = curve.absent_best * scores[0] + curve.absent_last * scores[-1]
    return weights, below, prior * np.exp(curve.absent + ends)


def naive_shares(
    curve: Curve, scores: list[float], products: list[int], prior: float
) -> list[float]:
    some, of = scores[:CANDIDATES], products[:CANDIDATES]
    weights, below, absent = naive_weights(curve, some, of, prior)
    total = sum(weights.values()) + below + absent
    hits = [np.exp(curve.slope * score) for score in scores]
    inside = {p: sum(hit for hit, q in zip(hits, of, strict=False) if q == p) for p in weights}
    first = [weights[p] * hit / inside[p] for hit, p in zip(hits, of, strict=False)]
    beyond = zip(hits[CANDIDATES:], products[CANDIDATES:], strict=True)
    further = [0.0 if p in weights else (1 - prior) * hit for hit, p in beyond]
    fits = min(1.0, below / sum(further)) if sum(further) else 1.0
    return [hit / total for hit in first] + [fits * hit / total for hit in further]


@pytest.mark.parametrize(
    ("count", "views", "prior"),
    [(1, 1, 0.0), (7, 3, 0.1), (CANDIDATES, 50, 0.9), (2 * CANDIDATES, 3, 0.1)],
)
def test_shares_are_those_of_the_formula(count: int, views: int, prior: float) -> None:
    rng = np.random.default_rng(count)
    scores = np.sort(rng.uniform(0.2, 0.9, count))[::-1]
    products = rng.integers(0, max(1, count // views), count)
    shares = CURVE.shares(scores, products, min(count, CANDIDATES), prior)
    expected = naive_shares(CURVE, scores.tolist(), products.tolist(), prior)
    np.testing.assert_allclose(shares, expected, rtol=1e-9)
    assert shares.sum() <= 1 + 1e-12


def test_extreme_scores_do_not_overflow() -> None:
    steep = CURVE.model_copy(update={"slope": 9000.0})
    shares = steep.shares(np.array([1.0, 0.5, -1.0]), np.arange(3), 3, 0.0)
    assert shares.tolist() == [1.0, 0.0, 0.0]
    assert len(CURVE.shares(np.zeros(0), np.zeros(0, int), 0, 0.1)) == 0


# Fitting


def drawn(curve: Curve, count: int, seed: int = 0, sizes: Sequence[int] = (1,)) -> Searches:
    """Searches whose outcome is drawn from the curve itself, half of them of absent products.

    `sizes` are the hits that one product has after the other, again and again.
    """
    rng = np.random.default_rng(seed)
    scores = np.sort(rng.beta(4, 3, (count, CANDIDATES)), axis=1)[:, ::-1]
    repeated = np.repeat(np.arange(CANDIDATES), np.resize(sizes, CANDIDATES))[:CANDIDATES]
    products = rng.permuted(np.tile(repeated, (count, 1)), axis=1)
    right = np.zeros((count, CANDIDATES), bool)
    absent = np.zeros(count, bool)
    for row in range(count):
        of = products[row].tolist()
        weights, *others = naive_weights(curve, scores[row].tolist(), of, 0.5)
        outcomes = np.array([*weights.values(), *others])
        drawn = rng.choice(len(outcomes), p=outcomes / outcomes.sum())
        absent[row] = drawn == len(weights) + 1
        if drawn < len(weights):
            right[row] = products[row] == [*weights][drawn]
    return Searches(scores, products, right, absent, np.zeros(count))


def test_the_fit_is_where_the_likelihood_is_highest() -> None:
    searches = drawn(CURVE, 2000)
    found = fit_curve(searches)

    def likelihood(curve: Curve) -> tuple[float, float]:
        """By the formula: of what was found where something is, and of whether something is."""
        found, there = [], {True: [], False: []}
        for row in range(len(searches)):
            of = searches.products[row].tolist()
            weights, below, gone = naive_weights(curve, searches.scores[row].tolist(), of, 0.5)
            present = sum(weights.values()) + below
            if searches.absent[row]:
                there[True].append(np.log(gone / (present + gone)))
                continue
            right = searches.right[row]
            likely = weights[searches.products[row][right][0]] if right.any() else below
            found.append(np.log(likely / present))
            there[False].append(np.log(present / (present + gone)))
        return float(np.mean(found)), float(np.mean(there[True]) + np.mean(there[False]))

    best = likelihood(found)
    for number, names in enumerate(
        (("slope", "hits", "below"), ("absent", "absent_best", "absent_last"))
    ):
        for name in names:
            for step in (-0.2, 0.2):
                other = found.model_copy(update={name: getattr(found, name) + step})
                assert likelihood(other)[number] < best[number] + 1e-6


@pytest.mark.parametrize(
    ("count", "wrong", "reason"),
    [(20, False, "20 searches gave"), (60, True, f"{MIN_WRONG} are needed")],
)
def test_too_little_to_fit_is_refused(count: int, wrong: bool, reason: str) -> None:
    scores = np.full((count, CANDIDATES), -np.inf)
    scores[:, 0] = 0.5
    right = np.isfinite(scores)
    searches = Searches(
        scores, np.zeros(scores.shape, np.int64), right, np.zeros(count, bool), np.zeros(count)
    )
    assert searches.wrong == 0
    assert wrong is not (count < 50)
    with pytest.raises(CalibrationError, match=reason):
        fit_curve(searches)


def test_a_score_that_says_nothing_is_refused() -> None:
    """The right hit is always the last one: a higher score makes a hit less likely right."""
    rng = np.random.default_rng(0)
    scores = np.sort(rng.uniform(0, 1, (400, CANDIDATES)), axis=1)[:, ::-1]
    right = np.zeros(scores.shape, bool)
    right[:, -1] = True
    products = np.tile(np.arange(CANDIDATES), (400, 1))
    with pytest.raises(CalibrationError, match="does not make a hit more likely"):
        fit_curve(Searches(scores, products, right, np.zeros(400, bool), np.zeros(400)))


@pytest.mark.parametrize("count", [CANDIDATES, 6, 0])
def test_hits_of_one_product_have_one_probability(count: int) -> None:
    """In a gallery of `count` items, if these are few."""
    searches = drawn(CURVE, 50, sizes=(4,))
    searches.scores[:, count:] = -np.inf
    likely = searches.probabilities(CURVE, 0.2)
    assert not likely[:, count:].any()
    for row in range(50 if count else 0):
        products = searches.products[row, :count].tolist()
        scores = searches.scores[row, :count].tolist()
        weights, *others = naive_weights(CURVE, scores, products, 0.2)
        total = sum([*weights.values(), *others])
        np.testing.assert_allclose(likely[row, :count], [weights[x] / total for x in products])


# The curves of a bundle


def views_curve(views: int) -> ViewsCurve:
    """For that many views; its number `below` is that number, so that it can be recognised."""
    curve = CURVE.model_copy(update={"below": float(views)})
    return ViewsCurve(views=views, products=100 * views, wrong_hits=MIN_WRONG, curve=curve)


SEVERAL = CALIBRATION.model_copy(update={"curves": tuple(map(views_curve, (1, 2, 4)))})


@pytest.mark.parametrize(
    ("products", "views", "expected"),
    [(100, 1.0, 1), (100, 0.7, 1), (300, 2.5, 2), (400, 3.5, 4), (800, 6.0, 4)],
)
def test_the_curve_of_the_nearest_views_is_used(products: int, views: float, expected: int) -> None:
    assert SEVERAL.curve_for(products, views).below == expected


@pytest.mark.parametrize(
    ("products", "views", "reason"),
    [
        (100, 7.0, "7.0 images per product; the curves of the bundle are for 1, 2, 4"),
        (201, 1.0, "201 products; the curve of the bundle is valid for 25 to 200"),
        (24, 1.0, "24 products"),
    ],
)
def test_a_gallery_outside_the_fit_has_no_curve(products: int, views: float, reason: str) -> None:
    with pytest.raises(CalibrationError, match=reason):
        SEVERAL.curve_for(products, views)
