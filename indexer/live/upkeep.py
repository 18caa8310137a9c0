"""Upkeep of a gallery: its state, what is due, and compactions."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from kinlens.embedder.durable import stamp, write_whole
from kinlens.embedder.errors import GalleryCorruptError
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.schema import SCHEMA_VERSION, State, schema_version
from kinlens.indexer.columns.checkpoint import MANY
from kinlens.indexer.folder.layout import disk_errors_explained
from kinlens.indexer.folder.manifest import PRECISIONS, GalleryFacts
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.index.segment import SEGMENTS, SegmentManifest, read_segment_manifest
from kinlens.indexer.live.compaction import (
    CATALOG,
    KEEP_REMOVED_S,
    BackgroundCompaction,
    CompactReport,
    collect,
    compact,
)
from kinlens.indexer.live.reader import GalleryReader
from kinlens.indexer.types import RESTORE, IndexLocation, Progress

_MAX_DEAD = 0.2  # share of removed items in a segment above which a compaction is due
_SMALL_DELTA = 10_000
_LARGE_DELTA = 100_000
_DELTA_PART = 0.1
_DELTA_BYTES = 32 * 2**20  # every query is compared with all vectors of the delta
_FULL = 8  # the full delta, as a multiple of the one that makes a compaction due


class GalleryUpkeep(GalleryReader):
    """The upkeep of a gallery. A compaction may run in another thread."""

    _background: BackgroundCompaction | None = None
    _known: tuple[str, SegmentManifest] | None = None  # the last segment and its manifest
    _stamp: tuple[int, ...] | None = None
    _left_at: int | None = None  # the write until which nothing is compacted in the background

    @property
    def copy_of(self) -> str | None:
        """The address of the original if this is a read-only copy; else None."""
        return self._folder.copy_of

    @property
    def precision(self) -> str:
        built = self.manifest.precision.split("+")
        return "+".join(sorted({*built, *self._added_precisions()}))

    def admit(self, precision: str) -> None:
        if precision not in self.precision.split("+"):
            path = self.generation_folder / PRECISIONS
            with self._folder.writing(self.generation), disk_errors_explained(path.parent):
                known = sorted({precision, *self._added_precisions()})
                write_whole(path, json.dumps(known).encode(), "precisions")
                path.chmod(0o644)  # another user may serve the gallery

    def _added_precisions(self) -> list[str]:
        path = self.generation_folder / PRECISIONS
        try:
            return [str(one) for one in json.loads(path.read_bytes())]
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise GalleryCorruptError(f"{path} cannot be read: {error}. {RESTORE}") from error

    @property
    def version(self) -> str:
        return self._version_at(self._catalog.state().seq)

    @property
    def loaded_version(self) -> str:
        """The newest version in memory, which no search is beyond; it reads no file."""
        return self._version_at(self._snapshots.loaded_seq)

    def facts(self) -> GalleryFacts:
        """A description of the gallery's current state."""
        with self._snapshots.reading() as reading:
            snapshot = reading.snapshot
            state = snapshot.state
            segment = None if snapshot.segment is None else snapshot.segment.manifest
            is_earlier = segment is not None and segment.vectors is None
            delta = reading.view.added_count() if is_earlier else snapshot.later_count
            known = self.manifest.model_dump(
                include={"name", "bundle_id", "dim", "created_at", "source", "source_root"}
            )
            return GalleryFacts(
                **known,
                precision=self.precision,
                version=self._version_at(state.seq),
                generation=self.generation,
                size=state.size,
                delta=delta,
                tombstones=0 if segment is None else segment.items - (state.size - delta),
                compaction_due=self._due(reading.view, state),
                segment=segment,
            )

    def index_location(self) -> IndexLocation | None:
        """The device of the index; None without an index. Raises: GalleryCorruptError."""
        segment = self._snapshots.newest().segment
        return None if segment is None else segment.location

    def compact(
        self,
        settings: IndexSettings | None = None,
        *,
        wait: bool = False,
        keep_removed_s: float = 0.0,
        from_scratch: bool = False,
        on_progress: Progress | None = None,
        skip_if: Callable[[], bool] = lambda: False,
    ) -> CompactReport:
        """Write a new segment of all items, and switch to it.

        Searches and changes continue during the compaction.

        settings: how to build the index; by default as the current one.
        wait: wait for the compaction of another process.
        keep_removed_s: how long removed items stay restorable; 0 erases them.
        from_scratch: reuse nothing of the current segment.
        skip_if: called when no other compaction runs; if true, nothing is done.

        Raises: GalleryBusyError if another process compacts, without `wait`; GalleryConflictError
            for a copy; PlanError, RecallError, GalleryWriteError: the old segment stays in use.
        """
        self._folder.refuse_copy()
        report = compact(
            self.generation_folder,
            settings or self.index_settings(),
            wait=wait,
            keep_removed_s=keep_removed_s,
            from_scratch=from_scratch,
            skip_if=skip_if,
            on_progress=on_progress,
        )
        self._snapshots.refresh()
        with self._catalog.reading():  # releases vectors that were rewritten
            pass
        collect(self.generation_folder)
        return report

    def refresh(self) -> None:
        """Notice what other processes have written: open a new segment, apply later changes to what
        searches use, and compact in the background if that is due.

        Searches use the present segment meanwhile. They wait for the new one if it contains writes
        that this process has not noticed before, or replaces one of an earlier version.
        """
        self._snapshots.refresh()
        self._snapshots.follow()
        if self._background is not None:
            self._background.nudge()

    def has_changed(self) -> bool:
        """Whether any process has written to the catalogue since the last call, by the time of its
        log. Asking many galleries each second is cheap.
        """
        before, self._stamp = self._stamp, stamp(f"{self.generation_folder}/{CATALOG}-wal")
        return before != self._stamp

    def index_settings(self) -> IndexSettings:
        """The settings of the current index; the defaults if they are not recorded."""
        name = self._catalog.state().segment
        try:
            return read_segment_manifest(self.generation_folder / SEGMENTS / str(name)).settings
        except GalleryCorruptError:
            return IndexSettings()

    def needs_compaction(self) -> str | None:
        """Why a compaction is due: 20 % of the segment removed, or a large delta.

        None if not due. Copies are never compacted, only their original.
        """
        if self.copy_of is not None:
            return None
        with self._catalog.reading() as view:
            return self._due(view, view.state())

    def compact_in_background(self, *, after_writes: bool = False) -> BackgroundCompaction:
        """Compact the gallery in another thread whenever a write, or `refresh`, finds it due.

        after_writes: nothing is rewritten before a write of any process follows this call, and a
            gallery of an earlier version is not converted.
        """
        if self._background is None:
            self._background = BackgroundCompaction(
                self._due_in_background,
                lambda progress: self.compact(keep_removed_s=KEEP_REMOVED_S, on_progress=progress),
            )
            if after_writes:
                self._left_at = self._catalog.state().seq
            else:
                self._background.nudge()
        return self._background

    def _is_left(self) -> bool:
        """Whether a compaction in the background must leave the gallery as it is."""
        if self._left_at is None:
            return False
        with self._catalog.reading() as view:
            is_earlier = schema_version(view.connection) != SCHEMA_VERSION
            return is_earlier or view.state().seq == self._left_at

    def _due_in_background(self) -> str | None:
        if self._is_left():
            return None
        reason = self.needs_compaction()
        if reason is None and self.copy_of is None:
            with disk_errors_explained(self.generation_folder):
                self._snapshots.checkpoint()
        return reason

    def _due(self, view: CatalogView, state: State) -> str | None:
        if state.segment is not None and not self._folder_of(state.segment).is_dir():
            return None  # a compaction has just replaced it
        manifest = self._segment_of(state)
        if manifest is not None and manifest.vectors is None and manifest.size >= MANY:
            return "its index was built by an earlier version"
        size = 0 if manifest is None else manifest.items
        if manifest is None or view.file is None or view.file.name != manifest.vectors:
            removed = view.removed_count()
        else:  # not counted: each item that was added has a row
            added = view.file.row_ids.rows_up_to(view.last_given()) - manifest.size
            removed = size + added - state.size
        if size and removed >= _MAX_DEAD * size:
            return f"{removed:,} of the {size:,} items of the segment have been removed"
        # Including removed ones, which stay in memory.
        delta, limit = state.size - size + removed, _delta_limit(size, view.dim)
        if delta >= limit:
            return f"{delta:,} items were added after the segment, the limit is {limit:,}"
        return None

    def _segment_of(self, state: State) -> SegmentManifest | None:
        """The manifest of the segment of a state; None without one. Raises: GalleryCorruptError."""
        known, name = self._known, state.segment
        if name is None:
            return None
        if known is None or known[0] != name:
            known = self._known = name, read_segment_manifest(self._folder_of(name))
        return known[1]

    def _rows_when_full(self, state: State) -> int:
        """The number of rows of vectors at which the delta is full, and writers have to wait."""
        manifest = self._segment_of(state)
        items, rows = (0, 0) if manifest is None else (manifest.items, manifest.size)
        return rows + _FULL * _delta_limit(items, self.dim)

    def _folder_of(self, segment: str) -> Path:
        return self.generation_folder / SEGMENTS / segment

    def _version_at(self, seq: int) -> str:
        return hashlib.sha256(f"{self.manifest.uid}:{seq}".encode()).hexdigest()


def _delta_limit(segment_size: int, dim: int) -> int:
    limit = min(max(int(_DELTA_PART * segment_size), _SMALL_DELTA), _LARGE_DELTA)
    return min(limit, _DELTA_BYTES // (4 * dim))
