"""What the service asks of whatever decodes its images, and the choice among them."""

import sys
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embedder.manifest import Preprocessing
from embedder.preprocess import MAX_SIDE_PX, Box, ImageLimits
from service.search.decode_pool import DecodePool
from service.search.inline import InlineDecoder
from service.settings import Settings


class Decoder(Protocol):
    """Turns image bytes into pixels, or into a JPEG for the screen; one event loop each.

    `DecodePool` and `InlineDecoder` do.

    `restarts` and `kills` count processes that were replaced and ended for time or memory.
    """

    restarts: int
    kills: int
    last_failure: str | None

    @property
    def waiting(self) -> int: ...
    @property
    def workers_alive(self) -> int: ...

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def decode(
        self,
        data: bytes,
        spec: Preprocessing,
        limits: ImageLimits,
        box: Box | None = None,
        *,
        urgent: bool = False,
    ) -> NDArray[np.uint8]: ...
    async def render(
        self, data: bytes, limits: ImageLimits, side_px: int = MAX_SIDE_PX
    ) -> bytes: ...


def create_decoder(settings: Settings) -> Decoder:
    """In processes of their own, unless the settings or the system (Windows) forbid it."""
    if not settings.decode_isolation or sys.platform == "win32":
        return InlineDecoder(settings.decode_workers, settings.queue_size)
    return DecodePool(
        settings.decode_workers,
        settings.queue_size,
        settings.decode_memory_mb,
        settings.decode_timeout_ms / 1e3,
    )
