"""Compaction: a new segment from the catalogue, written aside while searches and writes go on."""

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

from pydantic import BaseModel

from embedder.durable import (
    discard,
    exclusive,
    holder,
    in_use,
    is_stage,
    reach,
    rename,
    staged,
    sync_tree,
)
from embedder.errors import GalleryBusyError, GalleryError, GalleryWriteError, KinlensError
from indexer.catalog.database import Catalog, catalog_view
from indexer.catalog.read import State
from indexer.folder.layout import disk_errors_explained
from indexer.index.plan import IndexSettings, Plan, plan_index
from indexer.index.segment import SegmentManifest, write_attributes, write_segment, write_vectors
from indexer.types import Progress

CATALOG = "catalog.sqlite"
SEGMENTS = "segments"
_LOCK = "COMPACT"

MAX_DEAD = 0.2
"""Part of a segment that may be removed items before a compaction is due."""

_SMALL_DELTA = 10_000
_LARGE_DELTA = 100_000
_DELTA_PART = 0.1

KEEP_REMOVED_S = 86_400.0
"""How long a removal can be undone although compactions ran that nobody asked for."""

_COLUMN_BYTES = 40  # of an item with five attributes
_RETRY_S = 30.0
_LONGEST_PAUSE_S = 3600.0
_CLOSE_S = 2.0


class CompactReport(BaseModel, frozen=True):
    """What a compaction did: the new segment (None for an empty gallery) and the time it took."""

    segment: str | None
    manifest: SegmentManifest | None
    elapsed_s: float


def due(segment_size: int, dead: int, delta: int) -> str | None:
    """Why a compaction is due, or None: 20 % removed, or many items after the segment.

    `delta` counts what was added or changed since, also if it was removed then: it stays in memory.
    """
    if segment_size and dead >= MAX_DEAD * segment_size:
        return f"{dead:,} of the {segment_size:,} items of the segment have been removed"
    limit = min(max(int(_DELTA_PART * segment_size), _SMALL_DELTA), _LARGE_DELTA)
    if delta >= limit:
        return f"{delta:,} items were added or changed after the segment, the limit is {limit:,}"
    return None


def compact(
    generation: Path,
    settings: IndexSettings,
    *,
    wait: bool = False,
    keep_removed_s: float = 0.0,
    unless: Callable[[], bool] = lambda: False,
    on_progress: Progress | None = None,
) -> CompactReport:
    """Make a segment of everything that is in the catalogue now, and switch to it.

    What was removed in the last `keep_removed_s` seconds can still be brought back afterwards.
    `unless` is asked when all others are kept out: if it is true by then, nothing is done.

    Raises: GalleryBusyError if another process does so and this is not to `wait`; PlanError,
        RecallError, and then the gallery stays as it is; GalleryWriteError.
    """
    started = perf_counter()
    with (
        alone(generation, wait),
        disk_errors_explained(generation),
        contextlib.closing(Catalog.open(generation / CATALOG, writable=True)) as catalog,
    ):
        if unless():
            return CompactReport(segment=None, manifest=None, elapsed_s=0.0)
        segments = generation / SEGMENTS
        segments.mkdir(exist_ok=True)
        collect(generation)
        with staged(segments) as stage:  # which marks it as in use until the catalogue names it
            state, manifest = _write(stage, catalog, settings, on_progress)
            name = None
            if manifest is not None:
                name = f"{state.seq:012d}-{os.urandom(4).hex()}"
                sync_tree(stage, "segment")
                rename(stage, segments / name, "segment")
            reach("adopt: before commit")
            with catalog.writing() as writer:
                writer.adopt_segment(name, state.seq, keep_removed_s)
            reach("adopt: after commit")
        collect(generation)
    return CompactReport(segment=name, manifest=manifest, elapsed_s=perf_counter() - started)


def collect(generation: Path) -> None:
    """Remove segments that nobody reads any more, also while a compaction runs."""
    with contextlib.suppress(OSError, GalleryError):
        folders = [one for one in (generation / SEGMENTS).iterdir() if not is_stage(one)]
        idle = [folder for folder in folders if not in_use(folder)]
        # Looked up afterwards: what a compaction has let go of by now is current, or was.
        with catalog_view(generation / CATALOG) as view:
            current = view.state().segment
        for folder in idle:
            if folder.name != current:
                discard(folder)


@contextlib.contextmanager
def alone(generation: Path, wait: bool) -> Iterator[None]:
    """Keep other compactions out of a generation.

    Raises: GalleryBusyError if one runs and this is not to `wait`; GalleryWriteError.
    """
    lock = generation / _LOCK
    with disk_errors_explained(generation):
        held = contextlib.ExitStack()
        is_alone = held.enter_context(exclusive(lock, wait=wait))
    with held:
        if not is_alone:
            raise GalleryBusyError(
                f"Another process ({holder(lock)}) is compacting {generation.parent.parent}. "
                "Searches and changes go on; try again when it has ended."
            )
        yield


def _write(
    stage: Path, catalog: Catalog, settings: IndexSettings, on_progress: Progress | None
) -> tuple[State, SegmentManifest | None]:
    """A segment of one state of the catalogue; None if that is empty."""
    # The transaction ends before the long work: as long as it lasts, the log only grows.
    with catalog.reading() as view:
        state = view.state()
        ids = view.live_ids()
        if not len(ids):
            return state, None
        _check_space(stage, plan_index(len(ids), view.dim, settings))
        vectors = write_vectors(stage, ids, view.iter_vectors(), settings)
        vectors = write_attributes(stage, vectors, ids, view.attributes(), view.schema())
    return state, write_segment(stage, state.seq, vectors, settings, on_progress)


def _check_space(folder: Path, plan: Plan) -> None:
    """Raises: GalleryWriteError where the new segment has no room beside the old one."""
    needed_mb = plan.disk_mb + plan.n * _COLUMN_BYTES / 2**20
    free_mb = shutil.disk_usage(folder).free / 2**20
    if free_mb < needed_mb:
        raise GalleryWriteError(
            f"The compaction needs about {needed_mb:,.0f} MB in {folder.parent.parent}, but "
            f"{free_mb:,.0f} MB are free. Make room; until then searches and changes go on."
        )


class BackgroundCompaction:
    """Looks after a gallery from the first `nudge` until it is closed.

    `due` says why a compaction is due, or None; `compact` does it and reports its progress.
    `otherwise` is done where none is due. A failure is logged, kept in `last_error` and handed to
    `on_error`. It is tried again after a pause that doubles each time, up to an hour.
    """

    def __init__(
        self,
        due: Callable[[], str | None],
        compact: Callable[[Progress], object],
        otherwise: Callable[[], object],
        on_error: Callable[[KinlensError], None] | None = None,
        retry_s: float = _RETRY_S,
    ) -> None:
        self.last_error: KinlensError | None = None
        self._due = due
        self._compact = compact
        self._otherwise = otherwise
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
                else:
                    self._otherwise()
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
