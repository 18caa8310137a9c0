"""Searches of one state: vectors come from the snapshot, rows from the catalogue."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np

from kinlens.embedder.errors import GalleryCorruptError, InvalidParameterError
from kinlens.embedder.types import Embeddings, Hit, ItemId
from kinlens.indexer.bits import Bits
from kinlens.indexer.catalog.read import Row
from kinlens.indexer.columns.columns import Chosen
from kinlens.indexer.filters.text import Where, as_filter
from kinlens.indexer.filters.tree import Filter, check_attribute, check_boosted
from kinlens.indexer.live.attributes import AttributesKeeper, StateAttributes
from kinlens.indexer.live.facets import checked_names, facet_of
from kinlens.indexer.live.keeper import Reading, SnapshotKeeper
from kinlens.indexer.live.ranking import (
    Candidate,
    Fetch,
    Pool,
    Reorder,
    best_groups,
    best_hits,
    check_counting,
    check_search,
)
from kinlens.indexer.live.rerank import reorder_of
from kinlens.indexer.live.snapshot import Snapshot
from kinlens.indexer.store import VectorStore
from kinlens.indexer.types import (
    REBUILD,
    RESTORE,
    Facet,
    Group,
    Grouping,
    Ids,
    Scores,
    SearchOptions,
    no_checkpoint,
)
from kinlens.values import Scalar

_DEFAULTS = SearchOptions()
_NO_IDS: Ids = np.empty(0, np.int64)
_MASKS = 64  # masks of attribute values, cached for the other queries of a search
_INDEXED_RANGE = 1000  # hits up to which a range search uses the index
_BLOCK = 4096  # items whose rows or vectors are read at a time


class Searcher(VectorStore):
    """The search methods of a gallery. `GalleryReader` adds look-ups, `GalleryWriter` changes."""

    def __init__(self, snapshots: SnapshotKeeper, dim: int) -> None:
        self._snapshots = snapshots
        self._dim = dim
        self._attributes = AttributesKeeper()

    def nearest(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> tuple[Scores, Ids]:
        """Scores and item ids of the best items, shape (Q, at most k); missing hits have id -1.

        Reads no rows of items, so only the options `where`, `exact` and `effort` have an effect.

        Raises: InvalidParameterError, FilterError.
        """
        options = options or _DEFAULTS
        queries = check_search(k, options, self._dim, queries)
        if options.filter is not None:
            with self._snapshots.reading() as now:
                return _nearest(now.snapshot, queries, k, options, self._mask(now, options))
        return _nearest(self._snapshots.newest(), queries, k, options, None)

    def search(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> list[list[Hit]]:
        options = options or _DEFAULTS
        queries = check_search(k, options, self._dim, queries)
        if options.filter is None and _is_plain(k, options, len(queries)):
            snapshot = self._snapshots.newest()
            read = partial(self._snapshots.catalog.rows, seq=snapshot.state.seq)
            hits = _plain_hits(snapshot, read, queries, k, options, None)
            if hits is not None:
                return hits
        with self._snapshots.reading() as now:
            return self._hits(now, queries, k, options)

    def search_groups(
        self, queries: Embeddings, k: int, grouping: Grouping, options: SearchOptions | None = None
    ) -> list[list[Group]]:
        options = options or _DEFAULTS
        queries = check_search(k, options, self._dim, queries)
        with self._snapshots.reading() as now:
            if now.snapshot.size:
                check_attribute(grouping.by, now.view.schema(), "group by")
            mask, attributes = self._mask(now, options), self._attributes_of(now)
            source = _Groups(now, attributes, queries, grouping.by, options, mask)
            reorder = self._reorder(now, k, options)
            vectors_of = partial(_vectors, now.snapshot)
            return best_groups(source, len(queries), k, grouping, options, vectors_of, reorder)

    def facets(
        self,
        names: Sequence[str],
        query: Embeddings | None = None,
        options: SearchOptions | None = None,
        prefix: str = "",
    ) -> dict[str, Facet]:
        options, names = options or _DEFAULTS, checked_names(names)
        query = check_counting(options, self._dim, query)
        with self._snapshots.reading() as now:
            if not now.snapshot.size:
                return {name: Facet() for name in names}
            schema, attributes = now.view.schema(), self._attributes_of(now)
            for name in names:
                check_attribute(name, schema, "count")
                if attributes.is_nearly_unique(name):
                    raise InvalidParameterError(
                        f"Facet {name!r}: nearly every item has a different value. Choose an "
                        "attribute whose values are shared by several items."
                    )
            selected: list[Chosen] = []

            def count(name: str) -> Facet:
                options.checkpoint()
                if not selected:  # once for all attributes, unless all counts are cached
                    among = self._counted(now, query, options, prefix)
                    selected.append(attributes.selected(among))
                return facet_of(attributes.spread(name, selected[0]), schema[name])

            least = options.min_score
            if prefix or options.exclude or (least is not None and least > -1):
                return {name: count(name) for name in names}
            where = options.filter
            return {
                name: attributes.remembered((name, where), partial(count, name)) for name in names
            }

    def _counted(
        self,
        now: Reading,
        query: Embeddings | None,
        options: SearchOptions,
        prefix: str,
    ) -> Bits | None:
        """The items to count; None for all."""
        snapshot, mask = now.snapshot, None
        if options.filter is not None or prefix:
            mask = self._among(now, options.filter, prefix, options.checkpoint)
        if query is not None and options.min_score is not None and options.min_score > -1:
            each = [query[n : n + 1] for n in range(len(query))]
            found = [_range_search(snapshot, one, options.min_score, options, mask) for one in each]
            mask = snapshot.bits_of(np.concatenate(found))
        if options.exclude:
            known = now.view.get(list(options.exclude))
            excluded = snapshot.bits_of(snapshot.rows_of(np.array([*known], np.int64)))
            mask = (snapshot.live if mask is None else mask) & ~excluded
        return mask

    def _attributes_of(self, now: Reading) -> StateAttributes:
        return self._attributes.at(now.snapshot, self._snapshots.columns_of(now))

    def _mask(self, now: Reading, options: SearchOptions) -> Bits | None:
        """The items that match the filter of a search; None for all. Raises: FilterError."""
        if options.filter is None:
            return None
        return self._among(now, options.filter, checkpoint=options.checkpoint)

    def _among(
        self,
        now: Reading,
        where: Where | None,
        prefix: str = "",
        checkpoint: Callable[[], None] = no_checkpoint,
    ) -> Bits:
        """The items that match `where` and whose keys start with `prefix`. Raises: FilterError."""
        attributes, where, mask = self._attributes_of(now), as_filter(where), None
        if where is not None:
            where.check(now.view.schema())
            mask = attributes.mask(where, checkpoint)
        if mask is None or prefix:
            rows = now.snapshot.rows_of(now.view.with_prefix(prefix))
            mask = _in_both(mask, now.snapshot.bits_of(rows))
        return mask

    def _reorder(self, now: Reading, k: int, options: SearchOptions) -> Reorder | None:
        """How the top hits are reordered; None if they are not. Raises: FilterError."""
        vectors_of = partial(_vectors, now.snapshot)
        if options.sort_by is not None and now.snapshot.size:
            check_attribute(options.sort_by.attribute, now.view.schema(), "sort by")

        def span(name: str) -> tuple[float, float]:
            if now.snapshot.size:
                check_boosted(name, now.view.schema())
            attributes = self._attributes_of(now)
            key = "span", name
            return attributes.remembered(key, lambda: attributes.spread(name).ends()) or (0.0, 0.0)

        return reorder_of(options, k, vectors_of, span)

    def _hits(
        self, now: Reading, queries: Embeddings, k: int, options: SearchOptions
    ) -> list[list[Hit]]:
        mask = self._mask(now, options)
        if _is_plain(k, options, len(queries)):
            read = partial(_rows, now, options=options)
            hits = _plain_hits(now.snapshot, read, queries, k, options, mask)
            if hits is not None:
                return hits
        once = options.distinct or options.near is not None
        fetch = _fetch(now, queries, options, mask, once=once)
        reorder = self._reorder(now, k, options)
        vectors_of = partial(_vectors, now.snapshot)
        return best_hits(fetch, len(queries), k, options, vectors_of, reorder)


def _is_plain(k: int, options: SearchOptions, queries: int) -> bool:
    """Whether hits are returned in the order of the index, and few rows have to be read."""
    if options.distinct or options.exclude or options.near is not None or options.reorders:
        return False
    return queries * (options.offset + k) <= _BLOCK


def _plain_hits(
    snapshot: Snapshot,
    read: Callable[[list[ItemId]], dict[ItemId, Row] | None],
    queries: Embeddings,
    k: int,
    options: SearchOptions,
    mask: Bits | None,
) -> list[list[Hit]] | None:
    """The fast path without reordering and deduplication: half the time of `best_hits`.

    Takes the order of the index and reads only the rows that are returned. None if one of them has
    changed since the snapshot, or is removed.
    """
    options.checkpoint()
    depth = options.offset + k
    least = -math.inf if options.min_score is None else options.min_score
    scores, ids = _nearest(snapshot, queries, depth, options, mask)
    shown: list[list[tuple[ItemId, float]]] = []
    for own, best in zip(scores.tolist(), ids.tolist(), strict=True):
        ranked = zip(best[options.offset :], own[options.offset :], strict=True)
        shown.append([(i, score) for i, score in ranked if i >= 0 and score >= least])
    wanted = {i for row in shown for i, _ in row}
    known = read(list(wanted)) if wanted else {}
    if known is None or len(known) < len(wanted):
        return None
    return [
        [Hit(i, known[i][0], score, known[i][1], known[i][3]) for i, score in row] for row in shown
    ]


def _nearest(
    snapshot: Snapshot,
    queries: Embeddings,
    k: int,
    options: SearchOptions,
    mask: Bits | None,
    copies: int | None = None,
) -> tuple[Scores, Ids]:
    return snapshot.nearest(
        queries, k, mask, exact=options.exact, effort=options.effort, copies=copies
    )


def _range_search(
    snapshot: Snapshot,
    query: Embeddings,
    least: float,
    options: SearchOptions,
    mask: Bits | None,
) -> Ids:
    """The rows of the items whose score is at least `least`.

    Up to 1,000 hits come from the index. If there are more, or if a search compares every item
    anyway, the query is compared with every item.
    """
    options.checkpoint()
    if not options.exact and snapshot.indexed is not None and snapshot.indexed.index.kind != "flat":
        [scores], [ids] = _nearest(snapshot, query, _INDEXED_RANGE, options, mask)
        is_hit = (ids >= 0) & (scores >= np.float64(least))
        if not is_hit.all() or len(ids) < _INDEXED_RANGE:
            return snapshot.rows_of(ids[is_hit])
        options.checkpoint()
    return snapshot.range_search(query, least, mask)


def _in_both(one: Bits | None, other: Bits) -> Bits:
    """The items of both masks; None has all."""
    return other if one is None else one & other


def _fetch(
    now: Reading,
    queries: Embeddings,
    options: SearchOptions,
    mask: Bits | None,
    *,
    once: bool = False,
) -> Fetch:
    """once: fetch no more items with equal content than are needed to show one of them."""
    copies = 1 + len(options.exclude) if once else None

    def fetch(rows: Sequence[int], n: int) -> list[Pool]:
        options.checkpoint()
        some = queries if len(rows) == len(queries) else queries[list(rows)]
        scores, ids = _nearest(now.snapshot, some, n, options, mask, copies)
        known = _rows(now, set(ids[ids >= 0].tolist()), options)
        pools = []
        for best, own in zip(ids.tolist(), scores.tolist(), strict=True):
            candidates = [
                Candidate(i, known[i][0], score, known[i][1], known[i][2].hex(), known[i][3])
                for i, score in zip(best, own, strict=True)
                if i >= 0
            ]
            is_all = len(candidates) < n
            pools.append(Pool(candidates, -math.inf if is_all else candidates[-1].score))
        return pools

    return fetch


def _vectors(snapshot: Snapshot, ids: Sequence[ItemId]) -> Embeddings:
    """The vectors (N, D) of these items, in their order. Raises: GalleryCorruptError."""
    return snapshot.vectors(snapshot.rows_of(np.array(ids, np.int64)))


def _rows(now: Reading, ids: Collection[ItemId], options: SearchOptions) -> dict[ItemId, Row]:
    """The catalogue's rows of items that passed the filter. Raises: GalleryCorruptError."""
    wanted = list(ids)
    found: dict[ItemId, Row] = {}
    for start in range(0, len(wanted), _BLOCK):
        if start:
            options.checkpoint()
        found |= now.view.rows(wanted[start : start + _BLOCK], now.snapshot.state.seq) or {}
    if len(found) < len(wanted):
        missing = next(item_id for item_id in wanted if item_id not in found)
        raise GalleryCorruptError(
            f"Item {missing} is in the index but not in the catalogue. {REBUILD}"
        )
    if options.filter is not None:
        _check_fit(found, options.filter)
    return found


def _check_fit(found: Mapping[ItemId, Row], where: Filter) -> None:
    """Check that items which passed the columns match the filter. Raises: GalleryCorruptError."""
    for item_id, (_, attributes, *_) in found.items():
        if not where.matches(attributes):
            raise GalleryCorruptError(
                f"The catalogue is damaged: item {item_id} is listed under attributes that it does "
                f"not have. {RESTORE}"
            )


class _Groups:
    """A `kinlens.indexer.live.ranking.GroupSource` over one state.

    Masks of single values have their own cache: in the cache of filters they would evict filters.
    """

    def __init__(
        self,
        now: Reading,
        attributes: StateAttributes,
        queries: Embeddings,
        by: str,
        options: SearchOptions,
        mask: Bits | None,
    ) -> None:
        self._now, self._queries, self._by, self._options = now, queries, by, options
        self._attributes, self._mask = attributes, mask
        self.fetch = _fetch(now, queries, options, mask)
        self._of_values: dict[Scalar, Bits] = {}

    def outside(self, row: int, values: Sequence[Scalar], n: int) -> Pool:
        if not values:
            return self._best(row, n, self._mask)
        return self._best(row, n, _in_both(self._mask, self._attributes.beyond(self._by, values)))

    def inside(self, row: int, value: Scalar, n: int) -> Pool:
        mask = _in_both(self._mask, self._with(value))
        return self._best(row, n, mask, once=self._options.distinct)

    def _with(self, value: Scalar) -> Bits:
        if value not in self._of_values:
            if len(self._of_values) >= _MASKS:
                self._of_values.clear()
            self._of_values[value] = self._attributes.having(self._by, [value])
        return self._of_values[value]

    def _best(self, row: int, n: int, mask: Bits | None, *, once: bool = False) -> Pool:
        query = self._queries[row : row + 1]
        [best] = _fetch(self._now, query, self._options, mask, once=once)([0], n)
        return best
