"""Pictures made for the screen: JPEGs that fit a side, made in the decoding processes and kept."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from kinlens.embedder.errors import (
    DeadlineExceededError,
    ImageCostError,
    ImageError,
    ItemNotFoundError,
    OverloadedError,
)
from kinlens.embedder.preprocess import MAX_SIDE_PX, ImageLimits
from kinlens.indexer.images import ANY_SIZE
from kinlens.service.concurrency import SingleFlight, within
from kinlens.service.encoding.cache import LruCache
from kinlens.service.encoding.threads import SearchThreads

SIDES_PX = (160, 320, 640)
"""Longest sides of the small pictures that can be asked for."""

_KEPT_BYTES = 64 * 2**20
_KEPT = 10_000
_PAUSE_S = 30.0


class Renditions:
    """Makes and keeps them; belongs to the thread of the event loop.

    At most `at_once` are made at the same time, so that searches find decoding processes free.
    """

    def __init__(
        self,
        search_threads: SearchThreads,
        limits: ImageLimits,
        at_once: int,
        waiting: int,
        limit_s: float,
    ) -> None:
        """`limits` are those of uploads; bytes do not count, since the file is here already."""
        self._search_threads = search_threads
        self._limits = replace(limits, max_bytes=ANY_SIZE.max_bytes)
        self._places = asyncio.Semaphore(at_once)
        self._most = at_once + waiting
        self._under_way = 0
        self._limit_s = limit_s
        self._kept = LruCache(_KEPT, _KEPT_BYTES)
        self._costly: dict[str, float] = {}  # given up until then: nobody keeps the processes busy
        self._flights: SingleFlight[bytes] = SingleFlight()

    async def get(
        self, key: str, read: Callable[[], Awaitable[bytes]], side_px: int | None = None
    ) -> bytes:
        """The picture `key` as a JPEG, from what `read` gives; `side_px` None: MAX_SIDE_PX.

        Raises: ItemNotFoundError if it cannot be shown, OverloadedError, DeadlineExceededError;
            what `read` raises.
        """
        side_px = side_px or MAX_SIDE_PX
        key = f"{key}-{side_px}"
        if (kept := self._kept.get(key)) is not None:
            return kept
        if self._costly.get(key, 0.0) > time.monotonic():
            raise _too_costly()
        async with within(self._limit_s, "Making the picture"):
            return await self._flights.run(key, lambda: self._make(key, read, side_px))

    async def _make(self, key: str, read: Callable[[], Awaitable[bytes]], side_px: int) -> bytes:
        if self._under_way >= self._most:
            raise OverloadedError(
                f"{self._under_way} pictures are being made, which is the limit. "
                "Try again in a second."
            )
        self._under_way += 1
        try:
            async with self._places:
                data = await read()
                made = await self._search_threads.render(data, self._limits, side_px)
        except ImageCostError as error:
            now = time.monotonic()
            self._costly = {name: until for name, until in self._costly.items() if until > now}
            self._costly[key] = now + _PAUSE_S
            raise _too_costly() from error
        except ImageError as error:
            raise ItemNotFoundError(f"The picture of this item cannot be shown: {error}") from error
        finally:
            self._under_way -= 1
        self._kept.set(key, made)
        return made


def _too_costly() -> DeadlineExceededError:
    return DeadlineExceededError(
        "Making the picture took more time or memory than an image may take. Try again in a "
        "minute, or put a smaller image in its place."
    )
