"""A gallery on this machine: a FAISS segment, what came after it, and a catalogue in SQLite.

One on Milvus is opened here as well: `open_remote`.

What is asked about items is read from the catalogue alone; the index is for searches.
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

from kinlens.embedder.durable import crash_point, discard, hold, write_whole
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
from kinlens.indexer.calibration import (
    CALIBRATION,
    LABELLED,
    PRODUCTS,
    SAMPLED,
    Fit,
    GalleryCalibration,
    Labelled,
    fit_gallery,
    fit_golden,
    is_changed,
)
from kinlens.indexer.catalog.database import Catalog, catalog_view
from kinlens.indexer.catalog.entries import check_key, checked_keys, learn_kinds
from kinlens.indexer.catalog.read import CatalogView, State
from kinlens.indexer.catalog.vectors import NUMBERS, VECTORS
from kinlens.indexer.catalog.write import CatalogWriter
from kinlens.indexer.exchange.follow import Follower as Follower
from kinlens.indexer.exchange.follow import checked_s as checked_s
from kinlens.indexer.exchange.milvus import MilvusStore as MilvusStore
from kinlens.indexer.exchange.publish import snapshot_at as snapshot_at
from kinlens.indexer.filters.tree import Filter, check_attribute
from kinlens.indexer.folder.layout import PICTURES, GalleryFolder, disk_errors_explained
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
    KEEP_REMOVED_S,
    SEGMENTS,
    BackgroundCompaction,
    CompactReport,
    collect,
    compact,
    due,
)
from kinlens.indexer.live.facets import facts_of
from kinlens.indexer.live.search import Searcher, numbers_of
from kinlens.indexer.live.snapshot import SnapshotKeeper
from kinlens.indexer.types import (
    AttributeFacts,
    Consistency,
    Entry,
    Ids,
    IndexPlace,
    Item,
    OnCall,
    Page,
    Progress,
    SortBy,
    VectorType,
    Written,
    milvus_address,
    no_item,
    unobserved,
)
from kinlens.values import AttributeKind, AttributeValue, Scalar

_PAGE = 1000
_AT_ONCE = 10_000  # items that one step of a change by filter takes
_SPARSE = 10
_MANY = 10_000  # items, whose attributes take a tenth of a second to read

MAX_SORTED = 10_000
"""The end of a list of items that is sorted by an attribute."""


class Gallery(Searcher):
    """One generation of a gallery, changed while it is searched, also by several processes.

    Implements `kinlens.indexer.types.VectorStore`. A change is durable when its call returns, and
    every search that begins afterwards sees it. An item id is never reused for other content, so
    ids are valid as long as the generation, which is named by 12 hex digits. Thread safe.
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
        """See `open`."""
        self._folder = folder
        self._generation = generation
        with contextlib.ExitStack() as held:
            held.callback(os.close, hold(generation))
            self.manifest = read_manifest(generation)
            self.generation = self.manifest.generation
            _check_bundle(folder.path, self.manifest, expected_bundle_id)
            self._catalog = Catalog.open(generation / CATALOG)
            held.callback(self._catalog.close)
            _check_dim(generation, self.manifest, self._catalog)
            snapshots = SnapshotKeeper(self._catalog, generation, device, verify_hashes)
            held.callback(snapshots.forget)
            self._close = weakref.finalize(self, held.pop_all().close)
        super().__init__(snapshots, self.manifest.dim)
        self._image_root = image_root or Path(self.manifest.source_root)
        self._facts: tuple[int, tuple[AttributeFacts, ...]] = (-1, ())
        self._calibration: tuple[object, GalleryCalibration | None] = (None, None)
        self._segment_size: tuple[str | None, int] = (None, 0)
        self._background: BackgroundCompaction | None = None

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
        """A new gallery without items in folder `path`, opened; it replaces an old one.

        Raises: GalleryBusyError, GalleryWriteError, GalleryError for a folder of something else.
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

        `image_root` replaces the recorded folder of the images. Hashes of the segment are checked
        if `verify_hashes`, never if it is False; by default those of small files, since all others
        would take longer than to open. With the `device` cuda a GPU searches as long as there is
        one with memory enough. A segment that is damaged is made again from the catalogue,
        if the gallery can be written. Without `load_index` the first search does all that.

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
        """The name in addresses."""
        return self.manifest.name

    @property
    def path(self) -> Path:
        """The folder that it lies in."""
        return self._folder.path

    @property
    def copy_of(self) -> str | None:
        """The address that this is a copy of, which nobody changes here; None for others."""
        return self._folder.copy_of

    @property
    def version(self) -> str:
        """sha256 (hex) that changes with every change."""
        return self._version_at(self._catalog.state().seq)

    @property
    def bundle_id(self) -> str:
        """The bundle that made the vectors."""
        return self.manifest.bundle_id

    @property
    def vector_type(self) -> VectorType:
        """How it keeps its vectors."""
        return self.manifest.vector_type

    @property
    def precision(self) -> str:
        """The precision of its vectors, or several, as in fp32+int8."""
        made = self.manifest.precision.split("+")
        return "+".join(sorted({*made, *self._added_precisions()}))

    def admit(self, precision: str) -> None:
        """Note that vectors in `precision` are added from now on. Raises: GalleryWriteError."""
        if precision not in self.precision.split("+"):
            with self._folder.writing(self.generation), disk_errors_explained(self._generation):
                known = sorted({precision, *self._added_precisions()})
                write_whole(self._generation / PRECISIONS, json.dumps(known).encode(), "precisions")
                (self._generation / PRECISIONS).chmod(0o644)  # others may serve the gallery

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
        """The folder that the images are read from; it may be missing."""
        return self._image_root

    def facts(self) -> GalleryFacts:
        """What is in the gallery now."""
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
                tombstones=snapshot.dead_count - (0 if segment is None else segment.gone),
                compaction_due=self._due(reading.view, state),
                segment=segment,
            )

    def index_place(self) -> IndexPlace | None:
        """Where the index is searched; None if there is none. Raises: GalleryCorruptError."""
        segment = self._snapshots.newest().segment
        return None if segment is None else segment.place

    def schema(self) -> Schema:
        """The attributes that items have had so far, and their kinds."""
        with self._catalog.reading() as view:
            return view.schema()

    def item(self, item_id: ItemId) -> Item:
        """What the catalogue knows about an item. Raises: ItemNotFoundError."""
        with self._catalog.reading() as view:
            found = view.get([item_id]) if 0 <= item_id < 2**63 else {}
        if item_id not in found:
            raise ItemNotFoundError(no_item(self.manifest.name, item_id))
        return found[item_id]

    def stored(self, keys: Sequence[str]) -> dict[str, Item]:
        """The items with these keys, by key; unknown keys are left out."""
        with self._catalog.reading() as view:
            numbers = view.find(keys)
            items = view.get(list(numbers.values()))
        return {key: items[number] for key, number in numbers.items()}

    def page(
        self,
        offset: int,
        limit: int,
        where: Filter | None = None,
        prefix: str = "",
        after: ItemId = -1,
        sort_by: SortBy | None = None,
    ) -> Page:
        """Items from place `offset` on, at most `limit`, of those that fit `where`, whose keys
        begin with `prefix` and whose numbers are above `after`; in the order of their numbers, or
        of an attribute. `total` and `last` are of all that fit, whatever their numbers.

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
        where: Filter | None,
        prefix: str,
        after: ItemId,
        sort_by: SortBy,
    ) -> Page:
        if after >= 0:
            raise InvalidParameterError(
                f"after = {after} continues in the order of numbers. Omit it, or sort_by."
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

    def attribute_facts(self, where: Filter | None = None) -> tuple[AttributeFacts, ...]:
        """The values of each attribute, counted; remembered until the gallery changes. With
        `where`, those of the items that fit, which are counted each time. Raises: FilterError.
        """
        with self._snapshots.reading() as now:
            if where is not None:
                attributes = self._attributes_of(now)
                fitting = attributes.selected(self._among(now, where))
                kinds = now.view.schema().items()
                return tuple(facts_of(name, kind, attributes, fitting) for name, kind in kinds)
            seq, facts = self._facts
            state = now.snapshot.state
            if seq != state.seq:
                attributes = self._attributes_of(now)
                kinds, every = now.view.schema().items(), attributes.selected()
                facts = tuple(facts_of(name, kind, attributes, every) for name, kind in kinds)
                self._facts = (state.seq, facts)
            return facts

    def held(self, sha256s: Sequence[str]) -> set[str]:
        """Which of these contents some item has."""
        with self._catalog.reading() as view:
            return set(view.content(sha256s))

    def items(self) -> Iterator[Item]:
        """Every item, in the order of its number, of one state."""
        with self._own_view() as view:
            yield from view.items()

    def entries(self, keys: Sequence[str]) -> list[Entry]:
        """Items with their vectors, in the order asked for. Raises: ItemNotFoundError."""
        with self._catalog.reading() as view:
            numbers = numbers_of(view, keys)
            return _entries(view.known(numbers), view.vectors(numbers))

    def scan(self, batch_size: int = _PAGE) -> Iterator[list[Entry]]:
        """Every item with its vector, in the order of its number, of one state."""
        with self._own_view() as view:
            for ids, vectors in view.iter_vectors(batch_size):
                yield _entries(view.known(ids), vectors)

    def iter_vectors(self, batch_size: int = _PAGE) -> Iterator[tuple[Ids, Embeddings]]:
        """Numbers (N,) and vectors (N, D) of all items, by ascending number, of one state."""
        with self._own_view() as view:
            yield from view.iter_vectors(batch_size)

    def ids(self) -> Ids:
        """The numbers of all items (N,), ascending."""
        with self._catalog.reading() as view:
            return view.live_ids()

    def items_at(self, ids: Iterable[ItemId]) -> tuple[list[Item], Embeddings]:
        """Those of the items that are there, by ascending number, and their vectors (N, D)."""
        with self._catalog.reading() as view:
            found = view.get(sorted(ids))
            items = [found[number] for number in sorted(found)]
            return items, view.vectors([item.id for item in items])

    def sample(self, count: int) -> tuple[list[Item], Embeddings]:
        """About `count` items at most, by ascending number, with their vectors (N, D): all of a
        small gallery, else items of equal chance, the same ones until the gallery changes.
        """
        rng = np.random.default_rng(0)
        with self._catalog.reading() as view:
            size, last = view.state().size, view.last_id() or 0
            if size > count and last < _SPARSE * size:
                # To list the numbers of 10 million items takes seconds, to try some does not.
                drawn = np.unique(rng.integers(1, last + 1, 2 * count * last // size))
                known = np.array(sorted(view.get(drawn)), np.int64)
            else:
                known = view.live_ids()
            if len(known) > count:
                known = np.sort(rng.choice(known, count, replace=False))
            return view.known(known), view.vectors(known)

    @property
    def last_id(self) -> ItemId:
        """The highest number of an item; 0 if there is none. A new item has a higher one."""
        with self._catalog.reading() as view:
            return view.last_id() or 0

    def product_counts(
        self, name: str, values: Sequence[Scalar]
    ) -> tuple[dict[int, int], dict[Scalar, int]]:
        """For each count of items, the number of values of an attribute that have it; then the
        number of items of each of `values`.
        """
        with self._snapshots.reading() as now:
            spread = self._attributes_of(now).spread(name)
        counts = {value: spread.count(value) for value in values}
        return spread.sizes(), {value: count for value, count in counts.items() if count}

    def counts(self) -> tuple[dict[str, int], int]:
        """How many items have each format, and how many different contents there are."""
        with self._catalog.reading() as view:
            return view.formats(), view.count_contents()

    def distinct(self, name: str) -> int:
        """How many different values of an attribute the items have."""
        with self._snapshots.reading() as now:
            return self._attributes_of(now).spread(name).different

    def has_more(self, name: str, value: Scalar, than: int) -> bool:
        """Whether more than so many items have this value of an attribute."""
        with self._snapshots.reading() as now:
            attributes = self._attributes_of(now)
            return attributes.count(attributes.having(name, [value])) > than

    def calibration(self) -> GalleryCalibration | None:
        """What is known of this generation; None until it was calibrated. One `stat` a call."""
        file = self._generation / CALIBRATION
        try:
            found = file.stat()
            stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
            if self._calibration[0] != stamp:
                read = GalleryCalibration.model_validate_json(file.read_bytes())
                self._calibration = (stamp, read)
            return self._calibration[1]
        except FileNotFoundError:  # it is derived, and may lie where nobody can write
            return self._calibration[1] if self._calibration[0] is None else None
        except (OSError, ValueError):
            return self._calibration[1]

    def calibrate(
        self, product: str | None = None, on_progress: Progress = lambda _: None
    ) -> GalleryCalibration:
        """Fit the probabilities of hits to the items as they are now, and keep them.

        `product` names the attribute that says which items show one product; by default the one
        of the last calibration. The curve of a golden set stays until the set is run again.

        Raises: InvalidParameterError for an attribute that no item has; GalleryWriteError;
            GalleryConflictError for a copy, which has that of its original.
        """
        self._folder.refuse_copy()
        before = self.calibration()
        if product is not None and product not in self.schema():
            raise InvalidParameterError(
                f"There is no attribute {product!r}. The gallery {self.name} has "
                f"{', '.join(self.schema()) or 'none'}."
            )
        if product is None and before is not None and before.is_chosen:
            product = before.product if before.product in self.schema() else None
        seq = self._catalog.state().seq  # before the fit: a later change is looked at again
        found = fit_gallery(self, product, on_progress).model_copy(update={"seq": seq})

        def with_golden(now: GalleryCalibration | None) -> GalleryCalibration:
            if now is None or now.product != found.product:
                return found
            golden = now.golden
            if self._is_outdated(golden):
                golden = (
                    "The golden set was run when the gallery had other items. Run it again: "
                    f"kinlens-index golden run {self.path}"
                )
            return found.model_copy(update={"golden": golden})

        return self._keep(with_golden)

    def calibrate_golden(self, queries: Callable[[str], Iterable[Labelled]]) -> GalleryCalibration:
        """Fit the probabilities of hits to labelled photos, as `fit_golden`, and keep them.

        `queries` takes the attribute that names the product of an item.

        Raises: GalleryError, GalleryWriteError.
        """
        known = self.calibration() or self.calibrate()
        if known.product is None:
            return known
        golden = fit_golden(self, known.product, queries(known.product))

        def with_golden(now: GalleryCalibration | None) -> GalleryCalibration:
            other = now is not None and now.product != known.product
            return (now or known).model_copy(update={} if other else {"golden": golden})

        return self._keep(with_golden)

    def _has_more_labels(self, known: GalleryCalibration) -> bool:
        """Whether items got the attribute that names their product since, of which too few had it
        before. Judged by a sample, since each change asks.
        """
        wanted = PRODUCTS if known.product is None else (known.product,)
        if (known.product and known.is_labelled) or {*wanted}.isdisjoint(self.schema()):
            return False
        items, _ = self.sample(SAMPLED)
        least = LABELLED if known.product else 0.5
        parts = [sum(name in item.attributes for item in items) for name in wanted]
        return max(parts) >= least * len(items)

    def _is_outdated(self, fitted: GalleryCalibration | Fit | str) -> bool:
        """Whether so many items were added or removed since that the curve may have moved."""
        if isinstance(fitted, str):
            return False
        with self._catalog.reading() as view:
            size, added = view.state().size, view.count_after(fitted.last)
        removed = fitted.items - (size - added)
        return is_changed((added + removed) / max(fitted.items, 1))

    def _keep(
        self, change: Callable[[GalleryCalibration | None], GalleryCalibration]
    ) -> GalleryCalibration:
        """Change what is kept now: another fit may have ended since this one began."""
        self._folder.refuse_copy()
        kept = change(self.calibration())
        self._calibration = (None, kept)
        with disk_errors_explained(self._generation):
            data = kept.model_dump_json(indent=2).encode() + b"\n"
            write_whole(self._generation / CALIBRATION, data, "calibration")
            (self._generation / CALIBRATION).chmod(0o644)  # others may serve the gallery
        return kept

    def vectors(self, ids: Sequence[ItemId]) -> Embeddings:
        """The stored vectors (N, D) of known items."""
        with self._catalog.reading() as view:
            return view.vectors(ids)

    def vectors_of_contents(self, sha256s: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """A stored vector (D,) for each of these contents that some item has."""
        with self._catalog.reading() as view:
            numbers = view.content(sha256s)
            vectors = view.vectors(list(numbers.values()))
        return dict(zip(numbers, vectors, strict=True))

    def image(self, item_id: ItemId) -> ItemImage:
        """The indexed bytes of an item, read from the image root; BMP, TIFF and HEIC become JPEG.

        Raises: ItemNotFoundError for an unknown number, or if the file is gone, was changed or lies
            outside the image root; GalleryCorruptError if it cannot be read.
        """
        return item_image(self.image_root, self.item(item_id))

    def add(
        self,
        entries: Iterable[Entry],
        owned: frozenset[str] | None = None,
        within: Filter | None = None,
    ) -> Written:
        """Store entries, all or none.

        Equal key and content: nothing, or new attributes alone. Other content under an old key
        replaces the item, which gets a new number. With `owned`, stored attributes that an entry
        does not give are taken away only if they have one of these names. With `within`, a filter,
        the key of an item that does not fit it is taken, and each entry must fit it.

        Raises: InvalidParameterError for a wrong dimension, a vector that is not finite or not of
            unit norm, a key twice, an attribute of another kind than before, an entry that is not
            `within`; GalleryWriteError; GalleryBusyError.
        """
        entries = list(entries)
        with self._writing() as writer:
            return writer.add(entries, owned, within)

    def update(
        self,
        changes: Mapping[str, Mapping[str, AttributeValue | None]],
        within: Filter | None = None,
    ) -> int:
        """Change attributes by key; None takes an attribute away. How many items differ now. With
        `within`, items that do not fit this filter are unknown, and each fits it afterwards.

        Raises: ItemNotFoundError for an unknown key, and then nothing was changed;
            InvalidParameterError for a value of another kind than the attribute has;
            GalleryWriteError; GalleryBusyError.
        """
        with self._writing() as writer:
            return writer.update(changes, within)

    def remove(
        self, keys: Iterable[str], *, keep: Iterable[str] = (), within: Filter | None = None
    ) -> int:
        """Remove items by key; unknown keys are left out of the count, and with `within` also those
        of items that do not fit this filter.

        With `keep`, only while one of these other keys is there: so the last copy of a product
        stays, whoever removes another one meanwhile.

        Raises: InvalidParameterError for what is not a list of texts, or a key to remove and keep;
            GalleryConflictError if nothing of `keep` is there; GalleryWriteError; GalleryBusyError.
        """
        keys, keep = checked_keys(keys), checked_keys(keep)
        if both := set(keys) & set(keep):
            raise InvalidParameterError(
                f"The key {min(both)!r:.200} is to be removed and in keep. Omit it from one."
            )
        with self._writing() as writer:
            if keep and not _found(writer, keep, within):
                raise GalleryConflictError(
                    f"Nothing was removed: none of the {len(keep):,} items to keep, such as "
                    f"{keep[0]!r:.200}, is in the gallery any more. Look for duplicates again."
                )
            return writer.remove_items(_found(writer, keys, within))

    def restore(self, keys: Iterable[str], within: Filter | None = None) -> list[Item]:
        """Undo the removal of the items with these keys: they come back as they were, under new
        numbers; all that can, in one step.

        Omits keys that another item has by now, items that `compact` has erased, and those that do
        not fit `within`. Of a key that was removed more than once the last item comes back.

        Raises: InvalidParameterError for what is not a list of texts; GalleryWriteError;
            GalleryBusyError.
        """
        keys = checked_keys(keys)
        with self._writing() as writer:
            return writer.restore(keys, within)

    def has_removed(self) -> bool:
        """Whether `restore` can bring something back."""
        with self._catalog.reading() as view:
            return view.has_removed()

    def remove_items(self, ids: Iterable[ItemId], within: Filter | None = None) -> int:
        """Remove items by number; unknown numbers are left out of the count, also those of items
        that have been replaced or do not fit `within`. Raises: GalleryWriteError, GalleryBusyError.
        """
        ids = [number for number in ids if 0 <= number < 2**63]
        with self._writing() as writer:
            return writer.remove_items(_fitting(writer.get(ids).values(), within))

    def update_where(
        self,
        where: Filter,
        change: Mapping[str, AttributeValue | None],
        within: Filter | None = None,
    ) -> int:
        """Make one change of attributes in every item that fits, 10,000 in one step; None takes an
        attribute away. How many items differ now. If it is cut short, the same call does the rest.
        With `within`, an item that the change would take out of this filter is refused.

        Raises: FilterError; InvalidParameterError for a value of another kind than the attribute
            has; GalleryWriteError; GalleryBusyError.
        """
        return self._in_steps(
            where,
            "changed",
            lambda writer, items: writer.update(
                dict.fromkeys([item.key for item in items], change), within
            ),
        )

    def remove_where(self, where: Filter) -> int:
        """Remove every item that fits, 10,000 in one step: how many. If it is cut short, the same
        call removes the rest.

        Raises: FilterError, GalleryWriteError, GalleryBusyError.
        """
        return self._in_steps(where, "removed", CatalogWriter.remove_items)

    def _in_steps(
        self, where: Filter, done: str, work: Callable[[CatalogWriter, Sequence[Item]], int]
    ) -> int:
        with self._snapshots.reading() as now:
            ids, _ = self._attributes_of(now).ids(self._among(now, where))
        count = 0
        for start in range(0, len(ids), _AT_ONCE):
            try:
                with self._writing() as writer:
                    items = writer.get(ids[start : start + _AT_ONCE]).values()
                    count += work(writer, [i for i in items if where.matches(i.attributes)])
            except GalleryBusyError as error:
                if not count:
                    raise
                raise GalleryBusyError(
                    f"{count:,} of {len(ids):,} items were {done}. Then: {error} Repeat the call "
                    "for the rest."
                ) from error
        return count

    def forget_unused_attributes(self) -> None:
        """Forget attributes that no item has, and their kinds: for a gallery that nobody has seen.

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
        """Make a new segment of all items and switch to it; searches and changes go on meanwhile.
        Then fit the probabilities of hits to it.

        What was removed can be brought back if that was in the last `keep_removed_s` seconds; if
        this is 0, it is erased. `from_scratch` takes nothing from the segment so far.

        Without `settings` the kind of index, its target and its device stay as they are.

        Raises: GalleryBusyError if another process compacts, unless this is to `wait`; PlanError,
            RecallError, GalleryWriteError, and then the old segment stays.
            GalleryConflictError for a copy.
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
        with self._catalog.reading():  # which lets go of vectors that were rewritten
            pass
        collect(self._generation)
        try:
            self.calibrate()
        except KinlensError as error:  # the compaction itself is done, and the next change retries
            logging.getLogger(__name__).warning("calibration failed: %s", error)
        return report

    def index_settings(self) -> IndexSettings:
        """How the index was made; the defaults if there is none, or it does not tell."""
        name = self._catalog.state().segment
        try:
            return read_segment_manifest(self._generation / SEGMENTS / str(name)).settings
        except GalleryCorruptError:
            return IndexSettings()

    def needs_compaction(self) -> str | None:
        """Why a compaction is due: 20 % of the segment removed, many items after it; or None, also
        for a copy, whose original is compacted.
        """
        if self.copy_of is not None:
            return None
        with self._catalog.reading() as view:
            return self._due(view, view.state())

    def calibrate_if_outdated(self) -> None:
        """Fit the probabilities again if a fifth of the items was added or removed since, or items
        got an attribute that names their product.
        """
        known, state = self.calibration(), self._catalog.state()
        if (known is not None and known.seq == state.seq) or self.copy_of is not None:
            return
        is_due = known is None or (
            self._is_outdated(known)
            or self._is_outdated(known.golden)
            or self._has_more_labels(known)
        )
        if is_due and state.size:
            with contextlib.suppress(GalleryWriteError):  # then this process alone knows it
                self.calibrate()

    def compact_in_background(
        self,
        on_error: Callable[[KinlensError], None] | None = None,
        *,
        only_calibrate: bool = False,
    ) -> BackgroundCompaction:
        """From now on, compact in a thread of its own after changes that make it due, and calibrate
        after those that outdate the probabilities; or only the latter.
        """
        if self._background is None:
            self._background = BackgroundCompaction(
                (lambda: None) if only_calibrate else self.needs_compaction,
                lambda progress: self.compact(keep_removed_s=KEEP_REMOVED_S, on_progress=progress),
                self.calibrate_if_outdated,
                self._snapshots.refresh,
                on_error,
            )
            self._background.nudge()
        return self._background

    def close(self) -> None:
        """Let go of the files; the gallery cannot be used afterwards."""
        if self._background is not None:
            self._background.close()
        self._close()
        if "_writable" in self.__dict__:
            self._writable.close()  # last: it alone may write the log back into the catalogue

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
        """A segment that is damaged is made again from the catalogue and the vectors; of several
        processes that open the gallery, the first one does it.
        """
        try:
            with self._snapshots.reading():
                return
        except GalleryCorruptError as damage:
            if self.copy_of is not None:
                self.close()
                raise GalleryCorruptError(
                    f"The copy {self.path} of {self.copy_of} is damaged. Delete that folder: the "
                    f"next start copies it again. The damage: {damage}"
                ) from damage
            logging.getLogger(__name__).warning("the index is made again: %s", damage)
            try:
                unless = functools.partial(_is_readable, self._snapshots)
                compact(
                    self._generation,
                    self.index_settings(),
                    wait=True,
                    keep_removed_s=KEEP_REMOVED_S,
                    from_scratch=True,
                    unless=unless,
                )
            except KinlensError as failure:
                damage.add_note(f"It could not be made again by itself: {failure}")
                self.close()
                raise damage from failure
        with self._snapshots.reading():
            return

    def _check_vectors(self, verify_hashes: bool | None) -> None:
        """Compare the vectors with their checksums, where that does not take too long. A damaged
        one is named in the log: it must not keep all others from being searched.

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
                return "an earlier version made its index"
            size = manifest.items
            self._segment_size = (state.segment, size)
        removed = view.removed_count()
        changed = view.count_changed(state.segment_seq)
        return due(size, removed, max(changed, state.size - size + removed), view.dim)

    def _version_at(self, seq: int) -> str:
        return hashlib.sha256(f"{self.manifest.uid}:{seq}".encode()).hexdigest()

    @contextlib.contextmanager
    def _own_view(self) -> Iterator[CatalogView]:
        """For generators: they may be left half way, or run while their thread searches."""
        with catalog_view(self._generation / CATALOG) as view:
            yield view


def _fitting(items: Iterable[Item], within: Filter | None) -> list[Item]:
    return [item for item in items if within is None or within.matches(item.attributes)]


def _found(writer: CatalogWriter, keys: Sequence[str], within: Filter | None) -> list[Item]:
    """The items with these keys, of those that fit."""
    return _fitting(writer.get([*writer.find(keys).values()]).values(), within)


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
    """The gallery at milvus://HOST:PORT/NAME; `on_call` is told of every request to the server.

    Raises: InvalidParameterError, EngineUnavailableError also without the client (kinlens[milvus]),
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


def contents_held(folder: Path | str, sha256s: Sequence[str]) -> set[str]:
    """Which of these contents the gallery in `folder` has now, or can bring back; its index is not
    opened.

    Raises: GalleryNotFoundError, GalleryCorruptError.
    """
    with catalog_view(GalleryFolder(folder).current() / CATALOG) as view:
        return {*view.content(sha256s), *view.removed_contents(sha256s)}


def current_generation(folder: Path | str) -> str | None:
    """The name of the generation of the gallery in `folder`; None where there is no gallery."""
    return GalleryFolder(folder).current_name()


def current_manifest(folder: Path | str) -> GalleryManifest:
    """What stays as it is of the gallery in `folder`; its index is not opened.

    Raises: GalleryNotFoundError, GalleryCorruptError.
    """
    return read_manifest(GalleryFolder(folder).current())


def pictures_folder(folder: Path | str) -> Path:
    """Where the pictures lie that were uploaded for the gallery in `folder`; they belong to whoever
    serves it, and no generation, build or backup has them.
    """
    return Path(folder) / PICTURES


def delete_gallery(folder: Path | str) -> None:
    """Delete a gallery with all that is in its folder.

    Raises: GalleryNotFoundError, GalleryBusyError while a build runs in it, GalleryWriteError.
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
    """How many bytes a copy of the gallery has, unless it changes meanwhile.

    Raises: GalleryNotFoundError, GalleryCorruptError.
    """
    generation = GalleryFolder(folder).current()
    with catalog_view(generation / CATALOG) as view:
        segment, name = view.state().segment, view.file_name
        size = 0
        if view.file is not None:
            size += view.file.bytes_of(view.file.numbers.rows_up_to(view.last_given()))
        # Not the size of the file: what came last may stand in its log alone.
        pages, page_bytes = (
            int(view.connection.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "page_size")
        )
    size += pages * page_bytes
    files = [] if segment is None else (generation / SEGMENTS / segment).glob("*")
    with contextlib.suppress(FileNotFoundError):  # a compaction has replaced it meanwhile
        size += sum(file.stat().st_size for file in files)
    with contextlib.suppress(FileNotFoundError):
        size += (generation / VECTORS / str(name) / NUMBERS).stat().st_size
    return size


def check_item(
    key: str, attributes: Mapping[str, AttributeValue], kinds: dict[str, AttributeKind]
) -> None:
    """Refuse what no gallery stores, before anybody embeds its image; attributes are compared with
    `kinds`, as of `Gallery.schema`, to which new ones are added. Raises: InvalidParameterError.
    """
    check_key(key)
    learn_kinds(kinds, key, attributes)


def _is_readable(snapshots: SnapshotKeeper) -> bool:
    try:
        with snapshots.reading():
            return True
    except GalleryCorruptError:
        return False


def _check_bundle(path: Path, manifest: GalleryManifest, expected_id: str | None) -> None:
    if expected_id is not None and manifest.bundle_id != expected_id:
        raise BundleMismatchError(
            f"Gallery {manifest.name} was made with bundle {manifest.bundle_id[:SHORT]}, but the "
            f"bundle in use is {expected_id[:SHORT]}: their vectors cannot be compared. Build it "
            f"again from the {manifest.source} with `kinlens-index build ... --bundle BUNDLE --out "
            f"{path}`, or use the bundle that it was made with."
        )


def _check_dim(generation: Path, manifest: GalleryManifest, catalog: Catalog) -> None:
    with catalog.reading() as view:
        found = view.dim
    if found != manifest.dim:
        raise GalleryCorruptError(
            f"{generation} does not fit together: the catalogue holds vectors of length "
            f"{found}, the manifest says {manifest.dim}. Restore a backup: kinlens-index "
            "restore."
        )
