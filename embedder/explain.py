"""Where two images match: what share of their score each region of either has, also drawn.

The map of an image says what each of its positions adds to its embedding. A cosine similarity is
linear in either embedding, so it is a sum over the positions of either image as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from kinlens.embedder.manifest import Preprocessing
from kinlens.embedder.preprocess import central_box
from kinlens.embedder.session import Embedder
from kinlens.embedder.types import Images

Grid = NDArray[np.float32]
"""Shares of a score, shape (h, w), over the central square that `Preprocessing` keeps."""

# What a share from none to the largest looks like: red, green, blue, opacity.
_COLOURS = np.array(
    [(68, 1, 84, 0), (190, 30, 90, 110), (250, 110, 40, 170), (255, 225, 90, 205)], dtype=np.float64
)


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The cosine similarity of two images, as a sum over the positions of either: `query` and
    `hit` both sum to `score`, up to rounding.
    """

    score: float
    query: Grid
    hit: Grid


def shares(parts: NDArray[np.float32], vector: NDArray[np.float32]) -> Grid:
    """Of the cosine with `vector` (D,), what each position has of an image with map (D, h, w)."""
    grid: Grid = np.tensordot(vector, parts, axes=1).astype(np.float32)
    return grid


def explain(embedder: Embedder, query: NDArray[np.uint8], hit: NDArray[np.uint8]) -> Match:
    """Where two preprocessed images, uint8 (3, S, S), match.

    Raises: BundleError if the bundle has no map.
    """
    images: Images = np.stack([query, hit])
    of_query, of_hit = embedder.maps(images)
    vectors = of_query.sum(axis=(1, 2)), of_hit.sum(axis=(1, 2))
    score = float(vectors[0] @ vectors[1])
    return Match(score, shares(of_query, vectors[1]), shares(of_hit, vectors[0]))


def overlaid(image: Image.Image, grid: Grid, spec: Preprocessing) -> Image.Image:
    """An upright RGB image under its shares (h, w): from clear for none to yellow for the largest.

    Shares below 0, regions that speak against the match, are clear as well.
    """
    left, top, right, bottom = map(round, central_box(image.size, spec))
    size = (max(1, right - left), max(1, bottom - top))
    smooth = Image.fromarray(np.maximum(grid, 0)).resize(size, Image.Resampling.BILINEAR)
    level = np.clip(np.asarray(smooth) / max(float(grid.max()), 1e-12), 0, 1)
    stops = np.linspace(0, 1, len(_COLOURS))
    pixels = np.stack([np.interp(level, stops, channel) for channel in _COLOURS.T], axis=-1)
    heat = Image.fromarray(pixels.round().astype(np.uint8), "RGBA")
    shown = image.convert("RGB")
    shown.paste(heat.convert("RGB"), (left, top), heat.getchannel("A"))
    return shown


def side_by_side(images: Sequence[Image.Image], side_px: int = 480) -> Image.Image:
    """Pictures beside each other, each fitted into a square of `side_px`, on white."""
    sheet = Image.new("RGB", (len(images) * side_px, side_px), "white")
    for number, image in enumerate(images):
        shown = ImageOps.contain(image, (side_px, side_px))
        place = number * side_px + (side_px - shown.width) // 2, (side_px - shown.height) // 2
        sheet.paste(shown, place)
    return sheet
