"""Export a gallery as one Parquet file, which `kinlens.indexer.ingest.foreign` reads.

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
    disk_errors_as,
)
from kinlens.indexer.entries import Entry
from kinlens.indexer.store import VectorStore
from kinlens.indexer.types import Progress
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
_CURE = "Write it again, or take another copy of the file."


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
    with (
        disk_errors_as(GalleryWriteError, out, "No partial file was left.", "The export"),
        staged(out.parent, f".{out.name}.part-") as stage,
    ):
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


@contextlib.contextmanager
def damage_explained(path: Path) -> Iterator[None]:
    """Translate the errors of pyarrow while it reads `path` into a SourceError."""
    pa = load_pyarrow()
    try:
        yield
    except FileNotFoundError as error:
        raise SourceError(f"{path} is missing. Check the name.") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        kind = "Arrow" if path.suffix.lower() in (".arrow", ".feather") else "Parquet"
        raise SourceError(f"{path} is not a valid {kind} file: {reason}. {_CURE}") from error
