"""Large groups: their means are exact, take little memory, and end as soon as nobody waits."""

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from indexer.filters.tree import Range
from indexer.gallery import Gallery
from indexer.types import Entry, Grouping, SearchOptions
from tests.support.seams import CatalogView

COUNT, DIM = 20_000, 32
MEAN = Grouping("class", "mean")


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """One class, three quarters of it in a segment; some items are removed."""
    made = Gallery.create(tmp_path_factory.mktemp("one") / "g", name="g", bundle_id="a", dim=DIM)
    vectors = np.random.default_rng(0).standard_normal((COUNT, DIM)).astype("f4")
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    entries = [
        Entry(
            f"k{n}",
            v,
            f"{n % 15_000:064x}",
            {"class": "shoes", "price": n, "tenth": n % 10, "pair": n // 2},
        )
        for n, v in enumerate(vectors)
    ]
    made.add(entries[: COUNT * 3 // 4])
    made.compact(wait=True)
    made.add(entries[COUNT * 3 // 4 :])
    made.remove([f"k{n}" for n in range(100, 200)])
    return made


def expected(gallery: Gallery, query: np.ndarray, options: SearchOptions) -> tuple[str, float]:
    """The best item and the mean of all that fit, of copies the best alone."""
    scores: dict[str, tuple[float, str]] = {}
    for e in (e for part in gallery.scan() for e in part):
        if options.where is None or options.where.matches(e.attributes):
            found = float(np.clip(e.vector @ query, -1, 1)), e.key
            same = e.sha256 if options.distinct else e.key
            scores[same] = max(scores.get(same, found), found)
    return max(scores.values())[1], math.fsum(s for s, _ in scores.values()) / len(scores)


def query_of(gallery: Gallery) -> np.ndarray:
    [entry] = gallery.entries(["k7"])
    return np.asarray(entry.vector)


@pytest.mark.parametrize("where", [None, Range("price", at_least=150, below=19_000)])
@pytest.mark.parametrize("distinct", [False, True])
def test_a_mean_is_over_segment_and_delta_without_the_removed_and_the_unfit(
    gallery: Gallery, where: Range | None, distinct: bool
) -> None:
    query, options = query_of(gallery), SearchOptions(where=where, distinct=distinct)
    [[group]] = gallery.search_groups(query[None], 5, MEAN, options)
    key, mean = expected(gallery, query, options)
    assert group.score == pytest.approx(mean, abs=1e-6)
    assert [hit.key for hit in group.hits] == [key]


@pytest.mark.parametrize(
    ("grouping", "k", "rows"),
    [
        (MEAN, 5, 100),  # a mean reads no row of what is not shown
        (Grouping("tenth", size=3), 5, 100),  # as many of a group as it shows
        (Grouping("tenth", "mean", size=3), 10, 150),
        (Grouping("pair", "mean"), 5, 1000),  # a group that cannot win is not opened
        (Grouping("tenth"), 50, 1000),  # groups that are not there are not sought in every item
    ],
)
def test_groups_read_few_rows(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, grouping: Grouping, k: int, rows: int
) -> None:
    read: list[int] = []
    rows_of = CatalogView.rows

    def counted(self: CatalogView, ids, seq):
        read.append(len(ids))
        return rows_of(self, ids, seq)

    monkeypatch.setattr(CatalogView, "rows", counted)
    [groups] = gallery.search_groups(query_of(gallery)[None], k, grouping)
    assert groups
    assert 0 < sum(read) < rows


def test_a_mean_needs_less_memory_than_the_vectors_of_the_group(gallery: Gallery) -> None:
    query = query_of(gallery)[None]
    gallery.search_groups(query, 5, MEAN)
    tracemalloc.start()
    gallery.search_groups(query, 5, MEAN)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < COUNT * DIM * 4


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("score", ["best", "mean"])
def test_a_search_ends_at_the_first_checkpoint_that_raises(
    gallery: Gallery, score: str, distinct: bool
) -> None:
    query, calls = query_of(gallery)[None], 0

    class OverError(Exception):
        pass

    def checkpoint(last: float) -> None:
        nonlocal calls
        calls += 1
        if calls > last:
            raise OverError

    grouping = replace(MEAN, score=score)
    options = SearchOptions(distinct=distinct, checkpoint=lambda: checkpoint(math.inf))
    gallery.search_groups(query, 5, grouping, options)
    needed = calls
    assert needed >= (COUNT // 5000 if score == "mean" else 1)
    for last in range(needed):
        calls = 0
        options = replace(options, checkpoint=lambda last=last: checkpoint(last))
        with pytest.raises(OverError):
            gallery.search_groups(query, 5, grouping, options)
        assert calls == last + 1
