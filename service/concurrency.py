"""Thread pools for blocking work, and sharing of identical work between callers.

Queues are bounded, and a hanging call does not delay the exit of the process. The traceback of an
error keeps each frame that it passed, so these drop their future: what a call held, such as a
photo, is freed with its error, and not only by the next garbage collection.
"""

import asyncio
import contextlib
import contextvars
import functools
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

from kinlens.embedder.errors import DeadlineExceededError, OverloadedError

T = TypeVar("T")
V = TypeVar("V")
BulkKind = Literal["batch", "write", "golden", "embed"]
"""Kinds of bulk work: queries of a batch, images of items to store, queries of a golden set, images
whose vectors are the answer.
"""

_CLOSE_S = 1.0


def begin_in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread of its own, which does not delay the exit of the process."""
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def run(future: Future[T]) -> None:
        try:
            future.set_result(context.run(work))
        except BaseException as error:
            future.set_exception(error)
        finally:
            del future

    future.set_running_or_notify_cancel()  # so a cancelled caller does not cancel the thread
    threading.Thread(target=run, args=(future,), name="kinlens-call", daemon=True).start()
    return future


async def in_thread(work: Callable[[], T], limit_s: float | None = None) -> T:
    """The result of `begin_in_thread`. Unlike with `asyncio.to_thread`, the exit of the process
    does not wait for a hanging call.

    Raises: TimeoutError after `limit_s` seconds, if not None; the call continues.
    """
    async with asyncio.timeout(limit_s):
        return await asyncio.wrap_future(begin_in_thread(work))


class DaemonThreads:
    """Up to `count` daemon threads that run calls in order, urgent ones first.

    Unlike executor threads they do not delay the exit of the process. If a call runs longer than
    `overdue_s` seconds, for example a read from an unreachable disk, its thread is replaced and
    exits after the call. There are at most 4 x `count` threads, since calls may be slow because of
    too many threads. Of the calls about one `subject`, such as a file, at most `per_subject` run at
    once, so one hanging file does not block the threads for the others.
    """

    def __init__(
        self, name: str, count: int, overdue_s: float = math.inf, per_subject: int = 1
    ) -> None:
        self._name = name
        self._count = count
        self._overdue_s = overdue_s
        self._threads: list[threading.Thread] = []
        self._per_subject = per_subject
        # The start time and the subject of the current call of each thread.
        self._running: dict[threading.Thread, tuple[float, str | None]] = {}
        self._waiting: OrderedDict[Future[Any], tuple[Callable[[], Any], str | None]] = (
            OrderedDict()
        )
        self._lock = threading.RLock()
        self._idle: list[threading.Lock] = []  # releasing one wakes the thread that waits for it
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of calls that have not started."""
        return len(self._waiting)

    def hangs_s(self, subject: str) -> float:
        """How long calls about `subject` have been overdue, so that no other can start; 0 if one
        can.
        """
        with self._lock:
            running = [since for since, other in self._running.values() if other == subject]
        if len(running) < self._per_subject:
            return 0.0
        longest = time.monotonic() - max(running)
        return longest if longest > self._overdue_s else 0.0

    def submit(
        self, work: Callable[[], T], *, urgent: bool = False, subject: str | None = None
    ) -> Future[T]:
        """Queue `work` to run in a thread, with a copy of the current context.

        Cancelling the future removes a call that has not started.
        """
        future: Future[T] = Future()
        context = contextvars.copy_context()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the {self._name} threads have been closed")
            self._waiting[future] = (lambda: context.run(work)), subject
            if urgent:
                self._waiting.move_to_end(future, last=False)
            self._let_go_of_overdue()
            missing = len(self._waiting) - len(self._idle)
            for _ in range(min(self._count - len(self._threads), missing)):
                name = f"kinlens-{self._name}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            wake = self._idle.pop() if self._idle else None  # the most recently used one
        if wake is not None:
            wake.release()
        future.add_done_callback(self._forget)
        return future

    def call(self, work: Callable[[], T], limit_s: float) -> T:
        """The result of `work`, for which this thread waits. After the limit it continues.

        Raises: TimeoutError after `limit_s` seconds; any error of `work`.
        """
        future = self.submit(work)
        try:
            return future.result(limit_s)
        except TimeoutError:
            future.cancel()
            raise
        finally:
            del future

    def close(self) -> None:
        """Cancel queued calls, and wait up to a second for running ones."""
        with self._lock:
            self._closed = True
            dropped = list(self._waiting)
            while self._idle:
                self._idle.pop().release()
        for future in dropped:
            future.cancel()
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _let_go_of_overdue(self) -> None:
        due = time.monotonic() - self._overdue_s
        for thread, (since, _) in self._running.items():
            lost = len(self._running.keys() - {*self._threads})
            if since < due and thread in self._threads and lost < 3 * self._count:
                self._threads.remove(thread)

    def _serve(self) -> None:
        own = threading.current_thread()
        while own in self._threads and self._call_next(own):
            pass

    def _call_next(self, own: threading.Thread) -> bool:
        with self._lock:
            future = self._next()
            if future is None:
                if self._closed:
                    return False
                self._idle.append(wake := threading.Lock())
                wake.acquire()
            else:
                work, subject = self._waiting.pop(future)
                self._running[own] = time.monotonic(), subject
        if future is None:
            wake.acquire()
            return True
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            finally:
                del future, work
        with self._lock:
            del self._running[own]
            if own not in self._threads and self._idle:  # calls may have waited for this subject
                self._idle.pop().release()
        return True

    def _next(self) -> Future[Any] | None:
        """The first call that may start."""
        running = [subject for _, subject in self._running.values()]
        for future, (_, subject) in self._waiting.items():
            if subject is None or running.count(subject) < self._per_subject:
                return future
        return None

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._waiting.pop(future, None)


def too_late(limit_s: float, what: str, cure: str) -> DeadlineExceededError:
    """The error for an operation `what` that took longer than `limit_s` seconds."""
    return DeadlineExceededError(
        f"{what} took longer than {limit_s:g} s, which is the limit. {cure}"
    )


@contextlib.asynccontextmanager
async def within(
    limit_s: float, what: str, cure: str = "Try again in a second.", since: float | None = None
) -> AsyncIterator[None]:
    """Limit the body to `limit_s` seconds from `since` on, a time of the event loop, by default
    from now on. Raises: DeadlineExceededError.
    """
    begun = asyncio.get_running_loop().time() if since is None else since
    try:
        async with asyncio.timeout_at(begun + limit_s):
            yield
    except TimeoutError as error:
        raise too_late(limit_s, what, cure) from error


class BoundedPool:
    """`workers` threads with a queue of at most `queue_size` calls.

    A cancelled call is dropped if it has not started; a running call keeps its permit until it
    ends. A call that runs longer than `overdue_s` seconds keeps its permit but frees its worker.
    Calls about one subject hold at most a quarter of the permits, and `per_subject` workers.
    """

    def __init__(
        self,
        name: str,
        workers: int,
        queue_size: int,
        overdue_s: float = math.inf,
        per_subject: int = 1,
    ) -> None:
        self._name = name
        self._limit = workers + queue_size
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._free = {False: self._limit, True: self._limit}  # permits of calls, of urgent ones
        self._threads = DaemonThreads(name, workers, overdue_s, per_subject)

    @property
    def waiting(self) -> int:
        """Number of queued calls."""
        return self._threads.waiting

    async def run(
        self,
        work: Callable[[], T],
        *,
        urgent: bool = False,
        bulk: bool = False,
        subject: str | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> T:
        """Call `work` in a thread.

        Args:
            work: the call.
            urgent: run it before all others; urgent calls have their own permits, as many as the
                other calls share.
            bulk: run it without a permit, so it is never refused. The caller must limit the number
                of such calls, for example with `permit`.
            subject: the file or gallery that it is about, for the error message; while a call about
                it hangs, others are refused.
            after: called in any thread once the work has ended, was refused or was dropped.

        Raises: OverloadedError if no permit is free, or the subject does not answer.
        """
        ends = [after]

        def end(_: object = None) -> None:
            while ends:
                ends.pop()()

        try:
            if not bulk:
                self._take(urgent)
                ends.append(functools.partial(self._give, urgent))
            if subject is not None:
                self._hold(subject, bulk)
                ends.append(functools.partial(self._let_go, subject))
            future = self._threads.submit(work, urgent=urgent, subject=subject)
        except BaseException:
            end()
            raise
        future.add_done_callback(end)
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future

    @contextlib.contextmanager
    def permit(self) -> Iterator[None]:
        """Hold one permit, for example for all bulk calls of a request.

        Raises: OverloadedError if none is free.
        """
        self._take(urgent=False)
        try:
            yield
        finally:
            self._give(urgent=False)

    def _take(self, urgent: bool) -> None:
        with self._lock:
            if not self._free[urgent]:
                raise OverloadedError(
                    f"{self._limit} requests are in the {self._name} stage, which is its limit. "
                    "Try again in a second."
                )
            self._free[urgent] -= 1

    def _give(self, urgent: bool) -> None:
        with self._lock:
            self._free[urgent] += 1

    def _hold(self, subject: str, bulk: bool) -> None:
        """Take a permit of a subject. Raises: OverloadedError."""
        hangs_s = self._threads.hangs_s(subject)
        if hangs_s:
            raise OverloadedError(
                f"{subject} has not answered for {hangs_s:.0f} s. Check its disk or server. Try "
                "again when it answers."
            )
        with self._lock:
            if self._held[subject] >= max(1, self._limit // 4) and not bulk:
                raise OverloadedError(
                    f"{subject} has {self._held[subject]} requests waiting, which is the limit. "
                    "Try again in a second."
                )
            self._held[subject] += 1

    def _let_go(self, subject: str) -> None:
        with self._lock:
            self._held[subject] -= 1
            self._held += Counter()  # drops the counts of 0

    def close(self) -> None:
        """Cancel queued calls; hanging ones end with the process."""
        self._threads.close()


class SearchThreads(BoundedPool):
    """The search threads: `workers` threads that each do one search from end to end."""

    def __init__(self, workers: int, queue_size: int, overdue_s: float = math.inf) -> None:
        super().__init__("search", workers, queue_size, overdue_s)
        self._helpers = DaemonThreads("search helper", workers)
        self._helper_count = workers - 1
        self._batches = threading.BoundedSemaphore(max(1, queue_size // 2))
        self._bulk_limits = {kind: asyncio.Semaphore(workers) for kind in get_args(BulkKind)}

    def bulk_limit(self, kind: BulkKind) -> AbstractAsyncContextManager[None]:
        """The semaphore to hold around each bulk call: as many calls of a kind as there are threads
        are queued or running, so a single search waits for few of them.

        Each kind has its own semaphore, because waiters are served in order: a put would otherwise
        wait for every query of all earlier batches.
        """
        return self._bulk_limits[kind]

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Hold one batch slot while the bulk calls of a batch run. Batches have their own slots, so
        they never take the slots of single searches. Raises: OverloadedError when none is free.
        """
        if not self._batches.acquire(blocking=False):
            raise OverloadedError(
                "Too many batches are being answered. Try again in a second, or send searches "
                "one by one."
            )
        try:
            yield
        finally:
            self._batches.release()

    def each(self, work: Callable[[V], T], values: Sequence[V]) -> list[T]:
        """The result of `work` for each value, in this thread and in helpers that are free.

        Raises: the error of the first value with one.
        """
        if len(values) == 1:
            return [work(values[0])]
        results = [Future[T]() for _ in values]
        rest = iter(zip(values, results, strict=True))

        def run() -> None:
            for value, result in rest:
                try:
                    result.set_result(work(value))
                except BaseException as error:
                    result.set_exception(error)
                    deque(rest, maxlen=0)  # skip the others, whose results are not needed
                finally:
                    del value, result

        helpers = [
            self._helpers.submit(run) for _ in range(min(len(values) - 1, self._helper_count))
        ]
        run()
        for helper in helpers:
            helper.cancel()
        try:
            return list(map(Future.result, results))
        finally:
            results.clear()

    def close(self) -> None:
        """Cancel queued calls; hanging ones end with the process."""
        super().close()
        self._helpers.close()


class KeyedThreads:
    """At most one thread per key, so a hanging call only blocks its own key. Of the keys whose
    calls do not hang, `at_once` have a thread.
    """

    def __init__(self, at_once: int) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._running: dict[object, Future[Any]] = {}

    def is_running(self, key: object) -> bool:
        """Whether a call for `key` is running."""
        return key in self._running

    async def run(self, key: object, work: Callable[[], T], limit_s: float | None) -> T:
        """Return the result of `work`, or of the running call for `key`. Use one event loop only.

        Raises: TimeoutError if it runs for `limit_s` seconds, if not None; the call continues.
        """
        slot = contextlib.nullcontext() if key in self._running else self._slots
        async with slot, asyncio.timeout(limit_s):
            future: Future[T] | None = self._running.get(key)
            if future is None:
                # In an empty context, since others share the result.
                run = functools.partial(contextvars.Context().run, work)
                future = self._running[key] = begin_in_thread(run)
                future.add_done_callback(lambda _: self._running.pop(key, None))
            try:
                return await asyncio.shield(asyncio.wrap_future(future))
            finally:
                del future


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class SingleFlight(Generic[T]):
    """Callers with the same key share one task, which is cancelled when the last caller is."""

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[T]] = {}

    async def run(self, key: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `start()`, or of the running task for `key`."""
        flight = self._flights.get(key)
        if flight is None:
            # All callers share the result, whatever the key of the first one permits.
            task = asyncio.create_task(start(), context=contextvars.Context())
            flight = self._flights[key] = _Flight(task)
            del task
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.task.done() or not flight.waiters:
                flight.task.cancel()
                if self._flights.get(key) is flight:
                    del self._flights[key]
            del flight


class Recent(Generic[T]):
    """Caches one result for `keep_s` seconds, so frequent calls are cheap."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]], keep_s: float = 1.0) -> None:
        self._make = make
        self._keep_s = keep_s
        self._made_at = -math.inf
        self._flights: SingleFlight[T] = SingleFlight()
        self._value: T

    async def get(self) -> T:
        """Return the result, up to `keep_s` seconds old. Raises: any error of `make`."""
        if time.monotonic() - self._made_at >= self._keep_s:
            self._value = await self._flights.run("", self._make)
            self._made_at = time.monotonic()
        return self._value
