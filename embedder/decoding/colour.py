"""Colours of a decoded image: its colour space to sRGB, transparency to white.

The aim is the image that a browser shows. A colour space is described by an ICC profile, or by
primaries and a transfer function (PNG, AVIF, HEIC), from which a profile is made here.
"""

import io
import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from PIL import Image, ImageCms

Space = tuple[tuple[float, ...], bytes]
"""x and y of white, red, green and blue; the transfer function as an ICC curve."""

_STRIP_ROWS = 256
MAX_PROFILE_BYTES = 8 * 2**20
"""Larger ICC profiles are ignored."""

_CACHED = 4
_HEADER_BYTES = 128
_INVISIBLE = 2  # levels of 255
_SPACES = {"L": "GRAY", "RGB": "RGB ", "RGBA": "RGB ", "CMYK": "CMYK"}
_CLASSES = ("mntr", "scnr", "prtr", "spac")
_D50 = (0.9642, 1.0, 0.8249)
_BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)

_D65, _C = (0.3127, 0.3290), (0.310, 0.316)
_BT_601 = (*_D65, 0.630, 0.340, 0.310, 0.595, 0.155, 0.070)
_SRGB = (*_D65, 0.640, 0.330, 0.300, 0.600, 0.150, 0.060)
_PRIMARIES = {
    1: _SRGB,
    4: (*_C, 0.670, 0.330, 0.210, 0.710, 0.140, 0.080),
    5: (*_D65, 0.640, 0.330, 0.290, 0.600, 0.150, 0.060),
    6: _BT_601,
    7: _BT_601,
    8: (*_C, 0.681, 0.319, 0.243, 0.692, 0.145, 0.049),
    9: (*_D65, 0.708, 0.292, 0.170, 0.797, 0.131, 0.046),
    11: (0.314, 0.351, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060),
    12: (*_D65, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060),
    22: (*_D65, 0.630, 0.340, 0.295, 0.605, 0.155, 0.077),
}
"""ITU-T H.273, table 2: x and y of white, red, green and blue."""
_CURVES = {
    **dict.fromkeys((1, 6, 11, 14, 15), (2.4,)),
    4: (2.2,),
    5: (2.8,),
    7: (1 / 0.45, 1 / 1.1115, 0.1115 / 1.1115, 0.25, 0.0913),
    8: (1.0,),
    17: (2.6,),
}
"""Table 3: parameters of transfer functions as browsers show them; others are that of sRGB."""
_SRGB_CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
_PQ, _HLG = 16, 18
_VIDEO = (1, 6, 14, 15)  # sRGB if they come from a video codec
_SRGB_GAMMA = (0.95 / 2.2, 1.05 / 2.2)
_WHITE_NITS = 406.0
_SHOULDER = (0, 0.5, 0.763, 1.117, 2.46), (0, 0.5, 0.665, 0.775, 1)
"""HDR light, as a multiple of white, to what Chromium shows on a screen without HDR."""


def to_srgb(image: Image.Image) -> Image.Image:
    """A loaded image in 8-bit sRGB on a white background; `image` may be changed.

    Its ICC profile is `info["icc_profile"]`. One that is damaged or describes another kind of
    colours is ignored, as in browsers.
    """
    plain, profile = _eight_bit(image), image.info.get("icc_profile")
    alpha = plain.getchannel("A") if plain.mode == "LA" else None
    if alpha is not None:
        plain = plain.getchannel("L")
    if profile is not None:
        if plain.mode == "L" and profile[16:20] == b"RGB ":
            plain = plain.convert("RGB")
        if (transform := _transform(profile, plain.mode)) is not None:
            inside = plain.mode == transform.output_mode
            plain = transform.apply(plain, plain if inside else None)
    if alpha is not None:
        plain = plain.convert("RGB")
        plain.putalpha(alpha)
    shown, frame = on_white(plain), image.info.get("frame")
    if frame is not None and frame != (0, 0, *image.size):
        white = Image.new("RGB", image.size, "white")
        white.paste(shown.crop(frame), frame)
        return white
    return shown


def on_white(image: Image.Image) -> Image.Image:
    """A loaded image as RGB on a white background, with its stored values of colour."""
    if image.mode.startswith("I;16"):
        return _deep_grey(image).convert("RGB")
    if image.has_transparency_data:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGB", rgba.size, "white")
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def _eight_bit(image: Image.Image) -> Image.Image:
    """The image as L, LA, RGB, RGBA or CMYK."""
    clear, bits = image.info.get("transparency"), image.info.get("bits", 16)
    if image.mode.startswith("I;16"):
        grey = _deep_grey(image, bits, image.info.get("inverted", False))
        if not isinstance(clear, int):
            return grey
        opaque = Image.fromarray(np.asarray(image) != clear).convert("L")
        return Image.merge("LA", (grey, opaque))
    if image.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        return ImageCms.buildTransform(lab, srgb, "LAB", "RGB").apply(image)
    if image.mode in ("LA", "RGBA", "CMYK"):
        return image
    # Pillow scales the pixels to 8 bits, but not the one colour that is transparent.
    if image.mode == "L" and isinstance(clear, int) and bits < 8:
        image.info["transparency"] = clear * 255 // (2**bits - 1)
    elif image.mode == "RGB" and isinstance(clear, tuple) and bits == 16:
        image.info["transparency"] = tuple(value >> 8 for value in clear)
    if image.has_transparency_data:
        return image.convert("RGBA")
    mode = "L" if image.mode in ("1", "L") else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _deep_grey(image: Image.Image, bits: int = 16, inverted: bool = False) -> Image.Image:
    """Grey of up to 16 bits as 8-bit grey, in strips to save memory on large scans."""
    values = np.asarray(image)
    grey = np.empty(values.shape, dtype=np.uint8)
    for start in range(0, len(values), _STRIP_ROWS):
        strip = values[start : start + _STRIP_ROWS].astype(np.float32)
        grey[start : start + _STRIP_ROWS] = (strip * (255.0 / (2**bits - 1))).round()
    return Image.fromarray(255 - grey if inverted else grey)


@lru_cache(_CACHED)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """From `profile` to sRGB; None if it is unusable or changes no colour visibly."""
    if len(profile) > MAX_PROFILE_BYTES or mode not in _SPACES:
        return None
    target = "RGBA" if mode == "RGBA" else "RGB"
    try:
        # Browsers use the first table whatever the intent, and no black point compensation.
        end = _HEADER_BYTES + 4 + 12 * int.from_bytes(profile[128:132], "big")
        first = (
            profile[:end].replace(b"A2B1", b"none") if b"A2B0" in profile[:end] else profile[:end]
        )
        source = ImageCms.ImageCmsProfile(io.BytesIO(first + profile[end:]))
        kind = source.profile
        if kind.xcolor_space != _SPACES[mode] or kind.device_class not in _CLASSES:
            return None
        transform = ImageCms.buildTransform(
            source,
            ImageCms.createProfile("sRGB"),
            mode,
            target,
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
        )
    except (OSError, ImageCms.PyCMSError):
        return None
    if mode == "CMYK":
        return transform
    colours = _all_colours(mode)
    change = np.asarray(transform.apply(colours), np.int16) - np.asarray(colours.convert(target))
    return transform if np.abs(change).max() > _INVISIBLE else None


@lru_cache
def _all_colours(mode: str) -> Image.Image:
    """16 levels of each channel, in all combinations."""
    levels = np.arange(0, 256, 17, dtype=np.uint8)
    cube = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(64, 64, 3)
    return Image.fromarray(cube).convert(mode)


def cicp_profile(primaries: int, transfer: int, video: bool = False) -> bytes | None:
    """The ICC profile of a colour space by its numbers in ITU-T H.273; None if unknown.

    `video`: they describe an image of a video codec (AVIF, HEIC).
    """
    if primaries not in _PRIMARIES:
        return None
    if transfer in (_PQ, _HLG):
        curve = _hdr_curve(transfer)
    elif transfer in _CURVES and not (video and transfer in _VIDEO):
        curve = _curve(*_CURVES[transfer])
    else:
        curve = _curve(*_SRGB_CURVE)
    return _matrix_profile(_PRIMARIES[primaries], curve)


def power_profile(gamma: float, points: Sequence[float] | None) -> bytes | None:
    """The ICC profile of light ** gamma with x and y of white, red, green, blue, or those of sRGB.

    None for sRGB, for almost its curve, and if the points span no colours.
    """
    if gamma <= 0 or (points is None and _SRGB_GAMMA[0] < gamma < _SRGB_GAMMA[1]):
        return None
    try:
        return _matrix_profile(points or _SRGB, _curve(1 / gamma))
    except (ValueError, ArithmeticError, struct.error):
        return None


def _matrix_profile(points: Sequence[float], curve: bytes) -> bytes:
    """An ICC profile of a colour space: x and y of white, red, green, blue; one curve for all.

    Raises: ValueError, ZeroDivisionError, numpy.linalg.LinAlgError unless the primaries span it.
    """
    xyz = np.array(
        [[x / y, 1, (1 - x - y) / y] for x, y in zip(points[::2], points[1::2], strict=True)]
    )
    white, colours = xyz[0], xyz[1:].T
    colours = colours * np.linalg.solve(colours, white)
    scale = (_BRADFORD @ _D50) / (_BRADFORD @ white)  # adapts white to that of all profiles
    colours = np.linalg.solve(_BRADFORD, scale[:, None] * (_BRADFORD @ colours))
    tags = {b"wtpt": _xyz(_D50)}
    for name, column in zip((b"r", b"g", b"b"), colours.T, strict=True):
        tags |= {name + b"XYZ": _xyz(column), name + b"TRC": curve}
    table, content = struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        start = _HEADER_BYTES + 4 + 12 * len(tags) + len(content)
        table += name + struct.pack(">II", start, len(value))
        content += value
    size = struct.pack(">I", _HEADER_BYTES + len(table) + len(content))
    head = size + bytes(4) + b"\4\x30\0\0mntrRGB XYZ " + bytes(12) + b"acsp" + bytes(28)
    return head + _numbers(_D50) + bytes(48) + table + content


def _curve(*numbers: float) -> bytes:
    """A transfer function: x ** g, or for g, a, b, c, d: (ax + b) ** g from d on, else cx."""
    kind = {1: 0, 5: 3}[len(numbers)]
    return b"para" + bytes(4) + struct.pack(">HH", kind, 0) + _numbers(numbers)


def _hdr_curve(transfer: int) -> bytes:
    """The curve of PQ or HLG (ITU-R BT.2100) as a table."""
    signal = np.linspace(0, 1, 1024)
    if transfer == _PQ:
        root = signal ** (1 / 78.84375)
        nits = 1e4 * (np.maximum(root - 0.8359375, 0) / (18.8515625 - 18.6875 * root)) ** 6.27739
    else:
        upper = (np.exp((signal - 0.55991073) / 0.17883277) + 0.28466892) / 12
        nits = 1e3 * np.where(signal < 0.5, signal**2 / 3, upper) ** 1.2
    shown = np.interp(nits / _WHITE_NITS, *_SHOULDER)
    table = (65535 * shown).round().astype(">u2").tobytes()
    return b"curv" + bytes(4) + struct.pack(">I", len(signal)) + table


def _xyz(values: Sequence[float]) -> bytes:
    return b"XYZ " + bytes(4) + _numbers(values)


def _numbers(values: Sequence[float]) -> bytes:
    return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))
