"""A gallery as one Parquet file: its way out of one engine and into another.

A row is an item with its vector, a row group about 10,000 rows, so that memory holds one of them.
Texts are compressed with zstd, vectors are not (they would not get smaller). The file's metadata
holds facts about the gallery under `kinlens.NAME`.
"""

import contextlib
import fcntl
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from embedder.durable import rename
from embedder.errors import EngineUnavailableError, GalleryBusyError, GalleryWriteError, SourceError
from embedder.types import AttributeValue, Embeddings
from indexer.types import Dump, Entry, Progress, VectorStore

VECTOR = "vector"
TEXTS = ("key", "path", "format", "sha256")
ATTRIBUTE = "attribute."
"""What the column of an attribute begins with."""

Types = dict[str, set[str]]
"""The types of the values of each attribute, as names of Arrow types."""

_ARROW_NAMES = {str: "string", int: "int64", float: "double", bool: "bool"}

CURE = "Export the gallery again, or take another copy of the file."

_UNIT_TOLERANCE = 1e-3

SCHEMA = "1"
"""The layout of the file, in its metadata as `kinlens.schema`."""

ROWS = 10_000
"""Rows of a row group, at most."""

_PREFIX = "kinlens."
_TRIES = 5


def require_pyarrow() -> Any:
    """The module pyarrow. Raises: EngineUnavailableError naming the extra to install."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise EngineUnavailableError(
            "Parquet files need pyarrow, which is not installed. Install it with "
            "`pip install 'kinlens[parquet]'`."
        ) from error
    return pyarrow


def widen(types: Types, attributes: Iterable[Mapping[str, AttributeValue]]) -> bool:
    """Add the types of the values of each item; whether one of them was new."""
    is_new = False
    for values in attributes:
        for name, value in values.items():
            found, known = _ARROW_NAMES[type(value)], types.setdefault(name, set())
            is_new |= found not in known
            known.add(found)
    return is_new


def schema_of(types: Types, dim: int, metadata: Mapping[str, str]) -> Any:
    """The Arrow schema of entries with vectors of length `dim` and such attributes."""
    pa = require_pyarrow()
    fields = [pa.field(name, pa.string(), nullable=False) for name in TEXTS]
    fields.append(pa.field(VECTOR, pa.list_(pa.float32(), dim), nullable=False))
    for name, found in sorted(types.items()):
        fields.append(pa.field(f"{ATTRIBUTE}{name}", _arrow_type(pa, sorted(found))))
    return pa.schema(fields, metadata=dict(metadata))


def table_of(entries: Sequence[Entry], schema: Any) -> Any:
    """Entries as an Arrow table."""
    pa = require_pyarrow()
    columns = [pa.array([getattr(entry, name) for entry in entries], pa.string()) for name in TEXTS]
    dim = schema.field(VECTOR).type.list_size
    flat = np.concatenate([np.asarray(entry.vector, dtype=np.float32) for entry in entries])
    columns.append(pa.FixedSizeListArray.from_arrays(pa.array(flat), dim))
    for field in list(schema)[len(columns) :]:
        name = field.name.removeprefix(ATTRIBUTE)
        values = [entry.attributes.get(name) for entry in entries]
        columns.append(pa.array(_wrapped(pa, field.type, values), field.type))
    return pa.table(columns, schema=schema)


def check_schema(schema: Any, where: str) -> int:
    """The length of the vectors in a file of this schema. Raises: SourceError."""
    pa = require_pyarrow()
    missing = [name for name in (*TEXTS, VECTOR) if name not in schema.names]
    if missing:
        raise SourceError(
            f"{where} has no column {missing[0]}. A gallery has the columns {', '.join(TEXTS)}, "
            f"{VECTOR} and {ATTRIBUTE}NAME; export it with `kinlens-index export`."
        )
    for name in TEXTS:
        if schema.field(name).type != pa.string():
            raise SourceError(f"{where}: column {name} is {schema.field(name).type}, not string.")
    vector = schema.field(VECTOR).type
    if not pa.types.is_fixed_size_list(vector) or vector.value_type != pa.float32():
        raise SourceError(f"{where}: column {VECTOR} is {vector}, not fixed_size_list<float>[dim].")
    for field in schema:
        if field.name.startswith(ATTRIBUTE):
            _check_attribute(pa, field, where)
    return int(vector.list_size)


def leaf_names(schema: Any) -> list[str]:
    """The columns as Parquet names them, where a list or a struct has names of its own inside."""
    pa = require_pyarrow()
    names = []
    for field in schema:
        is_struct = pa.types.is_struct(field.type)
        names += [f"{field.name}.{part.name}" for part in field.type] if is_struct else [field.name]
    return [f"{name}.list.element" if name == VECTOR else name for name in names]


def _arrow_type(pa: Any, names: Sequence[str]) -> Any:
    types = [pa.type_for_alias(name) for name in names]
    return types[0] if len(types) == 1 else pa.struct(list(zip(names, types, strict=True)))


def _wrapped(pa: Any, kind: Any, values: Sequence[AttributeValue | None]) -> Sequence[Any]:
    if not pa.types.is_struct(kind):
        return values
    return [None if value is None else {_ARROW_NAMES[type(value)]: value} for value in values]


def _check_attribute(pa: Any, field: Any, where: str) -> None:
    is_struct = pa.types.is_struct(field.type)
    found = [part.type for part in field.type] if is_struct else [field.type]
    known = [pa.type_for_alias(name) for name in _ARROW_NAMES.values()]
    for kind in found:
        if kind not in known:
            raise SourceError(
                f"{where}: column {field.name} is {field.type}; an attribute is "
                f"{', '.join(map(str, known))}, or a struct of these. Convert the column."
            )


def entries_of(batch: Any, first: int, where: str) -> Iterator[Entry]:
    """The entries of a record batch whose first row is number `first` of the file `where`.

    Raises: SourceError for a missing value, a vector that is not finite or not of unit norm, an
        attribute that is no finite number.
    """
    for name in (*TEXTS, VECTOR):
        _refuse(np.asarray(batch.column(name).is_null()), first, where, f"has no {name}")
    vectors = _vectors(batch.column(VECTOR), first, where)
    attributes = _attributes(batch, first, where)
    texts = [batch.column(name).to_pylist() for name in TEXTS]
    for (key, path, kind, sha256), vector, values in zip(
        zip(*texts, strict=True), vectors, attributes, strict=True
    ):
        yield Entry(key, vector, sha256, values, path, kind)


def _vectors(column: Any, first: int, where: str) -> Embeddings:
    flat = column.flatten().to_numpy(zero_copy_only=False)  # a null inside becomes NaN
    vectors = np.ascontiguousarray(flat.reshape(len(column), -1), dtype=np.float32)
    damaged = ~np.isfinite(vectors).all(axis=1)
    _refuse(damaged, first, where, "has a vector with numbers that are not finite")
    wrong = np.abs(np.linalg.norm(vectors, axis=1) - 1) > _UNIT_TOLERANCE
    _refuse(wrong, first, where, "has a vector that is not of unit norm")
    return vectors


def _attributes(batch: Any, first: int, where: str) -> list[dict[str, AttributeValue]]:
    rows: list[dict[str, AttributeValue]] = [{} for _ in range(batch.num_rows)]
    for column in batch.schema.names:
        if not column.startswith(ATTRIBUTE):
            continue
        name = column.removeprefix(ATTRIBUTE)
        for number, value in enumerate(map(_value, batch.column(column).to_pylist())):
            if isinstance(value, float) and not math.isfinite(value):
                fault = f"has attribute {name} = {value}, which is no finite number"
                raise SourceError(f"{where}: row {first + number:,} {fault}. {CURE}")
            if value is not None:
                rows[number][name] = value
    return rows


def _value(found: Any) -> AttributeValue | None:
    """A value of a plain column, or the one field of a struct that is not null."""
    parts = found.values() if isinstance(found, dict) else (found,)
    return next((part for part in parts if part is not None), None)


def _refuse(wrong: Any, first: int, where: str, fault: str) -> None:
    if wrong.any():
        row = first + int(np.flatnonzero(wrong)[0])
        raise SourceError(f"{where}: row {row:,} {fault}. {CURE}")


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
