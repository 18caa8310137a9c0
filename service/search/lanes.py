"""Lanes: each is a thread with a decoding process of its own, and does all the work of a search.

    event loop ── run(work) ──► waiting (bounded) ──► lane: work(decoder) ──► event loop

One lane for each core: a search is handed over once, and its image never leaves the core's caches.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from embedder.preprocess import ImageLimits
from service.concurrency import BoundedPool
from service.search.decoder import Decoder

T = TypeVar("T")


class Lanes:
    """As many lanes as `decoders`, and at most `queue_size` calls that wait for one."""

    def __init__(self, decoders: Sequence[Decoder], queue_size: int) -> None:
        self.count = len(decoders)
        self._decoders = tuple(decoders)
        self._idle = list(decoders)
        self._pool = BoundedPool("search", self.count, queue_size)
        self._crowd = asyncio.Semaphore(self.count)

    @property
    def waiting(self) -> int:
        """Calls that wait for a lane."""
        return self._pool.waiting

    @property
    def restarts(self) -> int:
        """Decoding processes that were replaced."""
        return sum(decoder.restarts for decoder in self._decoders)

    @property
    def kills(self) -> int:
        """Decoding processes that were ended for time or memory."""
        return sum(decoder.kills for decoder in self._decoders)

    @property
    def pids(self) -> list[int]:
        """Numbers of the decoding processes."""
        return [decoder.pid for decoder in self._decoders if decoder.pid is not None]

    @property
    def crowd(self) -> AbstractAsyncContextManager[None]:
        """Around each of many calls that belong together: of these no more than there are lanes
        wait or run, so a single search waits for a few of them and not for all.
        """
        return self._crowd

    async def start(self) -> None:
        """Start the decoding processes; work may come before they are up."""
        await asyncio.gather(*(asyncio.to_thread(each.start) for each in self._decoders))

    async def close(self) -> None:
        """Drop what waits and end the processes; a thread that hangs ends with the service."""
        await asyncio.gather(*(asyncio.to_thread(each.close) for each in self._decoders))
        await asyncio.to_thread(self._pool.close)

    async def run(
        self,
        work: Callable[[Decoder], T],
        *,
        urgent: bool = False,
        patient: bool = False,
        after: Callable[[], None] = lambda: None,
    ) -> T:
        """Call `work` in a lane. An `urgent` call goes first; neither it nor a `patient` one is
        ever refused. `after` is called once it is over, refused or dropped, in any thread.

        Raises: OverloadedError when too many wait; what `work` raises.
        """
        return await self._pool.run(
            lambda: self._with_decoder(work), urgent=urgent, patient=patient, after=after
        )

    async def render(self, data: bytes, limits: ImageLimits, side_px: int) -> bytes:
        """An image as a JPEG of at most `side_px` a side. Raises: ImageError, SearchError."""
        return await self.run(lambda decoder: decoder.render(data, limits, side_px), patient=True)

    def _with_decoder(self, work: Callable[[Decoder], T]) -> T:
        decoder = self._idle.pop()  # there are as many as threads
        try:
            return work(decoder)
        finally:
            self._idle.append(decoder)
