"""Sets of positions as bitmaps, as FAISS reads them: position p is bit p & 7 of byte p >> 3."""

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
    """The positions below `size` that the set holds, ascending."""
    return np.flatnonzero(np.unpackbits(bits, count=size, bitorder="little").view(np.bool_))


def count_of(bits: Bits, size: int) -> int:
    """Number of positions below `size` that the set holds."""
    whole, rest = divmod(size, 8)
    count = int(np.bitwise_count(bits[:whole]).sum(dtype=np.int64))
    return count + (int(bits[whole] & (2**rest - 1)).bit_count() if rest else 0)


def has_bits(bits: Bits, positions: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Which of the positions (N,) are in the set."""
    shifts = (positions & 7).astype(np.uint8)
    found: NDArray[np.bool_] = (bits[positions >> 3] >> shifts) & 1 == 1
    return found


def put_bits(bits: Bits, positions: Ids, values: NDArray[np.bool_] | bool) -> None:
    """Put positions (N,) into the set or take them out, in place; of equal ones the last counts."""
    if not len(positions):
        return
    # Not np.bitwise_or.at, which takes 40 times as long.
    touched = np.unique(positions >> 3)
    flags = np.unpackbits(bits[touched][:, None], axis=1, bitorder="little")
    flags[np.searchsorted(touched, positions >> 3), positions & 7] = values
    bits[touched] = np.packbits(flags, axis=1, bitorder="little")[:, 0]
