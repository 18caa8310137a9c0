"""Changes to a catalogue, inside one transaction."""

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kinlens.embedder.errors import InvalidParameterError, ItemNotFoundError
from kinlens.embedder.types import Embeddings, ItemId
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.schema import (
    NAMES,
    State,
    item_checksum,
    row_checksum,
    vector_checksum,
)
from kinlens.indexer.catalog.vectors import VectorFile, are_equal
from kinlens.indexer.entries import (
    AttributeTypes,
    Entry,
    Item,
    Written,
    as_entries,
    as_stored,
    checked_vectors,
    has_image,
    with_stored,
)
from kinlens.indexer.filters.tree import Filter
from kinlens.indexer.types import Ids, no_key
from kinlens.values import AttributeType, AttributeValue

Attributes = Mapping[str, AttributeValue]
Changes = Mapping[str, Mapping[str, AttributeValue | None]]

_INSERT_ITEM = "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL)"
_INSERT_VECTOR = "INSERT INTO vectors VALUES (?, ?, NULL)"
_LATER_VECTORS = """
SELECT id, vectors.crc, NULL FROM items JOIN vectors USING (id)
WHERE id > ? AND (removed_seq IS NULL OR removed_at IS NOT NULL) ORDER BY id LIMIT 4096
"""
_UPDATE_ITEM = """
UPDATE items SET path = ?, format = ?, attributes = ?, changed_seq = ?, crc = ? WHERE id = ?
"""
_REMOVE = "UPDATE items SET removed_seq = ?, removed_at = ? WHERE id = ?"
_ERASE = (
    "DELETE FROM vectors WHERE id IN (SELECT value FROM json_each(?))",
    "DELETE FROM items WHERE id IN (SELECT value FROM json_each(?))",
)
_SET_STATE = """
UPDATE state SET seq = ?, size = ?, segment = ?, segment_seq = ?, dim = ?, numbers = ?, names = ?,
    vectors = ?, crc = ?
"""
_SET_TYPE = """
INSERT INTO names (name, kind, total) VALUES (?1, ?2, 0) ON CONFLICT (name) DO UPDATE SET kind = ?2
"""
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False)

_FORGET_UNUSED = """
DELETE FROM names WHERE name NOT IN (
    SELECT DISTINCT each.key FROM living, json_each(living.attributes) AS each
)
"""


class CatalogWriter(CatalogView):
    """A view that also writes; all changes have the same `seq`. Let exceptions end the block."""

    __slots__ = ("_seq", "_types", "before_insert", "has_written", "is_used", "within")

    file: VectorFile
    _state: State

    def __init__(self, connection: sqlite3.Connection, file: VectorFile, state: State) -> None:
        """`state`: that before this write, which is changed here and stored by `seal`."""
        super().__init__(connection, file)
        self._state = state
        self.has_written = False  # into the file of vectors
        self.is_used: Callable[[str], bool] = lambda _: True
        """Whether an item of the state before this write has the attribute."""
        self.before_insert: Callable[[CatalogView, int], None] = lambda *_: None
        """Called with this view and its number of rows of vectors before a write appends some."""
        self.within: Filter | None = None
        """Only items that match can be changed, and every item must match after its change."""
        self._seq: int | None = None
        self._types: dict[str, AttributeType] = {**self.schema()}

    def matching(self, items: Mapping[Any, Item]) -> list[Item]:
        """The items, each once, that match `within`: two keys may be spellings of one."""
        different = {item.id: item for item in items.values()}.values()
        return [item for item in different if self._fits(item.attributes)]

    def add(self, entries: Sequence[Entry], owned: frozenset[str] | None = None) -> Written:
        """As `GalleryWriter.add`."""
        vectors = checked_vectors(entries, self.dim)
        known = self.by_key([entry.key for entry in entries])
        for item in known.values():
            if not self._fits(item.attributes):
                raise InvalidParameterError(
                    f"The key {item.key!r:.200} cannot be used here. Choose another one."
                )
        entries = with_stored(entries, known, owned)
        for entry in entries:
            self._check_within(entry.key, entry.attributes)
        types = self._types_with({entry.key: entry.attributes for entry in entries})
        same = self._equal(entries, vectors, known)
        new = [n for n in range(len(entries)) if n not in same]
        updated = [
            (known[entries[n].key], entries[n])
            for n in sorted(same)
            if not _is_equal(known[entries[n].key], entries[n])
        ]
        replaced = [known[entries[n].key] for n in new if entries[n].key in known]
        if new or updated:
            self._learn(types)
            self._delete(replaced)
            added = [entries[n] for n in new]
            self._insert(added, self._as_stored(added, vectors[new]))
            for item, entry in updated:
                self._set(item, entry.attributes, entry.path, entry.format)
            self.seal()
        return Written(
            added=len(new) - len(replaced),
            replaced=len(replaced),
            updated=len(updated),
            unchanged=len(entries) - len(new) - len(updated),
        )

    def update(self, changes: Changes) -> int:
        """As `GalleryWriter.update`."""
        # An empty list removes an attribute, as None does.
        changes = {key: {**dict.fromkeys(own), **as_stored(own)} for key, own in changes.items()}
        known = self.by_key([*changes])
        items = {key: item for key, item in known.items() if self._fits(item.attributes)}
        missing = [key for key in changes if key not in items]
        if missing:
            raise ItemNotFoundError(no_key(missing[0]))
        types = self._types_with(
            {
                key: {name: value for name, value in change.items() if value is not None}
                for key, change in changes.items()
            }
        )
        became: dict[ItemId, Attributes] = {}
        for key, change in changes.items():
            item = items[key]
            merged = {**became.get(item.id, item.attributes), **change}
            became[item.id] = {name: value for name, value in merged.items() if value is not None}
        differ = 0
        for item in {item.id: item for item in items.values()}.values():
            attributes = became[item.id]
            self._check_within(item.key, attributes)
            if attributes != item.attributes:
                self._learn(types)
                self._set(item, attributes, item.path, item.format)
                differ += 1
        if differ:
            self.seal()
        return differ

    def remove(self, items: Sequence[Item]) -> int:
        """Remove items read by this writer; returns the number. `restore` can bring them back."""
        self._delete(items, at=int(time.time()))
        return len(items)

    def restore(self, keys: Sequence[str]) -> list[Item]:
        """As `GalleryWriter.restore`."""
        items, vectors = self.restorable(keys)
        fit = [n for n, item in enumerate(items) if self._fits(item.attributes)]
        items, vectors = [items[n] for n in fit], vectors[fit]
        if items:
            entries = as_entries(items, vectors)
            self._learn(self._types_with({entry.key: entry.attributes for entry in entries}))
            self._insert(entries, vectors)
            self._many(
                "UPDATE items SET removed_at = NULL WHERE id = ?", [(item.id,) for item in items]
            )
            self.seal()
        return [*self.by_key([item.key for item in items]).values()]

    def _as_stored(self, entries: Sequence[Entry], vectors: Embeddings) -> Embeddings:
        """The vectors (N, D) of new entries, with one vector for each image.

        A model rounds differently in batches of other sizes, and only images with equal vectors
        are one candidate of the index.
        """
        known = self.vectors_by_content([entry.sha256 for entry in entries])
        for vector, entry in zip(vectors, entries, strict=True):
            stored = known.setdefault(entry.sha256, vector)
            if are_equal(vector, stored, self.file.type):
                vector[:] = stored
        return vectors

    def _equal(
        self, entries: Sequence[Entry], vectors: Embeddings, known: Mapping[str, Item]
    ) -> set[int]:
        """The indices of the entries that have the sha256 and the vector of the item `known` by
        their key, and no image that it lacks: publications upload the images of new ids alone.
        """
        alike = [
            n
            for n, e in enumerate(entries)
            if (item := known.get(e.key)) is not None
            and item.sha256 == e.sha256
            and (item.has_image or not has_image(e.path, e.format))
        ]
        stored = self.vectors([known[entries[n].key].id for n in alike])
        equal = are_equal(vectors[alike], stored, self.file.type)
        return {n for n, is_equal in zip(alike, equal, strict=True) if is_equal}

    def _delete(self, items: Sequence[Item], at: int | None = None) -> None:
        """Remove items; `restore` can bring them back if it is given when they were removed."""
        if items:
            seq = self._next_seq()
            self._many(_REMOVE, [(seq, at, item.id) for item in items])
            self.grow(-len(items), -sum(item.id for item in items))
            self.seal()

    def retype(self, items: Iterable[Item], name: str, type_: AttributeType) -> None:
        """Give an attribute another type; `items` are all that have it, with their new values."""
        self._learn({name: type_})
        for item in items:
            self._set(item, item.attributes, item.path, item.format)
        self.seal()

    def forget(self, name: str) -> None:
        """Delete the name and type of an attribute that no item has."""
        self._next_seq()
        self.connection.execute("DELETE FROM names WHERE name = ?", (name,))
        self.seal(has_new_names=True)

    def forget_unused_names(self) -> None:
        """Delete attribute names that no item has, and their types. Reads every item."""
        self._next_seq()
        self.connection.execute(_FORGET_UNUSED)
        self.seal(has_new_names=True)

    def adopt_segment(self, name: str | None, seq: int, file: VectorFile | None = None) -> None:
        """Switch to the segment `name`, which contains the items of the write `seq`.

        This is not counted as a write. `Catalog.erase` can erase the items removed up to then.

        name: None if there were no items.
        file: a new file of vectors with the items of that state, and those of `removed_ids`; None
            to keep the current one.

        Raises: InvalidParameterError if `seq` is before the current segment or in the future.
        """
        state = self._state
        if not state.segment_seq <= seq <= state.seq:
            raise InvalidParameterError(
                f"Segment {name} is of state {seq}, the catalogue is between {state.segment_seq} "
                f"(its segment) and {state.seq}. Compact again."
            )
        if file is not None:
            self._move_vectors(file)
        self._state = self._state._replace(segment=name, segment_seq=seq)
        self.seal()

    def erase(self, ids: Ids) -> None:
        """Delete the rows of some of the items `erasable` (N,). This is not counted as a write."""
        self.connection.execute("PRAGMA secure_delete = ON")  # overwrite freed pages, too
        for statement in _ERASE:
            self.connection.execute(statement, (str(ids.tolist()),))
        self.connection.execute("PRAGMA secure_delete = FAST")

    def _insert(self, entries: Sequence[Entry], vectors: Embeddings) -> None:
        seq = self._next_seq()
        last = self.last_given()
        first = last + 1
        if entries:
            self.before_insert(self, self.file.row_ids.rows_up_to(last))
        with_ids = [*enumerate(entries, first)]
        vectors = self.file.rounded(vectors)  # checksums must match the stored precision
        self._many(_INSERT_ITEM, [_item_row(item_id, e, seq) for item_id, e in with_ids])
        if len(vectors):
            self.file.write(np.arange(first, first + len(vectors)), vectors)
            self.has_written = True
        self._many(
            _INSERT_VECTOR,
            [(n, vector_checksum(n, vector.tobytes())) for n, vector in enumerate(vectors, first)],
        )
        total = sum(item_id for item_id, _ in with_ids)
        self.grow(len(entries), total)

    def _set(self, item: Item, attributes: Attributes, path: str, format_: str) -> None:
        text = _attributes_text(attributes)
        content = bytes.fromhex(item.sha256)
        crc = item_checksum(item.id, item.key, path, content, format_, text)
        row = (path, format_, text, self._next_seq(), crc, item.id)
        self.connection.execute(_UPDATE_ITEM, row)

    def _types_with(self, given: Mapping[str, Attributes]) -> dict[str, AttributeType]:
        """The types of all attributes, with those of new values by key.

        Raises: InvalidParameterError for a value of another type than an item has.
        """
        types = AttributeTypes(self._types, self.is_used)
        for key, attributes in given.items():
            types.check(key, attributes)
        return types.types

    def _learn(self, types: Mapping[str, AttributeType]) -> None:
        """Store new attribute names, and changed types."""
        new = {name: type_ for name, type_ in types.items() if self._types.get(name) != type_}
        if new:
            self._next_seq()
            self._many(_SET_TYPE, new.items())
            self._types |= new
            self.seal(has_new_names=True)

    def _next_seq(self) -> int:
        """The number of this write; incremented once, at its first change."""
        if self._seq is None:
            self._seq = self._state.seq + 1
            self._state = self._state._replace(seq=self._seq)
        return self._seq

    def grow(self, count: int, total: int) -> None:
        """Count `count` more items, whose ids have the sum `total`."""
        state = self._state
        self._state = state._replace(size=state.size + count, numbers=state.numbers + total)

    def seal(self, *, seq: int | None = None, has_new_names: bool = False) -> None:
        """Store the state, with its checksums; as that after the write `seq`, if it is given."""
        if seq is not None:
            self._state = self._state._replace(seq=seq)
        if has_new_names:
            self._state = self._state._replace(names=row_checksum(self._all(NAMES)))
        self._state = self._state._replace(crc=self._state.checksum)
        self.connection.execute(_SET_STATE, self._state)

    def _move_vectors(self, file: VectorFile) -> None:
        """Append later vectors to `file` and make it the file of this catalogue."""
        last = file.last
        while rows := self._all(_LATER_VECTORS, last):
            file.write(*self.verified(rows))
            last = rows[-1][0]
        file.lengthen(self.last_given())
        file.sync()
        self._state = self._state._replace(vectors=file.name)

    def _fits(self, attributes: Attributes) -> bool:
        return self.within is None or self.within.matches(attributes)

    def _check_within(self, key: str, attributes: Attributes) -> None:
        if not self._fits(attributes):
            raise InvalidParameterError(
                f"Item {key!r:.200} with these attributes does not match the filter of your "
                "access. Give it attributes that match the filter."
            )

    def _many(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        self.connection.executemany(sql, rows)


def _item_row(item_id: ItemId, entry: Entry, seq: int) -> tuple[Any, ...]:
    """The row of a new item."""
    content = bytes.fromhex(entry.sha256)
    attributes = _attributes_text(entry.attributes)
    crc = item_checksum(item_id, entry.key, entry.path, content, entry.format, attributes)
    return (item_id, entry.key, entry.path, content, entry.format, attributes, seq, seq, crc)


def _attributes_text(attributes: Attributes) -> str:
    """Attributes as JSON."""
    return _ENCODER.encode(dict(attributes))


def _is_equal(item: Item, entry: Entry) -> bool:
    return (item.path, item.format, item.attributes) == (
        entry.path,
        entry.format,
        dict(entry.attributes),
    )
