"""Search on an NVIDIA GPU with faiss-gpu-cuvs: flat, and the graph CAGRA."""

import ctypes
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import faiss
import numpy as np

from embedder.errors import EngineUnavailableError, ProviderError
from embedder.types import Embeddings
from indexer.types import Ids, Scores

Answer = tuple[Scores, Ids]
Search = Callable[[Embeddings, int, int], Answer]
"""queries (Q, D), k, effort -> scores (Q, k), positions (Q, k)."""

MAX_ROWS = 4096
"""Queries in a batch, unless a single request has more."""

MAX_K = 512
"""More answers than this come from the CPU."""

_WARP = 32  # CAGRA keeps its intermediate results in multiples of it
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class _Request:
    queries: Embeddings
    k: int
    effort: int
    answer: "Future[Answer]" = field(default_factory=Future)


class GpuThread:
    """Makes the engine in its own thread; every search runs there, as many at once as wait."""

    def __init__(self, make: Callable[[], Search]) -> None:
        """Raises: whatever `make` raises."""
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make, ready), name="gpu", daemon=True
        )
        self._thread.start()
        ready.result()

    def search(self, queries: Embeddings, k: int, effort: int) -> Answer:
        """The answer of the engine, possibly computed with those of other threads.

        Raises: EngineUnavailableError after `close`; whatever the engine raises.
        """
        request = _Request(queries, k, effort)
        with self._lock:
            if self._is_closed:
                raise EngineUnavailableError(
                    "The GPU index was closed while a search came in. Search again: the gallery "
                    "has a newer one."
                )
            self._requests.put(request)
        return request.answer.result()

    @property
    def waiting(self) -> int:
        """Searches that nobody has begun to answer."""
        return self._requests.qsize()

    def close(self) -> None:
        """Answer what waits, then let the engine go."""
        self.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def end(self) -> None:
        """As `close`, but without waiting for the engine to be gone."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._requests.put(None)

    def _run(self, make: Callable[[], Search], ready: "Future[None]") -> None:
        try:
            search = make()
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        while batch := self._next_batch():
            for alike in _alike(batch):
                _answer(search, alike)

    def _next_batch(self) -> list[_Request]:
        """Everything that waits now; empty after `close`."""
        request = self._requests.get()
        if request is None:
            return []
        batch = [request]
        while sum(len(one.queries) for one in batch) < MAX_ROWS:
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                break
            if request is None:
                self._requests.put(None)  # nothing can follow it: end after this batch
                break
            batch.append(request)
        return batch


def _alike(batch: list[_Request]) -> list[list[_Request]]:
    """Requests with the same parameters together."""
    groups: dict[tuple[int, int], list[_Request]] = {}
    for request in batch:
        groups.setdefault((request.k, request.effort), []).append(request)
    return list(groups.values())


def _answer(search: Search, requests: list[_Request]) -> None:
    queries = np.concatenate([request.queries for request in requests])
    try:
        scores, positions = search(queries, requests[0].k, requests[0].effort)
    except BaseException as error:
        for request in requests:
            request.answer.set_exception(error)
        return
    row = 0
    for request in requests:
        end = row + len(request.queries)
        request.answer.set_result((scores[row:end], positions[row:end]))
        row = end


def why_no_gpu() -> str | None:
    """Why FAISS cannot use a GPU here, and what to do; None if it can."""
    if not hasattr(faiss, "StandardGpuResources"):
        return (
            "The installed faiss has no GPU support. Install the GPU packages (make install-gpu) "
            "on a machine with an NVIDIA GPU."
        )
    if "CUVS" not in faiss.get_compile_options():
        return "The installed faiss was built without cuVS. Install faiss-gpu-cuvs in its place."
    if not faiss.get_num_gpus():
        return "faiss finds no NVIDIA GPU. See whether nvidia-smi lists one."
    return None


def require_gpu() -> None:
    """Raises: ProviderError where FAISS cannot use a GPU."""
    if why := why_no_gpu():
        raise ProviderError(f"{why} Or search on the CPU.")


def gpu_memory_mb(device: int = 0) -> float:
    """MiB of memory of a GPU. Raises: ProviderError."""
    require_gpu()
    size, handle = ctypes.c_size_t(), ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    for call in (
        partial(driver.cuInit, 0),
        partial(driver.cuDeviceGet, ctypes.byref(handle), device),
        partial(driver.cuDeviceTotalMem_v2, ctypes.byref(size), handle),
    ):
        if code := call():
            raise ProviderError(
                f"The CUDA driver answers with error {code} when asked for the memory of GPU "
                f"{device}. See whether nvidia-smi lists it."
            )
    return size.value / _MIB


class GpuIndex:
    """An index on the GPU; thread safe, since one thread owns it and batches all searches.

    The memory of the GPU is free again soon after the last reference is gone.
    """

    def __init__(self, thread: GpuThread) -> None:
        self._gpu = thread
        # Not by joining, since any thread may drop the last reference; and not at exit, when the
        # thread would meet a CUDA that is going away.
        weakref.finalize(self, thread.end).atexit = False

    @classmethod
    def flat(cls, vectors: Embeddings) -> "GpuIndex":
        """Compare with all vectors (N, D). Raises: ProviderError."""
        require_gpu()
        return cls(GpuThread(partial(_flat_search, vectors)))

    @classmethod
    def cagra(cls, graph: faiss.IndexHNSWCagra) -> "GpuIndex":
        """Search the graph that `build_cagra` made, with its vectors. Raises: ProviderError."""
        require_gpu()
        return cls(GpuThread(partial(_cagra_search, graph)))

    def search(self, queries: Embeddings, k: int, effort: int) -> tuple[Scores, Ids]:
        """Up to MAX_K answers for each query (Q, D); `effort` is itopk_size.

        Raises: ProviderError if the GPU fails; EngineUnavailableError after `close`.
        """
        try:
            return self._gpu.search(queries, k, effort)
        except RuntimeError as error:
            raise ProviderError(
                f"The GPU could not answer: {reason_of(error)}. See nvidia-smi for its memory "
                "and health, or open the gallery on the CPU."
            ) from error

    def close(self) -> None:
        """Free the memory of the GPU, once the searches that wait are answered."""
        self._gpu.close()


def build_cagra(vectors: Embeddings, parameters: Mapping[str, int]) -> faiss.IndexHNSWCagra:
    """Build the graph of vectors (N, D) on the GPU and bring it back. Raises: ProviderError."""
    require_gpu()
    config = faiss.GpuIndexCagraConfig()
    config.graph_degree = min(parameters["graph_degree"], len(vectors) - 1)
    config.intermediate_graph_degree = min(
        parameters["intermediate_graph_degree"], len(vectors) - 1
    )
    config.guarantee_connectivity = True
    dim = vectors.shape[1]
    index = faiss.GpuIndexCagra(
        faiss.StandardGpuResources(), dim, faiss.METRIC_INNER_PRODUCT, config
    )
    graph = faiss.IndexHNSWCagra()
    graph.base_level_only = True
    try:
        index.train(vectors)
        index.copyTo(graph)
    except RuntimeError as error:
        raise ProviderError(
            f"The GPU could not build CAGRA over {len(vectors):,} vectors: {reason_of(error)}. "
            "See nvidia-smi for its free memory, or choose --index flat or --index-device cpu."
        ) from error
    return graph


def _flat_search(vectors: Embeddings) -> Search:
    resources = faiss.StandardGpuResources()
    index = faiss.GpuIndexFlatIP(resources, vectors.shape[1])
    index.add(vectors)

    def search(queries: Embeddings, k: int, _: int) -> tuple[Scores, Ids]:
        found: tuple[Scores, Ids] = index.search(queries, k)
        return found

    return search


def _cagra_search(graph: faiss.IndexHNSWCagra) -> Search:
    resources = faiss.StandardGpuResources()
    index = faiss.GpuIndexCagra(resources, graph.d, faiss.METRIC_INNER_PRODUCT)
    index.copyFrom(graph)

    def search(queries: Embeddings, k: int, effort: int) -> tuple[Scores, Ids]:
        parameters = faiss.SearchParametersCagra()
        parameters.itopk_size = -(-max(effort, 2 * k) // _WARP) * _WARP
        found: tuple[Scores, Ids] = index.search(queries, k, params=parameters)
        return found

    return search


def reason_of(error: BaseException) -> str:
    """The end of its message, without the place in the C++ source."""
    return str(error).rpartition("Error: ")[2].strip() or type(error).__name__
