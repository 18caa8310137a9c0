"""Changes to a catalogue, inside one transaction."""

import json
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kinlens.embedder.errors import InvalidParameterError, ItemNotFoundError
from kinlens.embedder.types import Embeddings, ItemId
from kinlens.indexer.attributes import as_stored
from kinlens.indexer.catalog.entries import checked_vectors, learn_kinds, with_stored
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.schema import (
    REMOVED,
    SCHEMA_VERSION,
    VECTORS_INSIDE,
    VECTORS_OUT,
    item_checksum,
    seal,
    vector_checksum,
)
from kinlens.indexer.catalog.vectors import VectorFile
from kinlens.indexer.filters.tree import Filter
from kinlens.indexer.types import Entry, Ids, Item, Written
from kinlens.values import AttributeKind, AttributeValue

Attributes = Mapping[str, AttributeValue]
Changes = Mapping[str, Mapping[str, AttributeValue | None]]

_INSERT_ITEM = "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT_VECTOR = "INSERT INTO vectors VALUES (?, ?, ?)"
_LATER_VECTORS = "SELECT id, crc, vector FROM vectors WHERE id > ? ORDER BY id LIMIT 4096"
_UPDATE_ITEM = """
UPDATE items SET path = ?, format = ?, attributes = ?, changed_seq = ?, crc = ? WHERE id = ?
"""
_KEEP_REMOVED = """
INSERT INTO removed
SELECT items.id, key, path, sha256, format, attributes, items.crc, ?, ?, vectors.crc,
    coalesce(vector, ?)
FROM items JOIN vectors ON vectors.id = items.id WHERE items.id = ?
"""
_KEPT = "SELECT 1 FROM removed WHERE seq > ? OR (at > ? AND at <= ?) LIMIT 1"
_ERASE = "DELETE FROM removed WHERE seq <= ? AND NOT (at > ? AND at <= ?)"
_GROW = "UPDATE state SET size = size + ?, numbers = numbers + ?"
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False)

_FORGET = """
DELETE FROM names WHERE name NOT IN (
    SELECT DISTINCT each.key FROM items, json_each(items.attributes) AS each
)
"""


class CatalogWriter(CatalogView):
    """A view that also writes. All its changes have one `seq`. Leave the block on an exception."""

    __slots__ = ("_kinds", "_seq", "has_written")

    def __init__(self, connection: sqlite3.Connection, file: VectorFile | None = None) -> None:
        super().__init__(connection, file)
        self.has_written = False  # into the file
        self._seq: int | None = None
        self._kinds: dict[str, AttributeKind] = {**self.schema()}

    def add(
        self,
        entries: Sequence[Entry],
        owned: frozenset[str] | None = None,
        within: Filter | None = None,
    ) -> Written:
        """Store entries. Equal key and content: nothing, or new attributes, path and format alone;
        other content under an old key replaces the item, which gets a new number. With `owned`,
        stored attributes that an entry does not give go only if they have one of these names. With
        `within`, an item that does not fit it keeps its key, and each entry fits it afterwards.

        Raises: InvalidParameterError naming the key at fault, and then nothing was written.
        """
        vectors = checked_vectors(entries, self.dim)
        old = self.get([*self.find([entry.key for entry in entries]).values()])
        known = {item.key: item for item in old.values()}
        for item in known.values():
            if within is not None and not within.matches(item.attributes):
                raise InvalidParameterError(
                    f"The key {item.key!r:.200} cannot be used here. Choose another one."
                )
        entries = with_stored(entries, known, owned)
        for entry in entries:
            _check_within(entry.key, entry.attributes, within)
        kinds = dict(self._kinds)
        for entry in entries:
            learn_kinds(kinds, entry.key, entry.attributes)
        new = [n for n, e in enumerate(entries) if not _has_content(known.get(e.key), e)]
        updated = [
            (known[e.key], e)
            for e in entries
            if _has_content(known.get(e.key), e) and not _is_equal(known[e.key], e)
        ]
        replaced = [known[entries[n].key].id for n in new if entries[n].key in known]
        if new or updated:
            self._learn(kinds)
            self._take_out([*self.get(replaced).values()])
            self._insert([entries[n] for n in new], vectors[new])
            for item, entry in updated:
                self._set(item, entry.attributes, entry.path, entry.format)
            seal(self.connection)
        return Written(
            added=len(new) - len(replaced),
            replaced=len(replaced),
            updated=len(updated),
            unchanged=len(entries) - len(new) - len(updated),
        )

    def update(self, changes: Changes, within: Filter | None = None) -> int:
        """Change attributes by key; None takes one away. How many items differ now. With `within`,
        items that do not fit it are unknown, and each item fits it afterwards.

        Raises: ItemNotFoundError for an unknown key; InvalidParameterError for a value of another
            kind, or an item that would not fit; and then nothing was changed.
        """
        changes = {key: _change(change) for key, change in changes.items()}
        found = self.find([*changes])
        items = self.get([*found.values()])
        if within is not None:
            found = {k: n for k, n in found.items() if within.matches(items[n].attributes)}
        missing = [key for key in changes if key not in found]
        if missing:
            raise ItemNotFoundError(
                f"There is no item with the key {missing[0]!r:.200}. Add it first."
            )
        kinds = dict(self._kinds)
        for key, change in changes.items():
            learn_kinds(kinds, key, {n: v for n, v in change.items() if v is not None})
        differ = 0
        for key, change in changes.items():
            item = items[found[key]]
            merged = {**item.attributes, **change}
            attributes = {name: value for name, value in merged.items() if value is not None}
            _check_within(key, attributes, within)
            if attributes != item.attributes:
                self._learn(kinds)
                self._set(item, attributes, item.path, item.format)
                differ += 1
        if differ:
            seal(self.connection)
        return differ

    def remove(self, ids: Sequence[ItemId] | Ids) -> int:
        """Remove items with their attributes and vectors; unknown numbers are not counted."""
        return self.remove_items([*self.get(ids).values()])

    def remove_items(self, items: Sequence[Item]) -> int:
        """Remove items that this writer has read; how many. `restore` can bring them back."""
        seq = self._next_seq() if items else 0
        at = int(time.time())
        vectors: Iterable[bytes | None] = [None] * len(items)
        if self.file is not None:
            # As they are: what is damaged must go as well, and `restore` looks at it.
            vectors = map(bytes, self.file.read(np.array([item.id for item in items], np.int64)))
        self._many(
            _KEEP_REMOVED,
            [(seq, at, own, item.id) for own, item in zip(vectors, items, strict=True)],
        )
        self._take_out(items)
        return len(items)

    def restore(self, keys: Sequence[str], within: Filter | None = None) -> list[Item]:
        """Bring back what was removed under these keys, as new items: of a key the last one.

        Omits keys that another item has, those of which nothing is kept, and items that do not fit
        `within`.
        """
        items, vectors = self.restorable(keys)
        if within is not None:
            fit = [n for n, item in enumerate(items) if within.matches(item.attributes)]
            items, vectors = [items[n] for n in fit], vectors[fit]
        if items:
            kinds = dict(self._kinds)
            entries = [
                Entry(item.key, vector, item.sha256, item.attributes, item.path, item.format)
                for item, vector in zip(items, vectors, strict=True)
            ]
            for entry in entries:
                learn_kinds(kinds, entry.key, entry.attributes)
            self._learn(kinds)
            self._insert(entries, vectors)
            self._many("DELETE FROM removed WHERE id = ?", [(item.id,) for item in items])
            seal(self.connection)
        return [*self.get([*self.find([item.key for item in items]).values()]).values()]

    def _take_out(self, items: Sequence[Item]) -> None:
        if items:
            seq = self._next_seq()
            numbers = [(item.id,) for item in items]
            self._many("DELETE FROM items WHERE id = ?", numbers)
            self._many("DELETE FROM vectors WHERE id = ?", numbers)
            self._many("INSERT INTO tombstones VALUES (?, ?)", [(seq, item.id) for item in items])
            self.connection.execute(_GROW, (-len(items), -sum(item.id for item in items)))
            seal(self.connection)

    def forget_unused_names(self) -> None:
        """Forget attributes that no item has, and their kinds: for a catalogue that nobody has
        seen yet.
        """
        self._next_seq()
        self.connection.execute(_FORGET)
        seal(self.connection)

    def adopt_segment(
        self,
        name: str | None,
        seq: int,
        keep_removed_s: float = 0.0,
        file: VectorFile | None = None,
    ) -> None:
        """From now on segment `name` holds the items live at `seq`, if there were any. This counts
        as no write. Of what was removed by then, `restore` knows the last `keep_removed_s` seconds.

        With `file` the vectors are there from now on; it has those of that state.

        Raises: InvalidParameterError for a `seq` before that of the segment so far, or to come.
        """
        state = self.state()
        if not state.segment_seq <= seq <= state.seq:
            raise InvalidParameterError(
                f"Segment {name} is of state {seq}, the catalogue is between {state.segment_seq} "
                f"(its segment) and {state.seq}. Compact again."
            )
        self._upgrade()
        if file is not None:
            self._move_vectors(file)
        self.connection.execute("UPDATE state SET segment = ?, segment_seq = ?", (name, seq))
        self.connection.execute("DELETE FROM tombstones WHERE seq <= ?", (seq,))
        self.connection.execute("DROP TABLE IF EXISTS attributes")  # of an earlier version
        if self._keeps_removed():
            # Without a condition SQLite drops whole pages, in place of a row at a time.
            now = time.time()
            kept = (seq, now - keep_removed_s, now)  # a clock that was set back keeps nothing
            self.connection.execute("PRAGMA secure_delete = ON")  # also pages that become free
            if self._all(_KEPT, *kept):
                self.connection.execute(_ERASE, kept)
            else:
                self.connection.execute("DELETE FROM removed")
            self.connection.execute("PRAGMA secure_delete = FAST")
        seal(self.connection)

    def _insert(self, entries: Sequence[Entry], vectors: Embeddings) -> None:
        seq = self._next_seq()
        first = self.last_given() + 1
        numbered = [*enumerate(entries, first)]
        if self.file is not None:
            vectors = self.file.rounded(vectors)  # checksums are of what will be read
        self._many(_INSERT_ITEM, [_item_row(number, e, seq) for number, e in numbered])
        rows = _vector_rows(first, vectors)
        if self.file is not None and rows:
            self.file.write(np.arange(first, first + len(rows)), vectors)
            self.has_written = True
            rows = [(number, crc, None) for number, crc, _ in rows]
        self._many(_INSERT_VECTOR, rows)
        numbers = sum(number for number, _ in numbered)
        self.connection.execute(_GROW, (len(entries), numbers))

    def _set(self, item: Item, attributes: Attributes, path: str, format_: str) -> None:
        text = _attributes_text(attributes)
        content = bytes.fromhex(item.sha256)
        crc = item_checksum(item.id, item.key, path, content, format_, text)
        row = (path, format_, text, self._next_seq(), crc, item.id)
        self.connection.execute(_UPDATE_ITEM, row)

    def _learn(self, kinds: Mapping[str, AttributeKind]) -> None:
        """Store the names that are new."""
        for name in kinds.keys() - self._kinds.keys():
            self.connection.execute(
                "INSERT INTO names (name, kind, total) VALUES (?, ?, 0)", (name, kinds[name])
            )
            self._kinds[name] = kinds[name]

    def _next_seq(self) -> int:
        """The number of this write, counted when it first changes something."""
        if self._seq is None:
            self._upgrade()
            rows = self._all("UPDATE state SET seq = seq + 1 RETURNING seq")
            self._seq = int(rows[0][0])
        return self._seq

    def _move_vectors(self, file: VectorFile) -> None:
        """Add to `file` what came after it was written; and nobody looks for vectors elsewhere."""
        last = file.last
        while rows := self._all(_LATER_VECTORS, last):
            file.write(*self._arrays(rows))
            last = rows[-1][0]
        file.lengthen(self.last_given())
        file.sync()
        if self.file is None:
            for statement in VECTORS_OUT.strip().split("\n"):
                self.connection.execute(statement)
            self.connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self.connection.execute("UPDATE state SET vectors = ?", (file.name,))

    def _upgrade(self) -> None:
        """A file of an earlier version becomes one that earlier software refuses."""
        [(version,)] = self._all("PRAGMA user_version")
        if version < VECTORS_INSIDE:
            for statement in REMOVED:
                self.connection.execute(statement)
            self.connection.execute(f"PRAGMA user_version = {VECTORS_INSIDE}")

    def _many(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        self.connection.executemany(sql, rows)


def _change(change: Mapping[str, Any]) -> Mapping[str, Any]:
    """An empty list takes an attribute away, as None does."""
    return {**dict.fromkeys(change), **as_stored(change)}


def _check_within(
    key: str, attributes: Mapping[str, AttributeValue], within: Filter | None
) -> None:
    if within is not None and not within.matches(attributes):
        raise InvalidParameterError(
            f"Item {key!r:.200} with these attributes is outside the filter that you are limited "
            "to. Give it attributes that fit the filter."
        )


def _item_row(number: ItemId, entry: Entry, seq: int) -> tuple[Any, ...]:
    """The row of a new item."""
    content = bytes.fromhex(entry.sha256)
    attributes = _attributes_text(entry.attributes)
    crc = item_checksum(number, entry.key, entry.path, content, entry.format, attributes)
    return (number, entry.key, entry.path, content, entry.format, attributes, seq, seq, crc)


def _vector_rows(first: ItemId, vectors: Embeddings) -> list[tuple[int, int, bytes | None]]:
    """The rows of the vectors (N, D) of new items, whose numbers begin with `first`."""
    rows = enumerate((vector.tobytes() for vector in vectors), first)
    return [(number, vector_checksum(number, data), data) for number, data in rows]


def _attributes_text(attributes: Attributes) -> str:
    """Attributes as JSON."""
    return _ENCODER.encode(dict(attributes))


def _has_content(item: Item | None, entry: Entry) -> bool:
    return item is not None and item.sha256 == entry.sha256


def _is_equal(item: Item, entry: Entry) -> bool:
    return (item.path, item.format, item.attributes) == (
        entry.path,
        entry.format,
        dict(entry.attributes),
    )
