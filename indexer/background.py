"""Compaction in a thread of its own, when it is due."""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from embedder.errors import GalleryBusyError, KinlensError

_RETRY_S = 30.0


class Compactable(Protocol):
    """What is compacted: `indexer.gallery.Gallery`."""

    def needs_compaction(self) -> str | None: ...
    def compact(self) -> object: ...


class BackgroundCompaction:
    """Looks after a gallery from the first `nudge` until it is closed.

    A failure is logged, kept in `last_error` and handed to `on_error`; it is tried again after a
    while, or after the next nudge, whichever comes later.
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
        self._retry_s = retry_s
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
            except GalleryBusyError:
                # Another process does it; look again, in case that one fails.
                self._again()
            except KinlensError as error:
                self._failed(error)
                self._again()

    def _failed(self, error: KinlensError) -> None:
        self.last_error = error
        logging.getLogger(__name__).error("compaction failed: %s", error)
        if self._on_error is not None:
            self._on_error(error)

    def _again(self) -> None:
        self._closed.wait(self._retry_s)
        self._nudged.set()
