"""Galleries that this service follows: copies of snapshots that another host publishes."""

import random
import threading
from collections.abc import Mapping

import structlog

from embedder.errors import KinlensError
from indexer.gallery import Follower
from service.galleries.locations import followed
from service.observe.logs import Repeats
from service.settings import Settings

_STOP_S = 2.0
_VARIED = (0.5, 1.5)  # times the interval, so that many hosts do not ask at the same moment


class Following:
    """Keeps the copies of the followed galleries up to date, each in a thread of its own.

    An address that does not answer leaves its copy as it is: searches go on in it.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises: EngineUnavailableError for an address that no file system takes."""
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
        """Copy the newest snapshots before the galleries are opened; where an address does not
        answer, the copy of an earlier start is served.

        Raises: KinlensError if there is no copy either.
        """
        for name, follower in self._followers.items():
            log = structlog.get_logger().bind(gallery=name, address=follower.address)
            try:
                if follower.update(wait=True):
                    log.info("snapshot copied")
            except KinlensError as error:
                if not follower.has_copy:
                    raise
                log.warning("an earlier copy is served", detail=str(error))

    def start(self) -> None:
        """Look for new snapshots from now on."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End; a download that hangs is left behind, and goes on at the next start."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(_STOP_S)

    def _run(self, name: str, follower: Follower) -> None:
        log = structlog.get_logger().bind(gallery=name)
        failures, is_failing = Repeats(), False
        while not self._stopped.wait(random.uniform(*_VARIED) * self._interval_s):
            try:
                if follower.update():
                    log.info("snapshot followed")
                if is_failing:
                    log.info("snapshots can be read again")
                is_failing = False
            except Exception as error:
                # The border of the thread: whatever it is, the next snapshot may be fine.
                is_failing = True
                failures.add()
                if times := failures.due():
                    log.warning("snapshot not followed", times=times, detail=str(error))
