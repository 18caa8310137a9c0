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
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import faiss
import numpy as np

from kinlens.embedder.errors import EngineUnavailableError, ProviderError
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

_LOAD_S, _LOAD_BYTES_PER_S = 120.0, 50e6  # for a slow disk without page cache
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


class GpuThread:
    """A thread that owns an index on the GPU and batches all waiting searches.

    FAISS allows only one thread at a time to use an index on a GPU.
    """

    def __init__(self, make: Callable[[], Search], load_s: float = _LOAD_S) -> None:
        """Create the index with `make`.

        Raises: ProviderError if `make` takes longer than `load_s`; any error of `make`.
        """
        self.is_lost = False
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._began: float | None = None  # start of the running FAISS call, if any
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make, ready), name="gpu", daemon=True
        )
        self._thread.start()
        try:
            ready.result(load_s)
        except TimeoutError:
            self.end()
            raise ProviderError(f"copying it to the GPU took over {load_s:.0f} s") from None

    def search(self, queries: Embeddings, k: int, effort: int) -> Answer:
        """Scores and positions, possibly computed in a batch with other threads' queries.

        Raises: EngineUnavailableError after `close`; ProviderError if the GPU hangs or has hung
            before; any error of the index.
        """
        request = _Request(queries, k, effort)
        with self._lock:
            if self.is_lost:
                raise _hung()
            if self._is_closed:
                raise EngineUnavailableError("The index on the GPU was closed.")
            self._requests.put(request)
        while True:
            try:
                return request.answer.result(SEARCH_S)
            except TimeoutError:
                began = self._began
                if began is not None and time.monotonic() - began > SEARCH_S:
                    self.is_lost = True
                    self.end()
                    raise _hung() from None

    @property
    def waiting(self) -> int:
        """Number of searches in the queue."""
        return self._requests.qsize()

    def close(self) -> None:
        """Answer the searches in the queue, then release the index."""
        self.end()
        if threading.current_thread() is not self._thread and not self.is_lost:
            self._thread.join(SEARCH_S)

    def end(self) -> None:
        """`close` without waiting until the index is released."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._requests.put(None)

    def _run(self, make: Callable[[], Search], ready: "Future[None]") -> None:
        try:
            search = make()
        except BaseException as error:
            # The traceback would keep the copied data on the GPU.
            ready.set_exception(error.with_traceback(None))
            return
        ready.set_result(None)
        while batch := self._next_batch():
            for group in _same_parameters(batch):
                self._answer(search, group)

    def _next_batch(self) -> list[_Request]:
        """The requests in the queue, up to MAX_ROWS queries; empty after `close`."""
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
                self._requests.put(None)  # always the last request: end after this batch
                break
            batch.append(request)
        return batch

    def _answer(self, search: Search, requests: list[_Request]) -> None:
        queries = np.concatenate([request.queries for request in requests])
        found = []
        try:
            for start in range(0, max(1, len(queries)), MAX_ROWS):
                self._began = time.monotonic()
                part = queries[start : start + MAX_ROWS]
                found.append(search(part, requests[0].k, requests[0].effort))
        except BaseException as error:
            for request in requests:
                request.answer.set_exception(error.with_traceback(None))
            return
        finally:
            self._began = None
        scores, positions = (np.concatenate(parts) for parts in zip(*found, strict=True))
        row = 0
        for request in requests:
            end = row + len(request.queries)
            request.answer.set_result((scores[row:end], positions[row:end]))
            row = end


def _hung() -> ProviderError:
    return ProviderError(f"one search on the GPU took more than {SEARCH_S:g} s")


def _same_parameters(batch: list[_Request]) -> list[list[_Request]]:
    """Group requests by their parameters."""
    groups: dict[tuple[int, int], list[_Request]] = {}
    for request in batch:
        groups.setdefault((request.k, request.effort), []).append(request)
    return list(groups.values())


class GpuCopy:
    """A copy of an index on the GPU, created in a background thread. Thread safe.

    `reason` explains why it does not answer; None while it does. If memory is lacking, copying is
    retried later, since the index that this one replaces may still use it. The GPU memory is freed
    soon after the last reference to this object is dropped.
    """

    def __init__(self, name: str, load: Callable[[], Search], gpu_bytes: float, dim: int) -> None:
        """`load` copies the index, which needs `gpu_bytes`; `name` is for the log."""
        self.reason: str | None = "it is being copied to the GPU"
        self.gpu_mb = gpu_bytes / _MIB
        self._name = name
        self._make = partial(_warmed, load, dim)
        self._thread: GpuThread | None = None
        self._lock = threading.Lock()
        self._is_tried = threading.Event()
        self._is_logged = False
        self._retry_at: float | None = None
        self._pause_s = RETRY_S
        self._is_closed = False
        self._start()

    def wait(self, limit_s: float | None = None) -> bool:
        """Wait up to `limit_s` seconds for the first copy; whether it has succeeded or failed."""
        return self._is_tried.wait(limit_s)

    @property
    def is_there(self) -> bool:
        """Whether the GPU currently answers. Starts a retry if it is due."""
        if self._thread is not None:
            return True
        with self._lock:
            is_due = self._retry_at is not None and time.monotonic() > self._retry_at
            if is_due:
                self._retry_at = None
        if is_due:
            self._start()
        return False

    def search(self, queries: Embeddings, k: int, effort: int) -> Answer | None:
        """Up to MAX_K hits for each query (Q, D); None if the CPU has to search."""
        thread = self._thread
        if thread is None:
            return None
        try:
            return thread.search(queries, k, effort)
        except Exception as error:  # the CPU can answer after any error
            self._disable(thread, error)
            return None

    def close(self) -> None:
        """Free the GPU memory after the searches in the queue are answered."""
        with self._lock:
            self._is_closed, self._retry_at = True, None
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def _start(self) -> None:
        threading.Thread(target=self._copy, name="gpu-copy", daemon=True).start()

    def _copy(self) -> None:
        try:
            free_mb = gpu_memory().free_mb
            if self.gpu_mb + RESERVE_MB > free_mb:
                raise MemoryError(
                    f"it needs {self.gpu_mb:,.0f} MB of GPU memory, of which {free_mb:,.0f} MB "
                    f"are free and {RESERVE_MB:,.0f} MB are reserved for the model"
                )
            thread = GpuThread(self._make, _LOAD_S + self.gpu_mb * _MIB / _LOAD_BYTES_PER_S)
        except Exception as error:  # the CPU can answer after any error
            self._fail(error)
        else:
            self._install(thread)
        self._is_tried.set()

    def _install(self, thread: GpuThread) -> None:
        with self._lock:
            if self._is_closed:
                thread.end()
                return
            self._thread, self.reason, self._is_logged = thread, None, False
        # Without joining, since any thread may drop the last reference; and not at exit, when CUDA
        # may already be shut down.
        weakref.finalize(self, thread.end).atexit = False
        _log.info("%s is searched on the GPU, with %s MB", self._name, f"{self.gpu_mb:,.0f}")

    def _disable(self, thread: GpuThread, error: Exception) -> None:
        """Stop using the GPU. Called by every search in the failed batch; only the first acts."""
        with self._lock:
            if self._thread is not thread:
                return
            self._thread = None
        thread.end()
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.reason = faiss_reason(error)
            is_new, self._is_logged = not self._is_logged, True
            # A missing or hung GPU does not recover on its own.
            if not (isinstance(error, ProviderError) or self._is_closed):
                self._retry_at = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, MAX_RETRY_S)
        if is_new:
            _log.warning("%s is searched on the CPU: %s", self._name, self.reason)


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
