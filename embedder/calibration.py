"""From the score of a hit to the probability that it is right. Fitted by the export, numpy only."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field


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
    """P(same class | score) = 1 / (1 + exp(-(slope * score + intercept))), which never falls.

    Fitted on what a search among held-out images returns: `queries` images, each with its
    `neighbours` nearest others out of `gallery_images`; `positive_hits` were of the same class. The
    query's class is in that gallery. `calibration_error` is the expected difference between the
    probability and the share of right hits, measured on classes that the measured curve was not
    fitted on. `split` names the held-out images.
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
    negative_hits: int = Field(ge=1)
    negative_pairs: int = Field(ge=1)
    calibration_error: float | None = Field(default=None, ge=0, le=1)

    def probability(self, scores: NDArray[np.floating]) -> NDArray[np.float64]:
        """The probability of each cosine similarity, any shape, each in [0, 1]."""
        logits = self.slope * np.asarray(scores, dtype=np.float64) + self.intercept
        # tanh does not overflow, whatever the logit.
        probabilities: NDArray[np.float64] = 0.5 * (1.0 + np.tanh(0.5 * logits))
        return probabilities

    def threshold(self, false_matches: float) -> Threshold:
        """The threshold of that share of false matches. Raises: KeyError if it was not fitted."""
        for threshold in self.thresholds:
            if threshold.false_matches == false_matches:
                return threshold
        raise KeyError(false_matches)
