"""Checksums of what a catalogue holds: SQLite notices damage to the structure of its pages alone,
so without them a flipped bit would be a wrong vector or attribute.
"""

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from embedder.types import ItemId

Stored = str | int | float | bytes
"""A value in the table of attributes."""

AttributeRow = tuple[int, Stored, int]
"""The number of a name, a value, and the number of an item."""

_INT64 = 1 << 64


def row_checksum(row: Sequence[Any]) -> int:
    """Of a short row, or of several."""
    return zlib.crc32(repr(row).encode("utf-8", "surrogatepass"))


def item_checksum(
    number: ItemId, key: str, path: str, sha256: bytes, format_: str, attributes: str
) -> int:
    """Of a row of `items`; `attributes` is the JSON. Raises: TypeError for a damaged sha256."""
    text = f"{number}\0{key}\0{path}\0{format_}\0{attributes}"
    return zlib.crc32(text.encode(), zlib.crc32(sha256))


def vector_checksum(number: ItemId, vector: bytes) -> int:
    """Of a row of `vectors`; it begins with the number, so that rows cannot be mixed up."""
    return zlib.crc32(vector, number)


def attributes_total(rows: Iterable[AttributeRow], total: int = 0) -> int:
    """`total` with rows added. A sum, so that it follows changes, and rows with one name and value
    may be given as one, with the sum of their items.

    Raises: TypeError, OverflowError for damaged rows.
    """
    for name, value, items in rows:
        total += (zlib.crc32(_bytes(value), name) << 1 | 1) * items
    return total


def as_int64(total: int) -> int:
    """A total as SQLite can store it."""
    return (total + _INT64 // 2) % _INT64 - _INT64 // 2


def _bytes(value: Stored) -> bytes:
    # SQLite groups by equality, so equal numbers have equal bytes.
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, float) and not value.is_integer():
        return struct.pack("<d", value)
    return value if isinstance(value, bytes) else b"%d" % value
