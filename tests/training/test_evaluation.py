import numpy as np
import pytest

from embedder.errors import DatasetError, EvaluationError
from training.evaluation.retrieval import recall_at


def random_set(count: int = 120, dim: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((count, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), rng.integers(0, 12, count)


def naive(vectors: np.ndarray, labels: np.ndarray, k: int) -> float:
    right = []
    for i in range(len(vectors)):
        others = [j for j in range(len(vectors)) if j != i]
        # A negative with the score of a positive ranks before it.
        others.sort(key=lambda j: (-float(vectors[i] @ vectors[j]), labels[j] == labels[i]))
        if any(labels[j] == labels[i] for j in others):
            right.append(any(labels[j] == labels[i] for j in others[:k]))
    return 100 * float(np.mean(right))


def test_it_equals_a_naive_reference() -> None:
    vectors, labels = random_set()
    recall = recall_at(vectors, labels, (1, 2, 4, 8))
    for k in (1, 2, 4, 8):
        assert recall.at[k] == pytest.approx(naive(vectors, labels, k))


@pytest.mark.parametrize("rows", [1, 7, 120, 1000])
def test_the_chunk_does_not_change_the_result(rows: int) -> None:
    vectors, labels = random_set()
    assert recall_at(vectors, labels, chunk_rows=rows).at == recall_at(vectors, labels).at


def test_ties_count_against_us() -> None:
    vectors = np.array([[1, 0], [1, 0], [1, 0]], dtype=np.float32)
    recall = recall_at(vectors, np.array([0, 0, 1]), (1, 2))
    assert recall.at == {1: 0.0, 2: 100.0}


def test_rounding_decides_nothing() -> None:
    vectors = np.array([[1, 0], [1, 0], [1, 3e-4]], dtype=np.float32)
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        assert recall_at(vectors[order], np.array([0, 1, 0])[order], (1,)).at == {1: 0.0}


def test_a_query_without_a_positive_is_left_out_and_counted() -> None:
    vectors = np.eye(3, dtype=np.float32)
    vectors[1] = vectors[0]
    recall = recall_at(vectors, np.array([0, 0, 1]), (1,))
    assert recall.at == {1: 100.0}
    assert (recall.queries, recall.without_positive) == (2, 1)


def test_embeddings_that_are_not_finite_are_refused() -> None:
    vectors, labels = random_set()
    vectors[3, 1] = np.nan
    with pytest.raises(EvaluationError, match="1 of 120 embeddings are not finite"):
        recall_at(vectors, labels)


def test_no_positive_at_all_is_an_error() -> None:
    with pytest.raises(DatasetError, match="recall is not defined"):
        recall_at(np.eye(3, dtype=np.float32), np.arange(3))
