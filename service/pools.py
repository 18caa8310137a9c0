"""A thread pool that refuses work instead of piling it up."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from embedder.errors import OverloadedError

T = TypeVar("T")


class BoundedPool:
    """`workers` threads and at most `queue_size` calls waiting for one.

    A cancelled call that has not started is dropped; one that runs keeps its place until it ends.
    """

    def __init__(self, name: str, workers: int, queue_size: int) -> None:
        self._name = name
        self._limit = workers + queue_size
        self._places = threading.BoundedSemaphore(self._limit)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=f"kinlens-{name}")

    async def run(self, work: Callable[[], T], *, bounded: bool = True) -> T:
        """Call `work` in a thread; `bounded=False` lets the readiness check in when all is full.

        Raises: OverloadedError when no place is free.
        """
        if not bounded:
            return await asyncio.wrap_future(self._threads.submit(work))
        if not self._places.acquire(blocking=False):
            raise OverloadedError(
                f"{self._limit} requests are in the {self._name} stage, which is its limit. "
                "Try again in a second."
            )
        try:
            future = self._threads.submit(work)
        except BaseException:
            self._places.release()
            raise
        future.add_done_callback(self._leave)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drop what waits; what runs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _leave(self, _: Future[T]) -> None:
        self._places.release()
