"""Search threads: threads that each do all the work of a search, with a decoder.

    event loop ── run(work) ──► waiting (bounded) ──► search thread: work(decoder) ──► event loop

A search is handed over once, and its image never leaves the caches of its core.
"""

import asyncio
import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, TypeVar, get_args

from kinlens.embedder.errors import OverloadedError
from kinlens.embedder.preprocess import ImageLimits
from kinlens.service.concurrency import BoundedPool
from kinlens.service.encoding.decoders import Decoder, DecoderPool, NoProcessError
from kinlens.service.encoding.sandbox import Layer
from kinlens.service.encoding.workers import Workers

T = TypeVar("T")
BulkKind = Literal["batch", "write", "golden"]
"""Work of many calls: queries of a batch, images of items, queries of a golden set."""


class SearchThreads:
    """`count` search threads, and a queue of at most `queue_size` calls. A thread whose call runs
    for more than `overdue_s` seconds is replaced by a new one.

    A call gets a decoder from `make`, or from a pool of workers that is ready.
    """

    def __init__(
        self,
        make: Callable[[], Decoder],
        count: int,
        queue_size: int,
        overdue_s: float = math.inf,
    ) -> None:
        self.count = count
        self._own = DecoderPool(make, count)
        self._workers: tuple[weakref.ref[Workers], ...] = ()
        self._working = set[int]()
        self._pool = BoundedPool("search", count, queue_size, overdue_s)
        self._batches = threading.BoundedSemaphore(max(1, queue_size // 2))
        self._bulk_limits = {kind: asyncio.Semaphore(self.count) for kind in get_args(BulkKind)}

    @property
    def waiting(self) -> int:
        """Calls that wait for a search thread."""
        return self._pool.waiting

    @property
    def is_alone(self) -> bool:
        """Whether no more than one call is worked on, and none waits."""
        return len(self._working) <= 1 and not self.waiting

    @property
    def restarts(self) -> int:
        """Decoding processes that were replaced."""
        return sum(decoder.restarts for decoder in self._all())

    @property
    def kills(self) -> int:
        """Decoding processes that were ended for time or memory."""
        return sum(decoder.kills for decoder in self._all())

    @property
    def layers(self) -> Sequence[Layer]:
        """The layers of the decoder with the weakest sandbox; none before the first image."""
        known = [decoder.layers for decoder in self._all() if decoder.layers]
        return min(known, key=lambda layers: sum(layer.holds for layer in layers), default=())

    @property
    def pids(self) -> list[int]:
        """Numbers of the decoding processes."""
        return [decoder.pid for decoder in self._all() if decoder.pid is not None]

    def use(self, workers: Workers) -> None:
        """Take decoders from the pool of `workers` while they are ready, as long as they live."""
        self._workers = (*map(weakref.ref, self._known_workers()), weakref.ref(workers))

    def _known_workers(self) -> list[Workers]:
        return [workers for each in self._workers if (workers := each()) is not None]

    def _all(self) -> list[Decoder]:
        pools = [self._own, *(workers.pool for workers in self._known_workers())]
        return [decoder for pool in pools for decoder in pool.decoders]

    def bulk_limit(self, kind: BulkKind) -> AbstractAsyncContextManager[None]:
        """Hold it around each call of bulk work: up to `count` calls of a kind wait or run.

        Each kind has a limit of its own, because the queue for a limit is served in order: one put
        would otherwise wait for every query of all batches that came before it.
        """
        return self._bulk_limits[kind]

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Hold it for all the patient calls of a batch. Batches have places of their own, so they
        never take those of single searches. Raises: OverloadedError when none is free.
        """
        if not self._batches.acquire(blocking=False):
            raise OverloadedError(
                "Too many batches are being answered. Try again in a second, or send searches "
                "one by one."
            )
        try:
            yield
        finally:
            self._batches.release()

    async def start(self) -> None:
        """Start the decoding processes; work may come before they are up."""
        await asyncio.to_thread(self._own.start)

    async def close(self) -> None:
        """Drop what waits and end the processes; a thread that hangs ends with the service."""
        closing = [self._own.close, *(workers.close for workers in self._known_workers())]
        await asyncio.gather(*(asyncio.to_thread(close) for close in closing))
        await asyncio.to_thread(self._pool.close)

    async def run(
        self,
        work: Callable[[Decoder], T],
        *,
        urgent: bool = False,
        patient: bool = False,
        after: Callable[[], None] = lambda: None,
    ) -> T:
        """Call `work` in a search thread, as `BoundedPool.run`.

        Raises: OverloadedError when too many wait; what `work` raises.
        """
        return await self._pool.run(
            lambda: self._with_decoder(work), urgent=urgent, bulk=patient, after=after
        )

    async def render(self, data: bytes, limits: ImageLimits, side_px: int) -> bytes:
        """An image as a JPEG of at most `side_px` a side. Raises: ImageError, SearchError."""
        return await self.run(lambda decoder: decoder.render(data, limits, side_px), patient=True)

    def _with_decoder(self, work: Callable[[Decoder], T]) -> T:
        own = threading.get_ident()
        self._working.add(own)
        try:
            workers = next((each for each in self._known_workers() if each.is_ready), None)
            if workers is not None:
                with contextlib.suppress(NoProcessError), workers.pool.one() as decoder:
                    found = work(decoder)
                    if self._own.is_up:
                        self._own.rest()
                    return found
                workers.fail()
            with self._own.one() as decoder:
                return work(decoder)
        finally:
            self._working.discard(own)
