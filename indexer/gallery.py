"""A gallery on this machine: a FAISS segment, what came after it, and a catalogue in SQLite."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from embedder.errors import GalleryCorruptError, KinlensError
from embedder.types import AttributeValue, ItemId
from indexer.catalog.database import Catalog
from indexer.catalog.entries import checked_keys
from indexer.catalog.write import CatalogWriter
from indexer.filters.tree import Filter
from indexer.folder.durable import reach
from indexer.folder.layout import GalleryFolder
from indexer.folder.manifest import GalleryManifest
from indexer.index.plan import IndexSettings
from indexer.ingest.generation import publish_generation
from indexer.live.background import BackgroundCompaction
from indexer.live.compaction import CATALOG, CompactReport, compact
from indexer.reader import GalleryReader, compaction_due
from indexer.types import Entry, Progress, Written

_REMOVED_AT_ONCE = 10_000


class Gallery(GalleryReader):
    """One generation of a gallery, changed while it is searched, also by several processes.

    Implements `indexer.types.VectorStore`. A change is durable when its call returns, and every
    search that begins afterwards sees it. Thread safe.
    """

    _background: BackgroundCompaction | None = None

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        name: str,
        bundle_id: str,
        dim: int,
        source: str = "",
        source_root: Path | str = "",
    ) -> "Gallery":
        """A new gallery without items in folder `path`, opened; it replaces an old one.

        Raises: GalleryBusyError, GalleryWriteError, GalleryError for a folder of something else.
        """
        folder = GalleryFolder(path)
        manifest = GalleryManifest(
            name=name, bundle_id=bundle_id, dim=dim, source=source, source_root=str(source_root)
        )
        with folder.locked():
            publish_generation(folder, manifest, ())
        return cls.open(path)

    def add(self, entries: Iterable[Entry], owned: frozenset[str] | None = None) -> Written:
        """Store entries, all or none.

        Equal key and content: nothing, or new attributes alone. Other content under an old key
        replaces the item, which gets a new number. With `owned`, stored attributes that an entry
        does not give are taken away only if they have one of these names.

        Raises: InvalidParameterError for a wrong dimension, a vector that is not finite or not of
            unit norm, a key twice, an attribute of another kind than before; GalleryWriteError;
            GalleryBusyError.
        """
        entries = list(entries)
        with self._writing() as writer:
            return writer.add(entries, owned)

    def update(self, changes: Mapping[str, Mapping[str, AttributeValue | None]]) -> int:
        """Change attributes by key; None takes an attribute away. How many items differ now.

        Raises: ItemNotFoundError for an unknown key, and then nothing was changed;
            InvalidParameterError for a value of another kind than the attribute has;
            GalleryWriteError; GalleryBusyError.
        """
        with self._writing() as writer:
            return writer.update(changes)

    def remove(self, keys: Iterable[str]) -> int:
        """Remove items by key; unknown keys are left out of the count.

        Raises: InvalidParameterError for what is not a list of texts; GalleryWriteError;
            GalleryBusyError.
        """
        keys = checked_keys(keys)
        with self._writing() as writer:
            return writer.remove(list(writer.find(keys).values()))

    def remove_items(self, ids: Iterable[ItemId]) -> int:
        """Remove items by number; unknown numbers are left out of the count, also those of items
        that have been replaced. Raises: GalleryWriteError, GalleryBusyError.
        """
        ids = [number for number in ids if 0 <= number < 2**63]
        with self._writing() as writer:
            return writer.remove(ids)

    def remove_where(self, where: Filter) -> int:
        """Remove every item that fits, `_REMOVED_AT_ONCE` in one step: how many.

        A removal that is cut short has removed some of them; the same call removes the rest.

        Raises: FilterError, GalleryWriteError, GalleryBusyError; GalleryCorruptError for an item
            that the index of attributes lists wrongly.
        """
        removed = 0
        while True:
            with self._writing() as writer:
                some = writer.matching(where)[:_REMOVED_AT_ONCE]
                if wrong := [i for i in writer.known(some) if not where.matches(i.attributes)]:
                    raise GalleryCorruptError(
                        f"Item {wrong[0].id} is listed under attributes that it does not have; it "
                        "was not removed. Restore a backup: kinlens-index restore."
                    )
                removed += writer.remove(some)
            if len(some) < _REMOVED_AT_ONCE:
                return removed

    def compact(
        self,
        settings: IndexSettings | None = None,
        *,
        wait: bool = False,
        on_progress: Progress | None = None,
    ) -> CompactReport:
        """Make a new segment of all items and switch to it; searches and changes go on meanwhile.

        Without `settings` the kind of index, its target and its device stay as they are.

        Raises: GalleryBusyError if another process compacts, unless this is to `wait`; PlanError,
            RecallError, GalleryWriteError, and then the old segment stays.
        """
        return compact(
            self._generation,
            settings or self._settings(),
            wait=wait,
            on_progress=on_progress,
        )

    def needs_compaction(self) -> str | None:
        """Why a compaction is due: 20 % of the segment removed, many items after it; or None."""
        with self._reading() as reading:
            return compaction_due(reading)

    def compact_in_background(
        self, on_error: Callable[[KinlensError], None] | None = None
    ) -> BackgroundCompaction:
        """From now on, compact in a thread of its own after changes that make it due."""
        if self._background is None:
            self._background = BackgroundCompaction(
                self.needs_compaction,
                lambda on_progress: self.compact(on_progress=on_progress),
                on_error,
            )
            self._background.nudge()
        return self._background

    def close(self) -> None:
        """Let go of the files; the gallery cannot be used afterwards."""
        if self._background is not None:
            self._background.close()
        super().close()
        if "_writable" in self.__dict__:
            self._writable.close()  # last: it alone may write the log back into the catalogue

    @functools.cached_property
    def _writable(self) -> Catalog:
        return Catalog.open(self._generation / CATALOG, writable=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[CatalogWriter]:
        with self._folder.writing(self.generation), self._writable.writing() as writer:
            yield writer
            reach("write: before commit")
        reach("write: after commit")
        if self._background is not None:
            self._background.nudge()

    def _settings(self) -> IndexSettings:
        segment = self.facts().segment
        return IndexSettings() if segment is None else segment.settings
