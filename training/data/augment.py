"""Random crop and flip of an encoded image, as a pure function of a random generator."""

import math

import numpy as np
from PIL import Image

from embedder.preprocess import PixelBox, decode, read_header, resize_box
from training.config.model import Input

_ATTEMPTS = 10
_LOG_RATIO = math.log(4 / 3)
_SPARE = 2  # times `size_px` that a whole image is decoded at, at least


def random_view(data: bytes, spec: Input, rng: np.random.Generator) -> Image.Image:
    """A random part of an encoded image, scaled to a square of `spec.size_px`, perhaps mirrored.

    A JPEG is decoded at a reduced scale that leaves the part `size_px` or all pixels that it has.

    Raises: as `decode`.
    """
    image, box = random_part(data, spec, rng)
    view = resize_box(image, box, spec.size_px, spec.interpolation)
    if spec.flip and rng.random() < 0.5:
        view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return view


def random_part(data: bytes, spec: Input, rng: np.random.Generator) -> tuple[Image.Image, PixelBox]:
    """An image, decoded as finely as a random box in it needs, and that box in its pixels.

    The box is drawn from the size that the image has in full, which for a JPEG the header says.

    Raises: as `decode`.
    """
    header = read_header(data)
    if header.format != "JPEG":
        image = decode(data)
        return image, box_of(image.size, spec, rng)
    width, height = header.width, header.height
    left, top, right, bottom = box_of((width, height), spec, rng)
    part = min(right - left, bottom - top) / min(width, height)
    image = decode(data, min_side_px=math.ceil(spec.size_px * max(_SPARE, 1 / part)))
    x, y = image.width / width, image.height / height
    return image, (left * x, top * y, right * x, bottom * y)


def box_of(size: tuple[int, int], spec: Input, rng: np.random.Generator) -> PixelBox:
    """The random part of an image of `size` that a view shows."""
    if spec.crop == "fixed":
        return random_square(size, spec.size_px / spec.resize_px, rng)
    return random_box(size, spec.min_crop_area, rng)


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


def random_square(size: tuple[int, int], part: float, rng: np.random.Generator) -> PixelBox:
    """A square anywhere in the image whose side is `part` of the image's shorter side."""
    width, height = size
    side = part * min(size)
    left, top = rng.uniform(0, width - side), rng.uniform(0, height - side)
    return left, top, left + side, top + side
