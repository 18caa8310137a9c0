"""Compaction in a thread of its own, when it is due."""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from embedder.errors import GalleryBusyError, GalleryError, KinlensError

_RETRY_S = 30.0
_LONGEST_PAUSE_S = 3600.0


class Compactable(Protocol):
    """What is compacted: `indexer.gallery.Gallery`."""

    def needs_compaction(self) -> str | None: ...
    def compact(self) -> object: ...


class BackgroundCompaction:
    """Looks after a gallery from the first `nudge` until it is closed.

    A failure is logged, kept in `last_error` and handed to `on_error`. It is tried again after a
    pause that doubles each time, up to an hour.
    """

    def __init__(
        self,
        gallery: Compactable,
        on_error: Callable[[KinlensError], None] | None = None,
        retry_s: float = _RETRY_S,
    ) -> None:
        self.last_error: KinlensError | None = None
        self._gallery = gallery
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
        """End, after the compaction that is running."""
        self._closed.set()
        self._nudged.set()
        self._thread.join()

    def _run(self) -> None:
        while self._nudged.wait() and not self._closed.is_set():
            self._nudged.clear()
            try:
                if self._gallery.needs_compaction():
                    self._gallery.compact()
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

    def _failed(self, error: KinlensError) -> None:
        self.last_error = error
        logging.getLogger(__name__).error("compaction failed: %s", error)
        if self._on_error is not None:
            self._on_error(error)

    def _again(self) -> None:
        self._closed.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._nudged.set()
