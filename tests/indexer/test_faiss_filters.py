"""Search among some vectors only: nothing else is found, and recall stays."""

import faiss
import numpy as np
import pytest

from embedder.types import Embeddings
from indexer.index import faiss as engine
from indexer.index.faiss import count_of, positions_in
from tests.indexer.vectors import bitmap, clumped, unit
from tests.support.seams import Effort, SegmentIndex, plan_index, recall_at, tune

N, DIM = 6000, 32


@pytest.fixture(scope="module")
def gallery() -> Embeddings:
    return clumped(N, DIM)


@pytest.fixture(scope="module", params=["flat", "fp16", "hnsw", "ivf-pq", "ivf-rabitq"])
def index(request: pytest.FixtureRequest, gallery: Embeddings) -> SegmentIndex:
    plan = plan_index(N, DIM, kind=request.param, memory_mb=1000)
    return SegmentIndex.build(plan, gallery)


@pytest.fixture(autouse=True)
def _approximate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gallery this small would otherwise be compared with as a whole."""
    monkeypatch.setattr(engine, "EXACT_BELOW", 0)
    monkeypatch.setattr(engine, "SCAN_EXACT_PART", 0.02)


def filters(vectors: Embeddings) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(5).random(len(vectors))
    side = vectors @ unit(1, DIM, seed=3)[0]
    return {
        "half": draw < 0.5,
        "one in twenty": draw < 0.05,
        "one": np.arange(len(vectors)) == 77,
        "one side": side > np.quantile(side, 0.8),
        "the first": np.arange(len(vectors)) < len(vectors) // 3,
    }


@pytest.mark.parametrize("name", ["half", "one in twenty", "one", "one side", "the first"])
@pytest.mark.parametrize("rows", [1, 200])
def test_recall_stays_when_a_filter_leaves_only_some(
    index: SegmentIndex, gallery: Embeddings, name: str, rows: int
) -> None:
    queries = clumped(200, DIM, seed=9)
    tuned = tune(index, queries, 0.97)
    allowed = filters(gallery)[name]
    truth = index.exact(queries, 10, np.flatnonzero(allowed))[1]
    found = np.concatenate(
        [
            index.search(queries[start : start + rows], 10, tuned.effort, bitmap(allowed))[1]
            for start in range(0, len(queries), rows)
        ]
    )
    assert (allowed[found[found >= 0]]).all()
    assert ((found >= 0).sum(axis=1) == min(10, allowed.sum())).all()
    assert recall_at(found, truth[truth >= 0].reshape(len(truth), -1)) >= 0.97


def test_an_empty_filter_finds_nothing(index: SegmentIndex) -> None:
    scores, found = index.search(
        unit(3, DIM), 4, tune(index, unit(9, DIM), 0.5).effort, bitmap(np.zeros(N, bool))
    )
    assert (found == -1).all()
    assert (scores == -1).all()
    assert found.shape == (3, 4)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 1003])
def test_a_bitmap_is_its_positions_and_the_rest_of_its_last_byte_does_not_count(size: int) -> None:
    chosen = np.random.default_rng(size).random(size) < 0.3
    bits = bitmap(chosen)
    if size % 8:
        bits[-1] |= 255 << size % 8 & 255
    assert count_of(bits, size) == chosen.sum()
    assert positions_in(bits, size).tolist() == np.flatnonzero(chosen).tolist()


def test_a_bitmap_with_every_bit_set_finds_as_no_filter_does(index: SegmentIndex) -> None:
    queries = clumped(50, DIM, seed=4)
    effort = tune(index, queries, 0.97).effort
    every = np.full((N + 7) // 8, 255, np.uint8)
    free, filtered = index.search(queries, 10, effort), index.search(queries, 10, effort, every)
    assert recall_at(filtered[1], free[1]) >= 0.99


def test_exact_compares_with_more_positions_than_fit_one_chunk(
    monkeypatch: pytest.MonkeyPatch, gallery: Embeddings
) -> None:
    monkeypatch.setattr(engine, "CHUNK", 100)
    index = SegmentIndex.build(plan_index(N, DIM), gallery)
    chosen = np.random.default_rng(0).permutation(N)[:730]
    queries = unit(5, DIM, seed=8)
    scores, found = index.exact(queries, 25, chosen)
    products = queries @ gallery[np.sort(chosen)].T
    order = np.argsort(-products, axis=1, kind="stable")[:, :25]
    assert (found == np.sort(chosen)[order]).all()
    np.testing.assert_allclose(scores, np.take_along_axis(products, order, axis=1), atol=1e-6)


@pytest.fixture(params=["hnsw", "ivf-pq"])
def index_of_codes(request: pytest.FixtureRequest, gallery: Embeddings) -> SegmentIndex:
    return SegmentIndex.build(plan_index(N, DIM, kind=request.param, memory_mb=1000), gallery)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many queries FAISS was given at once, and for how many candidates of each."""
    calls: list[tuple[int, int]] = []
    search = faiss.IndexRefine.search_c

    def spy(index: faiss.Index, rows: int, queries: object, k: int, *places: object) -> None:
        calls.append((rows, k))
        search(index, rows, queries, k, *places)

    monkeypatch.setattr(faiss.IndexRefine, "search_c", spy)
    return calls


def test_a_search_that_would_look_at_more_than_it_is_to_choose_from_compares(
    index_of_codes: SegmentIndex, asked: list[tuple[int, int]]
) -> None:
    index = index_of_codes
    queries, some = unit(20, DIM, seed=2), np.arange(N) % 40 == 0
    effort = Effort(16, 64)
    found = index.search(queries, 100, effort, bitmap(some))
    assert (found[1] == index.exact(queries, 100, np.flatnonzero(some))[1]).all()
    free = index.search(queries, N // 60, effort)
    assert (free[1] == index.exact(queries, N // 60)[1]).all()
    assert asked == []
    index.search(queries, 1, Effort(16, 4))
    assert asked == [(20, 10)]


def test_an_effort_without_bound_is_no_more_than_the_greatest(
    index_of_codes: SegmentIndex,
) -> None:
    index = index_of_codes
    queries = unit(5, DIM, seed=2)
    found = index.search(queries, 3, Effort(99_999_999_999_999, 64))
    assert recall_at(found[1], index.exact(queries, 3)[1]) == 1.0


@pytest.mark.parametrize("share", [None, 0.5])
def test_queries_are_taken_in_parts_that_memory_holds(
    index_of_codes: SegmentIndex,
    asked: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    share: float | None,
) -> None:
    index = index_of_codes
    queries, effort = clumped(50, DIM, seed=2), Effort(16, 4)
    allowed = None if share is None else bitmap(np.random.default_rng(0).random(N) < share)
    whole = index.search(queries, 20, effort, allowed)
    asked.clear()
    monkeypatch.setattr(engine, "CHUNK_BYTES", 12 * 4 * 300)
    parts = index.search(queries, 20, effort, allowed)
    assert (whole[1] == parts[1]).all()
    assert len(asked) > 1
    assert all(rows == 1 or rows * k <= 300 for rows, k in asked)


def test_a_query_whose_surroundings_are_excluded_looks_further_before_it_looks_everywhere(
    index_of_codes: SegmentIndex, asked: list[tuple[int, int]], gallery: Embeddings
) -> None:
    index = index_of_codes
    query = clumped(1, DIM, seed=2)
    near = np.argsort(-(gallery @ query[0]))
    allowed = np.ones(N, bool)
    allowed[near[:100]] = False

    found = index.search(query, 10, Effort(16, 4), bitmap(allowed))
    assert allowed[found[1]].all()
    assert [k for _, k in asked] in ([31, 248], [31])
    if index.kind == "ivf-pq":
        assert len(asked) == 2
    else:  # in a graph of this size, looking further is as much work as comparing with all
        assert (found[1] == index.exact(query, 10, np.flatnonzero(allowed))[1]).all()
