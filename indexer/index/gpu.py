"""Search on an NVIDIA GPU: availability, memory, and a copy of an index on the GPU.

The index on the GPU is only a copy, so after any GPU error the CPU can answer instead.
"""

import ctypes
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import faiss
import numpy as np

from kinlens.embedder.errors import ProviderError
from kinlens.embedder.types import Embeddings
from kinlens.environment import child_environment
from kinlens.indexer.types import Ids, Scores

_log = logging.getLogger(__name__)

Answer = tuple[Scores, Ids]
Search = Callable[[Embeddings, int, int], Answer]
"""queries (Q, D), k, effort -> scores (Q, k), positions (Q, k)."""

MAX_ROWS = 64
"""Queries per FAISS call: more would need more than TEMP_BYTES."""

MAX_K = 512
"""Searches for more hits than this run on the CPU."""

SEARCH_S = 3.0
"""Time limit for MAX_ROWS queries. After it, the GPU is considered hung and the CPU answers."""

RETRY_S, MAX_RETRY_S = 10.0, 600.0
"""Pause before an index that lacked memory is copied to the GPU again; doubled each time."""

RESERVE_MB = 2048.0
"""GPU memory reserved for the model and CUDA itself."""

TEMP_BYTES = 256 * 2**20
"""GPU memory that each index reserves for searches."""

LEAST_BYTES = 16 * 2**20
"""Vectors smaller than this in total are searched on the CPU, in a millisecond or two."""

_WARM_K, _WARM_EFFORT = 20, 64
TRIAL_S = 60.0
TRIAL = """
import sys
import faiss, numpy
faiss.get_num_gpus() or sys.exit("faiss finds no NVIDIA GPU, or its driver is too old for CUDA 13")
resources = faiss.StandardGpuResources()
resources.setTempMemory(2**20)
resources.setPinnedMemory(0)
ones = numpy.eye(8, dtype="float32")
index = faiss.GpuIndexFlatIP(resources, 8)
index.add(ones)
(index.search(ones, 1)[1][:, 0] == numpy.arange(8)).all() or sys.exit("a search answered wrongly")
"""
_OUT_OF_MEMORY = "out of memory"
_MIB = 2**20


def why_no_gpu() -> str | None:
    """Why FAISS cannot use a GPU here, with a remedy; None if it can."""
    if not hasattr(faiss, "StandardGpuResources"):
        return (
            "The installed faiss has no GPU support. On a machine with an NVIDIA GPU, run "
            "pip install 'kinlens[gpu]' in a new environment."
        )
    if "CUVS" not in faiss.get_compile_options():
        return (
            "The installed faiss was built without cuVS. Run pip install 'kinlens[gpu]' in a new "
            "environment."
        )
    if fault := failed_trial():
        return f"The GPU cannot be used: {fault}. Check the GPU and its driver with nvidia-smi."
    return None


@cache
def failed_trial() -> str | None:
    """The error of a test search on the GPU; None if it succeeds.

    Runs in a separate process, since driver errors may kill the process or never return.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRIAL],
            capture_output=True,
            text=True,
            timeout=TRIAL_S,
            env=child_environment(),
        )
    except subprocess.TimeoutExpired:
        return f"a test search did not end within {TRIAL_S:.0f} s"
    if not done.returncode:
        return None
    lines = done.stderr.strip().splitlines()
    if _OUT_OF_MEMORY in done.stderr:
        return None  # the GPU works, but its memory is in use
    if done.returncode < 0:
        return f"a test search was killed by signal {-done.returncode}"
    return faiss_reason(RuntimeError(lines[-1])) if lines else "a test search failed"


def require_gpu() -> None:
    """Check that FAISS can use a GPU. Raises: ProviderError."""
    if why := why_no_gpu():
        raise ProviderError(f"{why} Or search on the CPU.")


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Free and total memory of the GPU in MiB."""

    free_mb: float
    total_mb: float


def gpu_memory() -> GpuMemory:
    """The memory of the GPU that FAISS uses. Raises: ProviderError."""
    require_gpu()
    free, total = cuda_memory()
    return GpuMemory(free / _MIB, total / _MIB)


def cuda_memory() -> tuple[int, int]:
    """Free and total bytes, from the CUDA runtime that FAISS has loaded. Raises: ProviderError."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    runtime = ctypes.CDLL(str(Path(faiss.__file__).with_name("libfaiss.so")))
    if code := runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)):
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        raise ProviderError(
            f"CUDA cannot read the memory of the GPU: {runtime.cudaGetErrorString(code).decode()} "
            f"(error {code}). Check the GPU with nvidia-smi."
        )
    return free.value, total.value


@dataclass(frozen=True, slots=True)
class _Request:
    queries: Embeddings
    k: int
    effort: int
    answer: "Future[Answer]" = field(default_factory=Future)


class GpuCopy:
    """A copy of an index on the GPU, owned by a thread that batches all waiting searches, since
    FAISS allows only one thread at a time to use an index on a GPU. Thread safe.

    `reason` explains why it does not answer; None while it does. After an error, such as a lack of
    memory that the index which this one replaces may still use, copying is retried after a pause.
    """

    def __init__(self, name: str, load: Callable[[], Search], gpu_bytes: float, dim: int) -> None:
        """`load` copies the index, which needs `gpu_bytes`; `name` is for the log."""
        self.reason: str | None = "it is being copied to the GPU"
        self.gpu_mb = gpu_bytes / _MIB
        self._name = name
        self._make = partial(_warmed, load, dim)
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_tried, self._is_over = threading.Event(), threading.Event()
        self._batch: list[_Request] = []  # which the thread answers now
        self._began: float | None = None  # start of the running FAISS call, if any
        self._is_warned = False
        self._thread = threading.Thread(target=self._run, name="gpu", daemon=True)
        self._thread.start()

    def wait(self, limit_s: float | None = None) -> bool:
        """Wait up to `limit_s` seconds for the first copy; whether it has succeeded or failed."""
        return self._is_tried.wait(limit_s)

    @property
    def is_there(self) -> bool:
        """Whether the GPU currently answers."""
        return self.reason is None

    def search(self, queries: Embeddings, k: int, effort: int) -> Answer | None:
        """Up to MAX_K hits for each query (Q, D), possibly computed in a batch with other threads'
        queries; None if the CPU has to search.
        """
        request = _Request(queries, k, effort)
        with self._lock:
            if self.reason is not None:
                return None
            self._requests.put(request)
        while True:
            try:
                return request.answer.result(SEARCH_S)
            except TimeoutError:
                began = self._began
                if began is not None and time.monotonic() - began > SEARCH_S:
                    # A GPU that hangs does not recover on its own.
                    if self.end(f"one search on the GPU took more than {SEARCH_S:g} s"):
                        self._warn()
                    return None
            except Exception:  # the CPU can answer after any error
                return None

    def close(self) -> None:
        """Free the GPU memory after the searches in the queue are answered."""
        if self.is_there and self.end() and threading.current_thread() is not self._thread:
            self._thread.join(SEARCH_S)

    def end(self, reason: str = "it was closed") -> bool:
        """`close` without waiting until the memory is free; whether it was not over yet."""
        with self._lock:
            if self._is_over.is_set():
                return False
            self.reason = reason
            self._is_over.set()
            self._requests.put(None)
            return True

    def _run(self) -> None:
        pause_s = RETRY_S
        while not self._is_over.is_set():
            try:
                self._serve()
            except Exception as error:  # the CPU can answer after any error
                self._fail(error.with_traceback(None))  # which would keep the copy on the GPU
                self._is_tried.set()
                if isinstance(error, ProviderError):
                    return  # a missing GPU does not recover on its own
                self._is_over.wait(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)

    def _serve(self) -> None:
        """Copy the index, and answer searches until the end. Raises: any error of the index."""
        self._check_memory()
        search = self._make()
        with self._lock:
            if self._is_over.is_set():
                return
            self.reason, self._is_warned = None, False
        self._is_tried.set()
        _log.info("%s is searched on the GPU, with %s MB", self._name, f"{self.gpu_mb:,.0f}")
        while self._next_batch():
            for group in _same_parameters(self._batch):
                self._answer(search, group)

    def _check_memory(self) -> None:
        """Raises: MemoryError if the GPU has too little; ProviderError without a GPU."""
        free_mb = gpu_memory().free_mb
        if self.gpu_mb + RESERVE_MB > free_mb:
            raise MemoryError(
                f"it needs {self.gpu_mb:,.0f} MB of GPU memory, of which {free_mb:,.0f} MB "
                f"are free and {RESERVE_MB:,.0f} MB are reserved for the model"
            )

    def _next_batch(self) -> bool:
        """Wait for requests, and take up to MAX_ROWS queries; False at the end."""
        self._batch = []
        while sum(len(one.queries) for one in self._batch) < MAX_ROWS:
            try:
                request = self._requests.get(block=not self._batch)
            except queue.Empty:
                break
            if request is None:
                self._requests.put(None)  # always the last request: end after this batch
                break
            self._batch.append(request)
        return bool(self._batch)

    def _answer(self, search: Search, requests: list[_Request]) -> None:
        queries = np.concatenate([request.queries for request in requests])
        found = []
        try:
            for start in range(0, max(1, len(queries)), MAX_ROWS):
                self._began = time.monotonic()
                part = queries[start : start + MAX_ROWS]
                found.append(search(part, requests[0].k, requests[0].effort))
        finally:
            self._began = None
        scores, positions = (np.concatenate(parts) for parts in zip(*found, strict=True))
        row = 0
        for request in requests:
            end = row + len(request.queries)
            request.answer.set_result((scores[row:end], positions[row:end]))
            row = end

    def _fail(self, error: Exception) -> None:
        """Let the CPU answer the requests of the batch, and all that wait."""
        with self._lock:
            if not self._is_over.is_set():
                self.reason = faiss_reason(error)
            waiting = self._batch
            while not self._requests.empty():
                waiting += [one for one in [self._requests.get()] if one is not None]
        for request in waiting:
            if not request.answer.done():
                request.answer.set_exception(error)
        if not self._is_warned:
            self._warn()

    def _warn(self) -> None:
        self._is_warned = True
        _log.warning("%s is searched on the CPU: %s", self._name, self.reason)


def _same_parameters(batch: list[_Request]) -> list[list[_Request]]:
    """Group requests by their parameters."""
    groups: dict[tuple[int, int], list[_Request]] = {}
    for request in batch:
        groups.setdefault((request.k, request.effort), []).append(request)
    return list(groups.values())


def _warmed(load: Callable[[], Search], dim: int) -> Search:
    """Run `load`, then warm up: the first searches compile and load CUDA kernels."""
    search = load()
    queries = np.full((MAX_ROWS, dim), dim**-0.5, np.float32)
    for rows in (1, MAX_ROWS):
        search(queries[:rows], _WARM_K, _WARM_EFFORT)
    return search


def faiss_reason(error: BaseException) -> str:
    """The message of a FAISS error without the C++ source location."""
    return str(error).rpartition("Error: ")[2].strip() or type(error).__name__
