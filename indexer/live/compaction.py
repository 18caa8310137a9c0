"""Compaction: a new segment from the catalogue, written aside while searches and writes go on."""

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
from pydantic import BaseModel

from kinlens.embedder.durable import (
    crash_point,
    discard,
    exclusive,
    holder,
    in_use,
    is_stage,
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
from kinlens.embedder.types import Embeddings
from kinlens.indexer.catalog.database import Catalog, catalog_view
from kinlens.indexer.catalog.read import CatalogView, State
from kinlens.indexer.catalog.vectors import VECTORS, VectorFile
from kinlens.indexer.columns.columns import COLUMN_BYTES, Columns, ColumnsBuilder
from kinlens.indexer.folder.layout import disk_errors_explained
from kinlens.indexer.index.kinds import KINDS
from kinlens.indexer.index.plan import IndexSettings, Plan, plans_for
from kinlens.indexer.index.segment import (
    COLUMNS,
    Before,
    Rows,
    SegmentManifest,
    check_file,
    read_manifest,
    write_segment,
)
from kinlens.indexer.types import NUMBER_BYTES, Ids, Progress, VectorType, places_of

CATALOG = "catalog.sqlite"
SEGMENTS = "segments"
_LOCK = "COMPACT"

MAX_GONE = 1 / 3
"""Part of the rows of vectors that may be of removed items before they are rewritten."""

MAX_DEAD = 0.2
"""Part of a segment that may be removed items before a compaction is due."""

_SMALL_DELTA = 10_000
_LARGE_DELTA = 100_000
_DELTA_PART = 0.1
_DELTA_BYTES = 32 * 2**20  # of vectors, with which each query is compared

KEEP_REMOVED_S = 86_400.0
"""How long a removal can be undone although compactions ran that nobody asked for."""

_RETRY_S = 30.0
_LOOK_S = 1.0
_LONGEST_PAUSE_S = 3600.0
_CLOSE_S = 2.0


class CompactReport(BaseModel, frozen=True):
    """What a compaction did: the new segment (None for an empty gallery) and the time it took."""

    segment: str | None
    manifest: SegmentManifest | None
    elapsed_s: float


def due(segment_size: int, dead: int, delta: int, dim: int) -> str | None:
    """Why a compaction is due, or None: 20 % removed, or many items after the segment.

    `delta` counts what was added or changed since, also if it was removed then: it stays in memory.
    """
    if segment_size and dead >= MAX_DEAD * segment_size:
        return f"{dead:,} of the {segment_size:,} items of the segment have been removed"
    limit = min(max(int(_DELTA_PART * segment_size), _SMALL_DELTA), _LARGE_DELTA)
    limit = min(limit, _DELTA_BYTES // (4 * dim))
    if delta >= limit:
        return f"{delta:,} items were added or changed after the segment, the limit is {limit:,}"
    return None


def compact(
    generation: Path,
    settings: IndexSettings,
    *,
    wait: bool = False,
    keep_removed_s: float = 0.0,
    from_scratch: bool = False,
    unless: Callable[[], bool] = lambda: False,
    on_progress: Progress | None = None,
) -> CompactReport:
    """Make a segment of everything that is in the catalogue now, and switch to it.

    The segment so far is brought up to date where that will do, unless this is to begin
    `from_scratch`. What was removed in the last `keep_removed_s` seconds can still be brought back
    afterwards; if that is 0, the vectors of all that was removed are erased. `unless` is asked when
    all others are kept out: if it is true by then, nothing is done.

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
        (generation / SEGMENTS).mkdir(exist_ok=True)
        if (generation / VECTORS).is_dir():
            sweep(generation / VECTORS)
        collect(generation)
        try:
            work = _Work(generation, settings, keep_removed_s, from_scratch, on_progress)
            name, manifest = work.run(catalog)
            if keep_removed_s <= 0:
                catalog.shrink()
        finally:
            collect(generation)
    return CompactReport(segment=name, manifest=manifest, elapsed_s=perf_counter() - started)


def collect(generation: Path) -> None:
    """Remove segments and vectors that nobody reads any more, also while a compaction runs."""
    with contextlib.suppress(OSError, GalleryError):
        places = [generation / SEGMENTS, generation / VECTORS]
        folders = [one for place in places if place.is_dir() for one in place.iterdir()]
        idle = [folder for folder in folders if not is_stage(folder) and not in_use(folder)]
        # Looked up afterwards: a compaction may have named one of them meanwhile.
        with catalog_view(generation / CATALOG) as view:
            current = (view.state().segment, view.file_name)
        for folder in idle:
            if folder.name not in current:
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


class _Work:
    """The writing of one compaction."""

    def __init__(
        self,
        generation: Path,
        settings: IndexSettings,
        keep_removed_s: float,
        from_scratch: bool,
        on_progress: Progress | None,
    ) -> None:
        self._generation = generation
        self._settings = settings
        self._keep_removed_s = keep_removed_s
        self._from_scratch = from_scratch
        self._on_progress = on_progress

    def run(self, catalog: Catalog) -> tuple[str | None, SegmentManifest | None]:
        """Write and adopt a segment; its name and manifest, None for an empty gallery."""
        segments, name = self._generation / SEGMENTS, None
        with staged(segments) as stage:  # which marks it as in use until the catalogue names it
            state, file, manifest = self._write(stage, catalog)
            if manifest is not None:
                name = f"{state.seq:012d}-{os.urandom(4).hex()}"
                sync_tree(stage, "segment")
                rename(stage, segments / name, "segment")
            crash_point("adopt: before commit")
            with catalog.writing() as writer:
                writer.adopt_segment(name, state.seq, self._keep_removed_s, file)
            crash_point("adopt: after commit")
        return name, manifest

    def _write(
        self, stage: Path, catalog: Catalog
    ) -> tuple[State, VectorFile | None, SegmentManifest | None]:
        """A segment of one state of the catalogue, None if that is empty; and the vectors, if they
        were rewritten.
        """
        # The transaction ends before the long work: as long as it lasts, the log only grows.
        with catalog.reading() as view:
            state, ids, file = view.state(), view.live_ids(), view.file
            type_: VectorType = "fp32" if file is None else file.type
            plans = plans_for(len(ids), view.dim, self._settings, type_) if len(ids) else []
            is_packed = bool(plans) and KINDS[plans[0].kind].needs_all_rows
            is_wanted = self._is_to_write(view, ids, is_packed)
            rewritten = self._rewritten(view, ids) if is_wanted else None
            if not len(ids):
                return state, rewritten, None
            _check_space(stage, plans[0], 0)
            rows = _rows(rewritten or view.file, ids, view.last_given())
            before = None if self._from_scratch else self._before(state, file, rewritten, ids, rows)
            builder = ColumnsBuilder(rows.size, view.schema())
            columns, moved = None, None
            if before is None or file is None:
                for numbers, attributes in view.attributes():
                    builder.add(rows.file.numbers.rows_of(numbers).tolist(), attributes)
            else:
                changed = view.attributes_since(state.segment_seq)
                numbers = np.array([number for number, _ in changed], np.int64)
                builder.add(
                    rows.file.numbers.rows_of(numbers).tolist(), [own for _, own in changed]
                )
                columns = Columns.open(before.folder / COLUMNS, before.manifest.size)
                old, moved = file.numbers.rows_of(numbers), before.moved.copy()
                moved[old[(old >= 0) & (old < len(moved))]] = -1
        manifest = write_segment(
            stage,
            state.seq,
            rows,
            builder.columns(columns, moved),
            self._settings,
            plans,
            self._on_progress,
            before,
        )
        return state, rewritten, manifest

    def _is_to_write(self, view: CatalogView, ids: Ids, is_packed: bool) -> bool:
        """Whether the vectors are rewritten, without the rows of removed items; `is_packed` if the
        index cannot leave these out.
        """
        if view.file is None:
            return True
        size = view.file.numbers.rows_up_to(view.last_given())
        gone = size - len(ids)
        is_wanted = self._keep_removed_s <= 0 or is_packed or gone > MAX_GONE * size
        return gone > 0 and is_wanted

    def _rewritten(self, view: CatalogView, ids: Ids) -> VectorFile:
        folder = self._generation / VECTORS
        make_folder(folder, "vectors")
        type_: VectorType = "fp32" if view.file is None else view.file.type
        _check_space(folder, None, NUMBER_BYTES[type_] * len(ids) * view.dim)
        with staged(folder) as stage:
            batches = self._batches(view)
            VectorFile.rewrite(stage, view.dim, ids, view.last_given(), batches, type_)
            sync_tree(stage, "vectors")
            name = os.urandom(4).hex()
            rename(stage, folder / name, "vectors")
            return VectorFile.open(folder / name, view.dim)

    def _batches(self, view: CatalogView) -> Iterator[tuple[Ids, Embeddings]]:
        """The vectors of all items; a compaction that is given up ends here as well."""
        for batch in view.iter_vectors():
            if self._on_progress is not None:
                self._on_progress(0)
            yield batch

    def _before(
        self,
        state: State,
        file: VectorFile | None,
        rewritten: VectorFile | None,
        ids: Ids,
        rows: Rows,
    ) -> Before | None:
        """The segment so far, if it is of this version and whole."""
        if state.segment is None or file is None:
            return None
        folder = self._generation / SEGMENTS / state.segment
        try:
            manifest = read_manifest(folder)
            if manifest.vectors != file.name:
                return None
            for name, facts in manifest.files.items():  # what is damaged must not live on
                check_file(folder / name, facts, verify_hash=True)
        except GalleryCorruptError:
            return None
        places = np.arange(manifest.size)
        if rewritten is not None:
            return Before(folder, manifest, places_of(file.numbers.of(places), ids))
        return Before(folder, manifest, np.where(rows.gone[: manifest.size], -1, places))


def _rows(file: VectorFile | None, ids: Ids, last_given: int) -> Rows:
    """The rows of a file up to the last number, of which those of the items `ids` are live."""
    assert file is not None
    gone = np.ones(file.numbers.rows_up_to(last_given), np.bool_)
    gone[file.rows_of(ids)] = False
    return Rows(file, len(gone), gone)


def _check_space(folder: Path, plan: Plan | None, others: float) -> None:
    """Raises: GalleryWriteError where what is to be written has no room beside what is there."""
    needed_mb = others / 2**20
    if plan is not None:
        needed_mb += (plan.code_bytes + plan.n * COLUMN_BYTES) / 2**20
    free_mb = shutil.disk_usage(folder).free / 2**20
    if free_mb < needed_mb:
        raise GalleryWriteError(
            f"The compaction needs about {needed_mb:,.0f} MB in {folder.parent.parent}, but "
            f"{free_mb:,.0f} MB are free. Make room; until then searches and changes go on."
        )


class BackgroundCompaction:
    """Looks after a gallery from the first `nudge` until it is closed.

    `due` says why a compaction is due, or None; `compact` does it and reports its progress.
    `otherwise` is done where none is due, and `refresh` each second that nothing happens: another
    process may have made a segment, which no search should have to open. A failure is logged, kept
    in `last_error` and handed to `on_error`. It is tried again after a pause that doubles each
    time, up to an hour.
    """

    def __init__(
        self,
        due: Callable[[], str | None],
        compact: Callable[[Progress], object],
        otherwise: Callable[[], object],
        refresh: Callable[[], object],
        on_error: Callable[[KinlensError], None] | None = None,
        retry_s: float = _RETRY_S,
    ) -> None:
        self.last_error: KinlensError | None = None
        self._due = due
        self._compact = compact
        self._otherwise = otherwise
        self._refresh = refresh
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
        while not self._closed.is_set():
            is_nudged = self._nudged.wait(_LOOK_S)
            self._nudged.clear()
            if self._closed.is_set():
                return
            try:
                if not is_nudged:
                    self._refresh()
                elif self._due():
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
