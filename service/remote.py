"""Redis as the shared cache level: a short timeout, a breaker, and no error that gets out."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import urlsplit

import structlog
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

T = TypeVar("T")
_FIRST_PROBE_S = 0.1
_DATABASE = re.compile(r"/?\d*")


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


class RedisStore:
    """Values in Redis under `ttl_s`; what it cannot answer in time is None.

    A call waits at most about `timeout_s` for a free connection, and as long again for the answer.
    The first call that fails opens the breaker: later ones return at once, while a task of its own
    asks every `retry_s` whether Redis is back. Waiting for a free connection opens nothing.
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
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=connections + 1,  # one for the probe
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._client = Redis.from_pool(pool)
        self._slots = asyncio.Semaphore(connections)
        self._recovery: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """`up` or `down`."""
        return "up" if self._recovery is None else "down"

    async def start(self) -> None:
        """Ask once; if there is no answer, go on without and keep asking."""
        await self._call(self._ping)

    async def close(self) -> None:
        """Stop asking and disconnect."""
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        await self._client.aclose()

    async def get(self, key: str) -> bytes | None:
        """The value of `key`, if Redis has it and answers in time."""

        async def read() -> bytes | None:
            value = await self._client.get(key)
            return value if isinstance(value, bytes) else None

        return await self._call(read)

    async def set(self, key: str, value: bytes) -> None:
        """Store a value, unless it is too large or Redis is away."""
        if len(value) > self._max_value_bytes:
            return

        async def write() -> None:
            await self._client.set(key, value, ex=self._ttl_s)

        await self._call(write)

    async def _ping(self) -> None:
        async with asyncio.timeout(self._timeout_s):
            await self._client.ping()

    async def _call(self, operation: Callable[[], Awaitable[T]]) -> T | None:
        if self.state == "down" or not await self._enter():
            return None
        try:
            if self.state == "down":
                return None
            async with asyncio.timeout(self._timeout_s):
                return await operation()
        except ResponseError as error:
            # Redis is there and said no: another type under the key, out of memory.
            structlog.get_logger().debug("redis refused", error=type(error).__name__)
        except Exception as error:
            # Whatever the client raises, the request goes on without this level.
            self._open_breaker(error)
        finally:
            self._slots.release()
        return None

    async def _enter(self) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._slots.acquire()
        except TimeoutError:
            return False

    def _open_breaker(self, error: Exception) -> None:
        if self._recovery is None:
            structlog.get_logger().warning("redis is away", error=type(error).__name__)
            self._recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        delay_s = min(_FIRST_PROBE_S, self._retry_s)
        while True:
            await asyncio.sleep(delay_s)
            try:
                await self._ping()
            except Exception:
                delay_s = min(2 * delay_s, self._retry_s)
            else:
                structlog.get_logger().info("redis is back")
                self._recovery = None
                return
