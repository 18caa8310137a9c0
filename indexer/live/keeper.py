"""Keeps the snapshot of the latest state: opens segments, reads columns, deletes old files."""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kinlens.embedder.durable import lock_folder
from kinlens.embedder.errors import GalleryCorruptError, GalleryError
from kinlens.indexer.catalog.database import Catalog
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.schema import Base, State
from kinlens.indexer.columns.checkpoint import columns_at, store_columns, stored_columns
from kinlens.indexer.columns.columns import Columns
from kinlens.indexer.index.segment import COPY_S, SEGMENTS, Segment, missing_segment
from kinlens.indexer.live.compaction import collect
from kinlens.indexer.live.snapshot import Snapshot
from kinlens.indexer.types import RESTORE

_COLLECT_S = 0.1
_RETRY_S = 60.0  # pause after a segment could not be opened
_GPU_STEP_S = 0.2  # how often to check for `close` while an index is copied to the GPU
_MIN_CHANGES, _CHANGED_PART = 2**15, 32  # changed items before a new checkpoint of columns
_MAX_ATTEMPTS = 8  # to open a segment that a compaction may delete before it is opened


class Reading(NamedTuple):
    """One state of a gallery: the catalogue in a read transaction, and the snapshot."""

    view: CatalogView
    snapshot: Snapshot


class SnapshotKeeper:
    """Returns the latest snapshot. A search uses one read transaction, so states never mix."""

    def __init__(
        self, catalog: Catalog, generation: Path, device: str, verify_hashes: bool | None
    ) -> None:
        self.catalog = catalog
        self.generation = generation
        self._device = device
        self._verify_hashes = verify_hashes
        self._collector = _Collector(generation)
        self._refreshing = threading.Lock()
        self._opener: threading.Thread | None = None
        self._failed: tuple[Base | None, float] = (None, 0.0)
        self._is_closed = False
        self._snapshot: Snapshot | None = None
        self._advancing = threading.Lock()
        self._columns: Columns | None = None  # the newest ones
        self._loading = threading.Lock()  # not `_advancing`, which all searches take

    @property
    def loaded_seq(self) -> int:
        """The newest write in memory, which no search is beyond; -1 before the first search."""
        return -1 if self._snapshot is None else self._snapshot.state.seq

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reading]:
        """The latest state, for the duration of a `with` block. Raises: GalleryCorruptError."""
        missing = 0
        while missing < _MAX_ATTEMPTS:
            with self.catalog.reading() as view:
                state = view.state()
                try:
                    snapshot = self.at(view, state)
                except FileNotFoundError:
                    missing += 1  # replaced by a compaction in the meantime, or lost
                    continue
                if snapshot is not None:
                    yield Reading(view, snapshot)
                    return
        raise missing_segment(self.generation / SEGMENTS / str(state.segment))

    def columns_of(self, now: Reading) -> Columns:
        """The attributes of the state of `now`.

        They are read, or brought up to date, when a filter or a facet needs them. Only searches
        with a filter wait for that; those of an earlier state have its columns.
        """
        known = now.snapshot.known
        columns = known.columns
        if columns is None or columns.seq != now.snapshot.state.seq:
            with self._loading:
                columns = columns_at(
                    self.generation, now.view, self._columns, known.columns, file=now.snapshot.file
                )
                known.columns = columns
                if self._columns is None or self._columns.seq <= columns.seq:
                    self._columns = columns
        return columns

    def follow(self) -> None:
        """Apply new writes to what searches use, so that no search has to do it."""
        if self._snapshot is not None:
            with contextlib.suppress(GalleryError), self.reading() as now:  # the next search raises
                if self._columns is not None:
                    self.columns_of(now)

    def checkpoint(self) -> None:
        """Store the columns if many items changed since their checkpoint. Raises: OSError."""
        columns = self._columns
        many = _MIN_CHANGES if columns is None else max(_MIN_CHANGES, columns.size // _CHANGED_PART)
        if columns is None or columns.changes < many:
            return
        with self.catalog.reading() as view:
            stored = stored_columns(self.generation, view)  # perhaps by another process since
            is_old = stored is None or len(view.changed_since(stored.seq)) >= many
        if stored is None or is_old:
            stored = store_columns(self.generation, columns)
        # Its values are sorted, and its arrays are not in memory.
        with self._loading, self.catalog.reading() as view:  # a state that no search is beyond
            self._columns = columns_at(self.generation, view, stored, self._columns)

    def newest(self) -> Snapshot:
        """The snapshot of the latest state, for searches that read no rows of the catalogue.

        Raises: GalleryCorruptError.
        """
        current = self._snapshot
        if current is not None and self._is_newest(current, self.catalog.state()):
            return current
        with self.reading() as reading:
            return reading.snapshot

    def at(self, view: CatalogView, state: State) -> Snapshot | None:
        """The snapshot of `state`; None if another thread has already advanced beyond it."""
        current = self._snapshot
        if current is None or not self._is_newest(current, state):
            with self._advancing:
                current = self._advanced(view, state)
        return current

    def _is_newest(self, current: Snapshot, state: State) -> bool:
        """Whether the snapshot is of this state and of its segment; else that is to be opened."""
        return current.state == state and current.base == state.base

    def _advanced(self, view: CatalogView, state: State) -> Snapshot | None:
        current = self._snapshot
        if current is not None and state.is_before(current.state):
            return None
        if current is None or (current.base != state.base and not self._can_keep(current, state)):
            current = Snapshot.load(view, state, self._opened(state))
        return self._installed(current, view, state)

    def _installed(self, snapshot: Snapshot, view: CatalogView, state: State) -> Snapshot:
        """Advance a snapshot to a state, and let searches use it. Raises: GalleryCorruptError."""
        if snapshot.state != state:
            snapshot = snapshot.advanced(view, state)
        if snapshot.size != state.size:
            raise GalleryCorruptError(
                f"The index of {self.generation} has {snapshot.size:,} items, the catalogue "
                f"counts {state.size:,}: it is damaged. {RESTORE}"
            )
        self._snapshot = snapshot
        return snapshot

    def _opened(self, state: State) -> Segment | None:
        """Open the segment of a state; waits until it is on the GPU, if there is one, unless a
        search needs it now.
        """
        if state.segment is None:
            return None
        segment = open_segment(
            self.generation / SEGMENTS / state.segment,
            self._device,
            self._verify_hashes,
            self._collector,
        )
        current, copy = self._snapshot, segment.gpu
        end = time.monotonic() + COPY_S
        if current is None or _knows(current, state):
            while copy is not None and not self._is_closed and time.monotonic() < end:
                if copy.wait(_GPU_STEP_S):
                    break
        return segment

    def _can_keep(self, current: Snapshot, state: State) -> bool:
        """Whether searches can use the present segment while a thread opens the new one."""
        if not _knows(current, state):
            return False
        is_opening = self._opener is not None and self._opener.is_alive()
        if not is_opening and not self._just_failed(state.base):
            self._opener = threading.Thread(target=self.refresh, name="segment")
            self._opener.start()
        return True

    def refresh(self) -> None:
        """Open the latest segment unless it is in use already. Searches use the present one with
        all later changes, unless the new one contains writes that were not applied to it before.
        """
        if not self._refreshing.acquire(blocking=False):
            return
        base: Base | None = None
        try:
            current, before = self._snapshot, self.catalog.state()
            base = before.base
            if (
                self._is_closed
                or current is None
                or current.base == base
                or self._just_failed(base)
            ):
                return
            segment = self._opened(before)
            with self.catalog.reading() as view:
                state = view.state()
                if state.base != base:
                    return  # replaced by another compaction
                following = Snapshot.load(view, state, segment)
                if self._columns is not None:  # searches use filters
                    self.columns_of(Reading(view, following))
            # Searches wait for this short step: so none is beyond the state of the view.
            with self._advancing, self.catalog.reading() as view:
                state, current = view.state(), self._snapshot
                is_used = current is None or current.base == base  # a search could not wait
                if state.base == base and not is_used:
                    self._installed(following, view, state)
        except FileNotFoundError:
            return  # replaced by another compaction
        except Exception as error:  # such as a MemoryError; searches keep the current segment
            logging.getLogger(__name__).warning("a new segment cannot be opened: %s", error)
            self._failed = base, time.monotonic()
        finally:
            self._refreshing.release()

    def _just_failed(self, base: Base) -> bool:
        """Whether opening this segment failed a short time ago."""
        failed, when = self._failed
        return failed == base and time.monotonic() - when < _RETRY_S

    def close(self) -> None:
        """Release the segment and delete unused files of the generation."""
        self._is_closed = True
        if self._opener is not None and self._opener is not threading.current_thread():
            self._opener.join()
        with self._refreshing:
            pass
        with self._advancing:
            self._snapshot = None
        self._collector.finish()


def _knows(snapshot: Snapshot, state: State) -> bool:
    """Whether the snapshot can advance to a state with a newer segment: the catalogue lists all
    that was removed since. One of an earlier version cannot, since its rows are those of no file.
    """
    return snapshot.base[2] is not None and snapshot.state.seq >= state.segment_seq


class _Collector:
    """Deletes unused segments and vectors in a thread, so that no search waits for it."""

    def __init__(self, generation: Path) -> None:
        self._generation = generation
        self._timer: threading.Timer | None = None

    def __call__(self) -> None:
        # Delayed: the released segment has its files open until this returns.
        self._timer = threading.Timer(_COLLECT_S, collect, (self._generation,))
        self._timer.start()

    def finish(self) -> None:
        """Run a pending collection now."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            timer.join()
            collect(self._generation)


def open_segment(
    folder: Path,
    device: str,
    verify_hashes: bool | None,
    on_release: Callable[[], None] = lambda: None,
) -> Segment:
    """Open a segment. Its lock keeps the files on disk while it is in use.

    `on_release` is called once the segment is garbage collected.

    Raises: FileNotFoundError if the segment has been removed; GalleryCorruptError.
    """
    descriptor = lock_folder(folder)
    try:
        segment = Segment.open(folder, verify_hashes=verify_hashes, device=device)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, GalleryCorruptError) and not folder.is_dir():
            raise FileNotFoundError(folder) from error  # it was being deleted
        raise
    weakref.finalize(segment, _release, descriptor, on_release).atexit = False
    return segment


def _release(descriptor: int, on_release: Callable[[], None]) -> None:
    os.close(descriptor)
    on_release()
