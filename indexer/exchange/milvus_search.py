"""Answers searches of a gallery on Milvus."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from embedder.types import AttributeValue, Embeddings, Hit
from indexer.exchange.milvus_filters import one_of
from indexer.exchange.milvus_schema import TOP_K, Row, vectors_of
from indexer.exchange.milvus_view import MilvusView
from indexer.filters.tree import In, check_grouped
from indexer.live.grouping import best_groups
from indexer.live.members import Members, contents_of
from indexer.live.ranking import Candidate, Fetch, best_hits, combined_query
from indexer.types import Group, Grouping, SearchOptions

_AT_ONCE = 65_536  # rows in one answer
_MEMBER = ("id", "sha256", "attributes", "vector")


def search(
    view: MilvusView, queries: Embeddings, k: int, options: SearchOptions
) -> list[list[Hit]]:
    """The hits of each query. Raises: FilterError."""
    fetch = _fetch(view, queries, options, view.condition(options.where))
    return best_hits(fetch, len(queries), k, options)


def search_groups(
    view: MilvusView, queries: Embeddings, k: int, grouping: Grouping, options: SearchOptions
) -> list[list[Group]]:
    """The groups of each query. Raises: FilterError, InvalidParameterError."""
    if grouping.by not in view.state.kinds and view.count():
        check_grouped(grouping.by, view.state.kinds)
    source = _Groups(view, queries, grouping.by, options)
    return best_groups(source, len(queries), k, grouping, options)


def search_like(
    view: MilvusView,
    liked: Sequence[str],
    disliked: Sequence[str],
    k: int,
    options: SearchOptions,
) -> list[Hit]:
    """The hits of the combination of stored items. Raises: ItemNotFoundError, ..."""
    ids = [item.id for item in view.known([*liked, *disliked])]
    vectors = view.vectors(ids)
    query = combined_query(vectors[: len(liked)], vectors[len(liked) :])
    options = replace(options, exclude=options.exclude | set(ids))
    return search(view, query[None], k, options)[0]


def _fetch(view: MilvusView, queries: Embeddings, options: SearchOptions, condition: str) -> Fetch:
    parameters = _parameters(view.state.nlist, options)

    def fetch(rows: Sequence[int], n: int) -> list[list[Candidate]]:
        options.checkpoint()
        first, found = min(n, TOP_K), []
        step = max(1, _AT_ONCE // first)
        for start in range(0, len(rows), step):
            asked = queries[list(rows[start : start + step])]
            found += view.search(asked, first, condition, parameters)
        return [
            [_candidate(row) for row in _filled(view, queries[q], best, n, condition, parameters)]
            for q, best in zip(rows, found, strict=True)
        ]

    return fetch


def _filled(
    view: MilvusView,
    query: Embeddings,
    best: list[Row],
    n: int,
    condition: str,
    parameters: dict[str, int],
) -> list[Row]:
    """Up to n rows, also where n is more than one search gives: then without those so far."""
    more = len(best) == TOP_K < n
    while more:
        others = f"not ({one_of('id', [row['id'] for row in best])})"
        both = f"({condition}) and {others}" if condition else others
        [page] = view.search(query[None], min(n - len(best), TOP_K), both, parameters)
        best = best + page
        more = len(page) == TOP_K and len(best) < n
    return best


def _parameters(nlist: int, options: SearchOptions) -> dict[str, int]:
    if not nlist:
        return {}
    nprobe = nlist if options.exact else options.effort or max(16, nlist // 16)
    return {"nprobe": min(nprobe, nlist)}


class _Groups:
    """`indexer.live.grouping.GroupSource` of one view.

    Inside and outside of groups every cluster is searched: fewer answers mean that there are no
    more.
    """

    def __init__(
        self, view: MilvusView, queries: Embeddings, by: str, options: SearchOptions
    ) -> None:
        self._view, self._queries, self._by, self._options = view, queries, by, options
        self._condition = view.condition(options.where)
        self.fetch = _fetch(view, queries, options, self._condition)

    def outside(self, row: int, values: Sequence[AttributeValue], n: int) -> list[Candidate]:
        return self._best(row, n, f"not ({self._with(values)})" if values else "")

    def inside(self, row: int, value: AttributeValue, n: int) -> list[Candidate]:
        return self._best(row, n, self._with([value]))

    def members(self, row: int, values: Sequence[AttributeValue]) -> Iterator[Members]:
        same, where = In(self._by, tuple(values)), self._options.where
        wheres = [same] if where is None else [same, where]
        for page in self._view.matching(wheres, _MEMBER):
            self._options.checkpoint()
            vectors = vectors_of(page, self._view.state.dim)
            scores = np.clip(vectors @ self._queries[row], -1, 1).astype(np.float64)
            ids = np.array([int(entity["id"]) for entity in page], np.int64)
            contents = contents_of([entity["sha256"] for entity in page])
            places: dict[AttributeValue, list[int]] = {}
            for place, entity in enumerate(page):
                places.setdefault(entity["attributes"][self._by], []).append(place)
            for value, at in places.items():
                yield Members(value, ids[at], scores[at], contents[at])

    def _with(self, values: Sequence[AttributeValue]) -> str:
        return self._view.condition(In(self._by, tuple(values)))

    def _best(self, row: int, n: int, group: str) -> list[Candidate]:
        both = " and ".join(f"({part})" for part in (self._condition, group) if part)
        query, options = self._queries[row : row + 1], replace(self._options, exact=True)
        [best] = _fetch(self._view, query, options, both)([0], n)
        return best


def _candidate(row: Row) -> Candidate:
    fields = row["entity"]
    score = float(np.clip(row["distance"], -1.0, 1.0))
    attributes = dict(fields["attributes"])
    return Candidate(int(row["id"]), fields["key"], score, attributes, fields["sha256"])
