"""Rows of a Parquet file as entries, each checked, with its number in the message."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from embedder.errors import SourceError
from embedder.types import AttributeValue, Embeddings
from indexer.exchange.parquet_schema import ATTRIBUTE, TEXTS, VECTOR
from indexer.types import Entry

CURE = "Export the gallery again, or take another copy of the file."

_UNIT_TOLERANCE = 1e-3


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
