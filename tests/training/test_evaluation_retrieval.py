import numpy as np
import pytest
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

from embedder.errors import DatasetError, EvaluationError
from training.evaluation.ranking import Ranks, SortedGallery
from training.evaluation.retrieval import Retrieval, recall_at, retrieval

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
    ignore: bool = False,
    rows: int | None = None,
) -> dict[str, float]:
    own = gallery is None
    if gallery is None or gallery_labels is None:
        gallery, gallery_labels = queries, labels
    hits: dict[int, list[bool]] = {k: [] for k in KS}
    precisions = []
    for i in range(len(queries) if rows is None else rows):
        scores = {j: float(queries[i] @ gallery[j]) for j in range(len(gallery))}
        if own:
            del scores[i]
        if ignore:
            scores = {j: score for j, score in scores.items() if score < 1 - TIE}
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


@pytest.mark.parametrize("duplicates", ["keep", "ignore"])
@pytest.mark.parametrize("make", [random_set, tied_set])
def test_self_retrieval_equals_a_naive_reference(make, duplicates) -> None:
    vectors, labels = make()
    found = retrieval(vectors, labels, ks=KS, duplicates=duplicates)
    assert found.as_dict() == pytest.approx(naive(vectors, labels, ignore=duplicates == "ignore"))


@pytest.mark.parametrize("duplicates", ["keep", "ignore"])
@pytest.mark.parametrize("make", [random_set, tied_set])
def test_query_and_gallery_equal_a_naive_reference(make, duplicates) -> None:
    vectors, labels = make()
    sets = vectors[:30], labels[:30], vectors[20:], labels[20:]
    found = retrieval(*sets, ks=KS, duplicates=duplicates)
    assert found.as_dict() == pytest.approx(naive(*sets, ignore=duplicates == "ignore"))


@pytest.mark.parametrize("make", [random_set, tied_set])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 3), (3, 50), (90, 90), (1000, 1000)])
def test_the_chunks_change_nothing(make, rows, columns) -> None:
    vectors, labels = make()
    chunked = retrieval(vectors, labels, ks=KS, chunk_rows=rows, chunk_columns=columns)
    assert chunked.as_dict() == pytest.approx(naive(vectors, labels))


def test_classes_larger_than_a_chunk_equal_a_naive_reference() -> None:
    vectors, labels = random_set(classes=2)
    found = retrieval(vectors, labels, ks=KS, chunk_rows=4, chunk_columns=8)
    assert found.as_dict() == pytest.approx(naive(vectors, labels))


def test_good_embeddings_equal_a_naive_reference() -> None:
    labels = np.random.default_rng(2).integers(0, 9, 90)
    vectors = unit(np.eye(9)[labels] + 1.2 * random_set(dim=9)[0])
    found = retrieval(vectors, labels, ks=KS, chunk_rows=16, chunk_columns=16)
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


def test_a_copy_counts_or_is_left_out_by_the_policy() -> None:
    vectors = unit(np.array([[1, 0], [1, 0], [1, 1], [1, 2]]))
    labels = np.array([0, 0, 1, 0])
    kept = retrieval(vectors, labels, ks=(1,), rows=1)
    ignored = retrieval(vectors, labels, ks=(1,), rows=1, duplicates="ignore")
    assert kept.as_dict() == {"R@1": 100, "MAP@R": 50}
    assert ignored.as_dict() == {"R@1": 0, "MAP@R": 0}


def test_a_copy_in_another_class_is_left_out_too() -> None:
    vectors = unit(np.array([[1, 0], [1, 0], [1, 1]]))
    labels = np.array([0, 1, 0])
    assert retrieval(vectors, labels, ks=(1,), rows=1).recall[1] == 0
    assert retrieval(vectors, labels, ks=(1,), rows=1, duplicates="ignore").recall[1] == 100


def test_copies_alone_leave_no_positive() -> None:
    vectors = np.tile(unit(np.ones((1, 3))), (4, 1))
    with pytest.raises(DatasetError, match="not copies of one"):
        retrieval(vectors, np.array([0, 0, 1, 1]), duplicates="ignore")


def test_only_the_first_rows_ask_among_all() -> None:
    vectors, labels = random_set()
    found = retrieval(vectors, labels, ks=KS, rows=25, chunk_rows=8)
    assert found.queries + found.without_positive == 25
    assert found.as_dict() == pytest.approx(naive(vectors, labels, rows=25))


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


def test_recall_at_is_the_recall_of_retrieval() -> None:
    vectors, labels = tied_set()
    found = retrieval(vectors, labels)
    short = recall_at(vectors, labels)
    assert short.at == found.recall
    assert (short.queries, short.without_positive) == (found.queries, found.without_positive)


def test_progress_adds_up_to_the_queries() -> None:
    vectors, labels = random_set()
    steps: list[int] = []
    retrieval(vectors, labels, chunk_rows=40, on_rows=steps.append)
    assert steps == [40, 40, 10]


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


def test_copies_are_not_looked_for_without_unit_norm() -> None:
    vectors, labels = random_set()
    vectors[7] *= 2
    with pytest.raises(EvaluationError, match=r"1 of 90 embeddings have another norm.*2\.000"):
        retrieval(vectors, labels, duplicates="ignore")


def test_what_a_caller_gets_wrong_is_a_value_error() -> None:
    vectors, labels = random_set(10)
    with pytest.raises(ValueError, match="start at 1"):
        retrieval(vectors, labels, ks=(0,))
    with pytest.raises(ValueError, match="go together"):
        retrieval(vectors, labels, vectors)
    with pytest.raises(ValueError, match=r"expected \(N, D\)"):
        retrieval(vectors, labels[:9])


def test_results_check_themselves() -> None:
    with pytest.raises(ValueError, match="Recall falls"):
        Retrieval({1: 50.0, 2: 40.0}, 10.0, 5, 0)
    with pytest.raises(ValueError, match="percentages"):
        Retrieval({1: 50.0}, 101.0, 5, 0)
    with pytest.raises(ValueError, match="0 queries"):
        Retrieval({1: 50.0}, 10.0, 0, 5)
    import torch

    with pytest.raises(ValueError, match="rank without"):
        Ranks(torch.tensor([0]), torch.tensor([0.5]), torch.tensor([0]))
    with pytest.raises(ValueError, match="places"):
        SortedGallery(np.ones((2, 2), np.float32), np.arange(3), np.arange(2))
