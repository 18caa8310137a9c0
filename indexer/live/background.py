"""Compaction in a thread of its own, when it is due."""

import logging
import threading
from collections.abc import Callable

from embedder.errors import GalleryBusyError, GalleryError, KinlensError
from indexer.types import Progress

_RETRY_S = 30.0
_LONGEST_PAUSE_S = 3600.0
_CLOSE_S = 2.0


class BackgroundCompaction:
    """Looks after a gallery from the first `nudge` until it is closed.

    `due` says why a compaction is due, or None; `compact` does it and reports its progress. A
    failure is logged, kept in `last_error` and handed to `on_error`. It is tried again after a
    pause that doubles each time, up to an hour.
    """

    def __init__(
        self,
        due: Callable[[], str | None],
        compact: Callable[[Progress], object],
        on_error: Callable[[KinlensError], None] | None = None,
        retry_s: float = _RETRY_S,
    ) -> None:
        self.last_error: KinlensError | None = None
        self._due = due
        self._compact = compact
        self._on_error = on_error
        self._pause_s = self._retry_s = retry_s
        self._nudged = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="compaction", daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """Say that the gallery has changed."""
        self._nudged.set()

    def close(self) -> None:
        """End. A compaction under way is given up at its next step; a step that takes long, such as
        training the index, is not waited for: it ends in the background, and what it has made is
        used or removed by the next compaction.
        """
        self._closed.set()
        self._nudged.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while self._nudged.wait() and not self._closed.is_set():
            self._nudged.clear()
            try:
                if self._due():
                    self._compact(self._step)
                self.last_error = None
                self._pause_s = self._retry_s
            except GalleryBusyError:
                # Another process does it; look again, in case that one fails.
                self._again()
            except KinlensError as error:
                self._failed(error)
                self._again()
            except Exception as error:
                # The border of the thread: whatever it is, memory for one, it must not end in
                # silence.
                self._failed(
                    GalleryError(f"The compaction failed: {type(error).__name__}: {error}")
                )
                self._again()

    def _step(self, _: int) -> None:
        if self._closed.is_set():
            raise GalleryBusyError("The gallery is being closed; its compaction was given up.")

    def _failed(self, error: KinlensError) -> None:
        if self._closed.is_set():
            return  # it was closed under it
        self.last_error = error
        logging.getLogger(__name__).error("compaction failed: %s", error)
        if self._on_error is not None:
            self._on_error(error)

    def _again(self) -> None:
        self._closed.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._nudged.set()
