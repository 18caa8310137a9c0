"""Files without metadata: what Pillow decodes, and the colours and orientation of the image.

Texts, comments and previews are never read, so they may be large or damaged, as in browsers.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from kinlens.embedder.decoding.colour import MAX_PROFILE_BYTES, cicp_profile, power_profile

_PNG = b"\x89PNG\r\n\x1a\n"
_PIXELS = (b"IHDR", b"PLTE", b"IDAT", b"IEND")
_SMALL = (b"tRNS", b"eXIf", b"cICP", b"iCCP", b"sRGB", b"gAMA", b"cHRM")
_BIT_DEPTH_AT = 24

_JPEG = b"\xff\xd8"
_FILL, _SCAN = 0xFF, 0xDA
_UNSIZED = frozenset((*range(0xC0), *range(0xD0, _SCAN + 1)))
_METADATA = frozenset((*range(0xE0, 0xF0), 0xFE))
_KEPT = {0xE0: (b"JFIF\0", 14), 0xEE: (b"Adobe", 12)}
"""Segments that determine colours: how each begins, and its least length."""
_ICC, _EXIF = b"ICC_PROFILE\0", b"Exif\0\0"

_ANIMATED, _ALPHA = 0x02, 0x10
_NCLX = re.compile(rb"colrnclx(..)(..)", re.DOTALL)
_HEADER_BYTES = 2**16

Stripped = tuple[bytes, dict[str, Any]]
"""A file without metadata; as in `info` of Pillow, `icc_profile` and `exif`, if any, and for PNG
the `bits` per channel or index. A damaged file stays damaged."""


def strip_jpeg(data: bytes) -> Stripped:
    """A JPEG, of which only the first image counts."""
    kept: list[bytes | memoryview] = [_JPEG]
    info: dict[str, Any] = {}
    parts: dict[bytes, bytes] = {}
    view = memoryview(data)
    for marker, start, end in _segments(data):
        content = data[start + 4 : end] if marker in _METADATA else b""
        head, least = _KEPT.get(marker, (_JPEG, 0))
        if marker not in _METADATA or (content.startswith(head) and len(content) >= least):
            kept.append(view[start:end])
        elif content.startswith(_ICC):
            parts.setdefault(content[12:14], content[14:])
        elif content.startswith(_EXIF):
            info.setdefault("exif", content)
    numbers = [bytes([number + 1, len(parts)]) for number in range(min(len(parts), 255))]
    if numbers and parts.keys() == set(numbers):
        info["icc_profile"] = b"".join(parts[number] for number in numbers)
    return b"".join(kept), info


def strip_png(data: bytes) -> Stripped:
    """A PNG; an animation becomes its still image."""
    kept: list[bytes | memoryview] = [_PNG]
    small: dict[bytes, bytes] = {}
    view = memoryview(data)
    for kind, start, end in _chunks(data):
        chunk = view[start:end]
        if kind in _PIXELS:
            kept.append(chunk)
        elif kind in _SMALL and zlib.crc32(chunk[4:-4]) == _number(chunk[-4:]):
            small.setdefault(kind, bytes(chunk[8:-4]))
            if kind == b"tRNS":
                kept.append(chunk)
    info: dict[str, Any] = {"bits": data[_BIT_DEPTH_AT]} if len(data) > _BIT_DEPTH_AT else {}
    if b"eXIf" in small:
        info["exif"] = _EXIF + small[b"eXIf"]
    if (profile := _profile(small)) is not None:
        info["icc_profile"] = profile
    return b"".join(kept), info


def strip_webp(data: bytes) -> Stripped:
    """An animated WebP that is transparent around a first frame smaller than the image."""
    if data[12:16] == b"VP8X" and data[20:21] and data[20] & _ANIMATED:
        return data[:20] + bytes([data[20] | _ALPHA]) + data[21:], {}
    return data, {}


def strip_avif(data: bytes) -> Stripped:
    """An AVIF as it is, with the colours that its numbers describe."""
    numbers = _NCLX.search(data, 0, _HEADER_BYTES)
    return data, {} if numbers is None else colours_of(*map(_number, numbers.groups()))


def colours_of(primaries: int, transfer: int) -> dict[str, Any]:
    """`icc_profile` of an image of a video codec; nothing for unknown colours."""
    profile = cicp_profile(primaries, transfer, video=True)
    return {} if profile is None else {"icc_profile": profile}


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, start and end of each segment of a JPEG; all from the first scan on is the last."""
    start = len(_JPEG)
    while data[start : start + 1] == b"\xff" and start + 4 <= len(data):
        marker = data[start + 1]
        if marker in _UNSIZED:
            break
        end = start + 2 + _number(data[start + 2 : start + 4])
        if marker == _FILL or end < start + 4:
            end = start + 1
        else:
            yield marker, start, end
        start = end
    yield _SCAN, start, len(data)


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start and end of each chunk of a PNG up to IEND; the last may be cut off."""
    start, kind = len(_PNG), b""
    while start < len(data) and kind != b"IEND":
        kind = data[start + 4 : start + 8]
        end = start + 12 + _number(data[start : start + 4])
        yield kind, start, end
        start = end


def _profile(chunks: dict[bytes, bytes]) -> bytes | None:
    """The best description wins, in the order of the PNG specification, third edition."""
    if len(code := chunks.get(b"cICP", b"")) == 4:
        return cicp_profile(code[0], code[1])
    name, _, rest = chunks.get(b"iCCP", b"").partition(b"\0")
    if name and rest[:1] == b"\0" and (profile := _inflated(rest[1:])) is not None:
        return profile
    gamma, points = chunks.get(b"gAMA", b""), chunks.get(b"cHRM", b"")
    if b"sRGB" in chunks or len(gamma) != 4:
        return None
    places = struct.unpack(">8I", points) if len(points) == 32 else None
    return power_profile(_number(gamma) / 1e5, places and [value / 1e5 for value in places])


def _inflated(packed: bytes) -> bytes | None:
    inflater = zlib.decompressobj()
    try:
        profile = inflater.decompress(packed, MAX_PROFILE_BYTES)
    except zlib.error:
        return None
    return profile if inflater.eof else None


def _number(data: bytes | memoryview) -> int:
    return int.from_bytes(data, "big")
