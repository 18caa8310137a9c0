"""Answers a search from one state: vectors from the snapshot, rows from the catalogue."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from embedder.errors import GalleryCorruptError, ItemNotFoundError
from embedder.types import AttributeValue, Embeddings, Hit, ItemId
from indexer.engine import Group, Grouping, Ids, Scores, SearchOptions
from indexer.filters import In
from indexer.grouping import Members, best_groups
from indexer.ranking import Candidate, Fetch, best_hits, combined_query
from indexer.states import Reading


def nearest(
    reading: Reading, queries: Embeddings, k: int, options: SearchOptions
) -> tuple[Scores, Ids]:
    """Scores and numbers of the best items, shape (Q, at most k); number -1 where fewer.

    Of the options only `where`, `exact` and `effort` count. Raises: FilterError.
    """
    among = reading.among(options.where)
    return reading.snapshot.nearest(
        queries,
        min(k, reading.state.size),
        among,
        exact=options.exact,
        effort=options.effort,
    )


def search(
    reading: Reading, queries: Embeddings, k: int, options: SearchOptions
) -> list[list[Hit]]:
    """The hits of each query. Raises: FilterError."""
    return best_hits(_fetch(reading, queries, options), len(queries), k, options)


def search_groups(
    reading: Reading, queries: Embeddings, k: int, grouping: Grouping, options: SearchOptions
) -> list[list[Group]]:
    """The groups of each query. Raises: FilterError, InvalidParameterError."""
    fetch = _fetch(reading, queries, options)
    members = _members(reading, queries, grouping, options)
    return best_groups(fetch, members, len(queries), k, grouping, options)


def numbers_of(reading: Reading, keys: Sequence[str]) -> list[ItemId]:
    """The numbers of items, in the order of their keys. Raises: ItemNotFoundError."""
    found = reading.view.find(keys)
    for key in keys:
        if key not in found:
            raise ItemNotFoundError(
                f"The gallery has no item with the key {key!r}. Keys are compared letter by "
                "letter; `kinlens-index show` prints an item."
            )
    return [found[key] for key in keys]


def _fetch(reading: Reading, queries: Embeddings, options: SearchOptions) -> Fetch:
    def fetch(rows: Sequence[int], n: int) -> list[list[Candidate]]:
        asked = queries if len(rows) == len(queries) else queries[list(rows)]
        scores, ids = nearest(reading, asked, n, options)
        known = _candidates(reading, np.unique(ids))
        return [
            [
                _scored(known[number], score)
                for number, score in zip(*row, strict=True)
                if number >= 0
            ]
            for row in zip(ids.tolist(), scores.tolist(), strict=True)
        ]

    return fetch


def _members(
    reading: Reading, queries: Embeddings, grouping: Grouping, options: SearchOptions
) -> Members:
    def members(row: int, values: Sequence[AttributeValue]) -> list[Candidate]:
        ids = reading.view.matching(In(grouping.by, tuple(values)))
        scores = np.clip(reading.view.vectors(ids) @ queries[row], -1, 1)
        known = _candidates(reading, ids)
        return [
            _scored(known[number], score)
            for number, score in zip(ids.tolist(), scores.tolist(), strict=True)
            if options.where is None or options.where.matches(known[number].attributes)
        ]

    return members


def _candidates(reading: Reading, ids: Ids) -> dict[ItemId, Candidate]:
    """Rows of the catalogue, without a score yet."""
    wanted = ids[ids >= 0].tolist()
    items = reading.view.get(wanted)
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
    chosen = numbers_of(reading, [*liked, *disliked])
    vectors = reading.view.vectors(chosen)
    query = combined_query(vectors[: len(liked)], vectors[len(liked) :])
    others = replace(options, exclude=options.exclude | set(chosen))
    [hits] = search(reading, query[np.newaxis], k, others)
    return hits
