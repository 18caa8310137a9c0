"""Changes of training views, as photos of customers have them: light, blur, JPEG, covered parts."""

import io

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter

from kinlens.training.config.settings import Input

_BEST_QUALITY = 95
_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def photographed(view: Image.Image, spec: Input, rng: np.random.Generator) -> Image.Image:
    """A view, RGB of S x S, with the changes of `spec`; without any it is the same object.

    The random numbers come from `rng` alone, and only those of changes that are on.
    """
    if spec.colour:
        for number in rng.permutation(len(_ENHANCERS)):
            factor = rng.uniform(1 - spec.colour, 1 + spec.colour)
            view = _ENHANCERS[number](view).enhance(factor)
    if spec.blur_px:
        view = view.filter(ImageFilter.GaussianBlur(rng.uniform(0, spec.blur_px)))
    if spec.jpeg_quality is not None:
        file = io.BytesIO()
        quality = int(rng.integers(spec.jpeg_quality, _BEST_QUALITY, endpoint=True))
        view.save(file, "JPEG", quality=quality)
        view = Image.open(file).convert("RGB")
    if spec.erase and rng.random() < 0.5:
        view = _covered(view, spec.erase, rng)
    return view


def _covered(view: Image.Image, most: float, rng: np.random.Generator) -> Image.Image:
    """The view with a rectangle of one colour, of at most this part of its area."""
    area = rng.uniform(0.02, most) if most > 0.02 else most
    ratio = np.exp(rng.uniform(-0.7, 0.7))  # 1:2 to 2:1
    width = min(round(view.width * np.sqrt(area * ratio)), view.width)
    height = min(round(view.height * np.sqrt(area / ratio)), view.height)
    left, top = rng.integers(0, [view.width - width + 1, view.height - height + 1]).tolist()
    covered = view.copy()
    covered.paste(tuple(rng.integers(0, 256, 3).tolist()), (left, top, left + width, top + height))
    return covered
