"""Export and import a gallery as one Parquet file.

- A row is an item with its vector. A row group has up to 10,000 rows, and one is in memory at a
  time.
- Texts are compressed with zstd. Vectors are not, as they would not get smaller.
- The metadata of the file has facts about the gallery under `kinlens.NAME`.
- Several values of an attribute are a list. If the values of an attribute have different types,
  such as integers and decimals, the column has structs in which one field is set.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kinlens.embedder.durable import rename, staged, sync
from kinlens.embedder.errors import (
    EngineUnavailableError,
    GalleryBusyError,
    GalleryWriteError,
    SourceError,
)
from kinlens.indexer.types import Entry, GalleryExport, Progress, VectorStore
from kinlens.values import AttributeValue

VECTOR = "vector"
TEXTS = ("key", "path", "format", "sha256")
ATTRIBUTE = "attribute."
"""Prefix of the columns of attributes."""

ROWS = 10_000
"""Maximum number of rows per row group."""

SCHEMA = "1"
"""Version of the layout, stored in the metadata as `kinlens.schema`."""

METADATA = "kinlens."
"""Prefix of the metadata of an export."""

_ARROW_NAMES = {str: "string", int: "int64", float: "double", bool: "bool"}
_CURE = "Export the gallery again, or take another copy of the file."


def export_gallery(
    store: VectorStore,
    out: Path | str,
    facts: Mapping[str, str],
    on_progress: Progress | None = None,
) -> int:
    """Write a consistent state of all items of `store` to the file `out`; returns their number.

    `out` is replaced atomically. `facts` are stored in its metadata.

    Raises: GalleryWriteError if it cannot be written; GalleryBusyError if values of a new type were
        added during the export; EngineUnavailableError without pyarrow.
    """
    load_pyarrow()
    out = Path(out)
    types: dict[str, set[str]] = {}
    _learn(types, (item.attributes for item in store.items()))
    with _write_errors_explained(out), staged(out.parent, f".{out.name}.part-") as stage:
        part = stage / out.name
        with _writer(part, _schema(types, store.dim, facts)) as writer:
            count = 0
            for entries in store.scan(ROWS):
                if _learn(types, (entry.attributes for entry in entries)):
                    raise GalleryBusyError(
                        f"{out} was not written: attribute values of a new type were added to "
                        f"gallery {store.name} during the export. Export it again."
                    )
                if entries:
                    writer.write_table(_table(entries, writer.schema))
                count += len(entries)
                if on_progress is not None:
                    on_progress(len(entries))
        sync(part, "export")
        rename(part, out, "export")
    return count


def write_entries(out: Path, entries: Sequence[Entry], dim: int, facts: Mapping[str, str]) -> None:
    """Write entries to the new file `out`, in the format of an export.

    Raises: OSError; EngineUnavailableError without pyarrow.
    """
    load_pyarrow()
    types: dict[str, set[str]] = {}
    _learn(types, (entry.attributes for entry in entries))
    with _writer(out, _schema(types, dim, facts)) as writer:
        if entries:
            writer.write_table(_table(entries, writer.schema))


def read_dump(path: Path | str) -> GalleryExport:
    """Open a file of `export_gallery`. Columns and facts are checked now, rows when they are read.

    Raises: SourceError; EngineUnavailableError without pyarrow.
    """
    path = Path(path)
    with damage_explained(path), contextlib.closing(_open(path)) as file:
        schema, count = file.schema_arrow, file.metadata.num_rows
        dim = _checked_dim(path, schema)
        facts = _facts(path, schema, dim)
    return GalleryExport(facts, dim, count, lambda: _entries(path))


def load_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise EngineUnavailableError(
            "Parquet files need pyarrow, which is not installed. Install it with "
            "`pip install 'kinlens[parquet]'`."
        ) from error
    return pyarrow


def _learn(types: dict[str, set[str]], attributes: Iterable[Mapping[str, AttributeValue]]) -> bool:
    """Add the Arrow types of all values to `types`; returns whether one of them was new."""
    is_new = False
    for values in attributes:
        for name, value in values.items():
            found, known = _arrow_name(value), types.setdefault(name, set())
            is_new |= found not in known
            known.add(found)
    return is_new


def _arrow_name(value: AttributeValue) -> str:
    """The Arrow type of a value; a list of numbers is decimal if one of them is."""
    if not isinstance(value, tuple):
        return _ARROW_NAMES[type(value)]
    found = {_ARROW_NAMES[type(one)] for one in value}
    return f"list of {'double' if len(found) > 1 else found.pop()}"


def _arrow_type(name: str) -> Any:
    pa = load_pyarrow()
    element = name.removeprefix("list of ")
    kind = pa.type_for_alias(element)
    return kind if element == name else pa.list_(kind)


def _schema(types: Mapping[str, set[str]], dim: int, facts: Mapping[str, str]) -> Any:
    pa = load_pyarrow()
    fields = [pa.field(name, pa.string(), nullable=False) for name in TEXTS]
    fields.append(pa.field(VECTOR, pa.list_(pa.float32(), dim), nullable=False))
    for name, found in sorted(types.items()):
        parts = [(part, _arrow_type(part)) for part in sorted(found)]
        kind = parts[0][1] if len(parts) == 1 else pa.struct(parts)
        fields.append(pa.field(f"{ATTRIBUTE}{name}", kind))
    metadata = {**facts, "dim": str(dim), "schema": SCHEMA}
    return pa.schema(fields, {f"{METADATA}{name}": value for name, value in metadata.items()})


def _table(entries: Sequence[Entry], schema: Any) -> Any:
    pa = load_pyarrow()
    columns = [pa.array([getattr(entry, name) for entry in entries], pa.string()) for name in TEXTS]
    dim = schema.field(VECTOR).type.list_size
    flat = np.concatenate([np.asarray(entry.vector, dtype=np.float32) for entry in entries])
    columns.append(pa.FixedSizeListArray.from_arrays(pa.array(flat), dim))
    for field in list(schema)[len(columns) :]:
        name = field.name.removeprefix(ATTRIBUTE)
        values: list[Any] = [entry.attributes.get(name) for entry in entries]
        if pa.types.is_struct(field.type):
            values = [v if v is None else {_arrow_name(v): v} for v in values]
        columns.append(pa.array(values, field.type))
    return pa.table(columns, schema=schema)


def _writer(file: Path, schema: Any) -> Any:
    pa = load_pyarrow()
    packed = []  # the Parquet names of columns; fields of a struct are columns of their own
    for field in schema:
        parts = field.type if pa.types.is_struct(field.type) else ()
        named = [(f"{field.name}.{part.name}", part.type) for part in parts]
        for name, kind in named or [(field.name, field.type)]:
            packed.append(f"{name}.list.element" if pa.types.is_list(kind) else name)
    packed.remove(VECTOR)
    return pa.parquet.ParquetWriter(
        file,
        schema,
        compression={**dict.fromkeys(packed, "zstd"), f"{VECTOR}.list.element": "none"},
        use_dictionary=[name for name in packed if name not in ("key", "path", "sha256")],
        write_statistics=False,
        write_page_checksum=True,
    )


def _open(path: Path) -> Any:
    return load_pyarrow().parquet.ParquetFile(path, page_checksum_verification=True)


def _checked_dim(path: Path, schema: Any) -> int:
    """Check the columns; returns the dimension of the vectors. Raises: SourceError."""
    pa = load_pyarrow()
    missing = [name for name in (*TEXTS, VECTOR) if name not in schema.names]
    if missing:
        raise SourceError(
            f"{path} has no column {missing[0]}. An export has the columns {', '.join(TEXTS)}, "
            f"{VECTOR} and {ATTRIBUTE}NAME. Use a file of `kinlens-index export`."
        )
    for name in TEXTS:
        if schema.field(name).type != pa.string():
            raise SourceError(f"{path}: column {name} is {schema.field(name).type}, not string.")
    vector = schema.field(VECTOR).type
    if not pa.types.is_fixed_size_list(vector) or vector.value_type != pa.float32():
        raise SourceError(f"{path}: column {VECTOR} is {vector}, not fixed_size_list<float>[dim].")
    known = [_arrow_type(name) for name in _ARROW_NAMES.values()]
    for field in schema:
        is_struct = pa.types.is_struct(field.type)
        found = [part.type for part in field.type] if is_struct else [field.type]
        kinds = [kind.value_type if pa.types.is_list(kind) else kind for kind in found]
        if field.name.startswith(ATTRIBUTE) and not all(
            kind in known or pa.types.is_date(kind) or pa.types.is_timestamp(kind) for kind in kinds
        ):
            raise SourceError(
                f"{path}: column {field.name} is {field.type}; an attribute is "
                f"{', '.join(_ARROW_NAMES.values())}, a date or timestamp, a list of one of "
                "these, or a struct of these. Convert the column."
            )
    return int(vector.list_size)


def _facts(path: Path, schema: Any, dim: int) -> dict[str, str]:
    pairs = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    facts = {
        key.removeprefix(METADATA): value
        for key, value in pairs.items()
        if key.startswith(METADATA)
    }
    expected = {"schema": SCHEMA, "dim": str(dim)}
    for name in ("name", "bundle_id", *expected):
        if name not in facts:
            raise SourceError(f"{path} has no {METADATA}{name} in its metadata. {_CURE}")
        if facts[name] != expected.get(name, facts[name]):
            raise SourceError(
                f"{path}: {METADATA}{name} is {facts[name]!r}, expected {expected[name]}. {_CURE}"
            )
    return facts


def _entries(path: Path) -> Iterator[Entry]:
    """All rows. Invalid values such as NaN are refused later, by the gallery."""
    row = 1
    with damage_explained(path), contextlib.closing(_open(path)) as file:
        for batch in file.iter_batches(ROWS):
            _refuse_missing(path, batch, row)
            flat = batch.column(VECTOR).flatten().to_numpy(zero_copy_only=False)
            vectors = flat.reshape(batch.num_rows, -1)
            texts = [batch.column(name).to_pylist() for name in TEXTS]
            for (key, item_path, kind, sha256), vector, values in zip(
                zip(*texts, strict=True), vectors, _attributes(batch), strict=True
            ):
                yield Entry(key, vector, sha256, values, item_path, kind)
            row += batch.num_rows


def _refuse_missing(path: Path, batch: Any, first: int) -> None:
    for name in (*TEXTS, VECTOR):
        column = batch.column(name)
        if column.null_count:
            row = first + int(np.argmax(np.asarray(column.is_null())))
            raise SourceError(f"{path}: row {row:,} has no {name}. {_CURE}")


def _attributes(batch: Any) -> list[dict[str, AttributeValue]]:
    rows: list[dict[str, AttributeValue]] = [{} for _ in range(batch.num_rows)]
    for column in batch.schema.names:
        if column.startswith(ATTRIBUTE):
            name = column.removeprefix(ATTRIBUTE)
            for values, found in zip(rows, batch.column(column).to_pylist(), strict=True):
                parts = found.values() if isinstance(found, dict) else (found,)
                value = next((part for part in parts if part is not None), None)
                value = tuple(value) if isinstance(value, list) else value
                if value is not None:
                    values[name] = value
    return rows


@contextlib.contextmanager
def _write_errors_explained(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GalleryWriteError(
            f"Cannot write {out}: {error.strerror or error}. Check the free space and the "
            "permissions of that folder, or choose another one. No partial file was left."
        ) from error


@contextlib.contextmanager
def damage_explained(path: Path, cure: str = _CURE) -> Iterator[None]:
    """Translate the errors of pyarrow while it reads `path` into a SourceError with this advice."""
    pa = load_pyarrow()
    try:
        yield
    except FileNotFoundError as error:
        raise SourceError(f"{path} is missing. Check the name.") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        kind = "Arrow" if path.suffix.lower() in (".arrow", ".feather") else "Parquet"
        raise SourceError(f"{path} is not a valid {kind} file: {reason}. {cure}") from error
