"""The state of a gallery as a search sees it: the catalogue and the vectors, at one moment."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from embedder.errors import GalleryCorruptError
from indexer.catalog.database import Catalog
from indexer.catalog.read import CatalogView, State
from indexer.filters.tree import Filter
from indexer.index.segment import Segment
from indexer.live.compaction import SEGMENTS, collect
from indexer.live.filter_cache import FilterCache
from indexer.live.snapshot import Among, Snapshot, open_segment

_PATIENCE = 8  # a segment that is gone when it is to be opened is looked up anew that often


@dataclass(frozen=True, slots=True)
class Reading:
    """One state, while its transaction lasts."""

    view: CatalogView
    state: State
    snapshot: Snapshot
    filters: FilterCache

    def among(self, where: Filter | None) -> Among | None:
        """What a filter leaves. Raises: FilterError."""
        return None if where is None else self.filters.among(self.view, self.snapshot, where)


class States:
    """Gives out the newest state; each search holds one read transaction, so nothing is mixed."""

    def __init__(
        self, catalog: Catalog, generation: Path, device: str, verify_hashes: bool | None
    ) -> None:
        self._catalog = catalog
        self._generation = generation
        self._device = device
        self._verify_hashes = verify_hashes
        self._snapshot: Snapshot | None = None
        self._advancing = threading.Lock()
        self._filters = FilterCache()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reading]:
        """The newest state. Raises: GalleryCorruptError."""
        missing = 0
        while missing < _PATIENCE:
            with self._catalog.reading() as view:
                state = view.state()
                try:
                    snapshot = self._at(view, state)
                except FileNotFoundError:
                    missing += 1  # a compaction has replaced it meanwhile, or it is lost
                    continue
                if snapshot is not None:
                    yield Reading(view, state, snapshot, self._filters)
                    return
        raise GalleryCorruptError(
            f"The segment {state.segment} of the gallery is missing below {self._generation}. Make "
            "it again from the catalogue: kinlens-index compact GALLERY --rebuild."
        )

    def newest(self) -> Snapshot:
        """The snapshot of the newest state, for a search that reads no rows.

        Raises: GalleryCorruptError.
        """
        current = self._snapshot
        if current is not None and _is_of(current, self._catalog.state()):
            return current
        with self.reading() as reading:
            return reading.snapshot

    def _at(self, view: CatalogView, state: State) -> Snapshot | None:
        """The snapshot of `state`; None if this transaction is older than what others have seen."""
        current = self._snapshot
        if current is None or not _is_of(current, state):
            with self._advancing:
                current = self._advanced(view, state)
        return current

    def _advanced(self, view: CatalogView, state: State) -> Snapshot | None:
        current = self._snapshot
        if current is not None and _is_older(state, current):
            return None
        if current is None or _is_replaced(current, state):
            current = Snapshot.load(view, state, self._opened(state))
        elif current.seq < state.seq:
            current = current.advanced(view, state)
        if current.size != state.size:
            raise GalleryCorruptError(
                f"The index of {self._generation} has {current.size:,} items, the catalogue counts "
                f"{state.size:,}: it is damaged. Restore a backup: kinlens-index restore."
            )
        self._snapshot = current
        return current

    def _opened(self, state: State) -> Segment | None:
        if state.segment is None:
            return None
        return open_segment(
            self._generation / SEGMENTS / state.segment,
            self._device,
            self._verify_hashes,
            functools.partial(collect, self._generation),
        )

    def forget(self) -> None:
        """Let go of the segment."""
        with self._advancing:
            self._snapshot = None


def _is_of(snapshot: Snapshot, state: State) -> bool:
    return snapshot.seq == state.seq and not _is_replaced(snapshot, state)


def _is_older(state: State, snapshot: Snapshot) -> bool:
    """Whether a transaction began before the write, or the compaction, that made `snapshot`."""
    return state.seq < snapshot.seq or state.segment_seq < snapshot.segment_seq


def _is_replaced(snapshot: Snapshot, state: State) -> bool:
    """Whether there was a compaction since; the removals that it took in are not told any more."""
    return snapshot.segment_name != state.segment or snapshot.segment_seq != state.segment_seq
