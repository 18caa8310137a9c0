"""Redis URLs, bounded connection pools, and a time budget for Redis per request."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from urllib.parse import urlsplit

from redis import ConnectionPool
from redis.asyncio import BlockingConnectionPool as AsyncConnectionPool
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff

_DATABASE = re.compile(r"/?\d*")
FAIR_SHARE = 0.5  # of the timeout; a call that had less time does not count as a failure of Redis


class WaitBudget:
    """The total time that one request may still wait for Redis."""

    def __init__(self, total_s: float) -> None:
        self.remaining_s = total_s

    @contextlib.contextmanager
    def spend(self) -> Iterator[None]:
        """Subtract the duration of the block from the budget."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.remaining_s = max(0.0, self.remaining_s - (time.monotonic() - started))

    @contextlib.asynccontextmanager
    async def wait(self) -> AsyncIterator[None]:
        """Limit the block to the remaining budget.

        Raises: TimeoutError.
        """
        with self.spend():
            async with asyncio.timeout(self.remaining_s):
                yield


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
        ConnectionPool.from_url(url).make_connection()
        parts = urlsplit(url)
        fits = parts.scheme == "unix" or bool(_DATABASE.fullmatch(parts.path))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(
            "the Redis URL is not valid; write redis://USER:PASSWORD@HOST:PORT/DATABASE "
            "(rediss:// for TLS), with numbers for PORT and DATABASE, or unix:///PATH"
        )


def bounded_pool(url: str, timeout_s: float, connections: int) -> AsyncConnectionPool:
    """A pool of `connections`; waits for a connection and calls time out after `timeout_s`."""
    return AsyncConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=AsyncRetry(NoBackoff(), 0),
        protocol=2,
    )
