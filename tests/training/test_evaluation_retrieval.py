import numpy as np
import pytest
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

from embedder.errors import DatasetError, EvaluationError
from training.evaluation.retrieval import retrieval

KS = (1, 2, 4, 8, 10_000)
TIE = 1e-5


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def random_set(
    count: int = 90, dim: int = 5, classes: int = 9, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return unit(rng.standard_normal((count, dim))), rng.integers(0, classes, count)


def tied_set(count: int = 90) -> tuple[np.ndarray, np.ndarray]:
    """Few directions, so that most scores are ties, inside and across classes."""
    rng = np.random.default_rng(1)
    directions = unit(rng.standard_normal((12, 4)))
    return directions[rng.integers(0, 12, count)], rng.integers(0, 9, count)


def naive(
    queries: np.ndarray,
    labels: np.ndarray,
    gallery: np.ndarray | None = None,
    gallery_labels: np.ndarray | None = None,
) -> dict[str, float]:
    own = gallery is None
    if gallery is None or gallery_labels is None:
        gallery, gallery_labels = queries, labels
    hits: dict[int, list[bool]] = {k: [] for k in KS}
    precisions = []
    for i in range(len(queries)):
        scores = {j: float(queries[i] @ gallery[j]) for j in range(len(gallery))}
        if own:
            del scores[i]
        positives = sorted((s for j, s in scores.items() if gallery_labels[j] == labels[i]))[::-1]
        negatives = [s for j, s in scores.items() if gallery_labels[j] != labels[i]]
        if not positives:
            continue
        ranks = [n + sum(x >= s - TIE for x in negatives) for n, s in enumerate(positives)]
        for k in KS:
            hits[k].append(ranks[0] < k)
        found = [(n + 1) / (r + 1) for n, r in enumerate(ranks) if r < len(positives)]
        precisions.append(sum(found) / len(positives))
    recall = {f"R@{k}": 100 * float(np.mean(hits[k])) for k in KS}
    return recall | {"MAP@R": 100 * float(np.mean(precisions))}


@pytest.mark.parametrize("make", [random_set, tied_set])
@pytest.mark.parametrize("scores", [1, 300, 700, 1 << 20])
def test_self_retrieval_equals_a_naive_reference_whatever_the_blocks(make, scores) -> None:
    vectors, labels = make()
    found = retrieval(vectors, labels, ks=KS, scores_at_a_time=scores)
    assert found.as_dict() == pytest.approx(naive(vectors, labels), rel=1e-12)


@pytest.mark.parametrize("make", [random_set, tied_set])
@pytest.mark.parametrize("scores", [1, 300, 1 << 20])
def test_query_and_gallery_equal_a_naive_reference(make, scores) -> None:
    vectors, labels = make()
    sets = vectors[:30], labels[:30], vectors[20:], labels[20:]
    found = retrieval(*sets, ks=KS, scores_at_a_time=scores)
    assert found.as_dict() == pytest.approx(naive(*sets), rel=1e-12)


def test_classes_of_half_the_images_equal_a_naive_reference() -> None:
    vectors, labels = random_set(classes=2)
    found = retrieval(vectors, labels, ks=KS)
    assert found.as_dict() == pytest.approx(naive(vectors, labels), rel=1e-12)


def test_good_embeddings_equal_a_naive_reference() -> None:
    labels = np.random.default_rng(2).integers(0, 9, 90)
    vectors = unit(np.eye(9)[labels] + 1.2 * random_set(dim=9)[0])
    found = retrieval(vectors, labels, ks=KS)
    assert 20 < found.map_at_r < 99
    assert found.as_dict() == pytest.approx(naive(vectors, labels))


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_map_at_r_equals_that_of_pytorch_metric_learning(spread) -> None:
    labels = np.random.default_rng(3).integers(0, 12, 200)
    vectors = unit(np.eye(12)[labels] + spread * random_set(200, 12)[0])
    names = ("mean_average_precision_at_r", "precision_at_1")
    peer = AccuracyCalculator(include=names, k="max_bin_count")
    theirs = peer.get_accuracy(vectors, labels)
    ours = retrieval(vectors, labels)
    assert ours.map_at_r == pytest.approx(100 * theirs["mean_average_precision_at_r"], abs=1e-4)
    assert ours.recall[1] == pytest.approx(100 * theirs["precision_at_1"], abs=1e-4)
    theirs = peer.get_accuracy(vectors[:50], labels[:50], vectors[50:], labels[50:], False)
    ours = retrieval(vectors[:50], labels[:50], vectors[50:], labels[50:])
    assert ours.map_at_r == pytest.approx(100 * theirs["mean_average_precision_at_r"], abs=1e-4)


def test_the_query_is_left_out_by_its_number_and_not_by_its_score() -> None:
    # All scores tie, so an evaluator that drops the first column may drop any image.
    vectors = np.ones((4, 1), dtype=np.float32)
    assert retrieval(vectors, np.zeros(4, int)).map_at_r == 100
    mixed = retrieval(vectors, np.array([0, 0, 1, 1]), ks=(1, 2, 3))
    assert mixed.as_dict() == {"R@1": 0, "R@2": 0, "R@3": 100, "MAP@R": 0}


def test_ties_count_against_us() -> None:
    vectors = np.array([[1, 0], [1, 0], [1, 0]], dtype=np.float32)
    assert retrieval(vectors, np.array([0, 0, 1]), ks=(1, 2)).recall == {1: 0.0, 2: 100.0}


def test_rounding_decides_nothing() -> None:
    vectors = np.array([[1, 0], [1, 0], [1, 3e-4]], dtype=np.float32)
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        found = retrieval(vectors[order], np.array([0, 1, 0])[order], ks=(1,))
        assert found.recall == {1: 0.0}


def test_a_copy_in_the_gallery_counts_as_any_other_image() -> None:
    vectors = unit(np.array([[1, 0], [1, 0], [1, 1], [1, 2]]))
    labels = np.array([0, 0, 1, 0])
    found = retrieval(vectors[:1], labels[:1], vectors, labels, ks=(1,))
    assert found.as_dict() == {"R@1": 100, "MAP@R": pytest.approx(100 * 2 / 3)}


def test_queries_without_a_positive_are_left_out_and_counted() -> None:
    vectors, _ = random_set(6)
    lone = retrieval(vectors, np.array([5, 3, 3, 3, 9, 8]))
    assert (lone.queries, lone.without_positive) == (3, 3)
    absent = retrieval(vectors[:3], np.array([4, 3, 2]), vectors[3:], np.array([3, 3, 9]))
    assert (absent.queries, absent.without_positive) == (1, 2)


def test_the_order_of_the_images_changes_nothing() -> None:
    vectors, labels = tied_set()
    order = np.random.default_rng(4).permutation(len(labels))
    shuffled = retrieval(vectors[order], labels[order], ks=KS)
    assert shuffled.as_dict() == pytest.approx(retrieval(vectors, labels, ks=KS).as_dict())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_tensor_is_ranked_where_it_lies_and_in_full_precision(device) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    vectors, labels = random_set(300, 64)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as a training may have set it
    try:
        found = retrieval(torch.from_numpy(vectors).to(device), labels, ks=KS)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == retrieval(vectors, labels, ks=KS)


def test_arrays_that_may_not_be_written_are_read() -> None:
    vectors, labels = random_set()
    expected = retrieval(vectors, labels)
    vectors.flags.writeable = labels.flags.writeable = False
    assert retrieval(vectors, labels) == expected
    assert retrieval(vectors, labels, vectors, labels).without_positive == 0


@pytest.mark.parametrize("broken", ["queries", "gallery"])
def test_embeddings_that_are_not_finite_are_refused(broken) -> None:
    sets = {"queries": random_set(10)[0], "gallery": random_set(10, seed=1)[0]}
    sets[broken][3, 1] = np.nan
    labels = np.zeros(10, int)
    with pytest.raises(EvaluationError, match="1 of 10 embeddings are not finite"):
        retrieval(sets["queries"], labels, sets["gallery"], labels)


def test_no_positive_at_all_is_an_error() -> None:
    with pytest.raises(DatasetError, match="recall is not defined"):
        retrieval(np.eye(3, dtype=np.float32), np.arange(3))


def test_what_a_caller_gets_wrong_is_a_value_error() -> None:
    vectors, labels = random_set(10)
    with pytest.raises(ValueError, match="start at 1"):
        retrieval(vectors, labels, ks=(0,))
    with pytest.raises(ValueError, match="go together"):
        retrieval(vectors, labels, vectors)
    with pytest.raises(ValueError, match=r"expected \(N, D\)"):
        retrieval(vectors, labels[:9])
