"""Turns candidates into hits and groups; shared by the FAISS and the Milvus galleries.

An engine provides a `Fetch`. More candidates are fetched until no other item can change the answer.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.types import Embeddings, Hit, ItemId
from kinlens.indexer.catalog.vectors import are_equal
from kinlens.indexer.entries import NORM_TOLERANCE, ROUNDING, normalised, norms_of
from kinlens.indexer.types import CANDIDATES, MAX_BOOST, Group, Grouping, SearchOptions
from kinlens.values import AttributeValue, Scalar, values_in

_EXPECTED_EXCLUDED = 100
_EXPECTED_COPIES = 10
_BLOCK = 4096
_EXPECTED_SIZE = 4
_MAX_OVERFETCH = 16  # upper bound on over-fetching for groups, as a multiple of the first batch
_MAX_EXCLUDED_VALUES = 5000
_MAX_COMPARED = 10_000  # top candidates among which near-duplicates are removed
_COMPARED = 256  # candidates whose vectors are compared at a time
_SAME_COPY = 1e-3  # equal vectors, stored in half precision, have scores that differ by less

T = TypeVar("T")

_Key = tuple[bool | None, Scalar]
"""The key of a group: (whether the value is a boolean, value), since True == 1 in Python. For an
item without the attribute: (None, its id)."""


class Candidate(NamedTuple):
    """An item that matches the filter of a search, with its score for one query."""

    id: ItemId
    key: str
    score: float
    attributes: Mapping[str, AttributeValue]
    sha256: str
    has_image: bool


VectorsOf = Callable[[Sequence[ItemId]], Embeddings]
"""The vectors (N, D) of these items, in their order."""


Reorder = Callable[[Sequence[Candidate]], Sequence[int]]
"""(the top candidates of a query, best first) -> their indices in the order to return them; at
least as many as a page needs.
"""


@dataclass(frozen=True, slots=True)
class Pool:
    """The known candidates of one query: no other item precedes them.

    candidates: best first, ties by id.
    ceiling: no other item scores higher; minus infinity if there are no other items.
    """

    candidates: Sequence[Candidate]
    ceiling: float

    @classmethod
    def of(cls, fetched: Sequence[Candidate], n: int) -> "Pool":
        """A pool of the `n` items fetched; fewer than `n` mean that there are no more.

        If scores tie at `n`, any of these items may have been fetched, so none is a candidate.
        """
        ordered = sorted(fetched, key=rank)
        if len(ordered) < n:
            return cls(ordered, -math.inf)
        ceiling = ordered[-1].score
        return cls([c for c in ordered if c.score > ceiling], ceiling)

    def joined(self, others: "Pool") -> "Pool":
        """Merge with the pool of the items outside the groups that this pool already covers."""
        found = {c.id: c for c in others.candidates} | {c.id: c for c in self.candidates}
        ceiling = min(self.ceiling, others.ceiling)
        return Pool(sorted(found.values(), key=rank), ceiling)

    def contains_all(self, min_score: float | None) -> bool:
        """Whether every item with at least `min_score` is a candidate."""
        return math.isinf(self.ceiling) or not passes(self.ceiling, min_score)


Fetch = Callable[[Sequence[int], int], list[Pool]]
"""(query rows, n) -> a pool of the n best items for each of these rows."""


def best_hits(
    fetch: Fetch,
    rows: int,
    k: int,
    options: SearchOptions,
    vectors_of: VectorsOf,
    reorder: Reorder | None = None,
) -> list[list[Hit]]:
    """The `k` best items of each of `rows` queries after `options.offset`, best first.

    Applies the options `min_score`, `offset`, `distinct`, `exclude` and `near`. `fetch` and
    `reorder` apply the others.
    """
    depth = _depth(k, options, reorder)

    def settled(pool: Pool) -> list[Hit] | None:
        allowed = (c for c in pool.candidates if passes(c.score, options.min_score))
        ordered = remaining(allowed, options, vectors_of)
        if options.near is not None:
            ordered = without_near_duplicates(ordered, options.near, vectors_of, options.checkpoint)
        kept = list(islice(ordered, depth))
        is_capped = options.near is not None and len(pool.candidates) >= _MAX_COMPARED
        if len(kept) < depth and not is_capped and not pool.contains_all(options.min_score):
            return None
        return [hit(c) for c in _page(kept, lambda c: c, k, options, reorder)]

    return settle(fetch, rows, first_count(depth, options), settled)


def _depth(k: int, options: SearchOptions, reorder: Reorder | None) -> int:
    """Number of top hits that a page is built from."""
    depth = max(options.offset + k, 0 if reorder is None else CANDIDATES)
    return min(depth, sys.maxsize)


def _page(
    found: Sequence[T],
    best: Callable[[T], Candidate],
    k: int,
    options: SearchOptions,
    reorder: Reorder | None,
) -> Sequence[T]:
    """The `k` results after `options.offset`, with the first `CANDIDATES` reordered.

    Later results keep their order, so that pages neither skip nor repeat a result.
    """
    if reorder is not None and options.offset < CANDIDATES:
        order = reorder([best(one) for one in found[:CANDIDATES]])
        found = [*(found[index] for index in order), *found[CANDIDATES:]]
    return found[options.offset : options.offset + k]


def settle(fetch: Fetch, rows: int, first: int, settled: Callable[[Pool], T | None]) -> list[T]:
    """Fetch `first` candidates of every row; double the number for the rows without an answer.

    `settled(pool)` returns the answer, or None if it needs more candidates.
    """
    answers: dict[int, T] = {}
    unanswered: Sequence[int] = range(rows)
    while unanswered:
        for row, pool in zip(unanswered, fetch(unanswered, first), strict=True):
            answer = settled(pool)
            if answer is not None:
                answers[row] = answer
        unanswered = [row for row in unanswered if row not in answers]
        first *= 2
    return [answers[row] for row in range(rows)]


def first_count(depth: int, options: SearchOptions) -> int:
    """Candidates to fetch first for `depth` hits; the extra one detects a tie at the end."""
    omitted = min(len(options.exclude), _EXPECTED_EXCLUDED)
    if options.distinct or options.near is not None:
        omitted += _EXPECTED_COPIES
    return depth + omitted + 1


def remaining(
    ordered: Iterable[Candidate], options: SearchOptions, vectors_of: VectorsOf
) -> Iterator[Candidate]:
    """Candidates without the excluded items and, with `distinct`, without repeated content."""
    allowed = (candidate for candidate in ordered if candidate.id not in options.exclude)
    return _without_copies(allowed, vectors_of) if options.distinct else allowed


def _without_copies(ordered: Iterable[Candidate], vectors_of: VectorsOf) -> Iterator[Candidate]:
    """Drop candidates with the sha256 and the vector of a better one.

    A sha256 alone is not enough, as it can be that of another image or a placeholder of the writer.
    Vectors are read only of candidates that share one, a block at a time.
    """
    rest = iter(ordered)
    kept: dict[str, list[Candidate]] = {}
    vectors: dict[ItemId, Embeddings] = {}
    while block := list(islice(rest, _COMPARED)):
        counts = Counter(candidate.sha256 for candidate in block)
        shared = [c for c in block if counts[c.sha256] > 1 or c.sha256 in kept]
        wanted = {c.id for c in (*shared, *(kept[c.sha256][0] for c in shared if c.sha256 in kept))}
        unread = sorted(wanted - vectors.keys())
        vectors |= zip(unread, vectors_of(unread) if unread else (), strict=True)
        for candidate in block:
            better = kept.setdefault(candidate.sha256, [])
            # Equal vectors have nearly equal scores, and `better` is in the order of scores.
            highest = candidate.score + _SAME_COPY
            similar = takewhile(partial(_scores_at_most, highest), reversed(better))
            if any(are_equal(vectors[candidate.id], vectors[other.id]) for other in similar):
                del vectors[candidate.id]
            else:
                better.append(candidate)
                yield candidate


def _scores_at_most(highest: float, candidate: Candidate) -> bool:
    return candidate.score <= highest


def without_near_duplicates(
    ordered: Iterable[Candidate], near: float, vectors_of: VectorsOf, checkpoint: Callable[[], None]
) -> Iterator[Candidate]:
    """Drop candidates whose cosine to a better candidate that was kept is at least `near`.

    The result depends only on better candidates, so all pages agree. For the same reason cosines
    are summed in float64, where the block size does not change the result.
    """
    rest = iter(ordered)
    kept: NDArray[np.float64] | None = None
    while block := list(islice(rest, _COMPARED)):
        checkpoint()
        vectors = vectors_of([candidate.id for candidate in block]).astype(np.float64)
        kept = np.empty((0, vectors.shape[1])) if kept is None else kept
        is_free = ~_are_near(vectors, kept, near).any(axis=1)
        among = _are_near(vectors, vectors, near)
        chosen: list[int] = []
        for row in np.flatnonzero(is_free).tolist():
            if not among[row, chosen].any():
                chosen.append(row)
                yield block[row]
        kept = np.concatenate([kept, vectors[chosen]])


def _are_near(
    some: NDArray[np.float64], others: NDArray[np.float64], near: float
) -> NDArray[np.bool_]:
    """Mask (N, M): whether the cosine of unit vectors (N, D) and (M, D) is at least `near`."""
    cosines: NDArray[np.float32] = (some @ others.T).astype(np.float32)
    return cosines >= np.float32(near)


def rank(candidate: Candidate) -> tuple[float, ItemId]:
    """Sort key: best first, ties by id."""
    return -candidate.score, candidate.id


def passes(score: float, min_score: float | None) -> bool:
    """Whether `score` is at least `min_score`, if there is one."""
    return min_score is None or score >= min_score


def hit(candidate: Candidate) -> Hit:
    """Convert a candidate to a hit."""
    return Hit(
        candidate.id, candidate.key, candidate.score, candidate.attributes, candidate.has_image
    )


class GroupSource(Protocol):
    """Candidates of one grouped search, provided by an engine; all match the filter."""

    def fetch(self, rows: Sequence[int], n: int) -> list[Pool]:
        """The n best candidates of each of these queries."""

    def outside(self, row: int, values: Sequence[Scalar], n: int) -> Pool:
        """The n best that have no value, or at least one value that is not in `values`."""

    def inside(self, row: int, value: Scalar, n: int) -> Pool:
        """The n best with this value."""


def best_groups(
    source: GroupSource,
    rows: int,
    k: int,
    grouping: Grouping,
    options: SearchOptions,
    vectors_of: VectorsOf,
    reorder: Reorder | None = None,
) -> list[list[Group]]:
    """The `k` best groups of each of `rows` queries after `options.offset`, best first.

    Ties are ordered by the id of the best item. Excluded items and items that do not match the
    filter are in no group. With `distinct`, each content counts once per group, and once among the
    items without the attribute. `min_score` applies to the best score of a group. `reorder` is
    called with the best item of each group.

    Raises: InvalidParameterError for a grouping out of range.
    """
    check_at_least("size", grouping.size, 1)
    if options.near is not None:
        raise InvalidParameterError(
            "`near` cannot be combined with groups. Use distinct = true, which removes equal "
            "content, or search for items instead of groups."
        )
    depth = _depth(k, options, reorder)
    first = _EXPECTED_SIZE * first_count(depth, options)
    fetched = source.fetch(range(rows), first) if rows else []
    return [
        _Search(source, row, k, depth, pool.ceiling, grouping, options, vectors_of, reorder).found(
            pool, first
        )
        for row, pool in enumerate(fetched)
    ]


@dataclass(frozen=True)
class _Search:
    """A grouped search for one query. All items that score above `ceiling` are fetched first."""

    source: GroupSource
    row: int
    k: int
    depth: int
    ceiling: float
    grouping: Grouping
    options: SearchOptions
    vectors_of: VectorsOf
    reorder: Reorder | None

    def found(self, pool: Pool, first: int) -> list[Group]:
        """The groups: from the `first` best, then from items outside the groups found so far."""
        n, excluded = first, 0
        while (groups := self._settled(pool)) is None:
            keys = [key for key, _ in self._split(pool)]
            values = [value for is_boolean, value in keys if is_boolean is not None][
                :_MAX_EXCLUDED_VALUES
            ]
            found_new_groups = len(values) > excluded
            n = min(2 * n, max(n, _MAX_OVERFETCH * first)) if found_new_groups else 2 * n
            pool = pool.joined(self.source.outside(self.row, values, n))
            excluded = len(values)
        return groups

    def _settled(self, pool: Pool) -> list[Group] | None:
        least = self.options.min_score
        found = [(key, own) for key, own in self._split(pool) if passes(own[0].score, least)]
        if len(found) < self.depth and not pool.contains_all(self.options.min_score):
            return None
        shown = _page(found, lambda one: one[1][0], self.k, self.options, self.reorder)
        return [self._group(key, self._members(key, own), own[0].score) for key, own in shown]

    def _split(self, pool: Pool) -> list[tuple[_Key, list[Candidate]]]:
        """The known candidates of each group; groups are in the order of their best candidate."""
        groups: dict[_Key, list[Candidate]] = {}
        alone = [candidate for candidate in pool.candidates if not self._values(candidate)]
        for candidate in self._remaining(alone):
            groups[None, candidate.id] = [candidate]
        for candidate in pool.candidates:
            for value in self._values(candidate):
                groups.setdefault((isinstance(value, bool), value), []).append(candidate)
        kept = ((key, list(self._remaining(own))) for key, own in groups.items())
        # Sorted again: without an excluded best item, a group ranks lower.
        return sorted(((key, own) for key, own in kept if own), key=lambda one: rank(one[1][0]))

    def _values(self, candidate: Candidate) -> list[Scalar]:
        return list(dict.fromkeys(values_in(candidate.attributes.get(self.grouping.by))))

    def _remaining(self, ordered: Iterable[Candidate]) -> Iterator[Candidate]:
        return remaining(ordered, self.options, self.vectors_of)

    def _members(self, key: _Key, own: Sequence[Candidate]) -> Sequence[Candidate]:
        """The members to return, given the best members `own` of a group."""
        is_boolean, value = key
        size = self.grouping.size
        if is_boolean is None or any(map(self._follows_all, own[size - 1 :])):
            return own

        def settled(pool: Pool) -> list[Candidate] | None:
            every = {c.id: c for c in (*pool.candidates, *own)}
            kept = list(self._remaining(sorted(every.values(), key=rank)))
            return kept if len(kept) >= size or pool.contains_all(None) else None

        def fetch(_rows: Sequence[int], n: int) -> list[Pool]:
            return [self.source.inside(self.row, value, n)]

        [best] = settle(fetch, 1, first_count(size, self.options), settled)
        return best

    def _follows_all(self, member: Candidate) -> bool:
        """Whether every better member of its group is known. One with several values may have been
        fetched for another value, without those between that have the value of the group alone.
        """
        value = member.attributes.get(self.grouping.by)
        return member.score > self.ceiling or not isinstance(value, tuple)

    def _group(self, key: _Key, members: Sequence[Candidate], score: float) -> Group:
        value = None if key[0] is None else key[1]
        return Group(value, score, [hit(c) for c in members[: self.grouping.size]])


def check_search(k: int, options: SearchOptions, dim: int, queries: Embeddings) -> Embeddings:
    """Check a search and return its queries as C-ordered float32 (Q, dim).

    Raises: InvalidParameterError for queries or options out of range.
    """
    _check_options(k, options)
    if _is_one_unit(queries, dim):
        return queries
    checked = _numbers(queries, dim)
    if checked.ndim != 2 or checked.shape[1] != dim:
        raise InvalidParameterError(
            f"Queries of shape {checked.shape} do not fit a gallery of dimension {dim}. "
            f"Give an array (Q, {dim}) from the bundle of this gallery."
        )
    norms = norms_of(checked)
    wrong = ~(np.abs(norms - 1) <= NORM_TOLERANCE)  # true of NaN as well
    if wrong.any():
        row = int(np.argmax(wrong))
        has_direction = 0 < norms[row] < np.inf
        cure = (
            "Divide it by its norm" if has_direction else "Pass finite numbers, not all of them 0"
        )
        raise InvalidParameterError(f"Query {row} has norm {norms[row]:.4g}, not 1. {cure}.")
    return normalised(checked, norms)


def check_counting(options: SearchOptions, dim: int, query: Embeddings | None) -> Embeddings | None:
    """Check what facets count, and return the query. Raises: InvalidParameterError."""
    _check_options(1, options)
    if options.min_score is not None and (query is None or not len(query)):
        raise InvalidParameterError(
            f"Facets with min_score need a query. Give an array of shape (Q, {dim})."
        )
    return None if query is None else check_search(1, options, dim, query)


def _check_options(k: int, options: SearchOptions) -> None:
    """Check the options of a search. Raises: InvalidParameterError if one is out of range."""
    check_at_least("k", k, 1)
    check_at_least("offset", options.offset, 0)
    if options.effort is not None:
        check_at_least("effort", options.effort, 1)
    for name, cosine in (("min_score", options.min_score), ("near", options.near)):
        if cosine is not None:
            check_number(name, cosine, -1, 1)
    if options.reorders:
        _check_reordering(options)
    if not isinstance(options.exclude, set | frozenset):
        raise InvalidParameterError(
            f"exclude = {options.exclude!r:.80} is not a set. Give frozenset(...) of item ids."
        )


def _check_reordering(options: SearchOptions) -> None:
    """Check `diversity`, `boost` and `sort_by`. Raises: InvalidParameterError."""
    check_number("diversity", options.diversity, 0, 1)
    if options.sort_by and (options.diversity or options.boost):
        raise InvalidParameterError(
            "sort_by cannot be combined with `diversity` or `boost`. Omit one of them."
        )
    boost = options.boost
    if boost is None:
        return
    check_number("the weight of a boost", boost.weight, -MAX_BOOST, MAX_BOOST)
    for end in (boost.low, boost.high):
        if end is not None:
            check_number("from or to of a boost", end, -math.inf, math.inf)
    if boost.low is not None and boost.high is not None and boost.low >= boost.high:
        raise InvalidParameterError(
            f"A boost from {boost.low:g} to {boost.high:g} is an empty range. `from` must be below "
            "`to`; a negative weight prefers low values."
        )


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Check that `value` is finite, from `low` to `high`. Raises: InvalidParameterError."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or math.isinf(value):
        limits = "finite" if math.isinf(low) else f"from {low:g} to {high:g}"
        raise InvalidParameterError(f"{name} = {value!r:.80}; give a number, {limits}.")


def check_at_least(name: str, value: object, least: int) -> None:
    """Check that `value` is an integer of at least `least`. Raises: InvalidParameterError."""
    if type(value) is int and value >= least:
        return  # the common case; the checks below take longer
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InvalidParameterError(
            f"{name} = {value!r} must be a whole number of at least {least}."
        )


def _is_one_unit(queries: object, dim: int) -> bool:
    """Whether this is one valid unit query: the common case, checked in a tenth of the time."""
    return (
        isinstance(queries, np.ndarray)
        and queries.shape == (1, dim)
        and queries.dtype == np.float32
        and queries.flags.c_contiguous
        and abs(float(queries[0].dot(queries[0])) - 1) <= ROUNDING
    )


def _numbers(queries: object, dim: int) -> Embeddings:
    try:
        given = np.asarray(queries)
    except ValueError as error:
        raise InvalidParameterError(
            f"Queries are not an array: {error}. Give one (Q, {dim}) of float32."
        ) from error
    if given.dtype.kind not in "fiu":
        raise InvalidParameterError(
            f"Queries of type {given.dtype} are not numbers. Give an array (Q, {dim}) of float32."
        )
    return np.ascontiguousarray(given, dtype=np.float32)
