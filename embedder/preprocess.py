"""Image bytes to a preprocessed tensor: the only decoder and the only resize of the project.

Training evaluation, indexing and serving all call `preprocess`, so that the same photograph gives
the same pixels everywhere.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kinlens.embedder.errors import (
    CorruptImageError,
    EmptyImageError,
    ImageTooLargeError,
    ImageTooManyBytesError,
    InvalidParameterError,
    UnsupportedFormatError,
)
from kinlens.embedder.formats import claimed_size, format_of, name_of, open_image, readable
from kinlens.embedder.manifest import Interpolation, Preprocessing

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
_SIDEWAYS = (5, 6, 7, 8)  # turns that make the width of the stored image its height
_STRIP_ROWS = 256
_PILLOW_MEGAPIXELS = 178.0  # above this Pillow refuses by itself, whatever our limit says
_BOX_TOLERANCE = 1e-6  # what rounding in a browser may add

MAX_SIDE_PX = 2048
"""Of a picture that `render_jpeg` makes, in pixels."""

Box = tuple[float, float, float, float]
"""A part of an image: left, top, width, height as fractions 0..1 of the upright image."""

PixelBox = tuple[float, float, float, float]
"""A part of an image: left, top, right, bottom in pixels."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What an image may cost. All limits are checked before a pixel is decoded."""

    max_bytes: int = 20 * 2**20
    max_megapixels: float = 64.0
    max_side_px: int = 16384

    def __post_init__(self) -> None:
        if not 0 < self.max_megapixels <= _PILLOW_MEGAPIXELS:
            raise ValueError(
                f"max_megapixels = {self.max_megapixels} is outside 0..{_PILLOW_MEGAPIXELS:g}, "
                "what the decoder can be trusted with; choose a smaller limit"
            )


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the header claims: one of FORMATS, pixels as stored (of a JPEG or HEIC upright)."""

    format: str
    width: int
    height: int


def read_header(data: bytes, limits: ImageLimits | None = None) -> ImageHeader:
    """Check the header against the limits without decoding.

    Raises: EmptyImageError, ImageTooManyBytesError, UnsupportedFormatError, CorruptImageError,
        ImageTooLargeError.
    """
    with _open(data, limits or ImageLimits()) as image:
        kind, size = name_of(image), image.size
        if kind == "JPEG" and _orientation(image) in _SIDEWAYS:
            size = size[::-1]
        return ImageHeader(kind, *size)


def check_box(box: Sequence[float]) -> Box:
    """`box` (left, top, width, height) if it lies in the image; rounding is cut off.

    Raises: InvalidParameterError.
    """
    if len(box) != 4 or not all(math.isfinite(value) for value in box):
        raise _bad_box(box, "is not four finite numbers")
    left, top, width, height = map(float, box)
    if min(left, top) < 0 or max(left + width, top + height) > 1 + _BOX_TOLERANCE:
        raise _bad_box(box, "leaves the image")
    width, height = min(width, 1 - left), min(height, 1 - top)
    if width <= 0 or height <= 0:
        raise _bad_box(box, "has no area")
    return left, top, width, height


def decode(
    data: bytes,
    limits: ImageLimits | None = None,
    min_side_px: int | None = None,
    box: Box | None = None,
) -> Image.Image:
    """Decode to an upright RGB image, transparency laid on white; with `box` that part alone.

    With `min_side_px` a JPEG is decoded at the smallest of its built-in scales at which the shorter
    side of the result still has that many pixels: several times cheaper for a phone's photograph.

    Raises: as `read_header`; CorruptImageError also for a truncated file; InvalidParameterError
        for a box outside the image or smaller than a pixel.
    """
    box = None if box is None else check_box(box)
    with _open(data, limits or ImageLimits()) as image:
        if min_side_px is not None and name_of(image) == "JPEG":
            _draft(image, min_side_px, box)
        try:
            image.load()
            turn = _TURNS.get(_orientation(image))
            upright = _to_rgb(image) if turn is None else _to_rgb(image).transpose(turn)
        except MemoryError:
            raise
        except Exception as error:
            # Pillow's decoders raise many kinds of exception on damaged data.
            raise CorruptImageError(
                f"The {name_of(image)} image is truncated or damaged. Export it again from its "
                "source."
            ) from error
    return upright if box is None else _cut(upright, box)


def preprocess(
    data: bytes, spec: Preprocessing, limits: ImageLimits | None = None, box: Box | None = None
) -> NDArray[np.uint8]:
    """Decode, resize the shorter side to `spec.resize_px`, cut the centre: uint8 (3, S, S).

    The part inside `box` is treated as if it were the whole picture.

    Raises: as `decode`.
    """
    image = decode(data, limits, spec.resize_px, box)
    square = central_box(image.size, spec)
    return to_chw(resize_box(image, square, spec.crop_px, spec.interpolation))


def render_jpeg(data: bytes, limits: ImageLimits, side_px: int = MAX_SIDE_PX) -> bytes:
    """A picture for the screen: upright, a JPEG whose longer side is at most `side_px`.

    Raises: as `decode`.
    """
    header = read_header(data, limits)
    scale = min(1.0, side_px / max(header.width, header.height))
    image = decode(data, limits, math.ceil(min(header.width, header.height) * scale))
    if max(image.size) > side_px:
        scale = side_px / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def central_box(size: tuple[int, int], spec: Preprocessing) -> PixelBox:
    """The central square that `spec` keeps of an image of `size` = (width, height).

    Its corner lies on a whole pixel: half a pixel off would blur an image that needs no scaling.
    """
    side = min(size) * spec.crop_px / spec.resize_px
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    return left, top, left + side, top + side


def resize_box(
    image: Image.Image, box: PixelBox, size_px: int, interpolation: Interpolation = "bilinear"
) -> Image.Image:
    """Scale the part of `image` inside `box` to a square of `size_px`, anti-aliased."""
    resampling = Image.Resampling[interpolation.upper()]
    return image.resize((size_px, size_px), resampling, box=box)


def to_chw(image: Image.Image) -> NDArray[np.uint8]:
    """An RGB image as a contiguous array (3, H, W)."""
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


def _open(data: bytes, limits: ImageLimits) -> Image.Image:
    if not data:
        raise EmptyImageError("The image is empty (0 bytes). Send the content of an image file.")
    if len(data) > limits.max_bytes:
        raise ImageTooManyBytesError(
            f"The image has {len(data):,} bytes; the limit is {limits.max_bytes:,}. "
            "Resize or compress it."
        )
    try:
        image = open_image(data)
    except UnsupportedFormatError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLargeError(
            f"The image claims too many pixels ({error}); the limit is "
            f"{limits.max_megapixels:g} megapixels. Resize it."
        ) from error
    except Exception as error:
        _check_size(claimed_size(data), limits)
        raise _unreadable(data) from error
    _check_size(image.size, limits)
    if image.mode in ("I", "F"):
        raise UnsupportedFormatError(
            f"The {name_of(image)} image has 32 bits a pixel, which have no agreed range of "
            "brightness. Save it with 8 or 16 bits."
        )
    return image


def _check_size(size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    megapixels = width * height / 1e6
    if megapixels > limits.max_megapixels or max(width, height) > limits.max_side_px:
        raise ImageTooLargeError(
            f"The image is {width} x {height} px ({megapixels:.1f} MP); the limits are "
            f"{limits.max_megapixels:g} MP and {limits.max_side_px} px a side. Resize it."
        )


def _unreadable(data: bytes) -> CorruptImageError | UnsupportedFormatError:
    if format_of(data) is not None:
        return CorruptImageError(
            "The image starts like a picture but its header is damaged. "
            "Export it again from its source."
        )
    return UnsupportedFormatError(
        f"The content is not an image in a known format. Send one of {', '.join(readable())}; "
        "the name of a file does not change its format."
    )


def _draft(image: Image.Image, min_side_px: int, box: Box | None) -> None:
    width, height = (1.0, 1.0) if box is None else box[2:]
    if _orientation(image) in _SIDEWAYS:
        width, height = height, width
    scale = min_side_px / min(image.width * width, image.height * height)
    if scale < 1:
        image.draft(None, (round(image.width * scale), round(image.height * scale)))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _deep_grey_to_rgb(image)
    if image.has_transparency_data:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGB", rgba.size, "white")
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def _deep_grey_to_rgb(image: Image.Image) -> Image.Image:
    """16 bit grey: 0..65535 becomes 0..255, in strips, so that a scan needs little more memory."""
    values = np.asarray(image)
    grey = np.empty(values.shape, dtype=np.uint8)
    for start in range(0, len(values), _STRIP_ROWS):
        strip = values[start : start + _STRIP_ROWS].astype(np.float32)
        grey[start : start + _STRIP_ROWS] = (strip * (255.0 / 65535.0)).round()
    return Image.fromarray(grey).convert("RGB")


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:
        # A damaged EXIF block says nothing about the pixels; the photograph is used as stored.
        return 1


def _cut(image: Image.Image, box: Box) -> Image.Image:
    """The part of an upright image, on whole pixels."""
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
        f"crop = {shown} {fault}; send left,top,width,height as fractions of the upright image, "
        "from 0 to 1, such as 0.25,0.25,0.5,0.5."
    )
