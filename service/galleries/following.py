"""Followed galleries: this service keeps copies of snapshots that another host publishes."""

import random
import threading
from collections.abc import Mapping

import structlog

from kinlens.indexer.gallery import Follower
from kinlens.service.galleries.locations import followed
from kinlens.service.observe.logs import Repeats
from kinlens.service.settings import Settings

_STOP_S = 2.0
_JITTER = (0.5, 1.5)  # times the interval, so that many hosts do not read at the same moment


class Following:
    """Keeps the copies of the followed galleries up to date, each in its own thread.

    While an address does not answer, its last copy stays searchable.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises: EngineUnavailableError for an address that no file system supports."""
        self._interval_s = settings.follow
        self._stopped = threading.Event()
        self._followers: Mapping[str, Follower] = {
            name: Follower(address, folder)
            for name, (address, folder) in followed(settings).items()
        }
        self._threads = [
            threading.Thread(target=self._run, args=each, name=f"follow {each[0]}", daemon=True)
            for each in self._followers.items()
        ]

    def load(self) -> None:
        """Copy galleries that have no copy yet, before they are opened. Existing copies are served
        at once and updated later, since their address may not answer.

        Raises: KinlensError if a gallery cannot be copied.
        """
        for name, follower in self._followers.items():
            if not follower.has_copy and follower.update(wait=True):
                structlog.get_logger().info("snapshot copied", gallery=name)

    def start(self) -> None:
        """Start to poll for new snapshots."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop; a download that hangs is interrupted, and resumes at the next start."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(_STOP_S)

    def _run(self, name: str, follower: Follower) -> None:
        log = structlog.get_logger().bind(gallery=name)
        failures, is_failing = Repeats(), False
        pause_s = 0.0  # the copy of an earlier start may be old
        while not self._stopped.wait(pause_s):
            pause_s = random.uniform(*_JITTER) * self._interval_s
            try:
                if follower.update():
                    log.info("snapshot followed")
                if is_failing:
                    log.info("snapshots can be read again")
                is_failing = False
            except Exception as error:
                # The boundary of the thread: whatever failed, the next snapshot may be readable.
                is_failing = True
                failures.add()
                if times := failures.due():
                    log.warning("snapshot not followed", times=times, detail=str(error))
