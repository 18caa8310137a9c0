"""How many requests a key, or an address without one, may send: counted here or in Redis."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog
from limits import RateLimitItem, parse_many
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from service.access.windows import Window, Windows
from service.observe.log_throttle import Repeats
from service.search.redis_cache import FAIR_SHARE, request_budget


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

    A call waits at most `timeout_s`, less what its request has waited for Redis before, and is one
    round trip. After one that fails nobody asks for `retry_s`.
    """

    def __init__(self, url: str, *, timeout_s: float, retry_s: float, connections: int) -> None:
        self._windows = Windows(url, timeout_s, connections)
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._closed_until = -math.inf
        self._failures = Repeats()

    async def hit(
        self, rates: Sequence[RateLimitItem], kind: str, caller: str
    ) -> list[Window] | None:
        """Count one request in each rate; None if Redis does not answer, whatever the reason."""
        budget = request_budget(self._timeout_s)
        given_s = budget.left_s
        if time.monotonic() < self._closed_until or not given_s:
            return None
        try:
            async with budget.wait():
                return await self._windows.hit(rates, kind, caller)
        except TimeoutError as error:
            if given_s >= FAIR_SHARE * self._timeout_s:
                self._fail(error)
        except Exception as error:
            # Whatever the client raises, the request is counted here instead.
            self._fail(error)
        return None

    async def close(self) -> None:
        """Disconnect."""
        await self._windows.close()

    def _fail(self, error: Exception) -> None:
        """Leave Redis alone for a while."""
        if time.monotonic() >= self._closed_until:
            self._failures.add()
        times = self._failures.due()
        if times:
            name = type(error).__name__
            structlog.get_logger().warning("redis counts no rates", error=name, times=times)
        self._closed_until = time.monotonic() + self._retry_s


class RateLimits:
    """Counts what each kind of caller does against its rates.

    While Redis does not answer, each process counts for itself, and nobody is refused for it.
    """

    def __init__(self, rates: Mapping[str, str], shared: SharedCounts | None = None) -> None:
        self._rates = {kind: parse_rates(text) for kind, text in rates.items()}
        self._shared = shared
        self._local = SlidingWindowCounterRateLimiter(MemoryStorage())

    async def hit(self, kind: str, caller: str) -> Verdict:
        """Count one request of `caller`, and say whether it still fits."""
        rates = self._rates.get(kind, ())
        if not rates:
            return Verdict()
        windows = None if self._shared is None else await self._shared.hit(rates, kind, caller)
        if windows is None:
            windows = [await self._hit_here(rate, kind, caller) for rate in rates]
        verdicts = [_verdict(rate, window) for rate, window in zip(rates, windows, strict=True)]
        return min(verdicts, key=lambda v: (v.allowed, v.remaining))

    async def close(self) -> None:
        """Disconnect."""
        if self._shared is not None:
            await self._shared.close()

    async def _hit_here(self, rate: RateLimitItem, kind: str, caller: str) -> Window:
        fits = await self._local.hit(rate, kind, caller)
        stats = await self._local.get_window_stats(rate, kind, caller)
        return Window(fits, stats.remaining, stats.reset_time - time.time())


def _verdict(rate: RateLimitItem, window: Window) -> Verdict:
    wait_s = max(1, math.ceil(window.reset_in_s))
    return Verdict(window.fits, rate.amount, window.remaining, min(wait_s, rate.get_expiry()))
