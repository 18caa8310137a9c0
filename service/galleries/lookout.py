"""Looks at the disk that requests ask for: shared, a few in a second, and none waits for ever."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable

from embedder.errors import DeadlineExceededError, GalleryError

PER_SECOND = 5


class Lookout:
    """Calls `refresh` at most `PER_SECOND` times a second, one after the other."""

    def __init__(self, refresh: Callable[[], Awaitable[None]]) -> None:
        self._refresh = refresh
        self._begun: deque[float] = deque(maxlen=PER_SECOND)
        self._alone = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def look(self, limit_s: float) -> None:
        """A look that begins after this call, shared with everybody who waits for one.

        Raises: DeadlineExceededError after `limit_s`; GalleryError if the disk fails.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._run())
            self._tasks.add(self._next)
            self._next.add_done_callback(self._forget)
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.shield(self._next)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"Looking at the galleries on the disk took longer than {limit_s:g} s, which is "
                "the limit. It goes on; try again in a second."
            ) from error
        except OSError as error:
            raise GalleryError(
                f"The galleries cannot be looked at: {error.strerror}. Check the disk."
            ) from error

    async def close(self) -> None:
        """End the looks."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        async with self._alone:
            loop = asyncio.get_running_loop()
            if len(self._begun) == PER_SECOND:
                await asyncio.sleep(max(0.0, self._begun[0] + 1.0 - loop.time()))
            self._begun.append(loop.time())
            self._next = None
            await self._refresh()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._next is task:
            self._next = None
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()  # those who waited have it
