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
import PIL
from numpy.typing import NDArray
from PIL import Image, ImageCms

from tests.support import profiles
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
_PILLOW = int(PIL.__version__.split(".")[0])
_PNG = b"\x89PNG\r\n\x1a\n"
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
        *((200, True, table) for table in (_forms, _extras, colour_spaces)),
        *((200, False, table) for table in (_other_pixels, encodings)),
        (413, False, _too_large),
        (415, False, _other_formats),
        (422, False, _damaged),
    )
    images = [OddImage("empty", b"", 400)]
    for status, same, table in tables:
        images += [OddImage(name, data, status, same) for name, data in table().items()]
    for name in ("photo.exe", "../../etc/passwd", "фото 1.jpg", "a" * 250):
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


def png(size: tuple[int, int], depth: int, colour: int, content: bytes) -> bytes:
    """A PNG file of chunks: IHDR, then `content`, then IEND."""
    header = struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, 0)
    return _PNG + chunk(b"IHDR", header) + content + chunk(b"IEND", b"")


def idat(rows: bytes) -> bytes:
    return chunk(b"IDAT", zlib.compress(rows, 9))


def filtered(pixels: NDArray[np.generic]) -> bytes:
    """Rows of a PNG, each with its filter byte."""
    return b"".join(b"\0" + row.tobytes() for row in pixels)


def grey_tiff(
    width: int, height: int, content: bytes = b"", **changes: tuple[int, int, int]
) -> bytes:
    """An uncompressed little-endian grey TIFF of one strip; `t<tag>` changes a tag."""
    content = content or bytes(min(width * height, 64))
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


def gif(size: tuple[int, int], blocks: bytes) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", *size, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff" + blocks


def gif_frame(size: tuple[int, int], data: bytes = b"\x02\x02\x4c\x01\x00") -> bytes:
    return b"," + struct.pack("<HHHHB", 0, 0, *size, 0) + data


def bmp(size: tuple[int, int], compression: int = 0, pixels: bytes = b"") -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, *size, 1, 24, compression, len(pixels), 0, 0, 0, 0)
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


def patched(at: int, new: bytes) -> bytes:
    """The photo as a JPEG with these bytes at that place of its frame header."""
    at += _PLAIN.index(b"\xff\xc0")
    return _PLAIN[:at] + new + _PLAIN[at + len(new) :]


def claiming(width: int, height: int) -> bytes:
    """A JPEG whose frame header claims this size."""
    return patched(5, struct.pack(">HH", height, width))


_IMAGE = street_photo()
_PIXELS = np.asarray(_IMAGE)
_PLAIN = encoded(_IMAGE, "JPEG")
_GOOD = fine(_IMAGE, "JPEG")
_ROWS = idat(filtered(_PIXELS))
_SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
_NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))


def _forms() -> Table:
    """Every way to store the photo."""
    solid = np.full((*_PIXELS.shape[:2], 4), 65535, ">u2")
    solid[..., :3] = _PIXELS.astype(">u2") * 257
    pair = fine(_IMAGE, "MPO", save_all=True, append_images=[street_photo(1)], quality=95)
    tiffs = ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")
    turning = ("JPEG", "PNG", "WEBP", "TIFF", "AVIF", "HEIF")
    return {
        **{f"plain-{kind}": fine(_IMAGE, kind) for kind in FORMATS},
        **{f"opaque-alpha-{k}": encoded(_IMAGE.convert("RGBA"), k) for k in ("PNG", "HEIF")},
        **{f"orientation-{n}-{k}": turned(_IMAGE, k, n) for k in turning for n in range(1, 9)},
        "orientation-9-means-none": turned(_IMAGE, "JPEG", 9),
        **{f"animated-{kind}-is-its-first-frame": animated(kind) for kind in ANIMATED},
        **{f"animated-{kind}-cut-in-a-later-frame": cut_later(kind) for kind in ANIMATED[:3]},
        "jpeg-progressive": fine(_IMAGE, "JPEG", progressive=True),
        "jpeg-cmyk": fine(_IMAGE.convert("CMYK"), "JPEG"),
        "jpeg-multi-picture-without-its-second": pair[: len(pair) * 6 // 10],
        **{f"tiff-compression-{c}": encoded(_IMAGE, "TIFF", compression=c) for c in tiffs},
        "tiff-big": encoded(_IMAGE, "TIFF", big_tiff=True),
        # Pillow reads them and cannot write them.
        "jpeg-arithmetic": (HERE / "arithmetic.jpg").read_bytes(),
        "avif-10-bit": (HERE / "ten-bit.avif").read_bytes(),
        "heic-of-tiles": fine(street_photo().resize((960, 640)), "HEIF", tile_size=512),
        # Its first brand names no codec, as some phones write it.
        "heic-of-any-brand": fine(_IMAGE, "HEIF").replace(b"ftypheic", b"ftypmif1", 1),
        "png-rgba-16-bit": png(SIZE, 16, 6, idat(filtered(solid))),
    }


def turned(image: Image.Image, kind: str, orientation: int, **options: object) -> bytes:
    """Stored turned, with the EXIF orientation that undoes it; an unknown one means none."""
    stored = image.transpose(_UNDO[orientation]) if orientation in _UNDO else image
    exif = Image.Exif()
    exif[0x0112] = orientation
    return fine(stored, kind, exif=exif.tobytes(), **options)


ANIMATED = ("GIF", "PNG", "TIFF", "WEBP", "AVIF", "HEIF")


def animated(kind: str) -> bytes:
    """The photo, and five times another one."""
    options = {"lossless": True} if kind == "WEBP" else {}
    return encoded(_IMAGE, kind, save_all=True, append_images=[street_photo(1)] * 5, **options)


def cut_later(kind: str) -> bytes:
    data = animated(kind)
    return data[: len(data) * 7 // 10]


_PRECISE: dict[str, dict[str, object]] = {
    "JPEG": {"subsampling": 0},
    "PNG": {},
    "WEBP": {"lossless": True},
    "TIFF": {},
    "AVIF": {"subsampling": "4:4:4"},
    "HEIF": {"chroma": 444},
}


def colour_spaces() -> Table:
    """The photo in other colour spaces than sRGB, in each format that can name one."""
    files, video = {}, encoded(_IMAGE, "AVIF").index(b"colr") + 8
    for name in profiles.POINTS:
        profile = profiles.named(name)
        image = profiles.stored_in(_IMAGE, profile)
        for kind, options in _PRECISE.items():
            files[f"{name}-{kind}"] = fine(image, kind, icc_profile=profile, **options)
        files[f"{name}-PNG-with-alpha"] = fine(image.convert("RGBA"), "PNG", icc_profile=profile)
    image = profiles.stored_in(_IMAGE, profiles.named("display-p3"))
    avif = fine(image, "AVIF")
    numbers = _PRECISE["HEIF"] | {
        "color_primaries": 12,
        "transfer_characteristics": 13,
        "matrix_coefficients": 6,
    }
    return files | {
        "display-p3-PNG-by-numbers": coloured_png(image, chunk(b"cICP", b"\x0c\x0d\0\1")),
        "display-p3-AVIF-by-numbers": avif[:video] + b"\0\x0c\0\x0d" + avif[video + 4 :],
        "display-p3-HEIF-by-numbers": fine(image, "HEIF", **numbers, full_range_flag=1),
        "prophoto-PNG-by-points-and-gamma": coloured_png(
            profiles.stored_in(_IMAGE, profiles.named("prophoto")), PROPHOTO_POINTS + gamma(1 / 1.8)
        ),
    }


def coloured_png(image: Image.Image, chunks: bytes) -> bytes:
    return png(SIZE, 8, 2, chunks + idat(filtered(np.asarray(image))))


def gamma(value: float) -> bytes:
    return chunk(b"gAMA", struct.pack(">I", round(value * 1e5)))


def points(name: str) -> bytes:
    return chunk(b"cHRM", struct.pack(">8I", *(round(v * 1e5) for v in profiles.POINTS[name])))


PROPHOTO_POINTS = points("prophoto")
_ICC = b"ICC_PROFILE\0"
_BAD_CHECKSUM = b"bad!"


def encodings() -> Table:
    """Legal encodings of grey, colour, ink, palette and alpha, as a browser must show them."""
    p3, grey = profiles.named("display-p3"), _IMAGE.convert("L")
    cmyk, press = _IMAGE.convert("CMYK"), profiles.table(b"CMYK", profiles.press)
    wide = zlib.compress(profiles.named("prophoto"))
    profile = chunk(b"iCCP", b"name\0\0" + wide)
    kinds = {
        "gamma": gamma(0.6),
        "gamma-of-srgb": gamma(0.4545),
        "gamma-0": gamma(0),
        "points-alone": PROPHOTO_POINTS,
        "points-of-a-line": chunk(b"cHRM", struct.pack(">8I", *[30000] * 8)) + gamma(0.6),
        "srgb-before-gamma": chunk(b"sRGB", b"\0") + PROPHOTO_POINTS + gamma(0.6),
        "profile-before-srgb": chunk(b"sRGB", b"\0") + profile,
        "numbers-before-profile": chunk(b"cICP", b"\x0c\x0d\0\1") + profile,
        **{f"transfer-{n}": chunk(b"cICP", bytes([9, n, 0, 1])) for n in (1, 4, 5, 7, 8, 13)},
        "profile-with-bad-checksum": profile[:-4] + _BAD_CHECKSUM,
    }
    files = {f"png-{name}": coloured_png(_IMAGE, chunks) for name, chunks in kinds.items()}
    files |= {f"png-{name}": data for name, data in _pngs().items()}
    for kind in ("JPEG", "PNG"):
        files |= {
            f"grey-gamma-{kind}": fine(grey, kind, icc_profile=profiles.grey(1.4)),
            f"grey-in-colours-{kind}": fine(grey, kind, icc_profile=profiles.named("prophoto")),
            f"colours-with-grey-profile-{kind}": fine(_IMAGE, kind, icc_profile=profiles.grey(1.4)),
            f"colours-with-ink-profile-{kind}": fine(_IMAGE, kind, icc_profile=press),
        }
    small = _IMAGE.resize((40, 30)).quantize(64)
    one, clear = encoded(small, "GIF"), Image.new("RGBA", SIZE)
    start = one.index(b",\0\0\0\0", 13)
    clear.paste(_IMAGE.resize((40, 30)), (20, 10))
    animation = encoded(
        clear, "WEBP", lossless=True, save_all=True, append_images=[_IMAGE.convert("RGBA")]
    )
    return files | {
        "gif-of-a-small-frame": one[:6]
        + struct.pack("<HH", *SIZE)
        + one[10:start]
        + struct.pack("<BHH", 44, 10, 20)
        + one[start + 5 :],
        "webp-of-a-small-frame": animation,
        "jpeg-ink-with-two-tables": fine(
            cmyk,
            "JPEG",
            icc_profile=profiles.table(b"CMYK", profiles.press, other=lambda ink: ink[:, :3] * 50),
        ),
        "jpeg-ink-on-paper": fine(cmyk, "JPEG", icc_profile=press),
        "jpeg-ink-with-rgb-profile": fine(cmyk, "JPEG", icc_profile=p3),
        "jpeg-rgb-without-ycc": fine(_IMAGE, "JPEG", keep_rgb=True),
        "jpeg-profile-cut-in-half": fine(_IMAGE, "JPEG", icc_profile=p3[: len(p3) // 2]),
        "png-profile-of-a-scanner": fine(
            _IMAGE, "PNG", icc_profile=profiles.table(b"RGB ", _scanner)
        ),
    }


def _scanner(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    r, g, b = rgb.T
    return np.stack([5 + 90 * (0.3 * r + 0.6 * g + 0.1 * b), 30 * (r - g), 30 * (g - b)], -1)


def _pngs() -> Table:
    """Grey, palette, alpha and transparent colours, with all depths."""
    rng, files = np.random.default_rng(0), {}
    grey = np.asarray(_IMAGE.convert("L")).astype(np.int64)
    ramp = np.arange(grey.size).reshape(grey.shape)
    for depth in (1, 2, 4, 8, 16):
        top = 2**depth - 1
        level = grey * 257 + ramp % 200 if depth == 16 else grey * top // 255
        level = level.clip(0, top)
        clear = chunk(b"tRNS", struct.pack(">H", level[20, 20]))
        rows = idat(filtered(packed(level, depth)))
        files |= {
            f"grey-{depth}": png(SIZE, depth, 0, rows),
            f"grey-{depth}-clear": png(SIZE, depth, 0, clear + rows),
            f"grey-{depth}-bad-clear": png(SIZE, depth, 0, clear[:-4] + _BAD_CHECKSUM + rows),
        }
        if depth <= 8:
            palette = chunk(b"PLTE", rng.bytes(3 * (top + 1)))
            for name, alpha in (("opaque", b""), ("one", b"\0"), ("many", rng.bytes(top))):
                clear = chunk(b"tRNS", alpha) if alpha else b""
                files[f"palette-{depth}-{name}"] = png(SIZE, depth, 3, palette + clear + rows)
        if depth >= 8:
            colour = _PIXELS.astype(np.int64) * (top // 255)
            alpha = (ramp % (top + 1))[..., None]
            clear = chunk(b"tRNS", struct.pack(">3H", *colour[20, 20]))
            pairs = {4: np.dstack([level, alpha]), 2: colour, 6: np.dstack([colour, alpha])}
            for kind, values in pairs.items():
                rows = idat(filtered(packed(values, depth)))
                files[f"kind-{kind}-{depth}"] = png(SIZE, depth, kind, rows)
            rows = idat(filtered(packed(colour, depth)))
            files[f"colour-{depth}-clear"] = png(SIZE, depth, 2, clear + rows)
    return files


def packed(values: NDArray[np.int64], depth: int) -> NDArray[np.generic]:
    """Rows of values as a PNG stores them, `depth` bits each."""
    if depth >= 8:
        return values.astype(f">u{depth // 8}")
    bits = values[..., None] >> np.arange(depth)[::-1] & 1
    return np.packbits(bits.reshape(len(values), -1).astype(np.uint8), axis=1)


def _extras() -> Table:
    """Large or strange data next to the pixels of the photo."""
    exif = chunk(b"eXIf", b"II*\0" + b"\xff" * 10**6)
    bomb = b"name\0\0" + zlib.compress(bytes(30 * 2**20), 9)
    text = zlib.compress(_NOISE.tobytes().hex().encode() * 80)  # 2 MB
    head = b"Exif\0\0II*\0\x08\0\0\0"
    segments = {
        "short-jfif": segment(0xE0, b"JFIF\0"),
        "short-exif": segment(0xE1, head),
        "huge-tag": segment(0xE1, head + b"\1\0\x12\1\3\0" + b"\xff" * 8 + bytes(4)),
        "turn-in-xmp": segment(
            0xE1, b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"></x:xmpmeta>'
        ),
        "short-profile": segment(0xE2, _ICC[:12]),
        "part-of-a-profile": segment(0xE2, _ICC + b"\1\2xx"),
        "profile-in-no-parts": segment(0xE2, _ICC + b"\0\0xx"),
        "short-mpf": segment(0xE2, b"MPF\0MM\0*\0\0\0\x08\0\1\xb0\1\0\4\0\0"),
        "short-photoshop": segment(0xED, b"Photoshop 3.0\x008BIM\x04\x04"),
        "short-adobe": segment(0xEE, b"Adobe"),
        "fill-bytes": b"\xff\xff\xff",
    }
    metadata = {
        "bomb-in-zTXt": chunk(b"zTXt", bomb),
        "bomb-in-iTXt": chunk(b"iTXt", b"name\0\1" + bomb[5:6] + b"\0\0" + bomb[6:]),
        "bomb-in-iCCP": chunk(b"iCCP", bomb),
        "2-MB-of-zTXt": chunk(b"zTXt", b"Raw profile type xmp\0\0" + text),
        "10-MB-of-tEXt": chunk(b"tEXt", b"a\0" + bytes(2**20)) * 10,
        "unknown-text": chunk(b"zTXt", b"name\0\7" + text) + chunk(b"iTXt", b"name"),
        "unknown-iCCP": chunk(b"iCCP", b"name\0\1" + text),
        "random-iCCP": chunk(b"iCCP", b"name\0\0" + zlib.compress(_NOISE.tobytes() * 110)),
        "short-chunks": b"".join(
            chunk(k, b"") for k in (b"gAMA", b"cHRM", b"pHYs", b"sRGB", b"iCCP")
        ),
        "bad-checksum": chunk(b"tEXt", b"a\0b")[:-4] + _BAD_CHECKSUM,
        "unknown-chunks": chunk(b"prVt", bytes(9)) * 3 + chunk(b"acTL", b"") + chunk(b"fcTL", b""),
    }
    profiles = {"srgb": _SRGB, "damaged": b"\xff" * 3000, "of-another": _SRGB[::-1]}
    return {
        **{
            f"icc-{name}-{kind}": fine(_IMAGE, kind, icc_profile=profile)
            for kind in ("JPEG", "PNG", "HEIF")
            for name, profile in profiles.items()
        },
        **{f"{kind}-and-zip": fine(_IMAGE, kind) + _zip() for kind in FORMATS},
        "jpeg-with-5-MB-of-segments": _GOOD[:2] + segment(0xE5, b"x" * 65_000) * 80 + _GOOD[2:],
        "jpeg-with-broken-exif": _GOOD[:2] + segment(0xE1, b"Exif\0\0broken") + _GOOD[2:],
        "png-with-1-MB-of-broken-exif": png(SIZE, 8, 2, exif + _ROWS),
        **{f"jpeg-{name}": _GOOD[:2] + data + _GOOD[2:] for name, data in segments.items()},
        **{f"png-{name}": png(SIZE, 8, 2, chunks + _ROWS) for name, chunks in metadata.items()},
    }


def _zip() -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("run.js", "alert(1)")
    return archive.getvalue()


def _other_pixels() -> Table:
    """Images that need not look like the photo: fewer colours, none, odd sizes, small damage."""
    clear = _IMAGE.convert("RGBA")
    clear.putalpha(0)
    deep = Image.fromarray(np.asarray(_IMAGE.convert("L")).astype(np.uint16) * 257)
    loop = grey_tiff(8, 8)
    scan = _PLAIN.index(b"\xff\xda")
    images = {
        **{f"mode-P-{kind}": fine(_IMAGE.convert("P"), kind) for kind in FORMATS[1:]},
        **{f"mode-1-{kind}": fine(_IMAGE.convert("1"), kind) for kind in FORMATS},
        **{f"all-transparent-{k}": encoded(clear, k) for k in ANIMATED},
        **{f"grey-16-bit-{kind}": encoded(deep, kind) for kind in ("PNG", "TIFF", "HEIF")},
        "tiff-group4": encoded(_IMAGE.convert("1"), "TIFF", compression="group4"),
        "just-below-the-limit-PNG": black(7992),
        "png-with-30-MB-of-rows-too-many": png((64, 64), 8, 2, idat(bytes(30 * 2**20))),
        "tiff-that-names-itself-as-next": loop[:-4] + loop[4:8],
        "jpeg-scan-of-garbage": _PLAIN[: scan + 14] + b"\x55" * 400 + b"\xff\xd9",
    }
    for kind in FORMATS:
        limit = {"WEBP": 16383, "HEIF": 4000}.get(kind, 16384)  # of what can be written
        images[f"1x1-{kind}"] = encoded(Image.new("RGB", (1, 1), "red"), kind)
        images[f"tall-{kind}"] = encoded(Image.new("RGB", (1, limit)), kind)
    return images


def black(side: int) -> bytes:
    """A well-formed PNG of that many pixels a side, in few bytes."""
    return png((side, side), 1, 0, idat((b"\0" + bytes(side // 8)) * side))


def _claiming_webp() -> Table:
    """A WebP with hardly any pixels; Pillow 12 decodes one before it knows the size."""
    lossy = b"\x30\x01\x00\x9d\x01\x2a" + struct.pack("<HH", 16383, 16383) + bytes(100)
    return {"claims-16383x16383-WEBP": webp(b"VP8 ", lossy)}


def _too_large() -> Table:
    """Large sizes in small files: most claim them, and the bombs really have them."""
    images = {
        "bomb-PNG": black(8200),
        "bomb-TIFF": encoded(Image.new("1", (8200, 8200)), "TIFF", compression="group4"),
        "bomb-AVIF": (HERE / "bomb.avif").read_bytes(),
        "claims-a-negative-height-BMP": bmp((30000, -30000), pixels=bytes(900)),
        **(_claiming_webp() if _PILLOW >= 13 else {}),
    }
    for size in ((65535, 65535), (65535, 1), (9000, 9000)):
        name = f"claims-{size[0]}x{size[1]}"
        images |= {
            f"{name}-JPEG": claiming(*size),
            f"{name}-PNG": png(size, 8, 2, idat(bytes(900))),
            f"{name}-TIFF": grey_tiff(*size),
            f"{name}-BMP": bmp(size, pixels=bytes(900)),
            f"{name}-GIF": gif(size, gif_frame(size) + b";"),
            **{f"{name}-{kind}": container(kind, size) for kind in ("AVIF", "HEIF")},
        }
    return images


def _other_formats() -> Table:
    """Formats that are not ours, and what is not an image at all."""
    kinds = ("PPM", "ICO", "TGA", "PCX", "DDS", "EPS", "PDF", "ICNS", "SGI", "JPEG2000", "QOI")
    grey = np.asarray(_IMAGE.convert("L"))
    svg = b'<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg>&x;</svg>'
    return {
        **{f"format-{kind}": encoded(_IMAGE, kind) for kind in kinds},
        "tiff-float": encoded(Image.fromarray(grey.astype(np.float32)), "TIFF"),
        "content-svg-with-an-entity": svg,
        "content-postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n(/etc/passwd) (r) file\n",
        "content-mp4": b"\0\0\0\x18ftypisom\0\0\2\0isommp41" + bytes(60),
        "content-heif-of-no-known-codec": b"\0\0\0\x18ftypmif1\0\0\0\0mif1jpeg" + bytes(60),
        "content-jpeg-as-base64": b"/9j/4AAQSkZJRgABAQAAAQABAAD/",
        "content-url": b"http://169.254.169.254/latest/meta-data/",
        "random": b"\x01" + np.random.default_rng(7).bytes(100_000),
        **{f"only-1-byte-{kind}": encoded(_NOISE, kind)[:1] for kind in FORMATS},
        "second-half-of-a-JPEG": _PLAIN[len(_PLAIN) // 2 :],
        "zip-and-jpeg": _zip() + _PLAIN,
        "pdf-and-jpeg": b"%PDF-1.4\n" + _PLAIN,
    }


def _damaged() -> Table:
    """Truncated files, signatures with nothing behind them, and headers that cannot be."""
    images = {}
    for kind in FORMATS:
        data = encoded(_NOISE, kind)
        images[f"only-16-bytes-{kind}"] = data[:16]
        images |= {f"only-{p}-percent-{kind}": data[: len(data) * p // 100] for p in (50, 95)}
    starts = {
        "JPEG": b"\xff\xd8\xff\xe0",
        "PNG": _PNG,
        "WEBP": b"RIFF\x00\x10\x00\x00WEBP",
        "TIFF-big-endian": b"MM\0*",
        "GIF": b"GIF89a",
        "BMP": b"BM",
        "AVIF": b"\0\0\0\x1cftypavif",
        "HEIC": b"\0\0\0\x18ftypheic",
    }
    progressive = encoded(_NOISE, "JPEG", progressive=True)
    good, web = png(SIZE, 8, 2, _ROWS), encoded(_IMAGE, "WEBP")
    return images | {
        **{f"signature-and-zeros-{kind}": start + bytes(3000) for kind, start in starts.items()},
        **{f"animated-{kind}-cut-in-a-later-frame": cut_later(kind) for kind in ("WEBP", "AVIF")},
        "half-a-progressive-JPEG": progressive[: len(progressive) // 2],
        "png-header-with-a-wrong-checksum": good[:30] + bytes([good[30] ^ 1]) + good[31:],
        "png-with-too-few-rows": png(SIZE, 8, 2, idat(bytes(1000))),
        "png-with-a-chunk-of-2-GB": _PNG + struct.pack(">I", 2**31 - 1) + b"IHDR" + bytes(100),
        "claims-nothing-JPEG": claiming(0, 0),
        "jpeg-lossless": patched(1, b"\xc3"),
        "jpeg-12-bit": patched(4, b"\x0c"),
        "jpeg-without-its-end": _PLAIN[:-2],
        "gif-without-a-frame": gif((8, 8), b";"),
        "bmp-with-compression-99": bmp((8, 8), compression=99, pixels=bytes(192)),
        "tiff-with-pixels-outside": grey_tiff(8, 8, t273=(4, 1, 10**6)),
        "tiff-with-a-tag-of-4-billion-values": grey_tiff(8, 8, t273=(4, 2**32 - 1, 8)),
        "tiff-directory-outside": b"II*\0" + struct.pack("<I", 10**6) + bytes(90),
        "heic-that-claims-another-size": container("HEIF", (3000, 2000)),
        "avif-that-claims-nothing": container("AVIF", (0, 0)),
        "webp-that-claims-more-bytes": web[:4] + b"\xff\xff\xff\x7f" + web[8:],
    }
