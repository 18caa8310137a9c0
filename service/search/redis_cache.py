"""Redis as the shared cache level: a short timeout, a breaker, and no error that gets out."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import TypeVar
from urllib.parse import urlsplit

import structlog
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from service.observe.log_throttle import Repeats

T = TypeVar("T")
_FIRST_PROBE_S = 0.1
_DATABASE = re.compile(r"/?\d*")
FAIR_SHARE = 0.5  # of the timeout: Redis that had less is not to blame for its silence


class WaitBudget:
    """How long one request may still wait for Redis, in all; waits at the same time count once."""

    def __init__(self, total_s: float) -> None:
        self._left_s = total_s
        self._waiting = 0
        self._since = 0.0

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least 0."""
        running = time.monotonic() - self._since if self._waiting else 0.0
        return max(0.0, self._left_s - running)

    @contextlib.asynccontextmanager
    async def wait(self) -> AsyncIterator[None]:
        """Wait inside this block, for as long as is left.

        Raises: TimeoutError at its end.
        """
        left_s = self.left_s
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting += 1
        try:
            async with asyncio.timeout(left_s):
                yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._left_s -= time.monotonic() - self._since


_BUDGET: ContextVar[WaitBudget | None] = ContextVar("kinlens_redis_budget", default=None)


def request_budget(total_s: float) -> WaitBudget:
    """The budget of the request that runs now; the first call in a request makes it."""
    budget = _BUDGET.get()
    if budget is None:
        budget = WaitBudget(total_s)
        _BUDGET.set(budget)
    return budget


def check_url(url: str) -> None:
    """Refuse an address that no connection can be made from, without showing its password.

    Raises: ValueError.
    """
    try:
        ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]
        parts = urlsplit(url)
        fits = parts.scheme == "unix" or bool(_DATABASE.fullmatch(parts.path))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(
            "the Redis address cannot be read; write redis://USER:PASSWORD@HOST:PORT/DATABASE "
            "(rediss:// for TLS), with numbers for PORT and DATABASE, or unix:///PATH"
        )


def bounded_pool(url: str, timeout_s: float, connections: int) -> BlockingConnectionPool:
    """So many connections; each wait for one, and each call on one, ends after `timeout_s`."""
    return BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )


class RedisStore:
    """Values in Redis under `ttl_s`; what it cannot answer in time is None.

    All reads of one request together wait at most `timeout_s`, for a free connection and for the
    answers; see `WaitBudget`. The first call that fails opens the breaker: later ones return at
    once, while a task of its own asks every `retry_s` whether Redis is back. Waiting for a free
    connection opens nothing.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        retry_s: float,
        ttl_s: int,
        max_value_bytes: int,
        connections: int,
    ) -> None:
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._ttl_s = ttl_s
        self._max_value_bytes = max_value_bytes
        # One connection more, for the probe.
        self._client = Redis.from_pool(bounded_pool(url, timeout_s, connections + 1))
        self._slots = asyncio.Semaphore(connections)
        self._recovery: asyncio.Task[None] | None = None
        self._outages = Repeats()
        self._is_told = False

    @property
    def state(self) -> str:
        """`up` or `down`."""
        return "up" if self._recovery is None else "down"

    async def start(self) -> None:
        """Ask once; if there is no answer, go on without and keep asking."""
        await self._call(self._ping, WaitBudget(self._timeout_s))

    async def close(self) -> None:
        """Stop asking and disconnect."""
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        await self._client.aclose()

    def begin(self) -> None:
        """A request begins: the tasks that it makes share one budget."""
        request_budget(self._timeout_s)

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """The value of each key, if Redis has it and answers in time; one round trip."""

        async def read() -> list[bytes | None]:
            values = await self._client.mget(keys)
            return [value if isinstance(value, bytes) else None for value in values]

        found = await self._call(read, request_budget(self._timeout_s))
        return [None] * len(keys) if found is None else found

    async def set(self, key: str, value: bytes) -> None:
        """Store a value, unless it is too large or Redis is away; no request waits for it."""
        if len(value) > self._max_value_bytes:
            return

        async def write() -> None:
            await self._client.set(key, value, ex=self._ttl_s)

        await self._call(write, WaitBudget(self._timeout_s))

    async def _ping(self) -> None:
        async with asyncio.timeout(self._timeout_s):
            await self._client.ping()

    async def _call(self, operation: Callable[[], Awaitable[T]], budget: WaitBudget) -> T | None:
        if self.state == "down" or not budget.left_s or not await self._enter(budget):
            return None
        given_s = budget.left_s
        try:
            if self.state == "down":
                return None
            async with budget.wait():
                return await operation()
        except ResponseError as error:
            # Redis is there and said no: another type under the key, out of memory.
            structlog.get_logger().debug("redis refused", error=type(error).__name__)
        except TimeoutError as error:
            if given_s >= FAIR_SHARE * self._timeout_s:
                self._open_breaker(error)
        except Exception as error:
            # Whatever the client raises, the request goes on without this level.
            self._open_breaker(error)
        finally:
            self._slots.release()
        return None

    async def _enter(self, budget: WaitBudget) -> bool:
        try:
            async with budget.wait():
                return await self._slots.acquire()
        except TimeoutError:
            return False

    def _open_breaker(self, error: Exception) -> None:
        if self._recovery is None:
            self._outages.add()
            self._is_told = False
            self._tell(error)
            self._recovery = asyncio.create_task(self._recover())

    def _tell(self, error: Exception) -> None:
        """Log an outage once, unless another was logged a moment ago; it is counted then."""
        times = 0 if self._is_told else self._outages.due()
        if times:
            self._is_told = True
            name = type(error).__name__
            structlog.get_logger().warning("redis is away", error=name, times=times)

    async def _recover(self) -> None:
        delay_s = min(_FIRST_PROBE_S, self._retry_s)
        while True:
            await asyncio.sleep(delay_s)
            try:
                await self._ping()
            except Exception as error:
                self._tell(error)
                delay_s = min(2 * delay_s, self._retry_s)
            else:
                if self._is_told:
                    structlog.get_logger().info("redis is back")
                self._recovery = None
                return
