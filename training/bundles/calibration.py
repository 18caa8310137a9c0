"""Calibrate scores to probabilities on held-out images, for the bundle.

Shapes: N images, D dimensions, q queries, R ranks, P pairs of a query and a hit.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.calibration import (
    CANDIDATES,
    Calibration,
    Searches,
    Threshold,
    ViewsCurve,
    fit_curve,
)
from kinlens.embedder.errors import CalibrationError
from kinlens.embedder.manifest import HeldOutSplit
from kinlens.embedder.types import Embeddings

FALSE_MATCHES = (0.01, 0.05, 0.10)
NEIGHBOURS = 10
"""Number of best hits, about the first page of results."""
MIN_CLASSES = 16
"""With fewer held-out classes a curve depends as much on them as on the model."""
VIEWS = (1, 2, 4, 8, 16)
"""Images of a product in the galleries that a curve is fitted on."""
MIN_AREA = 0.52
"""The lower bound of the interval of both areas under the ROC curve must be above it."""
MAX_QUERIES = 5_000
MAX_PAIRS = 200_000
BLOCK = 1 << 22
"""Number of scores in memory at a time."""

_PARTS = (1, 2, 4)  # galleries of all classes, of a half and of a quarter
_ASKING = 10  # queries per class, so that a few large classes do not dominate
_RANKS = 40
_ABOVE = 1e-6  # more than the rounding of a cosine in float32
_RESAMPLED = 200  # bootstrap samples

Labels = NDArray[np.int64]
Scores = NDArray[np.float32]
Right = NDArray[np.bool_]
Numbers = NDArray[np.float64]


def fit_calibration(
    embeddings: Embeddings, labels: Labels, split: HeldOutSplit, seed: int = 0
) -> Calibration:
    """Fit the curves that `kinlens.embedder.calibration.Curve` writes out, and the thresholds.

    **Reading**: a curve is for galleries with one number of images per product. One curve is fitted
    for each of `VIEWS`, on galleries with that number of images of each class, of all classes, a
    half and a quarter of them. The other images are queried twice: with their class in the gallery,
    and without it. A number of views is skipped if fewer than `MIN_CLASSES` classes have one image
    more, or if `fit_curve` fails.

    **Reading**: `pair_score` is reached by a share of all pairs of different classes, as in
    biometrics, `search_score` by the best hit of a share of the searches without a right answer.

    Args:
        embeddings, labels: (N, D), unit norm, and (N,), of images that were not trained on.
        split: the part that the images come from.
        seed: of the drawn queries, galleries and pairs: at most 5,000 and 200,000.

    Raises: CalibrationError with the reason if there are no pairs, there are fewer than
        `MIN_CLASSES` classes, no curve can be fitted, or the scores do not separate: an area under
        the ROC curve, over all pairs or among the 10 best hits, whose interval reaches `MIN_AREA`.

    References:
        ISO/IEC 19795-1: false match rate, false positive identification rate
    """
    count, rng = len(labels), np.random.default_rng(seed)
    _, index, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    usable = int((sizes > 1).sum())
    if usable < MIN_CLASSES:
        of = f"{usable} of {len(sizes)} classes have two images or more"
        raise _refusal(count, f"{of}, and at least {MIN_CLASSES} are needed")
    queries = np.sort(_some(np.flatnonzero(sizes[index] > 1), rng))
    hits = search(embeddings, labels, queries)
    negatives = _wrong_pairs(embeddings, labels, rng)
    auc, auc_of_hits = _areas(hits, labels[queries], count)
    return Calibration(
        thresholds=tuple(
            Threshold(
                false_matches=rate,
                pair_score=least_score(negatives, rate),
                search_score=least_score(hits.best_wrong, rate),
            )
            for rate in FALSE_MATCHES
        ),
        split=split,
        gallery_images=count,
        queries=len(queries),
        negative_pairs=len(negatives),
        classes=len(sizes),
        auc=auc,
        auc_of_hits=auc_of_hits,
        curves=_curves(embeddings, labels, rng),
    )


def _refusal(images: int, reason: str) -> CalibrationError:
    return CalibrationError(
        f"Scores cannot be calibrated on {images:,} held-out images: {reason}. "
        "Hold out more classes with more images."
    )


def _some(queries: Labels, rng: np.random.Generator) -> Labels:
    if len(queries) <= MAX_QUERIES:
        return queries
    return rng.choice(queries, MAX_QUERIES, replace=False)


def _blocks(
    embeddings: Embeddings, labels: Labels, queries: Labels, gallery: Labels
) -> Iterator[tuple[Labels, Scores, Right]]:
    """Blocks of queries (b,), their scores in the gallery, and where the class is the same."""
    rows = max(1, BLOCK // len(gallery))
    for start in range(0, len(queries), rows):
        some = queries[start : start + rows]
        scores = embeddings[some] @ embeddings[gallery].T
        yield some, scores, labels[some, None] == labels[gallery]


# The curves


def _curves(
    embeddings: Embeddings, labels: Labels, rng: np.random.Generator
) -> tuple[ViewsCurve, ...]:
    """The curves by number of views. Raises: CalibrationError if none can be fitted."""
    names, sizes = np.unique(labels, return_counts=True)
    fitted, reason = [], ""
    for views in VIEWS:
        usable = names[sizes > views]
        if len(usable) < MIN_CLASSES:
            break
        asked: list[Searches] = []
        for part in _PARTS:
            chosen = rng.permutation(usable)[: len(usable) // part]
            shuffled = [rng.permutation(np.flatnonzero(labels == name)) for name in chosen]
            gallery = np.concatenate([images[:views] for images in shuffled])
            queries = np.concatenate([images[views : views + _ASKING] for images in shuffled])
            asked += candidates_of(embeddings, labels, _some(queries, rng), gallery)
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


def candidates_of(
    embeddings: Embeddings, labels: Labels, queries: Labels, gallery: Labels
) -> tuple[Searches, Searches]:
    """Searches by `queries` (q,), which the gallery lacks, with their class there and without."""
    parts: tuple[list[Searches], list[Searches]] = ([], [])
    width = min(CANDIDATES, len(gallery))
    for some, found, same in _blocks(embeddings, labels, queries, gallery):
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


# Search results


class Hits(NamedTuple):
    """Hits of some queries at a sample of the ranks.

    `scores` and `right` (q, R), `ranks` (R,) from 1 without gaps up to 10, then ever further apart;
    `best_wrong` (q,) is the highest score of an item of another class, -inf if there is none.
    """

    scores: Scores
    right: Right
    ranks: Labels
    best_wrong: Scores


def search(embeddings: Embeddings, labels: Labels, queries: Labels) -> Hits:
    """Search for each query, the index of an image, among all other images (at least 10)."""
    everything = np.arange(len(labels))
    further = np.geomspace(1, len(labels) - 1, _RANKS).round().astype(np.int64)
    ranks = np.unique([*range(1, NEIGHBOURS + 1), *further])
    scores, right, best_wrong = [], [], []
    for some, found, same in _blocks(embeddings, labels, queries, everything):
        found[np.arange(len(some)), some] = -np.inf  # an image does not find itself
        best_wrong.append(np.where(same, -np.inf, found).max(axis=1))
        order = np.argsort(-found, axis=1)[:, ranks - 1]
        scores.append(np.take_along_axis(found, order, axis=1))
        right.append(np.take_along_axis(same, order, axis=1))
    return Hits(np.concatenate(scores), np.concatenate(right), ranks, np.concatenate(best_wrong))


def _wrong_pairs(embeddings: Embeddings, labels: Labels, rng: np.random.Generator) -> Scores:
    """Scores of pairs of different classes: of all pairs, or of `MAX_PAIRS` at random."""
    count = len(labels)
    if count * (count - 1) // 2 <= MAX_PAIRS:
        first, second = np.triu_indices(count, 1)
    else:
        first = rng.integers(0, count, MAX_PAIRS)
        second = (first + rng.integers(1, count, MAX_PAIRS)) % count
    pairs = np.stack((first, second))[:, labels[first] != labels[second]]
    rows = max(1, BLOCK // embeddings.shape[1])
    parts = (pairs[:, start : start + rows] for start in range(0, pairs.shape[1], rows))
    return np.concatenate([np.einsum("nd,nd->n", *embeddings[part]) for part in parts])


def least_score(wrong: Scores, rate: float) -> float:
    """The lowest score, to 1e-6, that at most a share `rate` of the `wrong` scores reaches."""
    allowed = int(np.floor(rate * len(wrong) + 1e-9))
    return float(np.sort(wrong)[len(wrong) - 1 - allowed]) + _ABOVE


# Whether scores separate right pairs from wrong ones


def roc_area(
    scores: NDArray[np.floating],
    right: Right,
    weights: NDArray[np.floating | np.integer],
    classes: NDArray[np.integer],
) -> tuple[float, float]:
    """The weighted probability that a right pair scores higher than a wrong one, and the lower end
    of its 95 % interval; ties count half, and 0.5 is chance.

    The images of a class are alike, so the interval is a bootstrap over classes, not over pairs.
    All arguments broadcast to one shape; `classes` are those of the queries.
    """
    s, is_right, w, of = map(np.ravel, np.broadcast_arrays(scores, right, weights, classes))
    _, place = np.unique(s, return_inverse=True)
    names, of = np.unique(of, return_inverse=True)

    def area(times: NDArray[np.integer]) -> float:
        """The area with each class taken that many times."""
        drawn = w * times[of]
        at_right, at_wrong = (np.bincount(place, drawn * kind) for kind in (is_right, ~is_right))
        pairs = at_right.sum() * at_wrong.sum()
        return at_right @ (np.cumsum(at_wrong) - at_wrong / 2) / pairs if pairs else np.nan

    some = np.random.default_rng(0).multinomial(
        len(names), np.full(len(names), 1 / len(names)), _RESAMPLED
    )
    whole = min(area(np.ones(len(names), np.int64)), 1.0)
    return whole, float(np.nanquantile([area(times) for times in some], 0.025))


def _areas(hits: Hits, classes: Labels, images: int) -> tuple[float, float | None]:
    """Areas over all pairs and the best hits. Raises: CalibrationError if one is too small."""
    if not hits.right[:, :NEIGHBOURS].any():
        raise _refusal(images, "no image is among the nearest of another image of its class")
    # A hit represents its rank and the ranks up to the next one in the sample.
    gaps = np.diff(np.append(hits.ranks, images))
    found: list[float] = []
    for where, best in (("all pairs", len(gaps)), (f"the {NEIGHBOURS} best hits", NEIGHBOURS)):
        scores, right = hits.scores[:, :best], hits.right[:, :best]
        if right.all():
            return found[0], None
        area, low = roc_area(scores, right, gaps[:best], classes[:, None])
        if low <= MIN_AREA:
            raise _refusal(
                images,
                f"among {where} the area under the ROC curve is {area:.3f} (95 % interval from "
                f"{low:.3f}), where 0.5 is chance; its lower end must be above {MIN_AREA}",
            )
        found.append(area)
    return found[0], found[1]
