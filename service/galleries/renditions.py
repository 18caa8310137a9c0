"""Renditions: JPEGs of item images for display, rendered in decoding processes and cached."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial

from kinlens.embedder.errors import (
    DeadlineExceededError,
    ImageCostError,
    ImageError,
    ItemNotFoundError,
)
from kinlens.embedder.preprocess import MAX_SIDE_PX, ImageLimits
from kinlens.indexer.images import ANY_SIZE
from kinlens.service.concurrency import BoundedPool, SearchThreads, SingleFlight, within
from kinlens.service.encoding.cache import LruCache
from kinlens.service.encoding.model import Models
from kinlens.service.settings import Settings

SIDES_PX = (160, 320, 480, 640)
"""Longest sides of the available thumbnails."""

_CACHED_BYTES = 64 * 2**20
_CACHED = 10_000
_PAUSE_S = 30.0


class Renditions:
    """Renders and caches JPEGs; to be used in the thread of the event loop.

    At most half of the search threads render at the same time, so others stay free for searches.
    """

    def __init__(self, settings: Settings, search_threads: SearchThreads, models: Models) -> None:
        self._search_threads = search_threads
        self._models = models
        self._limits = limits_of_stored(settings.image_limits())
        at_once = max(1, settings.search_threads // 2)
        self._slots = asyncio.Semaphore(at_once)
        self._permits = BoundedPool("rendering", at_once, settings.waiting_files())
        self._limit_s = settings.request_timeout_ms / 1e3
        self._cache = LruCache(_CACHED, _CACHED_BYTES)
        self._costly: dict[str, float] = {}  # until when each is refused, to spare the processes
        self._flights: SingleFlight[bytes] = SingleFlight()

    async def get(
        self, key: str, read: Callable[[], Awaitable[bytes]], side_px: int | None = None
    ) -> bytes:
        """The image `key` as a JPEG of at most `side_px` a side, by default MAX_SIDE_PX. `read`
        returns the original.

        Raises: ItemNotFoundError if it cannot be decoded, OverloadedError, DeadlineExceededError;
            what `read` raises.
        """
        side_px = side_px or MAX_SIDE_PX
        key = f"{key}-{side_px}"
        if (cached := self._cache.get(key)) is not None:
            return cached
        if self._costly.get(key, 0.0) > time.monotonic():
            raise _too_costly()
        async with within(self._limit_s, "Rendering the image"):
            return await self._flights.run(key, lambda: self._render(key, read, side_px))

    async def _render(self, key: str, read: Callable[[], Awaitable[bytes]], side_px: int) -> bytes:
        with of_stored_image():
            try:
                with self._permits.permit():
                    async with self._slots:
                        data = await read()
                        workers = self._models.workers()[0]
                        to_jpeg = partial(workers.render, data, self._limits, side_px)
                        jpeg = await self._search_threads.run(to_jpeg, bulk=True)
            except ImageCostError:
                now = time.monotonic()
                self._costly = {name: until for name, until in self._costly.items() if until > now}
                self._costly[key] = now + _PAUSE_S
                raise
        self._cache.set(key, jpeg)
        return jpeg


def limits_of_stored(limits: ImageLimits) -> ImageLimits:
    """The limits of uploads except for bytes: the file is already stored."""
    return replace(limits, max_bytes=ANY_SIZE.max_bytes)


@contextlib.contextmanager
def of_stored_image() -> Iterator[None]:
    """Raise image errors of the block as errors of a stored image, which the client did not send.

    Raises: ItemNotFoundError if it cannot be decoded, DeadlineExceededError if that costs too much.
    """
    try:
        yield
    except ImageCostError as error:
        raise _too_costly() from error
    except ImageError as error:
        raise ItemNotFoundError(f"The image of this item cannot be decoded: {error}") from error


def _too_costly() -> DeadlineExceededError:
    return DeadlineExceededError(
        "Decoding the image of the item exceeded the limit of time or memory. Try again in a "
        "minute, or put the item again with a smaller image."
    )
