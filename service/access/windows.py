"""Sliding windows of rates in Redis: counted and looked at in one round trip."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from limits import RateLimitItem
from limits.aio.storage import RedisStorage
from redis.exceptions import NoScriptError

from service.search.redis_cache import bounded_pool

_PREFIX = "kinlens:1:rate"


@dataclass(frozen=True, slots=True)
class Window:
    """What a rate says to one more request; `reset_in_s` is when it has room for another."""

    fits: bool
    remaining: int
    reset_in_s: float


class Windows:
    """The counters of `limits`, asked through one pipeline instead of one call after the other."""

    def __init__(self, url: str, timeout_s: float, connections: int) -> None:
        self._pool = bounded_pool(url, timeout_s, connections)
        self._storage: Any = RedisStorage(
            "async+redis://",
            implementation="redispy",
            key_prefix=_PREFIX,
            connection_pool=self._pool,  # type: ignore[arg-type]
        )

    async def hit(self, rates: Sequence[RateLimitItem], kind: str, caller: str) -> list[Window]:
        """Count one request of `caller` in each rate.

        Raises: redis.RedisError.
        """
        try:
            return await self._ask(rates, kind, caller)
        except NoScriptError:  # a Redis that was started again has forgotten them
            bridge = self._storage.bridge
            for script in (bridge.lua_acquire_sliding_window, bridge.lua_sliding_window):
                await bridge.get_connection().script_load(script.script)
            return await self._ask(rates, kind, caller)

    async def close(self) -> None:
        """Disconnect."""
        await self._pool.disconnect()

    async def _ask(self, rates: Sequence[RateLimitItem], kind: str, caller: str) -> list[Window]:
        bridge = self._storage.bridge
        pipeline = bridge.get_connection().pipeline(transaction=False)
        for rate in rates:
            keys = self._keys(rate, kind, caller)
            expiry_s = rate.get_expiry()
            count = bridge.lua_acquire_sliding_window.sha
            pipeline.evalsha(count, len(keys), *keys, rate.amount, expiry_s, 1)
            pipeline.evalsha(bridge.lua_sliding_window.sha, len(keys), *keys, expiry_s)
        said = await pipeline.execute()
        pairs = zip(said[::2], said[1::2], strict=True)
        return [_window(rate, *pair) for rate, pair in zip(rates, pairs, strict=True)]

    def _keys(self, rate: RateLimitItem, kind: str, caller: str) -> list[str]:
        key, storage = rate.key_for(kind, caller), self._storage
        windows = (storage._previous_window_key(key), storage._current_window_key(key))
        return [storage.bridge.prefixed_key(window) for window in windows]


def _window(rate: RateLimitItem, fits: object, said: Sequence[bytes | int | None]) -> Window:
    """From counts and milliseconds to live of the window before this one and of this one."""
    before, before_ms, now, now_ms = (max(0, int(number or 0)) for number in said)
    expiry_s = rate.get_expiry()
    weighted = before * (before_ms / 1e3) / expiry_s + now
    resets = [now_ms / 1e3 % expiry_s] if now else []
    resets += [before_ms / 1e3 % (expiry_s / before)] if before else []
    return Window(bool(fits), max(0, rate.amount - math.floor(weighted)), min(resets, default=0.0))
