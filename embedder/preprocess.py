"""Image bytes to a preprocessed tensor: the only decoder and the only resize of the project.

Training evaluation, indexing and serving all call `preprocess`, so the same image gives the same
pixels everywhere.
"""

import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kinlens.embedder.decoding.colour import on_white, to_srgb
from kinlens.embedder.decoding.formats import (
    claimed_size,
    format_of,
    open_image,
    opened_format,
    readable_formats,
)
from kinlens.embedder.errors import (
    CorruptImageError,
    EmptyImageError,
    ImageTooLargeError,
    ImageTooManyBytesError,
    InvalidParameterError,
    UnsupportedFormatError,
)
from kinlens.embedder.manifest import Aspect, Colour, Interpolation, Preprocessing

_EXIF_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)  # orientations that swap width and height
_PILLOW_MEGAPIXELS = 178.0  # Pillow rejects larger images, whatever our limit is
_BOX_TOLERANCE = 1e-6  # for rounding errors in the browser

MAX_SIDE_PX = 2048
"""Default limit of `render_jpeg` for the longer side, in pixels."""

_THUMBNAIL = {"quality": 70, "optimize": True, "progressive": True}
_WHOLE = {"quality": 90}

_SIDE, _STARTS = 2 / 3, (0.0, 1 / 3)
"""Side of a window as a fraction of each side of the image, and the starts of windows in a row.
More and smaller windows find no more in benchmarks/clutter.py, and cost more.
"""

Box = tuple[float, float, float, float]
"""A part of an image: left, top, width, height as fractions 0..1 of the upright image."""

WHOLE: Box = (0.0, 0.0, 1.0, 1.0)

PixelBox = tuple[float, float, float, float]
"""A part of an image: left, top, right, bottom in pixels."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits on the size of an image. All are checked before a pixel is decoded."""

    max_bytes: int = 20 * 2**20
    max_megapixels: float = 64.0
    max_side_px: int = 16384

    def __post_init__(self) -> None:
        if not 0 < self.max_megapixels <= _PILLOW_MEGAPIXELS:
            raise ValueError(
                f"max_megapixels = {self.max_megapixels} is outside 0..{_PILLOW_MEGAPIXELS:g}, the "
                "range of the decoder; choose a value in this range"
            )


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Format (one of FORMATS) and size in pixels from the header of an image.

    The size is that of the stored image; for JPEG and HEIC it is the size of the upright image.
    """

    format: str
    width: int
    height: int


def read_header(data: bytes, limits: ImageLimits | None = None) -> ImageHeader:
    """Check the header against the limits without decoding.

    Raises: EmptyImageError, ImageTooManyBytesError, UnsupportedFormatError, CorruptImageError,
        ImageTooLargeError.
    """
    with _open(data, limits or ImageLimits()) as image:
        kind, size = opened_format(image), image.size
        if kind == "JPEG" and _orientation(image) in _SIDEWAYS:
            size = size[::-1]
        return ImageHeader(kind, *size)


def check_box(box: Sequence[float]) -> Box:
    """Return `box` (left, top, width, height), clipped to the image by at most the tolerance.

    Raises: InvalidParameterError if it is not inside the image or has no area.
    """
    if len(box) != 4 or not all(math.isfinite(value) for value in box):
        raise _bad_box(box, "is not four finite numbers")
    left, top, width, height = map(float, box)
    if min(left, top) < 0 or max(left + width, top + height) > 1 + _BOX_TOLERANCE:
        raise _bad_box(box, "extends beyond the image")
    width = 1 - left if left + width > 1 else width
    height = 1 - top if top + height > 1 else height
    if width <= 0 or height <= 0:
        raise _bad_box(box, "has no area")
    return left, top, width, height


def windows() -> list[Box | None]:
    """Parts of an image at fixed places, for a model without a detector: None for the whole image,
    then four windows of two thirds of its width and height at its corners.
    """
    starts = itertools.product(_STARTS, repeat=2)
    return [None, *((left, top, _SIDE, _SIDE) for top, left in starts)]


def decode(
    data: bytes,
    limits: ImageLimits | None = None,
    min_side_px: int | None = None,
    box: Box | None = None,
    colour: Colour = "srgb",
) -> Image.Image:
    """Decode to an upright sRGB image on a white background; with `box`, only that part.

    With `colour` "stored", the colour space of the image is ignored.

    With `min_side_px`, a JPEG is decoded at the smallest built-in scale at which the shorter side
    still has that many pixels. For photos from a phone this is several times cheaper.

    Raises: the errors of `read_header`; CorruptImageError also for a truncated file;
        InvalidParameterError for a box outside the image or smaller than a pixel.
    """
    return ImageParts(data, limits, colour).part(box, min_side_px)


class ImageParts:
    """An encoded image, which is decoded once, or once for each scale of a JPEG that its parts
    need. A part has the pixels that `decode` gives for it alone.
    """

    def __init__(
        self, data: bytes, limits: ImageLimits | None = None, colour: Colour = "srgb"
    ) -> None:
        self._data = data
        self._limits = limits or ImageLimits()
        self._as_shown = colour == "srgb"
        self._uprights: dict[tuple[int, int], Image.Image] = {}

    def part(self, box: Box | None = None, min_side_px: int | None = None) -> Image.Image:
        """The upright part in `box`, or the whole image, as `decode` gives it."""
        checked = None if box is None else check_box(box)
        with _open(self._data, self._limits, self._as_shown) as image:
            if min_side_px is not None and opened_format(image) == "JPEG":
                _draft(image, min_side_px, checked)
            if (upright := self._uprights.get(image.size)) is None:
                upright = self._uprights[image.size] = _upright(image, self._as_shown)
        return upright if checked is None else _cut(upright, checked)

    def pixels(self, boxes: Sequence[Box | None], spec: Preprocessing) -> NDArray[np.uint8]:
        """N > 0 parts, each as `preprocess` gives it: uint8 (N, 3, S, S)."""
        return np.stack([_squared(self.part(box, spec.resize_px), spec) for box in boxes])


def _upright(image: Image.Image, as_shown: bool) -> Image.Image:
    try:
        image.load()
        turn = _TURNS.get(_orientation(image))
        pixels = to_srgb(image) if as_shown else on_white(image)
        upright = pixels if turn is None else pixels.transpose(turn)
        upright.info.clear()  # a thumbnail must not name the place of a photo
    except MemoryError:
        raise
    except Exception as error:
        # Pillow's decoders raise many exception types on damaged data.
        raise CorruptImageError(
            f"The {opened_format(image)} image is truncated or damaged. Export it again from "
            "the original, or send another file."
        ) from error
    return upright


def preprocess(
    data: bytes, spec: Preprocessing, limits: ImageLimits | None = None, box: Box | None = None
) -> NDArray[np.uint8]:
    """Decode, resize the shorter side to `spec.resize_px`, crop the centre: uint8 (3, S, S).

    With `box`, only that part of the image is used.

    Raises: the errors of `decode`.
    """
    pixels: NDArray[np.uint8] = ImageParts(data, limits, spec.colour).pixels([box], spec)[0]
    return pixels


def _squared(image: Image.Image, spec: Preprocessing) -> NDArray[np.uint8]:
    square = central_box(image.size, spec)
    return to_chw(resize_box(image, square, spec.crop_px, spec.interpolation))


def render_jpeg(data: bytes, limits: ImageLimits, side_px: int = MAX_SIDE_PX) -> bytes:
    """An image for the screen: an upright JPEG whose longer side is at most `side_px` pixels.

    Below MAX_SIDE_PX it is a thumbnail, which has to be small: quality 70, progressive.

    Raises: the errors of `decode`.
    """
    header = read_header(data, limits)
    scale = min(1.0, side_px / max(header.width, header.height))
    image = decode(data, limits, math.ceil(min(header.width, header.height) * scale))
    if max(image.size) > side_px:
        scale = side_px / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **(_THUMBNAIL if side_px < MAX_SIDE_PX else _WHOLE))
    return buffer.getvalue()


def central_box(size: tuple[int, int], spec: Preprocessing) -> PixelBox:
    """The central part that `spec` crops from an image of `size` = (width, height).

    Its corner is at a whole pixel: an offset of half a pixel would blur an unscaled image. It is a
    square, unless `spec` squashes images.
    """
    width, height = cropped_size(size, spec.crop_px / spec.resize_px, spec.aspect)
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return left, top, left + width, top + height


def cropped_size(
    size: tuple[int, int], part: float, aspect: Aspect = "kept"
) -> tuple[float, float]:
    """Width and height, in pixels of an image, of a crop whose side is `part` of the shorter one.

    Of a squashed image it is that part of both sides.
    """
    width, height = size if aspect == "squashed" else (min(size), min(size))
    return width * part, height * part


def resize_box(
    image: Image.Image, box: PixelBox, size_px: int, interpolation: Interpolation = "bilinear"
) -> Image.Image:
    """Scale the part of `image` inside `box` to a square of `size_px`, anti-aliased."""
    resampling = Image.Resampling[interpolation.upper()]
    return image.resize((size_px, size_px), resampling, box=box)


def to_chw(image: Image.Image) -> NDArray[np.uint8]:
    """An RGB image as a contiguous array (3, H, W)."""
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


def _open(data: bytes, limits: ImageLimits, as_shown: bool = True) -> Image.Image:
    if not data:
        raise EmptyImageError("The image is empty (0 bytes). Send the content of an image file.")
    if len(data) > limits.max_bytes:
        raise ImageTooManyBytesError(
            f"The image has {len(data):,} bytes; the limit is {limits.max_bytes:,} bytes. "
            "Resize or compress it."
        )
    try:
        image = open_image(data, as_shown)
    except UnsupportedFormatError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLargeError(
            f"The image has too many pixels ({error}); the limit is "
            f"{limits.max_megapixels:g} megapixels. Resize it."
        ) from error
    except Exception as error:
        _check_size(claimed_size(data), limits)
        raise _unreadable(data) from error
    _check_size(image.size, limits)
    if image.mode in ("I", "F"):
        raise UnsupportedFormatError(
            f"The {opened_format(image)} image has 32 bits per pixel, a depth without a standard "
            "brightness range. Save it with 8 or 16 bits per channel."
        )
    return image


def _check_size(size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    megapixels = width * height / 1e6
    if megapixels > limits.max_megapixels or max(width, height) > limits.max_side_px:
        raise ImageTooLargeError(
            f"The image is {width} x {height} px ({megapixels:.1f} MP); the limits are "
            f"{limits.max_megapixels:g} MP and {limits.max_side_px} px per side. Resize it."
        )


def _unreadable(data: bytes) -> CorruptImageError | UnsupportedFormatError:
    if format_of(data) is not None:
        return CorruptImageError(
            f"The header of the {format_of(data)} image is damaged. Export it again from the "
            "original, or send another file."
        )
    return UnsupportedFormatError(
        "The file is not an image in a supported format. Use one of "
        f"{', '.join(readable_formats())}. The format is detected from the content, not from the "
        "file name."
    )


def _draft(image: Image.Image, min_side_px: int, box: Box | None) -> None:
    width, height = (1.0, 1.0) if box is None else box[2:]
    if _orientation(image) in _SIDEWAYS:
        width, height = height, width
    scale = min_side_px / min(image.width * width, image.height * height)
    if scale < 1:
        image.draft(None, (round(image.width * scale), round(image.height * scale)))


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:
        # The pixels may be fine when the EXIF block is damaged: use the image as stored.
        return 1


def _cut(image: Image.Image, box: Box) -> Image.Image:
    """Crop an upright image to `box`, rounded to whole pixels."""
    left, top, width, height = box
    if width * image.width < 1 or height * image.height < 1:
        raise _bad_box(box, "is smaller than one pixel of this image")
    columns = _whole_pixels(left, width, image.width)
    rows = _whole_pixels(top, height, image.height)
    return image.crop((columns[0], rows[0], columns[1], rows[1]))


def _whole_pixels(start: float, length: float, size_px: int) -> tuple[int, int]:
    first = min(round(start * size_px), size_px - 1)
    return first, max(first + 1, min(round((start + length) * size_px), size_px))


def _bad_box(box: Sequence[float], fault: str) -> InvalidParameterError:
    shown = ",".join(f"{value:g}" for value in box[:8])
    return InvalidParameterError(
        f"crop = {shown} {fault}; send left,top,width,height as fractions (0 to 1) of the upright "
        "image, such as 0.25,0.25,0.5,0.5."
    )
