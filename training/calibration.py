"""What a score is worth: fitted on held-out images, stored in the bundle.

Shapes: N images, D dimensions, K neighbours.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from embedder.calibration import Calibration, Threshold
from embedder.errors import EvaluationError
from embedder.manifest import HeldOutSplit
from embedder.types import Embeddings

FALSE_MATCHES = (0.01, 0.05, 0.10)
NEIGHBOURS = 10
_MAX_QUERIES = 10_000
_MAX_PAIRS = 1_000_000
_BLOCK = 1 << 22  # scores at a time
_PAIRS_AT_A_TIME = 1 << 14
_BINS = 15
_ABOVE = 1e-6  # more than the rounding of a cosine in float32

Labels = NDArray[np.int64]
Scores = NDArray[np.float32]
Right = NDArray[np.bool_]


class Hits(NamedTuple):
    """What a search returns for some queries.

    `scores` and `right` (q, K), best first is not promised; `best_wrong` (q,) is the highest score
    of an image of another class, -inf where there is none.
    """

    scores: Scores
    right: Right
    best_wrong: Scores


def fit_calibration(
    embeddings: Embeddings, labels: Labels, split: HeldOutSplit, seed: int = 0
) -> Calibration:
    r"""Fit score -> probability of the same class, and thresholds of 1, 5 and 10 % false matches.

    .. math:: P(\text{same class} \mid s) = \frac{1}{1 + e^{-(a s + b)}}, \quad a \ge 0

    by maximum likelihood in float64, with Platt's targets in place of 0 and 1, so that separable
    scores give a steep curve and not an infinite one.

    **Reading**: "validation pairs" are those that a user will see, each image with its 10 nearest
    others. A curve fitted on pairs at random would be one of another prior: nearly all of them are
    wrong and easy. The gallery holds the query's class here; where it may not, the probability is
    too high by the odds of that, and `search_score` is the better guard.

    **Reading**: "false matches" has two meanings and both are stored. `pair_score` is that of
    biometrics, the share of all pairs of different classes that score as much. `search_score` is
    the share of searches without a right answer whose best hit scores as much: each image asks
    among the images of all other classes.

    Of more than 10,000 images so many are drawn as queries, of more than 1,000,000 pairs so many as
    pairs. Memory is bounded by blocks, whatever N.

    Args:
        embeddings: (N, D), unit norm, of images that were not trained on.
        labels: (N,).
        split: where they come from.
        seed: of the drawn queries and pairs.

    Raises: EvaluationError with the reason if there is nothing to fit.

    References:
        Probabilistic outputs for support vector machines (Platt 1999), section 2.2
        ISO/IEC 19795-1: false match rate, false positive identification rate
    """
    rng = np.random.default_rng(seed)
    queries = _some(len(embeddings), _MAX_QUERIES, rng)
    hits = search(embeddings, labels, queries, NEIGHBOURS)
    negatives = wrong_pairs(embeddings, labels, _MAX_PAIRS, rng)
    _require(hits, negatives, len(labels))
    slope, intercept = fit_logistic(hits.scores, hits.right)
    return Calibration(
        slope=slope,
        intercept=intercept,
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
        neighbours=hits.scores.shape[1],
        positive_hits=int(hits.right.sum()),
        negative_hits=int((~hits.right).sum()),
        negative_pairs=len(negatives),
        calibration_error=_crossed_error(hits, labels[queries], rng),
    )


def search(
    embeddings: Embeddings, labels: Labels, queries: NDArray[np.int64], neighbours: int
) -> Hits:
    """The nearest others of some images: the image itself is left out by its number."""
    neighbours = min(neighbours, len(labels) - 1)
    rows = max(1, _BLOCK // max(len(labels), 1))
    parts = [
        _search(embeddings, labels, queries[start : start + rows], neighbours)
        for start in range(0, len(queries), rows)
    ]
    return Hits(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _search(
    embeddings: Embeddings, labels: Labels, queries: NDArray[np.int64], neighbours: int
) -> Hits:
    scores = embeddings[queries] @ embeddings.T  # (q, N)
    scores[np.arange(len(queries)), queries] = -np.inf
    same = labels[queries, None] == labels
    nearest = np.argpartition(scores, -neighbours, axis=1)[:, len(labels) - neighbours :]
    best_wrong = np.where(same, -np.inf, scores).max(axis=1)
    found = np.take_along_axis(scores, nearest, axis=1)
    return Hits(found, np.take_along_axis(same, nearest, axis=1), best_wrong.astype(np.float32))


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


def fit_logistic(scores: Scores, right: Right) -> tuple[float, float]:
    """Slope >= 0 and intercept of the most likely logistic curve, in float64."""
    s, y = scores.ravel().astype(np.float64), right.ravel()
    positive, negative = int(y.sum()), int((~y).sum())
    target = np.where(y, (positive + 1) / (positive + 2), 1 / (negative + 2))
    mean, spread = s.mean(), s.std()
    z = (s - mean) / spread

    def loss(theta: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        logits = theta[0] * z + theta[1]
        error = 0.5 * (1 + np.tanh(0.5 * logits)) - target
        value = (np.logaddexp(0, logits) - target * logits).mean()
        return float(value), np.array([(error * z).mean(), error.mean()])

    start = np.array([0.0, np.log((positive + 1) / (negative + 1))])
    bounds = [(0.0, None), (None, None)]
    options = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 500}
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    slope = float(found.x[0] / spread)
    return slope, float(found.x[1] - slope * mean)


def calibration_error(probabilities: NDArray[np.float64], right: Right) -> float:
    """Expected calibration error: mean |probability - share of right ones| over 15 equal bins."""
    order = np.argsort(probabilities, kind="stable")
    gaps = [
        abs(probabilities[part].mean() - right[part].mean()) * len(part)
        for part in np.array_split(order, _BINS)
        if len(part)
    ]
    return float(sum(gaps) / len(order))


def _crossed_error(hits: Hits, classes: Labels, rng: np.random.Generator) -> float | None:
    """Each half of the classes judged by a curve of the other; None if a half is of one kind."""
    names = rng.permutation(np.unique(classes))
    inside = np.isin(classes, names[: len(names) // 2])
    probabilities = np.empty(hits.scores.shape)
    for fitted in (inside, ~inside):
        scores, right = hits.scores[fitted], hits.right[fitted]
        if right.all() or not right.any() or scores.std() == 0:
            return None
        slope, intercept = fit_logistic(scores, right)
        logits = slope * hits.scores[~fitted].astype(np.float64) + intercept
        probabilities[~fitted] = 0.5 * (1 + np.tanh(0.5 * logits))
    return calibration_error(probabilities.ravel(), hits.right.ravel())


def _require(hits: Hits, negatives: Scores, images: int) -> None:
    if not len(negatives):
        reason = "all are of one class, so no pair is a wrong one"
    elif not hits.right.any():
        reason = "no image is among the nearest of another one of its class"
    elif hits.right.all():
        reason = "all of the nearest images are right, so nothing tells where wrong ones begin"
    elif hits.scores.max() == hits.scores.min():
        reason = "all scores are equal"
    else:
        return
    raise EvaluationError(
        f"Scores cannot be calibrated on {images:,} held-out images: {reason}. "
        "Hold out more classes with more images."
    )


def _some(count: int, limit: int, rng: np.random.Generator) -> NDArray[np.int64]:
    if count <= limit:
        return np.arange(count)
    return np.sort(rng.choice(count, limit, replace=False))
