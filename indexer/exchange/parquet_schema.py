"""The columns of a Parquet file of entries: key, path, format, sha256, vector, attributes.

An attribute `colour` is the column `attribute.colour`, null where an item does not have it. Its
type is that of its values: string, int64, double or bool, so that 1, 1.0 and true stay apart. An
attribute with values of several types is a struct with a field for each of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from embedder.errors import EngineUnavailableError, SourceError
from embedder.types import AttributeValue
from indexer.types import Entry

VECTOR = "vector"
TEXTS = ("key", "path", "format", "sha256")
ATTRIBUTE = "attribute."
"""What the column of an attribute begins with."""

Types = dict[str, set[str]]
"""The types of the values of each attribute, as names of Arrow types."""

_ARROW_NAMES = {str: "string", int: "int64", float: "double", bool: "bool"}


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
