"""Decoding in threads of the service: nothing to spawn, nothing that can be killed."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from embedder.errors import ImageCostError, SearchError
from embedder.manifest import Preprocessing
from embedder.preprocess import MAX_SIDE_PX, Box, ImageLimits, preprocess, render_jpeg
from service.search.pools import BoundedPool

T = TypeVar("T")


class InlineDecoder:
    """Same calls as `DecodePool`, for tests and systems without its processes.

    An image that takes long keeps its thread, and one that crashes a decoder ends the service.
    """

    def __init__(self, workers: int, queue_size: int) -> None:
        self.restarts = 0
        self.kills = 0
        self.last_failure: str | None = None
        self._count = workers
        self._pool = BoundedPool("decode", workers, queue_size)
        self._running = False

    @property
    def waiting(self) -> int:
        """Images that wait for a thread."""
        return self._pool.waiting

    @property
    def workers_alive(self) -> int:
        """Threads that decode or could."""
        return self._count if self._running else 0

    async def start(self) -> None:
        """Accept images."""
        self._running = True

    async def close(self) -> None:
        """Fail what waits; what runs ends by itself."""
        self._running = False
        self._pool.close()

    async def decode(
        self,
        data: bytes,
        spec: Preprocessing,
        limits: ImageLimits,
        box: Box | None = None,
        *,
        urgent: bool = False,
    ) -> NDArray[np.uint8]:
        """`embedder.preprocess.preprocess` in a thread: uint8 (3, S, S).

        Raises: ImageError (ImageCostError without memory), InvalidParameterError for the box,
            OverloadedError, SearchError if it was not started.
        """
        return await self._run(lambda: preprocess(data, spec, limits, box), urgent=urgent)

    async def render(self, data: bytes, limits: ImageLimits, side_px: int = MAX_SIDE_PX) -> bytes:
        """`embedder.preprocess.render_jpeg` in a thread. Raises: as `decode`."""
        return await self._run(lambda: render_jpeg(data, limits, side_px))

    async def _run(self, work: Callable[[], T], *, urgent: bool = False) -> T:
        if not self._running:
            raise SearchError("The threads that decode images have stopped. Start the service.")
        try:
            return await self._pool.run(work, urgent=urgent)
        except MemoryError as error:
            raise ImageCostError(
                "Decoding the image needs more memory than there is. Resize it."
            ) from error
