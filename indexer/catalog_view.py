"""One state of a catalogue, read inside one transaction."""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embedder.errors import GalleryCorruptError
from embedder.types import AttributeValue, Embeddings, ItemId
from indexer.attributes import Schema
from indexer.catalog_schema import RESTORE
from indexer.engine import Ids, Item
from indexer.entries import is_key
from indexer.filter_sql import condition_sql, fitting
from indexer.filter_tree import And, Condition, Filter

_STATE = "SELECT seq, size, segment, segment_seq FROM state WHERE only = 1"
_ITEM = "SELECT id, key, path, sha256, attributes, format FROM items"
_ITEMS = f"{_ITEM} WHERE id IN (SELECT value FROM json_each(?))"  # noqa: S608 (two constants)
_NUMBERS = "SELECT key, id FROM items WHERE key IN (SELECT value FROM json_each(?))"
_VECTORS = "SELECT id, vector FROM vectors"
_SOME_VECTORS = """
SELECT id, vector FROM vectors WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id
"""
# Without INDEXED BY, SQLite reads all items to have them in order, however few have changed.
_ADDED = """
SELECT id, vector FROM vectors WHERE id IN (
    SELECT id FROM items INDEXED BY items_by_change WHERE changed_seq > ?1 AND added_seq > ?1
) ORDER BY id
"""
_CHANGED = """
SELECT id, attributes FROM items INDEXED BY items_by_change WHERE changed_seq > ? ORDER BY id
"""
_ATTRIBUTES = """
SELECT id, attributes FROM items WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id
"""
_COUNTS = "SELECT (SELECT count(*) FROM items), (SELECT count(*) FROM vectors), size FROM state"
_FEW = 2000


class State(NamedTuple):
    """`seq` counts writes, `size` items; `segment` holds the items live at `segment_seq`."""

    seq: int
    size: int
    segment: str | None
    segment_seq: int


class CatalogView:
    """Everything in one view is of one state. It cannot be used after its block has ended."""

    __slots__ = ("_connection",)

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def state(self) -> State:
        """Where the catalogue stands."""
        return State(*self._connection.execute(_STATE).fetchone())

    @property
    def dim(self) -> int:
        """Length of a vector."""
        [(dim,)] = self._all("SELECT dim FROM state")
        return int(dim)

    def schema(self) -> Schema:
        """Every attribute that was ever used, with its kind."""
        return dict(self._all("SELECT name, kind FROM names ORDER BY name"))

    def get(self, ids: Sequence[ItemId] | Ids) -> dict[ItemId, Item]:
        """The items with these numbers; unknown numbers are left out."""
        rows = self._all(_ITEMS, _json_ids(ids))
        return {row[0]: _item(row) for row in rows}

    def find(self, keys: Sequence[str]) -> dict[str, ItemId]:
        """The numbers of the items with these keys; unknown keys are left out."""
        # What cannot be a key is not asked for: SQLite reads JSON texts up to a NUL alone.
        listed = json.dumps([key for key in keys if is_key(key)])
        return dict(self._all(_NUMBERS, listed))

    def content(self, sha256s: Sequence[str]) -> dict[str, ItemId]:
        """By sha256 the lowest number of an item with this content, where there is one."""
        found: dict[str, ItemId] = {}
        for sha256 in sha256s:
            content = bytes.fromhex(sha256)
            [(number,)] = self._all("SELECT min(id) FROM items WHERE sha256 = ?", content)
            if number is not None:
                found[sha256] = number
        return found

    def vectors(self, ids: Sequence[ItemId] | Ids) -> Embeddings:
        """The vectors (N, D) of known items, in the order asked for.

        Raises: GalleryCorruptError for an unknown number.
        """
        asked = np.asarray(ids, dtype=np.int64)
        known, vectors = self._arrays(self._all(_SOME_VECTORS, _json_ids(asked)))
        places = np.searchsorted(known, asked)
        found = places < len(known)
        found[found] = known[places[found]] == asked[found]
        if not found.all():
            raise GalleryCorruptError(
                f"Item {asked[~found][0]} has no vector in the catalogue. {RESTORE}."
            )
        return vectors[places]

    def live_ids(self) -> Ids:
        """The numbers of all items, ascending."""
        # The smallest index has every number, and nearly in order.
        return self._ids("SELECT group_concat(id) FROM items INDEXED BY items_by_change")

    def added_since(self, seq: int) -> tuple[Ids, Embeddings]:
        """Items added after the write `seq` and still there: numbers ascending, vectors (N, D)."""
        return self._arrays(self._all(_ADDED, seq))

    def removed_since(self, seq: int) -> Ids:
        """The numbers of items removed after the write `seq`, ascending.

        Only writes since that of the segment are known.
        """
        return self._ids("SELECT group_concat(id) FROM tombstones WHERE seq > ?", seq)

    def attributes_since(self, seq: int) -> list[tuple[ItemId, Mapping[str, AttributeValue]]]:
        """Items added after the write `seq`, or with other attributes since; ascending."""
        return [(number, json.loads(text)) for number, text in self._all(_CHANGED, seq)]

    def matching(self, where: Filter) -> Ids:
        """The numbers of the items that fit, ascending.

        Raises: FilterError for an attribute that is unknown or of another kind.
        """
        where.check(self.schema())
        few = self._few_matching(where) if isinstance(where, And) else None
        return few if few is not None else fitting(where, self._of_condition, self.live_ids)

    def iter_vectors(self, batch: int = 4096) -> Iterator[tuple[Ids, Embeddings]]:
        """Numbers (B,) and vectors (B, D) of all items, by ascending number."""
        for rows in self._pages(_VECTORS, batch):
            yield self._arrays(rows)

    def items(self, batch: int = 1000) -> Iterator[Item]:
        """Every item, by ascending number."""
        for rows in self._pages(_ITEM, batch):
            yield from (_item(row) for row in rows)

    def check(self) -> None:
        """Read the whole file. Raises: GalleryCorruptError if its parts do not fit together."""
        verdict = self._all("PRAGMA integrity_check(1)")[0][0]
        [(items, vectors, size)] = self._all(_COUNTS)
        if verdict == "ok" and not items == vectors == size:
            verdict = f"it has {items:,} items, {vectors:,} vectors and a size of {size:,}"
        if verdict != "ok":
            raise GalleryCorruptError(f"The catalogue is damaged: {verdict}. {RESTORE}.")

    def _few_matching(self, where: And) -> Ids | None:
        """If one part alone leaves few items, these are looked at one by one; else None."""
        for part in where.parts:
            if isinstance(part, Condition):
                rows = self._all(*condition_sql(part, "item", at_most=_FEW + 1))
                if len(rows) <= _FEW:
                    rows = self._all(_ATTRIBUTES, _json_ids([number for (number,) in rows]))
                    fit = [number for number, text in rows if where.matches(json.loads(text))]
                    return np.array(fit, dtype=np.int64)
        return None

    def _of_condition(self, where: Condition) -> Ids:
        return self._ids(*condition_sql(where, "group_concat(item)"))

    def _ids(self, sql: str, *parameters: Any) -> Ids:
        # One text of all numbers: SQLite and NumPy make and read it three times as fast as Python
        # makes one object for each row.
        [(text,)] = self._all(sql, *parameters)
        ids = np.fromstring(text, dtype=np.int64, sep=",") if text else np.empty(0, np.int64)
        return np.sort(ids)

    def _all(self, sql: str, *parameters: Any) -> list[Any]:
        return self._connection.execute(sql, parameters).fetchall()

    def _pages(self, select: str, size: int) -> Iterator[list[Any]]:
        # Pages, not one cursor: a statement left unfinished would keep its transaction open.
        last = -1
        while rows := self._all(f"{select} WHERE id > ? ORDER BY id LIMIT ?", last, size):
            yield rows
            last = rows[-1][0]

    def _arrays(self, rows: list[tuple[int, bytes]]) -> tuple[Ids, Embeddings]:
        ids = np.fromiter((number for number, _ in rows), dtype=np.int64, count=len(rows))
        data = bytearray().join([vector for _, vector in rows])
        dim = self.dim
        if any(len(vector) != 4 * dim for _, vector in rows):
            raise GalleryCorruptError(f"The catalogue has vectors of other lengths. {RESTORE}.")
        vectors: NDArray[np.float32] = np.frombuffer(data, dtype=np.float32)
        return ids, vectors.reshape(len(rows), dim)


def _json_ids(ids: Sequence[ItemId] | Ids) -> str:
    return json.dumps([int(number) for number in ids])


def _item(row: tuple[Any, ...]) -> Item:
    number, key, path, sha256, attributes, format_ = row
    return Item(number, key, path, sha256.hex(), json.loads(attributes), format_)
