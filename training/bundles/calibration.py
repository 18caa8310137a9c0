"""Calibrate scores to probabilities on held-out images, for the bundle.

Shapes: N images, D dimensions, q queries.
"""

from collections.abc import Iterator

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
MIN_CLASSES = 16
"""With fewer held-out classes a curve depends as much on them as on the model."""
VIEWS = (1, 2, 4, 8, 16)
"""Images of a product in the galleries that a curve is fitted on."""
MAX_QUERIES = 5_000
MAX_PAIRS = 200_000
BLOCK = 1 << 22
"""Number of scores in memory at a time."""

_PARTS = (1, 2, 4)  # galleries of all classes, of a half and of a quarter
_ASKING = 10  # queries per class, so that a few large classes do not dominate
_ABOVE = 1e-6  # more than the rounding of a cosine in float32

Labels = NDArray[np.int64]
Scores = NDArray[np.float32]
Right = NDArray[np.bool_]


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

    Raises: CalibrationError with the reason if fewer than `MIN_CLASSES` classes have two images, or
        no curve can be fitted.

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
    negatives = _wrong_pairs(embeddings, labels, rng)
    best_wrong = _best_wrong(embeddings, labels, queries)
    return Calibration(
        thresholds=tuple(
            Threshold(
                false_matches=rate,
                pair_score=least_score(negatives, rate),
                search_score=least_score(best_wrong, rate),
            )
            for rate in FALSE_MATCHES
        ),
        split=split,
        gallery_images=count,
        queries=len(queries),
        negative_pairs=len(negatives),
        classes=len(sizes),
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


# The thresholds


def _best_wrong(embeddings: Embeddings, labels: Labels, queries: Labels) -> Scores:
    """The highest score of each query (q,), the index of an image, with one of another class."""
    blocks = _blocks(embeddings, labels, queries, np.arange(len(labels)))
    return np.concatenate([np.where(same, -np.inf, found).max(axis=1) for _, found, same in blocks])


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
