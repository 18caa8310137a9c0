"""Random crop and flip, as a pure function of a random generator."""

import math

import numpy as np
from PIL import Image

from embedder.preprocess import PixelBox, resize_box
from training.config.model import Input

_ATTEMPTS = 10
_LOG_RATIO = math.log(4 / 3)


def random_view(image: Image.Image, spec: Input, rng: np.random.Generator) -> Image.Image:
    """A random part of `image`, scaled to a square of `spec.size_px` and perhaps mirrored."""
    box = random_box(image.size, spec.min_crop_area, rng)
    view = resize_box(image, box, spec.size_px, spec.interpolation)
    if spec.flip and rng.random() < 0.5:
        view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return view


def random_box(size: tuple[int, int], min_area: float, rng: np.random.Generator) -> PixelBox:
    """A box with a part of at least `min_area` of the image, width : height within 3:4 to 4:3.

    Falls back to the central square if ten draws do not fit.
    """
    width, height = size
    for _ in range(_ATTEMPTS):
        area = width * height * rng.uniform(min_area, 1.0)
        ratio = math.exp(rng.uniform(-_LOG_RATIO, _LOG_RATIO))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    side = min(size)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
