"""All items of a group as numbers and scores: a few bytes each, however much else there is."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedder.types import AttributeValue, ItemId
from indexer.types import Ids, SearchOptions

_BLOCK = 4096

Contents = NDArray[np.bytes_]
"""The sha256 of each item as 32 bytes, shape (N,)."""


@dataclass(frozen=True, slots=True)
class Members:
    """Some items with the value `value`: their numbers (N,) and scores (N,) for one query.

    Their contents (N,) are there if only distinct ones count.
    """

    value: AttributeValue
    ids: Ids
    scores: NDArray[np.float64]
    contents: Contents | None = None

    def left(self, known: Mapping[ItemId, float], options: SearchOptions) -> "Members":
        """Those that are not excluded; the `known` have these scores."""
        scores = self.scores.copy()
        ids = np.array(sorted(known), np.int64)
        places = np.minimum(np.searchsorted(ids, self.ids), max(0, len(ids) - 1))
        is_known = ids[places] == self.ids if len(ids) else np.zeros(len(self.ids), np.bool_)
        scores[is_known] = [known[number] for number in self.ids[is_known].tolist()]
        kept = np.ones(len(self.ids), np.bool_)
        if options.exclude:
            kept = ~np.isin(self.ids, np.fromiter(options.exclude, np.int64))
        contents = None if self.contents is None else self.contents[kept]
        return Members(self.value, self.ids[kept], scores[kept], contents)


def contents_of(sha256s: Sequence[str]) -> Contents:
    """Contents from sha256 in hex."""
    return np.array([bytes.fromhex(sha256) for sha256 in sha256s], dtype="S32")


def mean_of(blocks: Sequence[Members], options: SearchOptions) -> float:
    """The mean of all scores, correctly rounded; with `distinct` each content counts once, with
    its best score. At least one item is left in the blocks.
    """
    scores = np.concatenate([block.scores for block in blocks])
    if options.distinct:
        contents = np.concatenate(
            [block.contents for block in blocks if block.contents is not None]
        )
        order = np.argsort(contents)
        ordered = contents[order]
        starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        scores = np.maximum.reduceat(scores[order], starts)
    return math.fsum(_each(scores)) / len(scores)


def _each(scores: NDArray[np.float64]) -> Iterator[float]:
    """The numbers one by one; never all of them as objects."""
    for start in range(0, len(scores), _BLOCK):
        yield from scores[start : start + _BLOCK].tolist()
