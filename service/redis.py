"""Redis, which services share: a cache level and rate limits. It may fail at any time.

One client with one circuit breaker. All calls of one request together wait at most one timeout.
The library is imported where it is used, since a service without Redis starts sooner without it.
"""

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args
from urllib.parse import urlsplit

import structlog

T = TypeVar("T")

RATE_PREFIX = "kinlens:2:rate"
RATE_SCRIPT = """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local units, must_fit = tonumber(ARGV[2 * #KEYS + 1]), tonumber(ARGV[2 * #KEYS + 2])
local results = {}
for i, key in ipairs(KEYS) do
  local interval, amount = tonumber(ARGV[2 * i - 1]), tonumber(ARGV[2 * i])
  local owed = math.max(0, tonumber(redis.call('GET', key) or '0') - now)
  local fits = owed + must_fit * interval <= amount * interval
  if fits then
    owed = owed + units * interval
    redis.call('SET', key, string.format('%.0f', now + owed), 'PX', math.ceil(owed / 1000))
  end
  results[i] = {fits and 1 or 0, owed}
end
return results
"""
"""Counts a charge against each rate of a caller; see `kinlens.service.access.rates`."""

Part = Literal["cache", "rate limits"]
_PROBE = "kinlens:probe"
_US = 1_000_000
_SHOWN = 120
_RETRY_S = 0.5
_PROBE_EVERY_S = 10.0
_TTL_S = 86_400
_CONNECTIONS = 16
_CLOSE_S = 1.0
_BUSY_LOOP_S = 1.0
_MAX_WRITES = 64
_MAX_VALUE_BYTES = 2**20
_PERMISSIONS = (
    "Give its user these permissions: ~kinlens:* +ping +select +mget +get +set +time +evalsha "
    "+script|load."
)
_CURES = (
    (
        r"Moved|CrossSlot|CROSSSLOT|Ask|[Cc]luster|Hash slot",
        "It is a node of a Redis Cluster, which is not supported. Use a single Redis.",
    ),
    ("ReadOnly", "It is a read-only replica. Name the primary in KINLENS_REDIS_URL."),
    ("NoPermission|NOPERM|no permissions", _PERMISSIONS),
    ("OutOfMemory|OOM", "Its memory is full. Set maxmemory-policy to allkeys-lru."),
    ("MISCONF", "It cannot save to its disk. Free space there, or turn snapshots off."),
    ("Loading", "It is loading its data. Wait until it has started."),
    (
        r"Authentication|NOAUTH|WRONGPASS|invalid username",
        "Put its user and password into KINLENS_REDIS_URL.",
    ),
    (r"DB index|Invalid Database", "Correct the number of the database in KINLENS_REDIS_URL."),
    ("DENIED|protected mode", "It is in protected mode. Set a password in Redis, and in the URL."),
    (
        "unknown command|Protocol|InvalidResponse",
        "It is no complete Redis: a Sentinel, another server, or commands are disabled. Correct "
        "KINLENS_REDIS_URL.",
    ),
)
_DATABASE = re.compile(r"/?\d*")
_FAIR_SHARE = 0.5  # of the timeout; a call that had less time is no failure of Redis


@dataclass(slots=True)
class _Budget:
    """The time that one request may still wait for Redis."""

    left_s: float


_BUDGET: ContextVar[_Budget | None] = ContextVar("kinlens_redis_budget", default=None)


def begin_budget() -> None:
    """Give the request that begins the whole time that it may wait for Redis."""
    _BUDGET.set(None)


def check_url(url: str) -> None:
    """Check a Redis URL; the message never contains its password.

    Raises: ValueError.
    """
    from redis.asyncio import BlockingConnectionPool

    try:
        BlockingConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]
        parts = urlsplit(url)
        fits = parts.scheme == "unix" or bool(_DATABASE.fullmatch(parts.path))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(
            "the Redis URL is not valid; write redis://USER:PASSWORD@HOST:PORT/DATABASE "
            "(rediss:// for TLS), with numbers for PORT and DATABASE, or unix:///PATH"
        )


class _Refusal(NamedTuple):
    """A refused command with the reason, and what to do."""

    what: str
    cure: str


class _Condition(NamedTuple):
    """What works: nothing during an outage, which has a text, or all but the refused parts."""

    outage: str = ""
    refused: tuple[tuple[Part, _Refusal], ...] = ()

    @property
    def fault(self) -> str:
        """What does not work, what to do, and what does work; empty if all works."""
        if self.outage or not self.refused:
            return self.outage
        parts = " and ".join(f"{part} ({refusal.what})" for part, refusal in self.refused)
        cures = " ".join(dict.fromkeys(refusal.cure for _, refusal in self.refused))
        working = [part for part in get_args(Part) if part not in dict(self.refused)]
        text = f"Redis refuses commands for {parts}. {cures}"
        return f"{text} It works for {working[0]}." if working else text


class SharedRedis:
    """The calls of a service to Redis. They never raise, and return None if it does not answer.

    The first call that fails opens the breaker: later calls return at once, while a task probes
    Redis every `_RETRY_S` until it answers. The same task writes values, so that no request waits
    for a write, and probes at least every `_PROBE_EVERY_S` which commands Redis permits.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self._client = Redis.from_pool(
            BlockingConnectionPool.from_url(
                url,
                max_connections=_CONNECTIONS,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        )
        self._script: Any = self._client.register_script(RATE_SCRIPT)
        parts = urlsplit(url)
        self._address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._timeout_s = timeout_s
        self._writes: deque[tuple[str, bytes]] = deque()
        self._condition = _Condition("Redis has not been asked yet.")
        self._probe_at = 0.0
        self._loop: asyncio.AbstractEventLoop
        self._wake: asyncio.Event
        self._serving: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """`up`, or `down` if Redis does not answer, or refuses a command that the service uses."""
        return "down" if self._condition.fault else "up"

    @property
    def fault(self) -> str | None:
        """The reason why it is down, with its address and what to do."""
        return f"{self._address}: {self._condition.fault}" if self._condition.fault else None

    @property
    def pending_writes(self) -> int:
        """Number of queued writes."""
        return len(self._writes)

    async def start(self) -> None:
        """Probe Redis once, then serve in the background; without an answer it keeps probing."""
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self._condition = _Condition()
        self._change(await self._probe())
        self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """Finish queued writes, if Redis answers, and disconnect."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._write()
        self._condition = _Condition("The service is ending.")
        await self._client.aclose()

    async def find_fault(self) -> str | None:
        """Probe Redis, and disconnect; returns `fault`. Instead of `start`."""
        self._condition = await self._probe()
        await self._client.aclose()
        return self.fault

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """The value of each key, or None if Redis lacks it or is late; one round trip. Only for
        threads other than that of the event loop.
        """
        values = None
        if not self._condition.outage:
            asking = asyncio.run_coroutine_threadsafe(
                self._call(lambda: self._client.mget(keys)), self._loop
            )
            with contextlib.suppress(TimeoutError):  # the loop is closing, or very busy
                values = asking.result(_BUSY_LOOP_S + self._timeout_s)
        if values is None:
            return [None] * len(keys)
        return [value if isinstance(value, bytes) else None for value in values]

    def set(self, key: str, value: bytes) -> None:
        """Queue a write, in any thread; it is dropped if it is too large, the queue is full, or
        Redis is down.
        """
        is_full = len(self._writes) >= _MAX_WRITES
        if self._condition.outage or is_full or len(value) > _MAX_VALUE_BYTES:
            return
        self._writes.append((key, value))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake.set)

    async def count(self, keys: Sequence[str], numbers: Sequence[int]) -> Any:
        """The result of `RATE_SCRIPT`, with the clock of Redis."""
        if "rate limits" in dict(self._condition.refused):
            return None
        return await self._call(lambda: self._script(keys=keys, args=numbers))

    async def _call(self, operation: Callable[[], Awaitable[T]]) -> T | None:
        """The result of `operation` within the rest of the request's budget.

        A failure opens the breaker, but a timeout does so only if it had a fair share of it.
        """
        from redis.exceptions import ResponseError
        from redis.exceptions import TimeoutError as RedisTimeoutError

        budget = _BUDGET.get()
        if budget is None:
            _BUDGET.set(budget := _Budget(self._timeout_s))
        limit_s = budget.left_s
        if self._condition.outage or not limit_s:
            return None
        started = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                return await operation()
        except ResponseError:
            self._find_refusal()
        except (TimeoutError, RedisTimeoutError) as error:
            if limit_s >= _FAIR_SHARE * self._timeout_s:
                self._change(_outage(error))
        except Exception as error:
            # Whatever the client raises, the request continues without Redis.
            self._change(_outage(error))
        finally:
            budget.left_s = max(0.0, budget.left_s - (time.monotonic() - started))
        return None

    def _find_refusal(self) -> None:
        """Probe soon: Redis is up and refuses something, such as without memory."""
        if not self._condition.refused:
            self._probe_at = 0.0
            self._wake.set()

    def _change(self, condition: _Condition) -> None:
        """Store what works, log a change, and schedule the next probe."""
        before, self._condition = self._condition, condition
        pause_s = _RETRY_S if condition.fault else _PROBE_EVERY_S
        self._probe_at = time.monotonic() + pause_s
        self._wake.set()
        log, detail = structlog.get_logger().bind(address=self._address), condition.fault
        if condition.outage and not before.outage:
            log.warning("redis is away", detail=detail)
        elif condition.refused and condition.refused != before.refused:
            log.warning("redis refuses", detail=detail)
        elif before.fault and not detail:
            log.info("redis is back")

    async def _serve(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._probe_at - time.monotonic())):
                    await self._wake.wait()
            self._wake.clear()
            await self._write()
            if time.monotonic() >= self._probe_at:
                self._change(await self._probe())

    async def _write(self) -> None:
        from redis.exceptions import ResponseError

        while self._writes and not self._condition.outage:
            key, value = self._writes[0]
            try:
                await self._client.set(key, value, ex=_TTL_S)
            except ResponseError:
                self._find_refusal()
            except Exception as error:
                self._change(_outage(error))
            self._writes.popleft()
        if self._condition.outage:
            self._writes.clear()

    async def _probe(self) -> _Condition:
        """What works of the commands that the service uses, with its prefix of keys."""
        from redis.exceptions import ResponseError

        keys = f"{_PROBE}:a", f"{_PROBE}:b"
        rate = f"{RATE_PREFIX}:probe"
        calls: tuple[tuple[Part, str, Callable[[], Awaitable[object]]], ...] = (
            ("cache", "SET", lambda: self._client.set(keys[0], b"", px=1)),
            ("cache", "MGET", lambda: self._client.mget(keys)),
            ("rate limits", "EVALSHA", lambda: self._script([rate], [1, _US, 1, 1])),
        )
        refused: dict[Part, _Refusal] = {}
        for part, command, call in calls:
            try:
                await call()
            except ResponseError as error:
                text = f"{command}: {str(error)[:_SHOWN]}"
                refused.setdefault(part, _Refusal(text, _cure_of(error)))
            except Exception as error:
                return _outage(error)
        return _Condition(refused=tuple(refused.items()))


def _outage(error: Exception) -> _Condition:
    # The message of the error may contain the URL with the password.
    return _Condition(f"Redis does not answer ({type(error).__name__}). {_cure_of(error)}")


def _cure_of(error: Exception) -> str:
    """What is wrong with Redis by one of its errors, and what to do. It contains no password."""
    text = f"{type(error).__name__} {error}"
    for pattern, cure in _CURES:
        if re.search(pattern, text):
            return cure
    return "Start it, or correct KINLENS_REDIS_URL."
