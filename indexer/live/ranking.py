"""From candidates in order of their score to answers, the same way for every engine.

An engine hands over its `Fetch`; here more is fetched until no item that was not fetched can change
the answer.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from embedder.errors import InvalidParameterError
from embedder.types import AttributeValue, Embeddings, Hit, ItemId
from indexer.catalog.entries import NORM_TOLERANCE, normalised, norms_of
from indexer.types import SearchOptions

_EXPECTED_EXCLUDED = 100
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Candidate:
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


def best_hits(fetch: Fetch, rows: int, k: int, options: SearchOptions) -> list[list[Hit]]:
    """The `k` best items of each of `rows` queries after `options.offset`, best first.

    Obeys `min_score`, `offset`, `distinct` and `exclude` of the options; the rest is up to `fetch`.
    """
    reach = options.offset + k

    def settled(_row: int, pool: Pool) -> list[Hit] | None:
        allowed = (c for c in pool.candidates if reaches(c.score, options.min_score))
        kept = list(remaining(allowed, options))
        if len(kept) < reach and not pool.holds_all(options.min_score):
            return None
        return [hit(c) for c in kept[options.offset : reach]]

    return settle(fetch, rows, first_count(reach, options), settled)


def settle(
    fetch: Fetch, rows: int, first: int, settled: Callable[[int, Pool], T | None]
) -> list[T]:
    """Fetch `first` candidates of every row, then ever twice as many of the rows without an answer.

    `settled(row, pool)` gives the answer, or None as long as more is needed.
    """
    answers: dict[int, T] = {}
    waiting: Sequence[int] = range(rows)
    while waiting:
        for row, fetched in zip(waiting, fetch(waiting, first), strict=True):
            answer = settled(row, Pool.of(fetched, first))
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


def rank(candidate: Candidate) -> tuple[float, ItemId]:
    """Sorts candidates best first, equal scores by id."""
    return -candidate.score, candidate.id


def reaches(score: float, min_score: float | None) -> bool:
    """Whether `score` is at least `min_score`, if there is one."""
    return min_score is None or score >= min_score


def hit(candidate: Candidate) -> Hit:
    """The candidate as an answer."""
    return Hit(candidate.id, candidate.key, candidate.score, candidate.attributes)


def check_search(k: int, options: SearchOptions, dim: int, queries: Embeddings) -> Embeddings:
    """`queries` as C-ordered float32 (Q, dim), once they and the numbers are in range.

    Raises: InvalidParameterError.
    """
    check_options(k, options)
    return _checked_queries(queries, dim)


def check_options(k: int, options: SearchOptions) -> None:
    """Raises: InvalidParameterError, unless the options of a search are in range."""
    check_at_least("k", k, 1)
    check_at_least("offset", options.offset, 0)
    if options.effort is not None:
        check_at_least("effort", options.effort, 1)
    _check_min_score(options.min_score)
    if not isinstance(options.exclude, set | frozenset):
        raise InvalidParameterError(
            f"exclude = {options.exclude!r:.80} is not a set. Give frozenset(...) of item numbers."
        )


def _check_min_score(min_score: object) -> None:
    if min_score is None:
        return
    is_number = isinstance(min_score, int | float | np.integer | np.floating)
    if not is_number or not -1.0 <= min_score <= 1.0:  # type: ignore[operator]
        raise InvalidParameterError(
            f"min_score = {min_score!r:.80} is outside -1..1, the range of a cosine "
            "similarity. Choose a number inside, or leave it out."
        )


def check_at_least(name: str, value: object, least: int) -> None:
    """Raises: InvalidParameterError, unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InvalidParameterError(
            f"{name} = {value!r} is not a whole number of at least {least}. Give one."
        )


def _checked_queries(queries: Embeddings, dim: int) -> Embeddings:
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
