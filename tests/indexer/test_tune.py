"""Tuning: the least effort that reaches the target, measured honestly."""

import numpy as np
import pytest

from embedder.errors import RecallError
from embedder.types import Embeddings
from indexer.types import Ids, Scores
from tests.indexer.vectors import clumped, unit
from tests.support.seams import Effort, SegmentIndex, plan_index, recall_at, tune

N, DIM = 6000, 32


def index_of(kind: str, vectors: Embeddings) -> SegmentIndex:
    return SegmentIndex.build(plan_index(*vectors.shape, kind=kind, memory_mb=1000), vectors)


class StepIndex:
    """Finds the truth from some effort on, and nothing before; remembers what was asked."""

    def __init__(self, kind: str, enough: int, k_factor: int = 0, nlist: int = 0) -> None:
        self.kind, self.size, self.nlist = kind, 100_000, nlist
        self._enough, self._k_factor = enough, k_factor
        self.asked: list[Effort] = []

    def exact(self, queries: Embeddings, k: int) -> tuple[Scores, Ids]:
        shape = (len(queries), k)
        return np.full(shape, 0.5, np.float32), np.zeros(shape, np.int64)

    def search(self, queries: Embeddings, k: int, effort: Effort) -> tuple[Scores, Ids]:
        self.asked.append(effort)
        scores, ids = self.exact(queries, k)
        is_found = effort.value >= self._enough and effort.k_factor >= self._k_factor
        return scores - (not is_found), ids


def test_recall_is_the_part_of_the_truth_that_was_found() -> None:
    truth = np.array([[1, 2], [3, 4]])
    assert recall_at(truth, truth) == 1.0
    assert recall_at(np.array([[2, 1, 9], [9, 8, 4]]), truth) == 0.75
    assert recall_at(np.array([[-1, -1], [5, 6]]), truth) == 0.0
    assert recall_at(np.empty((2, 0), np.int64), np.empty((2, 0), np.int64)) == 1.0


@pytest.mark.parametrize("kind", ["flat", "fp16", "hnsw", "ivf-pq", "ivf-rabitq"])
@pytest.mark.parametrize("target", [0.9, 0.98])
def test_the_tuned_effort_reaches_the_target_with_queries_it_has_not_seen(
    kind: str, target: float
) -> None:
    vectors = clumped(N, DIM)
    index = index_of(kind, vectors[:-500])
    tuned = tune(index, vectors[-500:-250], target)
    assert target <= tuned.recall <= 1
    fresh = vectors[-250:]
    found = index.search(fresh, 10, tuned.effort)[1]
    assert recall_at(found, index.exact(fresh, 10)[1]) >= target - 0.01


def test_flat_is_exact_and_needs_no_effort() -> None:
    tuned = tune(index_of("flat", unit(1000)), unit(50, seed=1), 1.0)
    assert (tuned.effort, tuned.recall) == (Effort(0, 1), 1.0)


@pytest.mark.parametrize("enough", [1, 16, 17, 100, 1000, 4096])
def test_no_much_smaller_effort_would_do(enough: int) -> None:
    index = StepIndex("hnsw", enough)
    tuned = tune(index, unit(20), 0.9)  # type: ignore[arg-type]
    assert enough <= tuned.effort.value <= max(16, enough * 9 // 8 + 1)


def test_a_greater_k_factor_is_tried_where_the_small_one_is_not_enough() -> None:
    index = StepIndex("ivf-pq", 8, k_factor=32, nlist=64)
    tuned = tune(index, unit(20), 0.9)  # type: ignore[arg-type]
    assert tuned.effort.value == 8
    assert tuned.effort.k_factor >= 32


def test_a_missed_target_is_refused_with_what_was_reached() -> None:
    index = StepIndex("hnsw", 10**9)
    with pytest.raises(RecallError, match=r"hnsw finds 0\.0000.*target is 0\.95.*--target-recall"):
        tune(index, unit(20), 0.95)  # type: ignore[arg-type]
    assert max(effort.value for effort in index.asked) == 4096


def test_a_real_index_that_is_too_coarse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.index.kinds.IvfRabitq.k_factors", (1,))
    index = index_of("ivf-rabitq", unit(3000, 16))
    with pytest.raises(RecallError, match=r"ivf-rabitq finds 0\.\d{4}.*--index"):
        tune(index, unit(100, 16, seed=1), 0.98)


def test_equal_vectors_may_stand_for_each_other() -> None:
    vectors = np.repeat(unit(20, 16), 100, axis=0)
    index = index_of("hnsw", vectors)
    assert tune(index, unit(20, 16) * np.float32(1), 0.98).recall >= 0.98


def test_a_segment_smaller_than_k_can_be_tuned() -> None:
    assert tune(index_of("hnsw", unit(4)), unit(4), 0.98).recall == 1.0


class PartialIndex(StepIndex):
    """From an effort of 64 on finds all of the truth; before, nothing for one query in thirty."""

    def search(self, queries: Embeddings, k: int, effort: Effort) -> tuple[Scores, Ids]:
        scores, ids = self.exact(queries, k)
        self.asked.append(effort)
        if effort.value < 64:
            scores[::30] -= 1
        return scores, ids


def test_neighbours_that_are_missed_together_do_not_count_as_many_measurements() -> None:
    index = PartialIndex("hnsw", 0)
    tuned = tune(index, unit(120), 0.96)  # type: ignore[arg-type]
    assert tuned.effort.value > 32
    assert tuned.recall == 1.0
