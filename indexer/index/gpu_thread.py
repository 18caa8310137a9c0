"""One thread that owns an engine which no other thread may touch, and batches what they ask."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from embedder.errors import EngineUnavailableError
from embedder.types import Embeddings
from indexer.types import Ids, Scores

Answer = tuple[Scores, Ids]
Search = Callable[[Embeddings, int, int], Answer]
"""queries (Q, D), k, effort -> scores (Q, k), positions (Q, k)."""

MAX_ROWS = 4096
"""Queries in a batch, unless a single request has more."""


@dataclass(frozen=True, slots=True)
class _Request:
    queries: Embeddings
    k: int
    effort: int
    answer: "Future[Answer]" = field(default_factory=Future)


class Owner:
    """Makes the engine in its own thread; every search runs there, as many at once as wait."""

    def __init__(self, make: Callable[[], Search]) -> None:
        """Raises: whatever `make` raises."""
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make, ready), name="gpu-owner", daemon=True
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
