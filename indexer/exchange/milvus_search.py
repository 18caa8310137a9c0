"""Searches of a Milvus collection, and what Milvus 2.3 cannot do: sort items, count values."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.types import Embeddings, ItemId
from kinlens.indexer.entries import Item, has_image
from kinlens.indexer.exchange.milvus_collection import (
    ITEM,
    MAX_HITS,
    Collection,
    Row,
    attributes_of,
    both,
    item_of,
)
from kinlens.indexer.exchange.milvus_index import is_exact
from kinlens.indexer.filters.tree import Equals, In, Not, check_attribute, check_boosted
from kinlens.indexer.live.attributes import Spread
from kinlens.indexer.live.ranking import Candidate, Pool, Reorder, check_counting, check_search
from kinlens.indexer.live.reader import MAX_SORTED
from kinlens.indexer.live.rerank import in_order, reorder_of
from kinlens.indexer.types import SearchOptions, SortBy
from kinlens.values import AttributeValue, Scalar, values_in


class MilvusSearch:
    """One search of a collection, and the `kinlens.indexer.live.ranking.GroupSource` of its groups.

    Searches inside and outside of groups visit every cluster of the index, so fewer results than
    requested mean that there are no more.
    """

    def __init__(
        self, now: Collection, queries: Embeddings, k: int, options: SearchOptions, by: str = ""
    ) -> None:
        """`by`: the attribute of the groups. Raises: InvalidParameterError, FilterError."""
        self.queries = _checked(now, queries, k, options)
        self._now, self._k, self._options, self._by = now, k, options, by
        self._condition = now.condition(options.where)

    def fetch(self, rows: Sequence[int], n: int) -> list[Pool]:
        return self._best(rows, n, "", self._options.exact)

    def outside(self, row: int, values: Sequence[Scalar], n: int) -> Pool:
        # No condition finds lists with a value that is not among these, so all lists are kept.
        single = replace(self._now, several={})
        group = single.condition(Not(In(self._by, tuple(values)))) if values else ""
        return self._best([row], n, group, exact=True)[0]

    def inside(self, row: int, value: Scalar, n: int) -> Pool:
        return self._best([row], n, self._now.condition(Equals(self._by, value)), exact=True)[0]

    def vectors(self, ids: Sequence[ItemId]) -> Embeddings:
        """The vectors (N, D) of these items, in their order; zero for those removed since."""
        rows = self._now.lookup("number", ids, ["number", "vector"])
        known = {int(row["number"]): row["vector"] for row in rows}
        zero = [0.0] * self._now.facts.dim
        return np.array([known.get(number, zero) for number in ids], np.float32)

    def reorder(self) -> Reorder | None:
        """How the first hits are reordered, for which their vectors take another request."""

        def span(name: str) -> None:  # the server does not report the range
            if self._now.kinds or self._now.count():
                check_boosted(name, self._now.kinds)

        if (order := self._options.sort_by) is not None:
            check_used(self._now, order.attribute, "sort by")
        return reorder_of(self._options, self._k, self.vectors, span)

    def _best(self, rows: Sequence[int], n: int, group: str, exact: bool) -> list[Pool]:
        """The `n` best candidates of queries, up to `MAX_HITS`, that match the filter and the
        condition `group`.
        """
        options = self._options
        options.checkpoint()
        condition, queries = both(self._condition, group), self.queries[list(rows)]
        found = self._now.search(queries, min(n, MAX_HITS), condition, options.effort, exact)
        return [Pool.of([_candidate(row) for row in best], n) for best in found]


def _candidate(row: Row) -> Candidate:
    fields, score = row["entity"], float(np.clip(row["distance"], -1, 1))
    number, attributes = int(fields["number"]), attributes_of(fields)
    pictured = has_image(fields["path"], fields["format"])
    return Candidate(number, fields["key"], score, attributes, fields["sha256"], pictured)


def check_used(now: Collection, name: str, purpose: str) -> None:
    """As `check_attribute`, unless the collection is empty. Raises: FilterError."""
    if name not in now.kinds and now.count():
        check_attribute(name, now.kinds, purpose)


def sorted_items(now: Collection, condition: str, order: SortBy) -> list[Item]:
    """All items that match, sorted, ties by id. Raises: FilterError, InvalidParameterError."""
    check_used(now, order.attribute, "sort by")
    items = list(map(item_of, _few(now, condition, f"sort_by = {order.attribute!r:.160}")))
    return [items[index] for index in in_order(order, items)]


def counted_rows(
    now: Collection,
    query: Embeddings | None,
    options: SearchOptions,
    keys: str,
    names: Sequence[str],
) -> Sequence[Row]:
    """The rows whose values are counted. Raises: FilterError, InvalidParameterError."""
    query = check_counting(options, now.facts.dim, query)
    condition, what = both(now.condition(options.where), keys), f"facets = {', '.join(names):.160}"
    least = options.min_score
    if least is None or query is None:
        return _few(now, condition, what)
    query = _checked(now, query, 1, options)
    found = now.search(query, MAX_SORTED + 1, condition, options.effort, options.exact)
    near = [row["entity"] for best in found for row in best if row["distance"] >= least]
    rows = {int(row["number"]): row for row in near}
    if len(rows) > MAX_SORTED:
        raise InvalidParameterError(
            f"{what}: more than {MAX_SORTED:,} items have a score of {least}, which cannot be "
            "counted on Milvus. Increase min_score, or import the gallery into a folder."
        )
    return [*rows.values()]


def spread_of(name: str, given: Sequence[Mapping[str, AttributeValue]]) -> Spread:
    """The value counts of an attribute over items with these attributes."""
    counts = Counter(value for each in given for value in {*values_in(each.get(name))})
    values: list[Any] = sorted(counts)
    missing = sum(name not in each for each in given)
    return Spread(values, np.array([counts[value] for value in values], np.int64), {}, missing)


def _few(now: Collection, condition: str, what: str) -> list[Row]:
    """The rows that match, by id. Milvus 2.3 neither sorts nor counts values, so they are read.

    Raises: InvalidParameterError for more than `MAX_SORTED` of them.
    """
    total = now.count(condition)
    if total > MAX_SORTED:
        raise InvalidParameterError(
            f"{what}: {total:,} items match; on Milvus at most {MAX_SORTED:,} are sorted or "
            "counted. Narrow them with a filter, or import the gallery into a folder."
        )
    return list(chain.from_iterable(now.pages(condition, ITEM, total=total)))


def _checked(now: Collection, queries: Embeddings, k: int, options: SearchOptions) -> Embeddings:
    queries = check_search(k, options, now.facts.dim, queries)
    if options.exact and not is_exact(now.facts.kind):
        raise InvalidParameterError(
            f"`exact`: the gallery has the index {now.facts.kind} on Milvus, which "
            "cannot compare with every vector. Omit `exact`, or use a higher `effort`."
        )
    if options.near is not None:
        raise InvalidParameterError(
            "`near`: near-duplicates cannot be excluded on Milvus. Use distinct = true, which "
            "excludes equal content, or import the gallery into a folder."
        )
    if options.offset + k > MAX_HITS:
        raise InvalidParameterError(
            f"`offset` + `k` = {options.offset + k:,}; the limit on Milvus is {MAX_HITS:,}. Reduce "
            "one of them."
        )
    return queries
