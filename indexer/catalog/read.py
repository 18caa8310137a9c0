"""One state of a catalogue, read inside one transaction."""

import functools
import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kinlens.embedder.errors import GalleryCorruptError
from kinlens.embedder.types import Embeddings, ItemId
from kinlens.indexer.attributes import Schema, as_stored, is_printable
from kinlens.indexer.catalog.entries import MAX_KEY, is_key
from kinlens.indexer.catalog.schema import (
    KEEPS_REMOVED,
    NAMES,
    RESTORE,
    StateRow,
    damaged,
    item_checksum,
    read_state,
    row_checksum,
)
from kinlens.indexer.catalog.vectors import VectorFile
from kinlens.indexer.types import Ids, Item, places_of
from kinlens.values import AttributeValue

# With its crc, an item is read whole: what an index says alone is not checked.
_ITEM = "SELECT id, key, path, sha256, format, attributes, crc FROM items"
_ROWS = """
SELECT json_group_array(json_array(id, key, path, hex(sha256), format, attributes, crc)),
    (SELECT seq FROM state) FROM items WHERE id IN """
_ITEMS = f"{_ITEM} WHERE id IN (SELECT value FROM json_each(?))"  # noqa: S608 (two constants)
_BY_KEY = f"{_ITEM} WHERE key IN (SELECT value FROM json_each(?))"  # noqa: S608
_BY_CONTENT = f"{_ITEM} WHERE sha256 = ? ORDER BY id LIMIT 1"
_VECTORS = "SELECT id, crc, vector FROM vectors"
_REMOVED = "SELECT id, key, path, sha256, format, attributes, crc FROM removed"
_REMOVED_BY_KEY = f"""
{_REMOVED} WHERE id IN (
    SELECT max(id) FROM removed WHERE key IN (SELECT value FROM json_each(?)) GROUP BY key
) AND key NOT IN (SELECT key FROM items) ORDER BY id
"""  # noqa: S608 (a constant)
_REMOVED_VECTORS = """
SELECT id, vector_crc, vector FROM removed WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id
"""
_REMOVED_CONTENT = "SELECT 1 FROM removed WHERE sha256 = ? LIMIT 1"
_SOME_VECTORS = """
SELECT id, crc, vector FROM vectors WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id
"""
# Without INDEXED BY, SQLite reads all items to have them in order, however few have changed.
_ADDED = """
SELECT id, crc, vector FROM vectors WHERE id IN (
    SELECT id FROM items INDEXED BY items_by_change WHERE changed_seq > ?1 AND added_seq > ?1
) ORDER BY id
"""
_CHANGED = f"""
{_ITEM} INDEXED BY items_by_change WHERE changed_seq > ? ORDER BY id
"""
_COUNT_CHANGED = "SELECT count(*) FROM items INDEXED BY items_by_change WHERE changed_seq > ?"
_REMOVED_IN_VAIN = """
SELECT items.id FROM tombstones CROSS JOIN items ON items.id = tombstones.id
WHERE tombstones.seq > ? LIMIT 1
"""
_COUNTS = "SELECT (SELECT count(*) FROM items), (SELECT count(*) FROM vectors), size FROM state"
_LAST_KEY = "\U0010ffff" * MAX_KEY
_LAST_NUMBER = 2**63 - 1
_NUMBERS_AT_ONCE = 1_000_000  # item numbers in one answer of SQLite, which takes 1e9 bytes at most
_DECODE = json.JSONDecoder().raw_decode  # json.loads without its questions
_AS_VARIABLES = 50  # numbers that SQLite is given one by one: faster than as JSON
_FROM_ID = "SELECT id FROM items WHERE id > ? ORDER BY id LIMIT ? OFFSET ?"


Base = tuple[str | None, int]
"""The name of a segment, None for none, and the `seq` of the state that it was made of."""


class State(NamedTuple):
    """`seq` counts writes, `size` items; `segment` holds the items live at `segment_seq`."""

    seq: int
    size: int
    segment: str | None
    segment_seq: int

    def is_before(self, other: "State") -> bool:
        """Whether a write, or a compaction, lies between this and `other`."""
        return self.seq < other.seq or self.segment_seq < other.segment_seq

    @property
    def base(self) -> "Base":
        """Its segment, and the state whose items that holds; earlier removals are forgotten."""
        return self.segment, self.segment_seq


Attributes = Mapping[str, AttributeValue]

Row = tuple[str, Attributes, bytes]
"""What a search needs of an item: key, attributes, sha256."""


class CatalogView:
    """Everything in one view is of one state. It cannot be used after its block has ended.

    Each row is compared with its checksum when it is read. Every method raises GalleryCorruptError
    for what does not fit, and sqlite3.Error.
    """

    __slots__ = ("connection", "file")

    def __init__(self, connection: sqlite3.Connection, file: VectorFile | None = None) -> None:
        """`file` has the vectors; None for a catalogue of an earlier version, which has them."""
        self.connection = connection
        self.file = file

    def state(self) -> State:
        """Where the catalogue stands."""
        return State(*self._state()[:4])

    @property
    def file_name(self) -> str | None:
        """The name of the file that has the vectors; None if the catalogue has them."""
        return next(iter(self._state().vectors), None)

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self._state().dim

    def schema(self) -> Schema:
        """Every attribute that was ever used, with its kind."""
        return dict(sorted((name, kind) for _, name, kind, _ in self._names()))

    def get(self, ids: Sequence[ItemId] | Ids) -> dict[ItemId, Item]:
        """The items with these numbers; unknown numbers are left out."""
        return {item.id: item for item in self._items(self._all(_ITEMS, _json_ids(ids)))}

    def rows(self, ids: Sequence[ItemId], seq: int) -> dict[ItemId, Row] | None:
        """What a search needs of the items with these numbers; unknown numbers are left out. It
        is one statement, so it needs no transaction; None if the catalogue is not at `seq`, or
        there is none of them.
        """
        # One text for all rows: sqlite3 releases Python's lock at each row and must win it back.
        try:
            if len(ids) <= _AS_VARIABLES:
                [(text, at)] = self._all(f"{_ROWS}({','.join('?' * len(ids))})", *ids)
            else:
                [(text, at)] = self._all(f"{_ROWS}(SELECT value FROM json_each(?))", str(ids))  # noqa: S608
        except sqlite3.OperationalError:
            return None  # a text that is none: whoever reads it row by row says which
        rows = [(*row[:3], bytes.fromhex(row[3]), *row[4:]) for row in _DECODE(text)[0]]
        if not rows or at != seq:
            return None
        attributes = self._attributes_of(rows)
        return {row[0]: (row[1], own, row[3]) for row, own in zip(rows, attributes, strict=True)}

    def known(self, ids: Sequence[ItemId] | Ids) -> list[Item]:
        """The items with these numbers, in this order. Raises: GalleryCorruptError for a number
        that an index alone knows.
        """
        found = self.get(ids)
        numbers = [int(number) for number in ids]
        missing = [number for number in numbers if number not in found]
        if missing:
            raise damaged(self.connection, f"item {missing[0]} is indexed and has no row")
        return [found[number] for number in numbers]

    def find(self, keys: Sequence[str]) -> dict[str, ItemId]:
        """The numbers of the items with these keys; unknown keys are left out."""
        # What cannot be a key is not asked for: SQLite reads JSON texts up to a NUL alone.
        listed = json.dumps([key for key in keys if is_key(key)])
        return {row[1]: row[0] for row in self._all(_BY_KEY, listed) if self._is_whole(row)}

    def content(self, sha256s: Sequence[str]) -> dict[str, ItemId]:
        """By sha256 the lowest number of an item with this content, where there is one."""
        found: dict[str, ItemId] = {}
        for sha256 in sha256s:
            for row in self._all(_BY_CONTENT, bytes.fromhex(sha256)):
                self._is_whole(row)
                found[sha256] = row[0]
        return found

    def vectors(self, ids: Sequence[ItemId] | Ids) -> Embeddings:
        """The vectors (N, D) of known items, in the order asked for.

        Raises: GalleryCorruptError for an unknown number.
        """
        asked = np.asarray(ids, dtype=np.int64)
        known, vectors = self._arrays(self._all(_SOME_VECTORS, _json_ids(asked)))
        places = places_of(asked, known)
        if (places < 0).any():
            raise damaged(self.connection, f"item {asked[places < 0][0]} has no vector")
        return vectors[places]

    def live_ids(self) -> Ids:
        """The numbers of all items, ascending."""
        # The table of vectors is small where they are in a file of their own.
        ids = self._numbers("items" if self.file is None else "vectors", ("id",), (-1,))
        self._check_numbers(len(ids), int(ids.sum()))
        return ids

    def added_since(self, seq: int) -> tuple[Ids, Embeddings]:
        """Items added after the write `seq` and still there: numbers ascending, vectors (N, D)."""
        return self._arrays(self._all(_ADDED, seq))

    def removed_since(self, seq: int) -> Ids:
        """The numbers of items removed after the write `seq`, ascending.

        Only writes since that of the segment are known.
        """
        for (number,) in self._all(_REMOVED_IN_VAIN, seq):
            raise damaged(self.connection, f"item {number} is there although it was removed")
        return self._numbers("tombstones", ("seq", "id"), (seq, _LAST_NUMBER))

    def removed_count(self) -> int:
        """How many items were removed since the segment was made."""
        [(count,)] = self._all("SELECT count(*) FROM tombstones")
        return int(count)

    def restorable(self, keys: Sequence[str]) -> tuple[list[Item], Embeddings]:
        """What was removed under these keys and can be brought back, with its vectors (N, D): of a
        key the last item, unless another one has the key now.
        """
        if not self._keeps_removed():
            return [], np.empty((0, self.dim), np.float32)
        listed = json.dumps([key for key in keys if is_key(key)])
        items = self._items(self._all(_REMOVED_BY_KEY, listed))
        numbers = _json_ids([item.id for item in items])
        return items, self._arrays(self._all(_REMOVED_VECTORS, numbers))[1]

    def has_removed(self) -> bool:
        """Whether anything is kept of what was removed."""
        return self._keeps_removed() and bool(self._all("SELECT 1 FROM removed LIMIT 1"))

    def removed_contents(self, sha256s: Sequence[str]) -> set[str]:
        """Which of these contents an item has that can be brought back."""
        if not self._keeps_removed():
            return set()
        return {one for one in sha256s if self._all(_REMOVED_CONTENT, bytes.fromhex(one))}

    def _keeps_removed(self) -> bool:
        """False for a file of an earlier version that has not been changed since."""
        [(version,)] = self._all("PRAGMA user_version")
        return version in KEEPS_REMOVED

    def changed_since(self, seq: int) -> Ids:
        """The numbers of items added after the write `seq`, or with other attributes since."""
        columns = ("changed_seq", "added_seq", "id")
        start = (seq, _LAST_NUMBER, _LAST_NUMBER)
        return self._numbers("items INDEXED BY items_by_change", columns, start)

    def attributes_since(self, seq: int) -> list[tuple[ItemId, Attributes]]:
        """Items added after the write `seq`, or with other attributes since; ascending."""
        rows = self._all(_CHANGED, seq)
        return [*zip((row[0] for row in rows), self._attributes_of(rows), strict=True)]

    def count_changed(self, seq: int) -> int:
        """How many items were added after the write `seq`, or have other attributes since."""
        [(count,)] = self._all(_COUNT_CHANGED, seq)
        return int(count)

    def ids_from(self, offset: int, limit: int, after: ItemId = -1) -> Ids:
        """The numbers above `after` of at most `limit` items, ascending, without the first
        `offset`.
        """
        rows = self._all(_FROM_ID, after, limit, offset)
        return np.array([number for (number,) in rows], dtype=np.int64)

    def formats(self) -> dict[str, int]:
        """How many items have each format."""
        return dict(self._all("SELECT format, count(*) FROM items GROUP BY format ORDER BY format"))

    def count_contents(self) -> int:
        """How many different contents the items have."""
        [(count,)] = self._all("SELECT count(*) FROM (SELECT DISTINCT sha256 FROM items)")
        return int(count)

    def last_given(self) -> ItemId:
        """The highest number that an item ever had; 0 if there was none."""
        # AUTOINCREMENT keeps it, also when its item is gone.
        rows = self._all("SELECT seq FROM sqlite_sequence WHERE name = 'items'")
        return int(rows[0][0]) if rows else 0

    def last_id(self) -> ItemId | None:
        """The highest number of an item; None if there is none."""
        [(number,)] = self._all("SELECT max(id) FROM items")
        return None if number is None else int(number)

    def count_after(self, number: ItemId) -> int:
        """How many items have a higher number."""
        [(count,)] = self._all("SELECT count(*) FROM items WHERE id > ?", number)
        return int(count)

    def with_prefix(self, prefix: str) -> Ids:
        """The numbers of the items whose keys begin with `prefix`, ascending."""
        if not is_printable(prefix):  # no key has it; SQLite reads texts up to a NUL alone
            return np.empty(0, np.int64)
        own = [*self.find([prefix]).values()]
        found = self._numbers(
            "items INDEXED BY items_by_key", ("key",), (prefix,), (prefix + _LAST_KEY,)
        )
        return np.sort(np.append(found, np.array(own, np.int64)))

    def iter_vectors(self, batch: int = 4096) -> Iterator[tuple[Ids, Embeddings]]:
        """Numbers (B,) and vectors (B, D) of all items, by ascending number."""
        for rows in self._pages(_VECTORS, batch):
            yield self._arrays(rows)

    def attributes(self, batch: int = 4096) -> Iterator[tuple[Ids, Sequence[Attributes]]]:
        """Numbers (B,) and attributes of all items, by ascending number."""
        for rows in self._pages(_ITEM, batch):
            yield np.array([row[0] for row in rows], np.int64), self._attributes_of(rows)

    def items(self, batch: int = 1000) -> Iterator[Item]:
        """Every item, by ascending number."""
        for rows in self._pages(_ITEM, batch):
            yield from self._items(rows)

    def check(self) -> None:
        """Read the whole file. Raises: GalleryCorruptError if its parts do not fit together."""
        verdict = self._all("PRAGMA integrity_check(1)")[0][0]
        [(items, vectors, size)] = self._all(_COUNTS)
        if verdict == "ok" and not items == vectors == size:
            verdict = f"it has {items:,} items, {vectors:,} vectors and a size of {size:,}"
        if verdict != "ok":
            raise damaged(self.connection, verdict)
        self.schema()
        self.live_ids()
        self.removed_since(-1)
        for _ in self.iter_vectors():
            pass
        for _ in self.attributes():
            pass
        if self._keeps_removed():
            for [number] in self._all("SELECT id FROM removed"):
                self._items(self._all(f"{_REMOVED} WHERE id = ?", number))
                self._arrays(self._all(_REMOVED_VECTORS, _json_ids([number])))

    def _check_numbers(self, count: int, total: int) -> None:
        """These are the numbers of all items."""
        row = self._state()
        if (count, total) != (row.size, row.numbers):
            raise damaged(self.connection, f"{count:,} of {row.size:,} items were found")

    def _state(self) -> StateRow:
        row = read_state(self.connection)
        if row is None or not _is_whole_state(row):
            raise damaged(self.connection, "its state does not fit its checksum")
        return row

    def _names(self) -> list[Any]:
        rows = self._all(NAMES)
        if row_checksum(rows) != self._state().names:
            raise damaged(self.connection, "the names of attributes do not fit their checksum")
        return rows

    def _items(self, rows: Sequence[tuple[Any, ...]]) -> list[Item]:
        return [
            Item(number, key, path, sha256.hex(), values, format_)
            for (number, key, path, sha256, format_, _, _), values in zip(
                rows, self._attributes_of(rows), strict=True
            )
        ]

    def _attributes_of(self, rows: Sequence[tuple[Any, ...]]) -> list[dict[str, AttributeValue]]:
        """Of rows that are whole."""
        for row in rows:
            self._is_whole(row)
        # One text is parsed twice as fast as many.
        text = ",".join([row[5] for row in rows])
        found: list[dict[str, AttributeValue]] = _DECODE(f"[{text}]")[0]
        if "[" in text:
            return [dict(as_stored(own)) for own in found]
        return found

    def _is_whole(self, row: tuple[Any, ...]) -> bool:
        """True. Raises: GalleryCorruptError if the row does not fit its checksum."""
        try:
            if item_checksum(*row[:6]) == row[6]:
                return True
        except TypeError:
            pass  # not even bytes
        raise damaged(self.connection, f"item {row[0]} does not fit its checksum")

    def _numbers(
        self,
        source: str,
        columns: Sequence[str],
        after: Sequence[int | str],
        up_to: Sequence[int | str] = (),
    ) -> Ids:
        """The numbers of the rows of a table whose `columns`, by which it is ordered, are above
        `after` and at most `up_to`; ascending.
        """
        order, marks = ", ".join(columns), ", ".join("?" * len(columns))
        bound = f" AND ({order}) <= ({marks})" if up_to else ""
        rows = f"FROM {source} WHERE ({order}) > ({marks}){bound} ORDER BY {order} LIMIT "
        found: list[Ids] = []
        while True:
            # One text of many numbers: SQLite and NumPy make and read it three times as fast as
            # Python makes one object for each row.
            [(text, count)] = self._all(
                f"SELECT group_concat(id), count(*) FROM (SELECT id {rows}{_NUMBERS_AT_ONCE})",  # noqa: S608
                *after,
                *up_to,
            )
            found.append(self._listed(text, count))
            if count < _NUMBERS_AT_ONCE:
                return np.sort(np.concatenate(found))
            last = f"SELECT {order} {rows}1 OFFSET {_NUMBERS_AT_ONCE - 1}"
            [after] = self._all(last, *after, *up_to)

    def _listed(self, text: str | None, count: int) -> Ids:
        try:
            ids = np.fromstring(text or "", dtype=np.int64, sep=",")
        except (ValueError, DeprecationWarning):
            ids = np.empty(0, np.int64)
        if len(ids) != count:
            raise damaged(self.connection, "it has item numbers that are no numbers")
        return ids

    def _all(self, sql: str, *parameters: Any) -> list[Any]:
        return self.connection.execute(sql, parameters).fetchall()

    def _pages(self, select: str, size: int) -> Iterator[list[Any]]:
        # Pages, not one cursor: a statement left unfinished would keep its transaction open.
        last, count, total = -1, 0, 0
        while rows := self._all(f"{select} WHERE id > ? ORDER BY id LIMIT ?", last, size):
            yield rows
            count += len(rows)
            total += sum(row[0] for row in rows)
            last = max(last + 1, rows[-1][0])
        self._check_numbers(count, total)

    def _arrays(self, rows: Sequence[tuple[int, int, Any]]) -> tuple[Ids, Embeddings]:
        if not rows:
            return np.empty(0, np.int64), np.empty((0, self.dim), np.float32)
        numbers, checksums, stored = zip(*rows, strict=True)
        blobs: Iterable[Any] = stored
        ids = np.array(numbers, np.int64)
        vectors: Embeddings | None = None
        if self.file is not None and stored[0] is None:
            blobs = vectors = self.file.read(ids)
        try:
            found = (*map(zlib.crc32, blobs, numbers),)
        except TypeError:
            found = ()  # where a bit of the type has flipped it is not even bytes
        if found != checksums:
            place = next(n for n, crc in enumerate(checksums) if found[n : n + 1] != (crc,))
            what = f"the vector of item {numbers[place]} does not fit its checksum"
            if self.file is not None and vectors is not None:
                raise GalleryCorruptError(
                    f"{self.file.path} is damaged: {what}. {RESTORE}, or remove the item and add "
                    "its image again."
                )
            raise damaged(self.connection, what)
        if vectors is None:
            vectors = np.frombuffer(bytearray().join(stored), np.float32).reshape(len(rows), -1)
        return ids, vectors


@functools.lru_cache(maxsize=64)
def _is_whole_state(row: StateRow) -> bool:
    """Remembered, for every search asks, and nearly always of the row that the last one read."""
    return row.checksum == row.crc


def _json_ids(ids: Sequence[ItemId] | Ids) -> str:
    return json.dumps([int(number) for number in ids])
