"""Local galleries: a FAISS segment with a delta, and a catalogue in SQLite.

Items are read from the catalogue only; the index is only used for searches. `open_remote` opens a
gallery on Milvus.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.durable import crash_point, discard, lock_folder, stamp, write_whole
from kinlens.embedder.errors import (
    BundleMismatchError,
    GalleryBusyError,
    GalleryConflictError,
    GalleryCorruptError,
    GalleryError,
    GalleryNotFoundError,
    GalleryWriteError,
    InvalidParameterError,
    ItemNotFoundError,
    KinlensError,
)
from kinlens.embedder.types import SHORT, Embeddings, ItemId
from kinlens.indexer.attributes import Schema
from kinlens.indexer.catalog.database import Catalog, catalog_view
from kinlens.indexer.catalog.entries import check_key, checked_keys, learn_types
from kinlens.indexer.catalog.read import CatalogView, State
from kinlens.indexer.catalog.vectors import NUMBERS, VECTORS
from kinlens.indexer.catalog.write import CatalogWriter
from kinlens.indexer.exchange.follow import Follower as Follower
from kinlens.indexer.exchange.follow import checked_s as checked_s
from kinlens.indexer.exchange.milvus import MilvusStore as MilvusStore
from kinlens.indexer.exchange.publish import snapshot_at as snapshot_at
from kinlens.indexer.filters.text import Where, as_filter
from kinlens.indexer.filters.tree import check_attribute
from kinlens.indexer.folder.layout import CURRENT as CURRENT
from kinlens.indexer.folder.layout import UPLOADS, GalleryFolder, disk_errors_explained
from kinlens.indexer.folder.manifest import (
    PRECISIONS,
    REPORT,
    GalleryManifest,
    read_manifest,
    write_manifest,
)
from kinlens.indexer.folder.manifest import (
    GalleryFacts as GalleryFacts,
)
from kinlens.indexer.images import ItemImage, item_image
from kinlens.indexer.index.gpu import gpu_memory as gpu_memory
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.index.segment import HASHED_BELOW
from kinlens.indexer.index.segment import read_manifest as read_segment_manifest
from kinlens.indexer.live.backup import BackupReport as BackupReport
from kinlens.indexer.live.backup import backup as backup
from kinlens.indexer.live.backup import check_backup as check_backup
from kinlens.indexer.live.backup import restore as restore
from kinlens.indexer.live.compaction import (
    CATALOG,
    SEGMENTS,
    BackgroundCompaction,
    CompactReport,
    collect,
    compact,
    due,
)
from kinlens.indexer.live.compaction import KEEP_REMOVED_S as KEEP_REMOVED_S
from kinlens.indexer.live.facets import facts_of
from kinlens.indexer.live.search import Searcher, ids_of_keys
from kinlens.indexer.live.snapshot import SnapshotKeeper
from kinlens.indexer.types import (
    AttributeFacts,
    Consistency,
    Entry,
    Ids,
    IndexLocation,
    Item,
    OnCall,
    Page,
    Progress,
    SortBy,
    VectorType,
    Written,
    milvus_address,
    mismatch,
    no_item,
    unobserved,
)
from kinlens.values import AttributeType, AttributeValue, Scalar

_PAGE = 1000
_BATCH = 10_000  # items that a change by filter handles in one transaction
_SPARSE = 10
_MANY = 10_000  # items whose attributes take about 0.1 s to read

MAX_SORTED = 10_000
"""Maximum offset + limit of a list of items that is sorted by an attribute."""


class Gallery(Searcher):
    """One generation of a gallery. Several processes can search and change it at the same time.

    Implements `kinlens.indexer.types.VectorStore`. A change is durable when its call returns, and
    every search that starts afterwards sees it. Item ids are never reused, so they stay valid for
    the whole generation, which is identified by 12 hex digits. Thread safe.
    """

    def __init__(
        self,
        folder: GalleryFolder,
        generation: Path,
        image_root: Path | None,
        device: str,
        verify_hashes: bool | None,
        expected_bundle_id: str | None,
    ) -> None:
        """Use `open` or `create`."""
        self._folder = folder
        self._generation = generation
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(os.close, lock_folder(generation))
            self.manifest = read_manifest(generation)
            self.generation = self.manifest.generation
            _check_bundle(folder.path, self.manifest, expected_bundle_id)
            self._catalog = Catalog.open(generation / CATALOG)
            cleanup.callback(self._catalog.close)
            _check_dim(generation, self.manifest, self._catalog)
            snapshots = SnapshotKeeper(self._catalog, generation, device, verify_hashes)
            cleanup.callback(snapshots.close)
            self._close = weakref.finalize(self, cleanup.pop_all().close)
        super().__init__(snapshots, self.manifest.dim)
        self._image_root = image_root or Path(self.manifest.source_root)
        self._facts: tuple[int, tuple[AttributeFacts, ...]] = (-1, ())
        self._segment_size: tuple[str | None, int] = (None, 0)
        self._background: BackgroundCompaction | None = None
        self._stamp: tuple[int, ...] | None = None

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        name: str,
        bundle_id: str,
        dim: int,
        precision: str = "fp32",
        vector_type: VectorType = "fp32",
        source: str = "",
        source_root: Path | str = "",
    ) -> "Gallery":
        """Create an empty gallery in folder `path` and open it; replaces an existing gallery.

        Raises: GalleryBusyError, GalleryWriteError; GalleryError for a folder with other files.
        """
        folder = GalleryFolder(path)
        manifest = GalleryManifest(
            name=name,
            bundle_id=bundle_id,
            precision=precision,
            vector_type=vector_type,
            dim=dim,
            source=source,
            source_root=str(source_root),
        )
        with folder.locked(), disk_errors_explained(folder.path), folder.stage() as stage:
            (stage / SEGMENTS).mkdir()
            (stage / REPORT).write_text("{}\n", encoding="utf-8")
            write_manifest(stage, manifest)
            Catalog.create(stage / CATALOG, dim, vector_type)
            folder.publish(stage, manifest.generation)
        return cls.open(path)

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        expected_bundle_id: str | None = None,
        image_root: Path | None = None,
        device: str = "cpu",
        verify_hashes: bool | None = None,
        load_index: bool = True,
    ) -> "Gallery":
        """Open the current generation of the gallery in folder `path`.

        A damaged segment is rebuilt from the catalogue if the gallery is writable.

        expected_bundle_id: refuse a gallery that was built with another bundle.
        image_root: replaces the recorded folder of the images.
        device: with `cuda`, a GPU with enough memory searches; otherwise the CPU.
        verify_hashes: check the hashes of the segment. None checks small files only, since hashing
            large files takes longer than opening them.
        load_index: if False, the index is opened by the first search.

        Raises: GalleryNotFoundError, GalleryCorruptError, BundleMismatchError.
        """
        folder = GalleryFolder(path)
        try:
            gallery = cls(
                folder, folder.current(), image_root, device, verify_hashes, expected_bundle_id
            )
            if load_index:
                gallery._load()
                gallery._check_vectors(verify_hashes)
            return gallery
        except OSError as error:
            raise GalleryCorruptError(
                f"The gallery {path} cannot be read: {error}. Check its permissions and the disk."
            ) from error

    @property
    def name(self) -> str:
        """The name of the gallery in URLs."""
        return self.manifest.name

    @property
    def path(self) -> Path:
        """The folder of the gallery."""
        return self._folder.path

    @property
    def generation_folder(self) -> Path:
        """The folder of this generation."""
        return self._generation

    @property
    def copy_of(self) -> str | None:
        """The address of the original if this is a read-only copy; else None."""
        return self._folder.copy_of

    @property
    def version(self) -> str:
        """sha256 (hex) that changes with every change."""
        return self._version_at(self._catalog.state().seq)

    @property
    def bundle_id(self) -> str:
        """The id of the bundle that computed the vectors."""
        return self.manifest.bundle_id

    @property
    def vector_type(self) -> VectorType:
        """The type of the stored vectors."""
        return self.manifest.vector_type

    @property
    def precision(self) -> str:
        """The model precision that computed the vectors, or several, such as fp32+int8."""
        built = self.manifest.precision.split("+")
        return "+".join(sorted({*built, *self._added_precisions()}))

    def admit(self, precision: str) -> None:
        """Record that vectors in `precision` will be added. Raises: GalleryWriteError."""
        if precision not in self.precision.split("+"):
            with self._folder.writing(self.generation), disk_errors_explained(self._generation):
                known = sorted({precision, *self._added_precisions()})
                write_whole(self._generation / PRECISIONS, json.dumps(known).encode(), "precisions")
                (self._generation / PRECISIONS).chmod(0o644)  # another user may serve the gallery

    def _added_precisions(self) -> list[str]:
        try:
            return [str(one) for one in json.loads((self._generation / PRECISIONS).read_bytes())]
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise GalleryCorruptError(
                f"{self._generation / PRECISIONS} cannot be read: {error}. Restore a backup: "
                "kinlens-index restore."
            ) from error

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self.manifest.dim

    @property
    def size(self) -> int:
        """Number of items."""
        return self._catalog.state().size

    @property
    def created_at(self) -> str:
        """When this generation was built: ISO 8601, UTC."""
        return self.manifest.created_at

    @property
    def image_root(self) -> Path:
        """The folder that images are read from; it may not exist."""
        return self._image_root

    def built_with(self) -> Path | None:
        """The folder of the bundle that built this generation; None if it was not recorded."""
        try:
            path = json.loads((self._generation / REPORT).read_bytes()).get("bundle", "")
        except (OSError, ValueError):
            return None
        return Path(path) if path else None

    def facts(self) -> GalleryFacts:
        """A description of the gallery's current state."""
        with self._snapshots.reading() as reading:
            snapshot = reading.snapshot
            state = snapshot.state
            segment = None if snapshot.segment is None else snapshot.segment.manifest
            known = self.manifest.model_dump(
                include={"name", "bundle_id", "dim", "created_at", "source", "source_root"}
            )
            return GalleryFacts(
                **known,
                precision=self.precision,
                version=self._version_at(state.seq),
                generation=self.generation,
                size=state.size,
                delta=snapshot.delta.size,
                tombstones=snapshot.tombstone_count - (0 if segment is None else segment.gone),
                compaction_due=self._due(reading.view, state),
                segment=segment,
            )

    def index_location(self) -> IndexLocation | None:
        """The device of the index; None without an index. Raises: GalleryCorruptError."""
        segment = self._snapshots.newest().segment
        return None if segment is None else segment.location

    def schema(self) -> Schema:
        """The attributes that items have had so far, and their types."""
        with self._catalog.reading() as view:
            return view.schema()

    def item(self, item_id: ItemId) -> Item:
        """The stored item with this id. Raises: ItemNotFoundError."""
        with self._catalog.reading() as view:
            found = view.get([item_id]) if 0 <= item_id < 2**63 else {}
        if item_id not in found:
            raise ItemNotFoundError(no_item(item_id))
        return found[item_id]

    def stored(self, keys: Sequence[str]) -> dict[str, Item]:
        """The items with these keys, by key; unknown keys are omitted."""
        with self._catalog.reading() as view:
            ids = view.find(keys)
            items = view.get(list(ids.values()))
        return {key: items[item_id] for key, item_id in ids.items()}

    def page(
        self,
        offset: int,
        limit: int,
        where: Where | None = None,
        prefix: str = "",
        after: ItemId = -1,
        sort_by: SortBy | None = None,
    ) -> Page:
        """Up to `limit` items from index `offset` on, in the order of their ids or of `sort_by`.

        where, prefix: only items that match the filter and whose keys start with `prefix`.
        after: only items with higher ids; `total` and `last` of the page ignore it.

        Raises: FilterError; InvalidParameterError for `after` with `sort_by`.
        """
        if sort_by is not None:
            return self._sorted_page(offset, limit, where, prefix, after, sort_by)
        if where is None and not prefix:
            with self._catalog.reading() as view:
                ids = view.ids_from(offset, limit, after)
                return Page(view.state().size, view.known(ids), view.last_id())
        with self._snapshots.reading() as now:
            among = self._among(now, where, prefix)
            attributes = self._attributes_of(now)
            ids, last = attributes.ids(among, after, offset + limit)
            return Page(attributes.count(among), now.view.known(ids[offset:]), last)

    def _sorted_page(
        self,
        offset: int,
        limit: int,
        where: Where | None,
        prefix: str,
        after: ItemId,
        sort_by: SortBy,
    ) -> Page:
        if after >= 0:
            raise InvalidParameterError(
                f"after = {after} requires the order of item ids. Omit after or sort_by."
            )
        if offset + limit > MAX_SORTED:
            raise InvalidParameterError(
                f"offset + limit = {offset + limit:,}; at most {MAX_SORTED:,} items are sorted. "
                "Narrow the list with a filter, or omit sort_by."
            )
        with self._snapshots.reading() as now:
            check_attribute(sort_by.attribute, now.view.schema(), "sort by")
            attributes = self._attributes_of(now)
            among = self._among(now, where, prefix) if where or prefix else attributes.everything()
            ids = attributes.sorted_ids(sort_by, among, offset + limit)[offset:]
            _, last = attributes.ids(among, limit=0)
            return Page(attributes.count(among), now.view.known(ids), last)

    def attribute_facts(self, where: Where | None = None) -> tuple[AttributeFacts, ...]:
        """The value counts of each attribute, cached until the gallery changes.

        With `where`, only items that match are counted; this is not cached. Raises: FilterError.
        """
        with self._snapshots.reading() as now:
            if where is not None:
                attributes = self._attributes_of(now)
                matching = attributes.selected(self._among(now, where))
                types = now.view.schema().items()
                return tuple(facts_of(name, type_, attributes, matching) for name, type_ in types)
            seq, facts = self._facts
            state = now.snapshot.state
            if seq != state.seq:
                attributes = self._attributes_of(now)
                types, every = now.view.schema().items(), attributes.selected()
                facts = tuple(facts_of(name, type_, attributes, every) for name, type_ in types)
                self._facts = (state.seq, facts)
            return facts

    def contents(self, sha256s: Sequence[str]) -> set[str]:
        """The given contents that some item has."""
        with self._catalog.reading() as view:
            return set(view.content(sha256s))

    def items(self) -> Iterator[Item]:
        """Every item of one state, by ascending id."""
        with self._own_view() as view:
            yield from view.items()

    def entries(self, keys: Sequence[str]) -> list[Entry]:
        """Items with their vectors, in the order of `keys`. Raises: ItemNotFoundError."""
        with self._catalog.reading() as view:
            ids = ids_of_keys(view, keys)
            return _entries(view.known(ids), view.vectors(ids))

    def scan(self, batch_size: int = _PAGE) -> Iterator[list[Entry]]:
        """Batches of every item of one state with its vector, by ascending id."""
        with self._own_view() as view:
            for ids, vectors in view.iter_vectors(batch_size):
                yield _entries(view.known(ids), vectors)

    def iter_vectors(self, batch_size: int = _PAGE) -> Iterator[tuple[Ids, Embeddings]]:
        """Batches of ids (N,) and vectors (N, D) of all items of one state, by ascending id."""
        with self._own_view() as view:
            yield from view.iter_vectors(batch_size)

    def ids(self) -> Ids:
        """The ids of all items (N,), ascending."""
        with self._catalog.reading() as view:
            return view.live_ids()

    def items_at(self, ids: Iterable[ItemId]) -> tuple[list[Item], Embeddings]:
        """The items with these ids, by ascending id, and their vectors (N, D); unknown omitted."""
        with self._catalog.reading() as view:
            found = view.get(sorted(ids))
            items = [found[item_id] for item_id in sorted(found)]
            return items, view.vectors([item.id for item in items])

    def sample(self, count: int) -> tuple[list[Item], Embeddings]:
        """A random sample of up to `count` items, by ascending id, with their vectors (N, D).

        Small galleries are returned whole. The sample is the same until the gallery changes.
        """
        rng = np.random.default_rng(0)
        with self._catalog.reading() as view:
            size, last = view.state().size, view.last_id() or 0
            if size > count and last < _SPARSE * size:
                # Listing 10 million ids takes seconds, so draw ids and keep those that exist.
                drawn = np.unique(rng.integers(1, last + 1, 2 * count * last // size))
                known = np.array(sorted(view.get(drawn)), np.int64)
            else:
                known = view.live_ids()
            if len(known) > count:
                known = np.sort(rng.choice(known, count, replace=False))
            return view.known(known), view.vectors(known)

    @property
    def last_id(self) -> ItemId:
        """The highest id of an item; 0 without items. New items get higher ids."""
        with self._catalog.reading() as view:
            return view.last_id() or 0

    def counts_after(self, item_id: ItemId) -> tuple[int, int]:
        """The number of items, and of those with higher ids than this one, of one state."""
        with self._catalog.reading() as view:
            return view.state().size, view.count_after(item_id)

    def product_counts(
        self, name: str, values: Sequence[Scalar]
    ) -> tuple[dict[int, int], dict[Scalar, int]]:
        """How many products have how many items, where an attribute identifies the product.

        Returns {number of items: number of values with that many}, and the number of items of each
        of `values` that occurs.
        """
        with self._snapshots.reading() as now:
            spread = self._attributes_of(now).spread(name)
        counts = {value: spread.count(value) for value in values}
        return spread.sizes(), {value: count for value, count in counts.items() if count}

    def counts(self) -> tuple[dict[str, int], int]:
        """The number of items per format, and the number of distinct contents."""
        with self._catalog.reading() as view:
            return view.formats(), view.count_contents()

    def distinct(self, name: str) -> int:
        """Number of distinct values of an attribute."""
        with self._snapshots.reading() as now:
            return self._attributes_of(now).spread(name).different

    def has_more(self, name: str, value: Scalar, than: int) -> bool:
        """Whether more than `than` items have this value of an attribute."""
        with self._snapshots.reading() as now:
            attributes = self._attributes_of(now)
            return attributes.count(attributes.having(name, [value])) > than

    def vectors(self, ids: Sequence[ItemId]) -> Embeddings:
        """The stored vectors (N, D) of known items."""
        with self._catalog.reading() as view:
            return view.vectors(ids)

    def vectors_of_contents(self, sha256s: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """A stored vector (D,) for each of these contents that some item has."""
        with self._catalog.reading() as view:
            ids = view.content(sha256s)
            vectors = view.vectors(list(ids.values()))
        return dict(zip(ids, vectors, strict=True))

    def image(self, item_id: ItemId) -> ItemImage:
        """The indexed image of an item, read from the image root; BMP, TIFF and HEIC become JPEG.

        Raises: ItemNotFoundError for an unknown id, or if the file is missing, was changed or is
            outside the image root; GalleryCorruptError if it cannot be read.
        """
        return item_image(self.image_root, self.item(item_id))

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

    def has_removed(self) -> bool:
        """Whether any removed item can be restored."""
        with self._catalog.reading() as view:
            return view.has_removed()

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

    def compact(
        self,
        settings: IndexSettings | None = None,
        *,
        wait: bool = False,
        keep_removed_s: float = 0.0,
        from_scratch: bool = False,
        on_progress: Progress | None = None,
    ) -> CompactReport:
        """Write a new segment of all items, and switch to it.

        Searches and changes continue during the compaction.

        settings: how to build the index; by default as the current one.
        wait: wait for the compaction of another process.
        keep_removed_s: how long removed items stay restorable; 0 erases them.
        from_scratch: reuse nothing of the current segment.

        Raises: GalleryBusyError if another process compacts, without `wait`; GalleryConflictError
            for a copy; PlanError, RecallError, GalleryWriteError: the old segment stays in use.
        """
        self._folder.refuse_copy()
        report = compact(
            self._generation,
            settings or self.index_settings(),
            wait=wait,
            keep_removed_s=keep_removed_s,
            from_scratch=from_scratch,
            on_progress=on_progress,
        )
        self._snapshots.refresh()
        with self._catalog.reading():  # releases vectors that were rewritten
            pass
        collect(self._generation)
        return report

    def refresh(self) -> None:
        """Notice what other processes have written: open a new segment, so that no search has to
        wait for it, and compact in the background if that is due.
        """
        self._snapshots.refresh()
        if self._background is not None:
            self._background.nudge()

    def has_changed(self) -> bool:
        """Whether any process has written to the catalogue since the last call, by the time of its
        log. Asking many galleries each second is cheap.
        """
        before, self._stamp = self._stamp, stamp(f"{self._generation}/{CATALOG}-wal")
        return before != self._stamp

    def index_settings(self) -> IndexSettings:
        """The settings of the current index; the defaults if they are not recorded."""
        name = self._catalog.state().segment
        try:
            return read_segment_manifest(self._generation / SEGMENTS / str(name)).settings
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

    def compact_in_background(
        self, on_error: Callable[[KinlensError], None] | None = None
    ) -> BackgroundCompaction:
        """Compact the gallery in another thread whenever a write, or `refresh`, finds it due."""
        if self._background is None:
            self._background = BackgroundCompaction(
                self.needs_compaction,
                lambda progress: self.compact(keep_removed_s=KEEP_REMOVED_S, on_progress=progress),
                on_error,
            )
            self._background.nudge()
        return self._background

    def close(self) -> None:
        """Release files and memory. The gallery cannot be used afterwards."""
        if self._background is not None:
            self._background.close()
        self._close()
        if "_writable" in self.__dict__:
            self._writable.close()  # last: only a writable connection can checkpoint the log

    @functools.cached_property
    def _writable(self) -> Catalog:
        return Catalog.open(self._generation / CATALOG, writable=True)

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

    def _load(self) -> None:
        """Open the segment. The first process to open a damaged one rebuilds it."""
        try:
            with self._snapshots.reading():
                return
        except GalleryCorruptError as damage:
            if self.copy_of is not None:
                self.close()
                raise GalleryCorruptError(
                    f"The copy {self.path} of {self.copy_of} is damaged. Delete its folder: the "
                    f"next start copies it again. The damage: {damage}"
                ) from damage
            logging.getLogger(__name__).warning("the index is being rebuilt: %s", damage)
            try:
                skip_if = functools.partial(_is_readable, self._snapshots)
                compact(
                    self._generation,
                    self.index_settings(),
                    wait=True,
                    keep_removed_s=KEEP_REMOVED_S,
                    from_scratch=True,
                    skip_if=skip_if,
                )
            except KinlensError as failure:
                damage.add_note(f"Rebuilding it automatically failed: {failure}")
                self.close()
                raise damage from failure
        with self._snapshots.reading():
            return

    def _check_vectors(self, verify_hashes: bool | None) -> None:
        """Verify the checksums of the vectors, unless that would take too long.

        A damaged vector is only logged, so that all others can be searched.

        Raises: GalleryCorruptError if `verify_hashes`.
        """
        with self._catalog.reading() as view:
            is_small = 4 * self.dim * view.state().size < HASHED_BELOW
            if verify_hashes or (verify_hashes is None and is_small):
                try:
                    for _ in view.iter_vectors():
                        pass
                except GalleryCorruptError as damage:
                    if verify_hashes:
                        raise
                    logging.getLogger(__name__).error("%s", damage)

    def _due(self, view: CatalogView, state: State) -> str | None:
        name, size = self._segment_size
        if state.segment is None:
            size = 0
        elif name != state.segment:
            folder = self._generation / SEGMENTS / state.segment
            if not folder.is_dir():
                return None  # a compaction has just replaced it
            manifest = read_segment_manifest(folder)
            if manifest.vectors is None and manifest.size >= _MANY:
                return "its index was built by an earlier version"
            size = manifest.items
            self._segment_size = (state.segment, size)
        removed = view.removed_count()
        changed = view.count_changed(state.segment_seq)
        return due(size, removed, max(changed, state.size - size + removed), view.dim)

    def _version_at(self, seq: int) -> str:
        return hashlib.sha256(f"{self.manifest.uid}:{seq}".encode()).hexdigest()

    @contextlib.contextmanager
    def _own_view(self) -> Iterator[CatalogView]:
        """A separate connection for generators, which may end early or overlap with searches."""
        with catalog_view(self._generation / CATALOG) as view:
            yield view


def _matching(items: Iterable[Item], within: Where | None) -> list[Item]:
    within = as_filter(within)
    return [item for item in items if within is None or within.matches(item.attributes)]


def _found(writer: CatalogWriter, keys: Sequence[str], within: Where | None) -> list[Item]:
    """The items with these keys that match the filter."""
    return _matching(writer.get([*writer.find(keys).values()]).values(), within)


def _entries(items: Sequence[Item], vectors: Embeddings) -> list[Entry]:
    return [
        Entry(item.key, vector, item.sha256, item.attributes, item.path, item.format)
        for item, vector in zip(items, vectors, strict=True)
    ]


def open_remote(
    address: str,
    *,
    image_root: Path | None = None,
    token: str = "",
    timeout_s: float = 10.0,
    consistency: Consistency = "Strong",
    on_call: OnCall = unobserved,
) -> MilvusStore:
    """Open the gallery at milvus://HOST:PORT/NAME. `on_call` is called after each server request.

    Raises: InvalidParameterError; EngineUnavailableError, also if kinlens[milvus] is not installed;
        GalleryNotFoundError, GalleryCorruptError.
    """
    uri, name = milvus_address(address)
    return MilvusStore.open(
        uri,
        name,
        image_root=image_root,
        token=token,
        timeout_s=timeout_s,
        consistency=consistency,
        on_call=on_call,
    )


def stored_contents(folder: Path | str, sha256s: Sequence[str]) -> set[str]:
    """The given contents that the gallery in `folder` has or can restore; the index is not opened.

    Raises: GalleryNotFoundError, GalleryCorruptError.
    """
    with catalog_view(GalleryFolder(folder).current() / CATALOG) as view:
        return {*view.content(sha256s), *view.removed_contents(sha256s)}


def current_generation(folder: Path | str) -> str | None:
    """The name of the current generation in `folder`; None if there is no gallery."""
    return GalleryFolder(folder).current_name()


def current_manifest(folder: Path | str) -> GalleryManifest:
    """The manifest of the gallery in `folder`; the index is not opened.

    Raises: GalleryNotFoundError, GalleryCorruptError.
    """
    return read_manifest(GalleryFolder(folder).current())


def uploads_folder(folder: Path | str) -> Path:
    """The folder of the images uploaded for the gallery in `folder`.

    It belongs to the service; generations, builds and backups do not contain it.
    """
    return Path(folder) / UPLOADS


def delete_gallery(folder: Path | str) -> None:
    """Delete a gallery and everything else in its folder.

    Raises: GalleryNotFoundError; GalleryBusyError while a build runs in it; GalleryWriteError.
    """
    gallery = GalleryFolder(folder)
    if gallery.current_name() is None:
        raise GalleryNotFoundError(f"Gallery {gallery.path.name!r} has just been deleted.")
    with gallery.locked():
        discard(gallery.path)
    if gallery.path.exists():
        raise GalleryWriteError(
            f"Gallery {gallery.path.name!r} cannot be deleted. Check the permissions of its folder."
        )


def copy_bytes(folder: Path | str) -> int:
    """The size in bytes of a copy of the gallery in its current state.

    Raises: GalleryNotFoundError, GalleryCorruptError.
    """
    generation = GalleryFolder(folder).current()
    with catalog_view(generation / CATALOG) as view:
        segment, name = view.state().segment, view.file_name
        size = 0
        if view.file is not None:
            size += view.file.bytes_of(view.file.row_ids.rows_up_to(view.last_given()))
        # Not the size of the file: the latest pages may be in the log only.
        pages, page_bytes = (
            int(view.connection.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "page_size")
        )
    size += pages * page_bytes
    files = [] if segment is None else (generation / SEGMENTS / segment).glob("*")
    with contextlib.suppress(FileNotFoundError):  # a compaction may just have replaced it
        size += sum(file.stat().st_size for file in files)
    with contextlib.suppress(FileNotFoundError):
        size += (generation / VECTORS / str(name) / NUMBERS).stat().st_size
    return size


def check_item(
    key: str, attributes: Mapping[str, AttributeValue], types: dict[str, AttributeType]
) -> None:
    """Check key and attributes of an item before its image is embedded.

    types: the types from `Gallery.schema`; new attributes are added to it.

    Raises: InvalidParameterError.
    """
    check_key(key)
    learn_types(types, key, attributes)


def _is_readable(snapshots: SnapshotKeeper) -> bool:
    try:
        with snapshots.reading():
            return True
    except GalleryCorruptError:
        return False


def _check_bundle(path: Path, manifest: GalleryManifest, expected_id: str | None) -> None:
    if expected_id is not None and manifest.bundle_id != expected_id:
        why = mismatch(
            manifest.bundle_id,
            f"It was built with bundle {manifest.bundle_id[:SHORT]}, but the bundle in use is "
            f"{expected_id[:SHORT]}: their vectors cannot be compared. Rebuild it from the "
            f"{manifest.source} with `kinlens-index build ... --bundle BUNDLE --out {path}`, or "
            "use the bundle that it was built with.",
        )
        raise BundleMismatchError(f"Gallery {manifest.name} cannot be used here. {why}")


def _check_dim(generation: Path, manifest: GalleryManifest, catalog: Catalog) -> None:
    with catalog.reading() as view:
        found = view.dim
    if found != manifest.dim:
        raise GalleryCorruptError(
            f"{generation} is damaged: the catalogue has vectors of length {found}, the manifest "
            f"{manifest.dim}. Restore a backup: kinlens-index restore."
        )
