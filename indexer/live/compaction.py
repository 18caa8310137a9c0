"""Compaction: writes a new segment from the catalogue while searches and writes continue."""

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, Field

from kinlens.embedder.durable import (
    crash_point,
    discard,
    exclusive,
    holder,
    in_use,
    is_stage,
    lock_folder,
    make_folder,
    rename,
    staged,
    sweep,
    sync_tree,
)
from kinlens.embedder.errors import (
    GalleryBusyError,
    GalleryCorruptError,
    GalleryError,
    GalleryWriteError,
    KinlensError,
)
from kinlens.indexer.catalog.database import Catalog, catalog_view
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.schema import State
from kinlens.indexer.catalog.vectors import VECTORS, VectorFile
from kinlens.indexer.columns.checkpoint import collect_columns, load_columns, store_columns
from kinlens.indexer.columns.columns import COLUMN_BYTES
from kinlens.indexer.folder.layout import disk_errors_explained
from kinlens.indexer.index.copies import Copies
from kinlens.indexer.index.plan import IndexSettings, plan_compaction
from kinlens.indexer.index.segment import (
    SEGMENTS,
    PreviousSegment,
    Rows,
    SegmentManifest,
    check_file,
    missing_segment,
    read_segment_manifest,
    write_segment,
)
from kinlens.indexer.types import NUMBER_BYTES, Ids, Progress
from kinlens.reports import Report

T = TypeVar("T")

CATALOG = "catalog.sqlite"
_LOCK = "COMPACT"

MAX_REMOVED_ROWS = 1 / 3
"""Share of vector rows of items that cannot be restored above which the file is rewritten."""

KEEP_REMOVED_S = 86_400.0
"""How long background compactions keep removed items, so that a removal can be undone."""

_MAX_ATTEMPTS = 8  # to use a segment before a compaction deletes it
_RETRY_S = 30.0
_MAX_PAUSE_S = 3600.0
_CLOSE_S = 2.0
_TURN = threading.Semaphore()
_TURN_S = 0.5  # how often to check for `close` while another gallery is compacted


class CompactReport(Report, BaseModel, frozen=True):
    """Result of a compaction: the new segment (None for an empty gallery) and the duration.

    `skipped` is whether nothing was to do.
    """

    segment: str | None
    manifest: SegmentManifest | None
    elapsed_s: float
    skipped: bool = Field(default=False, exclude=True)

    def lines(self) -> Iterator[str]:
        """The index and its recall."""
        made = self.manifest
        if self.skipped:
            yield "Nothing has changed since the last compaction. To rebuild, use --rebuild."
        elif made is None:
            yield "The gallery is empty, so it has no index."
        else:
            yield (
                f"Index {made.kind} of {made.size:,} items in {self.elapsed_s:.1f} s, "
                f"recall@10 {made.recall:.4f} (target {made.target_recall})."
            )


def compact(
    generation: Path,
    settings: IndexSettings,
    *,
    wait: bool = False,
    keep_removed_s: float = 0.0,
    from_scratch: bool = False,
    skip_if: Callable[[], bool] = lambda: False,
    on_progress: Progress | None = None,
) -> CompactReport:
    """Write a segment of all items in the catalogue and switch to it.

    The current segment is extended where possible, except with `from_scratch`. Items removed in
    the last `keep_removed_s` seconds can be restored afterwards; with 0, the vectors of all removed
    items are erased. `skip_if` is called under the compaction lock: if true, nothing is done.

    Raises: GalleryBusyError if another process compacts, unless `wait`; PlanError, RecallError
        (the gallery is unchanged); GalleryWriteError.
    """
    started = perf_counter()
    with (
        compaction_lock(generation, wait),
        disk_errors_explained(generation),
        contextlib.closing(Catalog.open(generation / CATALOG, writable=True)) as catalog,
    ):
        if skip_if():
            return CompactReport(segment=None, manifest=None, elapsed_s=0.0, skipped=True)
        (generation / SEGMENTS).mkdir(exist_ok=True)
        if (generation / VECTORS).is_dir():
            sweep(generation / VECTORS)
        collect(generation)
        try:
            work = _Compaction(generation, settings, keep_removed_s, from_scratch, on_progress)
            with catalog.writing():
                pass  # converts a catalogue of an earlier version
            name, manifest = work.run(catalog)
            if keep_removed_s <= 0:
                catalog.shrink()
        finally:
            collect(generation)
    return CompactReport(segment=name, manifest=manifest, elapsed_s=perf_counter() - started)


def collect(generation: Path) -> None:
    """Delete segments and vectors that are no longer used; safe while a compaction runs."""
    with contextlib.suppress(OSError, GalleryError):
        parents = [generation / SEGMENTS, generation / VECTORS]
        folders = [one for parent in parents if parent.is_dir() for one in parent.iterdir()]
        idle = [folder for folder in folders if not is_stage(folder) and not in_use(folder)]
        # Read after listing: a compaction may just have adopted one of these folders.
        with catalog_view(generation / CATALOG) as view:
            current = view.state().base
        for folder in idle:
            if folder.name not in current:
                discard(folder)
        collect_columns(generation)


def with_state(generation: Path, work: Callable[[CatalogView, Path | None], T]) -> T:
    """The result of `work` on a view of one state and the folder of its segment, None if it has
    none. The segment stays until then; the work begins again if a compaction was just deleting it.

    Raises: GalleryBusyError if compactions delete each segment first; GalleryCorruptError if it is
        missing; GalleryError.
    """
    missing: Path | None = None
    for _ in range(_MAX_ATTEMPTS):
        with catalog_view(generation / CATALOG) as view, contextlib.ExitStack() as stack:
            name = view.state().segment
            segment = None if name is None else generation / SEGMENTS / name
            try:
                if segment is not None:
                    stack.callback(os.close, lock_folder(segment))
                return work(view, segment)
            except (FileNotFoundError, GalleryCorruptError) as error:
                if segment is None or segment.is_dir():
                    raise
                if segment == missing:  # it is still the current one
                    raise missing_segment(segment) from error
                missing = segment
    raise GalleryBusyError(
        f"Compactions of {generation.parent.parent} replaced the segment in each of "
        f"{_MAX_ATTEMPTS} attempts to copy it. Try again when they have finished."
    )


@contextlib.contextmanager
def compaction_lock(generation: Path, wait: bool) -> Iterator[None]:
    """The compaction lock of a generation, for the duration of a `with` block.

    Raises: GalleryBusyError if another process has it, unless `wait`; GalleryWriteError.
    """
    lock = generation / _LOCK
    with disk_errors_explained(generation):
        cleanup = contextlib.ExitStack()
        is_locked = cleanup.enter_context(exclusive(lock, wait=wait))
    with cleanup:
        if not is_locked:
            raise GalleryBusyError(
                f"Another process ({holder(lock)}) is compacting {generation.parent.parent}. "
                "Searches and changes continue; try again when it has finished."
            )
        yield


@dataclass(slots=True)
class _Compaction:
    """One run of a compaction; a call of `run` does all the work.

    kept: the times between which restorable items were removed.
    """

    generation: Path
    settings: IndexSettings
    keep_removed_s: float
    from_scratch: bool
    on_progress: Progress | None
    kept: tuple[float, float] = (0.0, 0.0)

    def run(self, catalog: Catalog) -> tuple[str | None, SegmentManifest | None]:
        """Write and adopt a segment. Returns its name and manifest, None for an empty gallery."""
        segments, name = self.generation / SEGMENTS, None
        with staged(segments) as stage:  # keeps `collect` away until the catalogue names it
            state, file, manifest = self._write(stage, catalog)
            if manifest is not None:
                name = f"{state.seq:012d}-{os.urandom(4).hex()}"
                sync_tree(stage, "segment")
                rename(stage, segments / name, "segment")
            crash_point("adopt: before commit")
            with catalog.writing() as writer:
                writer.adopt_segment(name, state.seq, file)
            crash_point("adopt: after commit")
            catalog.erase(self.kept)
        return name, manifest

    def _write(
        self, stage: Path, catalog: Catalog
    ) -> tuple[State, VectorFile | None, SegmentManifest | None]:
        """Write a segment of one state of the catalogue.

        Returns the state, the vectors if they were rewritten, and the segment's manifest, None for
        an empty gallery.
        """
        # End the transaction before the long work: while it is open, SQLite's log only grows.
        with catalog.reading() as view:
            state, ids, file = view.state(), view.live_ids(), view.file
            assert file is not None  # it has been converted
            now = time.time()  # after the view was opened: times in the future have expired
            self.kept = now - self.keep_removed_s, now
            restorable = view.removed_ids(self.kept)
            is_wanted = self._is_to_write(view, file, ids, restorable)
            rewritten = self._rewritten(view, ids, restorable, file) if is_wanted else None
            if not len(ids):
                return state, rewritten, None
            rows = _rows(rewritten or file, ids, view)
            plan = plan_compaction(len(rows.indexed), view.dim, self.settings, file.type)
            _check_space(stage, plan.code_bytes + len(ids) * COLUMN_BYTES)
            previous = (
                None if self.from_scratch else self._previous_segment(state, file, rewritten, rows)
            )
            columns = load_columns(self.generation, view, from_scratch=self.from_scratch)
            if rewritten is not None:
                columns = columns.moved(rewritten.name, rewritten.row_ids, rows.size)
        if columns.changes or rewritten is not None:
            store_columns(self.generation, columns)
        manifest = write_segment(
            stage, state.seq, rows, self.settings, plan, self.on_progress, previous
        )
        return state, rewritten, manifest

    def _is_to_write(self, view: CatalogView, file: VectorFile, ids: Ids, restorable: Ids) -> bool:
        """Whether to rewrite the vectors without removed items that cannot be restored."""
        size = file.row_ids.rows_up_to(view.last_given())
        removed = size - len(ids) - len(restorable)
        is_wanted = self.keep_removed_s <= 0 or removed > MAX_REMOVED_ROWS * size
        return removed > 0 and is_wanted

    def _rewritten(
        self, view: CatalogView, ids: Ids, restorable: Ids, file: VectorFile
    ) -> VectorFile:
        """A new file with the rows of the items `ids`, and of removed items."""
        folder = self.generation / VECTORS
        make_folder(folder, "vectors")
        every = np.union1d(ids, restorable)
        _check_space(folder, NUMBER_BYTES[file.type] * len(every) * view.dim)
        with staged(folder) as stage:
            batches = self._with_progress(view.vectors_of(every))
            VectorFile.rewrite(stage, view.dim, every, view.last_given(), batches, file.type)
            sync_tree(stage, "vectors")
            name = os.urandom(4).hex()
            rename(stage, folder / name, "vectors")
            return VectorFile.open(folder / name, view.dim)

    def _with_progress(self, batches: Iterable[T]) -> Iterator[T]:
        """Report progress before each batch, which cancels the compaction on close."""
        for batch in batches:
            if self.on_progress is not None:
                self.on_progress(0)
            yield batch

    def _previous_segment(
        self, state: State, file: VectorFile, rewritten: VectorFile | None, rows: Rows
    ) -> PreviousSegment | None:
        """The current segment, if it is of the current format and undamaged."""
        if state.segment is None:
            return None
        folder = self.generation / SEGMENTS / state.segment
        try:
            manifest = read_segment_manifest(folder)
            if manifest.vectors != file.name:
                return None
            for name, facts in manifest.files.items():  # damage must not be copied
                check_file(folder / name, facts, verify_hash=True)
        except GalleryCorruptError:
            return None
        moved = np.arange(manifest.size)
        if rewritten is not None:
            moved = rewritten.row_ids.rows_of(file.row_ids.of(moved))
        moved = np.where((moved < 0) | rows.removed[moved], -1, moved)
        return PreviousSegment(folder, manifest, moved)


def _rows(file: VectorFile, ids: Ids, view: CatalogView) -> Rows:
    """The rows of a file with the items `ids` of a state; rows of other items are removed."""
    size = file.row_ids.rows_up_to(view.last_given())
    removed = np.ones(size, np.bool_)
    removed[file.rows_of(ids)] = False
    equal, images = view.equal_images()
    copies = Copies.find(file.rows(size), file.rows_of(equal), images, size)
    return Rows(file, size, removed, copies)


def _check_space(folder: Path, needed: float) -> None:
    """Check for `needed` bytes of free disk space. Raises: GalleryWriteError."""
    needed_mb = needed / 2**20
    free_mb = shutil.disk_usage(folder).free / 2**20
    if free_mb < needed_mb:
        raise GalleryWriteError(
            f"The compaction needs about {needed_mb:,.0f} MB in {folder.parent.parent}, but "
            f"{free_mb:,.0f} MB are free. Free some space; searches and changes continue."
        )


class BackgroundCompaction:
    """Compacts a gallery when a change makes it due, until `close`, in a thread that ends when it
    has nothing to do: many galleries that nobody changes need no thread.

    One compaction runs at a time in a process, since it uses all cores and much memory. It waits
    for others for up to an hour: one may hang on its disk.

    due: returns why a compaction is due, or None.
    compact: runs it; takes a progress callback.

    A failure is logged and stored in `last_error`. It is retried after a pause that doubles each
    time, up to an hour.
    """

    def __init__(
        self,
        due: Callable[[], str | None],
        compact: Callable[[Progress], object],
    ) -> None:
        self.last_error: KinlensError | None = None
        self._due = due
        self._compact = compact
        self._pause_s = _RETRY_S
        self._is_nudged = self._is_urgent = False
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def nudge(self) -> None:
        """Signal that the gallery has changed."""
        with self._lock:
            self._is_nudged = True
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="compaction", daemon=True)
                self._thread.start()

    def urge(self) -> None:
        """Signal that writers wait for a compaction, so that no pause is longer than the first."""
        self._is_urgent = True
        self.nudge()

    def close(self) -> None:
        """Stop the thread. A running compaction is cancelled at its next step.

        Does not wait for a long step such as training the index: it ends in the background, and
        the next compaction uses or removes its files.
        """
        self._closed.set()
        thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_S)

    def _has_work(self) -> bool:
        with self._lock:
            if not self._is_nudged or self._closed.is_set():
                self._thread = None
                return False
            self._is_nudged = False
            return True

    def _run(self) -> None:
        while self._has_work():
            try:
                if self._due():
                    self._compact_in_turn()
                self.last_error = None
                self._pause_s = _RETRY_S
                continue
            except GalleryBusyError:
                pass  # another process compacts; check later whether it succeeded
            except KinlensError as error:
                self._failed(error)
            except Exception as error:
                # Top of the thread: any error, such as a MemoryError, must be reported.
                self._failed(
                    GalleryError(f"The compaction failed: {type(error).__name__}: {error}")
                )
            self._retry_later()

    def _compact_in_turn(self) -> None:
        end = time.monotonic() + _MAX_PAUSE_S
        while not (has_turn := _TURN.acquire(timeout=_TURN_S)) and time.monotonic() < end:
            self._step(0)
        try:
            if self._due():  # or another process has compacted it meanwhile
                self._compact(self._step)
        finally:
            if has_turn:
                _TURN.release()

    def _step(self, _: int) -> None:
        if self._closed.is_set():
            raise GalleryBusyError("The compaction was cancelled: the gallery is being closed.")

    def _failed(self, error: KinlensError) -> None:
        if self._closed.is_set():
            return  # the gallery was closed during the compaction
        self.last_error = error
        logging.getLogger(__name__).error("compaction failed: %s", error)

    def _retry_later(self) -> None:
        for _ in range(round(self._pause_s / _RETRY_S)):
            self._closed.wait(_RETRY_S)
            if self._is_urgent:
                break
        self._is_urgent = False
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        self._is_nudged = True
