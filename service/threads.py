"""Threads for work that blocks: what waits is bounded, and work that hangs holds up no exit."""

import asyncio
import contextvars
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from embedder.errors import OverloadedError

T = TypeVar("T")
_CLOSE_S = 1.0


class DaemonThreads:
    """Up to `count` threads that run calls in order, urgent ones first.

    Unlike the threads of an executor they end with the process, even in the middle of a call.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._threads: list[threading.Thread] = []
        self._waiting: OrderedDict[Future[Any], Callable[[], Any]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Calls that have not started."""
        return len(self._waiting)

    def submit(self, work: Callable[[], T], *, urgent: bool = False) -> Future[T]:
        """Let a thread call `work` in the context of this call; cancelling the future takes back
        what has not started.
        """
        future: Future[T] = Future()
        context = contextvars.copy_context()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the {self._name} threads have been closed")
            self._waiting[future] = lambda: context.run(work)
            if urgent:
                self._waiting.move_to_end(future, last=False)
            if len(self._threads) < self._count:
                self._start_thread()
            self._changed.notify()
        future.add_done_callback(self._forget)
        return future

    def close(self) -> None:
        """Drop what waits, and give what runs a moment to end."""
        with self._changed:
            self._closed = True
            dropped = list(self._waiting)
            self._changed.notify_all()
        for future in dropped:
            future.cancel()
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_thread(self) -> None:
        name = f"kinlens-{self._name}-{len(self._threads)}"
        self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
        self._threads[-1].start()

    def _serve(self) -> None:
        while self._call_next():
            pass

    def _call_next(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return False
            future, work = self._waiting.popitem(last=False)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            finally:
                del future, work  # the traceback of an error would keep them
        return True

    def _forget(self, future: Future[Any]) -> None:
        with self._changed:
            self._waiting.pop(future, None)


class BoundedPool:
    """`workers` threads and at most `queue_size` calls waiting for one.

    A cancelled call that has not started is dropped; one that runs keeps its place until it ends.
    """

    def __init__(self, name: str, workers: int, queue_size: int) -> None:
        self._name = name
        self._limit = workers + queue_size
        self._places = threading.BoundedSemaphore(self._limit)
        self._threads = DaemonThreads(name, workers)

    @property
    def waiting(self) -> int:
        """Calls that wait for a thread."""
        return self._threads.waiting

    async def run(self, work: Callable[[], T], *, urgent: bool = False, patient: bool = False) -> T:
        """Call `work` in a thread. An `urgent` call goes first; neither it nor a `patient` one is
        ever refused, so whoever makes them bounds how many there are.

        Raises: OverloadedError when no place is free.
        """
        if urgent or patient:
            return await asyncio.wrap_future(self._threads.submit(work, urgent=urgent))
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
        """Drop what waits; what hangs ends with the process."""
        self._threads.close()

    def _leave(self, _: Future[Any]) -> None:
        self._places.release()
