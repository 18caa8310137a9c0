"""Exact search: right, deterministic, and careful with its file."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
import pytest

from embedder.errors import GalleryCorruptError, InvalidParameterError
from embedder.types import Embeddings
from indexer.engine import VectorStore
from indexer.faiss_engine import FaissStore
from tests.indexer.conftest import small_files


def unit(count: int, dim: int = 16, seed: int = 0) -> Embeddings:
    rows = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def filled(vectors: Embeddings, ids: np.ndarray | None = None) -> VectorStore:
    store = FaissStore.create(vectors.shape[1])
    store.add(np.arange(len(vectors)) if ids is None else ids, vectors)
    return store


@pytest.mark.parametrize("k", [1, 10, 150, 300])
def test_the_answer_is_that_of_a_full_sort(k: int) -> None:
    vectors, queries = unit(300), unit(7, seed=1)
    scores, ids = filled(vectors).search(queries, k)
    exact = queries @ vectors.T
    order = np.argsort(-exact, axis=1, kind="stable")[:, :k]
    assert (ids == order).all()
    np.testing.assert_allclose(scores, np.take_along_axis(exact, order, axis=1), atol=1e-6)


def test_a_batch_of_33_equals_33_single_searches_bit_by_bit() -> None:
    store, queries = filled(unit(2000, 64)), unit(33, 64, seed=1)
    scores, ids = store.search(queries, 50)
    for row, query in enumerate(queries):
        single_scores, single_ids = store.search(query[None], 50)
        assert (single_scores[0] == scores[row]).all()
        assert (single_ids[0] == ids[row]).all()


@pytest.mark.parametrize("k", [1, 5, 99, 100, 101, 140, 400])
def test_ties_are_ordered_and_cut_by_id(k: int) -> None:
    vectors = unit(400)
    copies = np.random.default_rng(2).permutation(400)[:150]
    vectors[copies] = vectors[copies[0]]
    ids = np.random.default_rng(3).permutation(400)
    scores, found = filled(vectors, ids).search(vectors[copies[:1]], k)
    tied = np.sort(ids[copies])
    assert found[0, :150].tolist() == tied[:k].tolist()
    assert (np.diff(scores[0]) <= 0).all()


def test_k_beyond_the_size_gives_everything() -> None:
    scores, ids = filled(unit(5)).search(unit(2, seed=1), 1000)
    assert scores.shape == ids.shape == (2, 5)
    assert np.sort(ids, axis=1).tolist() == [[0, 1, 2, 3, 4]] * 2


def test_scores_stay_within_minus_one_and_one() -> None:
    vectors = unit(500, 512)
    scores, ids = filled(np.concatenate([vectors, -vectors])).search(vectors, 1000)
    assert scores.max() <= 1.0
    assert scores.min() >= -1.0
    assert (ids[:, 0] == np.arange(500)).all()


def test_an_empty_store_and_no_queries_give_empty_answers() -> None:
    assert FaissStore.create(16).search(unit(3), 5)[1].shape == (3, 0)
    assert filled(unit(4)).search(unit(3)[:0], 5)[1].shape == (0, 4)


@pytest.mark.parametrize("k", [0, -1])
def test_k_below_one_is_refused(k: int) -> None:
    with pytest.raises(InvalidParameterError, match=rf"k = {k} is too small.*at least 1"):
        filled(unit(3)).search(unit(1), k)


@pytest.mark.parametrize("shape", [(1, 15), (16,), (1, 16, 1)])
def test_vectors_of_another_dimension_are_refused_by_both(shape: tuple[int, ...]) -> None:
    store = filled(unit(3))
    with pytest.raises(InvalidParameterError, match=r"shape \(.*do not fit.*dimension 16"):
        store.search(np.zeros(shape, np.float32), 1)
    with pytest.raises(InvalidParameterError, match="dimension 16"):
        store.add(np.arange(1), np.zeros(shape, np.float32))


def test_vectors_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="not finite"):
        filled(unit(3)).search(np.full((1, 16), np.nan, np.float32), 1)


def test_a_single_query_runs_on_one_thread() -> None:
    faiss.omp_set_num_threads(4)
    filled(unit(3)).search(unit(1), 1)
    assert faiss.omp_get_max_threads() == 1


def test_searches_at_once_give_the_same_answers() -> None:
    store, queries = filled(unit(3000, 32)), unit(64, 32, seed=1)
    _, expected = store.search(queries, 20)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda q: store.search(q[None], 20)[1][0], queries))
    assert np.array_equal(np.stack(found), expected)


def test_a_saved_store_is_read_back_with_its_numbers(tmp_path: Path) -> None:
    vectors, ids = unit(20), np.arange(20)[::-1] * 10
    filled(vectors, ids).save(tmp_path / "index")
    loaded = FaissStore.load(tmp_path / "index")
    assert (loaded.size, loaded.dim) == (20, 16)
    assert (loaded.vectors(ids) == vectors).all()
    assert loaded.search(vectors, 1)[1][:, 0].tolist() == ids.tolist()


def test_a_full_disk_is_noticed_when_saving(tmp_path: Path) -> None:
    with small_files(100), pytest.raises(OSError, match="too large"):
        filled(unit(3)).save(tmp_path / "index")


@pytest.mark.parametrize("keep", [0, 3, 50, 500, -1])
def test_a_truncated_index_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "index"
    filled(unit(20)).save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(GalleryCorruptError, match=r"index is not a readable index.*Build"):
        FaissStore.load(path)


def test_what_is_no_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is not an index")
    for name in ("text", "gone"):
        with pytest.raises(GalleryCorruptError, match="not a readable index"):
            FaissStore.load(tmp_path / name)


@pytest.mark.parametrize(
    "index",
    [faiss.IndexFlatIP(4), faiss.IndexIDMap2(faiss.IndexFlatL2(4)), faiss.IndexHNSWFlat(4, 8)],
    ids=["no numbers", "distances", "graph"],
)
def test_another_kind_of_index_is_refused(tmp_path: Path, index: faiss.Index) -> None:
    faiss.write_index(index, str(tmp_path / "index"))
    with pytest.raises(GalleryCorruptError, match="another kind of index"):
        FaissStore.load(tmp_path / "index")
