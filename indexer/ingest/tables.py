"""CSV files with typed columns: the values of attributes, as text, to their types."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

from kinlens.embedder.errors import SourceError
from kinlens.embedder.sources.tables import check_separator, csv_rows
from kinlens.indexer.entries import BOOLEANS, DATE, Schema, parse_value
from kinlens.values import AttributeType, AttributeValue

KINDS: tuple[AttributeType, ...] = get_args(AttributeType)
"""The attribute types, as written after the colon of a typed name."""


def parse_values(text: str, kind: str) -> AttributeValue:
    """The values in `S|M|L`, or in a JSON list such as ["S", "M"]. Raises: ValueError."""
    if not text.strip():
        return ()
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
            is_text = kind in ("text", DATE)
            if is_text and not all(isinstance(one, str) for one in found):
                raise TypeError
            return tuple(parse_value(one if is_text else json.dumps(one), kind) for one in found)
        except (ValueError, TypeError) as error:
            raise ValueError('expected values such as S|M|L, or ["S", "M", "L"]') from error
    return tuple(parse_value(part.strip(), kind) for part in text.split("|") if part.strip())


class Typed(NamedTuple):
    """The type of a column (None if it is not given), and whether a cell has several values."""

    kind: AttributeType | None
    is_list: bool = False
    is_date: bool = False

    def value_of(self, text: str) -> AttributeValue:
        """The value of a cell. Raises: ValueError."""
        kind = DATE if self.is_date else self.kind or "text"
        return (parse_values if self.is_list else parse_value)(text, kind)


def split_kind(typed: str) -> tuple[str, Typed]:
    """Split `price:number`, or `sizes:text[]` for several values, into the name and the type.

    Raises: ValueError for an unknown type.
    """
    name, colon, kind = (part.strip() for part in typed.rpartition(":"))
    if not colon:
        return typed.strip(), Typed(None)
    for known in KINDS:
        if kind in (known, f"{known}[]"):
            return name, Typed(known, kind != known)
    if kind in (DATE, f"{DATE}[]"):
        return name, Typed("text", kind != DATE, is_date=True)
    raise ValueError(
        f"{typed!r} names the type {kind!r}; the types are {', '.join((*KINDS, DATE))}, each also "
        f"with [] for a list. If the colon is part of the name, write {typed}:text"
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a CSV file.

    Attributes:
        position: file and line, for messages.
        cells: the text of the required columns.
        attributes: the values of the other columns; None for an empty number or boolean.
    """

    line: int
    position: str
    cells: Mapping[str, str]
    attributes: Mapping[str, AttributeValue | None]


def read_table(file: Path, required: Sequence[str], kinds: Schema) -> Iterator[Row]:
    """The rows below the header of `file`. The columns in `required` are text.

    A column `price:number` has that type, a column `sizes:text[]` several values per cell, such as
    S|M|L. A plain `price` has the type in `kinds`, or is text. The words true and false in an
    untyped column are refused, because a boolean was probably meant.

    Raises: SourceError for a missing file, column or value, or a value of another type.
    """
    rows = read_rows(file)
    columns = _checked_columns(file, next(rows, (0, []))[1], required, kinds)
    for line, row in rows:
        yield _row(file, line, row, columns, required)


def read_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, each with the number of its last line. Raises: SourceError."""
    try:
        yield from csv_rows(file)
    except OSError as error:
        raise SourceError(f"Cannot read the list {file}: {error.strerror}.") from error
    except ValueError as error:
        raise SourceError(str(error)) from error


def read_keys(file: Path) -> Iterator[str]:
    """The lines of a text file with one key per line. Raises: SourceError."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            yield from (line.rstrip("\r\n") for line in lines)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise SourceError(f"Cannot read the keys in {file}: {reason}.") from error


def listed_keys(file: Path) -> list[str]:
    """The keys in a text file with one per line, at least one. Raises: SourceError."""
    keys = [key.strip() for key in read_keys(file) if key.strip()]
    if not keys:
        raise SourceError(f"{file} has no keys. Write one key per line.")
    return keys


def _row(
    file: Path, line: int, row: list[str], columns: Mapping[str, Typed], required: Sequence[str]
) -> Row:
    position = f"{file}:{line}"
    if len(row) != len(columns):
        raise SourceError(
            f"{position} has {len(row)} values for {len(columns)} columns. Put values that contain "
            "a comma into double quotes."
        )
    texts = dict(zip(columns, row, strict=True))
    cells = {name: texts.pop(name).strip() for name in required}
    values = {name: _value(text, name, columns[name], position) for name, text in texts.items()}
    return Row(line, position, cells, values)


def _value(text: str, name: str, typed: Typed, position: str) -> AttributeValue | None:
    kind = typed.kind
    if (typed.is_list or typed.is_date or kind not in ("text", None)) and not text.strip():
        return None
    if kind is None and text.strip().lower() in BOOLEANS:
        raise SourceError(
            f"{position}: column {name} has {text!r} and no type. Name the column {name}:boolean, "
            f"or {name}:text to keep the word."
        )
    try:
        return typed.value_of(text)
    except ValueError as error:
        raise SourceError(
            f"{position}: column {name} has {text!r}, {error}. Correct the value, clear the cell, "
            f"or name the column {name}:text."
        ) from error


def _checked_columns(
    file: Path, header: Sequence[str], required: Sequence[str], kinds: Schema
) -> dict[str, Typed]:
    """The type of each column by name, in the order of the header."""
    try:
        check_separator(file, header)
    except ValueError as error:
        raise SourceError(str(error)) from error
    columns = [_column(file, typed, required, kinds) for typed in header]
    names = [name for name, _ in columns]
    missing = [name for name in required if name not in names]
    if missing:
        raise SourceError(
            f"{file} has no column {' and no column '.join(missing)}; its first line has the "
            f"columns {names}. Start the file with a line such as {','.join(required)},colour, "
            "separated by commas."
        )
    if len(set(names)) < len(names) or "" in names:
        raise SourceError(
            f"{file} has columns with the same name or without a name: {names}. Give each column "
            "its own name."
        )
    return dict(columns)


def _column(file: Path, typed: str, required: Sequence[str], kinds: Schema) -> tuple[str, Typed]:
    if typed.strip().lower() in required:
        return typed.strip().lower(), Typed("text")
    try:
        name, found = split_kind(typed)
    except ValueError as error:
        raise SourceError(f"{file}: the column {error}.") from error
    known = kinds.get(name)
    if found.kind and known and found.kind != known:
        raise SourceError(
            f"{file}: the column {typed.strip()} conflicts with the gallery, where {name} has the "
            f"type {known}. Name the column {name}, or another name, or change the type first: "
            f"kinlens-index attributes GALLERY retype {name} {found.kind}"
        )
    return name, found._replace(kind=found.kind or known)
