"""Bounded micro-batching: what waits when a worker becomes free is embedded in one call.

    submit(image) ──► waiting (bounded) ──► worker ──► thread: embed(batch) ──► each future, once

No timer: a lone image starts at once, a crowd forms batches while the workers are busy.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from embedder.errors import BundleError, OverloadedError, SearchError
from embedder.types import Embeddings, Images
from service.pools import DaemonThreads

Image = NDArray[np.uint8]
Vector = NDArray[np.float32]
Waiting = tuple[asyncio.Future[Vector], Image]


class _ThreadDiedError(Exception):
    """An inference thread was asked to exit (SystemExit and its like)."""


class MicroBatcher:
    """Turns single images into batches for `embed`, in `workers` threads.

    A batch that fails is tried again one by one, so that only the bad item fails. Should a worker
    die, everything that waits fails, `failure` says why, and nothing more is accepted.
    """

    def __init__(
        self,
        embed: Callable[[Images], Embeddings],
        *,
        batch_size: int,
        queue_size: int,
        workers: int,
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.failure: BaseException | None = None
        self._embed = embed
        self._batch_size = batch_size
        self._queue_size = queue_size
        self._worker_count = workers
        self._on_batch = on_batch
        self._waiting: OrderedDict[asyncio.Future[Vector], Image] = OrderedDict()
        self._work = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._threads = DaemonThreads("embed", workers)

    @property
    def depth(self) -> int:
        """Images that wait for a worker."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether images are accepted."""
        return bool(self._workers) and self.failure is None

    def start(self) -> None:
        """Start the workers in the running event loop."""
        self._workers = [asyncio.create_task(self._serve()) for _ in range(self._worker_count)]
        for worker in self._workers:
            worker.add_done_callback(self._supervise)

    async def stop(self) -> None:
        """Stop the workers and fail what waits."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        self._fail_waiting()
        await asyncio.to_thread(self._threads.close)

    async def submit(self, image: Image, *, urgent: bool = False) -> Vector:
        """The vector (D,) of `image` (3, S, S); a cancelled call is dropped from the queue.

        An `urgent` one is never refused and goes first.

        Raises: OverloadedError, SearchError if the workers have stopped, whatever `embed` raises.
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
        try:
            return await future
        finally:
            self._waiting.pop(future, None)

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

    def _supervise(self, worker: asyncio.Task[None]) -> None:
        if worker not in self._workers or self.failure is not None:
            return
        cause = None if worker.cancelled() else worker.exception()
        self.failure = cause or SearchError("a worker was stopped from outside")
        for other in self._workers:
            other.cancel()
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        self._fail(list(self._waiting.items()))
        self._waiting.clear()

    def _fail(self, items: Sequence[Waiting]) -> None:
        for future, _ in items:
            if not future.done():
                future.set_exception(self._stopped())

    def _stopped(self) -> SearchError:
        return SearchError("The worker that runs the model has stopped. Restart the service.")
