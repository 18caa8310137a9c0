"""A picture for the screen: any allowed format as a JPEG of bounded size."""

import io
import math

from PIL import Image

from embedder.preprocess import ImageLimits, decode, read_header

MAX_SIDE_PX = 2048
"""The largest picture that is made, in pixels a side."""

_QUALITY = 90


def render_jpeg(data: bytes, limits: ImageLimits, side_px: int = MAX_SIDE_PX) -> bytes:
    """The upright picture as a JPEG whose longer side is at most `side_px`.

    Raises: as `embedder.preprocess.decode`.
    """
    header = read_header(data, limits)
    scale = min(1.0, side_px / max(header.width, header.height))
    shorter = math.ceil(min(header.width, header.height) * scale)
    image = decode(data, limits, shorter)
    if max(image.size) > side_px:
        scale = side_px / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()
