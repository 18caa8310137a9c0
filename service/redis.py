"""Redis, which services share: a cache level and rate limits. It may fail at any time.

One client with one circuit breaker. All calls of one request together wait at most one timeout.
"""

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, TypeVar, get_args
from urllib.parse import urlsplit

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kinlens.service.observe.logs import Repeats

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
_FIRST_PAUSE_S = 0.1
_RETRY_S = 1.0
_PROBE_EVERY_S = 10.0
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
FAIR_SHARE = 0.5  # of the timeout; a call that had less time does not count as a failure of Redis


class WaitBudget:
    """The total time that one request may still wait for Redis."""

    def __init__(self, total_s: float) -> None:
        self.remaining_s = total_s

    @contextlib.asynccontextmanager
    async def wait(self) -> AsyncIterator[None]:
        """Limit the block to the remaining budget, and subtract its duration.

        Raises: TimeoutError.
        """
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.remaining_s):
                yield
        finally:
            self.remaining_s = max(0.0, self.remaining_s - (time.monotonic() - started))


_BUDGET: ContextVar[WaitBudget | None] = ContextVar("kinlens_redis_budget", default=None)


def request_budget(total_s: float) -> WaitBudget:
    """The budget of the current request, created by the first call in the request."""
    budget = _BUDGET.get()
    if budget is None:
        budget = WaitBudget(total_s)
        _BUDGET.set(budget)
    return budget


def check_url(url: str) -> None:
    """Check a Redis URL; the message never contains its password.

    Raises: ValueError.
    """
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


def bounded_pool(url: str, timeout_s: float, connections: int) -> BlockingConnectionPool:
    """A pool of `connections`; waits for a connection and calls time out after `timeout_s`."""
    return BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )


def address_of(url: str) -> str:
    """The address in a Redis URL, without user, password and options."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def reason_of(error: Exception) -> str:
    """What is wrong with Redis by one of its errors, and what to do. It contains no password."""
    text = f"{type(error).__name__} {error}"
    for pattern, cure in _CURES:
        if re.search(pattern, text):
            return cure
    return "Start it, or correct KINLENS_REDIS_URL."


class Refusal(NamedTuple):
    """A refused command with the reason, and what to do."""

    what: str
    cure: str


async def fault_at(url: str, timeout_s: float) -> str | None:
    """The reason why the service would run without this Redis, or without a part of it."""
    client = Redis.from_pool(bounded_pool(url, timeout_s, 1))
    try:
        faults = await _probe(client, client.register_script(RATE_SCRIPT))
    except Exception as error:  # its message may contain the URL with the password
        text = f"Redis does not answer ({type(error).__name__}); the service works without it. "
        return f"{address_of(url)}: {text}{reason_of(error)}"
    finally:
        await client.aclose()
    return f"{address_of(url)}: {_refusal_text(faults)}" if faults else None


class SharedRedis:
    """The calls of a service to Redis. They never raise, and return None if it does not answer.

    The first call that fails opens the breaker: later calls return at once, while a task probes
    Redis every `_RETRY_S` until it answers. The same task writes values, so that no request waits
    for a write, and probes at least every `_PROBE_EVERY_S` which commands Redis permits.
    """

    def __init__(self, url: str, *, timeout_s: float, ttl_s: int, connections: int) -> None:
        self._client = Redis.from_pool(bounded_pool(url, timeout_s, connections))
        self._script: Any = self._client.register_script(RATE_SCRIPT)
        self._address = address_of(url)
        self._timeout_s = timeout_s
        self._ttl_s = ttl_s
        self._writes: deque[tuple[str, bytes]] = deque()
        self._is_down = True  # until the first probe
        self._outage = "Redis has not been asked yet."
        self._outages = Repeats()
        self._is_logged = False
        self._faults: dict[Part, Refusal] = {}
        self._pause_s = _FIRST_PAUSE_S
        self._probe_at = 0.0
        self._loop: asyncio.AbstractEventLoop
        self._wake: asyncio.Event
        self._serving: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """`up`, or `down` if Redis does not answer, or refuses a command that the service uses."""
        return "down" if self._is_down or self._faults else "up"

    @property
    def fault(self) -> str | None:
        """The reason why it is down, with its address and what to do."""
        if self._is_down:
            return f"{self._address}: {self._outage}"
        return f"{self._address}: {_refusal_text(self._faults)}" if self._faults else None

    @property
    def pending_writes(self) -> int:
        """Number of queued writes."""
        return len(self._writes)

    async def start(self) -> None:
        """Probe Redis once, then serve in the background; without an answer it keeps probing."""
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self._is_down = False
        await self._probe()
        self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """Finish queued writes, if Redis answers, and disconnect."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._write()
        self._is_down = True
        await self._client.aclose()

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """The value of each key, or None if Redis lacks it or is late; one round trip. Only for
        threads other than that of the event loop.
        """
        values = None
        if not self._is_down:
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
        if self._is_down or len(value) > _MAX_VALUE_BYTES or len(self._writes) >= _MAX_WRITES:
            return
        self._writes.append((key, value))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake.set)

    async def count(self, keys: Sequence[str], numbers: Sequence[int]) -> Any:
        """The result of `RATE_SCRIPT`, with the clock of Redis."""
        if "rate limits" in self._faults:
            return None
        return await self._call(lambda: self._script(keys=keys, args=numbers))

    async def _call(self, operation: Callable[[], Awaitable[T]]) -> T | None:
        """The result of `operation` within the rest of the request's budget.

        A failure opens the breaker, but a timeout does so only if it had a fair share of it.
        """
        budget = request_budget(self._timeout_s)
        given_s = budget.remaining_s
        if self._is_down or not given_s:
            return None
        try:
            async with budget.wait():
                return await operation()
        except ResponseError:
            # Redis is up and refuses, such as without memory; the probe finds out what.
            if not self._faults:
                self._probe_at = 0.0
                self._wake.set()
        except (TimeoutError, RedisTimeoutError) as error:
            if given_s >= FAIR_SHARE * self._timeout_s:
                self._open_breaker(error)
        except Exception as error:
            # Whatever the client raises, the request continues without Redis.
            self._open_breaker(error)
        return None

    def _open_breaker(self, error: Exception) -> None:
        if not self._is_down:
            self._is_down = True
            self._outages.add()
            self._is_logged = False
            self._pause_s = _FIRST_PAUSE_S
            self._probe_at = time.monotonic() + self._pause_s
            self._wake.set()
        self._outage = f"Redis does not answer ({type(error).__name__}). {reason_of(error)}"
        # Log an outage once. If another was logged a moment ago, it is only counted.
        if not self._is_logged and (times := self._outages.due()):
            self._is_logged = True
            structlog.get_logger().warning(
                "redis is away",
                address=self._address,
                error=type(error).__name__,
                detail=reason_of(error),
                times=times,
            )

    async def _serve(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._probe_at - time.monotonic())):
                    await self._wake.wait()
            self._wake.clear()
            await self._write()
            if time.monotonic() >= self._probe_at:
                await self._probe()

    async def _write(self) -> None:
        while self._writes and not self._is_down:
            key, value = self._writes[0]
            try:
                await self._client.set(key, value, ex=self._ttl_s)
            except ResponseError:
                if not self._faults:
                    self._probe_at = 0.0
            except Exception as error:
                self._open_breaker(error)
            self._writes.popleft()
        if self._is_down:
            self._writes.clear()

    async def _probe(self) -> None:
        log, address = structlog.get_logger(), self._address
        try:
            faults = await _probe(self._client, self._script)
        except Exception as error:
            self._open_breaker(error)
            self._probe_at = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _RETRY_S)
            return
        if self._is_down and self._is_logged:
            log.info("redis is back", address=address)
        self._is_down = False
        self._probe_at = time.monotonic() + (_RETRY_S if faults else _PROBE_EVERY_S)
        if faults != self._faults:
            self._faults = faults
            if faults:
                log.warning("redis refuses", address=address, detail=_refusal_text(faults))
            else:
                log.info("redis works", address=address)


async def _probe(client: Redis, script: Any) -> dict[Part, Refusal]:
    """Call the commands that the service uses, with its prefix of keys.

    Returns: a refusal for each part that does not work.

    Raises: any error of the client but a refusal.
    """
    keys = f"{_PROBE}:a", f"{_PROBE}:b"
    calls: tuple[tuple[Part, str, Callable[[], Awaitable[object]]], ...] = (
        ("cache", "SET", lambda: client.set(keys[0], b"", px=1)),
        ("cache", "MGET", lambda: client.mget(keys)),
        ("rate limits", "EVALSHA", lambda: script([f"{RATE_PREFIX}:probe"], [1, _US, 1, 1])),
    )
    faults: dict[Part, Refusal] = {}
    for part, command, call in calls:
        try:
            await call()
        except ResponseError as error:
            faults.setdefault(part, Refusal(f"{command}: {str(error)[:_SHOWN]}", reason_of(error)))
    return faults


def _refusal_text(faults: Mapping[Part, Refusal]) -> str:
    """What does not work, what to do, and what does work."""
    refused = " and ".join(f"{part} ({fault.what})" for part, fault in faults.items())
    cures = " ".join(dict.fromkeys(fault.cure for fault in faults.values()))
    working = [part for part in get_args(Part) if part not in faults]
    text = f"Redis refuses commands for {refused}. {cures}"
    return f"{text} It works for {working[0]}." if working else text
