"""Near-duplicates: items of a gallery whose vectors are so near that they show one product.

Every item asks the gallery's own index for its neighbours, some thousands at a time. Those
that are near enough are its links, and the links are cut into groups by the offline star algorithm
(Aslam, Pelekhov and Rus, The Star Clustering Algorithm, 2004): a group is one item with what is
near it. So no chain of small differences joins what is not alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedder.calibration import Calibration
from embedder.types import ItemId
from indexer.gallery import Gallery
from indexer.types import Ids, Item, Progress, Scores, SearchOptions, places_of

K = 10
"""Neighbours that every item asks for. If all of them are near, more are asked for."""

_BATCH = 4096
_ROWS_AT_ONCE = 1000
_NO_PLACES = np.empty(0, np.int32)

NearGroup = list[tuple[ItemId, float]]
"""Numbers of at least two items, each with its cosine to the first one, highest first; 1 of the
first itself.
"""


@dataclass(frozen=True, slots=True)
class Member:
    """An item of a group, and its cosine to the first of the group; 1 for that one itself.

    probability: that both are of one class, if the model is calibrated. same_content: its content
    is that of the first. newest: it came last.
    """

    item: Item
    score: float
    probability: float | None
    same_content: bool
    newest: bool


def near_groups(
    gallery: Gallery,
    min_score: float,
    *,
    exact: bool = False,
    on_progress: Progress = lambda _: None,
) -> list[NearGroup]:
    """Groups of items whose cosine to the first of their group is at least `min_score`.

    The first is the item with the most near neighbours, counted up to 10, the older one of equals;
    its group is what is near it; the next group begins with the first of the rest. No item is in
    two groups; one is in none if all that is near it went to other groups. The largest group comes
    first. Neighbours are what the index finds, with `exact` all.

    Memory: at most some 700 bytes an item. `on_progress` is also told of 0 more items.

    Raises: InvalidParameterError for a score outside -1..1; GalleryCorruptError.
    """
    ids, segment = gallery.ids(), gallery.facts().segment
    # Many queries compare vectors in a third of the time that their 16 bit codes take.
    exact = exact or (segment is not None and segment.kind == "fp16")
    near = _Near(gallery, ids, SearchOptions(min_score=min_score, exact=exact), on_progress)
    is_taken = np.zeros(len(ids), np.bool_)
    groups: list[NearGroup] = []
    for place in np.argsort(-near.counts, kind="stable").tolist():
        if not near.counts[place]:
            break
        if is_taken[place]:
            continue
        others, scores = near.of(place)
        is_free = ~is_taken[others]
        found = dict(zip(others[is_free].tolist(), scores[is_free].tolist(), strict=True))
        if found:
            is_taken[[place, *found]] = True
            ranked = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
            first = (int(ids[place]), 1.0)
            groups.append([first, *((int(ids[other]), score) for other, score in ranked)])
    groups.sort(key=lambda group: (-len(group), group[0]))
    return groups


class _Near:
    """What is near each item, by places in `ids` (N,); `counts` (N,) goes up to K.

    Of an item with fewer than K all links are kept, the others are asked again when they are the
    first of a group: of a thousand copies one is.
    """

    def __init__(
        self,
        gallery: Gallery,
        ids: Ids,
        options: SearchOptions,
        on_progress: Progress,
    ) -> None:
        self._gallery, self._ids, self._on_progress = gallery, ids, on_progress
        self._options, self._least = options, options.min_score or 0.0
        self.counts = np.zeros(len(ids), np.int64)
        ones, others, scores = [_NO_PLACES], [_NO_PLACES], [np.empty(0, np.float32)]
        for one, other, score in self._links():
            # An approximate index may find a pair from one side alone.
            ones += [one, other]
            others += [other, one]
            scores += [score, score]
        rows = np.concatenate(ones)
        order = np.argsort(rows, kind="stable")
        self._starts = np.searchsorted(rows[order], np.arange(len(ids) + 1))
        self._others = np.concatenate(others)[order]
        self._scores = np.concatenate(scores)[order]

    def of(self, place: int) -> tuple[NDArray[np.int32], Scores]:
        """The places that are near this one, and their cosines; a place may be there twice."""
        self._on_progress(0)
        if self.counts[place] >= K:
            return self._all_of(place)
        links = slice(self._starts[place], self._starts[place + 1])
        return self._others[links], self._scores[links]

    def _links(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32], Scores]]:
        for ids, vectors in self._gallery.iter_vectors(_BATCH):
            scores, found = self._gallery.nearest(vectors, K + 1, self._options)
            own, others = self._places(ids), self._places(found)
            is_near = (scores >= self._least) & (others >= 0) & (others != own[:, None])
            is_near[own < 0] = False  # it has come since
            counts = np.minimum(is_near.sum(axis=1), K)
            self.counts[own[own >= 0]] = counts[own >= 0]
            rows, columns = np.nonzero(is_near & (counts < K)[:, None])
            yield own[rows], others[rows, columns], scores[rows, columns]
            self._on_progress(len(ids))

    def _all_of(self, place: int) -> tuple[NDArray[np.int32], Scores]:
        _, vectors = self._gallery.items_at([int(self._ids[place])])
        n = 4 * K
        while len(vectors):  # it has not been removed meanwhile
            [scores], [found] = self._gallery.nearest(vectors, n, self._options)
            if len(scores) < n or scores[-1] < self._least or found[-1] < 0:
                others = self._places(found)
                is_near = (scores >= self._least) & (others >= 0) & (others != place)
                return others[is_near], scores[is_near]
            n *= 4
        return _NO_PLACES, np.empty(0, np.float32)

    def _places(self, ids: Ids) -> NDArray[np.int32]:
        """Where these numbers stand, any shape; -1 for those that have come since, and for -1."""
        return places_of(ids, self._ids).astype(np.int32)


def members_of(
    gallery: Gallery, groups: Sequence[NearGroup], calibration: Calibration | None = None
) -> Iterator[list[Member]]:
    """The items of each group. Those removed meanwhile are left out, with them groups of one.

    `calibration` is that for the gallery as large as it is.
    """
    waiting: list[NearGroup] = []
    for group in groups:
        waiting.append(group)
        if sum(map(len, waiting)) >= _ROWS_AT_ONCE:
            yield from _read(gallery, waiting, calibration)
            waiting = []
    yield from _read(gallery, waiting, calibration)


def _read(
    gallery: Gallery, groups: Sequence[NearGroup], calibration: Calibration | None
) -> Iterator[list[Member]]:
    items, _ = gallery.items_at({number for group in groups for number, _ in group})
    known = {item.id: item for item in items}
    for group in groups:
        left = [(known[number], score) for number, score in group if number in known]
        if len(left) > 1:
            first, newest = left[0][0], max(item.id for item, _ in left)
            scores = np.array([score for _, score in left])
            likely: list[float] | list[None] = [None] * len(left)
            if calibration is not None:
                likely = calibration.probability(scores).tolist()
            yield [
                Member(
                    item,
                    score,
                    probability,
                    same_content=item is not first and item.sha256 == first.sha256,
                    newest=item.id == newest,
                )
                for (item, score), probability in zip(left, likely, strict=True)
            ]
