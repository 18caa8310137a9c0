"""Put images and vectors into a gallery, one by one or from tables."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kinlens.calls import NewItem
from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.session import Embedder
from kinlens.embedder.sources.names import composed
from kinlens.indexer.exchange.parquet import VECTOR, load_pyarrow
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.add import fitting
from kinlens.indexer.ingest.embed import (
    Batch,
    EmbedSettings,
    Failure,
    embedded_batches,
    failure_of,
)
from kinlens.indexer.ingest.foreign import Tables, unit_vectors
from kinlens.indexer.ingest.sources import Record, Source
from kinlens.indexer.types import NO_IMAGE, Entry, Item, Progress, Written
from kinlens.indexer.uploads import UploadFolder
from kinlens.library.images import frame_items, is_frame, read_image, vectors_in
from kinlens.library.stores import Store

_ROWS = 4096
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class PutReport:
    """Result of `put_many`.

    Attributes:
        added, replaced, updated, unchanged: numbers of items.
        failures: images that cannot be used, each with its key and the reason.
    """

    added: int = 0
    replaced: int = 0
    updated: int = 0
    unchanged: int = 0
    failures: tuple[Failure, ...] = ()


def put_all(
    store: Store,
    open_embedder: Any,
    items: Any,
    vectors: Any = None,
    *,
    keep: bool = True,
    settings: EmbedSettings | None = None,
    on_progress: Progress = lambda _: None,
) -> PutReport:
    """Store items in batches, each durable when it is reported.

    Args:
        open_embedder: returns the model; called if there are images.
        items: as in `Gallery.put_many`.
        vectors: (N, D), of keys.
        keep: store the images, and not only their vectors.

    Raises: the errors of `Gallery.put_many`.
    """
    put = _Put(store, open_embedder, keep, settings or EmbedSettings(), on_progress)
    if vectors is not None:
        return put.entries(_of_arrays([*items], vectors, store.dim))
    table = _vector_table(items)
    if table is not None:
        dump = Tables([Path("The table")], table=table).dump({})
        _check_dim(dump.dim, store.dim)
        return put.entries(dump.entries())
    return put.items(_new_items(items))


class _Put:
    def __init__(
        self,
        store: Store,
        open_embedder: Any,
        keep: bool,
        settings: EmbedSettings,
        on_progress: Progress,
    ) -> None:
        self._store = store
        self._open_embedder = open_embedder
        self._uploads = UploadFolder(store.path) if isinstance(store, Gallery) else None
        self._keep = keep
        self._settings = settings
        self._on_progress = on_progress
        self._written = Written()
        self._failures: list[Failure] = []

    def report(self) -> PutReport:
        written = self._written
        return PutReport(
            written.added,
            written.replaced,
            written.updated,
            written.unchanged,
            tuple(self._failures),
        )

    def entries(self, entries: Iterator[Entry]) -> PutReport:
        """Store items with vectors."""
        while part := [*islice(entries, _ROWS)]:
            self._written += self._store.add(part)
            self._on_progress(len(part))
        return self.report()

    def items(self, items: Iterator[NewItem]) -> PutReport:
        """Store items, with images or vectors."""
        first = next(items, None)
        if first is None:
            return self.report()
        several = _chained(first, items)
        if first.vector is not None:
            return self.entries(_entries_of(several, self._store.dim))
        if self._keep and self._uploads is None:
            raise InvalidParameterError(
                f"{self._store.name} is on Milvus, which cannot store images. Pass keep=False to "
                "store their vectors alone."
            )
        embedder: Embedder = fitting(self._store, self._open_embedder())
        images = _Images(several)
        source = Source(Path(), images.records, 0, "items", read=images.read)
        known = self._store.contents
        with embedded_batches(source, embedder, known, self._settings) as batches:
            for batch in batches:
                self._take(batch, images)
                self._on_progress(len(batch.records))
        return self.report()

    def _take(self, batch: Batch, images: "_Images") -> None:
        """Store the images of a batch, then its items."""
        stored = self._store.stored([record.key for record in batch.records])
        hashes = [record.sha256 for record in batch.records if not record.failure]
        vectors = {**batch.vectors, **self._store.vectors_of_contents(hashes)}
        entries, contents = [], {}
        for record in batch.records:
            item, data = images.pop(record.key)
            vector = vectors.get(record.sha256)
            if vector is None:  # or another process has removed its content since it was read
                record = replace(record, failure=record.failure or "It was removed meanwhile.")
                self._failures.append(failure_of(record))
                continue
            entry = _entry(item, record, vector, stored.get(record.key), self._keep)
            entries.append(entry)
            if not entry.path and self._keep:
                contents[entry.sha256] = data
        if not contents or self._uploads is None:
            self._written += self._store.add(entries)
            return
        with self._uploads.storing(contents):
            self._written += self._store.add(entries)


class _Images:
    """Images that are being put, which several threads read."""

    def __init__(self, items: Iterator[NewItem]) -> None:
        self._new = items
        self._items: dict[str, NewItem] = {}
        self._data: dict[str, bytes] = {}

    def records(self) -> Iterator[Record]:
        """A record for each item. Raises: InvalidParameterError."""
        for item in self._new:
            key = composed(item.key)
            if item.image is None:
                raise InvalidParameterError(
                    f"Item {key!r:.{_SHOWN}} has no image, but others have one. Put items with "
                    "vectors in a call of their own."
                )
            if key in self._items:
                raise InvalidParameterError(
                    f"Key {key!r:.{_SHOWN}} occurs twice. Give each item its own key."
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
        vector = None if item.vector is None else vectors_in(item.vector)
        if vector is None or vector.ndim != 1:
            raise InvalidParameterError(
                f"Item {item.key!r:.{_SHOWN}} has no vector, but others have one. Put items with "
                "images in a call of their own."
            )
        _check_dim(len(vector), dim)
        [unit] = unit_vectors(vector[None], [item.key], "The items")[0]
        attributes = item.attributes
        yield Entry(item.key, unit, attributes=attributes or {}, keeps=attributes is None)


def _of_arrays(keys: Sequence[Any], vectors: Any, dim: int) -> Iterator[Entry]:
    found = vectors_in(vectors)
    if found is None or found.ndim != 2 or len(found) != len(keys):
        shape = None if found is None else found.shape
        raise InvalidParameterError(
            f"vectors has the shape {shape}; pass an array ({len(keys):,}, {dim}) of numbers, a "
            "row for each key."
        )
    _check_dim(found.shape[1], dim)
    for start in range(0, len(keys), _ROWS):
        part = [str(key) for key in keys[start : start + _ROWS]]
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
    if is_frame(items):
        for key, path, attributes in frame_items(items):
            yield NewItem(key, path, attributes)
        return
    if isinstance(items, Mapping) or not isinstance(items, Iterable):
        raise InvalidParameterError(
            f"items = {items!r:.{_SHOWN}} must be a list of NewItem, a table with the columns key "
            "and vector, or a DataFrame with the columns key and path."
        )
    for item in items:
        if not isinstance(item, NewItem):
            raise InvalidParameterError(
                f"{item!r:.{_SHOWN}} is not a NewItem(key, image, attributes). With keys, pass "
                "their vectors too."
            )
        if not isinstance(item.key, str):
            raise InvalidParameterError(f"The key {item.key!r:.{_SHOWN}} must be a string.")
        if (item.image is None) == (item.vector is None):
            raise InvalidParameterError(
                f"Item {item.key!r:.{_SHOWN}} needs either an image or a vector."
            )
        yield item


def _chained(first: NewItem, others: Iterator[NewItem]) -> Iterator[NewItem]:
    yield first
    yield from others


def _vector_table(items: Any) -> Any:
    """The items as a table of Arrow if they are one, or a DataFrame with vectors; else None."""
    if is_frame(items):
        if VECTOR not in items.columns and "embedding" not in items.columns:
            return None
        return load_pyarrow().Table.from_pandas(items, preserve_index=False)
    return items if hasattr(items, "to_batches") and hasattr(items, "schema") else None
