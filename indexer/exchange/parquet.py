"""A gallery as one Parquet file: its way out of one engine and into another.

A row is an item with its vector, a row group about 10,000 rows, so that memory holds one of them.
Texts are compressed with zstd, vectors are not (they would not get smaller). The file's metadata
holds facts about the gallery under `kinlens.NAME`.
"""

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from embedder.errors import GalleryBusyError, GalleryWriteError, SourceError
from indexer.exchange.dump import Dump
from indexer.exchange.parquet_rows import CURE, entries_of
from indexer.exchange.parquet_schema import (
    VECTOR,
    Types,
    check_schema,
    leaf_names,
    require_pyarrow,
    schema_of,
    table_of,
    widen,
)
from indexer.folder.durable import rename
from indexer.types import Entry, Progress, VectorStore

SCHEMA = "1"
"""The layout of the file, in its metadata as `kinlens.schema`."""

ROWS = 10_000
"""Rows of a row group, at most."""

_PREFIX = "kinlens."
_TRIES = 5


def export_gallery(
    store: VectorStore,
    out: Path | str,
    facts: Mapping[str, str],
    on_progress: Progress | None = None,
) -> int:
    """Write every item of `store`, of one state, to the file `out`, and give their number.

    The file is written aside, then it replaces `out`; `facts` go into its metadata. Progress may
    start again from the first item, if items with new kinds of attributes came meanwhile.

    Raises: GalleryWriteError if it cannot be written; GalleryBusyError if another process is
        writing it; EngineUnavailableError without pyarrow.
    """
    require_pyarrow()
    out = Path(out)
    types: Types = {}
    widen(types, (item.attributes for item in store.items()))
    metadata = {**facts, "dim": str(store.dim), "schema": SCHEMA}
    metadata = {f"{_PREFIX}{name}": value for name, value in metadata.items()}
    for _ in range(_TRIES):
        with _write_errors_explained(out), _aside(out) as file:
            count = _write(store, file, types, metadata, on_progress)
            if count is not None:
                os.fsync(file.fileno())
                rename(_part(out), out, "export")
                return count
    raise GalleryBusyError(
        f"{out} was not written: new kinds of attributes came to gallery {store.name} in each of "
        f"{_TRIES} tries. Export it when its attributes are settled."
    )


def read_dump(path: Path | str) -> Dump:
    """What `export_gallery` wrote. Its columns, facts and keys are checked now, rows when read.

    Raises: SourceError; EngineUnavailableError without pyarrow.
    """
    path = Path(path)
    with _damage_explained(path), contextlib.closing(_open(path)) as file:
        schema, count = file.schema_arrow, file.metadata.num_rows
        dim = check_schema(schema, str(path))
        facts = _facts(path, schema, dim)
        _check_keys(path, file)
    return Dump(facts, dim, count, lambda: _entries(path))


def _write(
    store: VectorStore,
    file: BinaryIO,
    types: Types,
    metadata: Mapping[str, str],
    on_progress: Progress | None,
) -> int | None:
    """None if an item has attributes that are not among `types`, which know them now."""
    count = 0
    with _writer(file, schema_of(types, store.dim, metadata)) as writer:
        for entries in store.scan(ROWS):
            if widen(types, (entry.attributes for entry in entries)):
                return None
            if entries:
                writer.write_table(table_of(entries, writer.schema))
            count += len(entries)
            if on_progress is not None:
                on_progress(len(entries))
    return count


def _writer(file: BinaryIO, schema: Any) -> Any:
    packed = [name for name in leaf_names(schema) if not name.startswith(f"{VECTOR}.")]
    return require_pyarrow().parquet.ParquetWriter(
        file,
        schema,
        compression={**dict.fromkeys(packed, "zstd"), f"{VECTOR}.list.element": "none"},
        use_dictionary=[name for name in packed if name not in ("key", "path", "sha256")],
        write_statistics=False,
        write_page_checksum=True,
    )


def _part(out: Path) -> Path:
    return out.with_name(f".{out.name}.part")


@contextlib.contextmanager
def _aside(out: Path) -> Iterator[BinaryIO]:
    """The empty file beside `out` that becomes `out`; what a killed export left is written over."""
    part = _part(out)
    with part.open("ab") as file:
        if not _is_locked(part, file):
            raise GalleryBusyError(f"Another process is writing {out}. Wait, or choose another.")
        file.truncate(0)
        try:
            yield file
        finally:
            if _is_at(part, file):
                part.unlink()


def _is_locked(path: Path, file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Between opening and locking another export may have published or removed the file.
    return _is_at(path, file)


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _open(path: Path) -> Any:
    return require_pyarrow().parquet.ParquetFile(path, page_checksum_verification=True)


def _facts(path: Path, schema: Any, dim: int) -> dict[str, str]:
    pairs = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    facts = {
        key.removeprefix(_PREFIX): value for key, value in pairs.items() if key.startswith(_PREFIX)
    }
    expected = {"schema": SCHEMA, "dim": str(dim)}
    for name in ("name", "bundle_id", *expected):
        if name not in facts:
            raise SourceError(f"{path} says nothing of {_PREFIX}{name} in its metadata. {CURE}")
        if facts[name] != expected.get(name, facts[name]):
            raise SourceError(
                f"{path}: {_PREFIX}{name} is {facts[name]!r}, expected {expected[name]}. {CURE}"
            )
    return facts


def _check_keys(path: Path, file: Any) -> None:
    """Eight bytes a key, so that millions fit; the keys themselves only where numbers meet."""
    numbers = np.fromiter(map(hash, _keys(path, file)), np.int64, file.metadata.num_rows)
    ordered = np.sort(numbers)
    doubtful = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not doubtful:
        return
    rows: dict[str, int] = {}
    for row, key in enumerate(_keys(path, file), 1):
        if hash(key) in doubtful and rows.setdefault(key, row) != row:
            raise SourceError(
                f"{path}: row {row:,} has the key {key!r} of row {rows[key]:,}. Keys of a gallery "
                "are unique: remove one of the rows."
            )


def _keys(path: Path, file: Any) -> Iterator[str]:
    batches = file.iter_batches(ROWS, columns=["key"])
    keys = itertools.chain.from_iterable(batch.column("key").to_pylist() for batch in batches)
    for row, key in enumerate(keys, 1):
        if key is None:
            raise SourceError(f"{path}: row {row:,} has no key. {CURE}")
        yield key


def _entries(path: Path) -> Iterator[Entry]:
    row = 1
    with _damage_explained(path), contextlib.closing(_open(path)) as file:
        for batch in file.iter_batches(ROWS):
            yield from entries_of(batch, row, str(path))
            row += batch.num_rows


@contextlib.contextmanager
def _write_errors_explained(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GalleryWriteError(
            f"Cannot write {out}: {error.strerror or error}. Check the free space and the "
            "permissions of that folder, or choose another one; nothing half written is left."
        ) from error


@contextlib.contextmanager
def _damage_explained(path: Path) -> Iterator[None]:
    pa = require_pyarrow()
    try:
        yield
    except FileNotFoundError as error:
        raise SourceError(f"{path} is missing. Give a file of `kinlens-index export`.") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise SourceError(f"{path} is not a whole Parquet file: {reason}. {CURE}") from error
