"""Searching for groups of items that share the value of an attribute."""

import functools
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from embedder.errors import InvalidParameterError
from embedder.types import AttributeValue
from indexer.engine import Group, Grouping, SearchOptions
from indexer.ranking import (
    Candidate,
    Fetch,
    Pool,
    check_at_least,
    first_count,
    hit,
    rank,
    reaches,
    remaining,
    settle,
)

Members = Callable[[int, AttributeValue], Sequence[Candidate]]
"""(query row, value) -> every item of the group that fits the filter of the search."""

_EXPECTED_SIZE = 4
_Key = tuple[bool | None, AttributeValue]


def best_groups(
    fetch: Fetch, members: Members, rows: int, k: int, grouping: Grouping, options: SearchOptions
) -> list[list[Group]]:
    """The `k` best groups of each of `rows` queries after `options.offset`, best first.

    Equal groups are ordered by the number of their best item. What does not fit the filter or is
    excluded belongs to no group; with `distinct` a content counts once in each group, and once
    among the items without the attribute. `min_score` applies to the score of a group.

    Raises: InvalidParameterError for a grouping out of range.
    """
    _check(grouping)
    reach = options.offset + k
    # Typed, because True == 1.
    search = _Search(functools.lru_cache(None, typed=True)(members), reach, grouping, options)
    settled = search.by_best if grouping.score == "best" else search.by_mean
    return settle(fetch, rows, _EXPECTED_SIZE * first_count(reach, options), settled)


@dataclass(frozen=True)
class _Search:
    members: Members
    reach: int
    grouping: Grouping
    options: SearchOptions

    def by_best(self, row: int, pool: Pool) -> list[Group] | None:
        found = [own for own in self._split(pool) if reaches(own[0].score, self.options.min_score)]
        if len(found) < self.reach and not pool.holds_all(self.options.min_score):
            return None
        return [
            self._group(
                own if len(own) >= self.grouping.size else self._whole(row, own), own[0].score
            )
            for own in found[self.options.offset : self.reach]
        ]

    def by_mean(self, row: int, pool: Pool) -> list[Group] | None:
        """No mean exceeds the best score: a group whose best is too low is not looked at."""
        groups: list[Group] = []
        top_means: list[float] = []
        to_beat = -math.inf
        for own in self._split(pool):
            if own[0].score < to_beat or not reaches(own[0].score, self.options.min_score):
                break
            whole = self._whole(row, own)
            mean = math.fsum(c.score for c in whole) / len(whole)
            if not reaches(mean, self.options.min_score):
                continue
            groups.append(self._group(whole, mean))
            heapq.heappush(top_means, mean)
            if len(top_means) > self.reach:
                heapq.heappop(top_means)
            to_beat = top_means[0] if len(top_means) == self.reach else -math.inf
        if to_beat <= pool.ceiling and not pool.holds_all(self.options.min_score):
            return None
        groups.sort(key=lambda group: (-group.score, group.hits[0].id))
        return groups[self.options.offset : self.reach]

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

    def _whole(self, row: int, own: Sequence[Candidate]) -> list[Candidate]:
        """All items of the group of `own`, which keep the scores that they were found with."""
        value = own[0].attributes.get(self.grouping.by)
        if value is None:
            return list(own)
        found = {c.id: c for c in self.members(row, value)} | {c.id: c for c in own}
        return list(remaining(sorted(found.values(), key=rank), self.options))

    def _group(self, members: Sequence[Candidate], score: float) -> Group:
        value = members[0].attributes.get(self.grouping.by)
        return Group(value, score, [hit(c) for c in members[: self.grouping.size]])


def _check(grouping: Grouping) -> None:
    check_at_least("size", grouping.size, 1)
    if grouping.score not in ("best", "mean"):
        raise InvalidParameterError(
            f"Groups cannot be ranked by {grouping.score!r}. Choose 'best' or 'mean'."
        )
