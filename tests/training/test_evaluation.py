"""The figures of embeddings, against formulas written out as loops."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from kinlens.embedder.errors import DatasetError, EvaluationError
from kinlens.training.config.settings import Runtime
from kinlens.training.data.load import load_split
from kinlens.training.evaluation.evaluate import embed_with, evaluate_embeddings
from kinlens.training.evaluation.retrieval import GAIN, gain, retrieval
from kinlens.training.evaluation.structure import agreement, clustering, structure
from kinlens.training.report.plane import positions
from kinlens.training.studies.tables import paired_difference
from tests.training.jobs import small_job

KS = (1, 2, 4, 8, 10_000)
SCORES = "kinlens.training.evaluation.retrieval.SCORES"
TIE = 1e-5


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def random_set(
    count: int = 90, dim: int = 5, classes: int = 9, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return unit(rng.standard_normal((count, dim))), rng.integers(0, classes, count)


def good_set() -> tuple[np.ndarray, np.ndarray]:
    """Embeddings that are mostly right."""
    labels = np.random.default_rng(2).integers(0, 9, 90)
    return unit(np.eye(9)[labels] + 1.2 * random_set(dim=9)[0]), labels


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


@pytest.mark.parametrize("make", [random_set, good_set])
@pytest.mark.parametrize("scores", [1, 300, 1 << 20])
def test_retrieval_equals_a_naive_reference_whatever_the_blocks(
    make, scores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SCORES, scores)
    vectors, labels = make()
    vectors[10:40] = vectors[:30]  # ties, inside and across classes
    vectors.flags.writeable = labels.flags.writeable = False
    for sets in ((vectors, labels), (vectors[:30], labels[:30], vectors[20:], labels[20:])):
        found = retrieval(*sets, ks=KS)
        assert found.as_dict() == pytest.approx(naive(*sets), rel=1e-12)


def test_the_query_is_left_out_by_its_number_and_not_by_its_score() -> None:
    # All scores tie, so an evaluator that drops the first column may drop any image.
    vectors = np.ones((4, 1), dtype=np.float32)
    assert retrieval(vectors, np.zeros(4, int)).map_at_r == 100
    mixed = retrieval(vectors, np.array([0, 0, 1, 1]), ks=(1, 2, 3))
    assert mixed.as_dict() == {"R@1": 0, "R@2": 0, "R@3": 100, "MAP@R": 0}
    # A copy in the gallery counts as any other image.
    vectors, labels = unit(np.array([[1, 0], [1, 0], [1, 1], [1, 2]])), np.array([0, 0, 1, 0])
    found = retrieval(vectors[:1], labels[:1], vectors, labels, ks=(1,))
    assert found.as_dict() == {"R@1": 100, "MAP@R": pytest.approx(100 * 2 / 3)}


def test_queries_without_a_positive_are_left_out_and_counted() -> None:
    vectors, _ = random_set(6)
    lone = retrieval(vectors, np.array([5, 3, 3, 3, 9, 8]))
    assert lone.queries == 3
    absent = retrieval(vectors[:3], np.array([4, 3, 2]), vectors[3:], np.array([3, 3, 9]))
    assert absent.queries == 1
    with pytest.raises(DatasetError, match="recall is not defined"):
        retrieval(vectors, np.arange(6))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_tensor_is_ranked_where_it_lies_and_in_full_precision(device) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    vectors, labels = random_set(300, 64)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as a training may have set it
    try:
        found = retrieval(torch.from_numpy(vectors).to(device), labels, ks=KS)
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == retrieval(vectors, labels, ks=KS)


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


def test_f1_equals_a_loop_over_pairs() -> None:
    rng = np.random.default_rng(0)
    labels, clusters = rng.integers(0, 6, 60), rng.integers(-2, 3, 60)
    found = agreement(labels, clusters)
    assert found["F1"] == pytest.approx(naive_f1(labels, clusters), rel=1e-12)
    for same in (np.zeros(5, int), np.arange(5)):  # without entropy, or without pairs
        assert agreement(same, same) == {"NMI": pytest.approx(100), "F1": 100}


def test_separate_classes_are_found_by_any_name_also_with_one_image_each() -> None:
    vectors, labels = blobs()
    for step in (1, 8):
        found = clustering(vectors[::step], labels[::step])
        assert found == {"NMI": pytest.approx(100), "F1": 100}
    collapsed = clustering(np.ones((12, 3), np.float32), np.repeat(np.arange(4), 3))
    assert collapsed["NMI"] == pytest.approx(0)


def skewed_set(count: int = 50, dim: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((count, dim)) + 0.5
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    labels = rng.integers(0, 7, count)
    labels[0] = 99  # a class with one image
    return vectors.astype(np.float32), labels


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a.astype(float) - b.astype(float)) ** 2).sum()) / 2


def inner(group: np.ndarray) -> float:
    return float(np.mean([distance(a, b) for a, b in combinations(group, 2)]))


def test_uniformity_density_and_class_variance_equal_double_loops() -> None:
    vectors, labels = skewed_set()
    found = structure(vectors, labels)
    similar = np.mean([np.exp(-4 * distance(a, b)) for a, b in combinations(vectors, 2)])
    assert found["uniformity"] == pytest.approx(np.log(similar), abs=1e-6)

    groups = [vectors[labels == c] for c in np.unique(labels)]
    spreads = [inner(group) for group in groups if len(group) > 1]
    centres = np.array([group.mean(axis=0) for group in groups])
    between = inner(centres / np.linalg.norm(centres, axis=1, keepdims=True))
    assert found["density"] == pytest.approx(np.mean(spreads) / between, rel=1e-6)
    assert found["class_variance"] == pytest.approx(np.var(spreads), rel=1e-5)


@pytest.mark.parametrize("count", [4, 9000])
def test_spectral_decay_equals_the_divergence_of_the_spectrum(count) -> None:
    vectors, labels = skewed_set(count)
    labels[1:3] = 98
    values = np.linalg.svd(vectors.astype(float), compute_uv=False)
    parts = values / values.sum()
    naive = sum(np.log((1 / len(parts)) / part) / len(parts) for part in parts)
    assert structure(vectors, labels)["spectral_decay"] == pytest.approx(naive, rel=1e-5)


def test_what_has_no_figures_is_refused() -> None:
    for labels in (np.arange(5), np.zeros(5, int)):
        with pytest.raises(DatasetError, match="at least 2 classes"):
            structure(skewed_set(5)[0], labels)
    vectors, labels = random_set(10, classes=2)
    vectors[3, 1] = np.nan
    for measure in (retrieval, clustering, structure):
        with pytest.raises(EvaluationError, match="1 of 10 embeddings are not finite"):
            measure(vectors, labels)


def test_all_measures_come_in_one_call_and_retrieval_alone_asks_in_the_gallery() -> None:
    vectors, labels = random_set()
    split = vectors[:20], labels[:20], vectors[20:], labels[20:]
    for sets in ((vectors, labels), split):
        assert evaluate_embeddings(*sets, ks=(1, 10), seed=4) == {
            **retrieval(*sets, ks=(1, 10)).as_dict(),
            **clustering(vectors, labels, 4),
            **structure(vectors, labels),
        }
    assert list(evaluate_embeddings(vectors, labels, ks=(2,), full=False)) == ["R@2", "MAP@R"]


def memory_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


@pytest.mark.parametrize("measure", [retrieval, structure])
def test_memory_beside_the_embeddings_is_a_few_blocks(measure) -> None:
    vectors = np.random.default_rng(0).standard_normal((9_000, 8)).astype(np.float32)
    labels = np.arange(9_000) % 3_000
    measure(vectors[:3_000], labels[:3_000] % 750)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is in use
    except OSError as error:
        pytest.skip(f"the peak of a process cannot be reset here: {error}")
    before = memory_mb("VmRSS")
    measure(vectors, labels)
    assert memory_mb("VmHWM") - before < 150  # the whole matrix would be 324 MB


def ranks_of(right: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.where(right, 0, 3))


def test_images_of_a_class_stay_together_in_the_plane() -> None:
    labels = np.arange(60) % 4
    vectors = unit(np.eye(4)[labels] @ random_set(4, 16)[0] + 0.1 * random_set(60, 16)[0])
    plane = positions(vectors)
    assert plane.shape == (60, 2)
    distances = np.linalg.norm(plane[:, None] - plane, axis=2) + np.diag([np.inf] * 60)
    assert (labels[distances.argmin(axis=1)] == labels).mean() > 0.9
    assert np.array_equal(positions(vectors), plane)
    assert np.isfinite(positions(vectors[:2])).all()


def test_the_interval_of_a_gain_is_that_of_paired_changes_with_classes_as_units() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.random(40) < 0.4, rng.random(40) < 0.7
    labels = np.arange(40)
    found = gain(ranks_of(before), ranks_of(after), labels)
    mean, half = paired_difference(100.0 * after, 100.0 * before)
    assert [found[name] for name in GAIN] == pytest.approx([mean - half, mean + half])
    # More photos of the same products, answered alike, make nobody surer.
    twice = gain(*(ranks_of(np.repeat(x, 2)) for x in (before, after)), np.repeat(labels, 2))
    assert twice == pytest.approx(found)


def test_queries_without_an_answer_and_comparisons_without_a_pair_have_no_gain() -> None:
    before, after = torch.tensor([0, 2, -1, 0]), torch.tensor([0, 0, -1, 1])
    found = gain(before, after, np.array([0, 0, 1, 2]))
    assert found == pytest.approx(gain(before[[0, 1, 3]], after[[0, 1, 3]], np.array([0, 0, 2])))
    assert gain(None, after, np.arange(4)) == gain(before, after, np.zeros(4, int)) == {}


@pytest.mark.parametrize(("device", "sizes"), [("cpu", [16, 16, 4]), ("auto", [36])])
def test_images_are_embedded_in_batches_that_suit_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, sizes: list[int]
) -> None:
    job = small_job(tmp_path / "products")
    images = load_split(job.data.model_copy(update={"views": 12})).train
    found = []

    def embed(batch: np.ndarray) -> np.ndarray:
        found.append(len(batch))
        return batch.reshape(len(batch), -1)[:, :2].astype(np.float32)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    runtime = Runtime(workers=0, device=device)
    vectors = embed_with({"": embed}, images, job.input.preprocessing(), runtime)[""]
    assert len(vectors) == len(images)
    assert found == sizes
