"""Near-duplicates: items whose vectors are so similar that they probably show one product.

The minimum score is estimated from the gallery (`floor_of`). Then the index is searched for the
neighbours of every item, in batches of thousands. Pairs with at least that score are links. The
offline star algorithm (Aslam, Pelekhov and Rus, The Star Clustering Algorithm, 2004) splits the
links into groups: one item with its neighbours. So a chain of small differences does not join
dissimilar items.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.types import ItemId
from kinlens.indexer.catalog.vectors import find_sorted
from kinlens.indexer.entries import Item
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.products import product_attribute
from kinlens.indexer.types import Ids, Progress, Scores, SearchOptions

K = 10
"""Neighbours to search per item. If all of them are near-duplicates, more are searched."""

LEAST_SCORE = 0.95
"""Lower bound of the default score. Copies of a photo reach this cosine, photos of different
products rarely do (docs/benchmarks.md)."""

RARE = 1e-3
"""Maximum share of pairs of different products that reach the default score."""

CLUSTER_ITEMS = 20
CLUSTER_PART = 0.01
"""A group with more items than this, and more than this share of the gallery, is a cluster. No
product has that many copies: the items show a placeholder, or the score is too low."""

ALIKE_PART = 0.25
"""If groups contain more than this share of the gallery, and more than 20 items, no item should be
removed: they may be views of a product, or the model cannot distinguish the products. In a gallery
of 7,680 items, one pair in 1,000 is still 7 wrong neighbours per item."""

_EXAMPLES = 6
_SAMPLED_ITEMS = 2000  # 2 million pairs: exact for small galleries, 0.2 s for large ones
_COPIES = {"fp32": 1 - 1e-5, "fp16": 1 - 2**-11}
"""Minimum cosine of two equal vectors, by number format; less than 1 because of rounding."""

_SCORE_STEP = 1e-6  # added to a cosine to exclude equal ones in spite of rounding
_CHANGED_PART = 0.1
_BATCH = 4096
_NO_ROWS = np.empty(0, np.int32)

NearGroup = list[tuple[ItemId, float]]
"""Ids of at least two items, each with its cosine to the first item, highest first. The first item
has the cosine 1.
"""


@dataclass(frozen=True, slots=True)
class Member:
    """An item of a group.

    Attributes:
        score: cosine to the first item of the group; 1 for the first item.
        same_content: it has the same content as the first item.
        newest: it was added last.
    """

    item: Item
    score: float
    same_content: bool
    newest: bool


@dataclass(frozen=True, slots=True)
class Floor:
    """The default minimum score of near-duplicates in one gallery.

    Attributes:
        score: the minimum score.
        pairs: number of pairs that count as different products; one in 1,000 reaches `score`,
            unless `score` is raised to `LEAST_SCORE`.
        attribute: names the product; None if the gallery has none of `PRODUCTS`.
        copies: two items with this score have the same image.
    """

    score: float
    pairs: int
    attribute: str | None
    copies: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """A group of similar items that is too large for copies of one product."""

    items: int
    examples: list[Item]
    detail: str


@dataclass(frozen=True, slots=True)
class NearDuplicates:
    """The near-duplicates of a gallery of `size` items.

    `groups` have items with at least `min_score`, `clusters` with at least `cluster_score`.
    """

    size: int
    floor: Floor
    min_score: float
    groups: list[NearGroup]
    cluster_score: float
    clusters: list[NearGroup]

    @property
    def warning(self) -> str | None:
        """Why no item should be removed on the basis of these groups; None if it may."""
        if self.min_score >= self.floor.score:
            # Exact copies do not count, as they are certain.
            alike = sum(
                score < self.floor.copies for group in self.groups for _, score in group[1:]
            )
            if alike <= max(CLUSTER_ITEMS, ALIKE_PART * self.size):
                return None
            return (
                f"{alike:,} of {self.size:,} items are similar to another item without being its "
                "copy. They may be views of one product, or products that the model cannot "
                f"distinguish. Try a cosine (min_score) above {self.min_score:.4f}, and do not "
                "remove items on the basis of these groups."
            )
        return (
            f"min_score = {self.min_score:.4g} is below {self.floor.score:.4f}, the lowest score "
            "at which pairs of different products are rare in this gallery. The groups may contain "
            "different products. Check each group before you remove an item."
        )


def find_duplicates(
    gallery: Gallery,
    *,
    min_score: float | None = None,
    exact: bool = False,
    on_progress: Progress = lambda _: None,
) -> NearDuplicates:
    """Find groups of near-duplicates and, separately, clusters; the largest first.

    Without `min_score`, the score of `floor_of` is used, and `LEAST_SCORE` for clusters. The lower
    score is needed for placeholders with a different number on each copy: they raise the score of
    `floor_of` above that of most of their pairs.

    Raises: InvalidParameterError for a score outside -1..1; GalleryCorruptError.
    """
    floor, size = floor_of(gallery), gallery.size
    least = floor.score if min_score is None else min_score
    found = near_groups(gallery, least, exact=exact, on_progress=on_progress)
    most = max(CLUSTER_ITEMS, CLUSTER_PART * size)
    if min_score is None:
        groups, clusters = _without_clusters(gallery, found, most, exact)
        return NearDuplicates(size, floor, least, groups, LEAST_SCORE, clusters)
    groups = [group for group in found if len(group) <= most]
    clusters = [group for group in found if len(group) > most]
    return NearDuplicates(size, floor, least, groups, least, clusters)


def _without_clusters(
    gallery: Gallery, found: Sequence[NearGroup], most: float, exact: bool
) -> tuple[list[NearGroup], list[NearGroup]]:
    """Split `found` into groups, without the items of clusters, and clusters.

    A group of more than `most` items is a cluster. More than `most` items with `LEAST_SCORE` to the
    first item of a group are one too, if half of them are in groups. If fewer are, the model gives
    all items similar vectors, and the items of the groups are more similar than that. Groups of
    copies are kept.
    """
    grouped = np.array(sorted(number for group in found for number, _ in group), np.int64)
    _, sampled = gallery.sample(_SAMPLED_ITEMS)
    judged: list[tuple[NDArray[np.float32], bool]] = []  # a centre, whether it is in a cluster
    groups: list[NearGroup] = []
    doubtful: list[NearGroup] = []
    clusters: list[NearGroup] = []

    def is_cluster(group: NearGroup, vector: NDArray[np.float32]) -> bool:
        for centre, has_cluster in judged:
            if centre @ vector >= LEAST_SCORE:
                return has_cluster
        options = SearchOptions(min_score=LEAST_SCORE, exact=exact)
        ids, scores = _all_near(gallery, vector, options)
        has_cluster = len(group) > most or (
            len(ids) > most and 2 * np.isin(ids, grouped).sum() >= len(ids)
        )
        if has_cluster:
            clusters.append([*zip(ids.tolist(), scores.tolist(), strict=True)])
        judged.append((vector, has_cluster))
        return has_cluster

    for start in range(0, len(found), _BATCH):
        some = found[start : start + _BATCH]
        items, vectors = gallery.items_at([group[0][0] for group in some])
        near = (vectors @ sampled.T >= LEAST_SCORE).mean(axis=1) * gallery.size
        rows = {item.id: row for row, item in enumerate(items)}
        for group in some:
            row = rows.get(group[0][0])
            are_copies = group[-1][1] >= _COPIES[gallery.vector_type] and len(group) <= most
            is_kept = row is None or are_copies or max(len(group), near[row]) <= most
            if is_kept or not is_cluster(group, vectors[row]):
                groups.append(group)
            else:
                doubtful.append(group)
    clustered = {number for cluster in clusters for number, _ in cluster}
    groups += [[one for one in group if one[0] not in clustered] for group in doubtful]
    groups = [group for group in groups if len(group) > 1]
    groups.sort(key=lambda group: (-len(group), group[0]))
    return groups, sorted(clusters, key=len, reverse=True)


def _all_near(
    gallery: Gallery, vector: NDArray[np.float32], options: SearchOptions
) -> tuple[Ids, Scores]:
    """All items with at least the score of `options`, the best first."""
    n = 4 * K
    while True:
        [scores], [found] = gallery.nearest(vector[np.newaxis], n, options)
        if len(scores) < n or scores[-1] < (options.min_score or 0.0) or found[-1] < 0:
            is_near = (scores >= (options.min_score or 0.0)) & (found >= 0)
            return found[is_near], scores[is_near]
        n *= 4


def clusters_of(gallery: Gallery, found: NearDuplicates) -> Iterator[Cluster]:
    """Describe the clusters, with advice for each. Clusters whose examples were removed since are
    skipped.
    """
    for group in found.clusters:
        numbers = [number for number, _ in group[:_EXAMPLES]]
        items, _ = gallery.items_at(numbers)
        if items:
            share = len(group) / max(found.size, 1)
            yield Cluster(
                len(group),
                sorted(items, key=lambda item: numbers.index(item.id)),
                f"{len(group):,} items, {share:.0%} of the gallery, have a cosine of at least "
                f"{found.cluster_score:.4f} to one of them: too many for copies of one product. If "
                "they show a placeholder such as 'no photo', replace it by real photos. If they "
                "show different products, try a cosine (min_score) above "
                f"{max(found.cluster_score, found.min_score):.4f}.",
            )


def floor_of(gallery: Gallery) -> Floor:
    """The cosine that one in 1,000 pairs of different products reaches, but at least `LEAST_SCORE`.

    The pairs are drawn from a fixed sample of up to 2,000 items. The product is the first attribute
    of `PRODUCTS` that half of the items have. Without such an attribute, two items count as
    different products unless one is the nearest neighbour of the other; the remaining pairs of
    views of one product raise the score. If there are fewer than 1,000 pairs, no pair reaches the
    score. Items with the same content do not form a pair.

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
        rank = len(scores) - math.ceil(RARE * len(scores))
        rare = float(np.partition(scores, rank)[rank])
        if len(scores) < 1 / RARE:
            rare += _SCORE_STEP
    copies = _COPIES[gallery.vector_type]
    return Floor(max(LEAST_SCORE, min(rare, copies)), len(scores), attribute, copies)


_scores_by_gallery: weakref.WeakKeyDictionary[Gallery, tuple[int, float]] = (
    weakref.WeakKeyDictionary()
)


def near_score(gallery: Gallery) -> float:
    """The score of `floor_of`, cached until the size of the gallery changes by 10 %."""
    size, score = _scores_by_gallery.get(gallery, (0, 0.0))
    if not score or abs(gallery.size - size) > _CHANGED_PART * size:
        size, score = gallery.size, floor_of(gallery).score
        _scores_by_gallery[gallery] = (size, score)
    return score


def _differ(values: Sequence[object]) -> NDArray[np.bool_]:
    """Whether each two of these values (N,) differ, (N, N)."""
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
    """Groups of items whose cosine to the first item of their group is at least `min_score`.

    The item with the most neighbours, counted up to 10, starts the first group, and its neighbours
    join it; of equal items the older one is taken. The remaining items form the next groups in the
    same way. No item is in two groups. An item is in no group if all its neighbours are in others.
    The largest group comes first. Neighbours are found by the index, or by exact search if `exact`.

    Takes at most about 700 bytes of memory per item. `on_progress` may be called with 0.

    Raises: InvalidParameterError for a score outside -1..1; GalleryCorruptError.
    """
    ids = gallery.ids()
    near = _Near(gallery, ids, SearchOptions(min_score=min_score, exact=exact), on_progress)
    is_taken = np.zeros(len(ids), np.bool_)
    groups: list[NearGroup] = []
    for row in np.argsort(-near.counts, kind="stable").tolist():
        if not near.counts[row]:
            break
        if is_taken[row]:
            continue
        others, scores = near.of(row)
        is_free = ~is_taken[others]
        found = dict(zip(others[is_free].tolist(), scores[is_free].tolist(), strict=True))
        if found:
            is_taken[[row, *found]] = True
            ranked = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
            first = (int(ids[row]), 1.0)
            groups.append([first, *((int(ids[other]), score) for other, score in ranked)])
    groups.sort(key=lambda group: (-len(group), group[0]))
    return groups


class _Near:
    """The neighbours of each item, by rows of `ids` (N,); `counts` (N,) is limited to K.

    For an item with fewer than K neighbours all links are stored. Other items are searched again
    when they start a group, which is rare: one of a thousand copies does.
    """

    def __init__(
        self, gallery: Gallery, ids: Ids, options: SearchOptions, on_progress: Progress
    ) -> None:
        self._gallery, self._ids, self._on_progress = gallery, ids, on_progress
        self._options, self._least = options, options.min_score or 0.0
        self.counts = np.zeros(len(ids), np.int64)
        ones, others, scores = [_NO_ROWS], [_NO_ROWS], [np.empty(0, np.float32)]
        for one, other, score in self._links():
            # An approximate index may find a pair from one side only.
            ones += [one, other]
            others += [other, one]
            scores += [score, score]
        rows = np.concatenate(ones)
        order = np.argsort(rows, kind="stable")
        self._starts = np.searchsorted(rows[order], np.arange(len(ids) + 1))
        self._others = np.concatenate(others)[order]
        self._scores = np.concatenate(scores)[order]

    def of(self, row: int) -> tuple[NDArray[np.int32], Scores]:
        """The rows of the neighbours of `row`, and their cosines; a row may occur twice."""
        self._on_progress(0)
        if self.counts[row] >= K:
            return self._all_of(row)
        links = slice(self._starts[row], self._starts[row + 1])
        return self._others[links], self._scores[links]

    def _links(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32], Scores]]:
        for ids, vectors in self._gallery.iter_vectors(_BATCH):
            scores, found = self._gallery.nearest(vectors, K + 1, self._options)
            own, others = self._rows_of(ids), self._rows_of(found)
            is_near = (scores >= self._least) & (others >= 0) & (others != own[:, None])
            is_near[own < 0] = False  # added after `ids` was read
            counts = np.minimum(is_near.sum(axis=1), K)
            self.counts[own[own >= 0]] = counts[own >= 0]
            rows, columns = np.nonzero(is_near & (counts < K)[:, None])
            yield own[rows], others[rows, columns], scores[rows, columns]
            self._on_progress(len(ids))

    def _all_of(self, row: int) -> tuple[NDArray[np.int32], Scores]:
        _, vectors = self._gallery.items_at([int(self._ids[row])])
        if not len(vectors):  # removed since `ids` was read
            return _NO_ROWS, np.empty(0, np.float32)
        found, scores = _all_near(self._gallery, vectors[0], self._options)
        others = self._rows_of(found)
        is_near = (others >= 0) & (others != row)
        return others[is_near], scores[is_near]

    def _rows_of(self, ids: Ids) -> NDArray[np.int32]:
        """The rows of item ids, of any shape; -1 for later ids, and for -1."""
        return find_sorted(ids, self._ids).astype(np.int32)


def members_of(gallery: Gallery, groups: Sequence[NearGroup]) -> Iterator[list[Member]]:
    """The items of each group. Items that were removed since are skipped, then groups of one."""
    for group in groups:
        items, _ = gallery.items_at([number for number, _ in group])
        known = {item.id: item for item in items}
        remaining = [(known[number], score) for number, score in group if number in known]
        if len(remaining) > 1:
            first, newest = remaining[0][0], max(known)
            yield [
                Member(
                    item,
                    score,
                    same_content=item is not first and item.sha256 == first.sha256,
                    newest=item.id == newest,
                )
                for item, score in remaining
            ]
