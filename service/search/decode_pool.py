"""Decoding in processes that can be killed: one image in each, what waits is bounded.

decode(data) ──► waiting (bounded) ──► idle process ──► pixels, an error, or a kill
"""

import asyncio
import contextlib
from collections import OrderedDict

import numpy as np
import structlog
from numpy.typing import NDArray

from embedder.errors import OverloadedError, SearchError
from embedder.manifest import Preprocessing
from embedder.preprocess import MAX_SIDE_PX, Box, ImageLimits
from service.search.decode_process import Job, WorkerLimits, WorkerProcess, request_parts
from service.search.decode_wire import pack_order, pack_rendering

Pixels = NDArray[np.uint8]
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 5.0
_START_ATTEMPTS = 3  # failures in a row after which calls fail instead of waiting
_MAX_DOUBLINGS = 10
_REAP_S = 0.02
_CLOSE_S = 5.0


class DecodePool:
    """`workers` processes and at most `queue_size` images that wait for one.

    A process that exceeds `memory_mb` or `timeout_s`, or crashes, costs its own image and is
    replaced at once. A cancelled call leaves the queue; one that runs is finished and forgotten.
    """

    def __init__(self, workers: int, queue_size: int, memory_mb: int, timeout_s: float) -> None:
        self.restarts = 0
        self.kills = 0
        self.last_failure: str | None = None
        self._count = workers
        self._queue_size = queue_size
        self._limits = WorkerLimits(memory_mb, timeout_s)
        self._workers: set[WorkerProcess] = set()
        self._idle: list[WorkerProcess] = []
        self._ending: list[WorkerProcess] = []
        self._waiting: OrderedDict[asyncio.Future[Pixels], Job] = OrderedDict()
        self._failed_starts = 0
        self._running = False

    @property
    def waiting(self) -> int:
        """Images that wait for a process."""
        return len(self._waiting)

    @property
    def workers_alive(self) -> int:
        """Processes that decode or could."""
        return sum(worker.ready for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes, those that are starting among them."""
        return [worker.pid for worker in self._workers]

    async def start(self) -> None:
        """Start the processes in the running event loop; images may come before they are up."""
        self._running = True
        for _ in range(self._count):
            self._spawn()

    async def close(self) -> None:
        """End the processes and fail everything that runs or waits."""
        self._running = False
        self._fail_waiting()
        for worker in list(self._workers):
            worker.end("closed", self._stopped())
        self._fail_waiting()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while self._ending:
                    await asyncio.sleep(_REAP_S)
                    self._reap()

    async def decode(
        self,
        data: bytes,
        spec: Preprocessing,
        limits: ImageLimits,
        box: Box | None = None,
        *,
        urgent: bool = False,
    ) -> Pixels:
        """`embedder.preprocess.preprocess` in a process: uint8 (3, S, S).

        An `urgent` call is never refused and goes first.

        Raises: ImageError (ImageCostError if its process was killed or crashed),
            InvalidParameterError for the box, OverloadedError, SearchError if the processes have
            stopped or cannot start.
        """
        order = pack_order(spec, limits, box)
        return await self._done(order, data, spec.crop_px, urgent=urgent)

    async def render(self, data: bytes, limits: ImageLimits, side_px: int = MAX_SIDE_PX) -> bytes:
        """`embedder.preprocess.render_jpeg` in a process. Raises: as `decode`."""
        order = pack_rendering(limits, side_px)
        return (await self._done(order, data, side_px, is_jpeg=True)).tobytes()

    async def _done(
        self,
        order: bytes,
        data: bytes,
        side_px: int,
        *,
        urgent: bool = False,
        is_jpeg: bool = False,
    ) -> Pixels:
        self._check_open(urgent)
        result: asyncio.Future[Pixels] = asyncio.get_running_loop().create_future()
        job = Job(request_parts(order, data), side_px, result, is_jpeg=is_jpeg)
        self._waiting[result] = job
        if urgent:
            self._waiting.move_to_end(result, last=False)
        self._assign()
        try:
            return await result
        finally:
            self._waiting.pop(result, None)

    def _check_open(self, urgent: bool) -> None:
        if not self._running:
            raise self._stopped()
        if self._failed_starts >= _START_ATTEMPTS and not self.workers_alive:
            raise self._cannot_start()
        if not urgent and not self._idle and len(self._waiting) >= self._queue_size:
            raise OverloadedError(
                f"{len(self._waiting)} images wait to be decoded, which is the limit. "
                "Try again in a second, or raise KINLENS_QUEUE_SIZE."
            )

    def _assign(self) -> None:
        while self._waiting and self._idle:
            result, job = self._waiting.popitem(last=False)
            if not result.done():
                self._idle.pop().give(job)

    def _spawn(self) -> None:
        if not self._running:
            return
        worker = WorkerProcess(self._limits, self._on_idle, self._on_end)
        try:
            worker.start()
        except OSError as error:
            self._retry_later(f"{type(error).__name__}: {error}")
        else:
            self._workers.add(worker)

    def _on_idle(self, worker: WorkerProcess) -> None:
        self._failed_starts = 0
        self._idle.append(worker)
        self._assign()

    def _on_end(self, worker: WorkerProcess) -> None:
        self._workers.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        self._ending.append(worker)
        asyncio.get_running_loop().call_later(_REAP_S, self._reap)
        if worker.job is not None and not worker.job.result.done():
            self._waiting[worker.job.result] = worker.job  # the process was dead before it came
            self._waiting.move_to_end(worker.job.result, last=False)
        if not self._running:
            return
        self.kills += worker.killed
        self.last_failure = worker.cause
        self.restarts += 1
        if worker.ready:
            self._spawn()
        else:
            self._retry_later(worker.cause)
        self._assign()

    def _retry_later(self, cause: str) -> None:
        self.last_failure = f"a process did not start: {cause}"
        structlog.get_logger().error("decoding process did not start", cause=cause)
        delay = min(_LAST_RETRY_S, _FIRST_RETRY_S * 2 ** min(self._failed_starts, _MAX_DOUBLINGS))
        self._failed_starts += 1
        if self._failed_starts >= _START_ATTEMPTS and not self.workers_alive:
            self._fail_waiting()
        asyncio.get_running_loop().call_later(delay, self._spawn)

    def _reap(self) -> None:
        """Take away the processes that have ended by now, and look again for the others."""
        for worker in self._ending:
            if (code := worker.returncode()) is not None and self._running:
                structlog.get_logger().warning(
                    "decoding process ended", pid=worker.pid, cause=worker.cause, returncode=code
                )
        self._ending = [worker for worker in self._ending if worker.returncode() is None]
        if self._ending and self._running:
            asyncio.get_running_loop().call_later(_REAP_S, self._reap)

    def _fail_waiting(self) -> None:
        while self._waiting:
            result, _ = self._waiting.popitem()
            if not result.done():
                result.set_exception(self._cannot_start() if self._running else self._stopped())

    def _stopped(self) -> SearchError:
        return SearchError("The processes that decode images have stopped. Start the service.")

    def _cannot_start(self) -> SearchError:
        return SearchError(
            f"The processes that decode images cannot be started ({self.last_failure}); it is "
            "tried again. The log of the service has more."
        )
