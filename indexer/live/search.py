"""Answers a search from one state: vectors from the snapshot, rows from the catalogue."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from embedder.errors import GalleryCorruptError, ItemNotFoundError
from embedder.types import AttributeValue, Embeddings, Hit, ItemId
from indexer.catalog.read import CatalogView
from indexer.filters.tree import Filter, In, check_grouped
from indexer.live.filter_cache import among_ids
from indexer.live.ranking import (
    Candidate,
    Fetch,
    Members,
    best_groups,
    best_hits,
    combined_query,
    contents_of,
)
from indexer.live.snapshot import Among, Bits
from indexer.live.state import Reading
from indexer.types import Group, Grouping, Ids, Item, Scores, SearchOptions

_NO_IDS: Ids = np.empty(0, np.int64)
_MASKS = 64  # of values, kept for the other queries of a search
_BLOCK = 4096  # items whose rows or vectors are read at a time


def nearest(
    reading: Reading, queries: Embeddings, k: int, options: SearchOptions
) -> tuple[Scores, Ids]:
    """Scores and numbers of the best items, shape (Q, at most k); number -1 where fewer.

    Of the options only `where`, `exact` and `effort` count. Raises: FilterError.
    """
    return _nearest(reading, queries, k, options, reading.among(options.where))


def _nearest(
    reading: Reading, queries: Embeddings, k: int, options: SearchOptions, among: Among | None
) -> tuple[Scores, Ids]:
    k = min(k, reading.state.size)
    return reading.snapshot.nearest(queries, k, among, exact=options.exact, effort=options.effort)


def search(
    reading: Reading, queries: Embeddings, k: int, options: SearchOptions
) -> list[list[Hit]]:
    """The hits of each query. Raises: FilterError."""
    fetch = _fetch(reading, queries, options, reading.among(options.where))
    return best_hits(fetch, len(queries), k, options)


def search_groups(
    reading: Reading, queries: Embeddings, k: int, grouping: Grouping, options: SearchOptions
) -> list[list[Group]]:
    """The groups of each query. Raises: FilterError, InvalidParameterError."""
    if reading.state.size:
        check_grouped(grouping.by, reading.view.schema())
    source = _Groups(reading, queries, grouping.by, options)
    return best_groups(source, len(queries), k, grouping, options)


def numbers_of(view: CatalogView, keys: Sequence[str]) -> list[ItemId]:
    """The numbers of items, in the order of their keys. Raises: ItemNotFoundError."""
    found = view.find(keys)
    for key in keys:
        if key not in found:
            raise ItemNotFoundError(
                f"The gallery has no item with the key {key!r}. Keys are compared letter by "
                "letter; `kinlens-index show` prints an item."
            )
    return [found[key] for key in keys]


def _fetch(
    reading: Reading, queries: Embeddings, options: SearchOptions, among: Among | None
) -> Fetch:
    def fetch(rows: Sequence[int], n: int) -> list[list[Candidate]]:
        options.checkpoint()
        asked = queries if len(rows) == len(queries) else queries[list(rows)]
        scores, ids = _nearest(reading, asked, n, options, among)
        known = _candidates(reading, np.unique(ids), options)
        _check_fit(known.values(), options.where)
        return [
            [
                _scored(known[number], score)
                for number, score in zip(*row, strict=True)
                if number >= 0
            ]
            for row in zip(ids.tolist(), scores.tolist(), strict=True)
        ]

    return fetch


def _check_fit(candidates: Iterable[Candidate], where: Filter | None) -> None:
    """What the index of attributes says is what the items say. Raises: GalleryCorruptError."""
    for candidate in candidates:
        if where is not None and not where.matches(candidate.attributes):
            raise GalleryCorruptError(
                f"The catalogue is damaged: item {candidate.id} is listed under attributes that it "
                "does not have. Restore a backup: kinlens-index restore."
            )


class _Groups:
    """`indexer.live.ranking.GroupSource` of one state; what is read of a value is read once.

    Filters on single values stay out of the cache of filters: they would push out those of users.
    """

    def __init__(
        self, reading: Reading, queries: Embeddings, by: str, options: SearchOptions
    ) -> None:
        self._reading, self._queries, self._by, self._options = reading, queries, by, options
        self._among = reading.among(options.where)
        self.fetch = _fetch(reading, queries, options, self._among)
        self._of_values: dict[tuple[AttributeValue, ...], Among] = {}
        self._ids: dict[AttributeValue, Ids] = {}

    def outside(self, row: int, values: Sequence[AttributeValue], n: int) -> list[Candidate]:
        if not values:
            return self._best(row, n, self._among)
        same = self._with(tuple(values))
        return self._best(row, n, self._left(~same.segment, ~same.delta))

    def inside(self, row: int, value: AttributeValue, n: int) -> list[Candidate]:
        same = self._with((value,))
        return self._best(row, n, self._left(same.segment, same.delta))

    def members(self, row: int, values: Sequence[AttributeValue]) -> Iterator[Members]:
        self._options.checkpoint()
        new = [value for value in values if value not in self._ids]
        if new:
            self._ids.update(self._reading.view.grouped(self._by, new))
        for value in values:
            ids = self._ids.get(value, _NO_IDS)
            for start in range(0, len(ids), _BLOCK):
                self._options.checkpoint()
                yield self._scored_members(row, value, ids[start : start + _BLOCK])

    def _scored_members(self, row: int, value: AttributeValue, ids: Ids) -> Members:
        """Scores from the vectors of the index; the rows are read only for their contents."""
        ids, vectors = self._reading.snapshot.vectors(ids, self._among)
        scores = np.clip(vectors @ self._queries[row], -1, 1).astype(np.float64)
        if not self._options.distinct:
            return Members(value, ids, scores)
        known = _candidates(self._reading, ids, self._options)
        contents = contents_of([known[number].sha256 for number in ids.tolist()])
        return Members(value, ids, scores, contents)

    def _with(self, values: tuple[AttributeValue, ...]) -> Among:
        if values not in self._of_values:
            if len(self._of_values) >= _MASKS:
                self._of_values.clear()
            ids = self._reading.view.matching(In(self._by, values))
            self._of_values[values] = among_ids(self._reading.snapshot, ids)
        return self._of_values[values]

    def _left(self, segment: Bits, delta: NDArray[np.bool_]) -> Among:
        if self._among is None:
            return Among(segment, delta)
        return Among(segment & self._among.segment, delta & self._among.delta)

    def _best(self, row: int, n: int, among: Among | None) -> list[Candidate]:
        query = self._queries[row : row + 1]
        [best] = _fetch(self._reading, query, self._options, among)([0], n)
        return best


def _candidates(reading: Reading, ids: Ids, options: SearchOptions) -> dict[ItemId, Candidate]:
    """Rows of the catalogue, without a score yet."""
    wanted = ids[ids >= 0].tolist()
    items: dict[ItemId, Item] = {}
    for start in range(0, len(wanted), _BLOCK):
        options.checkpoint()
        items |= reading.view.get(wanted[start : start + _BLOCK])
    if len(items) < len(wanted):
        missing = next(number for number in wanted if number not in items)
        raise GalleryCorruptError(
            f"Item {missing} is in the index but not in the catalogue. Make the index again: "
            "kinlens-index compact GALLERY --rebuild."
        )
    return {
        number: Candidate(number, item.key, 0.0, item.attributes, item.sha256)
        for number, item in items.items()
    }


def _scored(candidate: Candidate, score: float) -> Candidate:
    return Candidate(candidate.id, candidate.key, score, candidate.attributes, candidate.sha256)


def search_like(
    reading: Reading,
    liked: Sequence[str],
    disliked: Sequence[str],
    k: int,
    options: SearchOptions,
) -> list[Hit]:
    """The hits of a query made of items. Raises: ItemNotFoundError, InvalidParameterError."""
    chosen = numbers_of(reading.view, [*liked, *disliked])
    vectors = reading.view.vectors(chosen)
    query = combined_query(vectors[: len(liked)], vectors[len(liked) :])
    others = replace(options, exclude=options.exclude | set(chosen))
    [hits] = search(reading, query[np.newaxis], k, others)
    return hits
