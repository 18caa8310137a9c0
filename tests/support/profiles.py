"""ICC profiles for tests, written byte by byte, and the photo in the colours that they describe."""

import io
import struct
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

Array = NDArray[np.float64]

D65 = (0.3127, 0.3290)
SRGB_CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
POINTS = {
    "display-p3": (*D65, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060),
    "adobe-rgb": (*D65, 0.640, 0.330, 0.210, 0.710, 0.150, 0.060),
    "prophoto": (0.3457, 0.3585, 0.7347, 0.2653, 0.1596, 0.8404, 0.0366, 0.0001),
    "rec2020": (*D65, 0.708, 0.292, 0.170, 0.797, 0.131, 0.046),
}
"""x and y of white, red, green and blue."""
_CURVES = {"display-p3": SRGB_CURVE, "adobe-rgb": (2.2,), "prophoto": (1.8,), "rec2020": (2.4,)}
_D50 = (0.9642, 1.0, 0.8249)
_CONE = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


def named(name: str) -> bytes:
    """The profile of a colour space in POINTS."""
    columns = _columns(POINTS[name])
    tags = {f"{c}XYZ".encode(): _xyz(columns[:, n]) for n, c in enumerate("rgb")}
    return _file(b"RGB ", tags | {f"{c}TRC".encode(): _curve(_CURVES[name]) for c in "rgb"})


def grey(gamma: float) -> bytes:
    return _file(b"GRAY", {b"kTRC": _curve((gamma,))})


ToLab = Callable[[Array], Array]
"""(N, channels) to CIE Lab (N, 3)."""


def table(space: bytes, lab: ToLab, other: ToLab | None = None) -> bytes:
    """A profile with a table for the first intent, perhaps with an `other` for the second one."""
    tags = {b"A2B0": _table(space, lab)}
    if other is not None:
        tags[b"A2B1"] = _table(space, other)
    return _file(space, tags, b"\2\x40\0\0prtr", b"Lab ")


def _table(space: bytes, lab: ToLab, side: int = 7) -> bytes:
    channels = {b"CMYK": 4, b"RGB ": 3}[space]
    axes = [np.linspace(0, 1, side)] * channels
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, channels)
    values = (lab(grid) + np.array([0, 128, 128])) * [652.8, 256, 256]
    line = np.array([0, 65535], ">u2").tobytes()
    matrix = struct.pack(">9i", *(np.eye(3).ravel() * 65536).astype(int))
    head = b"mft2" + bytes(4) + struct.pack(">BBBx", channels, 3, side) + matrix
    content = values.clip(0, 65535).round().astype(">u2").tobytes()
    return head + struct.pack(">HH", 2, 2) + line * channels + content + line * 3


def press(ink: Array) -> Array:
    """CIE Lab of CMYK (N, 4) on paper; its black is a dark grey."""
    c, m, y, k = ink.T
    light = np.maximum((100 - 45 * c - 40 * m - 8 * y) * (1 - 0.85 * k), 5)
    return np.stack(
        [light, (-15 * c + 32 * m - 5 * y) * (1 - k), (-20 * c - 4 * m + 30 * y) * (1 - k)], -1
    )


def stored_in(image: Image.Image, profile: bytes) -> Image.Image:
    """The numbers that show an sRGB image in the colours of `profile`."""
    target = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    source, intent = ImageCms.createProfile("sRGB"), ImageCms.Intent.RELATIVE_COLORIMETRIC
    mode = "L" if profile[16:20] == b"GRAY" else "RGB"
    return ImageCms.buildTransform(source, target, "RGB", mode, intent).apply(image)


def _columns(points: tuple[float, ...]) -> Array:
    """XYZ of red, green and blue, one a column, with white moved to D50."""
    white, *primaries = (np.array([x / y, 1, (1 - x - y) / y]) for x, y in _pairs(points))
    columns = np.stack(primaries, axis=1)
    columns = columns * np.linalg.solve(columns, white)
    scale = np.diag((_CONE @ _D50) / (_CONE @ white))
    moved: Array = np.linalg.inv(_CONE) @ scale @ _CONE @ columns
    return moved


def _pairs(values: tuple[float, ...]) -> list[tuple[float, float]]:
    return list(zip(values[::2], values[1::2], strict=True))


def _numbers(values: Array | tuple[float, ...]) -> bytes:
    return struct.pack(f">{len(values)}i", *(round(float(v) * 65536) for v in values))


def _xyz(values: Array | tuple[float, ...]) -> bytes:
    return b"XYZ " + bytes(4) + _numbers(values)


def _curve(numbers: tuple[float, ...]) -> bytes:
    kind = 0 if len(numbers) == 1 else 3
    return b"para" + bytes(4) + struct.pack(">HH", kind, 0) + _numbers(numbers)


def _file(
    space: bytes,
    tags: Mapping[bytes, bytes],
    kind: bytes = b"\4\x30\0\0mntr",
    pcs: bytes = b"XYZ ",
) -> bytes:
    tags = {b"wtpt": _xyz(_D50), **tags}
    index, content = struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        index += name + struct.pack(">II", 132 + 12 * len(tags) + len(content), len(value))
        content += value + bytes(-len(value) % 4)
    size = struct.pack(">I", 128 + len(index) + len(content))
    head = size + bytes(4) + kind + space + pcs + bytes(12) + b"acsp" + bytes(28)
    return head + _numbers(_D50) + bytes(48) + index + content
