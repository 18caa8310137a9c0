"""A new segment from the catalogue, written aside while searches and writes go on."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

from pydantic import BaseModel, ConfigDict

from embedder.errors import GalleryBusyError, GalleryError
from indexer.catalog.database import Catalog
from indexer.catalog.read import State
from indexer.folder.durable import reach, rename, sync_tree
from indexer.folder.layout import discard, disk_errors_explained, is_stage, staged
from indexer.folder.locks import exclusive, holder, in_use
from indexer.index.plan import IndexSettings
from indexer.index.segment import write_segment, write_vectors
from indexer.index.segment_manifest import SegmentManifest
from indexer.types import Progress

CATALOG = "catalog.sqlite"
SEGMENTS = "segments"
_LOCK = "COMPACT"

MAX_DEAD = 0.2
"""Part of a segment that may be removed items before a compaction is due."""

_SMALL_DELTA = 10_000
_LARGE_DELTA = 100_000
_DELTA_PART = 0.1


class CompactReport(BaseModel):
    """What a compaction did: the new segment (None for an empty gallery) and the time it took."""

    model_config = ConfigDict(frozen=True)

    segment: str | None
    manifest: SegmentManifest | None
    elapsed_s: float


def due(segment_size: int, dead: int, delta: int) -> str | None:
    """Why a compaction is due, or None: 20 % removed, or many items after the segment.

    `delta` counts removed ones as well: their numbers stay in memory and in the catalogue.
    """
    if segment_size and dead >= MAX_DEAD * segment_size:
        return f"{dead:,} of the {segment_size:,} items of the segment have been removed"
    limit = min(max(int(_DELTA_PART * segment_size), _SMALL_DELTA), _LARGE_DELTA)
    if delta >= limit:
        return f"{delta:,} items came after the segment, the limit is {limit:,}"
    return None


def compact(
    generation: Path,
    settings: IndexSettings,
    *,
    wait: bool = False,
    unless: Callable[[], bool] = lambda: False,
    on_progress: Progress | None = None,
) -> CompactReport:
    """Make a segment of everything that is in the catalogue now, and switch to it.

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
        _clear(segments, _current(catalog))
        state, name, manifest = _write(segments, catalog, settings, on_progress)
        reach("adopt: before commit")
        with catalog.writing() as writer:
            writer.adopt_segment(name, state.seq)
        reach("adopt: after commit")
        _clear(segments, name)
    return CompactReport(segment=name, manifest=manifest, elapsed_s=perf_counter() - started)


def collect(generation: Path) -> None:
    """Remove segments that nobody reads any more, unless a compaction runs, which will do so."""
    with (
        contextlib.suppress(OSError, GalleryError),
        alone(generation, wait=False),
        contextlib.closing(Catalog.open(generation / CATALOG)) as catalog,
    ):
        _clear(generation / SEGMENTS, _current(catalog))


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


def _current(catalog: Catalog) -> str | None:
    with catalog.reading() as view:
        return view.state().segment


def _write(
    segments: Path, catalog: Catalog, settings: IndexSettings, on_progress: Progress | None
) -> tuple[State, str | None, SegmentManifest | None]:
    """The new segment under its name, on the disk, but not yet used by anyone."""
    with staged(segments) as stage:
        # The transaction ends before the long work: as long as it lasts, the log only grows.
        with catalog.reading() as view:
            state = view.state()
            ids = view.live_ids()
            if not len(ids):
                return state, None, None
            vectors = write_vectors(stage, ids, view.iter_vectors(), settings)
        manifest = write_segment(stage, state.seq, vectors, settings, on_progress)
        stage.chmod(0o755)
        sync_tree(stage, "segment")
        name = f"{state.seq:012d}-{os.urandom(4).hex()}"
        rename(stage, segments / name, "segment")
    return state, name, manifest


def _clear(segments: Path, current: str | None) -> None:
    """Remove what interrupted compactions left over, and segments that nobody reads any more."""
    for folder in segments.iterdir():
        if is_stage(folder) or (folder.name != current and not in_use(folder)):
            discard(folder)
