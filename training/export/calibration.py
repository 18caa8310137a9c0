"""What a score is worth: fitted on held-out images, stored in the bundle.

Shapes: N images, D dimensions, q queries, R ranks, P pairs of a query and what was found for it.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from embedder.calibration import (
    CANDIDATES,
    Calibration,
    Searches,
    Threshold,
    ViewsCurve,
    fit_curve,
)
from embedder.errors import CalibrationError
from embedder.manifest import HeldOutSplit
from embedder.types import Embeddings

FALSE_MATCHES = (0.01, 0.05, 0.10)
NEIGHBOURS = 10
"""The best hits: those that a page of results begins with."""
MIN_CLASSES = 16
"""With fewer held-out classes a curve is as much about them as about the model: docs/methods.md."""
VIEWS = (1, 2, 4, 8, 16)
"""Images of a product in the galleries that a curve is fitted on."""
MIN_AREA = 0.52
"""The lower end of the interval of both areas under the ROC curve has to be above it."""
MAX_QUERIES = 5_000
MAX_PAIRS = 200_000
BLOCK = 1 << 22
"""Scores at a time."""

_PARTS = (1, 2, 4)  # galleries of all classes, of a half and of a quarter
_ASKING = 10  # images of a class that ask, so a few large classes do not decide
_RANKS = 40
_ABOVE = 1e-6  # more than the rounding of a cosine in float32
_NORMAL_95 = 1.959964

Labels = NDArray[np.int64]
Scores = NDArray[np.float32]
Right = NDArray[np.bool_]
Numbers = NDArray[np.float64]


def fit_calibration(
    embeddings: Embeddings, labels: Labels, split: HeldOutSplit, seed: int = 0
) -> Calibration:
    r"""Fit the curves that `embedder.calibration.Curve` writes out, and the thresholds.

    **Reading**: a curve is about galleries with one number of images for each product. One is
    fitted for each of `VIEWS`, on galleries that hold so many images of each class, of all classes,
    a half and a quarter of them. The other images ask twice: as they are, and with their class left
    out of the gallery. A number of views is left out where fewer than `MIN_CLASSES` classes have
    one image more, or `fit_curve` refuses.

    **Reading**: "false matches" has two meanings and both are stored. `pair_score` is that of
    biometrics, the share of all pairs of different classes that score as much. `search_score` is
    the share of searches without a right answer whose best hit scores as much: each image asks
    among the images of all other classes.

    Of more images or pairs, 5,000 queries and 200,000 pairs are drawn. Memory is bounded by blocks.

    Args:
        embeddings, labels: (N, D), unit norm, and (N,), of images that were not trained on.
        split: where they come from.
        seed: of the drawn queries, galleries and pairs.

    Raises: CalibrationError with the reason if there is nothing to fit, there are fewer than
        `MIN_CLASSES` classes, no curve can be fitted, or the scores do not separate: an area under
        the ROC curve, over all pairs or among the 10 best hits, whose interval reaches down to
        `MIN_AREA`.

    References:
        ISO/IEC 19795-1: false match rate, false positive identification rate
    """
    count, rng = len(labels), np.random.default_rng(seed)
    names, sizes = np.unique(labels, return_counts=True)
    usable = int((sizes > 1).sum())
    if usable < MIN_CLASSES:
        of = f"{usable} of {len(names)} classes have two images or more"
        raise _refusal(count, f"{of}, and at least {MIN_CLASSES} are needed")
    everything = np.arange(count)
    queries = some_queries(labels, everything, rng, MAX_QUERIES)
    hits = search(embeddings, labels, queries, everything)
    negatives = wrong_pairs(embeddings, labels, MAX_PAIRS, rng)
    overall, among_best = _areas(_pairs_of(hits, count, labels[queries]))
    thresholds = [
        Threshold(
            false_matches=rate,
            pair_score=least_score(negatives, rate),
            search_score=least_score(hits.best_wrong, rate),
        )
        for rate in FALSE_MATCHES
    ]
    return Calibration(
        thresholds=tuple(thresholds),
        split=split,
        gallery_images=count,
        queries=len(queries),
        negative_pairs=len(negatives),
        classes=len(names),
        auc=overall.value,
        auc_of_hits=None if among_best is None else among_best.value,
        curves=_curves(embeddings, labels, rng),
    )


def _refusal(images: int, reason: str) -> CalibrationError:
    return CalibrationError(
        f"Scores cannot be calibrated on {images:,} held-out images: {reason}. "
        "Hold out more classes with more images."
    )


# The curves


def _curves(
    embeddings: Embeddings, labels: Labels, rng: np.random.Generator
) -> tuple[ViewsCurve, ...]:
    """One for each number of views that can be fitted. Raises: CalibrationError without any."""
    names, sizes = np.unique(labels, return_counts=True)
    fitted, reason = [], ""
    for views in VIEWS:
        usable = names[sizes > views]
        if len(usable) < MIN_CLASSES:
            break
        asked = [
            searches
            for part in _PARTS
            for searches in _asked(
                embeddings, labels, rng.permutation(usable)[: len(usable) // part], views, rng
            )
        ]
        searches = Searches.joined(asked)
        try:
            curve = fit_curve(searches)
        except CalibrationError as error:
            reason = f"{error} ({views} images of each class)"
            continue
        fitted.append(
            ViewsCurve(views=views, products=len(usable), wrong_hits=searches.wrong, curve=curve)
        )
    if not fitted:
        raise _refusal(len(labels), reason)
    return tuple(fitted)


def _asked(
    embeddings: Embeddings, labels: Labels, names: Labels, views: int, rng: np.random.Generator
) -> tuple[Searches, Searches]:
    """Searches in a gallery of `views` images of each of these classes, by other images of them:
    as they are, and with their class left out.
    """
    shuffled = [rng.permutation(np.flatnonzero(labels == name)) for name in names]
    gallery = np.concatenate([images[:views] for images in shuffled])
    queries = np.concatenate([images[views : views + _ASKING] for images in shuffled])
    if len(queries) > MAX_QUERIES:
        queries = rng.choice(queries, MAX_QUERIES, replace=False)
    return candidates_of(embeddings, labels, queries, gallery)


def candidates_of(
    embeddings: Embeddings, labels: Labels, queries: Labels, gallery: Labels
) -> tuple[Searches, Searches]:
    """The candidates of each query: as they are, and with the query's class left out.

    `queries` (q,) and `gallery` are numbers of images, and none is in both.
    """
    parts: tuple[list[Searches], list[Searches]] = ([], [])
    rows = max(1, BLOCK // max(len(gallery), 1))
    width = min(CANDIDATES, len(gallery))
    for start in range(0, len(queries), rows):
        some = queries[start : start + rows]
        found = (embeddings[some] @ embeddings[gallery].T).astype(np.float64)
        same = labels[some, None] == labels[gallery]
        for is_absent, of_kind in enumerate(parts):
            scores = np.where(same, -np.inf, found) if is_absent else found
            order = np.argsort(-scores, axis=1, kind="stable")[:, :width]
            best = np.full((len(some), CANDIDATES), -np.inf)
            best[:, :width] = np.take_along_axis(scores, order, axis=1)
            products = np.full(best.shape, -1, np.int64)
            products[:, :width] = labels[gallery][order]
            right = (products == labels[some, None]) & np.isfinite(best)
            absent = np.full(len(some), bool(is_absent))
            of_kind.append(Searches(best, products, right, absent, np.zeros(len(some))))
    return Searches.joined(parts[0]), Searches.joined(parts[1])


# What searches find


class Hits(NamedTuple):
    """What searches for some queries find at some ranks, of all ranks.

    `scores` and `right` (q, R), `ranks` (R,) from 1 on without a gap up to 10, then ever further
    apart; `best_wrong` (q,) is the highest score of an item of another class, -inf without any.
    """

    scores: Scores
    right: Right
    ranks: Labels
    best_wrong: Scores


def search(embeddings: Embeddings, labels: Labels, queries: Labels, gallery: Labels) -> Hits:
    """Each query among the others of `gallery`; both are numbers of images, the one in the other.

    An image is left out of its own search by its number.
    """
    further = np.geomspace(1, max(len(gallery) - 1, 1), _RANKS).round().astype(np.int64)
    ranks = np.unique([*range(1, min(NEIGHBOURS, len(gallery) - 1) + 1), *further])
    rows = max(1, BLOCK // max(len(gallery), 1))
    scores, right, best_wrong = [], [], []
    for start in range(0, len(queries), rows):
        some = queries[start : start + rows]
        found = embeddings[some] @ embeddings[gallery].T  # (q, N)
        found[some[:, None] == gallery] = -np.inf
        same = labels[some, None] == labels[gallery]
        best_wrong.append(np.where(same, -np.inf, found).max(axis=1).astype(np.float32))
        order = np.argsort(-found, axis=1)[:, ranks - 1]
        scores.append(np.take_along_axis(found, order, axis=1))
        right.append(np.take_along_axis(same, order, axis=1))
    return Hits(np.concatenate(scores), np.concatenate(right), ranks, np.concatenate(best_wrong))


def some_queries(labels: Labels, gallery: Labels, rng: np.random.Generator, limit: int) -> Labels:
    """Images of `gallery` with another one of their class there; of many, `limit` at random."""
    _, place, counts = np.unique(labels[gallery], return_inverse=True, return_counts=True)
    findable = gallery[counts[place] > 1]
    if len(findable) <= limit:
        return findable
    return np.sort(rng.choice(findable, limit, replace=False))


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
    scores = np.empty(len(first), np.float32)
    rows = max(1, BLOCK // embeddings.shape[1])
    for start in range(0, len(first), rows):
        some = slice(start, start + rows)
        one, other = embeddings[first[some]], embeddings[second[some]]
        scores[some] = np.einsum("nd,nd->n", one, other)
    return scores


def _pairs_of(hits: Hits, items: int, classes: Labels) -> pd.DataFrame:
    """A row for each hit, of queries of `classes` (q,) in a gallery of so many `items`.

    `gaps`: how many ranks a pair stands for, itself and those up to the next one in the sample.
    """
    columns = {
        "scores": hits.scores,
        "right": hits.right,
        "ranks": hits.ranks,
        "gaps": np.diff(np.append(hits.ranks, items)),
        "items": np.array(items),
        "classes": classes[:, None],
    }
    shape = hits.scores.shape
    return pd.DataFrame({k: np.broadcast_to(v, shape).ravel() for k, v in columns.items()})


def least_score(wrong: Scores, rate: float) -> float:
    """A score that at most a share `rate` of the `wrong` scores reaches, the least to 1e-6."""
    allowed = int(np.floor(rate * len(wrong) + 1e-9))
    return float(np.sort(wrong)[len(wrong) - 1 - allowed]) + _ABOVE


# Whether scores tell right pairs from wrong ones


class Area(NamedTuple):
    """An area under a ROC curve, 0.5 for chance, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def roc_area(
    scores: NDArray[np.floating],
    right: Right,
    weights: NDArray[np.floating | np.integer],
    classes: NDArray[np.integer],
) -> Area:
    r"""The weighted probability that a right pair has a higher score than a wrong one; ties half.

    The images of a class are alike, so the interval is that of classes drawn at random, and not of
    pairs: with :math:`V_i` the share of pairs of the other kind that pair i beats,

    .. math:: \operatorname{Var}(A) = \frac{C}{C-1} \sum_c \Bigl(
        \sum_{i \in c, +} \tfrac{w_i}{W_+} (V_i - A) + \sum_{j \in c, -} \tfrac{w_j}{W_-} (V_j - A)
        \Bigr)^2

    Args:
        scores, right, weights, classes: (P,), each pair with the class of its query; of at least
            two classes, and with pairs of both kinds.

    References:
        Nonparametric analysis of clustered ROC curve data (Obuchowski 1997)
    """
    s, w = scores.astype(np.float64), weights.astype(np.float64)
    beaten = np.empty(len(s))
    beaten[right] = _share_below(s[right], s[~right], w[~right])
    beaten[~right] = 1 - _share_below(s[~right], s[right], w[right])
    part = np.where(right, w / w[right].sum(), w / w[~right].sum())
    area = min(float((part[right] * beaten[right]).sum()), 1.0)
    _, cluster = np.unique(classes, return_inverse=True)
    moved = np.bincount(cluster, weights=part * (beaten - area))
    doubt = _NORMAL_95 * float(np.sqrt(len(moved) / max(len(moved) - 1, 1) * (moved**2).sum()))
    return Area(area, area - doubt, area + doubt)


def _share_below(scores: Numbers, others: Numbers, weights: Numbers) -> Numbers:
    """For each score, the weight of the others below it and half of those beside it, over all."""
    order = np.argsort(others, kind="stable")
    ranked = others[order]
    total = np.concatenate(([0.0], np.cumsum(weights[order])))
    below = total[np.searchsorted(ranked, scores, "left")]
    upto = total[np.searchsorted(ranked, scores, "right")]
    share: Numbers = 0.5 * (below + upto) / total[-1]
    return share


def _areas(pairs: pd.DataFrame) -> tuple[Area, Area | None]:
    """Over all pairs and among the best hits (None if these are all right), above the bound.

    Raises: CalibrationError.
    """
    images = int(pairs["items"].iloc[0])
    best = pairs[pairs.ranks <= NEIGHBOURS]
    if not best.right.any():
        raise _refusal(images, "no image is among the nearest of another one of its class")
    found: list[Area] = []
    for where, some in (("all pairs", pairs), (f"the {NEIGHBOURS} best hits", best)):
        if some.right.all():
            return found[0], None
        columns = ("scores", "right", "gaps", "classes")
        area = roc_area(*(some[name].to_numpy() for name in columns))
        if area.low <= MIN_AREA:
            raise _refusal(
                images,
                f"among {where} the area under the ROC curve is {area.value:.3f} "
                f"({area.low:.3f} to {area.high:.3f}), where 0.5 is chance, and even its lower end "
                f"has to be above {MIN_AREA}",
            )
        found.append(area)
    return found[0], found[1]
