"""How many requests a key, or an address without one, may send: counted here or in Redis."""

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import structlog
from limits import RateLimitItem, parse_many
from limits.aio.storage import MemoryStorage, RedisStorage, Storage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

_PREFIX = "kinlens:1:rate"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one more request fits; `amount`, `remaining` and `retry_after_s` of the rate that
    is nearest to its end. Without a rate everything fits and `amount` is None."""

    allowed: bool = True
    amount: int | None = None
    remaining: int = 0
    retry_after_s: int = 1


def parse_rates(text: str) -> tuple[RateLimitItem, ...]:
    """The rates of a text such as `600/minute` or `10/second;5000/hour`; of an empty one none.

    Raises: ValueError that says what to write.
    """
    if not text.strip():
        return ()
    try:
        rates = tuple(parse_many(text))
    except ValueError:
        rates = ()
    if not rates or any(rate.amount < 1 for rate in rates):
        raise ValueError(
            f"{text!r} is no rate; write such as 600/minute or 10/second;5000/hour, or nothing "
            "for no limit"
        )
    return rates


class SharedCounts:
    """Counters in Redis, for all processes together.

    A call waits at most `timeout_s`; after one that fails nobody asks for `retry_s`.
    """

    def __init__(self, url: str, *, timeout_s: float, retry_s: float, connections: int) -> None:
        self._pool = BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self.storage: Storage = RedisStorage(
            "async+redis://",
            implementation="redispy",
            key_prefix=_PREFIX,
            connection_pool=self._pool,  # type: ignore[arg-type]
        )
        self.timeout_s = timeout_s
        self._retry_s = retry_s
        self._closed_until = -math.inf

    @property
    def usable(self) -> bool:
        """Whether it may be asked now."""
        return time.monotonic() >= self._closed_until

    def fail(self, error: Exception) -> None:
        """Leave Redis alone for a while."""
        if self.usable:
            structlog.get_logger().warning("redis counts no rates", error=type(error).__name__)
        self._closed_until = time.monotonic() + self._retry_s

    async def close(self) -> None:
        """Disconnect."""
        await self._pool.disconnect()


class RateLimits:
    """Counts what each kind of caller does against its rates.

    While Redis does not answer, each process counts for itself, and nobody is refused for it.
    """

    def __init__(self, rates: Mapping[str, str], shared: SharedCounts | None = None) -> None:
        self._rates = {kind: parse_rates(text) for kind, text in rates.items()}
        self._shared = shared
        self._local = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._remote = SlidingWindowCounterRateLimiter(shared.storage) if shared else None

    async def hit(self, kind: str, caller: str) -> Verdict:
        """Count one request of `caller`, and say whether it still fits."""
        rates = self._rates.get(kind, ())
        if not rates:
            return Verdict()
        shared, remote = self._shared, self._remote
        if shared is not None and remote is not None and shared.usable:
            try:
                async with asyncio.timeout(shared.timeout_s):
                    return await _hit(remote, rates, kind, caller)
            except Exception as error:
                # Whatever the client raises, the request is counted here instead.
                shared.fail(error)
        return await _hit(self._local, rates, kind, caller)

    async def close(self) -> None:
        """Disconnect."""
        if self._shared is not None:
            await self._shared.close()


async def _hit(
    limiter: SlidingWindowCounterRateLimiter,
    rates: tuple[RateLimitItem, ...],
    kind: str,
    caller: str,
) -> Verdict:
    verdicts = [await _hit_one(limiter, rate, kind, caller) for rate in rates]
    return min(verdicts, key=lambda v: (v.allowed, v.remaining))


async def _hit_one(
    limiter: SlidingWindowCounterRateLimiter, rate: RateLimitItem, kind: str, caller: str
) -> Verdict:
    fits = await limiter.hit(rate, kind, caller)
    stats = await limiter.get_window_stats(rate, kind, caller)
    wait_s = max(1, math.ceil(stats.reset_time - time.time()))
    return Verdict(fits, rate.amount, stats.remaining, min(wait_s, rate.get_expiry()))
