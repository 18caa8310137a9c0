"""Search by a segment's index: right, deterministic, full precision, and careful with its file."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
import pytest

from embedder.errors import GalleryCorruptError, InvalidParameterError
from embedder.types import Embeddings
from indexer.index.plan import Plan
from tests.indexer.conftest import small_files
from tests.indexer.vectors import bitmap, clumped, unit
from tests.support.seams import Effort, SegmentIndex, plan_index, recall_at

KINDS = ("flat", "fp16", "hnsw", "ivf-pq", "ivf-rabitq")
CODED = KINDS[1:]
N, DIM = 3000, 32
EFFORTS = {
    "flat": Effort(0, 1),
    "fp16": Effort(0, 4),
    "hnsw": Effort(64, 4),
    "ivf-pq": Effort(32, 16),
    "ivf-rabitq": Effort(32, 32),
}
EXHAUSTIVE = {
    "flat": Effort(0, 1),
    "fp16": Effort(0, 64),
    "hnsw": Effort(4096, 64),
    "ivf-pq": Effort(4096, 64),
    "ivf-rabitq": Effort(4096, 64),
}


def plan_of(kind: str, vectors: Embeddings) -> Plan:
    return plan_index(*vectors.shape, kind=kind, memory_mb=1000)


def built(kind: str, vectors: Embeddings) -> SegmentIndex:
    return SegmentIndex.build(plan_of(kind, vectors), vectors)


@pytest.fixture(scope="module")
def gallery() -> Embeddings:
    return clumped(N, DIM)


@pytest.fixture(scope="module")
def queries() -> Embeddings:
    return clumped(100, DIM, seed=9)


@pytest.fixture(scope="module", params=KINDS)
def index(request: pytest.FixtureRequest, gallery: Embeddings) -> SegmentIndex:
    return built(request.param, gallery)


@pytest.mark.parametrize("k", [1, 10, 150, 300, 1000])
def test_the_flat_answer_is_that_of_a_full_sort(k: int) -> None:
    vectors, queries = unit(300), unit(7, seed=1)
    scores, positions = built("flat", vectors).search(queries, k, Effort(0))
    exact = queries @ vectors.T
    order = np.argsort(-exact, axis=1, kind="stable")[:, :k]
    assert (positions == order).all()
    np.testing.assert_allclose(scores, np.take_along_axis(exact, order, axis=1), atol=1e-6)


def test_every_kind_finds_the_true_neighbours(index: SegmentIndex, queries: Embeddings) -> None:
    truth = index.exact(queries, 10)[1]
    found = index.search(queries, 10, EFFORTS[index.kind])[1]
    assert recall_at(found, truth) >= 0.97


def test_scores_are_those_of_the_full_vectors(
    index: SegmentIndex, gallery: Embeddings, queries: Embeddings
) -> None:
    scores, positions = index.search(queries, 10, EFFORTS[index.kind])
    expected = np.einsum("qd,qkd->qk", queries, gallery[positions])
    np.testing.assert_allclose(scores, expected, atol=2e-6)
    assert (np.diff(scores) <= 0).all()


def test_a_batch_gives_the_answers_of_single_searches(
    index: SegmentIndex, queries: Embeddings
) -> None:
    scores, positions = index.search(queries[:33], 10, EFFORTS[index.kind])
    for row, query in enumerate(queries[:33]):
        single = index.search(query[None], 10, EFFORTS[index.kind])
        np.testing.assert_allclose(single[0][0], scores[row], atol=2e-6)
        assert recall_at(single[1], positions[row : row + 1]) == 1.0


def test_equal_scores_are_ordered_by_position(index: SegmentIndex, gallery: Embeddings) -> None:
    copies = np.random.default_rng(2).permutation(N)[:40]
    vectors = gallery.copy()
    vectors[copies] = unit(1, DIM, seed=77)
    tied = built(index.kind, vectors)
    scores, found = tied.search(unit(1, DIM, seed=77), 60, EXHAUSTIVE[index.kind])
    assert found[0, :40].tolist() == sorted(copies.tolist())
    assert (scores[0, 40:] < scores[0, 39]).all()


def test_k_beyond_the_size_gives_everything(index: SegmentIndex, queries: Embeddings) -> None:
    scores, positions = index.search(queries[:2], 10 * N, EFFORTS[index.kind])
    assert scores.shape == positions.shape == (2, N)
    assert (np.sort(positions, axis=1) == np.arange(N)).all()


def test_an_answer_is_full_even_where_the_effort_is_too_small(
    index: SegmentIndex, queries: Embeddings
) -> None:
    positions = index.search(queries, 200, Effort(1, 1))[1]
    assert (positions >= 0).all()
    assert all(len(set(row)) == 200 for row in positions.tolist())


def test_no_queries_give_an_empty_answer(index: SegmentIndex) -> None:
    for search in (
        index.search(np.empty((0, DIM), np.float32), 5, Effort(1)),
        index.search(np.empty((0, DIM), np.float32), 5, Effort(1), bitmap(np.ones(N, bool))),
        index.exact(np.empty((0, DIM), np.float32), 5),
        index.exact(np.empty((0, DIM), np.float32), 5, np.arange(3)),
    ):
        assert [part.shape for part in search] == [(0, 5), (0, 5)]


def test_scores_stay_within_minus_one_and_one() -> None:
    vectors = unit(500, 512)
    index = built("flat", np.concatenate([vectors, -vectors]))
    scores, positions = index.search(vectors, 1000, Effort(0))
    assert scores.max() <= 1.0
    assert scores.min() >= -1.0
    assert (positions[:, 0] == np.arange(500)).all()


@pytest.mark.parametrize("k", [0, -1])
def test_k_below_one_is_refused(k: int) -> None:
    with pytest.raises(InvalidParameterError, match=rf"k = {k} is too small.*at least 1"):
        built("flat", unit(3)).search(unit(1), k, Effort(0))


@pytest.mark.parametrize("shape", [(1, 15), (16,), (1, 16, 1)])
def test_vectors_of_another_dimension_are_refused(shape: tuple[int, ...]) -> None:
    index, wrong = built("flat", unit(3)), np.zeros(shape, np.float32)
    for ask in (
        lambda: index.search(wrong, 1, Effort(0)),
        lambda: index.exact(wrong, 1),
        lambda: SegmentIndex.build(plan_index(3, 16), wrong),
    ):
        with pytest.raises(InvalidParameterError, match=r"shape \(.*do not fit.*dimension 16"):
            ask()


def test_a_single_query_runs_on_one_thread() -> None:
    faiss.omp_set_num_threads(4)
    built("flat", unit(3)).search(unit(1), 1, Effort(0))
    assert faiss.omp_get_max_threads() == 1


def test_searches_at_once_with_different_parameters_give_the_same_answers(
    index: SegmentIndex, queries: Embeddings
) -> None:
    half = np.arange(N) < N // 2
    asked = [
        (Effort(1 + 7 * (i % 5), 1 + i % 3), bitmap(np.roll(half, 200 * i)) if i % 2 else None)
        for i in range(len(queries))
    ]

    def ask(number: int) -> list[int]:
        effort, allowed = asked[number]
        found: list[int] = index.search(queries[number : number + 1], 10, effort, allowed)[1][0]
        return list(found)

    alone = [ask(number) for number in range(len(queries))]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(len(queries)))) == alone


@pytest.mark.parametrize("kind", CODED)
def test_a_saved_index_is_mapped_and_answers_as_before(
    tmp_path: Path, kind: str, gallery: Embeddings, queries: Embeddings
) -> None:
    index = built(kind, gallery)
    facts = index.save(tmp_path / "index")
    assert (tmp_path / "index").stat().st_size == facts.bytes > 0
    opened = SegmentIndex.open(index.kind, gallery, tmp_path / "index")
    assert (opened.size, opened.dim) == (N, DIM)
    for allowed in (None, bitmap(np.arange(N) % 2 == 0)):
        before = index.search(queries, 10, EFFORTS[kind], allowed)
        after = opened.search(queries, 10, EFFORTS[kind], allowed)
        assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert (opened.vectors(np.array([5, 0, 5])) == gallery[[5, 0, 5]]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_extended_index_finds_the_vectors_that_came_last(
    kind: str, gallery: Embeddings, queries: Embeddings
) -> None:
    plan = plan_of(kind, gallery)
    index = SegmentIndex.build(plan, gallery[:-300]).extended(plan, gallery)
    assert index.size == N
    found = index.search(gallery[-300:], 1, EFFORTS[kind])[1][:, 0]
    assert (found == np.arange(N - 300, N)).mean() >= 0.99


@pytest.mark.parametrize("has_one_level", [True, False])
def test_a_graph_of_the_gpu_answers_on_the_cpu_with_the_mapped_vectors(
    tmp_path: Path, gallery: Embeddings, queries: Embeddings, has_one_level: bool
) -> None:
    graph = faiss.IndexHNSWCagra(DIM, 16, faiss.METRIC_INNER_PRODUCT)
    graph.add(gallery)
    graph.base_level_only = has_one_level
    index = SegmentIndex("cagra", gallery, graph)
    facts = index.save(tmp_path / "index")
    assert facts.bytes < gallery.nbytes * 1.5  # the graph alone
    opened = SegmentIndex.open("cagra", gallery, tmp_path / "index")
    half = np.arange(N) % 2 == 0
    for allowed, positions in ((None, None), (bitmap(half), np.flatnonzero(half))):
        found = opened.search(queries, 10, Effort(64), allowed)
        truth = opened.exact(queries, 10, positions)
        assert recall_at(found[1], truth[1]) >= 0.97
        np.testing.assert_allclose(found[0][:, 0], truth[0][:, 0], atol=2e-6)


@pytest.mark.parametrize("limit", [100, 60_000])
def test_a_full_disk_is_noticed_when_saving(tmp_path: Path, limit: int) -> None:
    index = built("fp16", unit(2000))
    with small_files(limit), pytest.raises(OSError, match="too large"):
        index.save(tmp_path / "index")


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("keep", [0, 3, 50, 500, -1])
def test_a_truncated_index_is_refused(tmp_path: Path, kind: str, keep: int) -> None:
    path, vectors = tmp_path / "index", unit(700)
    index = built(kind, vectors)
    index.save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(GalleryCorruptError, match=r"index .*kinlens-index compact GALLERY"):
        SegmentIndex.open(index.kind, vectors, path)


def test_what_is_no_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is not an index")
    for name in ("text", "gone"):
        with pytest.raises(GalleryCorruptError, match="not a readable index"):
            SegmentIndex.open("fp16", unit(3), tmp_path / name)


def test_an_index_of_other_vectors_or_another_kind_is_refused(tmp_path: Path) -> None:
    vectors, path = unit(700), tmp_path / "index"
    built("fp16", vectors).save(path)
    with pytest.raises(GalleryCorruptError, match=r"holds 700 vectors.*has 699 of length 16"):
        SegmentIndex.open("fp16", vectors[:-1], path)
    with pytest.raises(GalleryCorruptError, match=r"IndexScalarQuantizer.*of kind hnsw"):
        SegmentIndex.open("hnsw", vectors, path)


def test_a_flat_index_has_no_codes_to_save(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="keep its vectors"):
        built("flat", unit(3)).save(tmp_path / "index")


@pytest.mark.parametrize("kind", ["ivf-pq", "ivf-rabitq"])
def test_lists_that_are_found_through_a_graph_answer_as_well(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    gallery: Embeddings,
    queries: Embeddings,
) -> None:
    monkeypatch.setattr("indexer.index.kinds.COARSE_HNSW_FROM", 16)
    index = built(kind, gallery)
    index.save(tmp_path / "index")
    opened = SegmentIndex.open(index.kind, gallery, tmp_path / "index")
    codes = faiss.read_index(str(tmp_path / "index"))
    assert isinstance(faiss.downcast_index(codes.quantizer), faiss.IndexHNSW)
    found = opened.search(queries, 10, EFFORTS[kind])[1]
    assert recall_at(found, opened.exact(queries, 10)[1]) >= 0.97
    every = opened.search(queries[:3], N, EFFORTS[kind])[1]
    assert (np.sort(every, axis=1) == np.arange(N)).all()


TORCH_HAS_CHANGED_FAISS = """
import faiss.contrib.torch_utils
import numpy as np
from indexer.index.faiss import SegmentIndex
from indexer.index.kinds import Effort
from indexer.index.plan import plan_index
vectors = np.random.default_rng(0).standard_normal((2000, 16)).astype(np.float32)
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
for kind in ("flat", "fp16", "hnsw", "ivf-pq"):
    plan = plan_index(2000, 16, kind=kind)
    index = SegmentIndex.build(plan, vectors)
    scores, positions = index.search(vectors[:30], 1, Effort(64, 8))
    assert (positions[:, 0] == np.arange(30)).mean() > 0.9, kind
    index.exact(vectors[:30], 5)
print("same answers")
"""


def test_an_index_answers_where_a_library_for_metric_learning_has_changed_faiss() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TORCH_HAS_CHANGED_FAISS], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "same answers"
