from itertools import combinations

import numpy as np
import pytest

from embedder.errors import EvaluationError
from training.evaluation.clustering import agreement, clustering


def blobs(classes: int = 5, each: int = 8, spread: float = 0.01) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(classes), each) * 10 + 3
    centres = rng.standard_normal((classes, 6))
    vectors = np.repeat(centres, each, axis=0) + spread * rng.standard_normal((classes * each, 6))
    return vectors.astype(np.float32), labels


def naive_f1(labels: np.ndarray, clusters: np.ndarray) -> float:
    pairs = list(combinations(range(len(labels)), 2))
    in_class = {(i, j) for i, j in pairs if labels[i] == labels[j]}
    in_cluster = {(i, j) for i, j in pairs if clusters[i] == clusters[j]}
    precision = len(in_class & in_cluster) / len(in_cluster)
    recall = len(in_class & in_cluster) / len(in_class)
    return 100 * 2 * precision * recall / (precision + recall)


def naive_nmi(labels: np.ndarray, clusters: np.ndarray) -> float:
    def part(mask: np.ndarray) -> float:
        return float(np.mean(mask))

    information = entropy = 0.0
    for c in np.unique(labels):
        entropy -= part(labels == c) * np.log(part(labels == c))
        for w in np.unique(clusters):
            both = part((labels == c) & (clusters == w))
            if both:
                independent = part(labels == c) * part(clusters == w)
                information += both * np.log(both / independent)
    for w in np.unique(clusters):
        entropy -= part(clusters == w) * np.log(part(clusters == w))
    return 100 * 2 * information / entropy


@pytest.mark.parametrize("seed", range(4))
def test_nmi_and_f1_equal_naive_references(seed) -> None:
    rng = np.random.default_rng(seed)
    labels, clusters = rng.integers(0, 6, 60), rng.integers(-2, 3, 60)
    found = agreement(labels, clusters)
    assert found["F1"] == pytest.approx(naive_f1(labels, clusters), rel=1e-12)
    assert found["NMI"] == pytest.approx(naive_nmi(labels, clusters), rel=1e-9)


def test_names_of_clusters_do_not_matter_and_equal_partitions_have_100() -> None:
    labels = np.array([0, 0, 1, 1, 2])
    same = agreement(labels, np.array([7, 7, -1, -1, 3]))
    assert same == {"NMI": pytest.approx(100), "F1": 100}


@pytest.mark.parametrize("labels", [np.zeros(5, int), np.arange(5)])
def test_partitions_without_entropy_or_without_pairs_are_defined(labels) -> None:
    same = agreement(labels, labels)
    assert same == {"NMI": pytest.approx(100), "F1": 100}


def test_one_cluster_for_all_says_nothing() -> None:
    labels = np.repeat(np.arange(4), 3)
    found = agreement(labels, np.zeros(12, int))
    assert found["NMI"] == pytest.approx(0)
    assert found["F1"] == pytest.approx(naive_f1(labels, np.zeros(12, int)))


def test_separate_classes_are_found() -> None:
    vectors, labels = blobs()
    found = clustering(vectors, labels)
    assert found == {"NMI": pytest.approx(100), "F1": 100}


def test_mixed_classes_are_between_0_and_100() -> None:
    found = clustering(*blobs(spread=1.5))
    assert 10 < found["F1"] < 90
    assert 10 < found["NMI"] < 95


def test_the_seed_decides() -> None:
    vectors, labels = blobs(12, 8, spread=1.0)
    assert clustering(vectors, labels, seed=3) == clustering(vectors, labels, seed=3)
    assert len({clustering(vectors, labels, seed)["F1"] for seed in range(4)}) > 1


def test_many_classes_start_from_random_embeddings(monkeypatch) -> None:
    vectors, labels = blobs(12, 8, spread=1.0)
    by_distance = clustering(vectors, labels)
    monkeypatch.setattr("training.evaluation.clustering.MOST_CLASSES_FOR_PLUS_PLUS", 11)
    assert clustering(vectors, labels) != by_distance


def test_a_collapsed_network_gets_figures_and_no_warning() -> None:
    labels = np.repeat(np.arange(4), 3)
    found = clustering(np.ones((12, 3), np.float32), labels)
    assert found["NMI"] == pytest.approx(0)


def test_classes_with_one_image_are_clustered() -> None:
    vectors, labels = blobs()
    found = clustering(vectors[::8], labels[::8])
    assert found == {"NMI": pytest.approx(100), "F1": 100}


def test_embeddings_that_are_not_finite_are_refused() -> None:
    vectors, labels = blobs()
    vectors[0, 0] = np.inf
    with pytest.raises(EvaluationError, match="1 of 40"):
        clustering(vectors, labels)
