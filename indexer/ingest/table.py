"""A CSV file with typed columns, read row by row."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embedder.errors import SourceError
from embedder.types import AttributeValue
from indexer.catalog.attributes import AttributeKind, Schema
from indexer.ingest.values import BOOLEANS, parse_value, split_kind


@dataclass(frozen=True, slots=True)
class Row:
    """One row: the text of the columns that had to be there, and the values of all others.

    A value is None where the cell of a number or boolean is empty.
    """

    line: int
    place: str
    cells: Mapping[str, str]
    attributes: Mapping[str, AttributeValue | None]


def read_table(file: Path, required: Sequence[str], kinds: Schema) -> Iterator[Row]:
    """The rows below the header of `file`, whose columns `required` stay text.

    A column `price:number` has that type, a plain `price` the one in `kinds`, or is text; true and
    false as text are refused, since a boolean was meant.

    Raises: SourceError for a missing file, column or value, and a value of another type.
    """
    rows = read_rows(file)
    columns = _checked_columns(file, next(rows, (0, []))[1], required, kinds)
    for line, row in rows:
        yield _row(file, line, row, columns, required)


def read_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not empty, each with the number of its last line. Raises: SourceError."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text, skipinitialspace=True, strict=True)
            yield from ((reader.line_num, row) for row in reader if row)
    except OSError as error:
        raise SourceError(f"Cannot read the list {file}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{file} is not UTF-8 text ({error}). Save it as UTF-8.") from error
    except csv.Error as error:
        raise SourceError(f"{file} is not a valid CSV file: {error}. Check its quotes.") from error


def _row(
    file: Path,
    line: int,
    row: list[str],
    columns: Mapping[str, AttributeKind | None],
    required: Sequence[str],
) -> Row:
    place = f"{file}:{line}"
    if len(row) != len(columns):
        raise SourceError(
            f"{place} has {len(row)} values for {len(columns)} columns. Put values that contain a "
            "comma into double quotes."
        )
    texts = dict(zip(columns, row, strict=True))
    cells = {name: texts.pop(name).strip() for name in required}
    values = {name: _value(text, name, columns[name], place) for name, text in texts.items()}
    return Row(line, place, cells, values)


def _value(text: str, name: str, kind: AttributeKind | None, place: str) -> AttributeValue | None:
    if kind not in ("text", None) and not text.strip():
        return None
    if kind is None and text.strip().lower() in BOOLEANS:
        raise SourceError(
            f"{place}: column {name} has {text!r} and no type. Name the column {name}:boolean, or "
            f"{name}:text to keep the word."
        )
    try:
        return parse_value(text, kind or "text")
    except ValueError as error:
        raise SourceError(
            f"{place}: column {name} has {text!r}, {error}. Mend the value, leave it empty, or "
            f"name the column {name}:text."
        ) from error


def _checked_columns(
    file: Path, header: Sequence[str], required: Sequence[str], kinds: Schema
) -> dict[str, AttributeKind | None]:
    """The kind of each column by its name, in the order of the header; None: text unless it looks
    like something else.
    """
    columns = [_column(file, typed, required, kinds) for typed in header]
    names = [name for name, _ in columns]
    missing = [name for name in required if name not in names]
    if missing:
        raise SourceError(
            f"{file} has no column {' and no column '.join(missing)}; its first line names "
            f"{names}. Begin the file with a line such as {','.join(required)},colour (commas "
            "between)."
        )
    if len(set(names)) < len(names) or "" in names:
        raise SourceError(
            f"{file} names a column twice or not at all: {names}. Give each column its own name."
        )
    return dict(columns)


def _column(
    file: Path, typed: str, required: Sequence[str], kinds: Schema
) -> tuple[str, AttributeKind | None]:
    if typed.strip() in required:
        return typed.strip(), "text"
    try:
        name, kind = split_kind(typed)
    except ValueError as error:
        raise SourceError(f"{file}: the column {error}.") from error
    known = kinds.get(name)
    if kind and known and kind != known:
        raise SourceError(
            f"{file}: the column {typed.strip()} does not fit the gallery, where {name} is a "
            f"{known}. Name the column {name}, or give the attribute another name."
        )
    return name, kind or known
