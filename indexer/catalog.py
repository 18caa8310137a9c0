"""The catalogue of a gallery: what each item is. One SQLite file, written once, then only read."""

import json
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedder.errors import GalleryCorruptError
from embedder.types import ItemId

_SCHEMA_VERSION = 1
_SCHEMA = f"""
PRAGMA journal_mode = MEMORY;
PRAGMA user_version = {_SCHEMA_VERSION};
CREATE TABLE items (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    path TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    attributes TEXT NOT NULL,
    format TEXT NOT NULL
) STRICT;
"""
_BY_ID = """
SELECT id, key, path, sha256, attributes, format FROM items
WHERE id IN (SELECT value FROM json_each(?))
"""
_PAGE = """
SELECT id, key, path, sha256, attributes, format FROM items
WHERE id > ? ORDER BY id LIMIT ?
"""


@dataclass(frozen=True, slots=True)
class Item:
    """One image of a gallery; `path` is relative to the root of its source."""

    id: ItemId
    key: str
    path: str
    sha256: str
    attributes: Mapping[str, str]
    format: str


def write_catalog(path: Path, items: Iterable[Item]) -> None:
    """Write all items to the new file `path`. Raises: sqlite3.Error."""
    rows = (
        (
            i.id,
            i.key,
            i.path,
            i.sha256,
            json.dumps(dict(i.attributes), ensure_ascii=False),
            i.format,
        )
        for i in items
    )
    connection = sqlite3.connect(path)
    try:
        connection.executescript(_SCHEMA)
        with connection:
            connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)", rows)
    finally:
        connection.close()


class Catalog:
    """A catalogue opened for reading; each thread gets a connection of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = threading.local()
        self._lock = threading.Lock()
        self._closers: set[weakref.finalize[Any, _Holder]] = set()

    @classmethod
    def open(cls, path: Path) -> "Catalog":
        """Open and check the file. Raises: GalleryCorruptError."""
        if not path.is_file():
            raise GalleryCorruptError(f"{path} is missing. Build the gallery again.")
        catalog = cls(path)
        try:
            catalog._check()
        except BaseException:
            catalog.close()
            raise
        return catalog

    def count(self) -> int:
        """Number of items."""
        return int(self._query("SELECT count(*) FROM items")[0][0])

    def get(self, ids: Sequence[ItemId]) -> dict[ItemId, Item]:
        """The items with these numbers; unknown numbers are left out."""
        rows = self._query(_BY_ID, json.dumps(list(ids)))
        return {row[0]: _item(row) for row in rows}

    def items(self, page_size: int = 1000) -> Iterator[Item]:
        """Every item in the order of its number."""
        last = -1
        while rows := self._query(_PAGE, last, page_size):
            yield from (_item(row) for row in rows)
            last = rows[-1][0]

    def close(self) -> None:
        """Close the connections of all threads."""
        with self._lock:
            for closer in self._closers:
                closer()
            self._closers.clear()
        self._threads = threading.local()

    def _check(self) -> None:
        [(version,)] = self._query("PRAGMA user_version")
        if version != _SCHEMA_VERSION:
            raise GalleryCorruptError(
                f"{self._path} has schema {version}, this version reads {_SCHEMA_VERSION}. "
                "Build the gallery again."
            )
        [(verdict,), *_] = self._query("PRAGMA quick_check")
        if verdict != "ok":
            raise GalleryCorruptError(
                f"{self._path} is damaged: {verdict}. Build the gallery again."
            )

    def _query(self, sql: str, *parameters: int | str) -> list[tuple[Any, ...]]:
        try:
            return self._connection().execute(sql, parameters).fetchall()
        except sqlite3.DatabaseError as error:
            raise GalleryCorruptError(
                f"{self._path} cannot be read as a catalogue: {error}. Build the gallery again."
            ) from error

    def _connection(self) -> sqlite3.Connection:
        holder: _Holder | None = getattr(self._threads, "holder", None)
        if holder is None:
            holder = _Holder(self._path)
            self._threads.holder = holder
            closer = weakref.finalize(holder, holder.connection.close)
            with self._lock:
                self._closers = {known for known in self._closers if known.alive} | {closer}
        return holder.connection


class _Holder:
    """A connection that is closed when its thread has ended and dropped this holder."""

    def __init__(self, path: Path) -> None:
        uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
        self.connection = sqlite3.connect(uri, uri=True, check_same_thread=False)


def _item(row: tuple[Any, ...]) -> Item:
    number, key, path, sha256, attributes, format_ = row
    return Item(number, key, path, sha256, json.loads(attributes), format_)
