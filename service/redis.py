"""Redis URLs, connection pools, a time budget per request, and a probe of what Redis permits."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from redis import ConnectionPool, Redis
from redis.asyncio import BlockingConnectionPool as AsyncConnectionPool
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

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


def probe(client: Redis) -> dict[Part, Refusal]:
    """Call the commands that the service uses, with its prefix of keys.

    Returns: a refusal for each part that does not work.

    Raises: any error of the client but a refusal.
    """
    keys = f"{_PROBE}:a", f"{_PROBE}:b"
    script = client.register_script(RATE_SCRIPT)
    calls: tuple[tuple[Part, str, Callable[[], object]], ...] = (
        ("cache", "SET", lambda: client.set(keys[0], b"", px=1)),
        ("cache", "MGET", lambda: client.mget(*keys)),
        ("rate limits", "EVALSHA", lambda: script([f"{RATE_PREFIX}:probe"], [1, _US, 1, 1])),
    )
    faults: dict[Part, Refusal] = {}
    for part, command, call in calls:
        try:
            call()
        except ResponseError as error:
            faults.setdefault(part, Refusal(f"{command}: {str(error)[:_SHOWN]}", reason_of(error)))
    return faults


def refusal_text(faults: Mapping[Part, Refusal]) -> str:
    """The result of `probe` as one text: what does not work, what to do, and what does work."""
    refused = " and ".join(f"{part} ({fault.what})" for part, fault in faults.items())
    cures = " ".join(dict.fromkeys(fault.cure for fault in faults.values()))
    working = [part for part in get_args(Part) if part not in faults]
    text = f"Redis refuses commands for {refused}. {cures}"
    return f"{text} It works for {working[0]}." if working else text
