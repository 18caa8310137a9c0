"""Windows of a photo: parts at fixed places, for a model without a detector."""

import itertools

from kinlens.embedder.preprocess import Box

_SIDE, _STARTS = 2 / 3, (0.0, 1 / 3)
"""Side of a window as a fraction of each side of the image, and the starts of windows in a row.
More and smaller windows find no more in benchmarks/clutter.py, and cost more.
"""


def windows() -> list[Box | None]:
    """None for the whole image, then four windows of two thirds of its width and height at its
    corners.
    """
    starts = itertools.product(_STARTS, repeat=2)
    return [None, *((left, top, _SIDE, _SIDE) for top, left in starts)]
