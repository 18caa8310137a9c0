"""Put images and vectors into a gallery, and add or sync images that stay where they are."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

from kinlens.calls import NewItem
from kinlens.embedder.errors import GalleryConflictError, InvalidParameterError, SourceError
from kinlens.embedder.programs.progress import progress_bar
from kinlens.embedder.session import Embedder
from kinlens.embedder.sources.names import composed
from kinlens.indexer.entries import NO_IMAGE, Entry, Item, Written, check_key
from kinlens.indexer.exchange.parquet import VECTOR, load_pyarrow
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.add import AddReport, add_source, check_image_root, fitting
from kinlens.indexer.ingest.embed import (
    Batch,
    EmbedSettings,
    Failure,
    embedded_batches,
    failure_of,
)
from kinlens.indexer.ingest.foreign import Tables, unit_vectors
from kinlens.indexer.ingest.sources import Record, Source
from kinlens.indexer.ingest.sync import MaxRemoved, SyncReport, SyncSettings, sync_source
from kinlens.indexer.ingest.sync import source_of as source_to_sync
from kinlens.indexer.types import Progress
from kinlens.indexer.uploads import UploadFolder
from kinlens.library.bundles import user_path
from kinlens.library.hits import Searcher
from kinlens.library.images import (
    BatchChoice,
    about,
    columns_of,
    is_frame,
    key_in,
    named_attributes,
    read_image,
    source_of,
    table_in,
    table_items,
    vectors_in,
)
from kinlens.library.stores import Say, Store, keep_up
from kinlens.values import AttributeInput

Keyed = TypeVar("Keyed", Entry, NewItem)

_ROWS = 4096
_SHOWN = 200
_NAMED = 3


@dataclass(frozen=True, slots=True)
class PutReport(Written):
    """Result of `put_many`.

    Attributes:
        added, replaced, updated, unchanged: numbers of items.
        failures: images that cannot be used, each with its key and the reason.
    """

    failures: tuple[Failure, ...] = ()


class GalleryAdditions(Searcher):
    """Puts, adds and syncs the items of a gallery."""

    def put(
        self,
        key: str,
        image: Any = None,
        attributes: Mapping[str, AttributeInput] | None = None,
        *,
        vector: Any = None,
        keep: bool = True,
    ) -> Item:
        """Add an item, or replace the item with this key; returns the stored item.

        Args:
            image: a path, the bytes of a file, an image of Pillow, or an array uint8 (H, W, 3).
            attributes: replace the stored ones; None keeps them and {} clears them.
            vector: of the model of the gallery, in place of an image; it is divided by its norm.
            keep: store the image in the gallery, and not only its vector.

        Raises: SourceError, ImageError: the image cannot be read; InvalidParameterError.
        """
        item = NewItem(key, image, attributes, vector)
        report = _Put(self.store, lambda: self.bundle, keep).any([item], None)
        for failure in report.failures:
            raise SourceError(f"The image of {key!r:.200} cannot be used: {failure.reason}")
        return self.item(composed(key))

    def put_many(
        self,
        items: Any,
        vectors: Any = None,
        *,
        keep: bool = True,
        upkeep: bool = True,
        **batches: Unpack[BatchChoice],
    ) -> PutReport:
        """Add or replace any number of items, in batches.

        Args:
            items: `kinlens.NewItem` objects; or a DataFrame or table of Arrow with the columns key,
                path or vector, and attributes; or keys, with `vectors`. Keys in tables and arrays
                are texts or whole numbers.
            vectors: (N, D), a row for each key; they are divided by their norms.
            keep: store the images in the gallery, and not only their vectors.
            upkeep: compact the index and fit the probabilities afterwards, if that is due.
            batches: `batch_size` and `workers`, the images embedded at a time and the threads.

        Returns: the counts, and `failures`: images that cannot be used, with their reasons. They
            are skipped with a warning.

        Raises: InvalidParameterError for an item that cannot be stored, or that has the key of an
            earlier one; batches before it are stored.
        """
        count = len(items) if hasattr(items, "__len__") else 0
        with progress_bar(count, "Storing", shown=self.shown) as advance:
            put = _Put(self.store, lambda: self.bundle, keep, EmbedSettings(**batches), advance)
            report = put.any(items, vectors)
        warn_of(self.warn, report.failures, max(count, len(report.failures)))
        if upkeep:
            keep_up(self.store, warn=self.warn, shown=self.shown)
        return report

    @overload
    def add(self, source: Sequence[Entry], owned: frozenset[str] | None = None) -> Written: ...

    @overload
    def add(
        self,
        source: Any,
        owned: None = None,
        *,
        csv: Path | str | None = None,
        split: Path | str | None = None,
        upkeep: bool = True,
        **batches: Unpack[BatchChoice],
    ) -> AddReport: ...

    def add(
        self,
        source: Any,
        owned: frozenset[str] | None = None,
        *,
        csv: Path | str | None = None,
        split: Path | str | None = None,
        upkeep: bool = True,
        **batches: Unpack[BatchChoice],
    ) -> AddReport | Written:
        """Add images, which stay where they are, and update changed ones.

        Unchanged images are skipped. Images that cannot be used are skipped with a warning, and
        listed in `failures` of the report.

        Args:
            source: a folder, an address such as s3://shop/photos, a CSV list, any number of paths,
                or a DataFrame or table of Arrow with the columns of a list. All must be below the
                image root of the gallery. Entries of the indexer are stored as they are, with
                `owned`.
            csv, split: a list whose paths are relative to `source`.
            upkeep: compact the index and fit the probabilities afterwards, if that is due.
            batches: `batch_size` and `workers`, the images embedded at a time and the threads.

        Raises: SourceError; BundleMismatchError.
        """
        if isinstance(source, list | tuple) and all(isinstance(one, Entry) for one in source[:1]):
            return self.store.add(source, owned)
        found = self.source(source, csv=csv, split=split)
        with progress_bar(found.count, "Embedding", "images", self.shown) as advance:
            report = add_source(self.store, found, self.bundle, EmbedSettings(**batches), advance)
        warn_of(self.warn, report.failures, report.found)
        if upkeep:
            keep_up(self.store, warn=self.warn, shown=self.shown)
        return report

    def source(
        self, images: Any, *, csv: Path | str | None = None, split: Path | str | None = None
    ) -> Source:
        """The images that `add` would add, such as their `count` and what is `omitted`.

        Raises: SourceError, UnreachableError.
        """
        check_image_root(self.store)
        root = self.store.image_root
        return source_of(images, csv=csv, split=split, root=root, kinds=self.store.schema())

    def sync(
        self,
        source: Any,
        *,
        csv: Path | str | None = None,
        max_removed: str | int = "10%",
        uploads: bool = False,
        checksum: bool = False,
        dry_run: bool = False,
        check: bool = True,
        upkeep: bool = True,
        **batches: Unpack[BatchChoice],
    ) -> SyncReport:
        """Make the gallery equal to a folder or list: add, update, rename and remove items.

        Args:
            source: a folder or address in the image root, or a CSV list.
            csv: a list whose paths are relative to `source`.
            max_removed: remove at most this part of the items, or this number.
            uploads: also remove items without a file, such as those of `put`.
            checksum: read every file, not only those with a new date.
            dry_run: change nothing.
            check: raise if more would be removed; else `refused` of the report gives the reason.
            upkeep, batches: as for `add`.

        Raises: GalleryConflictError if more items would be removed; SourceError.
        """
        found, limit = source, MaxRemoved.parse(str(max_removed))
        if isinstance(source, str | os.PathLike):
            place = Path(user_path(csv)) if csv is not None else None
            found = source_to_sync(self.store, user_path(source), place)
        elif not isinstance(source, Source):
            raise SourceError(
                f"{about(source)} cannot be synced. Pass a folder, an address or a CSV list, such "
                "as that of DataFrame.to_csv."
            )
        with progress_bar(found.count, "Comparing", "images", self.shown) as compared:
            report = sync_source(
                self.store,
                found,
                lambda: self.bundle,
                SyncSettings(limit, uploads, checksum, dry_run, EmbedSettings(**batches)),
                compared,
                compared.then("Updating", found.count, "images"),
            )
        if report.refused:
            if check:
                raise GalleryConflictError(report.refused)
            return report
        warn_of(self.warn, report.failures, report.found)
        if upkeep and not dry_run:
            keep_up(self.store, warn=self.warn, shown=self.shown)
        return report


@dataclass
class _Put:
    """A call of `put_many`.

    Attributes:
        open_embedder: returns the model; called if there are images.
        keep: store the images, and not only their vectors.
    """

    store: Store
    open_embedder: Callable[[], Embedder]
    keep: bool
    settings: EmbedSettings = field(default_factory=EmbedSettings)
    on_progress: Progress = lambda _: None

    def __post_init__(self) -> None:
        self._uploads = UploadFolder(self.store.path) if isinstance(self.store, Gallery) else None
        self._written = Written()
        self._failures: list[Failure] = []

    def report(self) -> PutReport:
        return PutReport(**asdict(self._written), failures=tuple(self._failures))

    def any(self, items: Any, vectors: Any) -> PutReport:
        """Store items in batches, each durable when it is reported, of what `put_many` takes."""
        if vectors is not None:
            return self.entries(_of_arrays(_keys_in(items), vectors, self.store.dim))
        table = table_in(items)
        if table is None:
            return self.items(_new_items(items))
        if {"path", VECTOR, "embedding"} & {*columns_of(table)} == {"path"}:
            return self.items(NewItem(*row) for row in table_items(table))
        if is_frame(table):
            table = load_pyarrow().Table.from_pandas(table, preserve_index=False)
        if not table.num_rows:  # whose columns have no types
            return self.report()
        dump = Tables([Path("The table")], table=table).dump({})
        _check_dim(dump.dim, self.store.dim)
        return self.entries(dump.entries())

    def entries(self, entries: Iterator[Entry]) -> PutReport:
        """Store items with vectors."""
        entries = _each_once(entries)
        while part := [*islice(entries, _ROWS)]:
            self._written += self.store.add(part)
            self.on_progress(len(part))
        return self.report()

    def items(self, items: Iterator[NewItem]) -> PutReport:
        """Store items, with images or vectors."""
        first = next(items, None)
        if first is None:
            return self.report()
        several = _chained(first, items)
        if first.vector is not None:
            return self.entries(_entries_of(several, self.store.dim))
        if self.keep and self._uploads is None:
            raise InvalidParameterError(
                f"{self.store.name} is on Milvus, which cannot store images. Pass keep=False to "
                "store their vectors alone."
            )
        embedder: Embedder = fitting(self.store, self.open_embedder())
        images = _Images(_each_once(several))
        source = Source(Path(), images.records, 0, "items", read=images.read)
        known = self.store.contents
        with embedded_batches(source, embedder, known, self.settings) as batches:
            for batch in batches:
                self._take(batch, images)
                self.on_progress(len(batch.records))
        return self.report()

    def _take(self, batch: Batch, images: "_Images") -> None:
        """Store the images of a batch, then its items."""
        stored = self.store.stored([record.key for record in batch.records])
        hashes = [record.sha256 for record in batch.records if not record.failure]
        vectors = {**batch.vectors, **self.store.vectors_of_contents(hashes)}
        entries, contents = [], {}
        for record in batch.records:
            item, data = images.pop(record.key)
            vector = vectors.get(record.sha256)
            if vector is None:  # or another process has removed its content since it was read
                record = replace(record, failure=record.failure or "It was removed meanwhile.")
                self._failures.append(failure_of(record))
                continue
            entry = _entry(item, record, vector, stored.get(record.key), self.keep)
            entries.append(entry)
            if not entry.path and self.keep:
                contents[entry.sha256] = data
        if not contents or self._uploads is None:
            self._written += self.store.add(entries)
            return
        with self._uploads.storing(contents):
            self._written += self.store.add(entries)


class _Images:
    """Images that are being put, which several threads read."""

    def __init__(self, items: Iterator[NewItem]) -> None:
        self._new = items
        self._items: dict[str, NewItem] = {}
        self._data: dict[str, bytes] = {}

    def records(self) -> Iterator[Record]:
        """A record for each item. Raises: InvalidParameterError."""
        for item in self._new:
            check_key(item.key)
            key = composed(item.key)
            if item.image is None:
                raise InvalidParameterError(
                    f"Item {key!r:.{_SHOWN}} has no image, but others have one. Put items with "
                    "vectors in a call of their own."
                )
            self._items[key] = item
            path = item.image if isinstance(item.image, str | Path) else ""
            yield Record(key, str(path))

    def read(self, record: Record, max_bytes: int) -> bytes:
        """The bytes of the image of a record."""
        data = read_image(self._items[record.key].image, max_bytes).data
        self._data[record.key] = data
        return data

    def pop(self, key: str) -> tuple[NewItem, bytes]:
        """An item and its bytes, which are then forgotten."""
        return self._items.pop(key), self._data.pop(key, b"")


def _entry(item: NewItem, record: Record, vector: Any, old: Item | None, keep: bool) -> Entry:
    """The entry to store. An unchanged image keeps the path that it was indexed from."""
    path, kind = "", record.format if keep else NO_IMAGE
    if old is not None and old.sha256 == record.sha256 and old.path:
        path, kind = old.path, old.format
    attributes = item.attributes
    return Entry(
        item.key, vector, record.sha256, attributes or {}, path, kind, keeps=attributes is None
    )


def _entries_of(items: Iterator[NewItem], dim: int) -> Iterator[Entry]:
    for item in items:
        if item.vector is None:
            raise InvalidParameterError(
                f"Item {item.key!r:.{_SHOWN}} has no vector, but others have one. Put items with "
                "images in a call of their own."
            )
        vector = vectors_in(item.vector)
        if vector is None or vector.ndim != 1:
            raise InvalidParameterError(
                f"The vector of item {item.key!r:.{_SHOWN}} is {about(item.vector)}. Pass {dim:,} "
                "numbers."
            )
        _check_dim(len(vector), dim)
        [unit] = unit_vectors(vector[None], [item.key], "The items")[0]
        attributes = item.attributes
        yield Entry(item.key, unit, attributes=attributes or {}, keeps=attributes is None)


def _keys_in(items: Any) -> list[str]:
    """Keys, each once. Raises: InvalidParameterError."""
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise InvalidParameterError(f"{about(items)} must be a list of keys, one for each vector.")
    keys = []
    for value in items.to_pylist() if hasattr(items, "to_pylist") else items:  # of Arrow
        if (key := key_in(value)) is None:
            raise InvalidParameterError(
                f"The key {about(value)} is neither a text nor a whole number."
            )
        keys.append(key)
    if len({*keys}) < len(keys):
        [[key, _]] = Counter(keys).most_common(1)
        raise InvalidParameterError(
            f"Key {key!r:.{_SHOWN}} occurs twice. Give each item a different key."
        )
    return keys


def _of_arrays(keys: Sequence[str], vectors: Any, dim: int) -> Iterator[Entry]:
    if not keys and not len(vectors):
        return
    listed = [*vectors] if isinstance(vectors, Iterator) else vectors
    found = vectors_in(listed)
    if found is None or found.ndim != 2 or len(found) != len(keys):
        given = about(listed) if found is None else f"an array {found.shape}"
        raise InvalidParameterError(
            f"vectors is {given}; pass an array ({len(keys):,}, {dim}) of numbers, a row for each "
            "key."
        )
    _check_dim(found.shape[1], dim)
    for start in range(0, len(keys), _ROWS):
        part = keys[start : start + _ROWS]
        units, _ = unit_vectors(found[start : start + _ROWS], part, "The array")
        for key, unit in zip(part, units, strict=True):
            yield Entry(key, unit, keeps=True)


def _check_dim(found: int, dim: int) -> None:
    if found != dim:
        raise InvalidParameterError(
            f"A vector has {found:,} numbers, those of the gallery have {dim:,}. Put vectors of "
            "the model that the gallery was made for."
        )


def _new_items(items: Any) -> Iterator[NewItem]:
    if isinstance(items, Mapping | NewItem) or not isinstance(items, Iterable):
        raise InvalidParameterError(
            f"items = {about(items)} must be a list of NewItem, a table with the columns key and "
            "vector, or a DataFrame with the columns key and path."
        )
    for item in items:
        if not isinstance(item, NewItem):
            raise InvalidParameterError(
                f"{about(item)} is not a NewItem(key, image, attributes). With keys, pass their "
                "vectors too."
            )
        if not isinstance(item.key, str):
            raise InvalidParameterError(f"The key {item.key!r:.{_SHOWN}} must be a string.")
        if item.attributes is not None:
            named_attributes(f"attributes of {item.key!r:.{_SHOWN}}", item.attributes)
        if (item.image is None) == (item.vector is None):
            raise InvalidParameterError(
                f"Item {item.key!r:.{_SHOWN}} needs either an image or a vector."
            )
        yield item


def _chained(first: NewItem, others: Iterator[NewItem]) -> Iterator[NewItem]:
    yield first
    yield from others


def _each_once(items: Iterator[Keyed]) -> Iterator[Keyed]:
    """The items. Raises: InvalidParameterError at a key that an earlier one has."""
    seen: set[str] = set()
    for item in items:
        if (key := composed(item.key)) in seen:
            raise InvalidParameterError(
                f"Key {key!r:.{_SHOWN}} occurs twice. Give each item its own key."
            )
        seen.add(key)
        yield item


def warn_of(warn: Say, failures: Sequence[Failure], found: int) -> None:
    """A warning that names the first images that were skipped."""
    if failures:
        first = "; ".join(f"{one.key}: {one.reason}" for one in failures[:_NAMED])
        warn(f"Skipped {len(failures):,} of {found:,} images, as the report lists: {first}")
