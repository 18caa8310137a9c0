"""Near-duplicates: items of a gallery whose vectors are so near that they show one product.

How near is judged by the gallery itself (`floor_of`). Then every item asks the gallery's own index
for its neighbours, some thousands at a time. Those that are near enough are its links, and the
links are cut into groups by the offline star algorithm (Aslam, Pelekhov and Rus, The Star
Clustering Algorithm, 2004): a group is one item with what is near it. So no chain of small
differences joins what is not alike.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.types import ItemId
from kinlens.indexer.calibration import product_attribute
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import Ids, Item, Progress, Scores, SearchOptions, find_sorted

K = 10
"""Neighbours that every item asks for. If all of them are near, more are asked for."""

LEAST_SCORE = 0.95
"""No two items are near-duplicates by default below this cosine: copies of a photo reach it, and
photos of different products rarely do (docs/benchmarks.md)."""

RARE = 1e-3
"""The share of pairs of different products that may reach the default score."""

CROWD_ITEMS = 20
CROWD_PART = 0.01
"""A group with more items than this, and more than this part of the gallery, is a crowd: no product
has that many copies, so they show a placeholder, or the score is too low."""

ALIKE_PART = 0.25
"""With more than this part of the gallery in groups, and more than 20 items, nothing is to be
removed: a shop has views of its products, or the model cannot tell the products apart. In a gallery
of 7,680 items one pair in 1,000 still is 7 wrong neighbours for each item."""

_EXAMPLES = 6
_SAMPLED_ITEMS = 2000  # 2 million pairs: exact for small galleries, 0.2 s for large ones
_COPIES = {"fp32": 1 - 1e-5, "fp16": 1 - 2**-11}
"""Equal vectors have this product, however they and their products are rounded."""

_ABOVE = 1e-6  # what lies above a cosine, however it is rounded
_REMEMBERED_PART = 0.1
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

    same_content: its content is that of the first.
    newest: it came last.
    """

    item: Item
    score: float
    same_content: bool
    newest: bool


@dataclass(frozen=True, slots=True)
class Floor:
    """The least default score of near-duplicates in one gallery.

    pairs: of items that are taken to be of different products; one in 1,000 of them reaches
        `score`, unless that is `LEAST_SCORE`, which may be more.
    attribute: the one that names the products; None if the gallery has none of `PRODUCTS`.
    copies: two items with this score have the same picture.
    """

    score: float
    pairs: int
    attribute: str | None
    copies: float


@dataclass(frozen=True, slots=True)
class Crowd:
    """Too many items around one item to be copies of a product; `examples` are some of them."""

    items: int
    examples: list[Item]
    detail: str


@dataclass(frozen=True, slots=True)
class NearDuplicates:
    """The near-duplicates of a gallery of `size` items: those with at least `min_score`. The items
    of a crowd have at least `crowd_score`.
    """

    size: int
    floor: Floor
    min_score: float
    groups: list[NearGroup]
    crowd_score: float
    crowds: list[NearGroup]

    @property
    def warning(self) -> str | None:
        """Why no item may be removed because of these groups; None if it may."""
        if self.min_score >= self.floor.score:
            # Of copies nobody can be in doubt, so many of them are no reason.
            alike = sum(
                score < self.floor.copies for group in self.groups for _, score in group[1:]
            )
            if alike <= max(CROWD_ITEMS, ALIKE_PART * self.size):
                return None
            return (
                f"{alike:,} of {self.size:,} items are near another one without being its copy. "
                "They may be views of one product, or products that the model cannot tell apart: "
                f"look again with a cosine (min_score) above {self.min_score:.4f}, and remove none "
                "because of its group."
            )
        return (
            f"min_score = {self.min_score:.4g} is below {self.floor.score:.4f}, the least score at "
            "which pairs of different products are rare in this gallery. The groups may hold "
            "different products: look at them, and remove none because of its group."
        )


def find_duplicates(
    gallery: Gallery,
    *,
    min_score: float | None = None,
    exact: bool = False,
    on_progress: Progress = lambda _: None,
) -> NearDuplicates:
    """The groups of near-duplicates, and apart from them the crowds, the largest first.

    Without `min_score` the score is that of `floor_of`, and crowds are looked for at `LEAST_SCORE`:
    a placeholder with a different number on each copy raises the score above most of its own pairs.

    Raises: InvalidParameterError for a score outside -1..1; GalleryCorruptError.
    """
    floor, size = floor_of(gallery), gallery.size
    least = floor.score if min_score is None else min_score
    found = near_groups(gallery, least, exact=exact, on_progress=on_progress)
    most = max(CROWD_ITEMS, CROWD_PART * size)
    if min_score is None:
        groups, crowds = _without_crowds(gallery, found, most, exact)
        return NearDuplicates(size, floor, least, groups, LEAST_SCORE, crowds)
    groups = [group for group in found if len(group) <= most]
    crowds = [group for group in found if len(group) > most]
    return NearDuplicates(size, floor, least, groups, least, crowds)


def _without_crowds(
    gallery: Gallery, found: Sequence[NearGroup], most: float, exact: bool
) -> tuple[list[NearGroup], list[NearGroup]]:
    """The groups without the items of a crowd, and the crowds.

    A group of more than `most` items is a crowd. So are that many items with `LEAST_SCORE` to the
    first of a group, if half of them are in groups. Where fewer are, the model finds everything
    alike, and what is in a group is nearer than that. Groups of copies stay.
    """
    grouped = np.array(sorted(number for group in found for number, _ in group), np.int64)
    _, sampled = gallery.sample(_SAMPLED_ITEMS)
    judged: list[tuple[NDArray[np.float32], bool]] = []  # a centre, and whether it has a crowd
    groups: list[NearGroup] = []
    doubtful: list[NearGroup] = []
    crowds: list[NearGroup] = []

    def is_crowd(group: NearGroup, vector: NDArray[np.float32]) -> bool:
        for centre, has_crowd in judged:
            if centre @ vector >= LEAST_SCORE:
                return has_crowd
        options = SearchOptions(min_score=LEAST_SCORE, exact=exact)
        ids, scores = _all_near(gallery, vector, options)
        has_crowd = len(group) > most or (
            len(ids) > most and 2 * np.isin(ids, grouped).sum() >= len(ids)
        )
        if has_crowd:
            crowds.append([*zip(ids.tolist(), scores.tolist(), strict=True)])
        judged.append((vector, has_crowd))
        return has_crowd

    for start in range(0, len(found), _BATCH):
        some = found[start : start + _BATCH]
        items, vectors = gallery.items_at([group[0][0] for group in some])
        near = (vectors @ sampled.T >= LEAST_SCORE).mean(axis=1) * gallery.size
        places = {item.id: place for place, item in enumerate(items)}
        for group in some:
            place = places.get(group[0][0])
            are_copies = group[-1][1] >= _COPIES[gallery.vector_type] and len(group) <= most
            is_alone = place is None or are_copies or max(len(group), near[place]) <= most
            if is_alone or not is_crowd(group, vectors[place]):
                groups.append(group)
            else:
                doubtful.append(group)
    crowded = {number for crowd in crowds for number, _ in crowd}
    groups += [[one for one in group if one[0] not in crowded] for group in doubtful]
    groups = [group for group in groups if len(group) > 1]
    groups.sort(key=lambda group: (-len(group), group[0]))
    return groups, sorted(crowds, key=len, reverse=True)


def _all_near(
    gallery: Gallery, vector: NDArray[np.float32], options: SearchOptions
) -> tuple[Ids, Scores]:
    """All items with the score of `options`, the best first."""
    n = 4 * K
    while True:
        [scores], [found] = gallery.nearest(vector[np.newaxis], n, options)
        if len(scores) < n or scores[-1] < (options.min_score or 0.0) or found[-1] < 0:
            is_near = (scores >= (options.min_score or 0.0)) & (found >= 0)
            return found[is_near], scores[is_near]
        n *= 4


def crowds_of(gallery: Gallery, found: NearDuplicates) -> Iterator[Crowd]:
    """The crowds with what to do about each; those removed meanwhile are left out."""
    for group in found.crowds:
        numbers = [number for number, _ in group[:_EXAMPLES]]
        items, _ = gallery.items_at(numbers)
        if items:
            share = len(group) / max(found.size, 1)
            yield Crowd(
                len(group),
                sorted(items, key=lambda item: numbers.index(item.id)),
                f"{len(group):,} items, {share:.0%} of the gallery, have a cosine of at least "
                f"{found.crowd_score:.4f} to one of them: too many for copies of one product. If "
                "they show a placeholder, such as 'no photo', give them photos of their own. If "
                f"they show different products, look again with a cosine (min_score) above "
                f"{max(found.crowd_score, found.min_score):.4f}.",
            )


def floor_of(gallery: Gallery) -> Floor:
    """The larger of `LEAST_SCORE` and the cosine that one in 1,000 pairs of different products has.

    The pairs are those among up to 2,000 items, the same ones in each call. Items are of different
    products if the first attribute of `PRODUCTS` that half of them have says so. Without one, two
    items are taken to be of different products unless one is the nearest to the other; views of one
    product among the other pairs raise the score. Of fewer than 1,000 pairs none may reach it. Two
    items of the same content count as one picture, so they are no pair.

    Raises: GalleryCorruptError.
    """
    items, vectors = gallery.sample(_SAMPLED_ITEMS)
    attribute = product_attribute(items)
    chosen = [n for n, item in enumerate(items) if not attribute or attribute in item.attributes]
    items, vectors = [items[n] for n in chosen], vectors[chosen]
    is_pair = _differ([item.sha256 for item in items])
    if attribute is not None:
        is_pair &= _differ([item.attributes[attribute] for item in items])
    cosines = vectors @ vectors.T
    if len(items) and attribute is None:
        nearest = np.where(is_pair, cosines, -2).argmax(axis=1)
        is_pair[np.arange(len(items)), nearest] = is_pair[nearest, np.arange(len(items))] = False
    scores = cosines[np.triu(is_pair, 1)]
    rare = 0.0
    if len(scores):
        place = len(scores) - math.ceil(RARE * len(scores))
        rare = float(np.partition(scores, place)[place])
        if len(scores) < 1 / RARE:
            rare += _ABOVE
    copies = _COPIES[gallery.vector_type]
    return Floor(max(LEAST_SCORE, min(rare, copies)), len(scores), attribute, copies)


_remembered: weakref.WeakKeyDictionary[Gallery, tuple[int, float]] = weakref.WeakKeyDictionary()


def near_score(gallery: Gallery) -> float:
    """The score of `floor_of` for a search, which cannot wait for it each time: it is remembered
    until the gallery has a tenth more or fewer items.
    """
    size, score = _remembered.get(gallery, (0, 0.0))
    if not score or abs(gallery.size - size) > _REMEMBERED_PART * size:
        size, score = gallery.size, floor_of(gallery).score
        _remembered[gallery] = (size, score)
    return score


def _differ(values: Sequence[object]) -> NDArray[np.bool_]:
    """Which of these values (N,) differ from each other, (N, N)."""
    known: dict[object, int] = {}
    codes = np.array([known.setdefault(value, len(known)) for value in values], np.int64)
    differ: NDArray[np.bool_] = codes[:, None] != codes[None, :]
    return differ


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
    ids = gallery.ids()
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
        if not len(vectors):  # it has been removed meanwhile
            return _NO_PLACES, np.empty(0, np.float32)
        found, scores = _all_near(self._gallery, vectors[0], self._options)
        others = self._places(found)
        is_near = (others >= 0) & (others != place)
        return others[is_near], scores[is_near]

    def _places(self, ids: Ids) -> NDArray[np.int32]:
        """Where these numbers stand, any shape; -1 for those that have come since, and for -1."""
        return find_sorted(ids, self._ids).astype(np.int32)


def members_of(gallery: Gallery, groups: Sequence[NearGroup]) -> Iterator[list[Member]]:
    """The items of each group. Those removed meanwhile are left out, with them groups of one."""
    waiting: list[NearGroup] = []
    for group in groups:
        waiting.append(group)
        if sum(map(len, waiting)) >= _ROWS_AT_ONCE:
            yield from _read(gallery, waiting)
            waiting = []
    yield from _read(gallery, waiting)


def _read(gallery: Gallery, groups: Sequence[NearGroup]) -> Iterator[list[Member]]:
    items, _ = gallery.items_at({number for group in groups for number, _ in group})
    known = {item.id: item for item in items}
    for group in groups:
        left = [(known[number], score) for number, score in group if number in known]
        if len(left) > 1:
            first, newest = left[0][0], max(item.id for item, _ in left)
            yield [
                Member(
                    item,
                    score,
                    same_content=item is not first and item.sha256 == first.sha256,
                    newest=item.id == newest,
                )
                for item, score in left
            ]
