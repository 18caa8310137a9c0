"""Rows with equal content: the same image and the same vector.

An index contains the first row of each content. A placeholder that a million items share then
costs a search no more than any other image.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kinlens.indexer.bits import Bits, has_bits, numbers_in, packed_bits, put_bits
from kinlens.indexer.catalog.vectors import find_sorted
from kinlens.indexer.types import Ids, StoredRows

_BLOCK = 65_536  # vectors that are read at a time
_FEW = 500  # up to one content with copies in this number of rows, single bits are set
_FIRST_BLOCK = 64  # few rows of a content are usually needed


class Copies:
    """The contents that several of `size` rows have, in the order of their first rows.

    rows: the rows (C,), grouped by content, ascending within a content.
    starts: the index in `rows` at which each content begins (G,).
    """

    def __init__(self, rows: Ids, starts: Ids, size: int) -> None:
        self.rows = rows
        self.starts = starts
        self.firsts = rows[starts]
        self._size = size
        self._ends = np.append(starts[1:], len(rows))

    @classmethod
    def find(cls, vectors: StoredRows, rows: Ids, images: Ids, size: int) -> "Copies":
        """The copies among the given rows (N,) of `vectors`.

        images: equal numbers (N,) mark equal images. The vectors must be equal as well, since a
            hash of an image may have been made up by its writer.
        """
        hashes = np.empty(len(rows), np.int64)
        for start in range(0, len(rows), _BLOCK):
            part = slice(start, start + _BLOCK)
            hashes[part] = [hash(vector.tobytes()) for vector in vectors[rows[part]]]
        order = np.lexsort((rows, hashes, images))
        rows, hashes, images = rows[order], hashes[order], images[order]
        differs = (hashes[1:] != hashes[:-1]) | (images[1:] != images[:-1])
        starts = np.flatnonzero(np.append(True, differs))[: len(rows)]
        sizes = np.diff(starts, append=len(rows))
        firsts, is_copied = np.repeat(rows[starts], sizes), np.repeat(sizes > 1, sizes)
        return cls.from_array(np.stack([firsts[is_copied], rows[is_copied]]), size)

    @classmethod
    def from_array(cls, pairs: Ids, size: int) -> "Copies":
        """The copies from an array (2, C): the first row of the same content, and each row."""
        firsts, rows = pairs
        # Those of a file are in order, and sorting millions of them takes seconds.
        is_later = (firsts[1:] > firsts[:-1]) | (
            (firsts[1:] == firsts[:-1]) & (rows[1:] > rows[:-1])
        )
        if not is_later.all():
            firsts, rows = pairs[:, np.lexsort(pairs[::-1])]
        return cls(rows, np.flatnonzero(np.diff(firsts, prepend=-1)), size)

    def to_array(self) -> Ids:
        """The array (2, C) of `from_array`."""
        return np.stack([np.repeat(self.firsts, self._ends - self.starts), self.rows])

    @property
    def later(self) -> Ids:
        """All rows but the first of each content."""
        return np.delete(self.rows, self.starts)

    def content_of(self, firsts: Ids) -> Ids:
        """The content that begins with each of these rows, of any shape; -1 if none does."""
        return find_sorted(firsts, self.firsts)

    def rows_of(self, contents: Ids, among: Bits | None, limit: int) -> tuple[Ids, Ids]:
        """The first rows of each of these contents (C,) that are in the bitmap, at most `limit`.

        among: None for all rows.

        Returns (the index in `contents` (N,), ascending; the row (N,), ascending for each).
        """
        starts, sizes = self.starts[contents], self._ends[contents] - self.starts[contents]
        is_large = sizes > _FIRST_BLOCK
        small = np.flatnonzero(~is_large)
        rows = self.rows[numbers_in(starts[small], sizes[small])]
        owners = np.repeat(small, sizes[small])
        kept = slice(None) if among is None else has_bits(among, rows)
        found = [(owners[kept], rows[kept])]
        for owner in np.flatnonzero(is_large).tolist():
            own = self._first_rows(int(contents[owner]), among, limit)
            found.append((np.full(len(own), owner), own))
        owners, rows = by_owner(found)
        is_shown = np.arange(len(owners)) - np.searchsorted(owners, owners) < limit
        return owners[is_shown], rows[is_shown]

    def _first_rows(self, content: int, among: Bits | None, limit: int) -> Ids:
        """The first `limit` rows of a large content, read in blocks that grow."""
        start, end, block = int(self.starts[content]), int(self._ends[content]), _FIRST_BLOCK
        found: list[Ids] = []
        while start < end and sum(map(len, found)) < limit:
            rows = self.rows[start : min(start + block, end)]
            found.append(rows if among is None else rows[has_bits(among, rows)])
            start, block = start + block, 2 * block
        return np.concatenate(found)[:limit]

    def folded(self, bits: Bits) -> Bits:
        """The bitmap with the first row of each content in place of all its rows."""
        found = bits & ~self._later_bits
        if not len(self.rows):
            return found
        has_any = np.logical_or.reduceat(has_bits(bits, self.rows), self.starts)
        if _FEW * len(self.firsts) < self._size:
            put_bits(found, self.firsts, has_any)
            return found
        flags = np.unpackbits(found, bitorder="little")  # `put_bits` would sort all first rows
        flags[self.firsts] = has_any
        return np.packbits(flags, bitorder="little")

    def hidden_by(self, removed: Ids, tombstones: Bits) -> Ids:
        """The rows that stand for no item as soon as these rows (N,) are among the tombstones.

        These are the rows without copies, and the first rows of contents that are removed as a
        whole. The cost depends on the contents of the removed rows alone.
        """
        contents = self._contents[removed]
        touched = np.unique(contents[contents >= 0]).astype(np.int64)
        owners, _ = self.rows_of(touched, ~tombstones, 1)
        return np.concatenate([removed[contents < 0], self.firsts[np.delete(touched, owners)]])

    @cached_property
    def _contents(self) -> NDArray[np.int32]:
        """The content of each row (size,); -1 for rows without copies."""
        contents = np.full(self._size, -1, np.int32)
        contents[self.rows] = np.repeat(np.arange(len(self.starts)), self._ends - self.starts)
        return contents

    @cached_property
    def _later_bits(self) -> Bits:
        is_later = np.zeros(self._size, np.bool_)
        is_later[self.later] = True
        return packed_bits(is_later)


def by_owner(parts: Sequence[tuple[Ids, Ids]]) -> tuple[Ids, Ids]:
    """Join pairs of owners (N,) and rows (N,); in the order of owners, rows as they are given."""
    owners, rows = (np.concatenate(one) for one in zip(*parts, strict=True))
    order = np.argsort(owners, kind="stable")
    return owners[order], rows[order]
