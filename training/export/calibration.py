"""What a score is worth: fitted on held-out images, stored in the bundle.

Shapes: N images, D dimensions, P pairs of a query and what a search for it found.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from embedder.calibration import Calibration, Threshold, log_tail
from embedder.errors import EvaluationError
from embedder.manifest import HeldOutSplit
from embedder.types import Embeddings
from training.export.calibration_pairs import (
    NEIGHBOURS,
    Pairs,
    joined,
    pairs_of,
    search,
    search_parts,
    some_queries,
)
from training.export.separation import Area, roc_area

FALSE_MATCHES = (0.01, 0.05, 0.10)
MIN_CLASSES = 16
"""With fewer held-out classes a curve is as much about them as about the model: docs/methods.md."""
MIN_AREA = 0.52
"""The lower end of the interval of both areas under the ROC curve has to be above it."""
_MOST = (np.inf, np.inf, np.inf, 1.0)  # of a, c, e and d
_FLAT = 1e-3  # a slope at its bound: between scores of -1 and 1 the log-odds stay within 0.002
_MAX_PAIRS = 200_000
_PAIRS_AT_A_TIME = 1 << 14
_BINS = 15
_ABOVE = 1e-6  # more than the rounding of a cosine in float32

Labels = NDArray[np.int64]
Scores = NDArray[np.float32]
Right = NDArray[np.bool_]
Numbers = NDArray[np.float64]


class Curve(NamedTuple):
    """The numbers of `Calibration.probability`; `size_slope` is about `items`."""

    slope: float
    rank_slope: float
    tail_slope: float
    size_slope: float
    intercept: float
    items: int


def fit_calibration(
    embeddings: Embeddings, labels: Labels, split: HeldOutSplit, seed: int = 0
) -> Calibration:
    r"""Fit score, rank, size of the gallery -> probability of the same class; and thresholds.

    .. math:: P(\text{same class} \mid s, r, N) =
        \frac{1}{1 + e^{-(a s + b - c \ln r - e \ln \frac{r + 20}{21} - d \ln (N / N_0))}},
        \quad a, c, e \ge 0, \; 0 \le d \le 1

    by weighted maximum likelihood in float64, with Platt's targets in place of 0 and 1, so that
    separable scores give a steep curve and not an infinite one.

    **Reading**: each image asks among all others, and pairs of *all* ranks count, a sample of them
    in even steps of the logarithm, weighted by :math:`(r + 10)^{-2}` times the ranks that each
    stands for, so that half of the weight is on the first page of ten. Why the rank: the best of N
    scores is far more often right than a pair drawn at random with the same score, since queries
    differ in how near everything is to them. A curve of the score alone, over all pairs, said 35
    points too little of the best hit (of 0.86) for the trunk alone on groceries; one over the 10
    best was 14 points too low at rank 1, and flat for weak models.
    Two terms of the rank, since the odds of a good model fall slowly until the right ones run out.

    **Reading**: a gallery of N items with r right ones has prior odds of r / (N - r), so that b
    would fall by ln N for products that are photographed as often (d = 1). But the rank says some
    of that already, so d is fitted too: on searches among all classes, each half and each quarter.
    It was 0.5 to 1; of few classes it is ill determined, hence its bound. The served gallery
    brings its own N.

    The gallery holds the query's class here; where it may not, the probability is too high by the
    odds of that, and `search_score` is the better guard.

    **Reading**: "false matches" has two meanings and both are stored. `pair_score` is that of
    biometrics, the share of all pairs of different classes that score as much. `search_score` is
    the share of searches without a right answer whose best hit scores as much: each image asks
    among the images of all other classes.

    Of more than 5,000 images so many are drawn as queries, of more than 200,000 pairs so
    many. Memory is bounded by blocks, whatever N.

    Args:
        embeddings: (N, D), unit norm, of images that were not trained on.
        labels: (N,).
        split: where they come from.
        seed: of the drawn queries, parts and pairs.

    Raises: EvaluationError with the reason if there is nothing to fit, there are fewer than
        `MIN_CLASSES` classes, or the scores do not separate: an area under the ROC curve, over all
        pairs or among the 10 best hits, whose interval reaches down to `MIN_AREA`, or a slope at
        its bound.

    References:
        Probabilistic outputs for support vector machines (Platt 1999), section 2.2
        ISO/IEC 19795-1: false match rate, false positive identification rate
    """
    rng = np.random.default_rng(seed)
    _require_classes(labels)
    everything = np.arange(len(labels))
    queries = some_queries(labels, everything, rng)
    hits = search(embeddings, labels, queries, everything)
    negatives = wrong_pairs(embeddings, labels, _MAX_PAIRS, rng)
    whole = pairs_of(hits, len(labels), labels[queries])
    areas = _areas(whole)
    pairs = joined([whole, *search_parts(embeddings, labels, rng)])
    curve = fit_curve(pairs, len(labels))
    if curve.slope <= _FLAT:
        raise _refusal(len(labels), "a higher score does not make a hit more likely right")
    best = hits.right[:, :NEIGHBOURS]
    return Calibration(
        slope=curve.slope,
        intercept=curve.intercept,
        rank_slope=curve.rank_slope,
        tail_slope=curve.tail_slope,
        size_slope=curve.size_slope,
        thresholds=tuple(
            Threshold(
                false_matches=rate,
                pair_score=least_score(negatives, rate),
                search_score=least_score(hits.best_wrong, rate),
            )
            for rate in FALSE_MATCHES
        ),
        split=split,
        gallery_images=len(labels),
        queries=len(queries),
        neighbours=best.shape[1],
        positive_hits=int(best.sum()),
        negative_hits=int((~best).sum()),
        negative_pairs=len(negatives),
        calibration_error=_crossed_error(pairs, len(labels), rng),
        classes=len(np.unique(labels)),
        auc=areas[0].value,
        auc_of_hits=None if areas[1] is None else areas[1].value,
    )


def wrong_pairs(
    embeddings: Embeddings, labels: Labels, limit: int, rng: np.random.Generator
) -> Scores:
    """Scores of pairs of different classes: of all, or of those among `limit` pairs at random."""
    count = len(labels)
    if count * (count - 1) // 2 <= limit:
        first, second = np.triu_indices(count, 1)
    else:
        first = rng.integers(0, count, limit)
        second = (first + rng.integers(1, count, limit)) % count
    wrong = labels[first] != labels[second]
    first, second = first[wrong], second[wrong]
    chunks = [np.empty(0, np.float32)]
    for start in range(0, len(first), _PAIRS_AT_A_TIME):
        chosen = slice(start, start + _PAIRS_AT_A_TIME)
        one, other = embeddings[first[chosen]], embeddings[second[chosen]]
        chunks.append(np.einsum("nd,nd->n", one, other))
    return np.concatenate(chunks)


def least_score(wrong: Scores, rate: float) -> float:
    """A score that at most a share `rate` of the `wrong` scores reaches, the least to 1e-6."""
    allowed = int(np.floor(rate * len(wrong) + 1e-9))
    next_one = np.partition(wrong, len(wrong) - 1 - allowed)[len(wrong) - 1 - allowed]
    return float(next_one) + _ABOVE


def fit_curve(pairs: Pairs, items: int) -> Curve:
    """The most likely curve of the pairs; its intercept is that of a gallery of so many `items`."""
    ranks = pairs.ranks.astype(np.float64)
    size = np.log(pairs.items / items)
    features = np.stack((pairs.scores, -np.log(ranks), -log_tail(pairs.ranks), -size), axis=1)
    weights = pairs.gaps / (ranks + NEIGHBOURS) ** 2
    slopes, intercept = fit_logistic(features, pairs.right, weights, _MOST)
    a, c, e, d = (float(slope) for slope in slopes)
    return Curve(a, c, e, d, intercept, items)


def fit_logistic(
    features: Numbers, right: Right, weights: Numbers, most: Sequence[float]
) -> tuple[Numbers, float]:
    """Slopes (F,) from 0 to `most`, and intercept, of the most likely logistic curve.

    Args:
        features: (P, F).
        right, weights: (P,).
    """
    positive, negative = int(right.sum()), int((~right).sum())
    target = np.where(right, (positive + 1) / (positive + 2), 1 / (negative + 2))
    w = weights / weights.sum()
    mean = w @ features
    spread = np.sqrt(w @ (features - mean) ** 2)
    spread[spread == 0] = 1.0  # a feature that never changes gets no slope
    z = (features - mean) / spread

    def loss(theta: Numbers) -> tuple[float, Numbers]:
        logits = z @ theta[:-1] + theta[-1]
        error = w * (0.5 * (1 + np.tanh(0.5 * logits)) - target)
        value = w @ (np.logaddexp(0, logits) - target * logits)
        return float(value), np.append(error @ z, error.sum())

    start = np.append(np.zeros(z.shape[1]), np.log((w @ right + 1e-9) / (w @ ~right + 1e-9)))
    bounds = [*((0.0, limit) for limit in most * spread), (None, None)]
    options = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 500}
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    slopes: Numbers = found.x[:-1] / spread
    return slopes, float(found.x[-1] - slopes @ mean)


def calibration_error(probabilities: Numbers, right: Right) -> float:
    """Expected calibration error: mean |probability - share of right ones| over 15 equal bins."""
    order = np.argsort(probabilities, kind="stable")
    gaps = [
        abs(probabilities[part].mean() - right[part].mean()) * len(part)
        for part in np.array_split(order, _BINS)
        if len(part)
    ]
    return float(sum(gaps) / len(order))


def _areas(pairs: Pairs) -> tuple[Area, Area | None]:
    """Over all pairs and among the best hits (None if these are all right), above the bound.

    Raises: EvaluationError.
    """
    images = int(pairs.items[0])
    best = pairs.where(pairs.ranks <= NEIGHBOURS)
    if not pairs.right.any() or not best.right.any():
        raise _refusal(images, "no image is among the nearest of another one of its class")
    overall = roc_area(pairs.scores, pairs.right, pairs.gaps, pairs.classes)
    _require_area(images, "all pairs", overall)
    if best.right.all():
        return overall, None
    among_best = roc_area(best.scores, best.right, best.gaps, best.classes)
    _require_area(images, f"the {NEIGHBOURS} best hits", among_best)
    return overall, among_best


def _require_area(images: int, where: str, area: Area) -> None:
    if area.low <= MIN_AREA:
        raise _refusal(
            images,
            f"among {where} the area under the ROC curve is {area.value:.3f} "
            f"({area.low:.3f} to {area.high:.3f}), where 0.5 is chance, and even its lower end has "
            f"to be above {MIN_AREA}",
        )


def _crossed_error(pairs: Pairs, images: int, rng: np.random.Generator) -> float | None:
    """Hits of each half of the classes judged by a curve of the other; None without wrong ones."""
    names = rng.permutation(np.unique(pairs.classes))
    inside = np.isin(pairs.classes, names[: len(names) // 2])
    shown = (pairs.ranks <= NEIGHBOURS) & (pairs.items == images)
    probabilities, right = [], []
    for fitted in (inside, ~inside):
        known, asked = pairs.where(fitted), pairs.where(shown & ~fitted)
        if known.right.all() or not known.right.any():
            return None
        probabilities.append(_probability(fit_curve(known, images), asked))
        right.append(asked.right)
    return calibration_error(np.concatenate(probabilities), np.concatenate(right))


def _probability(curve: Curve, pairs: Pairs) -> Numbers:
    logits = curve.slope * pairs.scores.astype(np.float64) + curve.intercept
    logits -= curve.rank_slope * np.log(pairs.ranks) + curve.tail_slope * log_tail(pairs.ranks)
    logits -= curve.size_slope * np.log(pairs.items / curve.items)
    probabilities: Numbers = 0.5 * (1 + np.tanh(0.5 * logits))
    return probabilities


def _require_classes(labels: Labels) -> None:
    names, counts = np.unique(labels, return_counts=True)
    usable = int((counts > 1).sum())
    if usable < MIN_CLASSES:
        of = f"{usable} of {len(names)} classes have two images or more"
        raise _refusal(len(labels), f"{of}, and at least {MIN_CLASSES} are needed")


def _refusal(images: int, reason: str) -> EvaluationError:
    return EvaluationError(
        f"Scores cannot be calibrated on {images:,} held-out images: {reason}. "
        "Hold out more classes with more images."
    )
