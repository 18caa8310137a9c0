"""What to index or to change, listed in a file: a CSV file, or a data set split."""

import os
from collections.abc import Mapping
from pathlib import Path

from embedder.errors import SourceError
from embedder.types import AttributeValue
from indexer.catalog.attributes import Schema
from indexer.catalog.entries import MAX_KEY, is_key
from indexer.ingest.sources import Record, Source, existing_folder, sorted_unique
from indexer.ingest.table import Row, read_rows, read_table

_NO_KINDS: Schema = {}


def csv_source(
    file: Path | str, root: Path | str | None = None, kinds: Schema = _NO_KINDS
) -> Source:
    """The rows of a CSV file: columns `key` and `path`, any further column is an attribute.

    A column `price:number` or `sale:boolean` has that type; others have the one in `kinds`, or are
    text. An empty cell of a number or boolean leaves the attribute out. Paths start from `root`, or
    from the folder of the file.

    Raises: SourceError for a missing file, column, value or row, a value of another type, a
        repeated key, a path that leaves the root.
    """
    file = Path(file)
    base = existing_folder(file.parent if root is None else root)
    rows = list(read_table(file, ("key", "path"), kinds))
    names = frozenset(rows[0].attributes) if rows else frozenset()
    return _listed_source(base, [(row.line, _csv_record(row, base)) for row in rows], file, names)


def split_source(file: Path | str, root: Path | str | None = None) -> Source:
    """The lines `relative/path.jpg, class, ...` of a data set's list file; the key is the path.

    The second field becomes the attribute `class`, further ones `class_2`, `class_3`, ... Paths
    start from `root`, or from the folder of the file.

    Raises: as `csv_source`.
    """
    file = Path(file)
    base = existing_folder(file.parent if root is None else root)
    records = [(line, _split_record(row, base, f"{file}:{line}")) for line, row in read_rows(file)]
    names = frozenset(name for _, record in records for name in record.attributes)
    return _listed_source(base, records, file, names)


def csv_changes(
    file: Path | str, kinds: Schema = _NO_KINDS
) -> dict[str, Mapping[str, AttributeValue | None]]:
    """Changes of attributes by key, from a CSV file: a column `key`, any other is an attribute.

    Types as in `csv_source`; an empty cell of a number or boolean takes the attribute away.

    Raises: as `csv_source`.
    """
    file = Path(file)
    changes: dict[str, Mapping[str, AttributeValue | None]] = {}
    lines: dict[str, int] = {}
    for row in read_table(file, ("key",), kinds):
        key = row.cells["key"]
        if key in changes:
            raise SourceError(
                f"{file}: the key {key!r} is on line {lines[key]} and on line {row.line}. "
                "Give each item one line."
            )
        changes[key], lines[key] = row.attributes, row.line
    if not changes:
        raise SourceError(f"{file} lists no changes. Add one line per item.")
    return changes


def _csv_record(row: Row, root: Path) -> Record:
    values = {name: value for name, value in row.attributes.items() if value is not None}
    path = _relative(row.cells["path"], root, row.place)
    return Record(_checked_key(row.cells["key"], row.place), path, values)


def _split_record(row: list[str], root: Path, place: str) -> Record:
    path, *labels = (value.strip() for value in row)
    names = ["class", *(f"class_{n}" for n in range(2, len(labels) + 1))]
    relative = _relative(path, root, place)
    return Record(relative, relative, dict(zip(names, labels, strict=False)))


def _checked_key(key: str, place: str) -> str:
    if not is_key(key):
        raise SourceError(
            f"{place}: the key {key!r} cannot be used. Give a name of up to {MAX_KEY:,} "
            "characters, without control characters and without '..' as a part."
        )
    return key


def _relative(path: str, root: Path, place: str) -> str:
    if not path or "\0" in path:
        raise SourceError(f"{place}: the path {path!r} is not the name of a file.")
    relative = os.path.relpath(root / path, root)
    if relative == ".." or relative.startswith("../"):
        raise SourceError(
            f"{place}: the path {path!r} leads out of {root}. Keep the images below one folder "
            "and name it as the root."
        )
    return relative


def _listed_source(
    root: Path, records: list[tuple[int, Record]], file: Path, names: frozenset[str]
) -> Source:
    if not records:
        raise SourceError(f"{file} lists no images. Add one line per image.")
    return Source(root, sorted_unique(records, file), f"list {file.resolve()}", names)
