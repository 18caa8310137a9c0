"""Searching for groups of items that share the value of an attribute."""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

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

Members = Callable[[int, Sequence[AttributeValue]], Iterable[Candidate]]
"""(query row, values) -> every item of these groups that fits the filter of the search."""

_EXPECTED_SIZE = 4
_OPENED_AT_ONCE = 256
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
    search = _Search(members, reach, grouping, options)
    settled = search.by_best if grouping.score == "best" else search.by_mean
    return settle(fetch, rows, _EXPECTED_SIZE * first_count(reach, options), settled)


@dataclass(frozen=True)
class _Search:
    """`opened` has all items of a group, under its query row and key, once they were asked for."""

    members: Members
    reach: int
    grouping: Grouping
    options: SearchOptions
    opened: dict[tuple[int, _Key], list[Candidate]] = field(default_factory=dict)

    def by_best(self, row: int, pool: Pool) -> list[Group] | None:
        found = [own for own in self._split(pool) if reaches(own[0].score, self.options.min_score)]
        if len(found) < self.reach and not pool.holds_all(self.options.min_score):
            return None
        shown = found[self.options.offset : self.reach]
        self._open(row, [own for own in shown if len(own) < self.grouping.size])
        return [self._group(self._whole(row, own), own[0].score) for own in shown]

    def by_mean(self, row: int, pool: Pool) -> list[Group] | None:
        """No mean exceeds the best score: a group whose best is too low is not looked at."""
        groups: list[Group] = []
        top_means: list[float] = []
        to_beat = -math.inf if self.options.min_score is None else self.options.min_score
        split, step = self._split(pool), self.reach
        while split and split[0][0].score >= to_beat:
            chance = [own for own in split[:step] if own[0].score >= to_beat]
            self._open(row, chance)
            for own in chance:
                whole = self._whole(row, own)
                mean = math.fsum(c.score for c in whole) / len(whole)
                if mean >= to_beat:
                    groups.append(self._group(whole, mean))
                    heapq.heappush(top_means, mean)
                if len(top_means) > self.reach:
                    heapq.heappop(top_means)
                if len(top_means) == self.reach:
                    to_beat = top_means[0]
            split, step = split[step:], min(2 * step, _OPENED_AT_ONCE)
        full = len(top_means) == self.reach and to_beat > pool.ceiling
        if not full and not pool.holds_all(self.options.min_score):
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

    def _open(self, row: int, groups: Sequence[Sequence[Candidate]]) -> None:
        """Ask for all items of these groups."""
        keys = [self._key(own[0]) for own in groups]
        new = [key for key in keys if key[0] is not None and (row, key) not in self.opened]
        if new:
            found: dict[_Key, list[Candidate]] = {key: [] for key in new}
            for candidate in self.members(row, [value for _, value in new]):
                found.setdefault(self._key(candidate), []).append(candidate)
            self.opened.update({(row, key): found[key] for key in new})

    def _whole(self, row: int, own: Sequence[Candidate]) -> list[Candidate]:
        """All items of the group of `own` if it was opened; these keep the scores of the search."""
        others = self.opened.get((row, self._key(own[0])), [])
        found = {c.id: c for c in others} | {c.id: c for c in own}
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
