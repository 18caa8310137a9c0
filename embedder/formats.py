"""The formats of images: known by their first bytes, opened by Pillow.

AVIF and HEIC lie in one kind of container, whose first box names its codecs. Their decoders are
loaded with the first such image, so that a process which never sees one pays nothing for them.
"""

import contextlib
import io
import re
from importlib import import_module

from PIL import Image, UnidentifiedImageError

from kinlens.embedder.errors import UnsupportedFormatError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF", "HEIC")
"""Formats that are decoded, by content; of an animation the first frame. HEIC is an extra."""

SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"),
    *(".avif", ".heic", ".heif", ".hif"),
)
"""Names that a folder walk takes for images, in any case; the content decides in the end."""

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
_OF_ANY_CODEC = (b"mif1", b"msf1")
_MOST_BRANDS_BYTES = 512
_HEADER_BYTES = 2**16
_SIZE_BOX = re.compile(rb"ispe....(....)(....)", re.DOTALL)
_HEADS = {"MPO": "JPEG", "HEIF": "HEIC"}


def format_of(data: bytes) -> str | None:
    """The one of FORMATS that the first bytes announce; None for other content."""
    for signature, name in _SIGNATURES.items():
        if data.startswith(signature):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] != b"ftyp":
        return None
    brand, length = data[8:12], min(int.from_bytes(data[:4], "big"), _MOST_BRANDS_BYTES)
    if brand not in _OF_ANY_CODEC:
        return _BRANDS.get(brand)
    others = {_BRANDS.get(data[at : at + 4]) for at in range(16, length, 4)}
    return next((name for name in _CONTAINERS if name in others), None)


def open_image(data: bytes) -> Image.Image:
    """The image with its header read.

    Raises: UnsupportedFormatError if the decoder of its format is not installed; what Pillow
        raises.
    """
    kind = format_of(data)
    if kind in _LOADERS:
        _LOADERS[kind]()
    names = {"AVIF": ("AVIF",), "HEIC": ("HEIF",)}.get(kind or "", _ALWAYS)
    try:
        return Image.open(io.BytesIO(data), formats=names)
    except (UnidentifiedImageError, ValueError):
        if kind != "AVIF":
            raise
        # A damaged EXIF block, which is read at once here, says nothing about the pixels.
        return Image.open(io.BytesIO(data.replace(b"Exif", b"skip")), formats=names)


def load_all() -> None:
    """Load the decoders of all formats now, for a process that will not be able to open a file.

    Otherwise Pillow loads parts of itself, and AVIF and HEIC their libraries, with the first image
    that needs them.
    """
    Image.preinit()
    for name in _LOADED_LATE:
        import_module(f"PIL.{name}")
    readable()


def readable() -> tuple[str, ...]:
    """The FORMATS whose decoders are installed."""
    found = []
    for name in FORMATS:
        with contextlib.suppress(UnsupportedFormatError):
            _LOADERS.get(name, Image.preinit)()
            found.append(name)
    return tuple(found)


def name_of(image: Image.Image) -> str:
    """The one of FORMATS that `open_image` found."""
    # A phone's multi-picture file is a JPEG with more JPEGs behind it; the first is the photograph.
    return _HEADS.get(str(image.format), str(image.format))


def claimed_size(data: bytes) -> tuple[int, int]:
    """Width and height that the header of an AVIF or HEIC claims; 0, 0 without a claim.

    Their decoders refuse images above limits of their own without telling the size.
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
            "The content is an AVIF image, which this build of Pillow does not read. Install "
            "Pillow's own wheel (pip install --force-reinstall pillow), or send a JPEG."
        )
    # Pillow has no other way to say it. Images are decoded side by side, each on one core.
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1


def _load_heic() -> None:
    try:
        from pillow_heif import register_heif_opener
    except ImportError as error:
        raise UnsupportedFormatError(
            "The content is a HEIC image, as phones take them, which needs the extra heif where "
            "Kinlens runs: pip install 'kinlens[heif]'. Or send it as a JPEG."
        ) from error
    if "HEIF" not in Image.OPEN:
        register_heif_opener(
            decode_threads=1, thumbnails=False, depth_images=False, aux_images=False
        )


_LOADERS = {"AVIF": _load_avif, "HEIC": _load_heic}
