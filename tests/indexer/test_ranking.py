"""Ranking against brute force, on random galleries full of ties, copies and large groups."""

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from embedder.errors import InvalidParameterError
from embedder.types import AttributeValue, Hit, ItemId
from indexer.live.ranking import Candidate, best_groups, best_hits, rank
from indexer.types import Group, Grouping, SearchOptions
from tests.support.seams import Members, contents_of

CASES = range(300)


class Shelf:
    """Candidates of several queries, and an engine that cuts ties off at random."""

    def __init__(self, seed: int, rows: int = 3) -> None:
        self.random = random.Random(seed)
        size = self.random.choice([0, 1, 5, 40, 120])
        self.rows = [self._candidates(size) for _ in range(rows)]
        self.asked: list[tuple[Sequence[int], int]] = []
        self.opened: list[AttributeValue] = []

    def _candidates(self, size: int) -> list[Candidate]:
        """Few different scores, contents and values; numbers in no order of the scores."""
        draw = self.random
        values: list[AttributeValue | None] = ["a", "b", "c", True, 1, 2.5, None, None]
        weights = [draw.choice([1, 1, 30]) for _ in values]
        numbers = draw.sample(range(1000), size)
        return [
            Candidate(
                id=number,
                key=f"key{number}",
                score=draw.choice([-0.5, 0.0, 0.25, 0.25, 0.5, draw.uniform(-1, 1)]),
                attributes={} if value is None else {"sku": value},
                sha256=str(draw.randrange(max(1, size // 2))),
            )
            for number, value in zip(numbers, draw.choices(values, weights, k=size), strict=True)
        ]

    def fetch(self, rows: Sequence[int], n: int) -> list[list[Candidate]]:
        self.asked.append((list(rows), n))
        return [self._best(row, n) for row in rows]

    def _best(self, row: int, n: int) -> list[Candidate]:
        return self._cut(self.rows[row], n)

    def _cut(self, candidates: Sequence[Candidate], n: int) -> list[Candidate]:
        shuffled = self.random.sample(candidates, len(candidates))
        return sorted(shuffled, key=lambda c: -c.score)[:n]

    def outside(self, row: int, values: Sequence[AttributeValue], n: int) -> list[Candidate]:
        self.asked.append(([row], n))
        gone = {id(c) for c in self._having(row, values)}
        return self._cut([c for c in self.rows[row] if id(c) not in gone], n)

    def inside(self, row: int, value: AttributeValue, n: int) -> list[Candidate]:
        self.asked.append(([row], n))
        return self._cut(self._having(row, [value]), n)

    def members(self, row: int, values: Sequence[AttributeValue]) -> Iterator[Members]:
        self.opened += values
        for value in values:
            found = self._having(row, [value])
            cut = self.random.randint(0, len(found))
            yield from (_members(value, part) for part in (found[:cut], found[cut:]))

    def _having(self, row: int, values: Sequence[AttributeValue]) -> list[Candidate]:
        return [c for c in self.rows[row] if any(same(c.attributes.get("sku"), v) for v in values)]

    def options(self, offset: int | None = None) -> SearchOptions:
        draw = self.random
        return SearchOptions(
            min_score=draw.choice([None, None, -1.0, 0.0, 0.25, 0.3, 1.0]),
            offset=draw.choice([0, 0, 1, 7, 200]) if offset is None else offset,
            distinct=draw.random() < 0.5,
            exclude=frozenset(draw.sample(range(1000), draw.choice([0, 0, 3, 500]))),
        )


def _members(value: AttributeValue, found: Sequence[Candidate]) -> Members:
    return Members(
        value,
        np.array([c.id for c in found], np.int64),
        np.array([c.score for c in found], np.float64),
        contents_of([f"{int(c.sha256):064x}" for c in found]),
    )


def same(one: AttributeValue | None, other: AttributeValue | None) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def hit(candidate: Candidate) -> Hit:
    return Hit(candidate.id, candidate.key, candidate.score, candidate.attributes)


def visible(candidates: Sequence[Candidate], options: SearchOptions) -> list[Candidate]:
    return sorted((c for c in candidates if c.id not in options.exclude), key=rank)


def without_copies(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [
        c for n, c in enumerate(candidates) if c.sha256 not in {d.sha256 for d in candidates[:n]}
    ]


def expected_hits(candidates: Sequence[Candidate], k: int, options: SearchOptions) -> list[Hit]:
    kept = visible(candidates, options)
    kept = without_copies(kept) if options.distinct else kept
    lowest = -2 if options.min_score is None else options.min_score
    return [hit(c) for c in kept if c.score >= lowest][options.offset :][:k]


def partition(candidates: Sequence[Candidate], options: SearchOptions) -> list[list[Candidate]]:
    kept = visible(candidates, options)
    single = [[c] for c in kept if "sku" not in c.attributes]
    if options.distinct:
        single = [[c] for c in without_copies([c for (c,) in single])]
    parts = []
    for value in ("a", "b", "c", True, 1, 2.5):
        members = [c for c in kept if same(c.attributes.get("sku"), value)]
        parts.append(without_copies(members) if options.distinct else members)
    return [part for part in parts if part] + single


def expected_groups(
    candidates: Sequence[Candidate], k: int, grouping: Grouping, options: SearchOptions
) -> list[Group]:
    scored = []
    for part in partition(candidates, options):
        scores = [c.score for c in part]
        score = max(scores) if grouping.score == "best" else float(np.mean(scores))
        if score >= (-2 if options.min_score is None else options.min_score):
            scored.append((-score, part[0].id, part))
    scored.sort(key=lambda entry: (round(entry[0], 12), entry[1]))
    return [
        Group(part[0].attributes.get("sku"), -score, [hit(c) for c in part[: grouping.size]])
        for score, _, part in scored[options.offset :][:k]
    ]


@pytest.mark.parametrize("seed", CASES)
def test_hits_equal_brute_force_whatever_the_engine_does_with_ties(seed: int) -> None:
    shelf = Shelf(seed)
    k, options = shelf.random.choice([1, 2, 5, 300]), shelf.options()
    found = best_hits(shelf.fetch, len(shelf.rows), k, options)
    assert found == [expected_hits(row, k, options) for row in shelf.rows]


@pytest.mark.parametrize("score", ["best", "mean"])
@pytest.mark.parametrize("seed", CASES)
def test_groups_equal_brute_force(seed: int, score: str) -> None:
    shelf = Shelf(seed)
    options = shelf.options(offset=shelf.random.choice([0, 0, 1, 3]))
    grouping = Grouping("sku", score, size=shelf.random.choice([1, 2, 50]))  # type: ignore[arg-type]
    k = shelf.random.choice([1, 2, 4, 300])
    found = best_groups(shelf, len(shelf.rows), k, grouping, options)
    for row, groups in zip(shelf.rows, found, strict=True):
        expected = expected_groups(row, k, grouping, options)
        assert [(type(g.value), g.value) for g in groups] == [
            (type(g.value), g.value) for g in expected
        ]
        assert [g.hits for g in groups] == [g.hits for g in expected]
        assert [g.score for g in groups] == pytest.approx([g.score for g in expected], abs=1e-9)


def flat(scores: Sequence[float], value: Callable[[int], AttributeValue | None]) -> Shelf:
    """One query over items 0, 1, ... with these scores."""
    shelf = Shelf(0, rows=0)
    shelf.rows = [
        [
            Candidate(n, f"key{n}", score, {} if value(n) is None else {"sku": value(n)}, str(n))  # type: ignore[dict-item]
            for n, score in enumerate(scores)
        ]
    ]
    return shelf


def test_exactly_k_groups_are_found_behind_a_group_that_fills_every_page() -> None:
    scores = [0.9] * 5000 + [0.5, 0.4, 0.3]
    shelf = flat(scores, lambda n: "crowd" if n < 5000 else f"other{n}")
    (groups,) = best_groups(shelf, 1, 3, Grouping("sku"), SearchOptions())
    assert [g.value for g in groups] == ["crowd", "other5000", "other5001"]


def test_fewer_groups_than_asked_for_are_not_sought_in_every_item() -> None:
    shelf = flat([1 - n / 10_000 for n in range(10_000)], lambda n: n // 1250)
    (groups,) = best_groups(shelf, 1, 10, Grouping("sku"), SearchOptions())
    assert [g.value for g in groups] == list(range(8))
    assert sum(n for _, n in shelf.asked) < 5000
    assert not shelf.opened


def test_only_as_many_items_of_a_group_are_read_as_it_shows() -> None:
    shelf = flat([1 - n / 10_000 for n in range(10_000)], lambda n: n % 1000)
    (groups,) = best_groups(shelf, 1, 5, Grouping("sku", size=3), SearchOptions())
    assert [[h.id for h in g.hits] for g in groups] == [[n, n + 1000, n + 2000] for n in range(5)]
    assert sum(n for _, n in shelf.asked) < 100
    assert not shelf.opened


def test_a_mean_counts_items_that_were_never_fetched() -> None:
    scores = [1.0, 0.9, 0.9] + [0.1] * 1000 + [0.0] * 1000 + [-1.0] * 3
    shelf = flat(scores, lambda n: "high" if n == 0 or n > 2002 else "good" if n < 3 else None)
    grouping = Grouping("sku", "mean", size=2)
    (groups,) = best_groups(shelf, 1, 1, grouping, SearchOptions())
    assert [(g.value, g.score) for g in groups] == [("good", 0.9)]
    assert max(n for _, n in shelf.asked) < 100
    (groups,) = best_groups(shelf, 1, 3000, grouping, SearchOptions())
    assert groups[-1].value == "high"
    assert groups[-1].score == pytest.approx(-0.5)
    assert [h.score for h in groups[-1].hits] == [1.0, -1.0]


def test_a_group_is_opened_once_and_only_if_it_may_win() -> None:
    shelf = flat([1 - n / 1000 for n in range(1000)], lambda n: n // 2)
    grouping = Grouping("sku", "mean")
    best_groups(shelf, 1, 5, grouping, SearchOptions())
    assert len(shelf.opened) == len(set(shelf.opened)) <= 7
    mixed = flat([1 - n / 1000 for n in range(1000)], lambda n: n % 50)
    best_groups(mixed, 1, 5, grouping, SearchOptions())
    assert len(mixed.asked) > 1
    assert sorted(mixed.opened) == list(range(50))


def test_all_rows_are_fetched_at_once_and_only_unsettled_ones_again() -> None:
    shelf = flat([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3], lambda n: None)
    tied = [Candidate(n, f"key{n}", 0.5, {}, str(n)) for n in range(20)]
    shelf.rows = [shelf.rows[0], tied, shelf.rows[0]]
    found = best_hits(shelf.fetch, 3, 2, SearchOptions())
    assert [[h.id for h in row] for row in found] == [[0, 1]] * 3
    assert shelf.asked == [([0, 1, 2], 3), ([1], 6), ([1], 12), ([1], 24)]


def test_no_queries_have_no_answers() -> None:
    shelf = Shelf(1, rows=0)
    assert best_hits(shelf.fetch, 0, 3, SearchOptions()) == []
    assert best_groups(shelf, 0, 3, Grouping("sku"), SearchOptions()) == []


@pytest.mark.parametrize(
    ("grouping", "message"),
    [
        (Grouping("sku", size=0), "size = 0"),
        (Grouping("sku", size=True), "size = True"),
        (Grouping("sku", score="median"), "'median'.*'best' or 'mean'"),  # type: ignore[arg-type]
    ],
)
def test_a_grouping_out_of_range_is_refused(grouping: Grouping, message: str) -> None:
    shelf = Shelf(1)
    with pytest.raises(InvalidParameterError, match=message):
        best_groups(shelf, 3, 1, grouping, SearchOptions())


def test_an_excluded_item_is_not_answered_however_many_are_excluded() -> None:
    shelf = flat([1 - n / 1000 for n in range(500)], lambda n: None)
    exclude: frozenset[ItemId] = frozenset(range(450))
    (hits,) = best_hits(shelf.fetch, 1, 2, SearchOptions(exclude=exclude))
    assert [h.id for h in hits] == [450, 451]
