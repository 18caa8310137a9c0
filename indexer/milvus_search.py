"""Answers searches of a gallery on Milvus."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from embedder.types import AttributeValue, Embeddings, Hit
from indexer.engine import Group, Grouping, SearchOptions
from indexer.filters import In
from indexer.grouping import Members, best_groups
from indexer.milvus_filters import one_of
from indexer.milvus_schema import TOP_K, Row, vectors_of
from indexer.milvus_view import MilvusView
from indexer.ranking import Candidate, Fetch, best_hits, combined_query

_AT_ONCE = 65_536  # rows in one answer
_MEMBER = ("id", "key", "sha256", "attributes", "vector")


def search(
    view: MilvusView, queries: Embeddings, k: int, options: SearchOptions
) -> list[list[Hit]]:
    """The hits of each query. Raises: FilterError."""
    return best_hits(_fetch(view, queries, options), len(queries), k, options)


def search_groups(
    view: MilvusView, queries: Embeddings, k: int, grouping: Grouping, options: SearchOptions
) -> list[list[Group]]:
    """The groups of each query. Raises: FilterError, InvalidParameterError."""
    fetch = _fetch(view, queries, options)
    members = _members(view, queries, grouping, options)
    return best_groups(fetch, members, len(queries), k, grouping, options)


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


def _fetch(view: MilvusView, queries: Embeddings, options: SearchOptions) -> Fetch:
    condition = view.condition(options.where)
    parameters = _parameters(view.state.nlist, options)

    def fetch(rows: Sequence[int], n: int) -> list[list[Candidate]]:
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


def _members(
    view: MilvusView, queries: Embeddings, grouping: Grouping, options: SearchOptions
) -> Members:
    def members(row: int, values: Sequence[AttributeValue]) -> list[Candidate]:
        same = In(grouping.by, tuple(values))
        wheres = [same] if options.where is None else [same, options.where]
        found = [row for page in view.matching(wheres, _MEMBER) for row in page]
        scores = vectors_of(found, view.state.dim) @ queries[row]
        return [
            _candidate({"id": row["id"], "distance": score, "entity": row})
            for row, score in zip(found, scores.tolist(), strict=True)
        ]

    return members


def _candidate(row: Row) -> Candidate:
    fields = row["entity"]
    score = float(np.clip(row["distance"], -1.0, 1.0))
    attributes = dict(fields["attributes"])
    return Candidate(int(row["id"]), fields["key"], score, attributes, fields["sha256"])
