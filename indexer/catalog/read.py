"""One state of a catalogue, read inside one transaction."""

import functools
import json
import math
import sqlite3
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import GalleryCorruptError
from kinlens.embedder.sources.names import by_key, spellings
from kinlens.embedder.types import Embeddings, ItemId
from kinlens.indexer.catalog.schema import (
    NAMES,
    State,
    damaged,
    item_checksums,
    read_state,
    row_checksum,
)
from kinlens.indexer.catalog.vectors import VectorFile, find_sorted
from kinlens.indexer.entries import (
    MAX_KEY,
    NO_IMAGE,
    Item,
    Schema,
    has_image,
    is_key,
    is_printable,
)
from kinlens.indexer.types import RESTORE, Ids
from kinlens.values import AttributeValue, plain_attributes

# Always reads complete rows with their crc: values from a covering index would not be verified.
_COLUMNS = "id, key, path, sha256, format, attributes, crc"
_ITEM = f"SELECT {_COLUMNS} FROM living"  # noqa: S608 (a constant)
_ROWS = """
SELECT json_group_array(json_array(id, key, path, hex(sha256), format, attributes, crc)),
    max(changed_seq) FROM living WHERE id IN """
_ITEMS = f"{_ITEM} WHERE id IN (SELECT value FROM json_each(?))"  # noqa: S608 (two constants)
_BY_KEY = f"{_ITEM} WHERE key IN (SELECT value FROM json_each(?))"  # noqa: S608
_BY_CONTENT = """
SELECT id, key, path, sha256, format, attributes, living.crc, vectors.crc, vector
FROM living JOIN vectors USING (id) WHERE sha256 = ? ORDER BY id LIMIT 1
"""
_KEPT = """
SELECT 1 FROM living WHERE sha256 = ? AND format != ?
UNION ALL SELECT 1 FROM removed WHERE sha256 = ? AND at IS NOT NULL AND format != ? LIMIT 1
"""
_VECTORS = "SELECT id, vectors.crc, vector FROM living JOIN vectors USING (id)"
_RESTORABLE = f"""
SELECT {_COLUMNS} FROM removed WHERE id IN (
    SELECT max(id) FROM removed
    WHERE at IS NOT NULL AND key IN (SELECT value FROM json_each(?)) GROUP BY key
) AND NOT EXISTS (SELECT 1 FROM living WHERE living.key = removed.key) ORDER BY id
"""  # noqa: S608
_REMOVED = f"SELECT {_COLUMNS} FROM removed WHERE id IN (SELECT value FROM json_each(?))"  # noqa: S608
_REMOVED_KEYS = """
SELECT DISTINCT key FROM removed
WHERE seq > ? AND at IS NOT NULL AND NOT EXISTS (SELECT 1 FROM living WHERE key = removed.key)
"""
_SOME_VECTORS = """
SELECT id, crc, vector FROM vectors WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id
"""
# The plus keeps SQLite from reading all items in order, even if few have changed.
_ADDED = """
SELECT id, vectors.crc, vector, sha256 FROM living JOIN vectors USING (id)
WHERE changed_seq > ?1 AND added_seq > ?1 ORDER BY +id
"""
_CHANGED = f"{_ITEM} WHERE changed_seq > ? ORDER BY +id"
_COUNTS = """
SELECT (SELECT count(*) FROM living), (SELECT count(*) FROM living JOIN vectors USING (id)), size
FROM state
"""
# Reads only the index of contents; the vectors are compared afterwards.
_EQUAL_IMAGES = """
SELECT id, sha256 FROM living WHERE sha256 IN (
    SELECT sha256 FROM living GROUP BY sha256 HAVING count(*) > 1
) ORDER BY sha256
"""
_LAST_KEY = "\U0010ffff" * MAX_KEY
_MAX_ID = 2**63 - 1
_IDS_PER_QUERY = 1_000_000  # item ids in one text of SQLite, which is limited to 1e9 bytes
_DECODE = json.JSONDecoder().raw_decode  # json.loads without its checks
_AS_VARIABLES = 50  # ids up to which separate SQL variables are faster than JSON
_FROM_ID = "SELECT id FROM living WHERE id > ? ORDER BY id LIMIT ? OFFSET ?"


Attributes = Mapping[str, AttributeValue]

Row = tuple[str, Attributes, bytes, bool]
"""What a search needs of an item: key, attributes, sha256, and whether it has an image."""


class CatalogView:
    """A consistent view of one state. It cannot be used after its `with` block has ended.

    Each row is verified with its checksum when it is read. Every method may raise
    GalleryCorruptError for damaged rows, and sqlite3.Error.
    """

    __slots__ = ("_state", "connection", "file")

    def __init__(self, connection: sqlite3.Connection, file: VectorFile | None = None) -> None:
        """`file` contains the vectors; None if an earlier version has them in the catalogue."""
        self.connection = connection
        self.file = file
        self._state: State | None = None

    def state(self) -> State:
        """The state, verified when it is first read."""
        if self._state is None:
            state = read_state(self.connection)
            if state is None or not _is_whole_state(state):
                raise damaged(self.connection, "its state does not fit its checksum")
            self._state = state
        return self._state

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self.state().dim

    def schema(self) -> Schema:
        """Every attribute that was ever used, with its type."""
        rows = self._all(NAMES)
        if row_checksum(rows) != self.state().names:
            raise damaged(self.connection, "the names of attributes do not fit their checksum")
        return dict(sorted((name, type_) for _, name, type_, _ in rows))

    def get(self, ids: Sequence[ItemId] | Ids) -> dict[ItemId, Item]:
        """The items with these ids; unknown ids are omitted."""
        rows = self._all(_ITEMS, _json_ids(ids)) if len(ids) else ()
        return {item.id: item for item in self._items(rows)}

    def rows(self, ids: Sequence[ItemId], seq: int) -> dict[ItemId, Row] | None:
        """The columns that a search needs of the items with these ids; unknown ids are omitted.

        A single statement, so it needs no transaction: the rows are those of the write `seq`, also
        if others followed it. None if one has changed since, or if there are none of these items.
        """
        # One text for all rows: sqlite3 releases the GIL at each row and has to reacquire it.
        try:
            if len(ids) <= _AS_VARIABLES:
                [(text, changed)] = self._all(f"{_ROWS}({','.join('?' * len(ids))})", *ids)
            else:
                [(text, changed)] = self._all(
                    f"{_ROWS}(SELECT value FROM json_each(?))",  # noqa: S608
                    str(ids),
                )
        except sqlite3.OperationalError:
            return None  # invalid text; the caller then reads row by row and names the item
        rows = [(*row[:3], bytes.fromhex(row[3]), *row[4:]) for row in _DECODE(text)[0]]
        # A damaged one may be no number.
        if not rows or not isinstance(changed, int) or changed > seq:
            return None
        attributes = self._attributes_of(rows)
        return {
            row[0]: (row[1], own, row[3], has_image(row[2], row[4]))
            for row, own in zip(rows, attributes, strict=True)
        }

    def known(self, ids: Sequence[ItemId] | Ids) -> list[Item]:
        """The items with these ids, in this order.

        Raises: GalleryCorruptError for an id that is in an index but has no row.
        """
        found = self.get(ids)
        wanted = [int(item_id) for item_id in ids]
        missing = [item_id for item_id in wanted if item_id not in found]
        if missing:
            raise damaged(self.connection, f"item {missing[0]} is indexed and has no row")
        return [found[item_id] for item_id in wanted]

    def by_key(self, keys: Sequence[str]) -> dict[str, Item]:
        """The items with these keys, in any Unicode form; unknown keys are omitted."""
        items = self._items(self._all(_BY_KEY, _json_keys(keys)))
        return by_key(keys, {item.key: item for item in items})

    def vectors_by_content(self, sha256s: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """The vector (D,) of the oldest item with each of these contents; unknown ones omitted."""
        found: dict[str, tuple[int, int, Any]] = {}
        for sha256 in sha256s:
            for *item, crc, vector in self._all(_BY_CONTENT, bytes.fromhex(sha256)):
                self._check_row(item)
                found[sha256] = item[0], crc, vector
        return dict(zip(found, self.verified([*found.values()])[1], strict=True))

    def vectors(self, ids: Sequence[ItemId] | Ids) -> Embeddings:
        """The vectors (N, D) of known items, in the given order.

        Raises: GalleryCorruptError for an unknown id.
        """
        wanted = np.asarray(ids, dtype=np.int64)
        rows = self._all(_SOME_VECTORS, _json_ids(wanted)) if len(wanted) else ()
        known, vectors = self.verified(rows)
        positions = find_sorted(wanted, known)
        if (positions < 0).any():
            raise damaged(self.connection, f"item {wanted[positions < 0][0]} has no vector")
        return vectors[positions]

    def live_ids(self) -> Ids:
        """The ids of all items, ascending."""
        ids = self._ids("living", ("id",), (-1,))
        self._check_ids(len(ids), int(ids.sum()))
        return ids

    def added_since(self, seq: int) -> tuple[Ids, Embeddings, list[bytes]]:
        """Ids (N,), ascending, vectors (N, D) and sha256 of items added after the write `seq`."""
        rows = self._all(_ADDED, seq)
        return *self.verified([row[:3] for row in rows]), [row[3] for row in rows]

    def equal_images(self) -> tuple[Ids, Ids]:
        """The items that share an image with another one, by sha256.

        Their ids (N,), and a number (N,) that items with the same image share.
        """
        ids, images, last, image = array("q"), array("q"), b"", 0
        for item_id, sha256 in self.connection.execute(_EQUAL_IMAGES):
            image += sha256 != last
            last = sha256
            ids.append(item_id)
            images.append(image)
        return np.array(ids, np.int64), np.array(images, np.int64)

    def removed_since(self, seq: int) -> Ids:
        """The ids of items removed after the write `seq`, ascending.

        `seq` must not be before `segment_seq`: compactions erase items removed before.
        """
        return self._ids("removed", ("seq", "id"), (seq, _MAX_ID))

    def added_count(self) -> int:
        """Number of items added since the segment was built."""
        [(count,)] = self._all(
            "SELECT count(*) FROM living WHERE added_seq > (SELECT segment_seq FROM state)"
        )
        return int(count)

    def removed_count(self) -> int:
        """Number of items removed since the segment was built."""
        since = self.state().segment_seq
        [(count,)] = self._all("SELECT count(*) FROM removed WHERE seq > ?", since)
        return int(count)

    def restorable(self, keys: Sequence[str]) -> tuple[list[Item], Embeddings]:
        """The last removed item of each of these keys that can be restored, and its vectors (N, D).

        Omits keys that another item has by now.
        """
        items = self._items(self._all(_RESTORABLE, _json_keys(keys)))
        left = {*self._with_vectors(np.array([item.id for item in items], np.int64)).tolist()}
        items = [item for item in items if item.id in left]
        return items, self.vectors([item.id for item in items])

    def removed_ids(self, kept: tuple[float, float] = (-math.inf, math.inf)) -> Ids:
        """The ids of restorable items, ascending.

        kept: only items removed after the first and until the second of these Unix times.
        """
        rows = self._all("SELECT id FROM removed WHERE at > ? AND at <= ?", *kept)
        return self._with_vectors(np.sort(np.array([item_id for (item_id,) in rows], np.int64)))

    def erasable(self, kept: tuple[float, float]) -> Ids:
        """The ids of the removed items that the segment does not contain, ascending.

        kept: as for `removed_ids`, which stay.
        """
        end = (self.state().segment_seq, _MAX_ID)
        removed = self._ids("removed", ("seq", "id"), (-1, -1), end)
        return np.setdiff1d(removed, self.removed_ids(kept), assume_unique=True)

    def _with_vectors(self, ids: Ids) -> Ids:
        """The given items without those whose vector was erased, while their rows are not yet."""
        return ids if self.file is None else ids[self.file.row_ids.rows_of(ids) >= 0]

    def removed_keys(self, seq: int) -> list[str]:
        """The keys of items removed after the write `seq` that no item has now, except those that
        a compaction has erased.
        """
        return [key for (key,) in self._all(_REMOVED_KEYS, seq)]

    def has_removed(self) -> bool:
        """Whether any removed item can be restored."""
        last = self._all("SELECT id FROM removed WHERE at >= 0 ORDER BY at DESC, id DESC LIMIT 1")
        return len(self._with_vectors(np.array(last, np.int64).reshape(-1))) > 0

    def kept_contents(self, sha256s: Sequence[str]) -> set[str]:
        """The given contents that belong to an item with an image, or to a removed one that can be
        restored.
        """
        return {one for one in sha256s if self._all(_KEPT, *[bytes.fromhex(one), NO_IMAGE] * 2)}

    def changed_since(self, seq: int) -> Ids:
        """The ids of items added or changed after the write `seq`, ascending."""
        columns = ("changed_seq", "added_seq", "id")
        start = (seq, _MAX_ID, _MAX_ID)
        return self._ids("living", columns, start)

    def attributes_since(self, seq: int) -> list[tuple[ItemId, Attributes]]:
        """Id and attributes of items added or changed after the write `seq`, ascending."""
        rows = self._all(_CHANGED, seq)
        return [*zip((row[0] for row in rows), self._attributes_of(rows), strict=True)]

    def ids_from(self, offset: int, limit: int, after: ItemId = -1) -> Ids:
        """Up to `limit` ids above `after`, ascending, without the first `offset`."""
        rows = self._all(_FROM_ID, after, limit, offset)
        return np.array([item_id for (item_id,) in rows], dtype=np.int64)

    def formats(self) -> dict[str, int]:
        """Number of items per format."""
        return dict(self._all("SELECT format, count(*) FROM living GROUP BY 1 ORDER BY 1"))

    def count_contents(self) -> int:
        """Number of distinct contents."""
        [(count,)] = self._all("SELECT count(*) FROM (SELECT DISTINCT sha256 FROM living)")
        return int(count)

    def last_given(self) -> ItemId:
        """The highest id ever assigned; 0 if there was none."""
        # AUTOINCREMENT keeps it after the item was removed.
        rows = self._all("SELECT seq FROM sqlite_sequence WHERE name = 'items'")
        return int(rows[0][0]) if rows else 0

    def last_id(self) -> ItemId | None:
        """The highest id of an item; None if there are no items."""
        [(item_id,)] = self._all("SELECT max(id) FROM living")
        return None if item_id is None else int(item_id)

    def count_after(self, item_id: ItemId) -> int:
        """Number of items with a higher id."""
        [(count,)] = self._all("SELECT count(*) FROM living WHERE id > ?", item_id)
        return int(count)

    def with_prefix(self, prefix: str) -> Ids:
        """The ids of the items whose keys start with `prefix`, ascending."""
        if not is_printable(prefix):  # no key matches; SQLite reads texts only up to a NUL
            return np.empty(0, np.int64)
        own = [item.id for item in self.by_key([prefix]).values()]
        found = [
            self._ids("living", ("key",), (start,), (start + _LAST_KEY,))
            for start in spellings(prefix)
        ]
        return np.unique(np.concatenate([*found, np.array(own, np.int64)]))

    def iter_vectors(self, batch: int = 4096) -> Iterator[tuple[Ids, Embeddings]]:
        """Batches of ids (B,) and vectors (B, D) of all items, by ascending id."""
        for rows in self._pages(_VECTORS, batch):
            yield self.verified(rows)

    def vectors_of(self, ids: Ids, batch: int = 4096) -> Iterator[tuple[Ids, Embeddings]]:
        """Batches of ids (B,) and vectors (B, D) of known items, removed or not."""
        for start in range(0, len(ids), batch):
            some = ids[start : start + batch]
            yield some, self.vectors(some)

    def attributes(self, batch: int = 4096) -> Iterator[tuple[Ids, Sequence[Attributes]]]:
        """Batches of ids (B,) and attributes of all items, by ascending id."""
        for rows in self._pages(_ITEM, batch):
            yield np.array([row[0] for row in rows], np.int64), self._attributes_of(rows)

    def items(self, batch: int = 1000) -> Iterator[Item]:
        """Every item, by ascending id."""
        for rows in self._pages(_ITEM, batch):
            yield from self._items(rows)

    def check(self) -> None:
        """Read and verify the whole file. Raises: GalleryCorruptError."""
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
        kept = self.removed_ids()
        for start in range(0, len(kept), 1000):
            some = _json_ids(kept[start : start + 1000])
            self._items(self._all(_REMOVED, some))
            # A file of an earlier version has vectors of removed items elsewhere, until a write.
            self.verified(self._all(_SOME_VECTORS, some))

    def _check_ids(self, count: int, total: int) -> None:
        """Check the number and the sum of ids of all items. Raises: GalleryCorruptError."""
        state = self.state()
        if (count, total) != (state.size, state.numbers):
            raise damaged(self.connection, f"{count:,} of {state.size:,} items were found")

    def _items(self, rows: Sequence[tuple[Any, ...]]) -> list[Item]:
        return [
            Item(item_id, key, path, sha256.hex(), values, format_)
            for (item_id, key, path, sha256, format_, _, _), values in zip(
                rows, self._attributes_of(rows), strict=True
            )
        ]

    def _attributes_of(self, rows: Sequence[tuple[Any, ...]]) -> list[dict[str, AttributeValue]]:
        """Parse the attributes of rows after verifying their checksums."""
        if not _are_whole(rows):
            for row in rows:
                self._check_row(row)
        # Parsing one text takes half the time of parsing many.
        text = ",".join([row[5] for row in rows])
        found: list[dict[str, AttributeValue]] = _DECODE(f"[{text}]")[0]
        if "[" in text:
            return [dict(plain_attributes(own)) for own in found]
        return found

    def _check_row(self, row: Sequence[Any]) -> None:
        """Verify the checksum of a row. Raises: GalleryCorruptError."""
        if not _are_whole([row]):
            raise damaged(self.connection, f"item {row[0]} does not fit its checksum")

    def _ids(
        self,
        source: str,
        columns: Sequence[str],
        after: Sequence[int | str],
        up_to: Sequence[int | str] = (),
    ) -> Ids:
        """The ids, ascending, of the rows of a table with `after` < `columns` <= `up_to`.

        The table must have an index on `columns`.
        """
        order, marks = ", ".join(columns), ", ".join("?" * len(columns))
        bound = f" AND ({order}) <= ({marks})" if up_to else ""
        rows = f"FROM {source} WHERE ({order}) > ({marks}){bound} ORDER BY {order} LIMIT "
        found: list[Ids] = []
        while True:
            # Writing and parsing one long text takes a third of the time of one Python object per
            # row.
            [(text, count)] = self._all(
                f"SELECT group_concat(id), count(*) FROM (SELECT id {rows}{_IDS_PER_QUERY})",  # noqa: S608
                *after,
                *up_to,
            )
            found.append(self._parsed_ids(text, count))
            if count < _IDS_PER_QUERY:
                return np.sort(np.concatenate(found))
            last = f"SELECT {order} {rows}1 OFFSET {_IDS_PER_QUERY - 1}"
            [after] = self._all(last, *after, *up_to)

    def _parsed_ids(self, text: str | None, count: int) -> Ids:
        try:
            ids = np.fromstring(text or "", dtype=np.int64, sep=",")
        except (ValueError, DeprecationWarning):
            ids = np.empty(0, np.int64)
        if len(ids) != count:
            raise damaged(self.connection, "it has item ids that are not numbers")
        return ids

    def _all(self, sql: str, *parameters: Any) -> list[Any]:
        return self.connection.execute(sql, parameters).fetchall()

    def _pages(self, select: str, size: int) -> Iterator[list[Any]]:
        # Pages instead of one cursor: an unfinished statement would keep its transaction open.
        last, count, total = -1, 0, 0
        while rows := self._all(f"{select} WHERE id > ? ORDER BY id LIMIT ?", last, size):
            yield rows
            count += len(rows)
            total += sum(row[0] for row in rows)
            last = max(last + 1, rows[-1][0])
        self._check_ids(count, total)

    def verified(self, rows: Sequence[tuple[int, int, Any]]) -> tuple[Ids, Embeddings]:
        """Ids (N,) and vectors (N, D) of rows of `vectors`, after verifying their checksums."""
        if not rows:
            return np.empty(0, np.int64), np.empty((0, self.dim), np.float32)
        listed, checksums, stored = zip(*rows, strict=True)
        blobs: Iterable[Any] = stored
        ids = np.array(listed, np.int64)
        vectors: Embeddings | None = None
        if self.file is not None and stored[0] is None:
            blobs = vectors = self.file.read(ids)
        try:
            found = (*map(zlib.crc32, blobs, listed),)
        except TypeError:
            found = ()  # a damaged column type: the value is not bytes
        if found != checksums:
            index = next(n for n, crc in enumerate(checksums) if found[n : n + 1] != (crc,))
            reason = f"the vector of item {listed[index]} does not fit its checksum"
            if self.file is not None and vectors is not None:
                raise GalleryCorruptError(
                    f"{self.file.path} is damaged: {reason}. {RESTORE} "
                    "Or remove the item and add its image again."
                )
            raise damaged(self.connection, reason)
        if vectors is None:
            vectors = np.frombuffer(bytearray().join(stored), np.float32).reshape(len(rows), -1)
        return ids, vectors


def _are_whole(rows: Sequence[Sequence[Any]]) -> bool:
    """Whether all rows of items fit their checksums."""
    try:
        return item_checksums(rows) == [row[6] for row in rows]
    except TypeError:
        return False  # a sha256 is damaged and not bytes


@functools.lru_cache(maxsize=64)
def _is_whole_state(state: State) -> bool:
    """Whether a state fits its checksum; cached, since nearly every search reads the same one."""
    return state.checksum == state.crc


def _json_keys(keys: Iterable[str]) -> str:
    """All spellings of the valid keys: SQLite reads JSON texts only up to a NUL."""
    return json.dumps([spelling for key in keys if is_key(key) for spelling in spellings(key)])


def _json_ids(ids: Sequence[ItemId] | Ids) -> str:
    return json.dumps([int(item_id) for item_id in ids])
