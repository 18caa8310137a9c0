"""Redis as the shared cache level, with a short timeout and a circuit breaker; it never raises."""

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import structlog
from redis import ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from kinlens.service.observe.logs import Repeats
from kinlens.service.redis import FAIR_SHARE, request_budget

T = TypeVar("T")
_FIRST_PROBE_S = 0.1
_CLOSE_S = 1.0
_MAX_PENDING_WRITES = 64


class RedisStore:
    """Values in Redis that expire after `ttl_s`; None if it does not answer in time. Thread safe.

    All reads of one request together wait at most `timeout_s` (`WaitBudget`). The first call that
    fails opens the circuit breaker: later calls return at once, while a background thread probes
    Redis every `retry_s`. The same thread writes values, so no request waits for a write.
    """

    def __init__(
        self, url: str, *, timeout_s: float, retry_s: float, ttl_s: int, max_value_bytes: int
    ) -> None:
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._ttl_s = ttl_s
        self._max_value_bytes = max_value_bytes
        self._pool = ConnectionPool.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            driver_info=None,  # send no CLIENT SETINFO on connect, which would cost a round trip
        )
        self._client = Redis(connection_pool=self._pool)
        self._writes: queue.Queue[tuple[str, bytes] | None] = queue.Queue(_MAX_PENDING_WRITES)
        self._is_down = False
        self._ended = threading.Event()
        self._outages = Repeats()
        self._is_logged = False
        self._thread = threading.Thread(target=self._serve, name="kinlens-redis", daemon=True)

    @property
    def state(self) -> str:
        """`up` or `down`."""
        return "down" if self._is_down else "up"

    @property
    def pending_writes(self) -> int:
        """Number of queued writes."""
        return self._writes.unfinished_tasks

    def start(self) -> None:
        """Ping Redis once, then serve in the background; without an answer it keeps probing."""
        self._call(self._client.ping)
        self._thread.start()

    def close(self) -> None:
        """Finish queued writes, if Redis answers, and disconnect."""
        self._ended.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        self._client.close()
        self._pool.disconnect()

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """The value of each key, or None if Redis lacks it or is late; one round trip."""
        budget = request_budget(self._timeout_s)
        given_s = budget.remaining_s
        if self._is_down or not given_s:
            return [None] * len(keys)
        with budget.spend():
            found = self._call(
                lambda: self._read(keys, given_s), is_fair=given_s >= FAIR_SHARE * self._timeout_s
            )
        return [None] * len(keys) if found is None else found

    def set(self, key: str, value: bytes) -> None:
        """Queue a write; it is dropped if it is too large, the queue is full, or Redis is down."""
        if len(value) <= self._max_value_bytes and not self._is_down:
            with contextlib.suppress(queue.Full):
                self._writes.put_nowait((key, value))

    def _read(self, keys: Sequence[str], limit_s: float) -> list[bytes | None]:
        connection = self._pool.get_connection()
        try:
            connection.send_command("MGET", *keys)  # type: ignore[no-untyped-call]
            values = connection.read_response(timeout=limit_s)
        finally:
            self._pool.release(connection)
        return [value if isinstance(value, bytes) else None for value in values]

    def _call(self, operation: Callable[[], T], *, is_fair: bool = True) -> T | None:
        """The result of `operation`; None if Redis refuses it or fails.

        A failure opens the breaker, but a timeout does so only if `is_fair`: if the operation had a
        fair share of the time budget.
        """
        try:
            return operation()
        except ResponseError as error:
            # Redis is up and refuses: another type under the key, or out of memory.
            structlog.get_logger().debug("redis refused", error=type(error).__name__)
        except RedisTimeoutError as error:
            if is_fair:
                self._open_breaker(error)
        except Exception as error:
            # Whatever the client raises, the request continues without this cache level.
            self._open_breaker(error)
        return None

    def _open_breaker(self, error: Exception) -> None:
        if not self._is_down:
            self._is_down = True
            self._outages.add()
            self._is_logged = False
            self._log_outage(error)
            self._wake()

    def _log_outage(self, error: Exception) -> None:
        """Log an outage once. If another was logged a moment ago, it is only counted."""
        times = 0 if self._is_logged else self._outages.due()
        if times:
            self._is_logged = True
            name = type(error).__name__
            structlog.get_logger().warning("redis is away", error=name, times=times)

    def _wake(self) -> None:
        with contextlib.suppress(queue.Full):  # a full queue wakes the thread anyway
            self._writes.put_nowait(None)

    def _serve(self) -> None:
        while not self._is_down or self._came_back():
            item = self._writes.get()
            if item is not None:
                key, value = item
                self._call(functools.partial(self._client.set, key, value, ex=self._ttl_s))
            self._writes.task_done()
            if self._ended.is_set() and self._writes.empty():
                return

    def _came_back(self) -> bool:
        """Probe Redis until it answers; False if the store is closed first."""
        delay_s = min(_FIRST_PROBE_S, self._retry_s)
        while not self._ended.wait(delay_s):
            try:
                self._client.ping()
            except Exception as error:
                self._log_outage(error)
                delay_s = min(2 * delay_s, self._retry_s)
            else:
                if self._is_logged:
                    structlog.get_logger().info("redis is back")
                self._is_down = False
                return True
        return False
