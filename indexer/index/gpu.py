"""An NVIDIA GPU for the search: whether there is one, its memory, and an index that lies on it.

What lies there is a copy. Whatever happens to the GPU, the index on the CPU can answer instead.
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
from kinlens.indexer.types import Ids, Scores

_log = logging.getLogger(__name__)

Answer = tuple[Scores, Ids]
Search = Callable[[Embeddings, int, int], Answer]
"""queries (Q, D), k, effort -> scores (Q, k), positions (Q, k)."""

MAX_ROWS = 64
"""Queries that FAISS gets at once: more of them would need more than TEMP_BYTES."""

MAX_K = 512
"""More answers than this come from the CPU."""

SEARCH_S = 3.0
"""A GPU that works longer than this on MAX_ROWS queries has hung: the CPU answers from then on."""

RETRY_S, LONGEST_RETRY_S = 10.0, 600.0
"""After so long an index that lacked memory is copied to the GPU again; each time twice as long."""

RESERVE_MB = 2048.0
"""Of the memory of the GPU, which no index takes: for the model, and what CUDA itself needs."""

TEMP_BYTES = 256 * 2**20
"""Memory of the GPU that each index keeps for the search itself."""

LEAST_BYTES = 16 * 2**20
"""Vectors of less than this are searched on the CPU, in a millisecond or two."""

_LOAD_S, _LOAD_BYTES_PER_S = 120.0, 50e6  # from a cold and slow disk
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
    """Why FAISS cannot use a GPU here, and what to do; None if it can."""
    if not hasattr(faiss, "StandardGpuResources"):
        return (
            "The installed faiss has no GPU support. Install them: pip install 'kinlens[gpu]' "
            "on a machine with an NVIDIA GPU."
        )
    if "CUVS" not in faiss.get_compile_options():
        return "The installed faiss was built without cuVS. Install faiss-gpu-cuvs in its place."
    if fault := failed_trial():
        return f"The GPU cannot be used: {fault}. See whether nvidia-smi lists one, and its driver."
    return None


@cache
def failed_trial() -> str | None:
    """What goes wrong in a first search on the GPU; None if it is answered.

    In a process of its own: many a fault of a driver ends the process, or never returns.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRIAL], capture_output=True, text=True, timeout=TRIAL_S
        )
    except subprocess.TimeoutExpired:
        return f"a first search on it did not end within {TRIAL_S:.0f} s"
    if not done.returncode:
        return None
    said = done.stderr.strip().splitlines()
    if _OUT_OF_MEMORY in done.stderr:
        return None  # it is there, and full
    if done.returncode < 0:
        return f"a first search on it died of signal {-done.returncode}"
    return reason_of(RuntimeError(said[-1])) if said else "a first search on it failed"


def require_gpu() -> None:
    """Raises: ProviderError where FAISS cannot use a GPU."""
    if why := why_no_gpu():
        raise ProviderError(f"{why} Or search on the CPU.")


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """MiB of memory of the GPU: what nobody has taken, and all."""

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
            f"CUDA does not tell the memory of the GPU: {runtime.cudaGetErrorString(code).decode()}"
            f" (error {code}). See whether nvidia-smi lists it."
        )
    return free.value, total.value


@dataclass(frozen=True, slots=True)
class _Request:
    queries: Embeddings
    k: int
    effort: int
    answer: "Future[Answer]" = field(default_factory=Future)


class GpuThread:
    """Makes an index in a thread of its own; every search runs there, as many at once as wait.

    FAISS allows one thread at a time for an index on a GPU.
    """

    def __init__(self, make: Callable[[], Search], load_s: float = _LOAD_S) -> None:
        """Raises: ProviderError if `make` takes longer than `load_s`; whatever `make` raises."""
        self.is_lost = False
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._began: float | None = None  # when FAISS was last called, None while it is not
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make, ready), name="gpu", daemon=True
        )
        self._thread.start()
        try:
            ready.result(load_s)
        except TimeoutError:
            self.end()
            raise ProviderError(f"the GPU did not take it within {load_s:.0f} s") from None

    def search(self, queries: Embeddings, k: int, effort: int) -> Answer:
        """The answer of the index, possibly computed with those of other threads.

        Raises: EngineUnavailableError after `close`; ProviderError if the GPU hangs, and for all
            that ask later; whatever the index raises.
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
        """Searches that nobody has begun to answer."""
        return self._requests.qsize()

    def close(self) -> None:
        """Answer what waits, then let the index go."""
        self.end()
        if threading.current_thread() is not self._thread and not self.is_lost:
            self._thread.join(SEARCH_S)

    def end(self) -> None:
        """As `close`, but without waiting for the index to be gone."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._requests.put(None)

    def _run(self, make: Callable[[], Search], ready: "Future[None]") -> None:
        try:
            search = make()
        except BaseException as error:
            # Its traceback would keep what was copied so far on the GPU.
            ready.set_exception(error.with_traceback(None))
            return
        ready.set_result(None)
        while batch := self._next_batch():
            for alike in _alike(batch):
                self._answer(search, alike)

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
    return ProviderError(f"the GPU has worked on one search for more than {SEARCH_S:g} s")


def _alike(batch: list[_Request]) -> list[list[_Request]]:
    """Requests with the same parameters together."""
    groups: dict[tuple[int, int], list[_Request]] = {}
    for request in batch:
        groups.setdefault((request.k, request.effort), []).append(request)
    return list(groups.values())


class GpuCopy:
    """A copy of an index on the GPU, made by a thread, which answers as long as it can.

    `reason` says why it does not, None while it does. A copy that lacks memory is made again later,
    since what takes the memory may be the index that this one replaces. The memory of the GPU is
    free again soon after the last reference is gone. Thread safe.
    """

    def __init__(self, name: str, load: Callable[[], Search], gpu_bytes: float, dim: int) -> None:
        """`load` copies the index and takes `gpu_bytes`; `name` is for the log."""
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
        """Whether the first copy was made, or failed, within so many seconds."""
        return self._is_tried.wait(limit_s)

    @property
    def is_there(self) -> bool:
        """Whether it answers now; it is made again where that is due."""
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
        """Up to MAX_K answers for each query (Q, D); None if the CPU has to give them."""
        thread = self._thread
        if thread is None:
            return None
        try:
            return thread.search(queries, k, effort)
        except Exception as error:  # whatever it is, the CPU can answer
            self._give_up(thread, error)
            return None

    def close(self) -> None:
        """Free the memory of the GPU, once the searches that wait are answered."""
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
                    f"it takes {self.gpu_mb:,.0f} MB of the memory of the GPU, of which "
                    f"{free_mb:,.0f} MB are free and {RESERVE_MB:,.0f} MB are kept for the model"
                )
            thread = GpuThread(self._make, _LOAD_S + self.gpu_mb * _MIB / _LOAD_BYTES_PER_S)
        except Exception as error:  # whatever it is, the CPU can answer
            self._refused(error)
        else:
            self._take(thread)
        self._is_tried.set()

    def _take(self, thread: GpuThread) -> None:
        with self._lock:
            if self._is_closed:
                thread.end()
                return
            self._thread, self.reason, self._is_logged = thread, None, False
        # Not by joining, since any thread may drop the last reference; and not at exit, when the
        # thread would meet a CUDA that is going away.
        weakref.finalize(self, thread.end).atexit = False
        _log.info("%s is searched on the GPU, with %s MB of it", self._name, f"{self.gpu_mb:,.0f}")

    def _give_up(self, thread: GpuThread, error: Exception) -> None:
        """Once, although all that wait for the same answer come here."""
        with self._lock:
            if self._thread is not thread:
                return
            self._thread = None
        thread.end()
        self._refused(error)

    def _refused(self, error: Exception) -> None:
        with self._lock:
            self.reason = reason_of(error)
            is_new, self._is_logged = not self._is_logged, True
            # A GPU that is missing or hangs does not come back by itself.
            if not (isinstance(error, ProviderError) or self._is_closed):
                self._retry_at = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, LONGEST_RETRY_S)
        if is_new:
            _log.warning("%s is searched on the CPU: %s", self._name, self.reason)


def _warmed(load: Callable[[], Search], dim: int) -> Search:
    """What `load` makes, after the first searches, for which CUDA compiles and loads kernels."""
    search = load()
    queries = np.full((MAX_ROWS, dim), dim**-0.5, np.float32)
    for rows in (1, MAX_ROWS):
        search(queries[:rows], _WARM_K, _WARM_EFFORT)
    return search


def reason_of(error: BaseException) -> str:
    """The end of its message, without the place in the C++ source."""
    return str(error).rpartition("Error: ")[2].strip() or type(error).__name__
