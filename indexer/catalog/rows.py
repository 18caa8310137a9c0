"""Rows of a catalogue, each compared with its checksum when it is read."""

import json
import sqlite3
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedder.types import Embeddings
from indexer.catalog.checksums import (
    AttributeRow,
    as_int64,
    attributes_total,
    item_checksum,
    row_checksum,
)
from indexer.catalog.errors import damaged
from indexer.catalog.schema import NAMES, STATE
from indexer.types import Ids, Item

VALUES = "SELECT name, value, sum(item) FROM attributes WHERE name = ? GROUP BY value LIMIT ?"
_MAX_VALUES = 100_000  # of one attribute, checked before it is first used: 0.2 s


class CatalogRows:
    """Raises GalleryCorruptError for what does not fit its checksum, and sqlite3.Error."""

    __slots__ = ("_checked", "_connection")

    def __init__(self, connection: sqlite3.Connection, checked: set[int]) -> None:
        """`checked` holds the numbers of the attributes whose index is known to be whole."""
        self._connection = connection
        self._checked = checked

    def _check_numbers(self, count: int, total: int) -> None:
        """These are the numbers of all items."""
        row = self._state()
        if (count, total) != (row[1], row[5]):
            raise damaged(self._connection, f"{count:,} of {row[1]:,} items were found")

    def _state(self) -> tuple[Any, ...]:
        row: tuple[Any, ...] | None = self._connection.execute(STATE).fetchone()
        if row is None or row_checksum(row[:-1]) != row[-1]:
            raise damaged(self._connection, "its state does not fit its checksum")
        return row

    def _names(self) -> list[Any]:
        rows = self._all(NAMES)
        if row_checksum(rows) != self._state()[6]:
            raise damaged(self._connection, "the names of attributes do not fit their checksum")
        return rows

    def _items(self, rows: Sequence[tuple[Any, ...]]) -> list[Item]:
        for row in rows:
            self._is_whole(row)
        # One text is parsed twice as fast as many.
        attributes = json.loads(f"[{','.join([row[5] for row in rows])}]")
        return [
            Item(number, key, path, sha256.hex(), values, format_)
            for (number, key, path, sha256, format_, _, _), values in zip(
                rows, attributes, strict=True
            )
        ]

    def _is_whole(self, row: tuple[Any, ...]) -> bool:
        """True. Raises: GalleryCorruptError if the row does not fit its checksum."""
        try:
            if item_checksum(*row[:6]) == row[6]:
                return True
        except TypeError:
            pass  # not even bytes
        raise damaged(self._connection, f"item {row[0]} does not fit its checksum")

    def _check_index(self, names: Collection[str]) -> None:
        """Before an attribute is first used, unless it has very many values."""
        for number, name, _, total in self._names():
            if name in names and number not in self._checked:
                rows = self._all(VALUES, number, _MAX_VALUES + 1)
                if len(rows) <= _MAX_VALUES:
                    self._check_total(name, rows, total)
                self._checked.add(number)

    def _check_total(self, name: str, rows: Iterable[AttributeRow], total: int) -> None:
        try:
            if as_int64(attributes_total(rows)) == total:
                return
        except (TypeError, OverflowError):
            pass  # not even values
        raise damaged(self._connection, f"the index of the attribute {name!r} is wrong")

    def _ids(self, sql: str, *parameters: Any) -> Ids:
        # One text of all numbers: SQLite and NumPy make and read it three times as fast as Python
        # makes one object for each row.
        [(text, count)] = self._all(sql, *parameters)
        return self._parsed(text, count)

    def _parsed(self, text: str | None, count: int) -> Ids:
        try:
            ids = np.fromstring(text or "", dtype=np.int64, sep=",")
        except (ValueError, DeprecationWarning):
            ids = np.empty(0, np.int64)
        if len(ids) != count:
            raise damaged(self._connection, "it has item numbers that are no numbers")
        return np.sort(ids)

    def _all(self, sql: str, *parameters: Any) -> list[Any]:
        return self._connection.execute(sql, parameters).fetchall()

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
            return np.empty(0, np.int64), np.empty((0, self._state()[4]), np.float32)
        numbers, checksums, vectors = zip(*rows, strict=True)
        try:
            found = (*map(zlib.crc32, vectors, numbers),)
        except TypeError:
            found = ()  # where a bit of the type has flipped it is not even bytes
        if found != checksums:
            what = f"one of the vectors {numbers[0]} to {numbers[-1]} does not fit its checksum"
            raise damaged(self._connection, what)
        data: NDArray[np.float32] = np.frombuffer(bytearray().join(vectors), dtype=np.float32)
        return np.array(numbers, dtype=np.int64), data.reshape(len(rows), -1)
