"""Means of large groups: exact, in little memory, and ended as soon as nobody waits."""

import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from indexer.filters.tree import Range
from indexer.gallery import Gallery
from indexer.live.ranking import mean_of
from indexer.types import Entry, Grouping, SearchOptions
from tests.support.seams import CatalogView, Members, contents_of

COUNT, DIM = 20_000, 32
MEAN = Grouping("class", "mean")


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """One class, three quarters of it in a segment; some items are removed."""
    made = Gallery.create(tmp_path_factory.mktemp("one") / "g", name="g", bundle_id="a", dim=DIM)
    vectors = np.random.default_rng(0).standard_normal((COUNT, DIM)).astype("f4")
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    entries = [
        Entry(f"k{n}", v, f"{n % 15_000:064x}", {"class": "shoes", "price": n})
        for n, v in enumerate(vectors)
    ]
    made.add(entries[: COUNT * 3 // 4])
    made.compact(wait=True)
    made.add(entries[COUNT * 3 // 4 :])
    made.remove([f"k{n}" for n in range(100, 200)])
    return made


def expected(gallery: Gallery, query: np.ndarray, kept: Callable[[Entry], bool]) -> float:
    entries = [e for part in gallery.scan() for e in part if kept(e)]
    return math.fsum(float(np.clip(e.vector @ query, -1, 1)) for e in entries) / len(entries)


def query_of(gallery: Gallery) -> np.ndarray:
    [entry] = gallery.entries(["k7"])
    return np.asarray(entry.vector)


def test_a_mean_is_over_segment_and_delta_without_the_removed_and_the_unfit(
    gallery: Gallery,
) -> None:
    query = query_of(gallery)
    for where in (None, Range("price", at_least=150, below=19_000)):
        [[group]] = gallery.search_groups(query[None], 5, MEAN, SearchOptions(where=where))
        found = expected(gallery, query, lambda e, w=where: w is None or w.matches(e.attributes))
        assert group.score == pytest.approx(found, abs=1e-6)
        assert [hit.key for hit in group.hits] == (["k7"] if where is None else [best(gallery)])


def best(gallery: Gallery) -> str:
    where = Range("price", at_least=150, below=19_000)
    [[hit]] = gallery.search(query_of(gallery)[None], 1, SearchOptions(where=where, exact=True))
    return hit.key


def test_a_mean_reads_no_row_of_what_is_not_shown(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    get = CatalogView.get

    def counted(self: CatalogView, ids):
        read.append(len(ids))
        return get(self, ids)

    monkeypatch.setattr(CatalogView, "get", counted)
    gallery.search_groups(query_of(gallery)[None], 5, MEAN)
    assert sum(read) < 100


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


def members(scores: list[float], contents: list[int]) -> Members:
    ids = np.arange(len(scores), dtype=np.int64)
    return Members("a", ids, np.array(scores), contents_of([f"{c:064x}" for c in contents]))


def test_copies_count_once_with_their_best_score_across_blocks() -> None:
    blocks = [members([0.5, 0.25], [1, 2]), members([0.75, 0.0], [1, 3])]
    assert mean_of(blocks, SearchOptions(distinct=True)) == (0.75 + 0.25 + 0.0) / 3
    assert mean_of(blocks, SearchOptions()) == (0.5 + 0.25 + 0.75 + 0.0) / 4


def test_known_scores_stay_and_the_excluded_go() -> None:
    found = members([0.5, 0.25, 0.1], [1, 2, 3])
    left = found.left({1: 0.26, 9: 0.9}, SearchOptions(exclude=frozenset({0})))
    assert (left.ids.tolist(), left.scores.tolist()) == ([1, 2], [0.26, 0.1])
