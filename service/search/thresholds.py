"""From the least probability that is asked for to the least score that has it."""

import functools

import numpy as np

from embedder.calibration import Calibration
from embedder.errors import InvalidParameterError

UNREACHABLE = 2.0
"""A least score that no cosine similarity reaches."""

_STEPS = 256  # halves towards 0 reach the smallest float32


def least_score(
    min_score: float | None,
    min_probability: float | None,
    calibration: Calibration | None,
    no_calibration: str | None = None,
) -> float | None:
    """The score that the best hit needs for both, or None if any will do.

    Args:
        calibration: for the gallery as large as it is.
        no_calibration: why there is none.

    Raises: InvalidParameterError for a probability without a calibration.
    """
    if min_probability is None:
        return min_score
    if calibration is None:
        reason = "" if no_calibration is None else f" ({no_calibration.rstrip('.')})"
        raise InvalidParameterError(
            f"min_probability = {min_probability:g} needs a calibration, and the model of this "
            f"gallery has none{reason}. Send min_score, or export the model again with held-out "
            "classes."
        )
    likely = score_of(calibration, min_probability)
    if likely is None or min_score is None:
        return min_score if likely is None else likely
    return max(min_score, likely)


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
