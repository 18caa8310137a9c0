"""Changes of a gallery: each call is one transaction, or a batch of them for a filter."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kinlens.embedder.durable import crash_point
from kinlens.embedder.errors import (
    GalleryBusyError,
    GalleryConflictError,
    GalleryError,
    InvalidParameterError,
)
from kinlens.embedder.types import ItemId
from kinlens.indexer.catalog.database import Catalog
from kinlens.indexer.catalog.entries import checked_keys
from kinlens.indexer.catalog.write import CatalogWriter
from kinlens.indexer.filters.text import Where, as_filter
from kinlens.indexer.live.compaction import (
    CATALOG,
    BackgroundCompaction,
)
from kinlens.indexer.live.reader import GalleryReader
from kinlens.indexer.types import (
    Entry,
    Item,
    Written,
)
from kinlens.values import AttributeValue

_BATCH = 10_000  # items that a change by filter handles in one transaction


class GalleryWriter(GalleryReader):
    """The writing methods of a gallery. Thread safe, and safe between processes."""

    _background: BackgroundCompaction | None = None
    _close: "weakref.finalize[[], Any]"

    def add(
        self,
        entries: Iterable[Entry],
        owned: frozenset[str] | None = None,
        within: Where | None = None,
    ) -> Written:
        """Store entries, all or none.

        An entry with the key, sha256 and vector of an item updates its attributes. An entry with
        another sha256 or vector replaces the item, which gets a new id.

        owned: stored attributes that an entry does not give are removed only if they have one of
            these names; None removes all.
        within: every entry must match this filter, and must not use the key of an item that does
            not match it.

        Raises: InvalidParameterError for a wrong dimension, a vector that is not finite or not of
            unit norm, a repeated key, an attribute of another type than before, an entry that does
            not match `within`; GalleryWriteError; GalleryBusyError.
        """
        entries = list(entries)
        with self._writing() as writer:
            return writer.add(entries, owned, as_filter(within))

    def update(
        self,
        changes: Mapping[str, Mapping[str, AttributeValue | None]],
        within: Where | None = None,
    ) -> int:
        """Change attributes by key; None removes one. Returns the number of changed items.

        within: items that do not match this filter are treated as unknown, and every item must
            match it after the change.

        Raises: ItemNotFoundError for an unknown key, and then nothing was changed;
            InvalidParameterError for a value of another type than the attribute has;
            GalleryWriteError; GalleryBusyError.
        """
        with self._writing() as writer:
            return writer.update(changes, as_filter(within))

    def remove(
        self, keys: Iterable[str], *, keep: Iterable[str] = (), within: Where | None = None
    ) -> int:
        """Remove items by key; returns the number. Unknown keys are not counted.

        keep: remove only if an item with one of these keys exists. This protects the last copy of
            a product from concurrent removals.
        within: items that do not match this filter are treated as unknown.

        Raises: InvalidParameterError if the keys are not a list of texts, or a key is also in
            `keep`; GalleryConflictError if no key of `keep` exists; GalleryWriteError;
            GalleryBusyError.
        """
        keys, keep = checked_keys(keys), checked_keys(keep)
        if both := set(keys) & set(keep):
            raise InvalidParameterError(
                f"The key {min(both)!r:.200} is both to be removed and in keep. Omit it from one."
            )
        with self._writing() as writer:
            if keep and not _found(writer, keep, within):
                raise GalleryConflictError(
                    f"Nothing was removed: none of the {len(keep):,} items to keep, such as "
                    f"{keep[0]!r:.200}, is in the gallery any more. Look for duplicates again."
                )
            return writer.remove_items(_found(writer, keys, within))

    def restore(self, keys: Iterable[str], within: Where | None = None) -> list[Item]:
        """Undo the removal of items by key, in one transaction. They get new ids.

        Of a key that was removed more than once, the last item is restored. Omits keys that another
        item has by now, items that `compact` has erased, and items that do not match `within`.

        Raises: InvalidParameterError if the keys are not a list of texts; GalleryWriteError;
            GalleryBusyError.
        """
        keys = checked_keys(keys)
        with self._writing() as writer:
            return writer.restore(keys, as_filter(within))

    def remove_items(self, ids: Iterable[ItemId], within: Where | None = None) -> int:
        """Remove items by id; returns the number.

        Unknown ids, replaced items and items that do not match `within` are not counted.

        Raises: GalleryWriteError, GalleryBusyError.
        """
        ids = [item_id for item_id in ids if 0 <= item_id < 2**63]
        with self._writing() as writer:
            return writer.remove_items(_matching(writer.get(ids).values(), within))

    def update_where(
        self,
        where: Where,
        change: Mapping[str, AttributeValue | None],
        within: Where | None = None,
    ) -> int:
        """Change attributes of every item that matches a filter; None removes an attribute.

        Returns the number of changed items. Works in batches of 10,000; after an error, the same
        call continues with the rest.

        within: every item must match this filter after the change.

        Raises: FilterError; InvalidParameterError for a value of another type than the attribute
            has, or an item that would not match `within`; GalleryWriteError; GalleryBusyError.
        """
        return self._in_batches(
            where,
            "changed",
            lambda writer, items: writer.update(
                dict.fromkeys([item.key for item in items], change), as_filter(within)
            ),
        )

    def remove_where(self, where: Where) -> int:
        """Remove every item that matches a filter; returns the number.

        Works in batches of 10,000; after an error, the same call removes the rest.

        Raises: FilterError, GalleryWriteError, GalleryBusyError.
        """
        return self._in_batches(where, "removed", CatalogWriter.remove_items)

    def _in_batches(
        self, where: Where, done: str, work: Callable[[CatalogWriter, Sequence[Item]], int]
    ) -> int:
        where = as_filter(where)
        with self._snapshots.reading() as now:
            ids, _ = self._attributes_of(now).ids(self._among(now, where))
        count = 0
        for start in range(0, len(ids), _BATCH):
            try:
                with self._writing() as writer:
                    items = writer.get(ids[start : start + _BATCH]).values()
                    count += work(writer, [i for i in items if where.matches(i.attributes)])
            except GalleryBusyError as error:
                if not count:
                    raise
                raise GalleryBusyError(
                    f"{count:,} of {len(ids):,} items were {done}, then: {error} Repeat the call "
                    "for the rest."
                ) from error
        return count

    def forget_unused_attributes(self) -> None:
        """Delete attribute names that no item has, and their types.

        Only for a new gallery: other processes may have cached the names of a gallery in use.

        Raises: GalleryWriteError, GalleryBusyError.
        """
        with self._writing() as writer:
            writer.forget_unused_names()

    @functools.cached_property
    def _writable(self) -> Catalog:
        return Catalog.open(self.generation_folder / CATALOG, writable=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[CatalogWriter]:
        if not self._close.alive:
            raise GalleryError(f"The gallery {self._folder.path} is closed. Open it again.")
        with self._folder.writing(self.generation), self._writable.writing() as writer:
            yield writer
            crash_point("write: before commit")
        crash_point("write: after commit")
        if self._background is not None:
            self._background.nudge()


def _matching(items: Iterable[Item], within: Where | None) -> list[Item]:
    within = as_filter(within)
    return [item for item in items if within is None or within.matches(item.attributes)]


def _found(writer: CatalogWriter, keys: Sequence[str], within: Where | None) -> list[Item]:
    """The items with these keys that match the filter."""
    return _matching(writer.get([*writer.find(keys).values()]).values(), within)
