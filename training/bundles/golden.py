"""The golden images of a bundle: rendered products, on which its vectors are checked."""

import io

import numpy as np
from PIL import Image

from kinlens.embedder.manifest import Preprocessing
from kinlens.embedder.preprocess import preprocess
from kinlens.embedder.types import Images
from kinlens.rendered.catalogue import render_view

_GOLDEN_IMAGES = 8
_GOLDEN_SCALES = (1.3, 2.5)
_EXIF_ORIENTATION = 0x0112


def golden_images(spec: Preprocessing) -> list[bytes]:
    """Rendered products as JPEGs: half are large enough to be scaled, the last is rotated."""
    files = []
    for number in range(_GOLDEN_IMAGES):
        size = round(spec.resize_px * _GOLDEN_SCALES[number % 2])
        view = render_view(number, number, size_px=min(max(size, 32), 1024))
        exif = Image.Exif()
        if number == _GOLDEN_IMAGES - 1:
            exif[_EXIF_ORIENTATION] = 6
        buffer = io.BytesIO()
        view.save(buffer, "JPEG", quality=92, exif=exif)
        files.append(buffer.getvalue())
    return files


def golden_inputs(files: list[bytes], spec: Preprocessing) -> Images:
    """The tensors of golden images, uint8 (N, 3, S, S)."""
    inputs: Images = np.stack([preprocess(data, spec) for data in files])
    return inputs
