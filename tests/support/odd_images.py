"""Broken and odd images by name, each with the status that a search with it must have.

Nothing here asks the decoder what it thinks: statuses are what a caller is promised.
    200 it is a picture        400 no bytes              413 too many pixels
    415 not one of our formats 422 damaged or truncated
"""

import base64
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

from tests.tiny import encoded, picture

PHOTOGRAPH = 3
SIZE = (96, 64)
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP")
PROBLEMS = {
    400: "empty-image",
    413: "image-too-large",
    415: "unsupported-format",
    422: "corrupt-image",
}
_UNDO = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
_PNG = b"\x89PNG\r\n\x1a\n"
_ADAM7 = (
    *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)),
    *((0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
)

_ARITHMETIC = """
/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAoHBwgHBgoICAgLCgoLDhgQDg0NDh0VFhEYIx8lJCIfIiEmKzcvJik0KSEi
MEExNDk7Pj4+JS5ESUM8SDc9Pjv/2wBDAQoLCw4NDhwQEBw7KCIoOzs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozs7
Ozs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozv/yQARCABAAGADASIAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwDSpG13
EOj3xUEJ1oq2fIRamyefyzkH27Qg+9g9KmamNNlP+3YsxLhECM7Xh9UdZm64it+5KYr8TpqSA5MIHxt3et1JDGktgI4w
ZQrW+5mN9pNDr+r20uBOBu7rOid2+UZHro38lW0mjbIY/U6rljuIK6bT4w+wuhzvyfG3UWS7ol+yIb3bAdLdSiwBon9X
gQof8kT5PcTzKxz0pyoVS4l/jsrI9GNFM9UwRX1ldtgoGCsDWBSBbZ8oH9C0jrWk7JDbqIab0I7XUeQJ6KUWtppSVjHg
FOg6fUCPNZMzX9A3kFMCy6VomFn9bn7XMT6XFbdNzLwbYRzkAtYw8j6rSLjTXPq4ephP1h9l4weY5s0nm7Tv4oTxR85Q
QvUrm+DFnKmu3RYnbPq6oAfTw2Ma9hIUYpMFijbDB4xlnr8nzybKYo4g1vhG/fgVz+/1QPNYY83T2XubBY6iab81EJSv
F7pF+dYZp8JA0TT4I4nC95JF+VaDiogA3JqNVDsUr+qfW7Uz/G9JfoSkeTdHbjVa+bMO888dZlwahil3zaHRwxoP4Z2c
baHItV0MwksBTA+vMhSCnQS1PjiQtsEeR+Pofa58Vgcl3hV3zsxRfonyax/DElU68kCASYyLvVFaxg0tqn3VUs04Jxen
0gD22401fIGoXhIk2si36eSm53wpLo9dZo2t8z0Fv3Wu4fHT8sZfHqVGR8LbMOtrARse0sQpxVOH9zRCExGPlOUSy7xt
3rGji9K4xQz/2Q==
"""
"""The photograph with arithmetic instead of Huffman codes, which Pillow reads and cannot write."""


@dataclass(frozen=True)
class OddImage:
    """`same`: it shows the photograph, whatever its form; `filename` is what the client claims."""

    name: str
    data: bytes
    status: int = 200
    same: bool = False
    filename: str = "query.jpg"


@cache
def odd_images() -> tuple[OddImage, ...]:
    """All of them."""
    groups: tuple[Callable[[], Iterator[OddImage]], ...] = (
        *(_modes, _tiff_kinds, _turns, _jpeg_kinds, _png_kinds, _colours, _animations, _sizes),
        *(_truncations, _claims, _bombs, _other_formats, _polyglots, _noise, _metadata),
        *(_damaged_png, _damaged_jpeg, _damaged_rest, _names),
    )
    images = tuple(image for group in groups for image in group())
    assert len({image.name for image in images}) == len(images)
    return images


def photograph(number: int = PHOTOGRAPH) -> Image.Image:
    """A smooth picture without symmetry."""
    return picture(number, SIZE)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(size: tuple[int, int], depth: int, colour: int, content: bytes, *, interlace: int = 0):
    """A PNG file of chunks: IHDR, then `content`, then IEND."""
    header = struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, interlace)
    return _PNG + chunk(b"IHDR", header) + content + chunk(b"IEND", b"")


def idat(rows: bytes) -> bytes:
    return chunk(b"IDAT", zlib.compress(rows, 9))


def filtered(pixels: NDArray[np.generic]) -> bytes:
    """Rows of a PNG, each with its filter byte."""
    return b"".join(b"\0" + row.tobytes() for row in pixels)


def tiff(tags: dict[int, tuple[int, int, int]], content: bytes = b"", next_ifd: int = 0) -> bytes:
    """A little-endian TIFF: `content` from byte 8 on, then one directory."""
    entries = b"".join(struct.pack("<HHII", tag, *value) for tag, value in sorted(tags.items()))
    at = 8 + len(content)
    directory = struct.pack("<H", len(tags)) + entries + struct.pack("<I", next_ifd)
    return b"II*\0" + struct.pack("<I", at) + content + directory


def grey_tiff(width: int, height: int, **changes: tuple[int, int, int]) -> bytes:
    """An uncompressed grey TIFF of one strip; `t<tag>` changes a tag."""
    content = bytes(min(width * height, 64))
    tags = {
        256: (4, 1, width),
        257: (4, 1, height),
        258: (3, 1, 8),
        259: (3, 1, 1),
        262: (3, 1, 1),
        273: (4, 1, 8),
        277: (3, 1, 1),
        278: (4, 1, height),
        279: (4, 1, len(content)),
    }
    return tiff(tags | {int(name[1:]): value for name, value in changes.items()}, content)


def gif(size: tuple[int, int], blocks: bytes, flags: int = 0x80) -> bytes:
    palette = b"\0\0\0\xff\xff\xff" if flags & 0x80 else b""
    return b"GIF89a" + struct.pack("<HHBBB", *size, flags, 0, 0) + palette + blocks


def gif_frame(size: tuple[int, int], data: bytes = b"\x02\x02\x4c\x01\x00") -> bytes:
    return b"," + struct.pack("<HHHHB", 0, 0, *size, 0) + data


def bmp(size: tuple[int, int], bits: int = 24, compression: int = 0, pixels: bytes = b"") -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, *size, 1, bits, compression, len(pixels), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(pixels), 0, 0, 54) + info + pixels


def webp(kind: bytes, data: bytes) -> bytes:
    body = b"WEBP" + kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def jpeg_parts(data: bytes) -> list[tuple[int, bytes]]:
    """The segments of a JPEG up to its scan, the scan being the last."""
    parts, at = [], 2
    while data[at + 1] != 0xDA:
        length = struct.unpack(">H", data[at + 2 : at + 4])[0]
        parts.append((data[at + 1], data[at : at + 2 + length]))
        at += 2 + length
    return [*parts, (0xDA, data[at:])]


def without(data: bytes, marker: int) -> bytes:
    """A JPEG that lacks every segment of this kind."""
    return data[:2] + b"".join(part for kind, part in jpeg_parts(data) if kind != marker)


def claiming(width: int, height: int) -> bytes:
    """A JPEG whose frame header claims this size."""
    sizes = struct.pack(">HH", height, width)
    return data_with_frame(lambda frame: frame[:5] + sizes + frame[9:])


def data_with_frame(change: Callable[[bytes], bytes]) -> bytes:
    data = encoded(photograph(), "JPEG")
    return data[:2] + b"".join(
        change(part) if kind == 0xC0 else part for kind, part in jpeg_parts(data)
    )


def oriented(kind: str, orientation: int) -> bytes:
    """The photograph stored turned, with the EXIF orientation that undoes it."""
    image = photograph()
    if orientation in _UNDO:
        image = image.transpose(_UNDO[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if kind in ("JPEG", "WEBP") else {}
    return encoded(image, kind, exif=exif.tobytes(), **options)


def _modes() -> Iterator[OddImage]:
    image = photograph()
    for kind in FORMATS:
        options = {"quality": 95} if kind in ("JPEG", "WEBP") else {}
        yield OddImage(f"plain-{kind}", encoded(image, kind, **options), same=True)
        for mode in ("1", "L", "P"):
            if (kind, mode) != ("JPEG", "P"):
                yield OddImage(f"mode-{mode}-{kind}", encoded(image.convert(mode), kind, **options))
    for kind in ("PNG", "WEBP", "TIFF", "BMP"):
        opaque = image.convert("RGBA")
        yield OddImage(f"opaque-alpha-{kind}", encoded(opaque, kind), same=kind != "WEBP")
    for kind in ("PNG", "WEBP", "TIFF", "GIF"):
        clear = image.convert("RGBA")
        clear.putalpha(0)
        yield OddImage(f"all-transparent-{kind}", encoded(clear, kind))
    for kind in ("PNG", "TIFF"):
        yield OddImage(f"mode-LA-{kind}", encoded(image.convert("LA"), kind))
        deep = np.asarray(image.convert("L")).astype(np.uint16) * 257
        yield OddImage(f"grey-16-bit-{kind}", encoded(Image.fromarray(deep), kind))
    yield OddImage("webp-lossless", encoded(image, "WEBP", lossless=True), same=True)
    yield OddImage("webp-quality-0", encoded(image, "WEBP", quality=0))
    yield OddImage("gif-interlaced", encoded(image.convert("P"), "GIF", interlace=1))


def _tiff_kinds() -> Iterator[OddImage]:
    image = photograph()
    for mode in ("RGBX", "CMYK", "YCbCr", "LAB"):
        converted = _to_lab(image) if mode == "LAB" else image.convert(mode)
        yield OddImage(f"tiff-{mode}", encoded(converted, "TIFF"), same=mode in ("RGBX", "CMYK"))
    for name in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "lzma", "zstd"):
        data = encoded(image, "TIFF", compression=name)
        yield OddImage(f"tiff-compression-{name}", data, same=True)
    for name in ("group3", "group4", "tiff_ccitt"):
        yield OddImage(f"tiff-{name}", encoded(image.convert("1"), "TIFF", compression=name))
    yield OddImage("tiff-big", encoded(image, "TIFF", big_tiff=True), same=True)
    pages = encoded(image, "TIFF", save_all=True, append_images=[photograph(1)])
    yield OddImage("tiff-two-pages-is-its-first", pages, same=True)
    for name, dtype in (("float", np.float32), ("int32", np.int32)):
        values = Image.fromarray(np.asarray(image.convert("L")).astype(dtype))
        yield OddImage(f"tiff-{name}", encoded(values, "TIFF"), 415)
    yield OddImage("tiff-by-hand", grey_tiff(8, 8))
    motorola = b"MM\0*" + struct.pack(">I", 8) + struct.pack(">H", 0) + bytes(4)
    yield OddImage("tiff-big-endian-without-tags", motorola, 422)


def _to_lab(image: Image.Image) -> Image.Image:
    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    converted = ImageCms.profileToProfile(image, srgb, lab, outputMode="LAB")
    assert converted is not None
    return converted


def _turns() -> Iterator[OddImage]:
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        for orientation in range(1, 9):
            data = oriented(kind, orientation)
            yield OddImage(f"orientation-{orientation}-{kind}", data, same=True)
    for orientation in (0, 9, 255, 65535):
        data = oriented("JPEG", orientation)
        yield OddImage(f"orientation-{orientation}-means-none", data, same=True)
    text = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x04\0\0\0six\0\0\0\0\0"
    good = encoded(photograph(), "JPEG", quality=95)
    yield OddImage("orientation-as-text", encoded(photograph(), "JPEG", exif=text), same=True)
    two = good[:2] + segment(0xE1, b"Exif\0\0broken") + good[2:]
    yield OddImage("exif-that-is-broken", two, same=True)


def _jpeg_kinds() -> Iterator[OddImage]:
    image = photograph()
    for name, options in {
        "progressive": {"progressive": True, "quality": 95},
        "optimized": {"optimize": True, "quality": 95},
        "restart-markers": {"restart_marker_blocks": 2, "quality": 95},
        "4-4-4": {"subsampling": 0, "quality": 95},
        "4-2-2": {"subsampling": 1, "quality": 95},
        "4-2-0": {"subsampling": 2, "quality": 95},
        "quality-100": {"quality": 100},
        "stored-as-rgb": {"keep_rgb": True, "quality": 95},
    }.items():
        yield OddImage(f"jpeg-{name}", encoded(image, "JPEG", **options), same=True)
    yield OddImage("jpeg-quality-1", encoded(image, "JPEG", quality=1))
    cmyk = encoded(image.convert("CMYK"), "JPEG", quality=95)
    yield OddImage("jpeg-cmyk", cmyk, same=True)
    pair = encoded(image, "MPO", save_all=True, append_images=[photograph(1)], quality=95)
    yield OddImage("jpeg-multi-picture-is-its-first", pair, same=True)
    yield OddImage("jpeg-multi-picture-without-its-second", pair[: len(pair) * 6 // 10], same=True)
    good = encoded(image, "JPEG", quality=95)
    yield OddImage("jpeg-arithmetic", base64.b64decode(_ARITHMETIC), same=True)
    yield OddImage("jpeg-fill-bytes", good[:2] + b"\xff" * 50 + good[2:], same=True)
    yield OddImage("jpeg-comment", good[:2] + segment(0xFE, b"x" * 60_000) + good[2:], same=True)


def _png_kinds() -> Iterator[OddImage]:
    image = photograph()
    pixels = np.asarray(image)
    deep = pixels.astype(">u2") * 257
    yield OddImage("png-rgb-16-bit", png(SIZE, 16, 2, idat(filtered(deep))), same=True)
    solid = np.concatenate([deep, np.full((*deep.shape[:2], 1), 65535, ">u2")], axis=2)
    yield OddImage("png-rgba-16-bit", png(SIZE, 16, 6, idat(filtered(solid))), same=True)
    passes = b"".join(
        filtered(np.ascontiguousarray(pixels[y::dy, x::dx])) for x, y, dx, dy in _ADAM7
    )
    yield OddImage("png-interlaced", png(SIZE, 8, 2, idat(passes), interlace=1), same=True)
    for depth in (1, 2, 4):
        row = bytes(1 + 64 * depth // 8)
        yield OddImage(f"png-grey-{depth}-bit", png((64, 64), depth, 0, idat(row * 64)))
        palette = chunk(b"PLTE", bytes(range(3 * 2**depth)))
        data = png((64, 64), depth, 3, palette + idat(row * 64))
        yield OddImage(f"png-palette-{depth}-bit", data)
    palette = image.quantize(16)
    for name, transparency in (("index", 3), ("table", bytes(range(0, 256, 16)))):
        data = encoded(palette, "PNG", transparency=transparency)
        yield OddImage(f"png-palette-transparent-by-{name}", data)
    rows = idat(filtered(pixels))
    for name, kind, content in (
        ("transparent-colour", b"tRNS", struct.pack(">HHH", 1, 2, 3)),
        ("gamma", b"gAMA", struct.pack(">I", 45455)),
        ("background", b"bKGD", bytes(6)),
        ("density", b"pHYs", struct.pack(">IIB", 0, 2**32 - 1, 1)),
        ("private-chunk", b"teSt", b"x" * 1000),
    ):
        yield OddImage(f"png-{name}", png(SIZE, 8, 2, chunk(kind, content) + rows), same=True)
    compressed = zlib.compress(filtered(pixels))
    split = b"".join(chunk(b"IDAT", compressed[at : at + 7]) for at in range(0, len(compressed), 7))
    yield OddImage("png-of-tiny-chunks", png(SIZE, 8, 2, split), same=True)


def _colours() -> Iterator[OddImage]:
    image = photograph()
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        options = {"quality": 95} if kind in ("JPEG", "WEBP") else {}
        for name, profile in (
            ("srgb", srgb),
            ("damaged", b"\xff" * 3000),
            ("of-another", srgb[::-1]),
        ):
            data = encoded(image, kind, icc_profile=profile, **options)
            yield OddImage(f"icc-{name}-{kind}", data, same=True)
    cmyk = encoded(image.convert("CMYK"), "JPEG", icc_profile=srgb, quality=95)
    yield OddImage("icc-of-rgb-on-cmyk", cmyk, same=True)
    yield OddImage("icc-on-grey", encoded(image.convert("L"), "JPEG", icc_profile=srgb))


def _animations() -> Iterator[OddImage]:
    image, other = photograph(), photograph(1)
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(image, kind, save_all=True, append_images=[other] * 5, **options)
        yield OddImage(f"animated-{kind}-is-its-first-frame", data, same=True)
        yield OddImage(
            f"animated-{kind}-cut-in-a-later-frame",
            data[: len(data) * 7 // 10],
            200 if kind != "WEBP" else 422,
        )
    frames = [Image.new("P", (16, 16), number) for number in range(200)]
    many = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], loop=0)
    yield OddImage("animated-GIF-of-200-frames", many)
    yield OddImage("gif-frame-smaller-than-its-screen", gif((60, 60), gif_frame((1, 1)) + b";"))


def _sizes() -> Iterator[OddImage]:
    for kind in FORMATS:
        yield OddImage(f"1x1-{kind}", encoded(Image.new("RGB", (1, 1), "red"), kind))
        limit = 16383 if kind == "WEBP" else 16384
        for name, size in (("tall", (1, limit)), ("wide", (limit, 1))):
            yield OddImage(f"{name}-{kind}", encoded(Image.new("RGB", size), kind))
        if kind != "WEBP":
            yield OddImage(f"1x20000-{kind}", encoded(Image.new("L", (1, 20000)), kind), 413)
            yield OddImage(f"20000x1-{kind}", encoded(Image.new("L", (20000, 1)), kind), 413)
    for size in ((2, 2), (7, 3), (3, 500), (500, 3)):
        data = encoded(Image.new("RGB", size, "blue"), "JPEG")
        yield OddImage(f"{size[0]}x{size[1]}-JPEG", data)


def _truncations() -> Iterator[OddImage]:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for kind in FORMATS:
        data = encoded(Image.fromarray(noise), kind)
        yield OddImage(f"only-1-byte-{kind}", data[:1], 415)
        for count in (16, 30):
            yield OddImage(f"only-{count}-bytes-{kind}", data[:count], 422)
        for percent in (25, 50, 75, 95):
            cut = data[: len(data) * percent // 100]
            yield OddImage(f"only-{percent}-percent-{kind}", cut, 422)
    progressive = encoded(Image.fromarray(noise), "JPEG", progressive=True)
    yield OddImage("half-a-progressive-JPEG", progressive[: len(progressive) // 2], 422)
    yield OddImage("second-half-of-a-JPEG", progressive[len(progressive) // 2 :], 415)


def _claims() -> Iterator[OddImage]:
    """Large sizes in small files; all are refused from the header."""
    for name, (width, height) in {
        "65535x65535": (65535, 65535),
        "65535x1": (65535, 1),
        "1x65535": (1, 65535),
        "9000x9000": (9000, 9000),
    }.items():
        yield OddImage(f"claims-{name}-JPEG", claiming(width, height), 413)
        body = png((width, height), 8, 2, idat(bytes(900)))
        yield OddImage(f"claims-{name}-PNG", body, 413)
        yield OddImage(f"claims-{name}-TIFF", grey_tiff(width, height), 413)
        yield OddImage(f"claims-{name}-BMP", bmp((width, height), pixels=bytes(900)), 413)
        frame = gif((width, height), gif_frame((width, height)) + b";")
        yield OddImage(f"claims-{name}-GIF", frame, 413)
    yield OddImage("claims-2147483647-PNG", png((2**31 - 1, 2**31 - 1), 8, 2, idat(b"x")), 413)
    yield OddImage("claims-4294967295-PNG", png((2**32 - 1, 2**32 - 1), 8, 2, idat(b"x")), 413)
    yield OddImage("claims-4294967295-TIFF", grey_tiff(2**32 - 1, 2**32 - 1), 413)
    yield OddImage("claims-a-negative-height-BMP", bmp((30000, -30000), pixels=bytes(900)), 413)
    yield OddImage("claims-nothing-PNG", png((0, 0), 8, 2, idat(b"")), 422)
    yield OddImage("claims-nothing-JPEG", claiming(0, 0), 422)
    yield OddImage("claims-nothing-TIFF", grey_tiff(0, 0), 422)
    yield OddImage("claims-nothing-BMP", bmp((0, 0)), 422)
    yield OddImage("claims-nothing-GIF", gif((0, 0), gif_frame((0, 0)) + b";"), 422)
    large = struct.pack("<HH", 16383, 16383)
    lossy = b"\x30\x01\x00\x9d\x01\x2a" + large + bytes(100)
    yield OddImage("claims-16383x16383-WEBP", webp(b"VP8 ", lossy), 413)
    extended = b"\x10\0\0\0" + (2**24 - 1).to_bytes(3, "little") * 2
    yield OddImage("claims-16777216x16777216-WEBP", webp(b"VP8X", extended), 413)


def _bombs() -> Iterator[OddImage]:
    """Small files that are well-formed and really have that many pixels."""
    side = 8200
    rows = (b"\0" + bytes(side // 8)) * side
    yield OddImage("bomb-PNG", png((side, side), 1, 0, idat(rows)), 413)
    image = Image.new("1", (side, side))
    yield OddImage("bomb-TIFF", encoded(image, "TIFF", compression="group4"), 413)
    wide = Image.new("RGB", (16383, 4000))
    yield OddImage("bomb-WEBP", encoded(wide, "WEBP", lossless=True, method=0, quality=0), 413)
    yield OddImage("bomb-GIF", encoded(image.convert("P"), "GIF"), 413)
    yield OddImage("bomb-JPEG", encoded(Image.new("L", (side, side)), "JPEG"), 413)
    side = 7992
    rows = (b"\0" + bytes(side // 8)) * side
    yield OddImage("just-below-the-limit-PNG", png((side, side), 1, 0, idat(rows)))
    more = png((64, 64), 8, 2, idat(bytes(30 * 2**20)))
    yield OddImage("png-with-30-MB-of-rows-too-many", more)
    for kind in (b"zTXt", b"iCCP"):
        packed = b"name\0\0" + zlib.compress(bytes(30 * 2**20), 9)
        rows = idat(filtered(np.asarray(photograph())))
        data = png(SIZE, 8, 2, chunk(kind, packed) + rows)
        yield OddImage(f"png-bomb-in-{kind.decode()}", data, 422)


def _other_formats() -> Iterator[OddImage]:
    image = photograph()
    for kind in ("PPM", "ICO", "TGA", "PCX", "DDS", "EPS", "PDF", "ICNS", "SGI", "JPEG2000",
                 "AVIF", "MSP", "XBM", "QOI", "DIB", "SPIDER"):  # fmt: skip
        mode = "1" if kind in ("MSP", "XBM") else "F" if kind == "SPIDER" else "RGB"
        yield OddImage(f"format-{kind}", encoded(image.convert(mode), kind), 415)
    for name, data in {
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
        "svg-with-an-entity": b'<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg>&x;</svg>',
        "html": b"<!doctype html><img src=x onerror=alert(1)>",
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
        "mvg": b"push graphic-context\nimage over 0,0 0,0 'https://example.com/x'\n",
        "psd": b"8BPS\0\1" + bytes(60),
        "exe": b"MZ\x90\0" + bytes(60),
        "elf": b"\x7fELF\2\1\1" + bytes(60),
        "mp4": b"\0\0\0\x18ftypmp42" + bytes(60),
        "heic": b"\0\0\0\x18ftypheic" + bytes(60),
        "wav": b"RIFF\x24\0\0\0WAVEfmt " + bytes(60),
        "avi": b"RIFF\x24\0\0\0AVI LIST" + bytes(60),
        "gzip": zlib.compress(b"x" * 100, wbits=31),
        "json": json.dumps({"image": "no"}).encode(),
        "jpeg-as-base64": b"/9j/4AAQSkZJRgABAQAAAQABAAD/",
        "url": b"http://169.254.169.254/latest/meta-data/",
        "jng": b"\x8bJNG\r\n\x1a\n" + bytes(60),
        "mng": b"\x8aMNG\r\n\x1a\n" + bytes(60),
    }.items():  # fmt: skip
        yield OddImage(f"content-{name}", data, 415)


def _polyglots() -> Iterator[OddImage]:
    image = photograph()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("run.js", "alert(1)")
    for kind in FORMATS:
        options = {"quality": 95} if kind in ("JPEG", "WEBP") else {}
        data = encoded(image, kind, **options)
        yield OddImage(f"{kind}-and-zip", data + archive.getvalue(), same=True)
        yield OddImage(f"{kind}-and-html", data + b"<script>alert(1)</script>", same=True)
    script = gif((10799, 1), gif_frame((1, 1)) + b";*/=1;alert(1)")
    yield OddImage("gif-that-is-javascript", script)
    php = encoded(image, "JPEG", comment=b"<?php system($_GET[0]); ?>", quality=95)
    yield OddImage("jpeg-with-php", php, same=True)
    yield OddImage("zip-and-jpeg", archive.getvalue() + encoded(image, "JPEG"), 415)
    yield OddImage("pdf-and-jpeg", b"%PDF-1.4\n" + encoded(image, "JPEG"), 415)
    yield OddImage("newline-and-png", b"\n" + encoded(image), 415)
    yield OddImage("bm-text", b"BM is how this text starts, and it is no bitmap at all.", 422)


def _noise() -> Iterator[OddImage]:
    rng = np.random.default_rng(7)
    yield OddImage("empty", b"", 400)
    for count in (2, 3, 16, 1000, 100_000):
        yield OddImage(f"random-{count}", b"\x01" + rng.bytes(count - 1), 415)
    for name, byte in (("zeros", b"\0"), ("ones", b"\xff"), ("spaces", b" ")):
        yield OddImage(f"{name}-5000", byte * 5000, 415)
    starts = {
        "JPEG": b"\xff\xd8\xff\xe0",
        "PNG": _PNG,
        "WEBP": b"RIFF\x00\x10\x00\x00WEBP",
        "TIFF": b"II*\0",
        "TIFF-big-endian": b"MM\0*",
        "GIF": b"GIF89a",
        "BMP": b"BM",
    }
    for kind, start in starts.items():
        yield OddImage(f"signature-and-zeros-{kind}", start + bytes(3000), 422)
        yield OddImage(f"signature-alone-{kind}", start, 422)


def _metadata() -> Iterator[OddImage]:
    image = photograph()
    good = encoded(image, "JPEG", quality=95)
    many = segment(0xE5, b"x" * 65_000) * 80
    yield OddImage("jpeg-with-5-MB-of-segments", good[:2] + many + good[2:], same=True)
    blocks = segment(0xE1, b"Exif\0\0" + b"II*\0\x08\0\0\0" + b"\xff" * 60_000) * 20
    yield OddImage("jpeg-with-20-exif-blocks", good[:2] + blocks + good[2:], same=True)
    xmp = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + b"<a>" * 20_000)
    yield OddImage("jpeg-with-open-xml", good[:2] + xmp + good[2:], same=True)
    rows = idat(filtered(np.asarray(image)))
    texts = chunk(b"tEXt", b"k\0" + b"v" * 1000) * 2000
    yield OddImage("png-with-2000-texts", png(SIZE, 8, 2, texts + rows), same=True)
    exif = chunk(b"eXIf", b"II*\0" + b"\xff" * 10**6)
    yield OddImage("png-with-1-MB-of-broken-exif", png(SIZE, 8, 2, exif + rows), same=True)
    after = png(SIZE, 8, 2, rows + chunk(b"eXIf", b"garbage"))
    yield OddImage("png-with-exif-behind-the-pixels", after, same=True)
    loop = grey_tiff(8, 8)
    yield OddImage("tiff-that-names-itself-as-next", loop[:-4] + loop[4:8])
    webp_exif = encoded(image, "WEBP", exif=b"Exif\0\0" + b"\xff" * 5000, quality=95)
    yield OddImage("webp-with-broken-exif", webp_exif, same=True)


def _damaged_png() -> Iterator[OddImage]:
    image = photograph()
    rows = idat(filtered(np.asarray(image)))
    good = png(SIZE, 8, 2, rows)
    flipped = bytearray(good)
    flipped[30] ^= 1
    yield OddImage("png-header-with-a-wrong-checksum", bytes(flipped), 422)
    yield OddImage("png-without-pixels", png(SIZE, 8, 2, b""), 422)
    yield OddImage(
        "png-pixels-that-are-not-compressed", png(SIZE, 8, 2, chunk(b"IDAT", b"x" * 99)), 422
    )
    yield OddImage("png-with-too-few-rows", png(SIZE, 8, 2, idat(bytes(1000))), 422)
    yield OddImage("png-palette-that-is-missing", png((8, 8), 8, 3, idat(bytes(72))), 422)
    for name, depth, colour in (("depth-3", 3, 2), ("depth-0", 0, 0), ("colour-5", 8, 5)):
        yield OddImage(f"png-with-{name}", png(SIZE, depth, colour, rows), 422)
    yield OddImage("png-with-filter-9", png((8, 8), 8, 0, idat((b"\x09" + bytes(8)) * 8)), 422)
    length = _PNG + struct.pack(">I", 2**31 - 1) + b"IHDR" + bytes(100)
    yield OddImage("png-with-a-chunk-of-2-GB", length, 422)
    yield OddImage("png-header-twice", good[:33] + good[8:], same=True)
    wrong = _PNG + rows + chunk(b"IHDR", good[16:29]) + chunk(b"IEND", b"")
    yield OddImage("png-pixels-before-the-header", wrong, 422)
    yield OddImage("png-in-text-mode", good.replace(b"\r\n", b"\n"), 422)


def _damaged_jpeg() -> Iterator[OddImage]:
    good = encoded(photograph(), "JPEG")
    for name, marker in (("quantization", 0xDB), ("huffman", 0xC4), ("frame", 0xC0)):
        status = 200 if name == "huffman" else 422
        yield OddImage(f"jpeg-without-{name}", without(good, marker), status)
    scan = good.index(b"\xff\xda")
    yield OddImage("jpeg-without-a-scan", good[:scan] + b"\xff\xd9", 422)
    yield OddImage("jpeg-scan-of-garbage", good[: scan + 14] + b"\x55" * 400 + b"\xff\xd9")
    for name, marker in (
        ("lossless", 0xC3),
        ("hierarchical", 0xC5),
        ("marker-c8", 0xC8),
        ("arithmetic-lossless", 0xCB),
    ):
        data = data_with_frame(lambda frame, marker=marker: bytes([0xFF, marker]) + frame[2:])
        yield OddImage(f"jpeg-{name}", data, 422)
    for name, change in {
        "12-bit": lambda frame: frame[:4] + b"\x0c" + frame[5:],
        "0-components": lambda frame: frame[:9] + b"\0" + frame[10:],
        "2-components": lambda frame: frame[:9] + b"\2" + frame[10:],
        "sampling-of-0": lambda frame: frame[:11] + b"\0" + frame[12:],
        "no-height": lambda frame: frame[:5] + b"\0\0" + frame[7:],
    }.items():
        yield OddImage(f"jpeg-with-{name}", data_with_frame(change), 422)
    yield OddImage("jpeg-segment-of-0-bytes", good[:2] + b"\xff\xe0\0\0" + good[2:])
    yield OddImage("jpeg-without-its-end", good[:-2], 422)
    yield OddImage("jpeg-frame-twice", good[:scan] + without_start(good, scan), 422)


def without_start(data: bytes, scan: int) -> bytes:
    frame = data.index(b"\xff\xc0")
    return data[frame : frame + 19] + data[scan:]


def _damaged_rest() -> Iterator[OddImage]:
    yield OddImage("gif-without-a-frame", gif((8, 8), b";"), 422)
    yield OddImage("gif-with-code-size-0", gif((8, 8), gif_frame((8, 8), b"\0\0") + b";"), 422)
    yield OddImage("gif-with-code-size-13", gif((8, 8), gif_frame((8, 8), b"\x0d\x02xx\0;")), 422)
    yield OddImage("gif-without-a-palette", gif((1, 1), gif_frame((1, 1)) + b";", flags=0))
    yield OddImage("bmp-with-0-bits", bmp((8, 8), bits=0, pixels=bytes(192)), 422)
    yield OddImage("bmp-with-17-bits", bmp((8, 8), bits=17, pixels=bytes(192)), 422)
    yield OddImage("bmp-with-compression-99", bmp((8, 8), compression=99, pixels=bytes(192)), 422)
    yield OddImage("bmp-without-pixels", bmp((8, 8)), 422)
    yield OddImage("bmp-top-down", bmp((8, -8), pixels=bytes(192)))
    yield OddImage("bmp-run-lengths-cut", bmp((8, 8), 8, 1, bytes(8)), 422)
    for name, changes in {
        "pixels-outside": {"t273": (4, 1, 10**6)},
        "compression-999": {"t259": (3, 1, 999)},
        "300-bits": {"t258": (3, 1, 300)},
        "photometry-77": {"t262": (3, 1, 77)},
        "a-tag-of-4-billion-values": {"t273": (4, 2**32 - 1, 8)},
    }.items():
        yield OddImage(f"tiff-with-{name}", grey_tiff(8, 8, **changes), 422)
    yield OddImage("tiff-directory-outside", b"II*\0" + struct.pack("<I", 10**6) + bytes(90), 422)
    good = encoded(photograph(), "WEBP")
    yield OddImage("webp-that-claims-more-bytes", good[:4] + b"\xff\xff\xff\x7f" + good[8:], 422)
    yield OddImage("webp-of-an-unknown-chunk", webp(b"ABCD", bytes(100)), 422)
    yield OddImage("webp-of-zeros", good[:30] + bytes(len(good) - 30))


def _names() -> Iterator[OddImage]:
    good = encoded(photograph(), "JPEG", quality=95)
    for name in ("photo.png", "photo.exe", "photo", "../../etc/passwd", "фото 1.jpg", "a" * 250):
        yield OddImage(f"named-{name[:20]}", good, same=True, filename=name)
    yield OddImage("text-named-jpg", b"this is text", 415, filename="photo.jpg")
