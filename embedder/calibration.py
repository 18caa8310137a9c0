"""From the score of a hit to the probability that it is right. Fitted by the export; numpy only."""

import functools
from operator import not_
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

SMALLEST_GALLERY = 4
"""A curve is fitted on galleries from all held-out classes down to one in so many of them."""

UNREACHABLE = 2.0
"""A least score that no cosine similarity reaches."""

NEAR = 0.99
"""From this probability on two items are near-duplicates, unless another one is asked for: at the
score that has it one pair in a hundred is of two products, and above it fewer."""

SAME_PICTURE = 0.95
"""From this cosine on two items are near-duplicates though the calibration does not say so, unless
one pair of classes in a thousand reaches more: many copies of a photograph have it, and photographs
of other classes do not (docs/benchmarks.md). A logistic curve that was fitted over all hits may
never reach 0.99, least of all in a large gallery.
"""

_STEPS = 256  # halves towards 0 reach the smallest float32
_PAGE = 20  # hits that are shown where nothing else is asked for


def log_tail(ranks: NDArray[np.integer] | int) -> NDArray[np.float64]:
    """ln((r + 20) / 21) of ranks, any shape: 0 for the best hit, level on the first page."""
    tail: NDArray[np.float64] = np.log((np.asarray(ranks, dtype=np.float64) + _PAGE) / (1 + _PAGE))
    return tail


class Threshold(BaseModel):
    """Scores at which wrong answers become as rare as `false_matches`; accept `score >=` them.

    `pair_score`: of all pairs of images of different classes, this share reaches it (the false
    match rate of a comparison one to one). `search_score`: of all images whose class is absent from
    the gallery, this share has a hit that reaches it (the rate of a search, one to many; it holds
    for galleries of about `gallery_images`, and larger ones need a higher score).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    false_matches: float = Field(gt=0, lt=1)
    pair_score: float
    search_score: float


class Calibration(BaseModel):
    r"""What a score is worth among the hits of a search; it never rises with the rank.

    .. math:: P(\text{same class} \mid s, r, N) =
        \frac{1}{1 + e^{-(a s + b - c \ln r - e \ln \frac{r + 20}{21} - d \ln (N / N_0))}}

    of a hit with score s at rank r (1 is the best hit) in a gallery of N items: `slope` a,
    `intercept` b, `rank_slope` c, `tail_slope` e (steeper where the right ones run out) and
    `size_slope` d, all but b at least 0, and `gallery_images` N_0. Bundles from before c, d and e
    have 0 there: every rank and gallery is alike to them.

    Fitted on what searches among held-out images return: `queries` images of `classes` classes,
    each among `gallery_images` others. The query's class is in that gallery. Of the best
    `neighbours` hits, `positive_hits` were of the same class. `auc` is the area under the ROC curve
    of the scores of all pairs, `auc_of_hits` that of the best hits. `calibration_error` is the
    expected difference between the probability and the share of right ones of these hits, measured
    on classes that the measured curve was not fitted on. `split` names the held-out images.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    slope: float = Field(ge=0, allow_inf_nan=False)
    intercept: float = Field(allow_inf_nan=False)
    thresholds: tuple[Threshold, ...]
    split: Literal["validation", "test"]
    gallery_images: int = Field(ge=1)
    queries: int = Field(ge=1)
    neighbours: int = Field(ge=1)
    positive_hits: int = Field(ge=1)
    negative_hits: int = Field(ge=0)
    negative_pairs: int = Field(ge=1)
    calibration_error: float | None = Field(default=None, ge=0, le=1)
    # What follows older calibrations lack; while empty it is left out, so that ids stay.
    rank_slope: float = Field(default=0.0, ge=0, allow_inf_nan=False, exclude_if=not_)
    tail_slope: float = Field(default=0.0, ge=0, allow_inf_nan=False, exclude_if=not_)
    size_slope: float = Field(default=0.0, ge=0, le=1, exclude_if=not_)
    classes: int | None = Field(default=None, ge=2, exclude_if=not_)
    auc: float | None = Field(default=None, ge=0, le=1, exclude_if=not_)
    auc_of_hits: float | None = Field(default=None, ge=0, le=1, exclude_if=not_)

    def probability(
        self, scores: NDArray[np.floating], ranks: NDArray[np.integer] | int = 1
    ) -> NDArray[np.float64]:
        """The probability of each cosine similarity, any shape, at its rank, each in [0, 1]."""
        logits = self.slope * np.asarray(scores, dtype=np.float64) + self.intercept
        logits = logits - self.rank_slope * np.log(ranks) - self.tail_slope * log_tail(ranks)
        # tanh does not overflow, whatever the logit.
        probabilities: NDArray[np.float64] = 0.5 * (1.0 + np.tanh(0.5 * logits))
        return probabilities

    def for_gallery(self, items: int) -> "Calibration":
        """The same in a gallery of `items`: more of them hold more wrong ones that look alike.

        A gallery smaller than the smallest that was fitted on counts as that one: it may not hold
        the query's class at all.
        """
        size = max(items, self.gallery_images / SMALLEST_GALLERY)
        shift = self.size_slope * float(np.log(size / self.gallery_images))
        return self.model_copy(update={"intercept": self.intercept - shift})


@functools.lru_cache(maxsize=1024)
def score_of(calibration: Calibration, probability: float) -> float | None:
    """The least float32 in [-1, 1] whose probability is at least `probability` as the best hit.

    None if even -1 has it, UNREACHABLE if not even 1 does.
    """

    def fits(score: np.float32) -> bool:
        return bool(calibration.probability(np.array(score)) >= probability)

    low, high = np.float32(-1), np.float32(1)
    if fits(low):
        return None
    if not fits(high):
        return UNREACHABLE
    for _ in range(_STEPS):
        middle = np.float32((float(low) + float(high)) / 2)
        if middle in (low, high):
            break
        low, high = (low, middle) if fits(middle) else (middle, high)
    return float(high)


def near_score(calibration: Calibration, probability: float | None = None) -> float:
    """The least cosine at which two items are of one class with this probability; without one with
    `NEAR`, or with less where they are as like as two copies of a picture and more so than nearly
    all pairs of other classes. `calibration` is that for the gallery as large as it is.
    """
    score = score_of(calibration, NEAR if probability is None else probability)
    most = 1.0
    if probability is None:
        rarest = min(calibration.thresholds, key=lambda one: one.false_matches, default=None)
        most = SAME_PICTURE if rarest is None else max(SAME_PICTURE, min(rarest.pair_score, 1.0))
    return -1.0 if score is None else min(score, most)
