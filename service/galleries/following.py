"""Followed galleries: this service keeps copies of snapshots that another host publishes."""

import asyncio
import random

import structlog

from kinlens.indexer.galleries import Follower
from kinlens.service.concurrency import KeyedThreads
from kinlens.service.galleries.locations import followed
from kinlens.service.settings import Settings

_AT_ONCE = 4
_LIMIT_S = 60.0  # after it, a long download lets another one begin
_TEXTS_PER_CLASS = 5  # that are logged until snapshots can be read again
_JITTER = (0.5, 1.5)  # times the interval, so that many hosts do not read at the same moment


class Following:
    """Keeps the copies of the followed galleries up to date, a few at once.

    While an address does not answer, its last copy stays searchable.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises: EngineUnavailableError for an address that no file system supports."""
        self._interval_s = settings.follow
        self._followers = {
            name: Follower(address, folder)
            for name, (address, folder) in followed(settings).items()
        }
        self._threads = KeyedThreads(_AT_ONCE)
        self._tasks: list[asyncio.Task[None]] = []

    def load(self) -> None:
        """Copy galleries that have no copy yet, before they are opened. Existing copies are served
        at once and updated later, since their address may not answer.

        Raises: KinlensError if a gallery cannot be copied.
        """
        for name, follower in self._followers.items():
            if not follower.has_copy and follower.update(wait=True):
                structlog.get_logger().info("snapshot copied", gallery=name)

    def start(self) -> None:
        """Start to poll for new snapshots, in the running event loop."""
        self._tasks = [asyncio.create_task(self._follow(*each)) for each in self._followers.items()]

    async def stop(self) -> None:
        """Stop; the exit of the process interrupts downloads, and the next start resumes them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, name: str, follower: Follower) -> None:
        log = structlog.get_logger().bind(gallery=name)
        reported: list[tuple[str, str]] = []  # class and text of faults since the last success
        while True:  # at once, since the copy of an earlier start may be old
            try:
                if await self._threads.run(name, follower.update, _LIMIT_S):
                    log.info("snapshot followed")
                if reported:
                    log.info("snapshots can be read again")
                reported.clear()
            except TimeoutError:
                pass  # it continues, and the next call waits for it
            except Exception as error:
                # The boundary of the task: whatever failed, the next snapshot may be readable.
                fault = type(error).__name__, str(error)
                # A text can differ each time, such as one with the name of a temporary file.
                texts = sum(kind == fault[0] for kind, _ in reported)
                if fault not in reported and texts < _TEXTS_PER_CLASS:
                    log.warning("snapshot not followed", detail=fault[1])
                    reported.append(fault)
            await asyncio.sleep(random.uniform(*_JITTER) * self._interval_s)
