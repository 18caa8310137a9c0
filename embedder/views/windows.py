"""Windows of a photo: parts at fixed places, for a model without a detector."""

import itertools

from kinlens.embedder.preprocess import Box

_WINDOWS = ((1.0, (0.0,)), (2 / 3, (0.0, 1 / 3)))
"""Side of a window as a fraction of each side of the image, and the starts of windows in a row.
More and smaller windows find no more in benchmarks/clutter.py, and cost more.
"""


def windows() -> list[Box]:
    """The whole image, then four windows of two thirds of its width and height at its corners."""
    return [
        (left, top, side, side)
        for side, starts in _WINDOWS
        for top, left in itertools.product(starts, repeat=2)
    ]
