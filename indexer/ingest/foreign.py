"""Vectors in files: exports, tables of other programs (Parquet, Arrow), and NumPy arrays with keys.

A table has a column of keys and a column of vectors. Its other columns are attributes. Vectors are
divided by their norm, so that their product is the cosine.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from kinlens.embedder.errors import SourceError
from kinlens.indexer.entries import ROUNDING, Entry, norms_of
from kinlens.indexer.exchange.parquet import (
    ATTRIBUTE,
    METADATA,
    SCHEMA,
    TEXTS,
    VECTOR,
    damage_explained,
    load_pyarrow,
)
from kinlens.indexer.ingest.tables import read_keys, read_table
from kinlens.indexer.types import GalleryExport
from kinlens.values import AttributeValue

_KEYS = ("key", "id", "item_id", "product_id", "sku", "path", "file", "filename", "name")
_VECTORS = ("vector", "embedding", "embeddings", "emb", "features")
_IMAGE = ("path", "sha256", "format")
_ROWS = 4096
_FORMATS = {".parquet": "parquet", ".pq": "parquet", ".arrow": "ipc", ".feather": "ipc"}
_STREAM, _STREAM_END = b"\xff" * 4, b"\xff" * 4 + bytes(4)
_NUMPY = ".npy"
_SUFFIXES = (*_FORMATS, _NUMPY)


class _Columns(NamedTuple):
    """The columns of a table: of keys, vectors and facts of images, and names of attributes."""

    key: str
    vector: str
    image: Sequence[str]
    attributes: Mapping[str, str]


@dataclass(slots=True)
class Tables:
    """Files of vectors.

    Attributes:
        files: all Parquet, all Arrow, or one NumPy file.
        key_column, vector_column: None to detect them by name and type.
        columns: the columns to store as attributes; None for all others.
        keys: a text file with one key per line, for a NumPy file.
        csv: a CSV list with the column `key` and attributes, in the order of the NumPy file.
        table: a table of Arrow in place of the files, of which the first then names it.
        normalised: number of vectors read so far that were not of norm 1.
    """

    files: Sequence[Path]
    key_column: str | None = None
    vector_column: str | None = None
    columns: Sequence[str] | None = None
    keys: Path | None = None
    csv: Path | None = None
    table: Any = None
    normalised: int = field(default=0, init=False)

    def dump(self, facts: Mapping[str, str]) -> GalleryExport:
        """The content as an export. `facts` are those of `GalleryExport`.

        Raises: SourceError; EngineUnavailableError without pyarrow.
        """
        if self.files[0].suffix.lower() == _NUMPY:
            return self._of_numpy(facts)
        if self.keys or self.csv:
            raise SourceError(
                f"--keys and --csv are for {_NUMPY} files; {self.files[0]} has columns of its own."
            )
        return self._of_tables(facts)

    def _of_numpy(self, facts: Mapping[str, str]) -> GalleryExport:
        [file, *more] = self.files
        if more:
            raise SourceError(f"{file} and {more[0]}: import one {_NUMPY} file at a time.")
        vectors = read_vectors(file)
        if bool(self.keys) == bool(self.csv):
            raise SourceError(
                f"{file} has no keys. Pass a text file with one key per line as --keys, or a list "
                "with the column key as --csv, in the order of the vectors."
            )
        count = sum(1 for _ in self._listed())
        if count != len(vectors):
            raise SourceError(
                f"{self.keys or self.csv} has {count:,} keys, {file} has {len(vectors):,} vectors. "
                "Give each vector one key."
            )

        def entries() -> Iterator[Entry]:
            listed, start = self._listed(), 0
            while part := list(islice(listed, _ROWS)):
                unit = self._units(file, vectors[start : start + len(part)], [k for k, _ in part])
                for (key, attributes), vector in zip(part, unit, strict=True):
                    yield Entry(key, vector, attributes=attributes)
                start += len(part)

        return GalleryExport(facts, vectors.shape[1], len(vectors), entries)

    def _listed(self) -> Iterator[tuple[str, Mapping[str, AttributeValue]]]:
        """The keys and attributes for a NumPy file."""
        if self.csv is not None:
            for row in read_table(self.csv, ("key",), {}):
                values = {n: value for n, value in row.attributes.items() if value is not None}
                yield row.cells["key"], values
            return
        assert self.keys is not None
        yield from ((key, {}) for key in read_keys(self.keys))

    def _of_tables(self, facts: Mapping[str, str]) -> GalleryExport:
        first = self.files[0]
        with damage_explained(first):
            schema = self._dataset().schema
        key, vector = self._key_of(schema), self._vector_of(schema)
        image = [name for name in _IMAGE if name != key and name in schema.names]
        if not {"path", "sha256"} <= {*image}:
            image = []  # an image is returned only if its hash is known
        names = self.columns
        if names is None:
            names = [name for name in schema.names if name not in (key, vector, *image)]
        return self._read(facts, _Columns(key, vector, image, {name: name for name in names}))

    def _read(self, facts: Mapping[str, str], columns: "_Columns") -> GalleryExport:
        first, key, vector = self.files[0], columns.key, columns.vector
        with damage_explained(first):
            table = self._dataset()
            count = table.count_rows()
        for name in columns.attributes:
            _check_column(first, table.schema, name)

        def batches() -> Iterator[Any]:
            wanted = list(dict.fromkeys([key, vector, *columns.image, *columns.attributes]))
            with damage_explained(first):
                for batch in table.to_batches(
                    columns=wanted, batch_size=_ROWS, batch_readahead=1, fragment_readahead=1
                ):
                    if batch.num_rows:
                        yield batch

        def entries() -> Iterator[Entry]:
            row = 1
            for batch in batches():
                keys = _keys(first, batch.column(key), key, row)
                unit = self._units(first, _vectors(first, batch.column(vector), keys), keys)
                rows = _rows(batch, columns.attributes)
                images = _rows(batch, {name: name for name in columns.image})
                for number, own in enumerate(keys):
                    yield Entry(own, unit[number], attributes=rows[number], **images[number])
                row += batch.num_rows

        dim = table.schema.field(vector).type
        length = getattr(dim, "list_size", None) or next(
            (len(b.column(vector)[0]) for b in batches() if b.column(vector)[0]), 0
        )
        if not length:
            raise SourceError(f"{first}: the column {vector} has no vector.")
        return GalleryExport(facts, int(length), count, entries)

    def _dataset(self) -> Any:
        load_pyarrow()
        from pyarrow import dataset

        if self.table is not None:
            return dataset.dataset(self.table)
        if _FORMATS.get(self.files[0].suffix.lower(), "parquet") == "ipc":
            parts = list(map(_arrow, self.files))
            return dataset.dataset(parts, schema=parts[0].schema)
        checked = dataset.ParquetFragmentScanOptions(page_checksum_verification=True)
        kind = dataset.ParquetFileFormat(default_fragment_scan_options=checked)
        return dataset.dataset([str(file) for file in self.files], format=kind)

    def _key_of(self, schema: Any) -> str:
        names = schema.names
        found = self.key_column or next((name for name in _KEYS if name in names), None)
        if found is None or found not in names:
            what = f"no column {found}" if found else "no column named key, id, sku or path"
            raise SourceError(
                f"{self.files[0]} has {what}; its columns are {', '.join(names)}. Call the "
                "column of the keys key, or name it with key_column."
            )
        kind = _plain(schema.field(found).type)
        types = load_pyarrow().types
        if not (_is_text(kind) or types.is_integer(kind)):
            raise SourceError(
                f"{self.files[0]}: the column {found} is {kind}. Keys are texts or whole numbers; "
                "convert it, or name another column with key_column."
            )
        return str(found)

    def _vector_of(self, schema: Any) -> str:
        file, names = self.files[0], schema.names
        fitting = [name for name in names if _is_vector(schema.field(name).type)]
        if self.vector_column is not None:
            if self.vector_column not in names:
                raise SourceError(
                    f"{file} has no column {self.vector_column}; its columns are "
                    f"{', '.join(names)}."
                )
            if self.vector_column not in fitting:
                raise SourceError(
                    f"{file}: the column {self.vector_column} is "
                    f"{schema.field(self.vector_column).type}, not a list of floating-point "
                    "numbers."
                )
            return self.vector_column
        named = [name for name in _VECTORS if name in fitting] or fitting
        if not named or (len(named) > 1 and named == fitting):
            what = f"several columns of vectors: {', '.join(named)}" if named else "no such column"
            raise SourceError(
                f"{file} has {what}. A vector is a list of floating-point numbers; call its column "
                "vector, or name it with vector_column."
            )
        return named[0]

    def _units(self, file: Path, vectors: Any, keys: Sequence[str]) -> Any:
        units, normalised = unit_vectors(vectors, keys, str(file))
        self.normalised += normalised
        return units


def unit_vectors(vectors: Any, keys: Sequence[str], place: str) -> tuple[NDArray[np.float32], int]:
    """The vectors (N, D) with norm 1, and the number of those that had another norm.

    Raises: SourceError naming the place and the first vector that is zero or not finite.
    """
    given = np.asarray(vectors, np.float64)
    norms = norms_of(given.astype(np.float32))  # float32: that is how they are stored
    norms = np.where(np.isfinite(norms), np.sqrt((given * given).sum(axis=1)), norms)
    wrong = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
    if len(wrong):
        row = int(wrong[0])
        fault = "is zero" if norms[row] == 0 else "has NaN or infinite components"
        raise SourceError(
            f"{place}: the vector of {keys[row]!r:.200} {fault}. Correct it, or remove the row."
        )
    others = np.abs(norms - 1) > 100 * ROUNDING
    units: NDArray[np.float32] = (given / np.where(others, norms, 1)[:, None]).astype(np.float32)
    return units, int(others.sum())


def read_vectors(file: Path) -> NDArray[Any]:
    """The vectors (N, D) in a .npy file, mapped into memory. Raises: SourceError."""
    try:
        vectors = np.load(file, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        reason = error.strerror or error
        raise SourceError(f"Cannot read the vectors in {file}: {reason}.") from error
    except (ValueError, EOFError) as error:
        raise SourceError(
            f"{file} is not a .npy file of numbers. Write it with numpy.save(file, vectors)."
        ) from error
    if isinstance(vectors, NpzFile):
        raise _archive(file)
    if vectors.dtype.kind not in "fiu" or vectors.ndim not in (1, 2):
        raise SourceError(
            f"{file} contains {vectors.dtype} {vectors.shape}; expected vectors of shape (D,) or "
            "(N, D)."
        )
    if not vectors.size:
        raise SourceError(f"{file} contains no vectors: its shape is {vectors.shape}.")
    return np.atleast_2d(vectors)


def read_export(file: Path) -> GalleryExport:
    """Open a file of `export_gallery`. Columns and facts are checked now, rows when they are read.

    Raises: SourceError; EngineUnavailableError without pyarrow.
    """
    with damage_explained(file):
        schema = load_pyarrow().parquet.read_schema(file)
    for name in (*TEXTS, VECTOR):
        if name not in schema.names:
            raise SourceError(
                f"{file} has no column {name}. An export has the columns {', '.join(TEXTS)}, "
                f"{VECTOR} and {ATTRIBUTE}NAME. Use a file of `kinlens-index export`."
            )
    attributes = {name: name.removeprefix(ATTRIBUTE) for name in schema.names}
    own = {name: own for name, own in attributes.items() if own != name}
    pairs = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    facts = {
        key.removeprefix(METADATA): value
        for key, value in pairs.items()
        if key.startswith(METADATA)
    }
    found = Tables([file])._read(facts, _Columns("key", VECTOR, _IMAGE, own))
    expected = {"schema": SCHEMA, "dim": str(found.dim)}
    for name in ("name", "bundle_id", *expected):
        if facts.get(name) != expected.get(name, facts.get(name, "")):
            raise SourceError(
                f"{file}: {METADATA}{name} is {facts.get(name)!r}, expected "
                f"{expected.get(name, 'a text')}. Export the gallery again."
            )
    return found


def files_of(sources: Sequence[str]) -> list[Path]:
    """The files of foreign vectors that arguments name: files, folders and patterns with `*`.

    Raises: SourceError if there are none, or if they are of different formats.
    """
    files: list[Path] = []
    for source in sources:
        place = Path(source)
        if place.is_dir():
            files += sorted(f for f in place.rglob("*") if f.suffix.lower() in _SUFFIXES)
        else:
            files += [place] if place.exists() else sorted(place.parent.glob(place.name))
    if not files:
        raise SourceError(f"{' '.join(sources)} does not exist, or has no files of vectors.")
    formats = {file.suffix.lower() for file in files}
    if len({_FORMATS.get(suffix, suffix) for suffix in formats}) > 1 or not formats <= {*_SUFFIXES}:
        raise SourceError(
            f"{', '.join(map(str, files[:3]))}: pass files of one format, with the name ending in "
            f"{', '.join(_SUFFIXES)}."
        )
    return files


def _archive(file: Path) -> SourceError:
    return SourceError(
        f"{file} is an archive of arrays (.npz). Save the vectors alone: numpy.save('own.npy', "
        f"numpy.load({file.name!r})[NAME])."
    )


def is_foreign(file: Path) -> bool:
    """Whether a file was not written by `export`. Raises: SourceError if it cannot be read."""
    suffix = file.suffix.lower()
    if suffix == ".npz":
        raise _archive(file)
    if suffix in _SUFFIXES and _FORMATS.get(suffix) != "parquet":
        return True
    with damage_explained(file):
        schema = load_pyarrow().parquet.read_schema(file)
    return not any(name.startswith(METADATA.encode()) for name in schema.metadata or ())


def _arrow(file: Path) -> Any:
    """An Arrow file, or a stream in a file, as a dataset. Raises: SourceError if it is damaged."""
    pa = load_pyarrow()
    from pyarrow import dataset

    with damage_explained(file):
        with file.open("rb") as opened:
            start = opened.read(len(_STREAM))
            opened.seek(-min(len(_STREAM_END), file.stat().st_size), os.SEEK_END)
            end = opened.read()
        if start != _STREAM:
            return dataset.dataset(str(file), format="ipc")
        if end != _STREAM_END:
            raise pa.ArrowInvalid("the stream is not complete")
        with pa.memory_map(str(file)) as mapped:
            return dataset.dataset(pa.ipc.open_stream(mapped).read_all())


def _check_column(file: Path, schema: Any, name: str) -> None:
    """Raise SourceError unless the values of a column can be attributes. Those of different types
    are a struct in an export.
    """
    if name not in schema.names:
        raise SourceError(
            f"{file} has no column {name}; its columns are {', '.join(schema.names)}."
        )
    types, kind = load_pyarrow().types, _plain(schema.field(name).type)
    is_struct = types.is_struct(kind) and name.startswith(ATTRIBUTE)
    for part in [each.type for each in kind] if is_struct else [kind]:
        element = _plain(part.value_type) if _is_list(part) else part
        tests = (
            *(types.is_integer, types.is_floating, types.is_boolean, types.is_null),
            *(types.is_decimal, types.is_date, types.is_timestamp),
        )
        if not (_is_text(element) or any(test(element) for test in tests)):
            raise SourceError(
                f"{file}: the column {name} is {kind}. An attribute is a text, number, "
                "boolean or date, or a list of these. Convert it, or name the columns to store "
                "with `columns`."
            )


def _plain(kind: Any) -> Any:
    """The type of the values of a column, without its dictionary."""
    return kind.value_type if load_pyarrow().types.is_dictionary(kind) else kind


def _is_text(kind: Any) -> bool:
    types = load_pyarrow().types
    return any(
        test(kind) for test in (types.is_string, types.is_large_string, types.is_string_view)
    )


def _is_list(kind: Any) -> bool:
    types = load_pyarrow().types
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(test(kind) for test in (*tests, types.is_list_view, types.is_large_list_view))


def _is_vector(kind: Any) -> bool:
    return _is_list(kind) and bool(load_pyarrow().types.is_floating(kind.value_type))


def _keys(file: Path, column: Any, name: str, first: int) -> list[str]:
    keys = column.to_pylist()
    if column.null_count:
        row = first + next(number for number, key in enumerate(keys) if key is None)
        raise SourceError(f"{file}: row {row:,} has no {name}. Give each vector a key.")
    return [str(key) for key in keys]


def _vectors(file: Path, column: Any, keys: Sequence[str]) -> Any:
    """The vectors (N, D). Raises: SourceError naming the first that is missing or too short."""
    import pyarrow.compute

    counts = pyarrow.compute.list_value_length(column).to_pylist()
    lengths = np.array([-1 if count is None else count for count in counts])
    if (lengths != lengths[0]).any() or lengths[0] < 1:
        row = int(np.flatnonzero(lengths != max(lengths[0], 1))[0])
        found = "is missing" if lengths[row] < 0 else f"has {lengths[row]} components"
        raise SourceError(
            f"{file}: the vector of {keys[row]!r:.200} {found}; that of {keys[0]!r:.200} has "
            f"{max(lengths[0], 0)}. Give each row a vector of one length."
        )
    flat = column.flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(len(keys), -1)


def _rows(batch: Any, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """The values of each row, by the new name of its column."""
    pa = load_pyarrow()
    rows: list[dict[str, Any]] = [{} for _ in range(batch.num_rows)]
    for column, name in names.items():
        values = batch.column(column)
        if pa.types.is_timestamp(values.type):  # Python has no nanoseconds
            values = values.cast(pa.timestamp("us", values.type.tz), safe=False)
        for row, found in zip(rows, values.to_pylist(), strict=True):
            if isinstance(found, dict):  # values of different types, of which a row has one
                found = next((part for part in found.values() if part is not None), None)
            is_list = isinstance(found, list)
            parts = [_value(value) for value in (found if is_list else [found])]
            present = [value for value in parts if value is not None]
            if present:
                row[name] = tuple(present) if is_list else present[0]
    return rows


def _value(value: Any) -> Any:
    """A value as an attribute; None for a missing one, which pandas also writes as NaN."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float) and math.isnan(value):
        return None
    return value
