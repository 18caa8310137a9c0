"""From candidates in order of their score to hits and groups, the same way for every engine.

An engine hands over its `Fetch`; here more is fetched until no item that was not fetched can change
the answer.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.types import Embeddings, Hit, ItemId
from kinlens.indexer.catalog.entries import NORM_TOLERANCE, ROUNDING, normalised, norms_of
from kinlens.indexer.types import CANDIDATES, MAX_BOOST, Group, Grouping, SearchOptions
from kinlens.values import AttributeValue, Scalar, values_in

_EXPECTED_EXCLUDED = 100
_BLOCK = 4096
_EXPECTED_SIZE = 4
_OPENED_AT_ONCE = 256
_MOST_GROWTH = 16  # so many times the first number of candidates is fetched while groups turn up
_MOST_CLOSED = 5000
_MOST_COMPARED = 10_000  # among so many of the best, what is near a better one is left out
_COMPARED = 256  # candidates whose vectors are compared at a time

T = TypeVar("T")

_Key = tuple[bool | None, Scalar]
"""Of a group: None and what tells an item without a value; or whether the value is a boolean, and
the value."""


class Candidate(NamedTuple):
    """An item that fits the filter of a search, with its score for one query."""

    id: ItemId
    key: str
    score: float
    attributes: Mapping[str, AttributeValue]
    sha256: str


Fetch = Callable[[Sequence[int], int], list[list[Candidate]]]
"""(query rows, n) -> the n best candidates of each of these rows; fewer only if there are no more.

Which of several equal scores are cut off at n is left to the engine.
"""

VectorsOf = Callable[[Sequence[ItemId]], Embeddings]
"""The vectors (N, D) of these items, in their order."""


Reorder = Callable[[Sequence[Candidate]], Sequence[int]]
"""(the first candidates of a query, best first) -> their places in the order to show them in; as
many of these as a page needs.
"""


@dataclass(frozen=True, slots=True)
class Pool:
    """What is certain about one query: no other item scores higher than `ceiling`.

    candidates: every item above the ceiling, best first, equal scores by id.
    ceiling: minus infinity if there are no other items.
    """

    candidates: Sequence[Candidate]
    ceiling: float

    @classmethod
    def of(cls, fetched: Sequence[Candidate], n: int) -> "Pool":
        """The pool of `fetched`, which has fewer than `n` items only if there are no more."""
        ordered = sorted(fetched, key=rank)
        if len(ordered) < n:
            return cls(ordered, -math.inf)
        ceiling = ordered[-1].score
        return cls([c for c in ordered if c.score > ceiling], ceiling)

    def joined(self, others: "Pool") -> "Pool":
        """With the pool of the items outside some groups, of which this one has the best."""
        found = {c.id: c for c in others.candidates} | {c.id: c for c in self.candidates}
        ceiling = min(self.ceiling, others.ceiling)
        return Pool(sorted(found.values(), key=rank), ceiling)

    def holds_all(self, min_score: float | None) -> bool:
        """Whether every item that reaches `min_score` is a candidate."""
        return math.isinf(self.ceiling) or not reaches(self.ceiling, min_score)


def best_hits(
    fetch: Fetch,
    rows: int,
    k: int,
    options: SearchOptions,
    vectors_of: VectorsOf | None = None,
    reorder: Reorder | None = None,
) -> list[list[Hit]]:
    """The `k` best items of each of `rows` queries after `options.offset`, best first.

    Obeys `min_score`, `offset`, `distinct`, `exclude` and, with `vectors_of`, `near` of the
    options; the rest is up to `fetch` and `reorder`.
    """
    reach = _reach(k, options, reorder)

    def settled(pool: Pool) -> list[Hit] | None:
        allowed = (c for c in pool.candidates if reaches(c.score, options.min_score))
        ordered = remaining(allowed, options)
        if options.near is not None and vectors_of is not None:
            ordered = apart(ordered, options.near, vectors_of, options.checkpoint)
        kept = list(islice(ordered, reach))
        is_crowd = options.near is not None and len(pool.candidates) >= _MOST_COMPARED
        if len(kept) < reach and not is_crowd and not pool.holds_all(options.min_score):
            return None
        return [hit(c) for c in _page(kept, lambda c: c, k, options, reorder)]

    return settle(fetch, rows, first_count(reach, options), settled)


def _reach(k: int, options: SearchOptions, reorder: Reorder | None) -> int:
    """How many of the best a page is made of."""
    reach = max(options.offset + k, 0 if reorder is None else CANDIDATES)
    return min(reach, sys.maxsize)


def _page(
    found: Sequence[T],
    best: Callable[[T], Candidate],
    k: int,
    options: SearchOptions,
    reorder: Reorder | None,
) -> Sequence[T]:
    """The `k` after `options.offset`, once the first have changed places; the rest follow as they
    are, so that pages leave nothing out and show nothing twice.
    """
    if reorder is not None and options.offset < CANDIDATES:
        places = reorder([best(one) for one in found[:CANDIDATES]])
        found = [*(found[place] for place in places), *found[CANDIDATES:]]
    return found[options.offset : options.offset + k]


def settle(fetch: Fetch, rows: int, first: int, settled: Callable[[Pool], T | None]) -> list[T]:
    """Fetch `first` candidates of every row, then ever twice as many of the rows without an answer.

    `settled(pool)` gives the answer, or None as long as more is needed.
    """
    answers: dict[int, T] = {}
    waiting: Sequence[int] = range(rows)
    while waiting:
        for row, fetched in zip(waiting, fetch(waiting, first), strict=True):
            answer = settled(Pool.of(fetched, first))
            if answer is not None:
                answers[row] = answer
        waiting = [row for row in waiting if row not in answers]
        first *= 2
    return [answers[row] for row in range(rows)]


def first_count(reach: int, options: SearchOptions) -> int:
    """How many candidates to fetch at first for `reach` items: one more shows a tie at the cut."""
    return reach + min(len(options.exclude), _EXPECTED_EXCLUDED) + 1


def remaining(ordered: Iterable[Candidate], options: SearchOptions) -> Iterator[Candidate]:
    """Candidates without the excluded and, if only distinct ones count, without later copies."""
    contents: set[str] = set()
    for candidate in ordered:
        if candidate.id in options.exclude:
            continue
        if options.distinct and candidate.sha256 in contents:
            continue
        contents.add(candidate.sha256)
        yield candidate


def apart(
    ordered: Iterable[Candidate],
    near: float,
    vectors_of: VectorsOf,
    checkpoint: Callable[[], None],
) -> Iterator[Candidate]:
    """Candidates, best first, without those whose cosine with one that stays is at least `near`.

    What stays depends on better candidates alone, so that all pages agree; for the same reason
    cosines are summed in float64, where it does not matter how many are summed at a time.
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
    """Which cosines of unit vectors (N, D) and (M, D) are at least `near`, (N, M)."""
    cosines: NDArray[np.float32] = (some @ others.T).astype(np.float32)
    return cosines >= np.float32(near)


def rank(candidate: Candidate) -> tuple[float, ItemId]:
    """Sorts candidates best first, equal scores by id."""
    return -candidate.score, candidate.id


def reaches(score: float, min_score: float | None) -> bool:
    """Whether `score` is at least `min_score`, if there is one."""
    return min_score is None or score >= min_score


def hit(candidate: Candidate) -> Hit:
    """The candidate as an answer."""
    return Hit(candidate.id, candidate.key, candidate.score, candidate.attributes)


class GroupSource(Protocol):
    """What an engine has to know for one search; all of it fits the filter of the search.

    Each list is as that of `Fetch`: the n best, fewer only if there are no more.
    """

    def fetch(self, rows: Sequence[int], n: int) -> list[list[Candidate]]:
        """The n best candidates of each of these queries."""

    def outside(self, row: int, values: Sequence[Scalar], n: int) -> list[Candidate]:
        """The n best that have another value than these, or none."""

    def inside(self, row: int, value: Scalar, n: int) -> list[Candidate]:
        """The n best with this value."""


def best_groups(
    source: GroupSource,
    rows: int,
    k: int,
    grouping: Grouping,
    options: SearchOptions,
    reorder: Reorder | None = None,
) -> list[list[Group]]:
    """The `k` best groups of each of `rows` queries after `options.offset`, best first.

    Equal groups are ordered by the number of their best item. What does not fit the filter or is
    excluded belongs to no group; with `distinct` a content counts once in each group, and once
    among the items without the attribute. `min_score` applies to the score of a group. To
    `reorder` the best item of a group stands for it.

    Raises: InvalidParameterError for a grouping out of range.
    """
    _check_grouping(grouping)
    if options.near is not None:
        raise InvalidParameterError(
            "Near-duplicates are not left out of groups. Ask for distinct = true, which leaves out "
            "equal content, or for items in place of groups."
        )
    reach = _reach(k, options, reorder)
    first = _EXPECTED_SIZE * first_count(reach, options)
    fetched = source.fetch(range(rows), first) if rows else []
    return [
        _Search(source, row, k, reach, grouping, options, reorder).found(
            Pool.of(best, first), first
        )
        for row, best in enumerate(fetched)
    ]


@dataclass(frozen=True)
class _Search:
    """One query."""

    source: GroupSource
    row: int
    k: int
    reach: int
    grouping: Grouping
    options: SearchOptions
    reorder: Reorder | None

    def found(self, pool: Pool, first: int) -> list[Group]:
        """The answer, from the `first` best and then from ever more outside the groups found."""
        n, closed = first, 0
        while (groups := self._settled(pool)) is None:
            keys = [key for key, _ in self._split(pool)]
            values = [value for kind, value in keys if kind is not None][:_MOST_CLOSED]
            is_growing = len(values) > closed
            n = min(2 * n, max(n, _MOST_GROWTH * first)) if is_growing else 2 * n
            pool = pool.joined(Pool.of(self.source.outside(self.row, values, n), n))
            closed = len(values)
        return groups

    def _settled(self, pool: Pool) -> list[Group] | None:
        least = self.options.min_score
        found = [(key, own) for key, own in self._split(pool) if reaches(own[0].score, least)]
        if len(found) < self.reach and not pool.holds_all(self.options.min_score):
            return None
        shown = _page(found, lambda one: one[1][0], self.k, self.options, self.reorder)
        return [self._group(key, self._best_of(key, own), own[0].score) for key, own in shown]

    def _split(self, pool: Pool) -> list[tuple[_Key, list[Candidate]]]:
        """The certain candidates of each group, the groups in the order of their best."""
        groups: dict[_Key, list[Candidate]] = {}
        for candidate in pool.candidates:
            for key in self._keys(candidate):
                groups.setdefault(key, []).append(candidate)
        kept = ((key, list(remaining(own, self.options))) for key, own in groups.items())
        # An excluded best makes a group come later.
        return sorted(((key, own) for key, own in kept if own), key=lambda one: rank(one[1][0]))

    def _keys(self, candidate: Candidate) -> list[_Key]:
        values = dict.fromkeys(values_in(candidate.attributes.get(self.grouping.by)))
        if not values:
            return [(None, candidate.sha256 if self.options.distinct else candidate.id)]
        return [(isinstance(value, bool), value) for value in values]

    def _best_of(self, key: _Key, own: Sequence[Candidate]) -> Sequence[Candidate]:
        """As many as are shown, where `own` are the best of a group."""
        kind, value = key
        size = self.grouping.size
        if kind is None or len(own) >= size:
            return own

        def settled(pool: Pool) -> list[Candidate] | None:
            kept = self._ordered({c.id: c for c in (*pool.candidates, *own)})
            return kept if len(kept) >= size or pool.holds_all(None) else None

        def fetch(_rows: Sequence[int], n: int) -> list[list[Candidate]]:
            return [self.source.inside(self.row, value, n)]

        [best] = settle(fetch, 1, first_count(size, self.options), settled)
        return best

    def _ordered(self, members: Mapping[ItemId, Candidate]) -> list[Candidate]:
        return list(remaining(sorted(members.values(), key=rank), self.options))

    def _group(self, key: _Key, members: Sequence[Candidate], score: float) -> Group:
        value = None if key[0] is None else key[1]
        return Group(value, score, [hit(c) for c in members[: self.grouping.size]])


def _check_grouping(grouping: Grouping) -> None:
    check_at_least("size", grouping.size, 1)


def check_search(k: int, options: SearchOptions, dim: int, queries: Embeddings) -> Embeddings:
    """`queries` as C-ordered float32 (Q, dim), once they and the numbers are in range.

    Raises: InvalidParameterError.
    """
    check_options(k, options)
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
        raise InvalidParameterError(
            f"Query {row} has norm {norms[row]:.4g}, not 1. Divide it by its norm."
        )
    return normalised(checked, norms)


def check_options(k: int, options: SearchOptions) -> None:
    """Raises: InvalidParameterError, unless the options of a search are in range."""
    check_at_least("k", k, 1)
    check_at_least("offset", options.offset, 0)
    if options.effort is not None:
        check_at_least("effort", options.effort, 1)
    _check_cosine("min_score", options.min_score)
    _check_cosine("near", options.near)
    if options.reorders:
        _check_reordering(options)
    if not isinstance(options.exclude, set | frozenset):
        raise InvalidParameterError(
            f"exclude = {options.exclude!r:.80} is not a set. Give frozenset(...) of item numbers."
        )


def _check_reordering(options: SearchOptions) -> None:
    """Raises: InvalidParameterError, unless diversity and boost are in range."""
    _check_number("diversity", options.diversity, 0, 1)
    if options.sort_by and (options.diversity or options.boost):
        raise InvalidParameterError(
            "sort_by orders hits by an attribute alone. Omit diversity and boost, or sort_by."
        )
    boost = options.boost
    if boost is None:
        return
    _check_number("the weight of a boost", boost.weight, -MAX_BOOST, MAX_BOOST)
    for end in (boost.low, boost.high):
        if end is not None:
            _check_number("from or to of a boost", end, -math.inf, math.inf)
    if boost.low is not None and boost.high is not None and boost.low >= boost.high:
        raise InvalidParameterError(
            f"A boost from {boost.low:g} to {boost.high:g} has no length. Let `from` be below "
            "`to`; a negative weight prefers what is low."
        )


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or math.isinf(value):
        limits = "finite" if math.isinf(low) else f"from {low:g} to {high:g}"
        raise InvalidParameterError(f"{name} = {value!r:.80}; give a number, {limits}.")


def _check_cosine(name: str, value: object) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if not is_number or not -1.0 <= value <= 1.0:  # type: ignore[operator]
        raise InvalidParameterError(
            f"{name} = {value!r:.80} is outside -1..1, the range of a cosine "
            "similarity. Choose a number inside, or leave it out."
        )


def check_at_least(name: str, value: object, least: int) -> None:
    """Raises: InvalidParameterError, unless `value` is a whole number of at least `least`."""
    if type(value) is int and value >= least:
        return  # as nearly always; the general question takes longer
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InvalidParameterError(
            f"{name} = {value!r} is not a whole number of at least {least}. Give one."
        )


def _is_one_unit(queries: object, dim: int) -> bool:
    """One query as it is wanted: what most searches bring, found out in a tenth of the time."""
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
