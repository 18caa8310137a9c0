"""Searching for groups of items that share the value of an attribute."""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embedder.errors import InvalidParameterError
from embedder.types import AttributeValue, ItemId
from indexer.live.ranking import (
    Candidate,
    Pool,
    check_at_least,
    first_count,
    hit,
    rank,
    reaches,
    remaining,
    settle,
)
from indexer.types import Group, Grouping, Ids, SearchOptions

_BLOCK = 4096

Contents = NDArray[np.bytes_]
"""The sha256 of each item as 32 bytes, shape (N,)."""

_EXPECTED_SIZE = 4
_OPENED_AT_ONCE = 256
_MOST_GROWTH = 16  # so many times the first number of candidates is fetched while groups turn up
_MOST_CLOSED = 5000
_Key = tuple[bool | None, AttributeValue]


@dataclass(frozen=True, slots=True)
class Members:
    """Some items with the value `value`: their numbers (N,) and scores (N,) for one query.

    Their contents (N,) are there if only distinct ones count.
    """

    value: AttributeValue
    ids: Ids
    scores: NDArray[np.float64]
    contents: Contents | None = None

    def left(self, known: Mapping[ItemId, float], options: SearchOptions) -> "Members":
        """Those that are not excluded; the `known` have these scores."""
        scores = self.scores.copy()
        ids = np.array(sorted(known), np.int64)
        places = np.minimum(np.searchsorted(ids, self.ids), max(0, len(ids) - 1))
        is_known = ids[places] == self.ids if len(ids) else np.zeros(len(self.ids), np.bool_)
        scores[is_known] = [known[number] for number in self.ids[is_known].tolist()]
        kept = np.ones(len(self.ids), np.bool_)
        if options.exclude:
            kept = ~np.isin(self.ids, np.fromiter(options.exclude, np.int64))
        contents = None if self.contents is None else self.contents[kept]
        return Members(self.value, self.ids[kept], scores[kept], contents)


def contents_of(sha256s: Sequence[str]) -> Contents:
    """Contents from sha256 in hex."""
    return np.array([bytes.fromhex(sha256) for sha256 in sha256s], dtype="S32")


def mean_of(blocks: Sequence[Members], options: SearchOptions) -> float:
    """The mean of all scores, correctly rounded; with `distinct` each content counts once, with
    its best score. At least one item is left in the blocks.
    """
    scores = np.concatenate([block.scores for block in blocks])
    if options.distinct:
        contents = np.concatenate(
            [block.contents for block in blocks if block.contents is not None]
        )
        order = np.argsort(contents)
        ordered = contents[order]
        starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        scores = np.maximum.reduceat(scores[order], starts)
    return math.fsum(_each(scores)) / len(scores)


def _each(scores: NDArray[np.float64]) -> Iterator[float]:
    """The numbers one by one; never all of them as objects."""
    for start in range(0, len(scores), _BLOCK):
        yield from scores[start : start + _BLOCK].tolist()


class GroupSource(Protocol):
    """What an engine has to know for one search; all of it fits the filter of the search.

    Each list is as that of `live.ranking.Fetch`: the n best, fewer only if there are no more.
    """

    def fetch(self, rows: Sequence[int], n: int) -> list[list[Candidate]]:
        """The n best candidates of each of these queries."""

    def outside(self, row: int, values: Sequence[AttributeValue], n: int) -> list[Candidate]:
        """The n best without one of these values."""

    def inside(self, row: int, value: AttributeValue, n: int) -> list[Candidate]:
        """The n best with this value."""

    def members(self, row: int, values: Sequence[AttributeValue]) -> Iterable[Members]:
        """Every item with one of these values, in blocks, each of one value."""


def best_groups(
    source: GroupSource, rows: int, k: int, grouping: Grouping, options: SearchOptions
) -> list[list[Group]]:
    """The `k` best groups of each of `rows` queries after `options.offset`, best first.

    Equal groups are ordered by the number of their best item. What does not fit the filter or is
    excluded belongs to no group; with `distinct` a content counts once in each group, and once
    among the items without the attribute. `min_score` applies to the score of a group.

    Raises: InvalidParameterError for a grouping out of range.
    """
    _check(grouping)
    reach = options.offset + k
    first = _EXPECTED_SIZE * first_count(reach, options)
    fetched = source.fetch(range(rows), first) if rows else []
    return [
        _Search(source, row, reach, grouping, options).found(Pool.of(best, first), first)
        for row, best in enumerate(fetched)
    ]


@dataclass(frozen=True)
class _Search:
    """One query; `means` has the score of a group under its key, once all of it was looked at."""

    source: GroupSource
    row: int
    reach: int
    grouping: Grouping
    options: SearchOptions
    means: dict[_Key, float] = field(default_factory=dict)

    def found(self, pool: Pool, first: int) -> list[Group]:
        """The answer, from the `first` best and then from ever more outside the groups found."""
        settled = self._by_best if self.grouping.score == "best" else self._by_mean
        n, closed = first, 0
        while (groups := settled(pool)) is None:
            keys = [self._key(own[0]) for own in self._split(pool)]
            values = [value for kind, value in keys if kind is not None][:_MOST_CLOSED]
            is_growing = len(values) > closed
            n = min(2 * n, max(n, _MOST_GROWTH * first)) if is_growing else 2 * n
            pool = pool.joined(Pool.of(self.source.outside(self.row, values, n), n))
            closed = len(values)
        return groups

    def _by_best(self, pool: Pool) -> list[Group] | None:
        found = [own for own in self._split(pool) if reaches(own[0].score, self.options.min_score)]
        if len(found) < self.reach and not pool.holds_all(self.options.min_score):
            return None
        shown = found[self.options.offset : self.reach]
        return [self._group(self._best_of(own), own[0].score) for own in shown]

    def _by_mean(self, pool: Pool) -> list[Group] | None:
        """No mean exceeds the best score: a group whose best is too low is not looked at."""
        groups: list[tuple[float, list[Candidate]]] = []
        top_means: list[float] = []
        to_beat = -math.inf if self.options.min_score is None else self.options.min_score
        split, step = self._split(pool), self.reach
        while split and split[0][0].score >= to_beat:
            chance = [own for own in split[:step] if own[0].score >= to_beat]
            self._open(chance)
            for own in chance:
                mean = self.means.get(self._key(own[0]), own[0].score)
                if mean >= to_beat:
                    groups.append((mean, own))
                    heapq.heappush(top_means, mean)
                if len(top_means) > self.reach:
                    heapq.heappop(top_means)
                if len(top_means) == self.reach:
                    to_beat = top_means[0]
            split, step = split[step:], min(2 * step, _OPENED_AT_ONCE)
        full = len(top_means) == self.reach and to_beat > pool.ceiling
        if not full and not pool.holds_all(self.options.min_score):
            return None
        groups.sort(key=lambda group: (-group[0], group[1][0].id))
        shown = groups[self.options.offset : self.reach]
        return [self._group(self._best_of(own), mean) for mean, own in shown]

    def _split(self, pool: Pool) -> list[list[Candidate]]:
        """The certain candidates of each group, the groups in the order of their best."""
        groups: dict[_Key, list[Candidate]] = {}
        for candidate in pool.candidates:
            groups.setdefault(self._key(candidate), []).append(candidate)
        kept = (list(remaining(own, self.options)) for own in groups.values())
        # An excluded best makes a group come later.
        return sorted((own for own in kept if own), key=lambda own: rank(own[0]))

    def _key(self, candidate: Candidate) -> _Key:
        value = candidate.attributes.get(self.grouping.by)
        if value is None:
            return None, candidate.sha256 if self.options.distinct else candidate.id
        return isinstance(value, bool), value

    def _open(self, groups: Sequence[Sequence[Candidate]]) -> None:
        """The means of these groups; those of `groups` keep the scores of the search."""
        found = {self._key(own[0]): {c.id: c.score for c in own} for own in groups}
        new = [key for key in found if key[0] is not None and key not in self.means]
        if not new:
            return
        blocks: dict[_Key, list[Members]] = {}
        for block in self.source.members(self.row, [value for _, value in new]):
            key = (isinstance(block.value, bool), block.value)
            blocks.setdefault(key, []).append(block.left(found[key], self.options))
        self.means.update({key: mean_of(own, self.options) for key, own in blocks.items()})

    def _best_of(self, own: Sequence[Candidate]) -> Sequence[Candidate]:
        """As many as are shown, where `own` are the best of a group."""
        kind, value = self._key(own[0])
        size = self.grouping.size
        if kind is None or len(own) >= size:
            return own

        def settled(_row: int, pool: Pool) -> list[Candidate] | None:
            kept = self._ordered({c.id: c for c in (*pool.candidates, *own)})
            return kept if len(kept) >= size or pool.holds_all(None) else None

        def fetch(_rows: Sequence[int], n: int) -> list[list[Candidate]]:
            return [self.source.inside(self.row, value, n)]

        [best] = settle(fetch, 1, first_count(size, self.options), settled)
        return best

    def _ordered(self, members: Mapping[ItemId, Candidate]) -> list[Candidate]:
        return list(remaining(sorted(members.values(), key=rank), self.options))

    def _group(self, members: Sequence[Candidate], score: float) -> Group:
        value = members[0].attributes.get(self.grouping.by)
        return Group(value, score, [hit(c) for c in members[: self.grouping.size]])


def _check(grouping: Grouping) -> None:
    check_at_least("size", grouping.size, 1)
    if grouping.score not in ("best", "mean"):
        raise InvalidParameterError(
            f"Groups cannot be ranked by {grouping.score!r}. Choose 'best' or 'mean'."
        )
