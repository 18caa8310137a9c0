"""The thread that owns an engine: one thread alone, whole batches, every caller his own answer."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from embedder.errors import EngineUnavailableError
from embedder.types import Embeddings
from indexer.index import gpu
from indexer.types import Ids, Scores
from tests.support.seams import GpuThread

DIM = 4


class FakeEngine:
    """Answers with what was asked; can be held up, and fails for an effort of 13."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.batches: list[tuple[int, int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_busy = threading.Event()

    def make(self) -> Callable[[Embeddings, int, int], tuple[Scores, Ids]]:
        self.threads.add(threading.get_ident())
        return self.search

    def search(self, queries: Embeddings, k: int, effort: int) -> tuple[Scores, Ids]:
        self.threads.add(threading.get_ident())
        self.batches.append((len(queries), k, effort))
        self.is_busy.set()
        self.gate.wait()
        if effort == 13:
            raise RuntimeError("out of memory")
        first = queries[:, :1].astype(np.int64)
        return np.full((len(queries), k), effort, np.float32), first + np.arange(k)


def rows(*values: int) -> Embeddings:
    return np.full((len(values), DIM), np.array(values)[:, None], np.float32)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def test_everything_runs_in_one_thread_that_is_not_the_callers(engine: FakeEngine) -> None:
    owner = GpuThread(engine.make)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: owner.search(rows(n), 3, 5), range(50)))
    owner.close()
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_every_caller_gets_his_own_rows(engine: FakeEngine) -> None:
    owner = GpuThread(engine.make)
    asked = [[100 * n + i for i in range(n % 4)] for n in range(60)]

    def ask(values: list[int]) -> list[list[int]]:
        found: list[list[int]] = owner.search(rows(*values), 1 + len(values), 5)[1].tolist()
        return found

    with ThreadPoolExecutor(16) as pool:
        for values, found in zip(asked, pool.map(ask, asked), strict=True):
            assert found == [[value + j for j in range(1 + len(values))] for value in values]
    owner.close()


def held_up(
    engine: FakeEngine, owner: GpuThread, requests: list[tuple[Embeddings, int, int]]
) -> list[object]:
    """The answers (or errors) of requests that all came in while the engine was busy."""
    engine.gate.clear()
    with ThreadPoolExecutor(len(requests) + 1) as pool:
        first = pool.submit(owner.search, rows(0), 1, 1)
        engine.is_busy.wait()
        waiting = [pool.submit(owner.search, *request) for request in requests]
        while owner._requests.qsize() < len(requests):
            threading.Event().wait(0.001)
        engine.gate.set()
        first.result()
        return [future.exception() or future.result() for future in waiting]


def test_what_waits_is_answered_in_one_batch(engine: FakeEngine) -> None:
    owner = GpuThread(engine.make)
    held_up(engine, owner, [(rows(n, n), 3, 5) for n in range(10)])
    assert engine.batches == [(1, 1, 1), (20, 3, 5)]
    owner.close()


def test_requests_with_other_parameters_are_not_mixed(engine: FakeEngine) -> None:
    owner = GpuThread(engine.make)
    asked = [(rows(1), 3, 5), (rows(2), 4, 5), (rows(3), 3, 6), (rows(4), 3, 5)]
    held_up(engine, owner, asked)
    assert sorted(engine.batches[1:]) == [(1, 3, 6), (1, 4, 5), (2, 3, 5)]
    owner.close()


def test_a_batch_ends_at_its_limit(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MAX_ROWS", 4)
    owner = GpuThread(engine.make)
    held_up(engine, owner, [(rows(1, 2, 3), 3, 5)] * 4)
    assert [count for count, *_ in engine.batches[1:]] == [6, 6]
    owner.close()


def test_an_error_reaches_those_who_asked_for_it_and_nobody_else(engine: FakeEngine) -> None:
    owner = GpuThread(engine.make)
    bad, good = held_up(engine, owner, [(rows(1), 2, 13), (rows(2), 2, 5)])
    assert isinstance(bad, RuntimeError)
    assert isinstance(good, tuple)
    assert owner.search(rows(9), 1, 5)[1].tolist() == [[9]]
    owner.close()


def test_an_engine_that_cannot_be_made_is_an_error_at_once() -> None:
    def make() -> Callable[[Embeddings, int, int], tuple[Scores, Ids]]:
        raise RuntimeError("no GPU memory")

    with pytest.raises(RuntimeError, match="no GPU memory"):
        GpuThread(make)


def test_closing_answers_what_waits_and_refuses_what_comes_later(engine: FakeEngine) -> None:
    owner = GpuThread(engine.make)
    engine.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(owner.search, rows(0), 1, 1)
        engine.is_busy.wait()
        waiting = pool.submit(owner.search, rows(5), 2, 5)
        while not owner._requests.qsize():
            threading.Event().wait(0.001)
        closing = pool.submit(owner.close)
        engine.gate.set()
        closing.result()
        first.result()
        assert waiting.result()[1].tolist() == [[5, 6]]
    with pytest.raises(EngineUnavailableError, match="closed"):
        owner.search(rows(1), 1, 1)
    owner.close()
    assert not owner._thread.is_alive()
