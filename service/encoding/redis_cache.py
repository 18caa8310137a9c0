"""Redis as the shared cache level, with a short timeout and a circuit breaker; it never raises."""

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import structlog
from redis import ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from kinlens.service.observe.logs import Repeats
from kinlens.service.redis import (
    FAIR_SHARE,
    Part,
    Refusal,
    address_of,
    probe,
    reason_of,
    refusal_text,
    request_budget,
)

T = TypeVar("T")
_FIRST_PROBE_S = 0.1
_CLOSE_S = 1.0
_MAX_PENDING_WRITES = 64
_PROBE_EVERY_S = 10.0


class RedisStore:
    """Values in Redis that expire after `ttl_s`; None if it does not answer in time. Thread safe.

    All reads of one request together wait at most `timeout_s` (`WaitBudget`). The first call that
    fails opens the circuit breaker: later calls return at once, while a background thread probes
    Redis every `retry_s`. The same thread writes values, so no request waits for a write, and
    probes whether Redis permits all commands of the service, at least every `_PROBE_EVERY_S`.
    """

    def __init__(
        self, url: str, *, timeout_s: float, retry_s: float, ttl_s: int, max_value_bytes: int
    ) -> None:
        self._address = address_of(url)
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
        self._outage = ""
        self._faults: dict[Part, Refusal] = {}
        self._probe_at = 0.0
        self._thread = threading.Thread(target=self._serve, name="kinlens-redis", daemon=True)

    @property
    def state(self) -> str:
        """`up`, or `down` if Redis does not answer, or refuses a command that the service uses."""
        return "down" if self._is_down or self._faults else "up"

    @property
    def fault(self) -> str | None:
        """The reason why it is down, with its address and what to do."""
        if self._is_down:
            return f"{self._address}: {self._outage}"
        return f"{self._address}: {refusal_text(self._faults)}" if self._faults else None

    @property
    def pending_writes(self) -> int:
        """Number of queued writes."""
        return self._writes.unfinished_tasks

    def start(self) -> None:
        """Probe Redis once, then serve in the background; without an answer it keeps probing."""
        self._probe()
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
        except ResponseError:
            # Redis is up and refuses, such as without memory; the probe finds out what.
            if not self._faults and self._probe_at:
                self._probe_at = 0.0
                self._wake()
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
            self._outage = f"Redis does not answer ({type(error).__name__}). {reason_of(error)}"
            self._log_outage(error)
            self._wake()

    def _log_outage(self, error: Exception) -> None:
        """Log an outage once. If another was logged a moment ago, it is only counted."""
        times = 0 if self._is_logged else self._outages.due()
        if times:
            self._is_logged = True
            name = type(error).__name__
            structlog.get_logger().warning(
                "redis is away",
                address=self._address,
                error=name,
                detail=reason_of(error),
                times=times,
            )

    def _probe(self) -> None:
        faults = self._call(functools.partial(probe, self._client))
        if faults is not None:
            self._report(faults)

    def _report(self, faults: dict[Part, Refusal]) -> None:
        """Log what Redis refuses once, when that changes."""
        self._probe_at = time.monotonic() + (self._retry_s if faults else _PROBE_EVERY_S)
        if faults != self._faults:
            log, address = structlog.get_logger(), self._address
            if faults:
                log.warning("redis refuses", address=address, detail=refusal_text(faults))
            else:
                log.info("redis works", address=address)
            self._faults = faults

    def _wake(self) -> None:
        with contextlib.suppress(queue.Full):  # a full queue wakes the thread anyway
            self._writes.put_nowait(None)

    def _serve(self) -> None:
        while not self._is_down or self._came_back():
            with contextlib.suppress(queue.Empty):
                item = self._writes.get(timeout=max(0.0, self._probe_at - time.monotonic()) or 0.01)
                if item is not None:
                    key, value = item
                    self._call(functools.partial(self._client.set, key, value, ex=self._ttl_s))
                self._writes.task_done()
            if time.monotonic() >= self._probe_at and not self._ended.is_set():
                self._probe()
            if self._ended.is_set() and self._writes.empty():
                return

    def _came_back(self) -> bool:
        """Probe Redis until it answers; False if the store is closed first."""
        delay_s = min(_FIRST_PROBE_S, self._retry_s)
        while not self._ended.wait(delay_s):
            try:
                faults = probe(self._client)
            except Exception as error:
                self._log_outage(error)
                delay_s = min(2 * delay_s, self._retry_s)
            else:
                if self._is_logged:
                    structlog.get_logger().info("redis is back", address=self._address)
                self._report(faults)
                self._is_down = False
                return True
        return False
