"""The golden images of a bundle."""

import io

from PIL import Image

from embedder.manifest import Preprocessing
from training.rendered.catalogue import render_view

_IMAGES = 8
_SCALES = (1.3, 2.5)
_EXIF_ORIENTATION = 0x0112


def golden_images(spec: Preprocessing) -> list[bytes]:
    """Rendered products as JPEG files: known images that belong to nobody.

    Every second one is large enough to be decoded at a reduced scale; the last is turned by EXIF.
    """
    files = []
    for number in range(_IMAGES):
        size = round(spec.resize_px * _SCALES[number % 2])
        view = render_view(number, number, size_px=min(max(size, 32), 1024))
        exif = Image.Exif()
        if number == _IMAGES - 1:
            exif[_EXIF_ORIENTATION] = 6
        buffer = io.BytesIO()
        view.save(buffer, "JPEG", quality=92, exif=exif)
        files.append(buffer.getvalue())
    return files
