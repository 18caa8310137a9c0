from itertools import combinations

import numpy as np
import pytest

from embedder.errors import DatasetError, EvaluationError
from training.evaluation.structure import (
    Structure,
    class_variance,
    density,
    density_pairs,
    spectral_decay,
    structure,
    uniformity,
)


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
    vectors, _ = random_set()
    naive = np.mean([np.exp(-4 * distance(a, b)) for a, b in combinations(vectors, 2)])
    assert uniformity(vectors) == pytest.approx(np.log(naive), abs=1e-6)


def test_density_equals_a_double_loop_over_classes() -> None:
    vectors, labels = random_set()
    groups = members(vectors, labels)
    inside = np.mean([inner(group) for group in groups if len(group) > 1])
    centres = [group.mean(axis=0) for group in groups]
    between = inner(np.array([centre / np.linalg.norm(centre) for centre in centres]))
    assert density(vectors, labels) == pytest.approx(inside / between, rel=1e-6)


def test_density_of_pairs_equals_a_double_loop_over_images() -> None:
    vectors, labels = random_set()
    pairs = list(combinations(range(len(labels)), 2))
    inside, between = (
        np.mean([distance(vectors[i], vectors[j]) for i, j in pairs if same(labels[i], labels[j])])
        for same in (np.equal, np.not_equal)
    )
    assert density_pairs(vectors, labels) == pytest.approx(inside / between, rel=1e-6)


def test_class_variance_equals_a_double_loop() -> None:
    vectors, labels = random_set()
    sizes = [inner(group) for group in members(vectors, labels) if len(group) > 1]
    assert class_variance(vectors, labels) == pytest.approx(np.var(sizes), rel=1e-5)


@pytest.mark.parametrize("count", [4, 50])
def test_spectral_decay_equals_the_divergence_of_the_spectrum(count) -> None:
    vectors, _ = random_set(count)
    values = np.linalg.svd(vectors.astype(float), compute_uv=False)
    parts = values / values.sum()
    naive = sum(np.log((1 / len(parts)) / part) / len(parts) for part in parts)
    assert spectral_decay(vectors) == pytest.approx(naive, rel=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 49, 50, 1000])
def test_the_chunk_changes_nothing(rows) -> None:
    vectors, labels = random_set()
    whole = structure(vectors, labels).as_dict()
    assert structure(vectors, labels, chunk_rows=rows).as_dict() == pytest.approx(whole, abs=1e-6)
    assert spectral_decay(vectors, rows) == pytest.approx(whole["spectral_decay"], abs=1e-9)


def test_uniformity_of_some_rows_is_that_of_their_pairs() -> None:
    vectors, _ = random_set()
    pairs = [(i, j) for i, j in combinations(range(50), 2) if i < 11]
    naive = np.mean([np.exp(-4 * distance(vectors[i], vectors[j])) for i, j in pairs])
    assert uniformity(vectors, rows=11, chunk_rows=4) == pytest.approx(np.log(naive), abs=1e-6)


def test_the_structure_is_that_of_its_parts_and_of_no_norm() -> None:
    vectors, labels = random_set()
    parts = {
        "uniformity": uniformity(vectors),
        "density": density(vectors, labels),
        "density_pairs": density_pairs(vectors, labels),
        "spectral_decay": spectral_decay(vectors),
        "class_variance": class_variance(vectors, labels),
    }
    assert structure(vectors, labels).as_dict() == parts
    scales = np.linspace(0.1, 9, 50, dtype=np.float32)[:, None]
    assert structure(vectors * scales, labels).as_dict() == pytest.approx(parts, rel=1e-5)


def test_the_axes_are_uniform_in_spectrum() -> None:
    assert spectral_decay(np.eye(8, dtype=np.float32)) == pytest.approx(0, abs=1e-12)


def test_a_spread_embedding_is_more_uniform_than_a_narrow_one() -> None:
    vectors, _ = random_set()
    assert uniformity(vectors) < uniformity(vectors + 2) < 0


def test_equal_vectors_have_finite_figures() -> None:
    vectors = np.tile(random_set()[0][:1], (12, 1))
    found = structure(vectors, np.repeat(np.arange(4), 3))
    assert found.uniformity == pytest.approx(0, abs=1e-6)
    assert found.density == pytest.approx(0, abs=1e-6)
    assert found.density_pairs == pytest.approx(0, abs=1e-6)
    assert found.class_variance == pytest.approx(0, abs=1e-12)
    assert 5 < found.spectral_decay < 16


def test_equally_large_classes_have_no_variance() -> None:
    vectors = np.concatenate([np.eye(6), np.eye(6)[[1, 2, 3, 4, 5, 0]]]).astype(np.float32)
    labels = np.tile(np.arange(6), 2)
    assert class_variance(vectors, labels) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("labels", [np.arange(5), np.zeros(5, int)])
def test_too_few_classes_or_images_are_refused(labels) -> None:
    with pytest.raises(DatasetError, match="at least 2 classes"):
        structure(random_set(5)[0], labels)


def test_embeddings_that_are_not_finite_are_refused() -> None:
    vectors, labels = random_set()
    vectors[2] = np.nan
    with pytest.raises(EvaluationError, match="1 of 50"):
        structure(vectors, labels)


def test_results_check_themselves() -> None:
    with pytest.raises(ValueError, match="Not finite"):
        Structure(float("nan"), 1, 1, 1, 1)
