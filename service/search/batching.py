"""Bounded micro-batching: what waits when a worker becomes free is embedded in one call.

    submit(image) ──► waiting (bounded) ──► worker ──► thread: embed(batch) ──► each future, once

No timer: a lone image starts at once, a crowd forms batches while the workers are busy.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import structlog
from numpy.typing import NDArray

from embedder.errors import BundleError, OverloadedError, SearchError
from embedder.types import Embeddings, Images
from service.observe.tracing import record_wait
from service.search.pools import DaemonThreads

Image = NDArray[np.uint8]
Vector = NDArray[np.float32]
Waiting = tuple[asyncio.Future[Vector], Image]

FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0


class _ThreadDiedError(Exception):
    """An inference thread was asked to exit (SystemExit and its like)."""


class MicroBatcher:
    """Turns single images into batches for `embed`, in `workers` threads.

    A batch that fails is tried again one by one, so that only the bad item fails. A worker that
    dies fails its own batch and, if it was the last one, everything that waits. It is started again
    after a pause that doubles while it dies without having embedded anything. `restarts` counts
    that, `last_failure` says why.
    """

    def __init__(
        self,
        embed: Callable[[Images], Embeddings],
        *,
        batch_size: int,
        queue_size: int,
        workers: int,
        on_batch: Callable[[int], None] = lambda _: None,
        on_wait: Callable[[float], None] = lambda _: None,
        pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self.restarts = 0
        self.last_failure: str | None = None
        self._embed = embed
        self._batch_size = batch_size
        self._queue_size = queue_size
        self._worker_count = workers
        self._on_batch = on_batch
        self._on_wait = on_wait
        self._first_pause_s = self._pause_s = pause_s
        self._waiting: OrderedDict[asyncio.Future[Vector], Image] = OrderedDict()
        self._taken_ns: dict[asyncio.Future[Vector], int] = {}
        self._work = asyncio.Event()
        self._workers: set[asyncio.Task[None]] = set()
        self._restarting: set[asyncio.Task[None]] = set()
        self._threads = DaemonThreads("embed", workers)

    @property
    def depth(self) -> int:
        """Images that wait for a worker."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether images are accepted: at least one worker is there."""
        return bool(self._workers)

    def start(self) -> None:
        """Start the workers in the running event loop."""
        for _ in range(self._worker_count):
            self._start_worker()

    async def stop(self) -> None:
        """Stop the workers and fail what waits."""
        ending = [*self._workers, *self._restarting]
        self._workers.clear()
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._fail_waiting()
        await asyncio.to_thread(self._threads.close)

    async def submit(self, image: Image, *, urgent: bool = False) -> Vector:
        """The vector (D,) of `image` (3, S, S); a cancelled call is dropped from the queue.

        An `urgent` one is never refused and goes first.

        Raises: OverloadedError, SearchError while no worker is there, whatever `embed` raises.
        """
        if not self.alive:
            raise self._stopped()
        if not urgent and len(self._waiting) >= self._queue_size:
            raise OverloadedError(
                f"{len(self._waiting)} images wait for the model, which is the limit. "
                "Try again in a second, or raise KINLENS_QUEUE_SIZE."
            )
        future: asyncio.Future[Vector] = asyncio.get_running_loop().create_future()
        self._waiting[future] = image
        if urgent:
            self._waiting.move_to_end(future, last=False)
        self._work.set()
        since_ns = time.time_ns()
        try:
            return await future
        finally:
            self._waiting.pop(future, None)
            taken_ns = self._taken_ns.pop(future, None)
            record_wait("queue", "embed", since_ns, taken_ns)
            if taken_ns is not None:
                self._on_wait(max(0, taken_ns - since_ns) / 1e9)

    async def _serve(self) -> None:
        while True:
            await self._work.wait()
            batch = self._take()
            if batch:
                await self._process(batch)

    def _take(self) -> list[Waiting]:
        batch: list[Waiting] = []
        while self._waiting and len(batch) < self._batch_size:
            future, image = self._waiting.popitem(last=False)
            if not future.done():
                batch.append((future, image))
                self._taken_ns[future] = time.time_ns()
        if not self._waiting:
            self._work.clear()
        return batch

    async def _process(self, batch: Sequence[Waiting]) -> None:
        batch = [item for item in batch if not item[0].done()]
        if not batch:
            return
        try:
            vectors = await self._run([image for _, image in batch])
        except _ThreadDiedError:
            self._fail(batch)
            raise
        except Exception as error:
            await self._retry_apart(batch, error)
        except BaseException:
            self._fail(batch)
            raise
        else:
            self._pause_s = self._first_pause_s
            for (future, _), vector in zip(batch, vectors, strict=True):
                if not future.done():
                    future.set_result(vector)

    async def _retry_apart(self, batch: Sequence[Waiting], error: Exception) -> None:
        if len(batch) == 1:
            if not batch[0][0].done():
                batch[0][0].set_exception(error)
            return
        try:
            for item in batch:
                await self._process([item])
        except BaseException:
            self._fail(batch)
            raise

    async def _run(self, images: list[Image]) -> Embeddings:
        self._on_batch(len(images))
        return await asyncio.wrap_future(self._threads.submit(lambda: self._call(images)))

    def _call(self, images: list[Image]) -> Embeddings:
        try:
            vectors = self._embed(np.stack(images))
        except Exception:
            raise
        except BaseException as error:
            # Let through, it would end the event loop together with the thread.
            raise _ThreadDiedError(f"{type(error).__name__} in the model") from error
        if len(vectors) != len(images):
            raise BundleError(
                f"The model gave {len(vectors)} vectors for {len(images)} images. "
                "Export it again with a free batch dimension."
            )
        return vectors

    def _start_worker(self) -> None:
        worker = asyncio.create_task(self._serve())
        self._workers.add(worker)
        worker.add_done_callback(self._replace)

    def _replace(self, worker: asyncio.Task[None]) -> None:
        """A worker has ended: another takes its place after a pause."""
        if worker not in self._workers:
            return  # it was stopped on purpose
        self._workers.discard(worker)
        cause = None if worker.cancelled() else worker.exception()
        self.last_failure = "stopped from outside" if cause is None else str(cause)
        if not self._workers:
            self._fail_waiting()
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        structlog.get_logger().error(
            "worker ended", cause=self.last_failure, restart_after_s=pause_s
        )
        restart = asyncio.create_task(self._restart(pause_s))
        self._restarting.add(restart)
        restart.add_done_callback(self._restarting.discard)

    async def _restart(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self.restarts += 1
        self._start_worker()

    def _fail_waiting(self) -> None:
        self._fail(list(self._waiting.items()))
        self._waiting.clear()

    def _fail(self, items: Sequence[Waiting]) -> None:
        for future, _ in items:
            if not future.done():
                future.set_exception(self._stopped())

    def _stopped(self) -> SearchError:
        return SearchError(
            "The worker that runs the model has stopped; it is started again by itself. Try again "
            "in a second."
        )
