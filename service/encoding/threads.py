"""Search threads: a pool of threads, each of which does one search from end to end with a decoder.

    event loop ── run(work) ──► bounded queue ──► search thread: work(decoder) ──► event loop

A search changes threads only once, and its image stays in the caches of one core.
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
from kinlens.service.daemon_threads import in_thread
from kinlens.service.encoding.decoders import Decoder, DecoderPool, NoProcessError
from kinlens.service.encoding.sandbox import Layer
from kinlens.service.encoding.workers import Workers

T = TypeVar("T")
BulkKind = Literal["batch", "write", "golden"]
"""Kinds of bulk work: queries of a batch, images of items to store, queries of a golden set."""


class SearchThreads:
    """A pool of `count` search threads with a queue of at most `queue_size` calls.

    A thread whose call runs longer than `overdue_s` seconds is replaced by a new one. Each call
    gets exclusive use of a decoder: a model worker if some are ready, or else one from `make`.
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
        """Number of queued calls."""
        return self._pool.waiting

    @property
    def is_uncontended(self) -> bool:
        """Whether at most one call runs and none is queued."""
        return len(self._working) <= 1 and not self.waiting

    @property
    def restarts(self) -> int:
        """Number of decoding processes that were replaced."""
        return sum(decoder.restarts for decoder in self._all())

    @property
    def kills(self) -> int:
        """Number of decoding processes that were killed because of time or memory."""
        return sum(decoder.kills for decoder in self._all())

    @property
    def layers(self) -> Sequence[Layer]:
        """The layers of the decoder with the weakest sandbox; empty before the first image."""
        found = [decoder.layers for decoder in self._all() if decoder.layers]
        return min(found, key=lambda layers: sum(layer.holds for layer in layers), default=())

    @property
    def pids(self) -> list[int]:
        """Process ids of the decoding processes."""
        return [decoder.pid for decoder in self._all() if decoder.pid is not None]

    def use(self, workers: Workers) -> None:
        """Prefer decoders from `workers` while these are ready. Only a weak reference is kept."""
        self._workers = (*map(weakref.ref, self._live_workers()), weakref.ref(workers))

    def _live_workers(self) -> list[Workers]:
        return [workers for each in self._workers if (workers := each()) is not None]

    def _all(self) -> list[Decoder]:
        pools = [self._own, *(workers.pool for workers in self._live_workers())]
        return [decoder for pool in pools for decoder in pool.decoders]

    def bulk_limit(self, kind: BulkKind) -> AbstractAsyncContextManager[None]:
        """The semaphore to hold around each bulk call: up to `count` calls of a kind are queued or
        running, so a single search waits for few of them.

        Each kind has its own semaphore, because waiters are served in order: a put would otherwise
        wait for every query of all earlier batches.
        """
        return self._bulk_limits[kind]

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Hold one batch slot while the bulk calls of a batch run. Batches have their own slots, so
        they never take the slots of single searches. Raises: OverloadedError when none is free.
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
        """Start the decoding processes. Calls may arrive before these are ready."""
        await in_thread(self._own.start)

    async def close(self) -> None:
        """Drop queued calls and end the processes. A thread that hangs ends with the service."""
        closing = [self._own.close, *(workers.close for workers in self._live_workers())]
        await asyncio.gather(*map(in_thread, closing))
        await in_thread(self._pool.close)

    async def run(
        self,
        work: Callable[[Decoder], T],
        *,
        urgent: bool = False,
        bulk: bool = False,
        after: Callable[[], None] = lambda: None,
    ) -> T:
        """Call `work` with a decoder in a search thread, and return its result.

        urgent: queue the call before all calls that are not urgent.
        bulk: do not count the call towards `queue_size`, since `bulk_limit` bounds it.
        after: called in any thread once the call has ended, was refused or was dropped.

        Raises: OverloadedError when the queue is full; what `work` raises.
        """
        return await self._pool.run(
            lambda: self._with_decoder(work), urgent=urgent, bulk=bulk, after=after
        )

    async def render(self, data: bytes, limits: ImageLimits, side_px: int) -> bytes:
        """Render an image as a JPEG of at most `side_px` a side, as a bulk call.

        Raises: ImageError, SearchError.
        """
        return await self.run(lambda decoder: decoder.render(data, limits, side_px), bulk=True)

    def _with_decoder(self, work: Callable[[Decoder], T]) -> T:
        own = threading.get_ident()
        self._working.add(own)
        try:
            workers = next((each for each in self._live_workers() if each.is_ready), None)
            if workers is not None:
                with contextlib.suppress(NoProcessError), workers.pool.one() as decoder:
                    found = work(decoder)
                    if self._own.is_up:
                        self._own.stop_idle()
                    return found
                workers.fail()
            with self._own.one() as decoder:
                return work(decoder)
        finally:
            self._working.discard(own)
