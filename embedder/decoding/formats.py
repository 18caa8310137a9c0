"""Image formats: detected from the first bytes, opened by Pillow.

AVIF and HEIC share one container format, whose first box names the codecs. Their decoders are
loaded with the first such image, so other processes pay nothing for them.
"""

import contextlib
import io
import re
from importlib import import_module
from typing import Any

from PIL import GifImagePlugin, Image, UnidentifiedImageError

from kinlens.embedder.decoding.metadata import (
    colours_of,
    strip_avif,
    strip_jpeg,
    strip_png,
    strip_webp,
)
from kinlens.embedder.errors import UnsupportedFormatError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF", "HEIC")
"""Formats that are decoded, detected from the content. Of an animation, the first frame is used.
HEIC needs the extra `heif`."""

SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"),
    *(".avif", ".heic", ".heif", ".hif"),
)
"""File name suffixes that a folder walk treats as images, in upper or lower case. The format is
still detected from the content."""

_LOADED_LATE = (
    *("MpoImagePlugin", "TiffImagePlugin", "WebPImagePlugin"),
    *("ImageCms", "ImageColor", "ImagePalette"),
)
_CONTAINERS = ("AVIF", "HEIC")
_ALWAYS = tuple(name for name in FORMATS if name not in _CONTAINERS)
_SIGNATURES = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+"), "TIFF"),
}
_BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis"), "HEIC"),
    **dict.fromkeys((b"hevc", b"hevx", b"hevm", b"hevs"), "HEIC"),
}
_GENERIC_BRANDS = (b"mif1", b"msf1")
_MAX_BRANDS_BYTES = 512
_HEADER_BYTES = 2**16
_SIZE_BOX = re.compile(rb"ispe....(....)(....)", re.DOTALL)
_STRIP = {"JPEG": strip_jpeg, "PNG": strip_png, "WEBP": strip_webp, "AVIF": strip_avif}
_BITS, _PHOTOMETRIC = 258, 262  # tags of a TIFF
_PILLOW_NAMES = {"MPO": "JPEG", "HEIF": "HEIC"}


def format_of(data: bytes) -> str | None:
    """The format (one of FORMATS) that the first bytes indicate; None for other content."""
    for signature, name in _SIGNATURES.items():
        if data.startswith(signature):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] != b"ftyp":
        return None
    brand, length = data[8:12], min(int.from_bytes(data[:4], "big"), _MAX_BRANDS_BYTES)
    if brand not in _GENERIC_BRANDS:
        return _BRANDS.get(brand)
    others = {_BRANDS.get(data[at : at + 4]) for at in range(16, length, 4)}
    return next((name for name in _CONTAINERS if name in others), None)


def open_image(data: bytes, as_shown: bool = True) -> Image.Image:
    """Open an image and read its header. `info["icc_profile"]` describes its colours, if known.

    Unless `as_shown`, what browsers ignore is not removed first: XMP may turn the image.

    Raises: UnsupportedFormatError if the decoder of its format is not installed; any exception of
        Pillow.
    """
    kind = format_of(data)
    if kind in _LOADERS:
        _LOADERS[kind]()
    if not as_shown:
        with contextlib.suppress(Exception):
            return _opened(data, kind)
    stripped, info = _STRIP[kind](data) if kind in _STRIP else (data, {})
    image = _opened(stripped, kind)
    for name, fact in (info | _facts(image)).items():
        image.info.setdefault(name, fact)
    image.info.pop("xmp", None)  # Pillow would take the orientation from it
    return image


def _facts(image: Image.Image) -> dict[str, Any]:
    """What the colours of an opened image depend on, apart from its pixels."""
    if isinstance(image, GifImagePlugin.GifImageFile):
        return {"frame": image.tile[0].extents}
    if tags := getattr(image, "tag_v2", None):
        return {"bits": tags.get(_BITS, (8,))[0], "inverted": tags.get(_PHOTOMETRIC) == 0}
    if (nclx := image.info.get("nclx_profile")) and "icc_profile" not in image.info:
        return colours_of(nclx["color_primaries"], nclx["transfer_characteristics"])
    return {}


def _opened(data: bytes, kind: str | None) -> Image.Image:
    names = {"AVIF": ("AVIF",), "HEIC": ("HEIF",)}.get(kind or "", _ALWAYS)
    try:
        return Image.open(io.BytesIO(data), formats=names)
    except (UnidentifiedImageError, ValueError):
        if kind != "AVIF":
            raise
        # Pillow reads the EXIF block of an AVIF on opening; a damaged one must not hide the pixels.
        return Image.open(io.BytesIO(data.replace(b"Exif", b"skip")), formats=names)


def load_all() -> None:
    """Load the decoders of all formats now, for a process that is about to lose file access.

    Pillow loads some plug-ins, and the AVIF and HEIC libraries, only when an image needs them.
    """
    Image.preinit()
    for name in _LOADED_LATE:
        import_module(f"PIL.{name}")
    readable_formats()


def readable_formats() -> tuple[str, ...]:
    """The subset of FORMATS whose decoders are installed."""
    found = []
    for name in FORMATS:
        with contextlib.suppress(UnsupportedFormatError):
            _LOADERS.get(name, Image.preinit)()
            found.append(name)
    return tuple(found)


def opened_format(image: Image.Image) -> str:
    """The format (one of FORMATS) of an image that `open_image` opened."""
    # MPO, written by phones, is a JPEG followed by further JPEGs. The first one is the photo.
    return _PILLOW_NAMES.get(str(image.format), str(image.format))


def claimed_size(data: bytes) -> tuple[int, int]:
    """Width and height in pixels from the header of an AVIF or HEIC; (0, 0) if not found.

    The AVIF and HEIC decoders reject images above their own limits without reporting the size.
    """
    if format_of(data) not in _CONTAINERS:
        return 0, 0
    claims = [
        (int.from_bytes(width, "big"), int.from_bytes(height, "big"))
        for width, height in _SIZE_BOX.findall(data, 0, _HEADER_BYTES)
    ]
    return max(claims, key=lambda size: size[0] * size[1], default=(0, 0))


def _load_avif() -> None:
    from PIL import AvifImagePlugin

    if not AvifImagePlugin.SUPPORTED:
        raise UnsupportedFormatError(
            "The image is an AVIF file, which this build of Pillow cannot read. Convert it to "
            "JPEG, or install the official Pillow wheel where Kinlens runs: pip install "
            "--force-reinstall pillow."
        )
    # Pillow has no other way to set this. Images are decoded in parallel, each on one core.
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1


def _load_heic() -> None:
    try:
        from pillow_heif import register_heif_opener
    except ImportError as error:
        raise UnsupportedFormatError(
            "The image is a HEIC file (a format of phones), and no HEIC decoder is installed. "
            "Convert it to JPEG, or install the decoder where Kinlens runs: pip install "
            "'kinlens[heif]'."
        ) from error
    if "HEIF" not in Image.OPEN:
        register_heif_opener(
            decode_threads=1, thumbnails=False, depth_images=False, aux_images=False
        )


_LOADERS = {"AVIF": _load_avif, "HEIC": _load_heic}
