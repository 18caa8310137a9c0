"""The chunks of a PNG file: those that Pillow decodes, and the colour space of the image.

Text is never inflated. A damaged chunk that is not needed for the pixels is ignored, as in libpng.
"""

import struct
import zlib
from collections.abc import Iterator

from kinlens.embedder.colour import MAX_PROFILE_BYTES, cicp_profile, power_profile

SIGNATURE = b"\x89PNG\r\n\x1a\n"

_NEEDED = (b"IHDR", b"PLTE", b"IDAT", b"IEND")
_SMALL = (b"tRNS", b"eXIf")
_COLOUR = (b"cICP", b"iCCP", b"sRGB", b"gAMA", b"cHRM")
_BIT_DEPTH_AT = 24


def without_metadata(data: bytes) -> tuple[bytes, bytes | None]:
    """The file with nothing but pixels and orientation; the ICC profile of its colours, if any.

    An animation becomes its still image. A damaged file stays damaged.
    """
    kept: list[bytes | memoryview] = [SIGNATURE]
    colour: dict[bytes, bytes] = {}
    view = memoryview(data)
    for kind, start, end in _chunks(data):
        if kind in _NEEDED:
            kept.append(view[start:end])
            continue
        if kind not in _SMALL + _COLOUR or zlib.crc32(view[start + 4 : end - 4]) != int.from_bytes(
            view[end - 4 : end], "big"
        ):
            continue
        if kind in _SMALL:
            kept.append(view[start:end])
        else:
            colour.setdefault(kind, data[start + 8 : end - 4])
    return b"".join(kept), _profile(colour)


def bit_depth(data: bytes) -> int:
    """Bits per channel, or per index of a palette."""
    return data[_BIT_DEPTH_AT]


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start and end of each chunk up to IEND; the last may be cut off."""
    start, kind = len(SIGNATURE), b""
    while start < len(data) and kind != b"IEND":
        kind = data[start + 4 : start + 8]
        end = start + 12 + int.from_bytes(data[start : start + 4], "big")
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
    return power_profile(
        int.from_bytes(gamma, "big") / 1e5, places and [value / 1e5 for value in places]
    )


def _inflated(packed: bytes) -> bytes | None:
    inflater = zlib.decompressobj()
    try:
        profile = inflater.decompress(packed, MAX_PROFILE_BYTES)
    except zlib.error:
        return None
    return profile if inflater.eof else None
