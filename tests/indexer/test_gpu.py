"""Search on the GPU: refused by name without one; the answers of the CPU with one."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
import pytest

from embedder.errors import EngineUnavailableError, PlanError, ProviderError
from embedder.types import Embeddings
from indexer.catalog.vectors import VectorFile
from indexer.index import gpu
from indexer.index.gpu import GpuIndex, build_cagra, gpu_memory_mb, why_no_gpu
from indexer.index.plan import IndexSettings
from indexer.types import Ids, Scores
from tests.indexer.oracle import bitmap, clumped, units
from tests.support.seams import (
    Effort,
    GpuThread,
    Rows,
    Segment,
    SegmentIndex,
    plan_index,
    recall_at,
    write_segment,
)

N, DIM = 20_000, 64


def test_without_gpu_support_every_way_to_the_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    vectors = units(100)
    for ask in (
        lambda: GpuIndex.flat(vectors),
        lambda: GpuIndex.cagra(faiss.IndexHNSWCagra(16, 8, faiss.METRIC_INNER_PRODUCT)),
        lambda: build_cagra(vectors, {"graph_degree": 64, "intermediate_graph_degree": 128}),
        gpu_memory_mb,
        lambda: SegmentIndex.open("flat", vectors, None, "cuda"),
    ):
        with pytest.raises(ProviderError, match=r"no GPU support.*make install-gpu"):
            ask()
    with pytest.raises(PlanError, match=r"no GPU support.*--index-device cpu"):
        plan_index(100, 16, IndexSettings(device="cuda"))


@pytest.mark.parametrize(
    ("options", "gpus", "message"),
    [
        ("OPTIMIZE GPU", 1, "without cuVS.*faiss-gpu-cuvs"),
        ("OPTIMIZE GPU CUVS", 0, "finds no NVIDIA GPU.*nvidia-smi"),
        ("OPTIMIZE GPU CUVS", 1, None),
    ],
)
def test_the_reason_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, options: str, gpus: int, message: str | None
) -> None:
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "get_compile_options", lambda: options)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: gpus, raising=False)
    if message is None:
        assert why_no_gpu() is None
    else:
        with pytest.raises(ProviderError, match=message):
            gpu.require_gpu()


class FakeGpu:
    """Stands for a GpuIndex; answers with all positions from 0 on."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[int] = []

    def search(self, queries: Embeddings, k: int, effort: int) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append(k)
        positions = np.tile(np.arange(k), (len(queries), 1))
        return np.linspace(1, 0, k, dtype=np.float32) + 0 * queries[:, :1], positions

    def close(self) -> None:
        pass


def test_what_a_gpu_cannot_answer_comes_from_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = units(2000)
    fake = FakeGpu(2000)
    monkeypatch.setattr(GpuIndex, "flat", lambda vectors: fake)
    index = SegmentIndex.open("flat", vectors, None, "cuda")
    queries = units(3, 1)
    assert index.search(queries, 5, Effort(0))[1].tolist() == [[0, 1, 2, 3, 4]] * 3
    assert fake.asked == [10]
    for allowed, k in ((None, gpu.MAX_K + 1), (bitmap(np.arange(2000) < 50), 5)):
        found = index.search(queries, k, Effort(0), allowed)[1]
        assert (found == index.exact(queries, k, allowed)[1]).all()
    assert index.search(queries[:0], 5, Effort(0))[1].shape == (0, 5)
    assert fake.asked == [10]


def test_a_gpu_that_fails_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def search(self, *_: object) -> None:
            raise RuntimeError("Error in void alloc at x.cu:1: Error: 'err == 0' CUDA error 2")

        def end(self) -> None:
            pass

    with pytest.raises(ProviderError, match=r"GPU could not answer: 'err == 0'.*nvidia-smi"):
        GpuIndex(Broken()).search(units(1), 1, 1)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def gallery() -> Embeddings:
    if why := why_no_gpu():
        pytest.skip(why)
    return clumped(N, DIM)


@pytest.mark.gpu
def test_flat_on_the_gpu_answers_as_on_the_cpu(gallery: Embeddings) -> None:
    queries = clumped(200, DIM, seed=9)
    assert gpu_memory_mb() > 1000
    index = SegmentIndex.build(plan_index(N, DIM, IndexSettings("flat", device="cuda")), gallery)
    found, truth = index.search(queries, 10, Effort(0)), index.exact(queries, 10)
    assert recall_at(found[1], truth[1]) >= 0.999
    np.testing.assert_allclose(found[0], truth[0], atol=1e-4)
    index.close()


@pytest.mark.gpu
def test_cagra_is_built_tuned_saved_and_answers_on_both(
    gallery: Embeddings, tmp_path: Path
) -> None:
    ids, queries = np.arange(1, N + 1), clumped(200, DIM, seed=9)
    settings = IndexSettings(kind="cagra", device="cuda")
    for name in ("vectors/rows", "segments/one"):
        (tmp_path / name).mkdir(parents=True)
    file = VectorFile.rewrite(tmp_path / "vectors/rows", DIM, ids, N, [(ids, gallery)])
    folder = tmp_path / "segments/one"
    manifest = write_segment(folder, 1, Rows(file, N, np.zeros(N, np.bool_)), (), settings)
    assert manifest.recall >= 0.98
    for device in ("cuda", "cpu"):
        segment = Segment.open(folder, device=device)
        truth = segment.index.exact(queries, 10)
        for allowed in (None, bitmap(np.ones(N, bool))):
            found = segment.index.search(queries, 10, manifest.tuned, allowed)
            assert recall_at(found[1], truth[1]) >= 0.95, device
            np.testing.assert_allclose(found[0][:, 0], truth[0][:, 0], atol=1e-4)
        segment.close()


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
    return np.full((len(values), 4), np.array(values)[:, None], np.float32)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def thread(engine: FakeEngine) -> Iterator[GpuThread]:
    thread = GpuThread(engine.make)
    yield thread
    thread.close()


def test_every_caller_gets_his_own_rows_from_one_thread_that_is_not_the_callers(
    engine: FakeEngine, thread: GpuThread
) -> None:
    asked = [[100 * n + i for i in range(n % 4)] for n in range(60)]

    def ask(values: list[int]) -> list[list[int]]:
        found: list[list[int]] = thread.search(rows(*values), 1 + len(values), 5)[1].tolist()
        return found

    with ThreadPoolExecutor(16) as pool:
        for values, found in zip(asked, pool.map(ask, asked), strict=True):
            assert found == [[value + j for j in range(1 + len(values))] for value in values]
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def held_up(
    engine: FakeEngine, thread: GpuThread, requests: list[tuple[Embeddings, int, int]]
) -> list[object]:
    """The answers (or errors) of requests that all came in while the engine was busy."""
    engine.gate.clear()
    with ThreadPoolExecutor(len(requests) + 1) as pool:
        first = pool.submit(thread.search, rows(0), 1, 1)
        engine.is_busy.wait()
        waiting = [pool.submit(thread.search, *request) for request in requests]
        while thread.waiting < len(requests):
            threading.Event().wait(0.001)
        engine.gate.set()
        first.result()
        return [future.exception() or future.result() for future in waiting]


@pytest.mark.parametrize(
    ("asked", "most_rows", "batches"),
    [
        ([(rows(n, n), 3, 5) for n in range(10)], 1000, [(20, 3, 5)]),
        (
            [(rows(1), 3, 5), (rows(2), 4, 5), (rows(3), 3, 6), (rows(4), 3, 5)],
            1000,
            [(1, 3, 6), (1, 4, 5), (2, 3, 5)],
        ),
        ([(rows(1, 2, 3), 3, 5)] * 4, 4, [(6, 3, 5), (6, 3, 5)]),
    ],
    ids=["alike", "of other parameters", "many"],
)
def test_what_waits_is_answered_in_batches_of_equal_parameters_up_to_a_limit(
    engine: FakeEngine,
    thread: GpuThread,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[tuple[Embeddings, int, int]],
    most_rows: int,
    batches: list[tuple[int, int, int]],
) -> None:
    monkeypatch.setattr(gpu, "MAX_ROWS", most_rows)
    held_up(engine, thread, asked)
    assert engine.batches[0] == (1, 1, 1)
    assert sorted(engine.batches[1:]) == batches


def test_an_error_reaches_those_who_asked_for_it_and_nobody_else(
    engine: FakeEngine, thread: GpuThread
) -> None:
    bad, good = held_up(engine, thread, [(rows(1), 2, 13), (rows(2), 2, 5)])
    assert isinstance(bad, RuntimeError)
    assert isinstance(good, tuple)
    assert thread.search(rows(9), 1, 5)[1].tolist() == [[9]]


def test_an_engine_that_cannot_be_made_is_an_error_at_once() -> None:
    def make() -> Callable[[Embeddings, int, int], tuple[Scores, Ids]]:
        raise RuntimeError("no GPU memory")

    with pytest.raises(RuntimeError, match="no GPU memory"):
        GpuThread(make)


def test_closing_answers_what_waits_and_refuses_what_comes_later(
    engine: FakeEngine, thread: GpuThread
) -> None:
    engine.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(thread.search, rows(0), 1, 1)
        engine.is_busy.wait()
        waiting = pool.submit(thread.search, rows(5), 2, 5)
        while not thread.waiting:
            threading.Event().wait(0.001)
        closing = pool.submit(thread.close)
        engine.gate.set()
        closing.result()
        first.result()
        assert waiting.result()[1].tolist() == [[5, 6]]
    with pytest.raises(EngineUnavailableError, match="closed"):
        thread.search(rows(1), 1, 1)
    thread.close()


@pytest.mark.parametrize("has_searched", [False, True])
def test_the_memory_is_free_when_nobody_has_the_index_any_more(
    monkeypatch: pytest.MonkeyPatch, has_searched: bool
) -> None:
    engine = FakeEngine()
    memory = weakref.ref(engine)
    thread = GpuThread(engine.make)
    del engine
    monkeypatch.setattr(GpuIndex, "flat", lambda vectors: GpuIndex(thread))
    index = SegmentIndex.open("flat", units(2000), None, "cuda")
    if has_searched:
        index.search(units(3, 1), 5, Effort(0))
    gc.collect()
    assert memory() is not None
    del index
    gc.collect()
    with pytest.raises(EngineUnavailableError):
        thread.search(units(1), 1, 0)
    thread.close()
    gc.collect()
    assert memory() is None
