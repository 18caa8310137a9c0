"""Sets of positions as bitmaps in the layout of FAISS: position p is bit p & 7 of byte p >> 3."""

import numpy as np
from numpy.typing import NDArray

from kinlens.indexer.types import Ids

Bits = NDArray[np.uint8]


def empty_bits(size: int) -> Bits:
    """The empty set of positions below `size`."""
    return np.zeros((size + 7) // 8, np.uint8)


def packed_bits(chosen: NDArray[np.bool_]) -> Bits:
    """The positions where `chosen` (N,) is true."""
    return np.packbits(chosen, bitorder="little")


def positions_in(bits: Bits, size: int) -> Ids:
    """The positions below `size` that are in the set, ascending."""
    return np.flatnonzero(np.unpackbits(bits, count=size, bitorder="little").view(np.bool_))


def first_positions(bits: Bits, start: int, limit: int | None) -> Ids:
    """Up to `limit` positions from `start` on that are in the set, ascending."""
    own = bits[start // 8 :]
    if limit is not None:  # the first 8 positions may be before `start`
        counts = np.cumsum(np.bitwise_count(own), dtype=np.int64)
        own = own[: int(np.searchsorted(counts, limit + 8)) + 1]
    found = positions_in(own, 8 * len(own)) + start // 8 * 8
    return found[found >= start][:limit]


def count_of(bits: Bits, size: int) -> int:
    """Number of positions below `size` that are in the set."""
    whole, rest = divmod(size, 8)
    count = int(np.bitwise_count(bits[:whole]).sum(dtype=np.int64))
    return count + (int(bits[whole] & (2**rest - 1)).bit_count() if rest else 0)


def bits_from(bits: Bits, start: int, size: int) -> Bits:
    """The set of `size` positions from `start` on, counted from there."""
    own = bits[start // 8 : (start + size + 7) // 8]
    if not start % 8:
        return own
    flags = np.unpackbits(own, bitorder="little")[start % 8 :][:size]
    return packed_bits(flags.view(np.bool_))


def has_bits(bits: Bits, positions: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Mask (N,) of the positions that are in the set."""
    shifts = (positions & 7).astype(np.uint8)
    found: NDArray[np.bool_] = (bits[positions >> 3] >> shifts) & 1 == 1
    return found


def put_bits(bits: Bits, positions: Ids, values: NDArray[np.bool_] | bool) -> None:
    """Add or remove positions (N,) in place; of repeated positions the last one counts."""
    if not len(positions):
        return
    # np.bitwise_or.at takes 40 times as long.
    touched = np.unique(positions >> 3)
    flags = np.unpackbits(bits[touched][:, None], axis=1, bitorder="little")
    flags[np.searchsorted(touched, positions >> 3), positions & 7] = values
    bits[touched] = np.packbits(flags, axis=1, bitorder="little")[:, 0]


def numbers_in(starts: Ids, sizes: Ids) -> Ids:
    """The numbers from each of these starts (N,) on, `sizes` (N,) of them, one after the other."""
    shifts = starts - np.cumsum(sizes) + sizes
    numbers: Ids = np.repeat(shifts, sizes) + np.arange(int(sizes.sum()))
    return numbers
