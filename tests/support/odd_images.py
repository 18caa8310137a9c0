"""Broken and odd images by name, each with the status that a search with it must have.

Nothing here asks the decoder what it thinks: statuses are what a caller is promised.
    200 it is an image        400 no bytes              413 too many pixels
    415 not one of our formats 422 damaged or truncated
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

from tests.tiny import encoded, photo

HERE = Path(__file__).parent
STREET_PHOTO = 3
SIZE = (96, 64)
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "AVIF", "HEIF")
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
Table = dict[str, bytes]


@dataclass(frozen=True)
class OddImage:
    """`same`: it shows the photo, whatever its form; `filename` is what the client claims."""

    name: str
    data: bytes
    status: int = 200
    same: bool = False
    filename: str = "query.jpg"


@cache
def odd_images() -> tuple[OddImage, ...]:
    """All of them."""
    tables: tuple[tuple[int, bool, Callable[[], Table]], ...] = (
        *((200, True, table) for table in (_forms, _turns, _colours, _extras)),
        *((200, False, table) for table in (_other_pixels, _sizes, _mended)),
        *((413, False, table) for table in (_large_sizes, _claims, _bombs)),
        *((415, False, table) for table in (_other_formats, _no_image)),
        *((422, False, table) for table in (_cut, _damaged_png, _damaged_jpeg, _damaged_rest)),
    )
    images = [OddImage("empty", b"", 400)]
    for status, same, table in tables:
        images += [OddImage(name, data, status, same) for name, data in table().items()]
    for name in ("photo.png", "photo.exe", "photo", "../../etc/passwd", "фото 1.jpg", "a" * 250):
        images.append(OddImage(f"named-{name[:20]}", _GOOD, same=True, filename=name))
    images.append(OddImage("text-named-jpg", b"this is text", 415, filename="photo.jpg"))
    assert len({image.name for image in images}) == len(images)
    return tuple(images)


def street_photo(number: int = STREET_PHOTO) -> Image.Image:
    """A smooth image without symmetry."""
    return photo(number, SIZE)


def fine(image: Image.Image, kind: str, **options: object) -> bytes:
    """A file that keeps the image as well as its format can."""
    quality = {"quality": 95} if kind in ("JPEG", "WEBP", "AVIF", "HEIF") else {}
    return encoded(image, kind, **quality | options)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    size: tuple[int, int], depth: int, colour: int, content: bytes, *, interlace: int = 0
) -> bytes:
    """A PNG file of chunks: IHDR, then `content`, then IEND."""
    header = struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, interlace)
    return _PNG + chunk(b"IHDR", header) + content + chunk(b"IEND", b"")


def idat(rows: bytes) -> bytes:
    return chunk(b"IDAT", zlib.compress(rows, 9))


def filtered(pixels: NDArray[np.generic]) -> bytes:
    """Rows of a PNG, each with its filter byte."""
    return b"".join(b"\0" + row.tobytes() for row in pixels)


def grey_tiff(width: int, height: int, **changes: tuple[int, int, int]) -> bytes:
    """An uncompressed little-endian grey TIFF of one strip; `t<tag>` changes a tag."""
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
    tags |= {int(name[1:]): value for name, value in changes.items()}
    entries = b"".join(struct.pack("<HHII", tag, *value) for tag, value in tags.items())
    start = b"II*\0" + struct.pack("<I", 8 + len(content)) + content
    return start + struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)


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


def container(kind: str, size: tuple[int, int]) -> bytes:
    """The photo as an AVIF or a HEIC that claims to have this size."""
    data = encoded(_IMAGE, kind)
    at = data.index(b"ispe") + 8
    return data[:at] + struct.pack(">II", *size) + data[at + 8 :]


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


def with_frame(change: Callable[[bytes], bytes]) -> bytes:
    """The photo as a JPEG whose frame header was changed."""
    parts = jpeg_parts(_PLAIN)
    return _PLAIN[:2] + b"".join(change(part) if kind == 0xC0 else part for kind, part in parts)


def claiming(width: int, height: int) -> bytes:
    """A JPEG whose frame header claims this size."""
    sizes = struct.pack(">HH", height, width)
    return with_frame(lambda frame: frame[:5] + sizes + frame[9:])


_IMAGE = street_photo()
_PIXELS = np.asarray(_IMAGE)
_PLAIN = encoded(_IMAGE, "JPEG")
_GOOD = fine(_IMAGE, "JPEG")
_ROWS = idat(filtered(_PIXELS))
_SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
_NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))


def _forms() -> Table:
    """Every way to store the photo."""
    deep = _PIXELS.astype(">u2") * 257
    solid = np.concatenate([deep, np.full((*deep.shape[:2], 1), 65535, ">u2")], axis=2)
    passes = b"".join(
        filtered(np.ascontiguousarray(_PIXELS[y::dy, x::dx])) for x, y, dx, dy in _ADAM7
    )
    pair = fine(_IMAGE, "MPO", save_all=True, append_images=[street_photo(1)], quality=95)
    tiffs = ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")
    opaque = _IMAGE.convert("RGBA")
    return {
        **{f"plain-{kind}": fine(_IMAGE, kind) for kind in FORMATS},
        **{
            f"opaque-alpha-{kind}": encoded(opaque, kind) for kind in ("PNG", "TIFF", "BMP", "HEIF")
        },
        **{f"animated-{kind}-is-its-first-frame": animated(kind) for kind in ANIMATED},
        **{f"animated-{kind}-cut-in-a-later-frame": cut_later(kind) for kind in ANIMATED[:3]},
        "jpeg-progressive": fine(_IMAGE, "JPEG", progressive=True),
        "jpeg-restart-markers": fine(_IMAGE, "JPEG", restart_marker_blocks=2),
        "jpeg-4-4-4": fine(_IMAGE, "JPEG", subsampling=0),
        "jpeg-stored-as-rgb": fine(_IMAGE, "JPEG", keep_rgb=True),
        **{f"tiff-{mode}": encoded(_IMAGE.convert(mode), "TIFF") for mode in ("RGBX", "CMYK")},
        **{f"tiff-compression-{c}": encoded(_IMAGE, "TIFF", compression=c) for c in tiffs},
        "tiff-big": encoded(_IMAGE, "TIFF", big_tiff=True),
        "webp-lossless": encoded(_IMAGE, "WEBP", lossless=True),
        "jpeg-cmyk": fine(_IMAGE.convert("CMYK"), "JPEG"),
        "jpeg-multi-picture-is-its-first": pair,
        "jpeg-multi-picture-without-its-second": pair[: len(pair) * 6 // 10],
        # Pillow reads them and cannot write them.
        "jpeg-arithmetic": (HERE / "arithmetic.jpg").read_bytes(),
        "avif-10-bit": (HERE / "ten-bit.avif").read_bytes(),
        "heic-10-bit": _heic_of_10_bits(),
        "heic-of-tiles": fine(street_photo().resize((960, 640)), "HEIF", tile_size=512),
        "avif-of-any-brand": _rebranded("AVIF"),
        "heic-of-any-brand": _rebranded("HEIF"),
        "png-rgb-16-bit": png(SIZE, 16, 2, idat(filtered(deep))),
        "png-rgba-16-bit": png(SIZE, 16, 6, idat(filtered(solid))),
        "png-interlaced": png(SIZE, 8, 2, idat(passes), interlace=1),
    }


def _heic_of_10_bits() -> bytes:
    import pillow_heif

    buffer, deep = io.BytesIO(), _PIXELS.astype(np.uint16) * 257
    pillow_heif.from_bytes("RGB;16", SIZE, deep.tobytes()).save(buffer, quality=95)
    return buffer.getvalue()


def _rebranded(kind: str) -> bytes:
    """Whose first brand names no codec, as some phones write it; a later one does."""
    data = fine(_IMAGE, kind)
    return data[:8] + b"mif1" + data[12:]


ANIMATED = ("GIF", "PNG", "TIFF", "WEBP", "AVIF", "HEIF")


def animated(kind: str) -> bytes:
    """The photo, and five times another one."""
    options = {"lossless": True} if kind == "WEBP" else {}
    return encoded(_IMAGE, kind, save_all=True, append_images=[street_photo(1)] * 5, **options)


def cut_later(kind: str) -> bytes:
    data = animated(kind)
    return data[: len(data) * 7 // 10]


def _turns() -> Table:
    """Stored turned, with the EXIF orientation that undoes it; unknown ones mean none."""
    turns = {
        f"orientation-{n}-{kind}": turned(kind, n)
        for kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF", "HEIF")
        for n in range(1, 9)
    }
    turns |= {f"orientation-{n}-means-none": turned("JPEG", n) for n in (0, 9, 255, 65535)}
    text = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x04\0\0\0six\0\0\0\0\0"
    broken = _GOOD[:2] + segment(0xE1, b"Exif\0\0broken") + _GOOD[2:]
    return turns | {
        "orientation-as-text": encoded(_IMAGE, "JPEG", exif=text),
        "exif-that-is-broken": broken,
    }


def turned(kind: str, orientation: int) -> bytes:
    image = _IMAGE.transpose(_UNDO[orientation]) if orientation in _UNDO else _IMAGE
    exif = Image.Exif()
    exif[0x0112] = orientation
    return fine(image, kind, exif=exif.tobytes())


def _colours() -> Table:
    profiles = {"srgb": _SRGB, "damaged": b"\xff" * 3000, "of-another": _SRGB[::-1]}
    cmyk = _IMAGE.convert("CMYK")
    return {
        f"icc-{name}-{kind}": fine(_IMAGE, kind, icc_profile=profile)
        for kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF", "HEIF")
        for name, profile in profiles.items()
    } | {"icc-of-rgb-on-cmyk": fine(cmyk, "JPEG", icc_profile=_SRGB)}


def _extras() -> Table:
    """Large or strange data next to the pixels."""
    ends = {"zip": _zip(), "html": b"<script>alert(1)</script>"}
    segments = {
        "with-5-MB-of-segments": segment(0xE5, b"x" * 65_000) * 80,
        "with-20-exif-blocks": segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0" + b"\xff" * 60_000) * 20,
        "with-open-xml": segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + b"<a>" * 20_000),
    }
    chunks = {
        "transparent-colour": chunk(b"tRNS", struct.pack(">HHH", 1, 2, 3)),
        "with-2000-texts": chunk(b"tEXt", b"k\0" + b"v" * 1000) * 2000,
        "with-1-MB-of-broken-exif": chunk(b"eXIf", b"II*\0" + b"\xff" * 10**6),
    }
    exif = b"Exif\0\0" + b"\xff" * 5000
    return {
        **{
            f"{kind}-and-{n}": fine(_IMAGE, kind) + end
            for kind in FORMATS
            for n, end in ends.items()
        },
        **{f"jpeg-{name}": _GOOD[:2] + more + _GOOD[2:] for name, more in segments.items()},
        **{f"png-{name}": png(SIZE, 8, 2, more + _ROWS) for name, more in chunks.items()},
        "png-with-exif-behind-the-pixels": png(SIZE, 8, 2, _ROWS + chunk(b"eXIf", b"garbage")),
        "jpeg-with-php": fine(_IMAGE, "JPEG", comment=b"<?php system($_GET[0]); ?>"),
        "webp-with-broken-exif": fine(_IMAGE, "WEBP", exif=exif),
        **{f"{kind}-with-broken-exif": _broken_exif(kind) for kind in ("AVIF", "HEIF")},
    }


def _broken_exif(kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x010E] = "description"
    data = fine(_IMAGE, kind, exif=exif.tobytes())
    return data.replace(b"MM\0*", b"XXXX").replace(b"II*\0", b"XXXX")


def _zip() -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("run.js", "alert(1)")
    return archive.getvalue()


def _other_pixels() -> Table:
    """Images that need not look like the photo: fewer colours, none, or poor ones."""
    clear = _IMAGE.convert("RGBA")
    clear.putalpha(0)
    deep = Image.fromarray(np.asarray(_IMAGE.convert("L")).astype(np.uint16) * 257)
    modes = [(mode, kind) for kind in FORMATS for mode in ("1", "L", "P")]
    modes.remove(("P", "JPEG"))
    frames = [Image.new("P", (16, 16), number) for number in range(200)]
    return {
        **{f"mode-{mode}-{kind}": fine(_IMAGE.convert(mode), kind) for mode, kind in modes},
        "opaque-alpha-WEBP": encoded(_IMAGE.convert("RGBA"), "WEBP"),
        "opaque-alpha-AVIF": encoded(_IMAGE.convert("RGBA"), "AVIF"),
        **{
            f"all-transparent-{k}": encoded(clear, k)
            for k in ("PNG", "WEBP", "TIFF", "GIF", "AVIF", "HEIF")
        },
        **{
            f"mode-LA-{kind}": encoded(_IMAGE.convert("LA"), kind)
            for kind in ("PNG", "TIFF", "AVIF", "HEIF")
        },
        **{f"grey-16-bit-{kind}": encoded(deep, kind) for kind in ("PNG", "TIFF", "HEIF")},
        "webp-quality-0": encoded(_IMAGE, "WEBP", quality=0),
        "tiff-YCbCr": encoded(_IMAGE.convert("YCbCr"), "TIFF"),
        "tiff-group4": encoded(_IMAGE.convert("1"), "TIFF", compression="group4"),
        "jpeg-quality-1": encoded(_IMAGE, "JPEG", quality=1),
        "png-palette-transparent": encoded(_IMAGE.quantize(16), "PNG", transparency=3),
        "icc-on-grey": encoded(_IMAGE.convert("L"), "JPEG", icc_profile=_SRGB),
        "animated-GIF-of-200-frames": encoded(
            frames[0], "GIF", save_all=True, append_images=frames[1:], loop=0
        ),
        "gif-frame-smaller-than-its-screen": gif((60, 60), gif_frame((1, 1)) + b";"),
        "gif-that-is-javascript": gif((10799, 1), gif_frame((1, 1)) + b";*/=1;alert(1)"),
    }


def _sizes() -> Table:
    sizes = {}
    for kind in FORMATS:
        limit = {"WEBP": 16383, "HEIF": 4000}.get(kind, 16384)  # of what can be written
        sizes[f"1x1-{kind}"] = encoded(Image.new("RGB", (1, 1), "red"), kind)
        sizes[f"tall-{kind}"] = encoded(Image.new("RGB", (1, limit)), kind)
        sizes[f"wide-{kind}"] = encoded(Image.new("RGB", (limit, 1)), kind)
    for size in ((2, 2), (7, 3), (3, 500), (500, 3)):
        data = encoded(Image.new("RGB", size, "blue"), "JPEG")
        sizes[f"{size[0]}x{size[1]}-JPEG"] = data
    return sizes | {"just-below-the-limit-PNG": black(7992)}


def _mended() -> Table:
    """Damaged where the pixels do not suffer, or where a decoder makes the best of it."""
    loop, web = grey_tiff(8, 8), encoded(_IMAGE, "WEBP")
    scan = _PLAIN.index(b"\xff\xda")
    return {
        "png-with-30-MB-of-rows-too-many": png((64, 64), 8, 2, idat(bytes(30 * 2**20))),
        "tiff-that-names-itself-as-next": loop[:-4] + loop[4:8],
        "jpeg-without-huffman": without(0xC4),
        "jpeg-scan-of-garbage": _PLAIN[: scan + 14] + b"\x55" * 400 + b"\xff\xd9",
        "jpeg-segment-of-0-bytes": _PLAIN[:2] + b"\xff\xe0\0\0" + _PLAIN[2:],
        "gif-without-a-palette": gif((1, 1), gif_frame((1, 1)) + b";", flags=0),
        "bmp-top-down": bmp((8, -8), pixels=bytes(192)),
        "webp-of-zeros": web[:30] + bytes(len(web) - 30),
    }


def without(marker: int) -> bytes:
    """The photo as a JPEG that lacks every segment of this kind."""
    parts = jpeg_parts(_PLAIN)
    return _PLAIN[:2] + b"".join(part for kind, part in parts if kind != marker)


def black(side: int) -> bytes:
    """A well-formed PNG of that many pixels a side, in few bytes."""
    return png((side, side), 1, 0, idat((b"\0" + bytes(side // 8)) * side))


def _large_sizes() -> Table:
    kinds = [kind for kind in FORMATS if kind not in ("WEBP", "HEIF")]
    sizes = ((1, 20000), (20000, 1))
    return {
        f"{w}x{h}-{kind}": encoded(Image.new("L", (w, h)), kind) for kind in kinds for w, h in sizes
    }


def _claims() -> Table:
    """Large sizes in small files; all are refused from the header."""
    lossy = b"\x30\x01\x00\x9d\x01\x2a" + struct.pack("<HH", 16383, 16383) + bytes(100)
    extended = b"\x10\0\0\0" + (2**24 - 1).to_bytes(3, "little") * 2
    claims = {
        "claims-4294967295-PNG": png((2**32 - 1, 2**32 - 1), 8, 2, idat(b"x")),
        "claims-4294967295-TIFF": grey_tiff(2**32 - 1, 2**32 - 1),
        "claims-a-negative-height-BMP": bmp((30000, -30000), pixels=bytes(900)),
        "claims-16383x16383-WEBP": webp(b"VP8 ", lossy),
        "claims-16777216x16777216-WEBP": webp(b"VP8X", extended),
    }
    for size in ((65535, 65535), (65535, 1), (1, 65535), (9000, 9000)):
        name = f"claims-{size[0]}x{size[1]}"
        claims |= {
            f"{name}-JPEG": claiming(*size),
            f"{name}-PNG": png(size, 8, 2, idat(bytes(900))),
            f"{name}-TIFF": grey_tiff(*size),
            f"{name}-BMP": bmp(size, pixels=bytes(900)),
            f"{name}-GIF": gif(size, gif_frame(size) + b";"),
            **{f"{name}-{kind}": container(kind, size) for kind in ("AVIF", "HEIF")},
        }
    return claims


def _bombs() -> Table:
    """Small files that are well-formed and really have that many pixels."""
    side = 8200
    image, wide = Image.new("1", (side, side)), Image.new("RGB", (16383, 4000))
    return {
        "bomb-PNG": black(side),
        "bomb-TIFF": encoded(image, "TIFF", compression="group4"),
        "bomb-WEBP": encoded(wide, "WEBP", lossless=True, method=0, quality=0),
        "bomb-GIF": encoded(image.convert("P"), "GIF"),
        "bomb-AVIF": (HERE / "bomb.avif").read_bytes(),
        "bomb-JPEG": encoded(Image.new("L", (side, side)), "JPEG"),
    }


def _other_formats() -> Table:
    modes = {"MSP": "1", "XBM": "1", "SPIDER": "F"}
    kinds = (
        *("PPM", "ICO", "TGA", "PCX", "DDS", "EPS", "PDF", "ICNS", "SGI", "JPEG2000"),
        *("MSP", "XBM", "QOI", "DIB", "SPIDER"),
    )
    grey = np.asarray(_IMAGE.convert("L"))
    numbers = {"float": np.float32, "int32": np.int32}
    return {
        **{f"format-{k}": encoded(_IMAGE.convert(modes.get(k, "RGB")), k) for k in kinds},
        **{
            f"tiff-{name}": encoded(Image.fromarray(grey.astype(dtype)), "TIFF")
            for name, dtype in numbers.items()
        },
        "content-svg-with-an-entity": (
            b'<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg>&x;</svg>'
        ),
        "content-postscript": (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n"
        ),
        "content-mp4": b"\0\0\0\x18ftypisom\0\0\2\0isommp41" + bytes(60),
        "content-heif-of-no-known-codec": b"\0\0\0\x18ftypmif1\0\0\0\0mif1jpeg" + bytes(60),
        "content-wav": b"RIFF\x24\0\0\0WAVEfmt " + bytes(60),
        "content-jpeg-as-base64": b"/9j/4AAQSkZJRgABAQAAAQABAAD/",
        "content-url": b"http://169.254.169.254/latest/meta-data/",
    }


def _no_image() -> Table:
    rng = np.random.default_rng(7)
    progressive = encoded(_NOISE, "JPEG", progressive=True)
    return {
        **{f"random-{n}": b"\x01" + rng.bytes(n - 1) for n in (2, 3, 16, 1000, 100_000)},
        **{f"only-1-byte-{kind}": encoded(_NOISE, kind)[:1] for kind in FORMATS},
        "ones-5000": b"\xff" * 5000,
        "second-half-of-a-JPEG": progressive[len(progressive) // 2 :],
        "zip-and-jpeg": _zip() + _PLAIN,
        "pdf-and-jpeg": b"%PDF-1.4\n" + _PLAIN,
    }


def _cut() -> Table:
    """Truncated files, and signatures with nothing behind them."""
    cut = {}
    for kind in FORMATS:
        data = encoded(_NOISE, kind)
        cut |= {f"only-{n}-bytes-{kind}": data[:n] for n in (16, 30)}
        cut |= {
            f"only-{percent}-percent-{kind}": data[: len(data) * percent // 100]
            for percent in (25, 50, 75, 95)
        }
    progressive = encoded(_NOISE, "JPEG", progressive=True)
    starts = {
        "JPEG": b"\xff\xd8\xff\xe0",
        "PNG": _PNG,
        "WEBP": b"RIFF\x00\x10\x00\x00WEBP",
        "TIFF": b"II*\0",
        "TIFF-big-endian": b"MM\0*",
        "GIF": b"GIF89a",
        "BMP": b"BM",
        "AVIF": b"\0\0\0\x1cftypavif",
        "HEIC": b"\0\0\0\x18ftypheic",
    }
    return cut | {
        "half-a-progressive-JPEG": progressive[: len(progressive) // 2],
        **{f"animated-{kind}-cut-in-a-later-frame": cut_later(kind) for kind in ("WEBP", "AVIF")},
        **{f"signature-and-zeros-{kind}": start + bytes(3000) for kind, start in starts.items()},
        **{f"signature-alone-{kind}": start for kind, start in starts.items()},
        "bm-text": b"BM is how this text starts, and it is no bitmap at all.",
    }


def _damaged_png() -> Table:
    good = png(SIZE, 8, 2, _ROWS)
    packed = b"name\0\0" + zlib.compress(bytes(30 * 2**20), 9)
    return {
        "png-header-with-a-wrong-checksum": good[:30] + bytes([good[30] ^ 1]) + good[31:],
        "png-pixels-that-are-not-compressed": png(SIZE, 8, 2, chunk(b"IDAT", b"x" * 99)),
        "png-with-too-few-rows": png(SIZE, 8, 2, idat(bytes(1000))),
        "png-palette-that-is-missing": png((8, 8), 8, 3, idat(bytes(72))),
        "png-with-depth-3": png(SIZE, 3, 2, _ROWS),
        "png-with-a-chunk-of-2-GB": _PNG + struct.pack(">I", 2**31 - 1) + b"IHDR" + bytes(100),
        "png-bomb-in-zTXt": png(SIZE, 8, 2, chunk(b"zTXt", packed) + _ROWS),
        "png-bomb-in-iCCP": png(SIZE, 8, 2, chunk(b"iCCP", packed) + _ROWS),
        "claims-nothing-PNG": png((0, 0), 8, 2, idat(b"")),
    }


def _damaged_jpeg() -> Table:
    scan = _PLAIN.index(b"\xff\xda")
    patches = {
        "lossless": (1, b"\xc3"),
        "hierarchical": (1, b"\xc5"),
        "12-bit": (4, b"\x0c"),
        "no-height": (5, b"\0\0"),
        "0-components": (9, b"\0"),
        "sampling-of-0": (11, b"\0"),
    }

    def patched(at: int, new: bytes) -> bytes:
        return with_frame(lambda frame: frame[:at] + new + frame[at + len(new) :])

    return {
        "jpeg-without-quantization": without(0xDB),
        "jpeg-without-frame": without(0xC0),
        "jpeg-without-a-scan": _PLAIN[:scan] + b"\xff\xd9",
        "jpeg-without-its-end": _PLAIN[:-2],
        "claims-nothing-JPEG": claiming(0, 0),
        **{f"jpeg-with-{name}": patched(*patch) for name, patch in patches.items()},
    }


def _damaged_rest() -> Table:
    good = encoded(_IMAGE, "WEBP")
    pixels = bytes(192)
    return {
        "gif-without-a-frame": gif((8, 8), b";"),
        "gif-with-code-size-13": gif((8, 8), gif_frame((8, 8), b"\x0d\x02xx\0;")),
        "claims-nothing-GIF": gif((0, 0), gif_frame((0, 0)) + b";"),
        "bmp-with-0-bits": bmp((8, 8), bits=0, pixels=pixels),
        "bmp-with-compression-99": bmp((8, 8), compression=99, pixels=pixels),
        "bmp-without-pixels": bmp((8, 8)),
        "claims-nothing-BMP": bmp((0, 0)),
        "tiff-with-pixels-outside": grey_tiff(8, 8, t273=(4, 1, 10**6)),
        "tiff-with-compression-999": grey_tiff(8, 8, t259=(3, 1, 999)),
        "tiff-with-a-tag-of-4-billion-values": grey_tiff(8, 8, t273=(4, 2**32 - 1, 8)),
        "tiff-directory-outside": b"II*\0" + struct.pack("<I", 10**6) + bytes(90),
        "tiff-big-endian-without-tags": b"MM\0*" + struct.pack(">IH", 8, 0) + bytes(4),
        "claims-nothing-TIFF": grey_tiff(0, 0),
        "heic-that-claims-another-size": container("HEIF", (3000, 2000)),
        "heic-that-claims-nothing": container("HEIF", (0, 0)),
        "avif-that-claims-nothing": container("AVIF", (0, 0)),
        "webp-that-claims-more-bytes": good[:4] + b"\xff\xff\xff\x7f" + good[8:],
    }
