"""Changes of a gallery: each call is one transaction, or a batch of them for a filter."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np

from kinlens.embedder.durable import crash_point, sweep
from kinlens.embedder.errors import (
    DeltaFullError,
    GalleryBusyError,
    GalleryConflictError,
    GalleryError,
    InvalidParameterError,
)
from kinlens.embedder.types import ItemId
from kinlens.indexer.catalog.database import Catalog
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.write import CatalogWriter
from kinlens.indexer.columns.checkpoint import collect_columns
from kinlens.indexer.entries import Entry, Item, Written, checked_keys, parse_value
from kinlens.indexer.filters.text import Where, as_filter
from kinlens.indexer.filters.tree import Exists, Filter
from kinlens.indexer.live.compaction import CATALOG, KEEP_REMOVED_S
from kinlens.indexer.live.upkeep import GalleryUpkeep
from kinlens.indexer.types import Ids, Progress
from kinlens.values import AttributeType, AttributeValue, values_in

T = TypeVar("T")

_BATCH = 10_000  # items that a change by filter handles in one transaction


class GalleryWriter(GalleryUpkeep):
    """The writing methods of a gallery. Thread safe, and safe between processes.

    within: only items that match this filter can be changed, and others are treated as unknown;
        every item must match it after the change (else InvalidParameterError).
    """

    when_full: Literal["compact", "refuse", "grow"] = "compact"
    """What a write that adds vectors does while the delta is full.

    compact: it waits for a running compaction, or compacts, and then continues.
    refuse: it raises DeltaFullError, and a compaction begins in the background. Items that were
        removed since they were added do not count.
    grow: it continues, in a gallery that nobody searches before its first compaction.
    """

    _close: "weakref.finalize[[], Any]"
    _full: tuple[str | None, int] = "", 0  # the last segment, and the rows that fill its delta

    def add(
        self,
        entries: Iterable[Entry],
        owned: frozenset[str] | None = None,
        within: Where | None = None,
    ) -> Written:
        entries = list(entries)
        return self._adding(lambda writer: writer.add(entries, owned), within)

    def update(
        self,
        changes: Mapping[str, Mapping[str, AttributeValue | None]],
        within: Where | None = None,
    ) -> int:
        with self._writing(within) as writer:
            return writer.update(changes)

    def remove(
        self, keys: Iterable[str], *, keep: Iterable[str] = (), within: Where | None = None
    ) -> int:
        """As `VectorStore.remove`, but only if an item with one of the keys `keep` exists. This
        protects the last copy of a product from concurrent removals.

        Raises: InvalidParameterError also for a key that is in `keep`; GalleryConflictError if no
            key of `keep` exists.
        """
        keys, keep = checked_keys(keys), checked_keys(keep)
        if both := set(keys) & set(keep):
            raise InvalidParameterError(
                f"The key {min(both)!r:.200} is both to be removed and in keep. Omit it from one."
            )
        with self._writing(within) as writer:
            if keep and not writer.matching(writer.by_key(keep)):
                raise GalleryConflictError(
                    f"Nothing was removed: none of the {len(keep):,} items to keep, such as "
                    f"{keep[0]!r:.200}, is in the gallery any more. Look for duplicates again."
                )
            return writer.remove(writer.matching(writer.by_key(keys)))

    def restore(self, keys: Iterable[str], within: Where | None = None) -> list[Item]:
        """Undo the removal of items by key, in one transaction. They get new ids.

        Of a key that was removed more than once, the last item is restored. Omits keys that another
        item has by now, and items that `compact` has erased.

        Raises: InvalidParameterError if the keys are not a list of texts.
        """
        keys = checked_keys(keys)
        return self._adding(lambda writer: writer.restore(keys), within)

    def remove_items(self, ids: Iterable[ItemId], within: Where | None = None) -> int:
        ids = [item_id for item_id in ids if 0 <= item_id < 2**63]
        with self._writing(within) as writer:
            return writer.remove(writer.matching(writer.get(ids)))

    def update_where(
        self, where: Where, change: Mapping[str, AttributeValue | None], within: Where | None = None
    ) -> int:
        return self._in_batches(
            where,
            "changed",
            lambda writer, items: writer.update(
                dict.fromkeys([item.key for item in items], change)
            ),
            within=within,
        )

    def remove_where(self, where: Where) -> int:
        return self._in_batches(where, "removed", CatalogWriter.remove)

    def drop_attribute(self, name: str, on_item: Progress = lambda _: None) -> int:
        """Remove an attribute from every item, and forget its type; returns the number of items.

        Works in batches of 10,000; after an error, the same call continues with the rest.

        Raises: FilterError for an unknown name.
        """
        count = self._in_batches(
            Exists(name),
            "changed",
            lambda writer, items: writer.update({item.key: {name: None} for item in items}),
            on_item,
        )
        with self._writing() as writer:
            if name in writer.schema() and not writer.is_used(name):
                writer.forget(name)
        return count

    def retype_attribute(
        self, name: str, type_: AttributeType, on_item: Progress = lambda _: None
    ) -> int:
        """Convert every value of an attribute to another type; returns the number of items.

        A value becomes what its text is in a CSV file: 12 from "12", and "true" from true. All
        values are converted in one transaction, for which other writers wait.

        Raises: FilterError for an unknown name; InvalidParameterError naming the first value that
            cannot be converted, and then nothing was changed.
        """
        with self._writing() as writer:
            Exists(name).check(writer.schema())
            if writer.schema()[name] == type_:
                return 0
            ids = self._ids_of(Exists(name))
            writer.retype(_converted(writer, ids, name, type_, on_item), name, type_)
        return len(ids)

    def _ids_of(self, where: Filter) -> Ids:
        """The ids of the items that match a filter, ascending."""
        with self._snapshots.reading() as now:
            return self._attributes_of(now).ids(self._among(now, where))[0]

    def _in_batches(
        self,
        where: Where,
        done: str,
        work: Callable[[CatalogWriter, Sequence[Item]], int],
        on_item: Progress = lambda _: None,
        within: Where | None = None,
    ) -> int:
        where = as_filter(where)
        ids, count = self._ids_of(where), 0
        for start in range(0, len(ids), _BATCH):
            try:
                with self._writing(within) as writer:
                    items = writer.get(ids[start : start + _BATCH]).values()
                    count += work(writer, [i for i in items if where.matches(i.attributes)])
                on_item(len(items))
            except GalleryBusyError as error:
                if not count:
                    raise
                raise GalleryBusyError(
                    f"{count:,} of {len(ids):,} items were {done}, then: {error} Repeat the call "
                    "for the rest."
                ) from error
        return count

    def forget_unused_attributes(self) -> None:
        """Delete attribute names that no item has, and their types. Reads every item."""
        with self._writing() as writer:
            writer.forget_unused_names()

    def compact_for_writers(self) -> None:
        """Compact the gallery in another thread, since new items wait for that."""
        background, self._left_at = self.compact_in_background(), None
        background.urge()

    def check_delta(self) -> None:
        """Check whether new items can be added now. Raises: DeltaFullError."""
        with self._catalog.reading() as view:
            rows = 0 if view.file is None else view.file.row_ids.rows_up_to(view.last_given())
            self._check_delta(view, rows)

    def _check_delta(self, view: CatalogView, rows: int) -> None:
        """Check the number of items added after the segment; `rows` is that of all vectors.

        Raises: DeltaFullError.
        """
        state = view.state()
        if self._full[0] != state.segment:
            self._full = state.segment, self._rows_when_full(state)
        if rows < self._full[1]:
            return
        manifest = self._segment_of(state)
        indexed = 0 if manifest is None else manifest.size
        count, limit = rows - indexed, self._full[1] - indexed
        is_own = manifest is None or view.file is None or view.file.name == manifest.vectors
        if self.when_full == "refuse" and view.file is not None and is_own:
            # A compaction is due in the background for removed ones, too.
            last = view.file.row_ids.of(np.array([indexed - 1])) if indexed else [0]
            count = view.count_after(int(last[0]))
        if count >= limit:
            raise DeltaFullError(
                f"Gallery {self.name} has {count:,} items that no compaction has put into its "
                f"index yet; from {limit:,} on, new ones have to wait. Removals and changes of "
                "attributes go on. Try again in a minute; if that does not help, run "
                "kinlens-index compact, which names what prevents it."
            )

    def _adding(self, work: Callable[[CatalogWriter], T], within: Where | None) -> T:
        """Do work that adds vectors, as soon as the delta is not full. Raises: DeltaFullError."""
        with contextlib.suppress(DeltaFullError), self._writing(within) as writer:
            return work(writer)
        if self.when_full == "refuse":
            self.compact_for_writers()
        else:
            self.compact(wait=True, keep_removed_s=KEEP_REMOVED_S, skip_if=self._takes_items)
        with self._writing(within) as writer:
            return work(writer)

    def _takes_items(self) -> bool:
        try:
            self.check_delta()
        except DeltaFullError:
            return False
        return True

    @functools.cached_property
    def _writable(self) -> Catalog:
        collect_columns(self.generation_folder)
        with contextlib.suppress(OSError):
            sweep(self._folder.path)
        return Catalog.open(self.generation_folder / CATALOG, writable=True)

    @contextlib.contextmanager
    def _writing(self, within: Where | None = None) -> Iterator[CatalogWriter]:
        if not self._close.alive:
            raise GalleryError(f"The gallery {self._folder.path} is closed. Open it again.")
        generation = self.generation_folder.name
        with self._folder.writing(generation), self._writable.writing() as writer:
            writer.is_used = self.has_attribute
            if within is not None:
                writer.within = as_filter(within)
            if self.when_full != "grow":
                writer.before_insert = self._check_delta
            yield writer
            crash_point("write: before commit")
        crash_point("write: after commit")
        self._snapshots.follow()
        if self._background is not None:
            self._background.nudge()


def _converted(
    writer: CatalogWriter, ids: Ids, name: str, type_: AttributeType, on_item: Progress
) -> Iterator[Item]:
    """The items with these ids, with values of an attribute that have this type."""
    for start in range(0, len(ids), _BATCH):
        for item in writer.get(ids[start : start + _BATCH]).values():
            value = item.attributes[name]
            try:
                converted = _as_type(value, type_)
            except ValueError as error:
                raise InvalidParameterError(
                    f"{name!r} of {item.key!r:.200} is {value!r:.80} and cannot be a {type_}: "
                    f"{error}. Nothing was changed. Change this value first, or remove it."
                ) from error
            yield replace(item, attributes={**item.attributes, name: converted})
            on_item(1)


def _as_type(value: AttributeValue, type_: AttributeType) -> AttributeValue:
    """A value, or each of several, as another type. Raises: ValueError."""
    texts = [str(one).lower() if isinstance(one, bool) else str(one) for one in values_in(value)]
    found = tuple(dict.fromkeys(parse_value(text, type_) for text in texts))
    return found if isinstance(value, tuple) else found[0]
