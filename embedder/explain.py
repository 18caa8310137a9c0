"""Show where two images match: the contribution of each region to the score, as a heat map.

The map of an image holds the contribution of each position to the embedding. A cosine similarity
is linear in either embedding, so it is also a sum over the positions of either image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from kinlens.embedder.errors import SourceError
from kinlens.embedder.manifest import Preprocessing
from kinlens.embedder.preprocess import central_box, decode
from kinlens.embedder.session import Embedder, read_pixels
from kinlens.embedder.types import Images

Grid = NDArray[np.float32]
"""Shares of a score, shape (h, w), over the central square that `Preprocessing` keeps."""

# Colours of shares from 0 to the largest: red, green, blue, opacity.
_COLOURS = np.array(
    [(68, 1, 84, 0), (190, 30, 90, 110), (250, 110, 40, 170), (255, 225, 90, 205)], dtype=np.float64
)


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The cosine similarity of two images, split over the positions of each image.

    `query` and `hit` both sum to `score`, up to rounding.
    """

    score: float
    query: Grid
    hit: Grid


def shares(parts: NDArray[np.float32], vector: NDArray[np.float32]) -> Grid:
    """Split the cosine of an image, given as a map (D, h, w), with `vector` (D,) by position."""
    grid: Grid = np.tensordot(vector, parts, axes=1).astype(np.float32)
    return grid


def explain(embedder: Embedder, query: NDArray[np.uint8], hit: NDArray[np.uint8]) -> Match:
    """Compute where two preprocessed images, uint8 (3, S, S), match.

    Raises: BundleError if the bundle has no map.
    """
    images: Images = np.stack([query, hit])
    of_query, of_hit = embedder.maps(images)
    vectors = of_query.sum(axis=(1, 2)), of_hit.sum(axis=(1, 2))
    score = float(vectors[0] @ vectors[1])
    return Match(score, shares(of_query, vectors[1]), shares(of_hit, vectors[0]))


def draw_match(embedder: Embedder, query: Path, hit: Path, out: Path) -> Match:
    """Compute where two image files match, and draw both with their heat maps to the file `out`.

    Raises: SourceError or ImageError naming a file; BundleError if the bundle has no map.
    """
    data, pixels = zip(*(read_pixels(path, embedder) for path in (query, hit)), strict=True)
    match = explain(embedder, *np.concatenate(pixels))
    grids = zip(data, (match.query, match.hit), strict=True)
    sheet = side_by_side(
        [
            overlaid(decode(one, embedder.limits), grid, embedder.preprocessing)
            for one, grid in grids
        ]
    )
    try:
        sheet.save(out)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{out} cannot be written: {error}. Pass a .png or .jpg file with --out."
        ) from error
    return match


def overlaid(image: Image.Image, grid: Grid, spec: Preprocessing) -> Image.Image:
    """Draw the shares (h, w) over an upright RGB image, from transparent for 0 to yellow for the
    largest.

    Negative shares (regions that lower the score) are transparent too.
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
    """Place images next to each other on white, each fitted into a square of `side_px`."""
    sheet = Image.new("RGB", (len(images) * side_px, side_px), "white")
    for number, image in enumerate(images):
        shown = ImageOps.contain(image, (side_px, side_px))
        corner = number * side_px + (side_px - shown.width) // 2, (side_px - shown.height) // 2
        sheet.paste(shown, corner)
    return sheet
