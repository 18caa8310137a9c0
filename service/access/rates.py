"""Rate limits per API key or address, counted in this process or in Redis.

The algorithm is GCRA (Generic Cell Rate Algorithm), https://en.wikipedia.org/wiki/Generic_cell_rate_algorithm:

- Each unit of work adds a debt of T = period / amount, which decreases as time passes.
- A request is refused, without a debt, if its first unit would raise the debt above the period. So
  a burst of `amount` units is possible, then one unit every T.
- The number of units is only known from the body. The first unit is charged before the body is
  read. The others are charged afterwards, unless concurrent requests have used up the period.
- These may raise the debt above the period, since otherwise a request of more than `amount` units
  could never be answered. The next request must wait until the excess is paid off.

The only state per caller is the time at which its debt will be zero.
"""

import functools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.types import Scope

from kinlens.embedder.errors import RateLimitedError
from kinlens.service.redis import RATE_PREFIX, SharedRedis

DAY_S = 86_400
_PERIODS_S = {"second": 1, "minute": 60, "hour": 3_600, "day": DAY_S}
_PERIOD_NAMES = {seconds: name for name, seconds in _PERIODS_S.items()}
_RATE = re.compile(r"(\d{1,9}) ?/ ?(second|minute|hour|day)")
_US = 1_000_000  # whole microseconds, so Lua and Python compute the same sums
_SWEEP_ABOVE = 1_024
_KNOWN_RATES = 1_024


@dataclass(frozen=True, slots=True)
class Rate:
    """`amount` units of work in each period, one every `interval_us`."""

    amount: int
    period_s: int

    @property
    def interval_us(self) -> int:
        """The debt of one unit in microseconds."""
        return max(1, self.period_s * _US // self.amount)


@dataclass(frozen=True, slots=True)
class RateVerdict:
    """Whether a request is allowed, with the values of the rate that is closest to its limit.

    Without a rate, all requests are allowed and `amount` is None."""

    allowed: bool = True
    amount: int | None = None
    remaining: int = 0
    retry_after_s: int = 1
    period_s: int = 1


@functools.lru_cache(_KNOWN_RATES)
def parse_rates(text: str) -> tuple[Rate, ...]:
    """Parse rates such as `600/minute` or `10/second;5000/hour`; an empty text has no rates.

    Raises: ValueError with a hint.
    """
    if not text.strip():
        return ()
    found = [_RATE.fullmatch(part.strip()) for part in text.split(";")]
    rates = tuple(Rate(int(each[1]), _PERIODS_S[each[2]]) for each in found if each)
    if len(rates) < len(found) or any(rate.amount < 1 for rate in rates):
        raise ValueError(
            f"{text!r} is not a rate; write for example 600/minute or 10/second;5000/hour, or "
            "an empty text for no limit"
        )
    return rates


@dataclass(frozen=True, slots=True)
class Charge:
    """`units` of work to charge, if `must_fit` of them still fit into the period."""

    units: int
    must_fit: int


FIRST = Charge(units=1, must_fit=1)
"""The charge of each request before its body is read."""

Debt = tuple[bool, int]
"""Whether a charge fits, and the debt of the caller in microseconds."""


class LocalCounts:
    """Counters of this process."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._paid_at_us: dict[tuple[str, str, Rate], int] = {}
        self._sweep_above = _SWEEP_ABOVE

    def __len__(self) -> int:
        """The number of stored callers, per rate."""
        return len(self._paid_at_us)

    def hit(self, rates: Sequence[Rate], kind: str, caller: str, charge: Charge) -> list[Debt]:
        """Count a charge against each rate."""
        now = self._clock_ns() // 1_000
        if len(self._paid_at_us) > self._sweep_above:  # remove callers without debt
            self._paid_at_us = {k: at for k, at in self._paid_at_us.items() if at > now}
            self._sweep_above = max(_SWEEP_ABOVE, 2 * len(self._paid_at_us))
        debts = []
        for rate in rates:
            key = kind, caller, rate
            owed = max(0, self._paid_at_us.get(key, 0) - now)
            fits = owed + charge.must_fit * rate.interval_us <= rate.amount * rate.interval_us
            if fits:
                owed += charge.units * rate.interval_us
                self._paid_at_us[key] = now + owed
            debts.append((fits, owed))
        return debts


class RateLimits:
    """Counts the requests of each kind of caller against its rates.

    While Redis does not answer, each process counts alone, and no request is refused for that.
    """

    def __init__(
        self,
        rates: Mapping[str, str],
        shared: SharedRedis | None = None,
        local: LocalCounts | None = None,
    ) -> None:
        self._rates = {kind: parse_rates(text) for kind, text in rates.items()}
        self._shared = shared
        self._local = LocalCounts() if local is None else local

    async def hit(
        self,
        kind: str,
        caller: str,
        charge: Charge = FIRST,
        rates: Sequence[Rate] | None = None,
    ) -> RateVerdict:
        """Count a charge of `caller` against its own `rates`, or else the rates of its kind."""
        rates = self._rates.get(kind, ()) if rates is None else rates
        if not rates:
            return RateVerdict()
        debts = None
        if self._shared is not None:
            names = [f"{RATE_PREFIX}:{kind}:{caller}:{one.amount}/{one.period_s}" for one in rates]
            numbers = [number for rate in rates for number in (rate.interval_us, rate.amount)]
            debts = await self._shared.count(names, [*numbers, charge.units, charge.must_fit])
        if debts is None:
            debts = self._local.hit(rates, kind, caller, charge)
        verdicts = [_verdict(rate, *each) for rate, each in zip(rates, debts, strict=True)]
        # A refusal before anything else, then the rate that is closest to its limit.
        return min(verdicts, key=lambda v: (v.allowed, v.remaining, -v.retry_after_s))


@dataclass(slots=True)
class Account:
    """The charges of one request to its caller, by the caller's own rates or those of its kind.

    `verdict` is the result of the last charge, `units` the total of charged units.
    """

    limits: RateLimits
    kind: str
    caller: str
    rates: Sequence[Rate] | None = None
    verdict: RateVerdict = RateVerdict()
    units: int = 0

    async def open(self) -> None:
        """Charge the first unit. Raises: RateLimitedError."""
        await self._charge(FIRST, "")

    async def owe(self, units: int) -> None:
        """Charge the remaining units, once it is known that the request has more than one.

        Raises: RateLimitedError.
        """
        await self._charge(Charge(units - 1, must_fit=0), f" This one counts as {units:,}.")

    async def _charge(self, charge: Charge, units_text: str) -> None:
        self.verdict = verdict = await self.limits.hit(self.kind, self.caller, charge, self.rates)
        if not verdict.allowed:
            rate = f"{verdict.amount:,} per {_PERIOD_NAMES[verdict.period_s]}"
            raise RateLimitedError(
                f"This {self.kind} has sent more requests than its limit of {rate} allows."
                f"{units_text} Try again in {verdict.retry_after_s} s.",
                verdict.retry_after_s,
            )
        self.units += charge.units


def account_of(scope: Scope) -> Account:
    """The account that the admission opened for this request."""
    account: Account = scope["state"]["account"]
    return account


def _verdict(rate: Rate, fits: bool, owed_us: int) -> RateVerdict:
    """The verdict for one rate. The next unit fits once the fraction of an interval in the debt,
    and any debt beyond the period, has been paid off.
    """
    remaining = max(0, rate.amount - -(-owed_us // rate.interval_us))
    most_us = (rate.amount - 1) * rate.interval_us
    wait_us = max(owed_us % rate.interval_us or rate.interval_us, owed_us - most_us)
    retry_s = max(1, math.ceil(wait_us / _US))
    return RateVerdict(bool(fits), rate.amount, remaining, retry_s, rate.period_s)
