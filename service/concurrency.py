"""Threads for work that blocks, and work that is shared by those who ask for it at the same time.

What waits for a thread is bounded, and work that hangs holds up no exit.
"""

import asyncio
import contextlib
import contextvars
import functools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kinlens.embedder.errors import DeadlineExceededError, OverloadedError
from kinlens.service.access.binding import EVERYTHING, calling

T = TypeVar("T")
_CLOSE_S = 1.0


class DaemonThreads:
    """Up to `count` threads that run calls in order, urgent ones first.

    Unlike the threads of an executor they end with the process, even in the middle of a call. A
    call that runs longer than `overdue_s` seconds, such as a read from a disk that is away, loses
    its thread: another one takes its place, and it ends when the call does. There are never more
    than four times `count` threads, since calls may be slow because there are too many.
    """

    def __init__(self, name: str, count: int, overdue_s: float = math.inf) -> None:
        self._name = name
        self._count = count
        self._overdue_s = overdue_s
        self._threads: list[threading.Thread] = []
        self._running: dict[threading.Thread, float] = {}  # since when
        self._waiting: OrderedDict[Future[Any], Callable[[], Any]] = OrderedDict()
        self._lock = threading.RLock()
        self._idle: list[threading.Condition] = []  # of each idle thread, the last used one last
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
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the {self._name} threads have been closed")
            self._waiting[future] = lambda: context.run(work)
            if urgent:
                self._waiting.move_to_end(future, last=False)
            self._let_go_of_overdue()
            missing = len(self._waiting) - len(self._idle)
            for _ in range(min(self._count - len(self._threads), missing)):
                self._start_thread()
            if self._idle:
                self._idle.pop().notify()
        future.add_done_callback(self._forget)
        return future

    def close(self) -> None:
        """Drop what waits, and give what runs a moment to end."""
        with self._lock:
            self._closed = True
            dropped = list(self._waiting)
            for idle in self._idle:
                idle.notify()
        for future in dropped:
            future.cancel()
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _let_go_of_overdue(self) -> None:
        due = time.monotonic() - self._overdue_s
        for thread, since in self._running.items():
            lost = len(self._running.keys() - {*self._threads})
            if since < due and thread in self._threads and lost < 3 * self._count:
                self._threads.remove(thread)

    def _start_thread(self) -> None:
        name = f"kinlens-{self._name}"
        self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
        self._threads[-1].start()

    def _serve(self) -> None:
        own = threading.current_thread()
        while own in self._threads and self._call_next(own):
            pass

    def _call_next(self, own: threading.Thread) -> bool:
        with self._lock:
            while not self._waiting and not self._closed:
                self._idle.append(wake := threading.Condition(self._lock))
                wake.wait()
            if not self._waiting:
                return False
            future, work = self._waiting.popitem(last=False)
            self._running[own] = time.monotonic()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            finally:
                del future, work  # the traceback of an error would keep them
        with self._lock:
            del self._running[own]
        return True

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._waiting.pop(future, None)


def too_late(limit_s: float, what: str, cure: str) -> DeadlineExceededError:
    """The error that says what took longer than `limit_s` seconds."""
    return DeadlineExceededError(
        f"{what} took longer than {limit_s:g} s, which is the limit. {cure}"
    )


@contextlib.asynccontextmanager
async def within(
    limit_s: float, what: str, cure: str = "Try again in a second."
) -> AsyncIterator[None]:
    """Do it within `limit_s` seconds. Raises: `too_late`."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise too_late(limit_s, what, cure) from error


class BoundedPool:
    """`workers` threads and at most `queue_size` calls waiting for one.

    A cancelled call that has not started is dropped; one that runs keeps its place until it ends.
    One that runs longer than `overdue_s` seconds keeps its place, but does not occupy a worker.
    """

    def __init__(
        self, name: str, workers: int, queue_size: int, overdue_s: float = math.inf
    ) -> None:
        self._name = name
        self._limit = workers + queue_size
        self._places = threading.BoundedSemaphore(self._limit)
        self._urgent_places = threading.BoundedSemaphore(self._limit)
        self._threads = DaemonThreads(name, workers, overdue_s)

    @property
    def waiting(self) -> int:
        """Calls that wait for a thread."""
        return self._threads.waiting

    async def run(
        self,
        work: Callable[[], T],
        *,
        urgent: bool = False,
        patient: bool = False,
        after: Callable[[], None] = lambda: None,
    ) -> T:
        """Call `work` in a thread. An `urgent` call goes first and has one of as many places as
        the others share; a `patient` one is never refused, so whoever makes such calls bounds how
        many there are, as with `place`. `after` is called once the work is over, was refused or
        dropped, in any thread.

        Raises: OverloadedError when no place is free.
        """
        with contextlib.ExitStack() as held:
            held.callback(after)
            if not patient:
                held.enter_context(self.place(urgent=urgent))
            future = self._threads.submit(work, urgent=urgent)
            until_done = held.pop_all()
            future.add_done_callback(lambda _: until_done.close())
        return await asyncio.wrap_future(future)

    @contextlib.contextmanager
    def place(self, *, urgent: bool = False) -> Iterator[None]:
        """Hold one place, as for all the patient calls of a request.

        Raises: OverloadedError when none is free.
        """
        places = self._urgent_places if urgent else self._places
        if not places.acquire(blocking=False):
            raise OverloadedError(
                f"{self._limit} requests are in the {self._name} stage, which is its limit. "
                "Try again in a second."
            )
        try:
            yield
        finally:
            places.release()

    def close(self) -> None:
        """Drop what waits; what hangs ends with the process."""
        self._threads.close()


class OwnThreads:
    """A thread for each key at most: a call that hangs costs one, and holds up no other key."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: dict[object, Future[Any]] = {}

    def is_running(self, key: object) -> bool:
        """Whether a call for `key` is under way."""
        return key in self._running

    async def run(self, key: object, work: Callable[[], T], limit_s: float | None) -> T:
        """The result of `work`, or of the call for `key` that is under way. Belongs to one event
        loop. Raises: TimeoutError after `limit_s`, if there is a limit; the call goes on.
        """
        future: Future[T] | None = self._running.get(key)
        if future is None or future.done():
            future = self._running[key] = Future()
            target = functools.partial(self._call, key, work, future)
            threading.Thread(target=target, name=f"kinlens-{self._name}", daemon=True).start()
        async with asyncio.timeout(limit_s):
            return await asyncio.shield(asyncio.wrap_future(future))

    def _call(self, key: object, work: Callable[[], T], future: Future[T]) -> None:
        future.set_running_or_notify_cancel()  # so that nobody who leaves cancels it for others
        try:
            result = work()
        except BaseException as error:
            self._running.pop(key, None)
            future.set_exception(error)
        else:
            self._running.pop(key, None)
            future.set_result(result)


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class SingleFlight(Generic[T]):
    """Callers of the same key share one task, which is cancelled when the last of them leaves."""

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[T]] = {}

    async def run(self, key: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `start()`, or of the call for `key` that is under way."""
        flight = self._flights.get(key)
        if flight is None:
            with calling(EVERYTHING):  # the work is for all who wait, not for the first of them
                flight = _Flight(asyncio.create_task(start()))
            self._flights[key] = flight
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.task.done() or not flight.waiters:
                self._end(key, flight)

    def _end(self, key: str, flight: _Flight[T]) -> None:
        flight.task.cancel()
        if self._flights.get(key) is flight:
            del self._flights[key]


class Recent(Generic[T]):
    """One result for all who ask within `keep_s` seconds, so that asking often costs little."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]], keep_s: float = 1.0) -> None:
        self._make = make
        self._keep_s = keep_s
        self._made_at = -math.inf
        self._flights: SingleFlight[T] = SingleFlight()
        self._value: T

    async def get(self) -> T:
        """The result, made now or up to `keep_s` ago. Raises: what making it raises."""
        if time.monotonic() - self._made_at >= self._keep_s:
            self._value = await self._flights.run("", self._make)
            self._made_at = time.monotonic()
        return self._value
