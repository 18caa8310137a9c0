from itertools import combinations

import numpy as np
import pytest

from embedder.errors import DatasetError, EvaluationError
from training.evaluation.structure import structure


def random_set(count: int = 50, dim: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((count, dim)) + 0.5
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    labels = rng.integers(0, 7, count)
    labels[0] = 99  # a class with one image
    return vectors.astype(np.float32), labels


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a.astype(float) - b.astype(float)) ** 2).sum()) / 2


def members(vectors: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    return [vectors[labels == c] for c in np.unique(labels)]


def inner(group: np.ndarray) -> float:
    return float(np.mean([distance(a, b) for a, b in combinations(group, 2)]))


def test_uniformity_equals_a_double_loop() -> None:
    vectors, labels = random_set()
    naive = np.mean([np.exp(-4 * distance(a, b)) for a, b in combinations(vectors, 2)])
    assert structure(vectors, labels)["uniformity"] == pytest.approx(np.log(naive), abs=1e-6)


def test_density_equals_a_double_loop_over_classes() -> None:
    vectors, labels = random_set()
    groups = members(vectors, labels)
    inside = np.mean([inner(group) for group in groups if len(group) > 1])
    centres = [group.mean(axis=0) for group in groups]
    between = inner(np.array([centre / np.linalg.norm(centre) for centre in centres]))
    assert structure(vectors, labels)["density"] == pytest.approx(inside / between, rel=1e-6)


def test_density_of_pairs_equals_a_double_loop_over_images() -> None:
    vectors, labels = random_set()
    pairs = list(combinations(range(len(labels)), 2))
    inside, between = (
        np.mean([distance(vectors[i], vectors[j]) for i, j in pairs if same(labels[i], labels[j])])
        for same in (np.equal, np.not_equal)
    )
    assert structure(vectors, labels)["density_pairs"] == pytest.approx(inside / between, rel=1e-6)


def test_class_variance_equals_a_double_loop() -> None:
    vectors, labels = random_set()
    sizes = [inner(group) for group in members(vectors, labels) if len(group) > 1]
    assert structure(vectors, labels)["class_variance"] == pytest.approx(np.var(sizes), rel=1e-5)


@pytest.mark.parametrize("count", [4, 50, 9000])
def test_spectral_decay_equals_the_divergence_of_the_spectrum(count) -> None:
    vectors, labels = random_set(count)
    labels[1:3] = 98
    values = np.linalg.svd(vectors.astype(float), compute_uv=False)
    parts = values / values.sum()
    naive = sum(np.log((1 / len(parts)) / part) / len(parts) for part in parts)
    assert structure(vectors, labels)["spectral_decay"] == pytest.approx(naive, rel=1e-5)


@pytest.mark.parametrize("scores", [1, 350, 2450, 2500])
def test_the_block_changes_nothing(scores) -> None:
    vectors, labels = random_set()
    whole = structure(vectors, labels)
    assert structure(vectors, labels, scores_at_a_time=scores) == pytest.approx(whole, abs=1e-6)


def test_the_norm_of_a_vector_changes_nothing() -> None:
    vectors, labels = random_set()
    scales = np.linspace(0.1, 9, 50, dtype=np.float32)[:, None]
    whole = structure(vectors, labels)
    assert structure(vectors * scales, labels) == pytest.approx(whole, rel=1e-5)


def test_the_axes_are_uniform_in_spectrum() -> None:
    found = structure(np.eye(8, dtype=np.float32), np.arange(8) // 2)
    assert found["spectral_decay"] == pytest.approx(0, abs=1e-12)


def test_a_spread_embedding_is_more_uniform_than_a_narrow_one() -> None:
    vectors, labels = random_set()
    spread, narrow = structure(vectors, labels), structure(vectors + 2, labels)
    assert spread["uniformity"] < narrow["uniformity"] < 0


def test_equal_vectors_have_finite_figures() -> None:
    vectors = np.tile(random_set()[0][:1], (12, 1))
    found = structure(vectors, np.repeat(np.arange(4), 3))
    assert found["uniformity"] == pytest.approx(0, abs=1e-6)
    assert found["density"] == pytest.approx(0, abs=1e-6)
    assert found["density_pairs"] == pytest.approx(0, abs=1e-6)
    assert found["class_variance"] == pytest.approx(0, abs=1e-12)
    assert 5 < found["spectral_decay"] < 16


def test_equally_large_classes_have_no_variance() -> None:
    vectors = np.concatenate([np.eye(6), np.eye(6)[[1, 2, 3, 4, 5, 0]]]).astype(np.float32)
    labels = np.tile(np.arange(6), 2)
    assert structure(vectors, labels)["class_variance"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("labels", [np.arange(5), np.zeros(5, int)])
def test_too_few_classes_or_images_are_refused(labels) -> None:
    with pytest.raises(DatasetError, match="at least 2 classes"):
        structure(random_set(5)[0], labels)


def test_embeddings_that_are_not_finite_are_refused() -> None:
    vectors, labels = random_set()
    vectors[2] = np.nan
    with pytest.raises(EvaluationError, match="1 of 50"):
        structure(vectors, labels)
