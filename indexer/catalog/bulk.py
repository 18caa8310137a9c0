"""Many items into a new catalogue at once, many times faster than through writes."""

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from embedder.errors import GalleryWriteError, InvalidParameterError
from indexer.catalog.attributes import AttributeKind
from indexer.catalog.entries import checked_vectors, learn_kinds
from indexer.catalog.errors import write_error
from indexer.catalog.schema import FIRST_STATE, INDEXES, NEW_FILE, TABLES, seal
from indexer.catalog.write import (
    INSERT_ITEM,
    INSERT_VECTOR,
    attribute_rows,
    item_row,
    vector_rows,
)
from indexer.folder.durable import sync
from indexer.types import Entry

_BATCH = 4096
# Until it is whole nobody reads the file, and after a crash it is made again.
_UNSAFE = "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536;"
_STAGE = "CREATE TEMP TABLE staged (name INTEGER, value ANY, item INTEGER) STRICT"
_TWICE = "SELECT key FROM items GROUP BY key HAVING count(*) > 1 LIMIT 1"


def bulk_load(
    path: Path,
    dim: int,
    entries: Iterable[Entry],
    on_progress: Callable[[int], None] | None = None,
) -> int:
    """Make the new file `path` of these entries, as the write 1; how many there are.

    `on_progress` is told how many more items are in. The file is on disk when this returns, and
    gone if it raises.

    Raises: InvalidParameterError as `CatalogWriter.add`; GalleryWriteError.
    """
    if path.exists():
        raise GalleryWriteError(f"{path} is there already. Choose another folder.")
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            size = _load(connection, dim, entries, on_progress)
        sync(path, "catalogue")
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, sqlite3.Error):
            raise write_error(path, error) from error
        raise
    return size


def _load(
    connection: sqlite3.Connection,
    dim: int,
    entries: Iterable[Entry],
    on_progress: Callable[[int], None] | None,
) -> int:
    connection.executescript(NEW_FILE + _UNSAFE + TABLES + _STAGE)
    connection.execute("BEGIN")
    numbers: dict[str, int] = {}
    kinds: dict[str, AttributeKind] = {}
    size = 0
    for batch in _batches(entries):
        _load_batch(connection, dim, batch, size + 1, kinds, numbers)
        size += len(batch)
        if on_progress:
            on_progress(len(batch))
    names = [(numbers[name], name, kind, 0) for name, kind in kinds.items()]
    connection.executemany("INSERT INTO names VALUES (?, ?, ?, ?)", names)
    connection.execute("INSERT INTO attributes SELECT * FROM staged ORDER BY name, value, item")
    connection.execute(FIRST_STATE, (dim, 1, size, size * (size + 1) // 2))
    seal(connection)
    connection.execute("COMMIT")
    _make_indexes(connection)
    connection.execute("PRAGMA journal_mode = WAL")
    return size


def _load_batch(
    connection: sqlite3.Connection,
    dim: int,
    batch: list[Entry],
    first: int,
    kinds: dict[str, AttributeKind],
    numbers: dict[str, int],
) -> None:
    vectors = checked_vectors(batch, dim)
    for entry in batch:
        learn_kinds(kinds, entry.key, entry.attributes)
    for name in kinds.keys() - numbers.keys():
        numbers[name] = len(numbers) + 1
    numbered = [*enumerate(batch, first)]
    connection.executemany(INSERT_ITEM, [item_row(number, e, 1) for number, e in numbered])
    connection.executemany(INSERT_VECTOR, vector_rows(first, vectors))
    rows = attribute_rows(numbers, {number: e.attributes for number, e in numbered})
    connection.executemany("INSERT INTO staged VALUES (?, ?, ?)", rows)


def _make_indexes(connection: sqlite3.Connection) -> None:
    try:
        connection.executescript(INDEXES)
    except sqlite3.IntegrityError as error:
        [(key,)] = connection.execute(_TWICE).fetchall()
        raise InvalidParameterError(
            f"Key {key!r} is there twice. Give each item a key of its own."
        ) from error


def _batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    rest = iter(entries)
    while batch := list(islice(rest, _BATCH)):
        yield batch
